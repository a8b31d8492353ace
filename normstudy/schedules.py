"""Learning rate at every update, as a table that is audited, logged, drawn and then applied.

Update u counts from 1; optax counts from 0, so a schedule is asked at u - 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import optax

from normstudy.config import Optim
from normstudy.errors import UserError


def _warmup(o: Optim) -> Callable:
    """peak * u / warmup, so that update 1 is not zero and update `warmup` is the peak."""
    return optax.schedules.linear_schedule(o.lr / o.warmup, o.lr, max(o.warmup - 1, 1))


def _inverse_sqrt_2017(o: Optim, width: int, total: int) -> Callable:
    """c * d^-0.5 * min(u^-0.5, u * w^-1.5). Source: Vaswani et al. 2017, equation 3."""
    del total
    w = max(o.warmup, 1)
    return lambda n: (
        o.schedule_scale * width**-0.5 * np.minimum((n + 1.0) ** -0.5, (n + 1) * w**-1.5)
    )


def _inverse_sqrt(o: Optim, width: int, total: int) -> Callable:
    """The same shape given by its peak: lr * min(u / w, sqrt(w / u))."""
    del width, total
    w = max(o.warmup, 1)
    return lambda n: o.lr * np.minimum((n + 1) / w, np.sqrt(w / (n + 1)))


def _wsd(o: Optim, width: int, total: int) -> Callable:
    """Warmup, stable, then linear decay over the last decay_fraction of the updates."""
    del width
    decay = max(round(o.decay_fraction * total), 1)
    stable = max(total - o.warmup - decay, 0)
    parts = [optax.schedules.constant_schedule(o.lr), _linear_decay(o, total - o.warmup - stable)]
    return optax.schedules.join_schedules(parts, [stable])


def _ramp(o: Optim, width: int, total: int) -> Callable:
    """lr * u / total, the peak at the last update. Source: KEEL, Chen & Wei 2026, table 1."""
    del width
    return lambda n: o.lr * (n + 1) / total


def _geometric_ramp(o: Optim, width: int, total: int) -> Callable:
    """From end_fraction * lr up to lr at the last update, by the same factor at every update."""
    del width
    if not 0 < o.end_fraction < 1:
        raise UserError(
            f"a geometric ramp needs an end_fraction between 0 and 1, not {o.end_fraction}"
        )
    return lambda n: o.lr * o.end_fraction ** ((total - 1 - n) / max(total - 1, 1))


def _linear_decay(o: Optim, updates: int) -> Callable:
    return optax.schedules.linear_schedule(o.lr, o.lr * o.end_fraction, max(updates - 1, 1))


# {name: (the part after warmup from (optim, width, total), does a linear warmup stand before it?)}
SCHEDULES: dict[str, tuple[Callable, bool]] = {
    "constant": (lambda o, width, total: optax.schedules.constant_schedule(o.lr), True),
    "linear": (lambda o, width, total: _linear_decay(o, total - o.warmup), True),
    "cosine": (
        lambda o, width, total: optax.schedules.cosine_decay_schedule(
            o.lr, max(total - o.warmup - 1, 1), o.end_fraction
        ),
        True,
    ),
    "wsd": (_wsd, True),
    "inverse_sqrt": (_inverse_sqrt, False),
    "inverse_sqrt_2017": (_inverse_sqrt_2017, False),
    "ramp": (_ramp, False),
    "geometric_ramp": (_geometric_ramp, False),
}


@functools.lru_cache(maxsize=64)
def table(optim: Optim, width: int, total: int) -> np.ndarray:
    """Learning rate of updates 1..total, shape (total,), audited: finite and positive.

    Raises UserError that names the first update where it is not.
    """
    build, warms = SCHEDULES[optim.schedule]
    schedule = build(optim, width, total)
    if warms and optim.warmup:
        schedule = optax.schedules.join_schedules([_warmup(optim), schedule], [optim.warmup])
    rates = np.array([np.asarray(schedule(n)) for n in range(total)], float)
    rates.flags.writeable = False  # it is cached: an arm asks for it several times
    for n, rate in enumerate(rates):
        if not (math.isfinite(rate) and rate > 0):
            raise UserError(
                f"the {optim.schedule} schedule is {rate:g} at update {n + 1} of {total}; it must "
                "be finite and positive (end_fraction 0 makes the last update zero)"
            )
    return rates


def audit(optim: Optim, width: int, total: int) -> dict[int, float]:
    """{update: learning rate} at updates 1, 2, 3, end of warmup and last."""
    rates = table(optim, width, total)
    updates = sorted({u for u in (1, 2, 3, optim.warmup or 1, total) if u <= total})
    return {u: float(rates[u - 1]) for u in updates}


def audit_line(optim: Optim, width: int, total: int) -> str:
    """One line for people: the audit with the end of warmup and the last update named."""
    names = {optim.warmup: " (end of warmup)", total: " (last)"}
    values = audit(optim, width, total)
    return f"{optim.schedule}: " + ", ".join(
        f"update {u}{names.get(u, '')} {rate:.3g}" for u, rate in values.items()
    )
