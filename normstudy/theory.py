"""Closed forms: depth constants, reference standard deviations, skip-path gain. NumPy only."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class Constants(NamedTuple):
    """What a placement's equation and its init rule take from the depth."""

    alpha: float = 1.0  # multiplies the skip path
    beta: float = 1.0  # multiplies the init of V, O, up and down (never Q, K)


def no_constants(layers: int) -> Constants:
    """alpha = beta = 1, whatever the depth."""
    del layers
    return Constants()


def deepnorm_decoder(layers: int) -> Constants:
    """alpha = (2M)^(1/4), beta = (8M)^(-1/4), M = decoder blocks.

    Source: Wang et al. 2022 (DeepNet, 2203.00555), section 4.3, decoder-only.
    """
    return Constants(alpha=(2 * layers) ** 0.25, beta=(8 * layers) ** -0.25)


def xavier_std(fan_in: int, fan_out: int) -> float:
    """sqrt(2 / (fan_in + fan_out)). Source: Glorot & Bengio 2010, equation 12 (as a normal law)."""
    return math.sqrt(2.0 / (fan_in + fan_out))


def kaiming_std(fan_in: int) -> float:
    """sqrt(2 / fan_in). Source: He et al. 2015 (1502.01852), equation 10."""
    return math.sqrt(2.0 / fan_in)


def depth_scale(layers: int) -> float:
    """1 / sqrt(2L), 2L = number of sublayers. Source: Radford et al. 2019, section 2.3."""
    return 1.0 / math.sqrt(2 * layers)


def stability_threshold(b1: float | None) -> float:
    """Largest stable (sharpness x learning rate): 2 for SGD, (2 + 2 b1) / (1 - b1) for Adam.

    On a quadratic; Adam's for a frozen preconditioner (38 at b1 = 0.9). b1 None: SGD. Source: Cohen
    et al. 2022 (2207.14484), section 2.
    """
    return 2.0 if b1 is None else (2 + 2 * b1) / (1 - b1)


def skip_path_gain(norm_factors: np.ndarray, alpha: float) -> np.ndarray:
    """Gain of the skip path alone from the input of each block to the top of the stack.

    norm_factors: (L, S), the factors of the norms that sit on the skip path of each block
    (S = 0 where none does). Returns (L,): the product over blocks l..L-1 of the factors, times
    alpha twice a block. Post-norm under Xavier: about (1/sqrt 2)^(2L). Source: KEEL
    (2601.19895), equations 14-15, extended by alpha.
    """
    layers = norm_factors.shape[0]
    per_block = np.sum(np.log(norm_factors), axis=1) + 2 * math.log(alpha)
    return np.exp(np.cumsum(per_block[::-1])[::-1]).reshape(layers)
