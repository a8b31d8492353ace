"""Early signs: what leaves its range before a run fails, and how long before. No jax here.

An alarm goes once, at the first step at which its rule holds. Rules look at what a run has logged
so far and at nothing later, so that a live run and a finished one get the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from normstudy import outcome
from normstudy.diagnose.subject import Curve, Subject
from normstudy.diagnose.verdicts import Finding

VANISHED, EXPLODED = 1e-3, 1e3  # Jacobian norm from the bottom of the stack to its top; identity: 1
JUMP, BEFORE = 10.0, 50  # a gradient norm of so many times the median of so many updates before it
STILL = 0.5  # share of the entries of a matrix that an update must move
LARGE = 0.5  # norm of an update over the norm of the weights, in any block
LOST = 0.1  # rounding of a stream, over the standard deviation of its channels
ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-8}  # of a number, relative


class Alarm(NamedTuple):
    """What left its range, when, and in words."""

    name: str
    step: int
    says: str


Rows = Sequence[dict[str, Any]]


def _gradient(metrics: Rows, probes: Rows) -> Alarm | None:
    del probes
    norms = np.array([row.get("gradient_norm", np.nan) for row in metrics], float)
    if not len(norms):
        return None
    before = np.concatenate([np.full(BEFORE, np.inf), norms[:-1]])
    lowest = np.fmin.reduce(np.lib.stride_tricks.sliding_window_view(before, BEFORE), axis=1)
    # no median is below the lowest: few rows need one
    for at in map(int, 10 + np.flatnonzero(norms[10:] > JUMP * lowest[10:])):
        usual = float(np.median(norms[max(at - BEFORE, 0) : at]))
        if norms[at] > JUMP * usual > 0:
            step = metrics[at]["step"]
            says = f"the gradient norm is {norms[at]:.3g}, {norms[at] / usual:.0f} times its median"
            return Alarm("gradient norm", step, says)
    return None


def _loss(metrics: Rows, probes: Rows) -> Alarm | None:
    del probes
    if not metrics:
        return None
    losses = np.array([row["loss"] for row in metrics], float)
    if not np.isfinite(losses).all():
        at = int(np.argmin(np.isfinite(losses)))
        return Alarm("loss", metrics[at]["step"], f"the loss is {losses[at]}")
    curve = outcome.smooth(losses)
    rise = curve - np.minimum.accumulate(curve)
    above = np.flatnonzero(rise > outcome.RULE.spike)
    if not len(above):
        return None
    at = int(above[0])
    return Alarm("loss", metrics[at]["step"], f"the loss is {rise[at]:.2f} nats above its best")


def _jacobian(metrics: Rows, probes: Rows) -> Alarm | None:
    del metrics
    for probe in probes:
        bottom = float(probe["jacobian_to_end"][0])
        if not VANISHED <= bottom <= EXPLODED:
            how = "reaches the bottom of the stack no more" if bottom < 1 else "explodes below"
            says = f"the gradient {how}: Jacobian norm from x_0 to x_L {bottom:.2g}, identity 1"
            return Alarm("Jacobian", probe["step"], says)
    return None


def _update(metrics: Rows, probes: Rows) -> Alarm | None:
    del metrics
    for probe in probes:
        sizes = {
            kind: (np.array(probe[f"update/{kind}"]), np.array(probe[f"weight/{kind}"]))
            for kind in _matrices(probe, "update/")
        }  # a matrix that starts at 0 has no size to compare with
        ratio = {
            kind: float(np.max(update / weight))
            for kind, (update, weight) in sizes.items()
            if np.min(weight) > 0
        }
        if ratio and max(ratio.values()) > LARGE:
            kind = max(ratio, key=lambda k: ratio[k])
            says = f"an update of {kind} is {ratio[kind]:.2g} times as large as the weights"
            return Alarm("update", probe["step"], says)
    return None


ALARMS: tuple[Callable[[Rows, Rows], Alarm | None], ...] = (_gradient, _loss, _jacobian, _update)


def _matrices(probe: dict[str, Any], prefix: str) -> list[str]:
    """Kinds of branch matrices: attn.q, ..."""
    names = [name.removeprefix(prefix) for name in probe if name.startswith(prefix)]
    return [name for name in names if name.count(".") == 1]


def alarms(metrics: Rows, probes: Rows) -> list[Alarm]:
    """All that went, by step."""
    found = [alarm for rule in ALARMS if (alarm := rule(metrics, probes))]
    return sorted(found, key=lambda alarm: alarm.step)


def of_curve(curve: Curve) -> list[Alarm]:
    """Those of a curve: all of a run of normstudy, else what its losses and gradients say."""
    if curve.logs:
        return alarms(curve.logs.metrics, curve.logs.probes)
    gradients = np.full(len(curve.losses), np.nan) if curve.gradients is None else curve.gradients
    rows = [
        {"step": int(step), "loss": loss, "gradient_norm": norm}
        for step, loss, norm in zip(curve.steps, curve.losses, gradients, strict=True)
    ]
    return alarms(rows, [])


def findings(subject: Subject, failed_at: dict[str, int]) -> list[Finding]:
    """What went first in every curve that failed, and by how many updates it led.

    failed_at: {curve: the step of its failure}.
    """
    found = []
    for curve in subject.curves:
        own = of_curve(curve)
        if curve.name in failed_at and own:
            end = failed_at[curve.name]
            told = tuple(
                f"step {alarm.step}" + (f" ({end - alarm.step} before)" if alarm.step < end else "")
                + f": {alarm.says}"
                for alarm in own
            )  # fmt: skip
            says = f"{curve.name}: signs of the failure, which dates from step {end}"
            found.append(Finding("note", says, told))
    return found


def rounding(subject: Subject) -> list[Finding]:
    """What rounding takes, in every run that normstudy probed."""
    return [
        finding
        for curve in subject.curves
        if curve.logs
        for finding in (
            *still(curve.logs.probes, curve.name),
            *far(curve.logs.probes, curve.name, curve.logs.run.model.dtype),
        )
    ]


def far(probes: Rows, name: str, dtype: str) -> list[Finding]:
    """A stream whose mean over the channels dwarfs what they differ by: what a LayerNorm leaves of
    it is rounding."""
    for probe in probes:
        offsets = np.array(probe.get("offset", [0.0]), float)
        layer = int(np.nanargmax(offsets)) if np.isfinite(offsets).any() else 0
        if (share := offsets[layer] * ROUNDING[dtype]) > LOST:
            says = f"{name}: the mean of x_{layer} over its channels is {offsets[layer]:.3g} times"
            says += " as large as their standard deviation"
            told = f"step {probe['step']}: {dtype} rounds away up to {share:.0%} of that deviation"
            advice = "--dtype float32, and look for a bias that grows"
            return [Finding("precision", says, (told,), "measured", advice)]
    return []


def still(probes: Rows, name: str) -> list[Finding]:
    """Matrices whose entries an update does not move: lost in the rounding of their dtype.

    Where no gradient reaches the bottom of the stack there is nothing to lose: not asked there.
    """
    found: dict[str, tuple[int, float]] = {}
    for probe in (p for p in probes if p["jacobian_to_end"][0] >= VANISHED):
        for kind in _matrices(probe, "moved/"):
            share = float(np.median(probe[f"moved/{kind}"]))
            if share < STILL:
                found.setdefault(kind, (probe["step"], share))
    if not found:
        return []
    told = tuple(f"{k}: {own:.1%} moved at step {s}" for k, (s, own) in found.items())
    says = f"{name}: updates move less than half of the entries of {', '.join(found)}"
    advice = "parameters in float32 beside the bfloat16 ones, or stochastic rounding"
    return [Finding("update underflow", says, told, "measured", advice)]
