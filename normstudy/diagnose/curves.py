"""What happened, from losses, rates and gradient norms alone. No jax here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from normstudy import outcome
from normstudy.diagnose.subject import Baseline, Curve, Subject
from normstudy.diagnose.verdicts import Finding

DEAD = ("stalled", "collapsed", "diverged")
RESTART = 0.5  # a rate below so much of the one before it, that then rises again, has started anew
ALWAYS = 0.95  # share of the updates at which clipping was active that counts as always
JUMP = 0.5  # nats by which the loss jumps where a run goes on


class Told(NamedTuple):
    """What one curve came to."""

    word: str  # of outcome.WORDS
    step: int  # update it dates from
    why: str


def tell(curve: Curve, baseline: Baseline) -> Told:
    """The outcome of a curve: what normstudy wrote, which knows of gradients, too; else by
    outcome.py's rule over its rows. Without a baseline what is flat is undecided: a plateau has no
    name."""
    if curve.logs and curve.logs.outcome:
        return Told(*(curve.logs.outcome[name] for name in Told._fields))
    stride = _stride(curve)
    if baseline.loss is None:
        told = _without_baseline(curve.losses)
    else:
        losses, level = _in_nats(curve.losses, baseline)
        told = Told(**outcome.classify(losses, level, curve.warmup // stride).as_dict())
        if level != baseline.loss:
            why = told.why.replace("H1 = 1.00", f"{baseline.name} ({baseline.loss:.4g})")
            told = told._replace(why=f"{why}; numbers relative to it")
    step = int(curve.steps[min(told.step, len(curve.losses) - 1)]) if stride > 1 else told.step
    return told._replace(step=step)


def _in_nats(losses: np.ndarray, baseline: Baseline) -> tuple[np.ndarray, float]:
    """(losses, the baseline's) in the unit of the rule; what has another unit, over its baseline:
    the rule's nats are shares of it then."""
    assert baseline.loss is not None
    if baseline.name.startswith("the unigram"):
        return losses, baseline.loss
    return losses / baseline.loss, 1.0


def _without_baseline(losses: np.ndarray) -> Told:
    if not np.isfinite(losses).all():
        step = int(np.argmin(np.isfinite(losses)))
        return Told("diverged", step, f"the loss is {losses[step]} at row {step}")
    curve, rule = outcome.smooth(losses), outcome.RULE
    if len(losses) < rule.stay:
        return Told("undecided", len(losses), f"{len(losses)} rows say too little")
    if (curve[-rule.stay :] > losses[0]).all():
        return Told("diverged", len(losses), f"ends at {curve[-1]:.2f}, above its start")
    fallen = curve[-rule.stay] - curve[-1]
    if fallen > rule.margin:
        return Told("undecided", len(losses), f"still falling: {fallen:.2f} in {rule.stay} rows")
    return Told(
        "undecided", len(losses), f"flat at {curve[-1]:.2f}; what that is worth nobody said "
        "(--h1, --vocab or --mean-loss would)",
    )  # fmt: skip


def symptoms(subject: Subject) -> list[Finding]:
    """What became of the runs: one verdict, k of n. Never an average over a dead seed."""
    if not subject.curves:
        return []
    told = [tell(curve, subject.baseline) for curve in subject.curves]
    names = [curve.name for curve in subject.curves]
    found = of_words(", ".join(names), *zip(*told, strict=True))
    finite = sum(bool(np.isfinite(curve.losses).all()) for curve in subject.curves)
    if finite < len(told):
        more = f"{finite} of {len(told)} runs are finite; no mean is taken over the others"
        found = dataclasses.replace(found, evidence=(*found.evidence, more))
    if found.verdict not in ("healthy", "undecided"):
        return [found]
    near = _near(subject)
    return near if found.verdict == "healthy" and near else [found, *near]


def of_words(name: str, words: Sequence[str], steps: Sequence[int], whys: Sequence[str]) -> Finding:
    """One verdict of all seeds."""
    n, alive = len(words), sum(word in ("trained", "spiked") for word in words)
    evidence = tuple(
        f"{word} (step {step}): {why}" for word, step, why in zip(words, steps, whys, strict=True)
    )
    if 0 < alive < n:
        return Finding("borderline", f"{name}: {alive} of {n} seeds train", evidence)
    if alive == n:
        verdict = "spiked" if "spiked" in words else "healthy"
        return Finding(verdict, f"{name}: {_of_all('trained', words)}", evidence)
    word = "undecided" if "undecided" in words else max(DEAD, key=list(words).count)
    return Finding(word, f"{name}: {_of_all(word, words)}", evidence)


def _near(subject: Subject) -> list[Finding]:
    """A plateau that no rule calls stalled, and that is near the baseline all the same."""
    rule, found = outcome.RULE, []
    for curve in subject.curves if subject.baseline.loss is not None else ():
        losses, level = _in_nats(curve.losses, subject.baseline)
        flat = outcome.smooth(losses)[len(losses) // 2 :]
        if len(flat) < rule.stay or not np.isfinite(flat).all():
            continue
        if np.ptp(flat) < 2 * rule.margin and abs(flat - level).max() < rule.near:
            says = (
                f"{curve.name}: flat at {np.mean(curve.losses[-rule.window :]):.4g} since the "
                f"middle of the run, near {subject.baseline.name} ({subject.baseline.loss:.4g}): "
                "it knows little more than that"
            )
            found.append(Finding("stalled", says, (), "likely"))
    return found


def _of_all(word: str, words: Sequence[str]) -> str:
    n = len(words)
    return word if n == 1 else f"{list(words).count(word)} of {n} seeds {word}"


def _stride(curve: Curve) -> int:
    """Updates between two rows."""
    gaps = np.diff(curve.steps)
    return max(int(np.median(gaps)), 1) if len(gaps) else 1


# -------------------------------------------------------------------------------- rates and clips


def rates(subject: Subject) -> list[Finding]:
    """What the logged learning rates say: zero, negative, no number, begun anew."""
    found = []
    for curve in subject.curves:
        if curve.rates is None or not len(curve.rates):
            continue
        lr = curve.rates
        if not np.isfinite(lr).all() or (lr < 0).any():
            at = int(np.argmax(~(np.isfinite(lr) & (lr >= 0))))
            what = f"{curve.name}: the learning rate is {lr[at]:g} at step {curve.steps[at]}"
            found.append(Finding("schedule", what))
            continue
        if (lr == 0).all():
            found.append(Finding("schedule", f"{curve.name}: the learning rate is 0 at every step"))
            continue
        first = int(np.argmax(lr > 0))
        if first > 0:
            what = (
                f"{curve.name}: update 1 has learning rate 0"
                + (f", and so have the first {first}" if first > 1 else "")
                + "; the parameters do not move there"
            )
            found.append(Finding("note" if first == 1 else "schedule", what))
        last = len(lr) - int(np.argmax(lr[::-1] > 0))
        if last < len(lr) - 1:  # one zero, at the very end, is what a decay to zero asks for
            what = f"{curve.name}: the learning rate is 0 from step {curve.steps[last]} on"
            found.append(Finding("schedule", what))
        found += _restarts(curve, lr, first)
    return found


def _restarts(curve: Curve, lr: np.ndarray, first: int) -> list[Finding]:
    """A rate that falls at once and climbs again: a schedule that began anew."""
    found = []
    for at in range(first + 1, len(lr) - 1):
        if lr[at] < RESTART * lr[at - 1] and lr[-1] > lr[at]:
            what = (
                f"{curve.name}: the learning rate falls from {lr[at - 1]:.3g} to {lr[at]:.3g} at "
                f"step {curve.steps[at]} and rises again: the schedule began anew"
            )
            advice = "restore the optimizer's count with the parameters; all counters must agree"
            found.append(Finding("resume mismatch", what, (), "measured", advice))
    return found


def resumes(subject: Subject) -> list[Finding]:
    """Steps that come twice, or a loss that jumps where a run went on."""
    found = []
    for curve in subject.curves:
        back = np.flatnonzero(np.diff(curve.steps) <= 0) + 1
        for at in back:
            before, after = curve.losses[at - 1], curve.losses[at]
            what = f"{curve.name}: step {curve.steps[at]} comes after step {curve.steps[at - 1]}"
            jump = abs(after - before)
            sure = "measured" if jump > JUMP else "possible"
            says = f"{what}, and the loss goes from {before:.2f} to {after:.2f}"
            found.append(Finding("resume mismatch" if jump > JUMP else "note", says, (), sure))
    return found


def clipping(subject: Subject) -> list[Finding]:
    """Clipping that is always active makes the gradient's size meaningless."""
    if subject.run is None or not subject.run.optim.clip:
        return []
    found = []
    for curve in subject.curves:
        if curve.gradients is None:
            continue
        share = float(np.mean(curve.gradients > subject.run.optim.clip))
        if share >= ALWAYS:
            typical = float(np.nanmedian(curve.gradients))
            what = (
                f"{curve.name}: gradients were clipped at {share:.0%} of the updates (clip "
                f"{subject.run.optim.clip:g}, the norm is typically {typical:.3g})"
            )
            advice = "without clipping, or with the clip above the typical norm"
            # Adam does not see a common factor of all gradients; gradient descent does
            sure = "likely" if subject.run.optim.optimizer == "sgd" else "possible"
            found.append(Finding("optimizer", what, (), sure, advice))
    return found


def precision(subject: Subject) -> list[Finding]:
    """Where a run stopped being finite: what normstudy found when it did."""
    found = []
    for curve in subject.curves:
        bad = curve.logs.outcome.get("not_finite") if curve.logs else None
        if bad:
            found.append(Finding("precision", f"{curve.name}: {bad['sentence']}", (), "possible"))
    return found


CHECKS = (symptoms, rates, resumes, clipping, precision)


def findings(subject: Subject) -> list[Finding]:
    """All that the curves say."""
    return [finding for check in CHECKS for finding in check(subject)]
