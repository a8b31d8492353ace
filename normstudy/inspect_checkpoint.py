"""A checkpoint, opened with the config beside it, as a table of its layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from normstudy import checkpoint, config, corpus, data, mesh, record, train

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
    text = corpus.load(run.data.corpus)
    train_tokens, val_tokens = text.split(run.data.val_fraction)
    frequencies = corpus.unigram(train_tokens, run.model.vocab)
    batch = data.batches(
        val_tokens, run.model.context, run.probe.probe_batch, run.data.data_seed, run.model.vocab
    )[0]
    key = jax.random.fold_in(jax.random.key(run.seed), step)
    unigram = jnp.asarray(frequencies, jnp.float32)
    found = jax.device_get(
        compiled.measure(state.model, mesh.put_batch(devices, batch), unigram, key)
    )
    header = {
        "checkpoint": f"step {step} of {folder.name}",
        "placement": run.model.placement,
        "loss (nats, probe batch)": float(found["probe_loss"]),
        "unigram entropy H1 (nats)": corpus.entropy(frequencies),
        "KL(unigram || prediction) (nats)": float(found["unigram_kl"]),
        "vectors": vectors,
    }
    rows = [
        {"layer": layer, **{name: float(found[name][layer]) for name in COLUMNS}}
        for layer in range(run.model.layers)
    ]
    return header, rows
