"""How large a learning rate does each placement survive, at which depth?

Claim: the further a placement keeps its norms from the skip path, the larger the rate that it bears
and the less it loses with depth; the order of KEEL's Table 1 (Chen & Wei 2026, 2601.19895). Of
every row of the placements table, at every depth, one run whose learning rate rises with every
update until training fails. One number a run: the rate of its last healthy step
(normstudy/ramp.py says what healthy is and when a run has failed).

Command   python experiments/max_lr.py --seeds 3
Time      for each placement and seed, in minutes of one core: 0.2 at 12 blocks, 0.5 at 24, 0.8 at
          48, 1.7 at 96 (minutes in max_lr.csv). --shard 1/4 to 4/4 split it over machines (see
          below)
Expect    runs/max_lr/report.html with figures/max_lr and figures/ramps; max_lr.csv, a row a run;
          keel_order.csv, where the order over placements is compared with KEEL's

The ramp rises from 1e-4 to 1 over 500 updates by the same factor at each: 125 updates a decade.
- Geometric, where KEEL's is linear (0 to 5e-2 over 5000 updates, there Post-LN fails at update 30):
  a linear ramp of so few updates to so high a peak is past post-norm's rates before anything has
  trained. --schedule ramp --steps 5000 --lr 5e-2 is KEEL's.
- The peak, by a rule that looks at pre-norm alone: the smallest power of ten at which pre-norm
  fails before the ramp ends.
- The first rate: a tenth of the smallest of tune_lr's grid, at which pre-norm takes 65 updates to
  get below H1. In the first decade of the ramp no run did (results/ramps.png).
- A run ends one decade after it has failed or stalled (--stop-after): its rate rose tenfold since.
  One checkpoint, at the end.

So the numbers are of this ramp: a slower one lets a run live longer at each rate, which trains what
a faster one does not, and kills what a faster one passes by. Compare within one ramp. And of this
threshold: a run that hovers below H1 by just more than the margin is healthy (post-norm at 12
blocks in results/ramps.png), so that seeds, and even the rounding of one device or two, may differ
by a factor of a few.

Several machines: the same command with --shard i/n on each; then all folders arms/* into one --out,
and the command without --shard: it finds every run finished and writes table and figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from normstudy import (
    cli,
    frames,
    hosts,
    ramp,
    runtime,
    study,
    tables,
)
from normstudy.errors import UserError, choose
from normstudy.frames import Table
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


# --------------------------------------------------------------------------------- the tables


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


# ------------------------------------------------------------------------------------ the run


def main(argv: Sequence[str]) -> None:
    options, base = cli.parse_own(Options(), argv, __doc__ or "", **RAMP)
    arms = arms_of(options)
    chosen = cli.chosen_arms(options, base, arms)
    runtime.start(launch=options.launch)
    study.run_arms(
        base, arms, chosen, options.seeds, options.out, ramp.KIND, options.together,
        options.launch.may_change, options.part, numbered=False, keep=options.launch.keep,
    )  # fmt: skip
    if not hosts.leads():
        return
    how = cli.command_line("experiments/max_lr.py", options, argv)
    table, agreement = write_tables(options.out)
    study.sum_up(
        options.out, "The largest stable learning rate of each placement", how, options.draw,
        max_lr=ramp.by_depth(table), keel={"table_1": KEEL_TABLE_1, "order": agreement},
    )  # fmt: skip
    if options.json:
        print((options.out / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        print(tables.text(ramp.by_depth(table)))
        print("\nThe order of KEEL's Table 1 (32 blocks), and ours (a > b: ours only):")
        print(tables.text(agreement))
    also = ", figures, report.html" if options.draw else ""
    say(f"{options.out}: max_lr.csv, keel_order.csv{also}")


def write_tables(out: Path) -> tuple[Table, Table]:
    """(OUT/max_lr.csv, OUT/keel_order.csv), of all finished runs under OUT."""
    table = ramp.runs(frames.load(out))
    agreement = order(table)
    for name, rows in (("max_lr", table), ("keel_order", agreement)):
        (out / f"{name}.csv").write_text(frames.to_csv(rows), encoding="utf-8")
    return table, agreement


if __name__ == "__main__":
    cli.guarded(main)
