"""How large a learning rate does each placement survive, at which depth?

Claim: the further a placement keeps its norms from the skip path, the larger the rate that it bears
and the less it loses with depth; the order of KEEL's Table 1 (Chen & Wei 2026, 2601.19895). Of
every row of the placements table, at every depth, one run whose learning rate rises with every
update until training fails. One number a run: the rate of its last healthy step
(normstudy/ramp.py says what healthy is and when a run has failed).

Command   python experiments/max_lr.py --seeds 3
Time      about 2 minutes of two CPU cores for a placement and seed at all four depths (preset cpu;
          reckoned from 0.05 s a step at 48 layers): an hour for 25 of them. --shard 1/4 to 4/4
          split it over machines (see below). 30 MB of disk each
Expect    runs/max_lr/max_lr.csv, .png and .pdf, a table of max stable rates, and keel_order.csv,
          where the order over placements is compared with KEEL's

The ramp rises from 1e-4 to 1 over 500 updates by the same factor at each: 125 updates a decade.
- Geometric, where KEEL's is linear (0 to 5e-2 over 5000 updates, there Post-LN fails at update 30):
  over 400 linear updates to 1, 12 layers, post-norm and DeepNet never train, pre-norm fails at
  0.44. Update 8 is already past the 0.018 that post-norm bears on the geometric ramp. To be there
  at update 200 would take 11,000 updates. --schedule ramp --steps 5000 --lr 5e-2 is KEEL's.
- The peak, by a rule that looks at pre-norm alone: the smallest power of ten at which pre-norm
  fails before the ramp ends, at the least and at the greatest depth.
- The first rate: a tenth of the smallest of tune_lr's grid, at which pre-norm takes 65 updates to
  get below H1. In the first decade of the ramp no run of the pilot did.
- The number of updates: what one hour holds for one seed of 25 placements at four depths.
- A run ends one decade after it has failed or stalled (--stop-after): its rate rose tenfold since.
  In seven pilot runs that went on to the end it changed no number. One checkpoint, at the end.

So the numbers are of this ramp: a slower one lets a run live longer at each rate, which trains what
a faster one does not, and kills what a faster one passes by. Compare within one ramp. A single
block fails at 0.4 (post) and 0.56 (pre), by no fault of depth: what comes near is not told apart.

Several machines: the same command with --shard i/n on each; then all folders arms/* into one --out,
and the command without --shard: it finds every run finished and writes table and figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from normstudy import (
    cli,
    figures,
    frames,
    hosts,
    outcome,
    ramp,
    record,
    remote,
    runtime,
    study,
    tables,
)
from normstudy.errors import UserError, choose
from normstudy.frames import Logs, Table
from normstudy.placements import PLACEMENTS
from normstudy.progress import say

RAMP = {
    "schedule": "geometric_ramp", "lr": 1.0, "end_fraction": 1e-4, "warmup": 0, "steps": 500,
    "stop_after": 125, "probe_every": 0, "checkpoint_every": 500,
}  # fmt: skip

# Chen & Wei 2026, table 1, 64 sublayers = 32 blocks: {row of the placements table: max LR}
KEEL_TABLE_1 = {
    "post": 3.0e-4,
    "deepnorm": 3.5e-4,
    "hybridnorm": 4.9e-4,
    "mix-ln": 8.6e-4,
    "pre": 7.65e-3,
    "keel": 1.01e-2,
}


@dataclass(frozen=True)
class Options(cli.Study):
    """What to run, and where to."""

    placements: str = "all"  # rows of the placements table, with commas between them
    depths: tuple[int, ...] = (12, 24, 48, 96)  # L, blocks
    out: Path = Path("runs/max_lr")

    def __post_init__(self):
        if not self.depths or min(self.depths) < 1:
            raise UserError(f"depths are numbers of blocks from 1 on, not {self.depths}")

    @property
    def rows(self) -> list[str]:
        """The chosen rows. Raises UserError for one that the table lacks."""
        if self.placements == "all":
            return list(PLACEMENTS)
        names = [name.strip() for name in self.placements.split(",")]
        return [choose("placement", name, PLACEMENTS) for name in names]


def arms_of(options: Options) -> study.Arms:
    """One arm a placement and depth, the deepest first: what is left to do is not underestimated,
    and every n-th run is a fair share."""

    def arm(placement: str, layers: int):
        return lambda base: {"placement": placement, "layers": layers}

    return {
        f"{placement} at {layers}": arm(placement, layers)
        for layers in sorted(set(options.depths), reverse=True)
        for placement in options.rows
    }


# ---------------------------------------------------------------------------------- the frame


def frame(runs: list[Logs]) -> Table:
    """One row per finished run, in the order of the placements table, by depth and seed.

    Rates without unit, losses in nats. Raises UserError when no run is finished.
    """
    finished = [logs for logs in runs if logs.outcome]
    if not finished:
        raise UserError("no run is finished yet: the same command goes on")
    order = list(PLACEMENTS)
    table = []
    for logs in finished:
        losses, rates = (np.array([row[name] for row in logs.metrics]) for name in ("loss", "lr"))
        found = ramp.survival(losses, rates, logs.h1, "not_finite" in logs.outcome)
        smoothed = outcome.smooth(losses)
        table.append(
            {
                "placement": logs.run.model.placement,
                "layers": logs.run.model.layers,
                "seed": logs.run.seed,
                "max_stable_lr": found.max_stable_lr,
                "kind": found.kind,
                "failed_at": found.failed_at,
                "steps_done": len(losses),
                "outcome": logs.outcome["word"],
                "best_loss": logs.outcome["best_loss"],
                "lr_at_best": float(rates[np.argmin(np.nan_to_num(smoothed, nan=np.inf))]),
                "first_lr": float(rates[0]),
                "last_lr": logs.run.optim.lr,
                "h1": logs.h1,
                "why": found.why,
            }
        )
    return sorted(
        table, key=lambda row: (order.index(row["placement"]), row["layers"], row["seed"])
    )


def closing_table(table: Table) -> Table:
    """Placement by depth: the middle seed's max stable rate, and of how many seeds it is told."""
    depths = sorted({row["layers"] for row in table})
    closing = []
    for placement, of_placement in frames.by(table, "placement"):
        groups = dict(frames.by(of_placement, "layers"))
        told = {f"L = {depth}": ramp.tell(groups.get(depth, [])) for depth in depths}
        closing.append({"placement": placement, **told})
    return closing


