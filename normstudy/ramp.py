"""The largest learning rate that a run survived, read off a ramp: losses and rates -> one number.

Along a ramp the rate rises with every update until training fails. Source: Chen & Wei 2026
(KEEL, 2601.19895), table 1. `runs` and `curves` make the tables of a whole study. No jax here.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import frames
from normstudy.errors import UserError
from normstudy.frames import Logs, Table, by
from normstudy.outcome import RULE, Rule, smooth
from normstudy.placements import PLACEMENTS

KIND = "ramp study"  # of a study folder

Row = dict[str, Any]  # of max_lr.csv: placement, layers, seed, kind, max_stable_lr

KINDS = {  # what a run says about its max stable LR: the sign before the number
    "failed": "",  # it is the number
    "survived": ">",  # it lies above: the ramp ended before the run failed
    "never trained": "none",  # there is none: no rate of the ramp trained it
}


@dataclass(frozen=True)
class Survival:
    """What a ramp says of one run."""

    kind: str  # a key of KINDS
    max_stable_lr: float | None  # None where it never trained
    failed_at: int | None  # the step since which it has failed; None where it has not
    why: str


def survival(
    losses: np.ndarray, rates: np.ndarray, h1: float, refused: bool = False, rule: Rule = RULE
) -> Survival:
    """What a run on a ramp survived, from its losses (nats) and learning rates, both of shape (n,).

    Healthy is a run whose smoothed loss (outcome.smooth) is better than the unigram entropy H1 by
    the rule's margin: it knows more than letter frequencies. It *fails* at the step after its last
    healthy one, where it then stays unhealthy, whatever becomes of it: back on H1 (how post-norm
    dies), above its start, or no longer finite. The max stable LR is the rate of that last healthy
    step. What lasts no longer than the window of the smoothing can come of a single loss, and
    counts neither way. A spike that comes back was survived. So

    - failed: unhealthy for more than a window, or not finite. The number is exact up to the lag of
      a trailing mean, at most a window of updates;
    - survived: healthy to the end, or unhealthy for no more than a window. The number is a lower
      bound;
    - never trained: healthy for no more than a window at a time. It has no max stable LR.

    refused: the run ended in a gradient that is not finite, whose update was refused: its losses,
    all finite, do not tell, and it failed.

    The threshold is the same for every run. One relative to its own best would call a run stable
    because it had learned little. Raises ValueError for unequal lengths, or none.
    """
    losses, rates = np.asarray(losses, np.float64), np.asarray(rates, np.float64)
    if losses.shape != rates.shape or not losses.size:
        raise ValueError(f"{losses.shape} losses and {rates.shape} rates are not one ramp")
    finite = np.isfinite(losses)
    until = len(losses) if finite.all() else int(np.argmin(finite))
    curve = smooth(losses[:until], rule.window)
    end = _end_of_last_stretch(curve < h1 - rule.margin, longer_than=rule.window)
    if end is None:
        best = f"best {curve.min():.2f}" if until else "never finite"
        why = f"{best}, not below H1 = {h1:.2f} for more than {rule.window} updates on end"
        return Survival("never trained", None, None, why)
    rate = float(rates[end - 1])
    if until < len(losses):
        why = f"not finite at step {until}, last below H1 = {h1:.2f} at step {end - 1}"
        return Survival("failed", rate, end, why)
    if refused:
        return Survival("failed", rate, until, f"a gradient is not finite after step {until - 1}")
    if until - end <= rule.window:
        return Survival("survived", rate, None, f"below H1 = {h1:.2f} up to step {end - 1}")
    why = f"not below H1 = {h1:.2f} since step {end}, last at {curve[-1]:.2f}"
    return Survival("failed", rate, end, why)


def _end_of_last_stretch(condition: np.ndarray, longer_than: int) -> int | None:
    """One past the last unbroken run of True that is longer; None: there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], condition, [False]]).astype(int)))
    ends = [int(end) for start, end in edges.reshape(-1, 2) if end - start > longer_than]
    return ends[-1] if ends else None


# ------------------------------------------------------------------------------------ a study


