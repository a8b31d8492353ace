"""Does a model of 1000 layers train, and does it compile like one of 48?

DeepNet (placement deepnorm), width 64, takes 20 steps on this machine by the package's own loop,
probes and all. One layer is compiled and scanned over, so that neither the time of the compiler nor
the memory of a layer should grow with their number.

Command   make thousand ARGS="--csv experiments/results/thousand_layers.csv"
Time      4 minutes on two CPU cores, 6 GB of memory, 0.5 GB of disk for the checkpoint
Expect    a table, and as --csv says: compiled in at most 1.3 times the time of 48 layers, in
          no more memory a layer, every loss finite, the last below the first; else exit code 1
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compiling
import numpy as np
import tyro

from normstudy import cli, config, frames, programs, record, runtime, tables, train
from normstudy.errors import UserError
from normstudy.progress import say

KIB, MIB = 2**10, 2**20
ROUNDS = 3  # of compiling both depths


class Untrained(UserError):
    """The claim did not come out."""

    exit_code = 1


@dataclass(frozen=True)
class Options:
    """What to train, and where to write it."""

    layers: int = 1000  # L, blocks
    beside: int = 48  # layers of the model whose compilation it is compared with
    width: int = 64  # D; 4 heads, 4 D units
    context: int = 64  # T, tokens
    batch: int = 16  # B, sequences
    steps: int = 20
    lr: float = 1e-3  # Adam, constant
    out: Path = Path("runs/thousand_layers")  # the run folder
    csv: Path | None = None

    def __post_init__(self):
        if self.steps < 2:
            raise UserError(f"steps must be at least 2 for a loss to fall, not {self.steps}")
        if self.csv and not self.csv.parent.is_dir():
            raise UserError(f"{self.csv}: the folder {self.csv.parent} does not exist")


def run_of(options: Options, layers: int) -> config.Run:
    """A run of so many layers."""
    return config.override(
        config.PRESETS["cpu"], placement="deepnorm", layers=layers, width=options.width,
        heads=4, ff=4 * options.width, context=options.context, batch=options.batch,
        lr=options.lr, warmup=0, steps=options.steps, eval_batches=1,
    )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    options = tyro.cli(Options, args=list(argv), description=__doc__)
    run = run_of(options, options.layers)
    runtime.start(cache=False)
    train.check(run)
    rows = compile_rows(options)
    train.train(run, options.out, "thousand_layers")
    rows += training_rows(run, record.read_rows(options.out / record.METRICS))
    print(tables.text(rows))
    if options.csv:
        try:
            options.csv.write_text(frames.to_csv(rows), encoding="utf-8")
        except OSError as error:
            raise UserError(f"{options.csv} cannot be written: {error.strerror}") from None
    check_falling([row["loss"] for row in record.read_rows(options.out / record.METRICS)], run)


def compile_rows(options: Options) -> list[dict[str, Any]]:
    """Time and memory of the compiled plain step, at both depths, compiled in turns."""
    depths = (options.beside, options.layers)
    taken: dict[int, list[compiling.Compiled]] = {layers: [] for layers in depths}
    for i in range(ROUNDS):
        for layers in depths:
            taken[layers].append(compiling.plain_step(run_of(options, layers)))
        say(f"compiling {options.beside} and {options.layers} layers: {i + 1} of {ROUNDS}")
    both = {L: np.array([one.trace + one.compile for one in own]) for L, own in taken.items()}
    found = []
    for layers, own in taken.items():
        name = f"plain step of {layers} layers"
        temporary = own[0].memory.temporary / layers
        found += [
            row(f"{name}: trace and compile", np.median(both[layers]), "seconds"),
            row(f"{name}: temporary memory a layer, each device", temporary / KIB, "KiB"),
            row(f"{name}: all its memory, each device", own[0].memory.total / MIB, "MiB"),
        ]
    ratio = np.median(both[options.layers] / both[options.beside])
    what = f"trace and compile, {options.layers} layers over {options.beside}"
    return [*found, row(what, ratio, "1")]


def training_rows(run: config.Run, logged: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed and losses from the log of the run, sizes from the shapes of its state."""
    abstract = programs.of(run)[0].abstract
    probed = train.probe_steps(run.steps, run.probe.probe_every)
    # a row's seconds end when the step after it has been dispatched: compiling falls on rows 0 to 3
    late = [row for row in logged if row["step"] > 3]
    found = [
        row("parameters", compiling.bytes_of(abstract.model) / MIB, "MiB"),
        row("optimizer state", compiling.bytes_of(abstract.opt_state) / MIB, "MiB"),
    ]
    for name, own in (
        ("plain", [row for row in late if row["step"] not in probed]),
        ("probing", [row for row in late if row["step"] in probed]),
    ):
        if own:
            seconds = statistics.median(row["seconds"] for row in own)
            found.append(row(f"a {name} step, median of {len(own)}", seconds, "seconds"))
    first, last = logged[0], logged[-1]
    return [
        *found,
        row(f"loss of step {first['step']}", first["loss"], "nats"),
        row(f"loss of step {last['step']}", last["loss"], "nats"),
    ]


def check_falling(losses: list[float], run: config.Run) -> None:
    """Raises Untrained unless all steps were done, every loss is finite and the last the lower."""
    name = f"{run.model.layers} layers at lr {run.optim.lr:g}"
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        raise Untrained(f"{name}: the loss of step {bad[0]} is {losses[bad[0]]}")
    if len(losses) < run.steps:
        raise Untrained(f"{name}: the run stopped after {len(losses)} of {run.steps} steps")
    if not losses[-1] < losses[0]:
        raise Untrained(
            f"{name}: the loss does not fall, from {losses[0]:.3f} to {losses[-1]:.3f} nats "
            f"in {run.steps} steps"
        )


def row(what: str, value: float, unit: str) -> dict[str, Any]:
    return {"what": what, "value": float(value), "unit": unit}


if __name__ == "__main__":
    cli.guarded(main)