# ---------------------------------------------------------------------------------- the order


def order(table: Table, theirs: Mapping[str, float] = KEEL_TABLE_1) -> Table:
    """One row a depth: Kendall's tau-b with their order over the placements in both, and the pairs.

    tau is None for fewer than two placements, or where all of ours are equal.
    """
    found = []
    for layers, of_depth in sorted(frames.by(table, "layers")):
        groups = dict(frames.by(of_depth, "placement"))
        ours = {name: ramp.rank(ramp.middle(groups[name])) for name in theirs if name in groups}
        swapped, tied, kept = [], [], 0
        for a, b in combinations(sorted(ours, key=lambda name: theirs[name]), 2):
            if ours[a] == ours[b]:
                tied.append(f"{a} = {b}")
            elif ours[a] > ours[b]:
                swapped.append(f"{a} > {b}")
            else:
                kept += 1
        # theirs has no ties, so tau-b = (kept - swapped) / sqrt(pairs * pairs that ours orders)
        ordered = kept + len(swapped)
        pairs = ordered + len(tied)
        tau = (ordered - 2 * len(swapped)) / np.sqrt(pairs * ordered) if ordered else None
        found.append(
            {
                "layers": layers,
                "placements": len(ours),
                "tau": None if tau is None else round(float(tau), 3),
                "pairs_kept": kept,
                "swapped": ", ".join(swapped),
                "tied": ", ".join(tied),
            }
        )
    return found


# --------------------------------------------------------------------------------- the figure


def draw(table: Table) -> Canvas:
    """A panel a placement, the one that bears most at the greatest depth first; others in grey."""
    placements = dict(frames.by(table, "placement"))
    deepest = max(row["layers"] for row in table)

    def at_the_deepest(name: str) -> tuple[float, bool]:
        rows = [row for row in placements[name] if row["layers"] == deepest]
        return ramp.rank(ramp.middle(rows)) if rows else (0.0, False)

    names = sorted(placements, key=at_the_deepest, reverse=True)
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    canvas, grid = plt.subplots(
        lines, columns, figsize=(figures.WIDTH, 1.1 + 1.15 * lines), squeeze=False, sharex=True,
        sharey=True,
    )  # fmt: skip
    for axes in grid.flat[len(names) :]:
        axes.remove()
    for axes, name in zip(grid.flat, names, strict=False):
        for rows in placements.values():
            axes.plot(*_line(rows), color="0.85", lw=0.8)
        axes.plot(*_line(placements[name]), color="C0")
        for kind, rows in frames.by(placements[name], "kind"):
            axes.plot(*_points(rows), **_style(kind, axes))
        axes.set_title(name)
    _scale(grid[0, 0], table)
    for i in range(len(names) - columns, len(names)):  # where the row below is not full
        grid.flat[i].tick_params(labelbottom=True)
    shown = dict.fromkeys(row["kind"] for row in table)
    keys = [Line2D([], [], label=LEGEND[kind], **_style(kind)) for kind in LEGEND if kind in shown]
    if len(names) > 1:
        keys.append(Line2D([], [], color="0.85", label="all other placements"))
    canvas.legend(handles=keys, loc="outside upper center", ncols=len(keys), fontsize=7)
    canvas.supxlabel(
        f"L, blocks   (line: the middle seed; first panel: bears most at {deepest})", fontsize=9
    )
    canvas.supylabel("max stable learning rate", fontsize=9)
    return canvas