def runs(logs: list[Logs]) -> Table:
    """One row per finished run, in the order of the placements table, by depth and seed.

    Rates without unit, losses in nats. Raises UserError when no run is finished.
    """
    table = []
    for own in _finished(logs):
        losses, rates, found = _read(own)
        smoothed = smooth(losses)
        table.append(
            _names(own)
            | {
                "max_stable_lr": found.max_stable_lr,
                "kind": found.kind,
                "failed_at": found.failed_at,
                "steps_done": len(losses),
                "outcome": own.outcome["word"],
                "best_loss": own.outcome["best_loss"],
                "lr_at_best": float(rates[np.argmin(np.nan_to_num(smoothed, nan=np.inf))]),
                "first_lr": float(rates[0]),
                "last_lr": own.run.optim.lr,
                "h1": own.h1,
                "minutes": frames.minutes_of_steps([own]),
                "why": found.why,
            }
        )
    return table


def curves(logs: list[Logs]) -> Table:
    """Smoothed loss (nats) at every learning rate of every finished run, in the same order; `last`
    marks the last healthy step. Raises UserError when no run is finished."""
    table = []
    for own in _finished(logs):
        losses, rates, found = _read(own)
        common = _names(own) | {"h1": own.h1}
        for lr, loss in zip(rates, smooth(losses), strict=True):
            last = lr == found.max_stable_lr
            table.append(common | {"lr": float(lr), "smoothed": float(loss), "last": bool(last)})
    return table


def _finished(logs: list[Logs]) -> list[Logs]:
    finished = [own for own in logs if own.outcome]
    if not finished:
        raise UserError("no run is finished yet: the same command goes on")
    order = list(PLACEMENTS)

    def place(own: Logs) -> tuple[int, int, int]:
        return order.index(own.run.model.placement), own.run.model.layers, own.run.seed

    return sorted(finished, key=place)


def _names(own: Logs) -> Row:
    model = own.run.model
    return {"placement": model.placement, "layers": model.layers, "seed": own.run.seed}


def _read(own: Logs) -> tuple[np.ndarray, np.ndarray, Survival]:
    """(losses, rates, what they say)."""
    losses, rates = (np.array([row[name] for row in own.metrics]) for name in ("loss", "lr"))
    return losses, rates, survival(losses, rates, own.h1, "not_finite" in own.outcome)


# ------------------------------------------------------------------------------- several seeds


def middle(rows: list[Row]) -> Row:
    """The run in the middle of those that differ in seed; of an even number the lower one.

    A run and no average: what never trained stands below every rate, a lower bound at its rate.
    """
    return sorted(rows, key=rank)[(len(rows) - 1) // 2]


def rank(row: Row) -> tuple[float, bool]:
    """What rows are ordered by: the rate, and at the same rate whether it is only a lower bound."""
    return float(row["max_stable_lr"] or 0.0), row["kind"] == "survived"


def tell(rows: list[Row]) -> str:
    """'0.018', '>1' or 'none' of one run; of several the middle one, and extremes that differ."""
    if not rows:
        return ""
    ordered = sorted(rows, key=rank)
    ends = [_number(row) for row in (ordered[0], ordered[-1])]
    own = _number(middle(rows))
    return own if ends == [own, own] else f"{own} ({ends[0]} to {ends[1]})"


def by_depth(table: Table) -> Table:
    """Placement by depth: the middle seed's max stable rate, and the extremes of all seeds."""
    depths = sorted({row["layers"] for row in table})
    found = []
    for placement, of_placement in by(table, "placement"):
        groups = dict(by(of_placement, "layers"))
        told = {f"L = {depth}": tell(groups.get(depth, [])) for depth in depths}
        found.append({"placement": placement, **told})
    return found


def _number(row: Row) -> str:
    sign, rate = KINDS[row["kind"]], row["max_stable_lr"]
    return sign if rate is None else f"{sign}{rate:.2g}"


def rates(path: Path, layers: int) -> dict[str, str]:
    """{placement: its max stable rate at that depth in words}, from a max_lr.csv.

    Raises UserError where the file cannot be read as one.
    """
    found: dict[str, list[Row]] = {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if int(row["layers"]) == layers:
                    rate = float(row["max_stable_lr"]) if row["max_stable_lr"] else None
                    own = {"kind": row["kind"], "max_stable_lr": rate}
                    found.setdefault(row["placement"], []).append(own)
    except (OSError, KeyError, ValueError) as error:
        raise UserError(f"{path} cannot be read as the max_lr.csv of a ramp: {error!r}") from None
    return {name: tell(own) for name, own in found.items()}
