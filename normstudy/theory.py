"""Closed forms: depth constants, standard deviations, skip-path gain, exponents. NumPy only."""

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


def sgd_criterion(layers: int, alpha: float, v: float, w: float) -> float:
    """2L (v^2 + w^2) / alpha^2: how the first SGD step's change of x_L depends on the depth.

    For norm(alpha x + f(x)). v: gain over Xavier of the first matrix of a branch (V, up), w: of
    the last (O, down). Source: Wang et al. 2022 (2203.00555), section 4.2, goal for theorem 4.2.
    """
    return 2 * layers * (v**2 + w**2) / alpha**2


def sign_criterion(layers: int, alpha: float, v: float, w: float) -> float:
    """2L sqrt(v^2 + w^2) / alpha: the same for a step of fixed size in every entry, as Adam's.

    Source: Wang et al. 2022 (2203.00555), theorem 4.2, with ||theta* - theta|| free of the depth.
    """
    return 2 * layers * math.hypot(v, w) / alpha


def top_norm_std(layers: int, alpha: float, v: float, w: float, on_skip_path: bool) -> float:
    """Standard deviation of what the topmost norm sees: alpha x plus one branch, or plus all 2L.

    One where the norms lie on the skip path (then x has unit scale), all where they do not, so that
    only the final norm sees the sum. Each branch adds (v w)^2. Source: Xiong et al. 2020
    (2002.04745), lemma 2, with attention and activation taken to keep the scale.
    """
    branches = 1 if on_skip_path else 2 * layers
    return math.hypot(alpha, math.sqrt(branches) * v * w)


def top_gradient(layers: int, alpha: float, v: float, w: float, on_skip_path: bool) -> float:
    """||dL/dW|| of the last matrix of the last block, up to a factor free of the depth.

    Its input has scale v, its output is divided by the topmost norm's sigma. Xavier: L^0 with the
    norms on the skip path, L^(-1/2) without. Source: Xiong et al. 2020 (2002.04745), theorem 1.
    """
    return v / top_norm_std(layers, alpha, v, w, on_skip_path)


def log_slope(
    depths: np.ndarray, values: np.ndarray, errors: np.ndarray | float = 0.0
) -> tuple[float, float]:
    """(p, its standard error) of values ~ L^p: least squares in logarithms, all depths alike.

    errors: standard errors of the values, independent of each other, to first order.
    """
    x = np.log(depths) - np.mean(np.log(depths))
    weights = x / np.sum(x**2)
    return float(weights @ np.log(values)), float(np.linalg.norm(weights * errors / values))
