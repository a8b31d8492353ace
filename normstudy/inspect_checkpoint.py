"""A checkpoint, opened with the config beside it, as a table of its layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from normstudy import checkpoint, config, data, mesh, record, train

COLUMNS = (
    "jacobian_to_end", "jacobian_to_end_se", "jacobian_of_block", "jacobian_of_block_se",
    "skip_gain", "stream_gradient", "branch_share/attn", "branch_share/mlp", "similarity", "rms",
)  # fmt: skip


def table(path: Path, step: int | None, vectors: int) -> tuple[dict[str, Any], list[dict]]:
    """(header, one row per layer) of the checkpoint at `path`, on the devices that are here.

    Raises UserError when there is no such checkpoint, or its shapes are not those of its config.
    """
    folder, step = checkpoint.locate(path, step)
    saved = record.load_config(folder)
    # the mesh that saved it does not matter here
    run = dataclasses.replace(
        saved, mesh=config.Mesh(), probe=dataclasses.replace(saved.probe, vectors=vectors)
    )
    compiled, devices = train.programs_for(run)
    state = checkpoint.restore(folder, step, compiled.abstract)
    feed = data.feed(run)
    batch = mesh.put_batch(devices, feed.probe_batch)
    key = train.probe_key(run, step)
    found = jax.device_get(compiled.measure(state.model, batch, jnp.asarray(feed.unigram), key))
    header = {
        "checkpoint": f"step {step} of {folder.name}",
        "placement": run.model.placement,
        "loss (nats, probe batch)": float(found["probe_loss"]),
        "unigram entropy H1 (nats)": feed.h1,
        "KL(unigram || prediction) (nats)": float(found["unigram_kl"]),
        "vectors": vectors,
    }
    factors = tuple(sorted(name for name in found if name.startswith("norm_factor")))
    rows = [
        {"layer": layer, **{name: float(found[name][layer]) for name in (*COLUMNS, *factors)}}
        for layer in range(run.model.layers)
    ]
    return header, rows
