"""How large each parameter is at step 0: one normal law, and a standard deviation by role.

The numbers depend on the config alone, so they enter the compiled init as data: all arms with
the same shapes share one init program.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from normstudy import theory
from normstudy.config import Init, Model
from normstudy.roles import ROLES, Role

RULES = {
    "xavier": lambda fan_in, fan_out, std: theory.xavier_std(fan_in, fan_out),
    "kaiming": lambda fan_in, fan_out, std: theory.kaiming_std(fan_in),
    "normal": lambda fan_in, fan_out, std: std,
}


Stds = dict[str, Any]  # {role: std, or (L,) where it is another in each block}


def standard_deviations(
    model: Model, init: Init, beta: float, scales: theory.Scales | None = None
) -> Stds:
    """{role: standard deviation at step 0} for every matrix.

    beta, scales: the placement's constant and factors, see Placement.init.
    """
    sizes = {"D": model.width, "F": model.ff, "V": model.vocab, "T": model.context}
    stds = {}
    for name, role in ROLES.items():
        if role.fan is None:
            continue
        fan_in, fan_out = (sizes[letter] for letter in role.fan)
        if role.branch:
            rule = RULES[init.init](fan_in, fan_out, init.init_std)
            stds[name] = rule * init.gain * _depth_factor(role, model, init, beta)
        else:  # tables and readout: unit logits and, times sqrt(width), unit stream (2017, 3.4)
            stds[name] = model.width**-0.5
            if name != "readout" and init.embed_std is not None:
                stds[name] = init.embed_std
        stds[name] = stds[name] * (scales or {}).get(name, 1.0)
    return stds


def gains_over_xavier(model: Model, stds: Stds) -> Stds:
    """{branch matrix: its std over Xavier's}: what has to match between widths, not the std."""
    sizes = {"D": model.width, "F": model.ff}
    return {
        name: stds[name] / theory.xavier_std(*(sizes[letter] for letter in role.fan))
        for name, role in ROLES.items()
        if role.branch and role.fan is not None
    }


def describe(model: Model, stds: Stds) -> str:
    """The gains for people, roles with the same gain together, e.g. 'q k v up 1, o down 0.102'.

    '1 to 0.144' where it is another in each block: of the first and of the last.
    """
    groups: dict[str, list[str]] = {}
    for name, gain in gains_over_xavier(model, stds).items():
        ends = np.atleast_1d(gain)[[0, -1]]
        groups.setdefault(" to ".join(dict.fromkeys(f"{end:.3g}" for end in ends)), []).append(name)
    return (
        ", ".join(f"{' '.join(names)} {gain}" for gain, names in groups.items()) + " x Xavier std"
    )


# Quantiles of the normal law, unit variance. Looking one up is exact, and only std is multiplied
# in, so the same seed gives the same bits on any mesh, device and compiler; jax.random.normal, a
# polynomial, differs in the last bit with how its array is split (jax 0.12).
POINTS = 2**16
_LAW = NormalDist()
QUANTILES = np.array([_LAW.inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)])
QUANTILES = (QUANTILES / np.sqrt(np.mean(QUANTILES**2))).astype(np.float32)


def matrix(key: Array, shape: tuple[int, ...], std: Array | float) -> Array:
    """A float32 matrix of normal entries (65,536 levels, none beyond 4.3 std), mean 0, this std."""
    return std * jnp.asarray(QUANTILES)[jax.random.bits(key, shape, jnp.uint16)]


def _depth_factor(role: Role, model: Model, init: Init, beta: float) -> float:
    factor = beta * init.beta if role.beta else 1.0
    if role.out and init.depth_scaled:
        factor *= theory.depth_scale(model.layers)
    return factor
