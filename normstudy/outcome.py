"""What became of a run, by rule, from its loss curve. Never just "diverged"."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

WORDS = {
    "trained": "better than the unigram entropy H1 for a while now, and near its best",
    "stalled": "never better than H1, stays close to it",
    "collapsed": "was better than H1, fell back to it and stays close to it",
    "diverged": "non-finite, or above its start and not coming back",
    "spiked": "trained, but the smoothed loss once rose far above its best and came back",
    "undecided": "none of these: warmup not over, still falling or rising, or flat elsewhere",
}


@dataclass(frozen=True)
class Rule:
    """The numbers behind the words; losses in nats, lengths in updates."""

    window: int = 20  # losses are smoothed by a trailing mean over so many updates
    margin: float = 0.05  # better than H1 means below H1 - margin
    stay: int = 50  # so long must a plateau last
    spike: float = 0.5  # a rise of the smoothed loss above its best so far that counts as a spike
    near: float = 0.25  # near its best, or near H1, means within this


RULE = Rule()


@dataclass(frozen=True)
class Outcome:
    """A word, the step it dates from, and one sentence of evidence."""

    word: str
    step: int
    why: str

    def as_dict(self) -> dict:
        return asdict(self)


def smooth(losses: np.ndarray, window: int = RULE.window) -> np.ndarray:
    """Trailing mean over up to `window` losses, same length as the input."""
    if len(losses) == 0:
        return np.zeros(0)
    # each window is summed by itself: a running total would carry the rounding of a huge loss along
    padded = np.concatenate([np.zeros(window - 1), np.asarray(losses, np.float64)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, window)
    return windows.sum(1) / np.minimum(np.arange(1, len(losses) + 1), window)


def classify(losses: np.ndarray, h1: float, warmup: int, rule: Rule = RULE) -> Outcome:
    """The outcome of a run from its training losses at steps 0.. (nats), H1 and its warmup."""
    losses = np.asarray(losses, np.float64)
    if len(losses) == 0:
        return Outcome("undecided", 0, "no step was logged")
    if not np.isfinite(losses).all():
        step = int(np.argmin(np.isfinite(losses)))
        return Outcome("diverged", step, f"the loss is {losses[step]} at step {step}")
    n = len(losses)
    if n < max(warmup, rule.stay):
        return Outcome("undecided", n, f"{n} updates: warmup or the first {rule.stay} not over")
    curve = smooth(losses, rule.window)
    if (curve[-rule.stay :] > losses[0]).all():
        step = _since(curve > losses[0])
        return Outcome("diverged", step, f"above its start {losses[0]:.2f} from step {step}")
    better = curve < h1 - rule.margin
    if better[-1]:
        return _above_water(curve, better, h1, rule)
    if better.any():
        step = _since(~better)
        if n - step < rule.stay:
            return Outcome("undecided", step, f"back above H1 for only {n - step} updates")
        if abs(curve[-rule.stay :] - h1).max() > rule.near:
            return Outcome("undecided", step, f"fell back above H1, now at {curve[-1]:.2f}")
        why = f"best {curve.min():.2f}, not below H1 = {h1:.2f} since step {step}"
        return Outcome("collapsed", step, why)
    fallen = curve[-rule.stay] - curve[-1]
    if fallen > rule.margin:
        return Outcome("undecided", n, f"still falling: {fallen:.2f} nats in {rule.stay} updates")
    if curve[-1] > h1 + rule.near:
        return Outcome("undecided", n, f"flat at {curve[-1]:.2f}, far above H1 = {h1:.2f}")
    step = max(_since(curve <= curve[-1] + rule.margin), warmup)
    return Outcome("stalled", step, f"best {curve.min():.2f}, never below H1 = {h1:.2f}")


def sealed_for(losses: np.ndarray, h1: float, warmup: int, rule: Rule = RULE) -> int:
    """Updates since the fate of a dead run was sealed (0: alive or undecided).

    Dead is a run that is stalled or diverged, and one that was better than H1 and is so no longer,
    wherever it went. It counts from that step or the end of warmup, whichever is later, once a
    plateau would. A run may stop early when this reaches the config's stop_after.
    """
    found = classify(losses, h1, warmup, rule)
    if found.word in ("stalled", "diverged"):
        return max(len(losses) - max(found.step, warmup), 0)
    better = smooth(losses, rule.window) < h1 - rule.margin
    since = _since(~better)
    if not better.any() or len(losses) - since < rule.stay:
        return 0
    return max(len(losses) - max(since, warmup), 0)


def _above_water(curve: np.ndarray, better: np.ndarray, h1: float, rule: Rule) -> Outcome:
    """Outcome of a run that is better than H1 at its last step."""
    since = _since(better)
    if len(curve) - since < rule.stay:
        why = f"below H1 = {h1:.2f} for only {len(curve) - since} updates"
        return Outcome("undecided", since, why)
    best_so_far = np.minimum.accumulate(curve)
    rise = np.where(np.maximum.accumulate(better), curve - best_so_far, 0)  # once it was better
    if rise[-1] > rule.near:
        why = f"{rise[-1]:.2f} nats above its best {best_so_far[-1]:.2f} at the last step"
        return Outcome("undecided", len(curve), why)
    if rise.max() > rule.spike:
        step = int(np.argmax(rise))
        return Outcome("spiked", step, f"rose by {rise.max():.2f} nats, and recovered")
    return Outcome("trained", since, f"below H1 = {h1:.2f} since step {since}, at {curve[-1]:.2f}")


def _since(condition: np.ndarray) -> int:
    """First step of the unbroken run of True that reaches the end."""
    broken = np.flatnonzero(~condition)
    return int(broken[-1]) + 1 if len(broken) else 0
