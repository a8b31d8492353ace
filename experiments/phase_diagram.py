"""Where does a placement train? Outcome over depth, initial gain, learning rate and warmup.

Claims C5, C6 and C10 to C13: post-norm's window of learning rates closes with the depth, and what
opens it again: warmup, or smaller branches at init. Two diagrams, in one study folder:

  depth   depth x learning rate, for each placement, with and without warmup
  gain    initial gain x learning rate, for one model (--placement post, --layers 48), with and
          without warmup, beside the token similarity that each gain starts from

A cell is n seeds, and says how many came to which outcome (outcome.py). The grid is fixed before
anything is run. Over the depth diagram: the largest stable rates as measured, where OUT/max_lr.csv
lies or --max-lr names one, and how theory says that they change with depth, 1 / (change of x_L by
the first update), up to a factor: by the mean field for every row of the table that it can run, by
DeepNet's criterion (theory.py) where the skip path crosses a norm and alpha is one number.

No run ends early unless --stop-after says so: a plateau may end at any update (pre-norm at 0.32
trained from update 348 of 400), so that no patience short of the run itself is sound. What is not
finite ends by itself. `undecided` at small rates means too slow for so few updates.

Command   python experiments/phase_diagram.py --preset cpu
          ... --shard 2/4 --out runs/phase2     the second of four parts, e.g. on another machine
          normstudy figures runs/phase1 runs/phase2 ...     all parts in one diagram
Time      on two CPU cores, a seed: 100 minutes for both diagrams (minutes_of_steps in summary.json,
          of one core); finished runs are skipped. 4.5 GB of disk, nearly all of it checkpoints;
          --checkpoint-every 400 keeps only the last of each run
Expect    runs/phase_diagram/phase_depth.csv and phase_gain.csv, a row a cell; figures/phase_*, and
          report.html. Pre-norm trains at all depths; post-norm's largest rate falls with the depth
          until none of the grid is left; with a gain that is small enough 48 blocks train
"""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import (
    cli,
    config,
    data,
    frames,
    hosts,
    inits,
    meanfield,
    outcome,
    phases,
    placements,
    programs,
    runtime,
    study,
    tables,
    theory,
)
from normstudy.errors import UserError, choose
from normstudy.frames import Table
from normstudy.progress import say

RATES = tuple(float(f"{10 ** (n / 2):.2g}") for n in range(-8, 0))  # 1e-4 to 0.32, factor sqrt(10)
DEPTHS = (6, 12, 24, 48)  # blocks
GAINS = (0.1, 0.18, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4)  # times Xavier, factor about sqrt(2)
PLACEMENTS = ("pre", "post", "deepnorm", "keel", "peri")  # those of them that the table has
DIAGRAMS = ("depth", "gain")
POSITIONS, SEQUENCES = 32, 2  # that the mean field follows; a law of the depth needs no more


@dataclass(frozen=True)
class Grid(cli.Study):
    """What to run, and where to."""

    diagrams: str = ",".join(DIAGRAMS)  # one of these, or both
    placements: str = ",".join(name for name in PLACEMENTS if name in placements.PLACEMENTS)
    depths: tuple[int, ...] = DEPTHS  # L, blocks
    rates: tuple[float, ...] = RATES  # peak learning rates
    warmups: tuple[int, ...] | None = None  # updates; default: 0 and --warmup
    gains: tuple[float, ...] = GAINS  # of every branch matrix, times its Xavier std
    max_lr: Path | None = None  # largest stable rates to draw over; default: OUT/max_lr.csv
    out: Path = Path("runs/phase_diagram")

    def __post_init__(self):
        for name in self.chosen:
            choose("diagram", name, DIAGRAMS)
        for name in self.names:
            placements.row(name)
        for name in ("depths", "rates", "gains"):
            if not getattr(self, name) or min(getattr(self, name)) <= 0:
                raise UserError(f"{name} takes positive numbers, not {getattr(self, name)}")

    @property
    def chosen(self) -> list[str]:
        return [name.strip() for name in self.diagrams.split(",")]

    @property
    def names(self) -> list[str]:
        """The placements of the depth diagram; all: the whole table."""
        if self.placements == "all":
            return list(placements.PLACEMENTS)
        return [name.strip() for name in self.placements.split(",")]