LEGEND = {
    "failed": "a seed",
    "survived": "a seed, lower bound",
    "never trained": "a seed that never trained",
}


def _style(kind: str, axes: Axes | None = None) -> dict[str, Any]:
    """How a run is marked; what never trained stands at the lower edge of its panel."""
    marker = {"failed": "o", "survived": "^", "never trained": "x"}[kind]
    style = {"ls": "", "color": "C0", "marker": marker, "ms": 3.5, "mfc": "none", "mew": 0.9}
    if axes is not None and kind == "never trained":
        style |= {"transform": axes.get_xaxis_transform(), "color": "C1"}
    elif kind == "never trained":
        style |= {"color": "C1"}
    return style


def _line(rows: Table) -> tuple[list[int], list[float]]:
    """The middle seed over depth; no number where it never trained."""
    middles = [ramp.middle(own) for _, own in sorted(frames.by(rows, "layers"))]
    return [row["layers"] for row in middles], [row["max_stable_lr"] or np.nan for row in middles]


def _points(rows: Table) -> tuple[list[int], list[float]]:
    """Every seed; those that never trained at 0.06 of the panel's height."""
    return [row["layers"] for row in rows], [row["max_stable_lr"] or 0.06 for row in rows]


def _scale(axes: Axes, table: Table) -> None:
    """Logarithmic, with room at the lower edge for what never trained."""
    rates = [row["max_stable_lr"] for row in table if row["max_stable_lr"]] or [1.0]
    depths = sorted({row["layers"] for row in table})
    axes.set(xscale="log", yscale="log", ylim=(min(rates) / 5, max(rates) * 2))
    axes.set_xticks(depths, [str(depth) for depth in depths])
    axes.xaxis.set_minor_locator(NullLocator())


def sentence(table: Table) -> str:
    """What each placement bears at the greatest depth, from the most to the least."""
    deepest = max(row["layers"] for row in table)
    groups = frames.by([row for row in table if row["layers"] == deepest], "placement")
    ranked = sorted(groups, key=lambda pair: ramp.rank(ramp.middle(pair[1])), reverse=True)
    told = ", ".join(f"{name} {ramp.tell(rows)}" for name, rows in ranked)
    return f"Max stable learning rate at {deepest} blocks, the largest first: {told}."


FIGURE = figures.Figure(
    "max_lr", "Max stable learning rate over depth", frame, draw, sentence, all_seeds=True
)


# ------------------------------------------------------------------------------------ the run


def main(argv: Sequence[str]) -> None:
    options, base = cli.parse_own(Options(), argv, __doc__ or "", **RAMP)
    arms = arms_of(options)
    chosen = cli.chosen_arms(options, base, arms)
    runtime.start(launch=options.launch)
    study.run_arms(
        base, arms, chosen, options.seeds, options.out, KIND, options.together,
        options.launch.may_change, options.part, numbered=False, keep=options.launch.keep,
    )  # fmt: skip
    if not hosts.leads():
        return
    how = cli.command_line("experiments/max_lr.py", options, argv)
    table, agreement = sum_up(options.out, how, options.draw)
    if options.json:
        print((options.out / "summary.json").read_text(encoding="utf-8"), end="")
        return
    print(tables.text(closing_table(table)))
    print("\nThe order of KEEL's Table 1 (32 blocks), and ours (a > b: ours only):")
    print(tables.text(agreement))
    say(f"written: max_lr.csv, keel_order.csv and summary.json in {options.out}")


KIND = "ramp study"


def sum_up(out: Path, how: str, draw: bool = True) -> tuple[Table, Table]:
    """(table, order) of all finished runs under OUT, written there as CSV, JSON and picture."""
    runs = frames.load(out)
    table = frame(runs)
    agreement = order(table)
    identity = record.read_identity(out / record.CONFIG, KIND, "code", "versions")
    summary = {
        "title": FIGURE.title,
        "command": how,
        **{name: identity[name] for name in ("code", "versions", "config")},
        "table": closing_table(table),
        "keel": {"table_1": KEEL_TABLE_1, "order": agreement},
        "runs": table,
    }
    record.write_json(out / "summary.json", summary)
    for name, rows in (("max_lr", table), ("keel_order", agreement)):
        (out / f"{name}.csv").write_text(frames.to_csv(rows), encoding="utf-8")
    if draw:
        figures.draw_all([logs for logs in runs if logs.outcome], out, [FIGURE])
    remote.push(out)
    return table, agreement


if __name__ == "__main__":
    cli.guarded(main)
