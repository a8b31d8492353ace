"""How long is a training step, beside the matrix products in it and beside other people's code?

And how does compiling it grow with depth, and what do probes cost? All in one run: contenders take
turns, each in a process of its own, one call each a round. Values are medians over the rounds,
ratios medians of the ratios within a round, so that a busy minute is in both halves of them. What
a step has to trace and compile falls on the first one, which has a row of its own.

The floor: the work of the step's matrix products, 6 x entries of the matrices x tokens (2 forward,
4 backward; without the core of attention, and without what is computed twice), at the rate of a
large float32 product on the same devices. A step that reached it would do nothing else.

Command   make bench ARGS="--json experiments/results/bench.json --figure bench.png"
          make bench ARGS="--sections step --rounds 25 --compiled"
Time      6 minutes on two CPU cores; --compiled: two to five more; section reproduce, which runs
          make reproduce six times: 20 more
Expect    a table, and as --json, --csv, --figure say. A plain step at most 0.6 of torch's and
          transformers' (pip install -e '.[bench]'), at 30% of the matmul's rate or more; 1000
          layers compiled in the time of 48; the Jacobian norms of all layers, 8 vectors, at most 12
          plain steps; probing adds at most 10% to the time of make reproduce (section reproduce)
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import compiling
import contenders
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from work import matmul_flops

from normstudy import (
    cli,
    config,
    data,
    figures,
    frames,
    mesh,
    probe_figure,
    probes,
    programs,
    runtime,
    tables,
    train,
)
from normstudy.errors import UserError, choose
from normstudy.progress import say

SECTIONS = ("step", "depth", "probes", "reproduce")
COMPILED = "torch compiled"
PEERS = {"torch eager": ("torch", "transformers"), COMPILED: ("torch", "transformers")}
PAUSE = 0.05  # seconds before a call: threads of the one before it have gone to sleep
SLOW_ROUNDS = 3  # of what takes seconds each
MIB, GIGA = 2**20, 1e9

VECTORS = 8  # of the Jacobian norms that are timed
ROWS = 32  # of the full Jacobian that are really made; its cost is theirs times rows / ROWS
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Options:
    """What to measure, and where to write it."""

    layers: int = 48  # L, blocks
    width: int = 64  # D; 4 heads, 4 D units
    context: int = 64  # T, tokens
    batch: int = 16  # B, sequences
    rounds: int = 15  # one call of each contender in each
    compiled: bool = False  # torch.compile as well: minutes for its first step
    depths: tuple[int, ...] = (12, 48, 192, 1000)  # of section depth, beside the layers above
    sections: str = "step,depth,probes"  # any of these and reproduce, with commas between them
    json: Path | None = None
    csv: Path | None = None
    figure: Path | None = None  # .png, .pdf or .svg, of sections step and depth

    def __post_init__(self):
        for name in self.chosen:
            choose("section", name, SECTIONS)
        if self.rounds < 1:
            raise UserError(f"rounds must be at least 1, not {self.rounds}")
        if self.compiled and "step" not in self.chosen:
            raise UserError("--compiled is of section step: add it to --sections")
        if self.figure:
            probe_figure.check(self.figure)
            if not {"step", "depth"} & set(self.chosen):
                raise UserError("--figure draws sections step and depth: add one to --sections")
        for path in (self.json, self.csv):
            if path and not path.parent.is_dir():
                raise UserError(f"{path}: the folder {path.parent} does not exist")

    @property
    def chosen(self) -> list[str]:
        return [name.strip() for name in self.sections.split(",")]


def run_of(options: Options, layers: int | None = None) -> config.Run:
    """The run whose step is timed: post-norm, the cpu preset but for its shape."""
    return config.override(
        config.PRESETS["cpu"], placement="post", layers=layers or options.layers,
        width=options.width, heads=4, ff=4 * options.width, context=options.context,
        batch=options.batch,
    )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    options = tyro.cli(Options, args=list(argv), description=__doc__)
    run, rows, steps, compiles = run_of(options), [], None, None
    if "step" in options.chosen:  # first: this process does nothing else yet
        steps = measure_steps(run, options)
        rows += step_rows(run, steps)
    if {"depth", "probes"} & set(options.chosen):
        runtime.start(cache=False)
    if "depth" in options.chosen:
        compiles = measure_compiles(options)
        rows += depth_rows(compiles, options.layers)
    if "probes" in options.chosen:
        rows += [*jacobians(run, options.rounds), *cadence(options.rounds)]
    if "reproduce" in options.chosen:
        rows += reproduction(min(SLOW_ROUNDS, options.rounds))
    print(tables.text(rows))
    for note in steps.left_out if steps else []:
        print(f"left out: {note}")
    write(rows, steps, compiles, options)


# ------------------------------------------------------------------------------------------ rounds


def interleaved(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds (rounds,) that each call says it took, called in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        for name, call in calls.items():
            time.sleep(PAUSE)
            taken[name].append(call())
        say(f"round {i + 1} of {rounds}")
    return {name: np.array(seconds) for name, seconds in taken.items()}


def paired(values: np.ndarray, by: np.ndarray) -> float:
    """Median of the ratios within the rounds, not ratio of the medians."""
    return float(np.median(values / by))


def row(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": float(value), "unit": unit}


# -------------------------------------------------------------------------------------------- step


class Steps(NamedTuple):
    """What the contenders of section step answered."""

    seconds: dict[str, np.ndarray]  # of each, (rounds,)
    facts: dict[str, dict[str, Any]]  # of each, after its first step
    peaks: dict[str, int]  # bytes, of each process
    floor: np.ndarray  # seconds of the step's matrix products at the rate of the floor, (rounds,)
    left_out: list[str]  # who, why, and how to have it


def measure_steps(run: config.Run, options: Options) -> Steps:
    """Start all contenders, one after the other, then let them step in turns."""
    workers: dict[str, contenders.Worker] = {}
    with ExitStack() as stack:

        def start(name: str) -> None:
            say(f"first step of {name}")
            workers[name] = stack.enter_context(contenders.Worker(name, run))

        start("matmul")
        peers, left_out = entrants(options.compiled, workers["matmul"].facts["platform"])
        for name in ("ours", "ours, probing", "ours, together", *peers):
            start(name)
        calls = {name: worker.step for name, worker in workers.items()}
        seconds = interleaved(calls, options.rounds)
        seconds["ours, together"] /= workers["ours, together"].facts["members"]
        facts = {name: worker.facts for name, worker in workers.items()}
        peaks = {name: worker.peak for name, worker in workers.items()}
    floor = matmul_flops(run) / facts["matmul"]["flops"] * seconds["matmul"]
    return Steps(seconds, facts, peaks, floor, left_out)


def entrants(compiled: bool, platform: str = "cpu") -> tuple[list[str], list[str]]:
    """(peers that can take part, a line on each that does not)."""
    present, absent = [], []
    for name, packages in PEERS.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            absent.append(
                f"{name}, for {' and '.join(missing)} cannot be imported; "
                "have it by: pip install -e '.[bench]'"
            )
        elif platform != "cpu":
            absent.append(f"{name}, which is timed on CPUs alone, not beside a {platform}")
        elif name == COMPILED and not compiled:
            absent.append(f"{name}, whose first step takes minutes; have it by: --compiled")
        else:
            present.append(name)
    return present, absent


def step_rows(run: config.Run, steps: Steps) -> list[dict[str, Any]]:
    """The table of section step."""
    floor, facts = steps.facts["matmul"], steps.facts
    rate = floor["flops"] / steps.seconds["matmul"]
    shape, tokens = run.model, run.data.batch * run.model.context
    unit = f"plain steps of ours ({shape.layers} layers, width {shape.width})"
    found = [
        row(f"rounds of {contenders.STEPS} steps each, in turns: medians", len(rate), "rounds"),
        row(
            f"matmul: float32, {floor['side']} x {floor['side']}, one on each of "
            f"{floor['devices']} devices", np.median(rate) / GIGA, "GFLOP/s",
        ),
        row("matmul: work of a plain step, attention core left out",
            matmul_flops(run) / GIGA, "GFLOP"),
        row("matmul: that work at that rate, the floor", np.median(steps.floor), "seconds"),
    ]  # fmt: skip
    for name, seconds in steps.seconds.items():
        if name == "matmul":
            continue
        each = f", for each of {facts[name]['members']} runs" if "members" in facts[name] else ""
        found.append(row(f"{name}: a step{each}", np.median(seconds), "seconds"))
        if name != "ours":
            found.append(
                row(f"{name}: a step, beside ours", paired(seconds, steps.seconds["ours"]), unit)
            )
        if name != "ours, probing":  # most of its work is not the step's
            share = paired(steps.floor, seconds)
            found += [
                row(f"{name}: of the matmul rate", 100 * share, "per cent"),
                row(f"{name}: speed", np.median(tokens / seconds), "tokens/s"),
            ]
        found.append(row(f"{name}: first step", facts[name]["seconds"], "seconds"))
        if "memory" in facts[name]:
            what = f"{name}: memory of the compiled step, each device"
            found.append(row(what, facts[name]["memory"] / MIB, "MiB"))
        found.append(row(f"{name}: peak memory of its process", steps.peaks[name] / MIB, "MiB"))
    return found


# ------------------------------------------------------------------------------------------- depth


def measure_compiles(options: Options) -> dict[int, list[compiling.Compiled]]:
    """{layers: compilations of the plain step}, the depths in turns."""
    taken = {layers: [] for layers in sorted({*options.depths, options.layers})}
    for i in range(rounds := min(SLOW_ROUNDS, options.rounds)):
        for layers, compilations in taken.items():
            compilations.append(compiling.plain_step(run_of(options, layers)))
        say(f"compiling: round {i + 1} of {rounds}")
    return taken


def depth_rows(taken: dict[int, list[compiling.Compiled]], layers: int) -> list[dict[str, Any]]:
    """The table of section depth; ratios are to so many layers."""
    traces, compiles = (
        {depth: np.array([getattr(one, name) for one in own]) for depth, own in taken.items()}
        for name in ("trace", "compile")
    )
    found = [row("rounds of compiling, in turns", len(compiles[layers]), "rounds")]
    for depth in taken:
        what, unit = f"a plain step of {depth} layers", f"those of {layers} layers"
        both = traces[depth] + compiles[depth], traces[layers] + compiles[layers]
        found += [
            row(f"tracing {what}", np.median(traces[depth]), "seconds"),
            row(f"compiling {what}", np.median(compiles[depth]), "seconds"),
        ]
        if depth != layers:
            found.append(row(f"tracing and compiling {what}", paired(*both), unit))
    return found


# ------------------------------------------------------------------------------------------ probes


def jacobians(run: config.Run, rounds: int) -> list[dict[str, Any]]:
    """Costs of Jacobian norms beside a plain step, of the same batch of training sequences."""
    run = config.override(run, vectors=VECTORS)
    compiled, devices = programs.of(run)
    feed, lr = data.feed(run), jnp.float32(contenders.LR)
    state = programs.initial_state(run, compiled)
    batch = mesh.put_batch(devices, feed.batches[0])
    probe_batch = mesh.put_batch(devices, feed.probe_batch)
    unigram, key = jnp.asarray(feed.unigram), jax.random.key(0)

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

    step_state, model = state, jax.tree.map(jnp.copy, state.model)  # a step gives its state away

    def step() -> Any:
        nonlocal step_state
        step_state, metrics = compiled.step(step_state, batch, lr)
        return step_state, metrics

    say("compiling the probes")
    plain = stopwatch(step)
    fast = interleaved(
        {
            "plain": plain,
            "norms": stopwatch(lambda: all_layers(model, batch, key)),
            "whole": stopwatch(lambda: compiled.measure(model, probe_batch, unigram, key)),
        },
        rounds,
    )
    calls = {"plain": plain, "rows": stopwatch(lambda: some_rows(model, batch))}
    slow = interleaved(calls, min(SLOW_ROUNDS, rounds))
    rows = batch.shape[0] * run.model.context * run.model.width
    exact = paired(slow["rows"], slow["plain"]) * rows / ROWS
    unit = f"plain steps ({run.model.layers} layers, width {run.model.width})"
    return [
        row(f"rounds of probes, in turns; of jacrev: {len(slow['rows'])}", rounds, "rounds"),
        row("a plain training step, in these rounds", np.median(fast["plain"]), "seconds"),
        row(
            f"Jacobian norms of all layers, {VECTORS} vectors, same batch",
            paired(fast["norms"], fast["plain"]), unit,
        ),
        row(f"the same by jacrev (from {ROWS} of {rows} rows)", exact, unit),
        row("a whole probe, half the batch", paired(fast["whole"], fast["plain"]), unit),
    ]  # fmt: skip


def stopwatch(call: Callable[[], Any]) -> Callable[[], float]:
    """The call made once, to compile it; from then on it says how many seconds it took."""
    jax.block_until_ready(call())

    def timed() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - begin

    return timed


def cadence(rounds: int) -> list[dict[str, Any]]:
    """A probe of make reproduce beside its step, and what both take to compile."""
    run = config.PRESETS["cpu"]
    compiled, devices = programs.of(run)
    feed, lr = data.feed(run), jnp.float32(contenders.LR)
    state = programs.initial_state(run, compiled)
    batch = mesh.put_batch(devices, feed.batches[0])
    held_out = mesh.put_batch(devices, feed.probe_batch)
    unigram, key = jnp.asarray(feed.unigram), jax.random.key(0)

    def step() -> Any:
        nonlocal state
        state, metrics = compiled.step(state, batch, lr)
        return state, metrics

    def probe() -> Any:
        before = jax.tree.map(jnp.copy, state.model)
        found = compiled.measure(before, held_out, unigram, key)
        return found, compiled.effect(before, state.model, batch)

    say("compiling what make reproduce runs")
    ours = {
        "step": (compiled.step, state, batch, lr),
        "measure": (compiled.measure, state.model, held_out, unigram, key),
        "effect": (compiled.effect, state.model, state.model, batch),
    }
    seconds = {name: [] for name in ours}
    for _ in range(min(SLOW_ROUNDS, rounds)):
        for name, program in ours.items():
            found = compiling.from_nothing(*program)
            seconds[name].append(found.trace + found.compile)
    compiles = {name: statistics.median(own) for name, own in seconds.items()}
    taken = interleaved({"step": stopwatch(step), "probe": stopwatch(probe)}, rounds)
    each = paired(taken["probe"], taken["step"])
    probed = len(train.probe_steps(run.steps, run.probe.probe_every))
    return [
        row("tracing and compiling a step of make reproduce", compiles["step"], "seconds"),
        row("tracing and compiling its probe", compiles["measure"] + compiles["effect"], "seconds"),
        row(f"a probe in make reproduce ({probed} in {run.steps} steps)", each,
            "plain steps (width 32)"),
        row("what probing adds to the steps of make reproduce, once its programs are compiled",
            100 * probed * each / run.steps, "per cent"),
    ]  # fmt: skip


# --------------------------------------------------------------------------------------- reproduce


def reproduction(rounds: int, preset: str = "cpu") -> list[dict[str, Any]]:
    """What probing adds to the wall time of make reproduce: the whole of it, in processes of its
    own, with probes and without, in turns; each finds no compiled program. Drawing is timed once.
    """
    reproduce = [str(HERE / "reproduce.py"), "--preset", preset, "--no-draw"]
    taken: dict[str, list[float]] = {"probing": [], "plain": []}
    with tempfile.TemporaryDirectory() as scratch:
        for i in range(rounds):
            for name in sorted(taken, reverse=i % 2 == 1):  # each is first by turns
                folder = Path(scratch) / f"{name}_{i}"
                without = [] if name == "probing" else ["--probe-every", "0"]
                command = [*reproduce, "--out", str(folder / "out"), *without]
                taken[name].append(_seconds(command, folder))
                say(f"reproducing, {name}: {taken[name][-1]:.0f} s, round {i + 1} of {rounds}")
        folder = Path(scratch) / "probing_0"
        draw = "from normstudy.cli import main; main()"
        drawing = _seconds(["-c", draw, "figures", str(folder / "out")], folder)
    probing, plain = (np.array(own) for own in taken.values())
    added = 100 * (probing - plain) / (plain + drawing)
    return [
        row("rounds of make reproduce, in turns", rounds, "rounds"),
        row("make reproduce without probes and pictures", np.median(plain), "seconds"),
        row("its pictures, with those of probes", drawing, "seconds"),
        row("what probing adds to make reproduce, least of the rounds", added.min(), "per cent"),
        row("what probing adds to make reproduce", np.median(added), "per cent"),
        row("what probing adds to make reproduce, most of the rounds", added.max(), "per cent"),
    ]


def _seconds(arguments: list[str], cache: Path) -> float:
    """Wall time of a Python process with its own cache of programs. Raises Failed with its last
    words when it fails."""
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    begin = time.perf_counter()
    ran = subprocess.run(
        [sys.executable, *arguments], env=kept | {"XDG_CACHE_HOME": str(cache)},
        capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - begin
    if ran.returncode:
        words = (ran.stderr.strip() or "nothing").splitlines()[-1]
        raise contenders.Failed(
            f"{' '.join(arguments)} ended with exit code {ran.returncode}: it said {words}"
        )
    return seconds


# ------------------------------------------------------------------------------------------ output


def write(
    rows: list[dict[str, Any]],
    steps: Steps | None,
    compiles: dict[int, list[compiling.Compiled]] | None,
    options: Options,
) -> None:
    """The files that the options name. Raises UserError when one cannot be written."""
    try:
        if options.json:
            text = json.dumps({row["what"]: row for row in rows}, indent=2) + "\n"
            options.json.write_text(text, encoding="utf-8")
        if options.csv:
            options.csv.write_text(frames.to_csv(rows), encoding="utf-8")
        if options.figure:
            with plt.rc_context(figures.STYLE):
                draw(steps, compiles, options.figure)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written: {error.strerror}") from None


def draw(
    steps: Steps | None, compiles: dict[int, list[compiling.Compiled]] | None, path: Path
) -> None:
    """Seconds per step with the floor as a line; seconds of tracing and compiling over depth."""
    panels: list[Callable[[Axes], None]] = []
    if steps is not None:
        panels.append(lambda axes: _draw_steps(axes, steps))
    if compiles is not None:
        panels.append(lambda axes: _draw_compiles(axes, compiles))
    size = (figures.WIDTH * len(panels) / 2, 2.2)
    canvas, grid = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for axes, draw_panel in zip(grid.flat, panels, strict=True):
        draw_panel(axes)
    canvas.savefig(path)
    plt.close(canvas)


def _draw_steps(axes: Axes, steps: Steps) -> None:
    names = [name for name in steps.seconds if name != "matmul"]
    seconds = [float(np.median(steps.seconds[name])) for name in names]
    colors = ["0.6" if name in PEERS else "C0" for name in names]
    bars = axes.barh(names, seconds, height=0.6, color=colors)
    axes.bar_label(bars, [f"{value:.3g}" for value in seconds], padding=2, fontsize=7)
    floor = float(np.median(steps.floor))
    axes.axvline(floor, color="k", ls="--", lw=0.8)
    axes.set_title(f"a training step\ndashed: its matrix products alone, {floor:.2g} s")
    axes.set_xlabel("seconds")
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _draw_compiles(axes: Axes, compiles: dict[int, list[compiling.Compiled]]) -> None:
    depths = list(compiles)
    for i, name in enumerate(("trace", "compile")):
        seconds = [np.median([getattr(one, name) for one in own]) for own in compiles.values()]
        axes.plot(depths, seconds, marker=figures.MARKERS[i], ms=4, label=name)
    axes.set(xscale="log", xlabel="layers", ylabel="seconds")
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_ylim(bottom=0)
    axes.set_title("our plain step over depth\ntracing and compiling it")
    axes.legend()


if __name__ == "__main__":
    cli.guarded(main)