def arms_of(grid: Grid, base: config.Run) -> study.Arms:
    """Every cell of both diagrams; they share those of the base's model."""
    places: list[dict[str, Any]] = []
    if "depth" in grid.chosen:
        places += [{"placement": name, "layers": n} for name in grid.names for n in grid.depths]
    if "gain" in grid.chosen:
        places += [{"gain": gain} for gain in grid.gains]
    if grid.warmups is None:
        warmups: list[dict[str, Any]] = [{"warmup": 0}, {}]  # {}: the base's
    else:
        warmups = [{"warmup": warmup} for warmup in grid.warmups]
    arms = {}
    for place, warmup, lr in itertools.product(places, warmups, grid.rates):
        changes = place | warmup | {"lr": lr, "probe_once": True}
        cell = dict(zip(phases.CELL, phases.cell_of(config.override(base, **changes)), strict=True))
        name = "{placement} L={layers} gain {gain:g} lr {lr:g} warmup {warmup}".format(**cell)
        arms.setdefault(name, _arm(changes))
    return arms


def _arm(changes: dict[str, Any]):
    return lambda base: changes


def laws(base: config.Run, names: Sequence[str], depths: Sequence[int]) -> Table:
    """What the first update does to x_L at each depth, up to a factor free of it: theory.csv.

    By the mean field, for a step of the optimizer's kind; by DeepNet's criterion where the skip
    path crosses a norm and alpha is the same in all blocks. A row of the table that the mean field
    cannot run has no line of it.
    """
    step, criterion = ("sgd", theory.sgd_criterion)
    if base.optim.optimizer != "sgd":  # Adam's first step is the sign of the gradient
        step, criterion = ("sign", theory.sign_criterion)
    batch = data.feed(base).probe_batch
    found = []
    for name in names:
        place = placements.row(name)
        for layers in sorted(set(depths)):
            run = config.override(base, placement=name, layers=layers)
            stds = programs.standard_deviations(run)
            gains = inits.gains_over_xavier(run.model, stds)
            updates = {}
            few = dataclasses.replace(run.model, context=min(run.model.context, POSITIONS))
            try:
                tokens = batch[:SEQUENCES, : few.context + 1]
                values = meanfield.predict(few, stds, tokens)
                updates["mean field"] = float(values[f"function_update/{step}"])
            except ValueError as error:
                say(f"{name}: no line of theory ({error})")
            alpha = place.constants(layers).alpha
            if place.skip_norms and np.ndim(alpha) == 0:
                own = criterion(layers, float(alpha), gains["v"], gains["o"])
                updates["DeepNet's criterion"] = own
            found += [
                {"placement": name, "layers": layers, "law": law, "update": update}
                for law, update in updates.items()
            ]
    return found


def write_beside(grid: Grid, base: config.Run) -> None:
    """What the diagrams draw over the cells, beside the logs."""
    if "depth" in grid.chosen and (rows := laws(base, grid.names, grid.depths)):
        (grid.out / phases.THEORY).write_text(frames.to_csv(rows), encoding="utf-8")
    if grid.max_lr and grid.max_lr != grid.out / phases.MAX_LR:
        shutil.copyfile(grid.max_lr, grid.out / phases.MAX_LR)


def write_cells(out: Path) -> Table:
    """OUT/phase_depth.csv and OUT/phase_gain.csv, of all runs under OUT that have finished; all
    cells."""
    base, table = phases.base(out), phases.cells(frames.load(out))
    columns = (*phases.CELL, "n", *outcome.WORDS)
    for name, diagram in (("depth", phases.over_depth), ("gain", phases.over_gain)):
        if rows := [{column: row[column] for column in columns} for row in diagram(table, base)]:
            (out / f"phase_{name}.csv").write_text(frames.to_csv(rows), encoding="utf-8")
    return table


def main(argv: Sequence[str]) -> None:
    grid, base = cli.parse_own(Grid(), argv, __doc__ or "")
    if grid.max_lr and not grid.max_lr.is_file():
        raise UserError(f"--max-lr {grid.max_lr}: there is no such file")
    arms = arms_of(grid, base)
    chosen = cli.chosen_arms(grid, base, arms)
    runtime.start(launch=grid.launch)
    study.run_arms(
        base, arms, chosen, grid.seeds, grid.out, phases.KIND, grid.together,
        grid.launch.may_change, grid.part, numbered=False, keep=grid.launch.keep,
    )  # fmt: skip
    if not hosts.leads():
        return
    write_beside(grid, base)
    table = write_cells(grid.out)
    how = cli.command_line("experiments/phase_diagram.py", grid, argv)
    study.sum_up(grid.out, "Where each placement trains", how, draw=grid.draw)
    if grid.json:
        print((grid.out / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        print(tables.text(phases.windows(table)))
    say(f"{grid.out}: phase_*.csv" + (", figures, report.html" if grid.draw else ""))


if __name__ == "__main__":
    cli.guarded(main)
