"""How much of an accelerator does a step use, and what does a whole grid in one program gain?

Two things of one device: a model of width 1024 in bfloat16, as a share of what the device can do;
and 64 runs of the study's small model in one program against one of them alone.

Command   python experiments/gpu_benchmark.py --csv experiments/results/gpu.csv
Time      at most 8 minutes, most of it compiling; one GPU
Expect    model FLOPs utilization of at least 40 per cent; 64 runs together at least 10 times as
          fast as one after another

It needs no installation: run from the root of the source tree, with PYTHONPATH=. and the
dependencies of pyproject.toml.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from work import attention_flops, matmul_flops

from normstudy import cli, config, frames, mesh, programs, runtime, tables
from normstudy.errors import UserError
from normstudy.progress import say

LR = 1e-3
TERA = 1e12
SIDE = 4096  # of the matmul beside which a step is shown
# dense bfloat16, FLOP/s, without sparsity, by NVIDIA's data sheets; the longest name that fits
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "L4": 121e12,
}


@dataclass(frozen=True)
class Options:
    """What to time; the defaults are what the card expects numbers of."""

    layers: int = 48  # L of both models
    width: int = 1024  # D of the large one; 64 channels a head, 4 D units
    context: int = 1024  # T of the large one, tokens
    batch: int = 16  # B of the large one, sequences
    dtype: str = "bfloat16"  # of the large one
    members: int = 64  # runs together, of the small one
    small_width: int = 64
    small_context: int = 64
    steps: int = 10  # timed, after two that are not
    csv: Path | None = None

    def __post_init__(self):
        if self.width % 64:
            raise UserError(f"width must be a multiple of 64, not {self.width}")
        if self.csv and not self.csv.parent.is_dir():
            raise UserError(f"{self.csv}: the folder {self.csv.parent} does not exist")


def main(argv: Sequence[str]) -> None:
    options = tyro.cli(Options, args=list(argv), description=__doc__)
    runtime.start()
    device = jax.devices()[0].device_kind
    rows = [{"device": device, **row} for row in (*large(options, device), *grid(options))]
    print(tables.text(rows))
    if options.csv:
        options.csv.write_text(frames.to_csv(rows), encoding="utf-8")
        say(f"rows: {options.csv}")


def large(options: Options, device: str) -> list[dict[str, Any]]:
    """One large model: seconds a step, and what share of the device that is."""
    shape = {name: getattr(options, name) for name in ("layers", "width", "context", "batch")}
    run = config.override(
        config.Run(), **shape, heads=options.width // 64, ff=4 * options.width,
        dtype=options.dtype, placement="deepnorm", probe_batch=options.batch,
    )  # fmt: skip
    compiled, devices = programs.of(run)
    state = programs.initial_state(run, compiled)
    batch = tokens(run, devices)
    say(f"compiling {run.model.layers} layers of width {run.model.width}")
    first, step = timed(lambda state: compiled.step(state, batch, jnp.float32(LR)), state, options)
    flops = matmul_flops(run) + attention_flops(run)
    rate, name = flops / step, f"{options.layers} layers, width {options.width}, {options.dtype}"
    found = [
        row(f"{name}: first step, compiling included", first, "seconds"),
        row(f"{name}: a step", step, "seconds"),
        row(f"{name}: speed", run.data.batch * run.model.context / step, "tokens/s"),
        row(f"{name}: model FLOPs of a step", flops / TERA, "TFLOP"),
        row(f"{name}: rate", rate / TERA, "TFLOP/s"),
        row(f"a matmul of {SIDE} x {SIDE} in bfloat16", matmul_rate() / TERA, "TFLOP/s"),
    ]
    known = [peak for part, peak in PEAKS.items() if part in device]
    if known:  # of several, the one whose name says more stands first
        peak = known[0] * devices.size
        found.append(row(f"{name}: model FLOPs utilization", 100 * rate / peak, "per cent"))
    else:
        say(f"no data sheet is known of {device}: no utilization, see the matmul beside it")
    return found


def grid(options: Options) -> list[dict[str, Any]]:
    """The study's model: so many runs as one program, against one alone."""
    run = config.override(
        config.Run(), layers=options.layers, width=options.small_width, heads=4,
        ff=4 * options.small_width, context=options.small_context, placement="deepnorm",
    )  # fmt: skip
    compiled, devices = programs.of(run)
    members = [config.override(run, seed=seed) for seed in range(options.members)]
    batch = tokens(run, devices)
    name = f"{options.layers} layers, width {options.small_width}"
    say(f"compiling one run of {name}")
    alone = programs.initial_state(run, compiled)
    _, one = timed(lambda state: compiled.step(state, batch, jnp.float32(LR)), alone, options)
    say(f"compiling {options.members} runs of it")
    together = programs.ensemble_of(run, options.members)
    states = together.join(*(programs.initial_state(member, compiled) for member in members))
    rates = jnp.full(options.members, LR, jnp.float32)
    first, all_of = timed(lambda states: together.step(states, batch, rates), states, options)
    return [
        row(f"{name}: a step of one run", one, "seconds"),
        row(f"{name}: first step of {options.members} together", first, "seconds"),
        row(f"{name}: a step of {options.members} together", all_of, "seconds"),
        row(f"{name}: {options.members} together, beside one after another",
            options.members * one / all_of, "times the speed"),
    ]  # fmt: skip


def timed(step: Callable, state: Any, options: Options) -> tuple[float, float]:
    """(seconds of the first step, seconds of a later one): dispatched in a row, as in training."""
    begin = time.perf_counter()
    state, metrics = jax.block_until_ready(step(state))
    first = time.perf_counter() - begin
    state, metrics = jax.block_until_ready(step(state))
    begin = time.perf_counter()
    for _ in range(options.steps):
        state, metrics = step(state)
    jax.block_until_ready((state, metrics))
    seconds = (time.perf_counter() - begin) / options.steps
    if not bool(jnp.all(metrics["alive"])):
        raise UserError("a loss was not finite: the time of such steps says nothing")
    return first, seconds


def matmul_rate() -> float:
    """FLOP/s of one large product on one device."""
    a = jnp.ones((SIDE, SIDE), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    product(a).block_until_ready()
    begin = time.perf_counter()
    for _ in range(5):
        found = product(a)
    found.block_until_ready()
    return 5 * 2 * SIDE**3 / (time.perf_counter() - begin)


def tokens(run: config.Run, devices: Any) -> jax.Array:
    """A batch (B, T + 1) of random tokens on the mesh: what they say takes no time."""
    shape = (run.data.batch, run.model.context + 1)
    drawn = np.random.default_rng(0).integers(0, run.model.vocab, shape, np.int32)
    return mesh.put_batch(devices, drawn)


def row(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": float(value), "unit": unit}


if __name__ == "__main__":
    cli.guarded(main)
