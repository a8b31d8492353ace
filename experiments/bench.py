"""What do probes cost, in plain training steps?

Ratios within one run, medians over repetitions: absolute times of this or that machine say little.

Command   make bench      or   python experiments/bench.py --json bench.json
Time      3 minutes on two CPU cores
Expect    the Jacobian norms of all layers, 8 vectors, at most 12 plain steps (48 layers, width 64);
          probing at the default cadence at most 10% of the wall time of make reproduce
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normstudy import cli, config, data, mesh, probes, programs, record, tables, train
from normstudy.errors import UserError
from normstudy.progress import say

WIDTH, VECTORS = 64, 8  # of the bench; layers, context and batch are those of the cpu preset
ROWS = 32  # of the full Jacobian that are really made; its cost is theirs times rows / ROWS
ARMS, SHAPES = 10, 3  # of make reproduce: arms, and programs that they share


def main(argv: Sequence[str]) -> None:
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    if argv and (argv[0] != "--json" or len(argv) != 2):
        raise UserError("bench takes --json FILE and nothing else")
    mesh.start()
    rows = [*jacobians(), *cadence()]
    print(tables.text(rows))
    if argv:
        text = json.dumps({row["what"]: row for row in rows}, indent=2) + "\n"
        Path(argv[1]).write_text(text, encoding="utf-8")


def jacobians() -> list[dict[str, Any]]:
    """Costs of Jacobian norms beside a plain step, of the same batch of training sequences."""
    run = config.override(config.PRESETS["cpu"], width=WIDTH, ff=4 * WIDTH, vectors=VECTORS)
    compiled, devices = programs.of(run)
    feed, lr = data.feed(run), jnp.float32(1e-3)
    state = programs.initial_state(run, compiled)
    batch = mesh.put_batch(devices, feed.batches[0])
    probe_batch = mesh.put_batch(devices, feed.probe_batch)
    unigram, key = jnp.asarray(feed.unigram), train.probe_key(run, 0)

    def stack(model: Any, batch: Any) -> tuple[Callable, Any]:
        x0 = model.start(batch[:, :-1])
        nudge = jnp.zeros((model.cfg.layers + 1, *x0.shape), x0.dtype)
        return (lambda n: model.stack(x0, n)[0]), nudge

    @jax.jit
    def all_layers(model, batch, key):
        return probes.jacobian_to_end(*stack(model, batch), key, VECTORS)

    @jax.jit
    def some_rows(model, batch):
        """ROWS rows of d x_L / d (x_0..x_L), one backward pass each, as jax.jacrev makes them."""
        function, nudge = stack(model, batch)
        top, pull = jax.vjp(function, nudge)
        basis = jnp.eye(ROWS, top.size, dtype=top.dtype).reshape(ROWS, *top.shape)
        return jax.lax.map(lambda row: jnp.sum(pull(row)[0] ** 2), basis)

    step_state = state

    def plain() -> Any:
        nonlocal step_state
        step_state, metrics = compiled.plain(step_state, batch, lr)
        return metrics

    model = jax.tree.map(jnp.copy, state.model)  # the plain step gives its state away
    one = seconds(plain)
    eight = seconds(lambda: all_layers(model, batch, key))
    rows = batch.shape[0] * run.model.context * run.model.width
    exact = seconds(lambda: some_rows(model, batch), times=3) * rows / ROWS
    whole = seconds(lambda: compiled.measure(model, probe_batch, unigram, key))
    unit = f"plain steps ({run.model.layers} layers, width {WIDTH})"
    return [
        row("a plain training step", one, "seconds"),
        row(f"Jacobian norms of all layers, {VECTORS} vectors, same batch", eight / one, unit),
        row(f"the same by jacrev (from {ROWS} of {rows} rows)", exact / one, unit),
        row("a whole probe, half the batch", whole / one, unit),
    ]


def cadence() -> list[dict[str, Any]]:
    """What probing adds to an arm of make reproduce, from the seconds that it logs itself."""
    run = config.PRESETS["cpu"]
    say(f"training one arm of make reproduce ({run.steps} updates)")
    with tempfile.TemporaryDirectory() as folder:
        train.train(run, Path(folder) / "run", "bench")
        logged = record.read_rows(Path(folder) / "run" / record.METRICS)
    probed = train.probe_steps(run.steps, run.probe.probe_every)
    # a row's seconds end when the step after it has been dispatched: compiling falls on rows 0 to 3
    late = [r for r in logged if r["step"] > 3]
    typical = statistics.median(r["seconds"] for r in late if r["step"] not in probed)
    added = [max(r["seconds"] - typical, 0.0) for r in late if r["step"] in probed]
    each = statistics.median(added)
    compiling = sum(r["seconds"] for r in logged if r["step"] <= 3)
    arm = run.steps * typical + len(probed) * each
    total = ARMS * arm + SHAPES * compiling
    share = (ARMS * len(probed) * each + SHAPES * compiling / 2) / total
    return [
        row(f"a probe in make reproduce ({len(probed)} in {run.steps} steps)", each / typical,
            "plain steps (width 32)"),
        row("probing's share of make reproduce, half of compiling counted as its own",
            100 * share, "per cent"),
    ]  # fmt: skip


def seconds(call: Callable[[], Any], times: int = 7) -> float:
    """Median wall time of a call after a first one that compiles."""
    jax.block_until_ready(call())
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
    return float(np.median(taken))


def row(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": float(value), "unit": unit}


if __name__ == "__main__":
    cli.guarded(main)
