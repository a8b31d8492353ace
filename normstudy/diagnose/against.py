"""The two sides of a refactor: every difference that matters, also those that nobody intended."""

from __future__ import annotations

from typing import Any

import numpy as np

from normstudy import config, inits, outcome, placements, programs, schedules
from normstudy.diagnose.subject import Subject
from normstudy.errors import UserError

# what does not change what is computed, or only where
ASIDE = frozenset(
    {"data", "fsdp", "tensor", "probe_batch", "vectors", "probe_every", "probe_once", "curvature",
     "eval_batches", "checkpoint_every"}
)  # fmt: skip


def differences(here: Subject, there: Subject) -> list[dict[str, Any]]:
    """One row for each: what, there, here, and whether it was set or follows from what was set.

    Raises UserError where one of them has no config.
    """
    for subject in (here, there):
        if subject.run is None:
            raise UserError(f"{subject.name} is a loss curve alone: --against compares configs")
    ours, theirs = here.run, there.run
    assert ours is not None and theirs is not None
    rows = [
        _row(name, old, new, "set")
        for name, (old, new) in config.differences(theirs, ours).items()
        if name not in ASIDE
    ]
    for name, old, new in _followed(theirs, ours):
        if old != new:
            rows.append(_row(name, old, new, "follows"))
    return rows + _losses(here, there)


def _row(what: str, there: Any, here: Any, how: str) -> dict[str, Any]:
    return {"what": what, "there": _told(there), "here": _told(here), "how": how}


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _followed(theirs: config.Run, ours: config.Run):
    """(what, there, here) of what is made from the fields."""
    rows = [placements.row(run.model.placement) for run in (theirs, ours)]
    yield "the stream", *(row.text for row in rows)
    runs = zip(rows, (theirs, ours), strict=True)
    yield "final norm", *("yes" if row.has_final_norm(run.model) else "no" for row, run in runs)
    yield (
        "alpha",
        *(
            float(np.mean(row.constants(run.model.layers).alpha))
            for row, run in zip(rows, (theirs, ours), strict=True)
        ),
    )
    stds = [
        inits.gains_over_xavier(run.model, programs.standard_deviations(run))
        for run in (theirs, ours)
    ]
    for role in stds[0]:
        yield f"init of {role}, x Xavier", *(float(np.median(own[role])) for own in stds)
    tables = [schedules.table(r.optim, r.model.width, r.steps) for r in (theirs, ours)]
    for update in (1, 10, 100):
        if update <= min(map(len, tables)):
            yield f"rate at update {update}", *(float(table[update - 1]) for table in tables)
    yield "largest rate", *(float(table.max()) for table in tables)
    yield "updates", *(len(table) for table in tables)


def _losses(here: Subject, there: Subject) -> list[dict[str, Any]]:
    """Smoothed losses at the last update that all runs of both have: no run is compared with
    another that went on for longer, and a mean is taken over no dead one."""
    if not here.curves or not there.curves:
        return []
    n = min(len(curve.losses) for curve in (*here.curves, *there.curves))

    def told(subject: Subject) -> str:
        ends = np.array([outcome.smooth(curve.losses[:n])[-1] for curve in subject.curves])
        finite = ends[np.isfinite(ends)]
        words = f"{len(finite)} of {len(ends)} finite"
        return ", ".join([f"{end:.3f}" for end in finite] + [words])

    return [_row(f"loss at update {n}, by seed", told(there), told(here), "measured")]
