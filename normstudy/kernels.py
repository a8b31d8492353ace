"""Gaussian kernels of activations: E[phi(u) phi(v)] and E[phi'(u) phi'(v)]. NumPy only.

u and v are Gaussian with mean 0; C is the covariance matrix of all their pairs, shape (N, N).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Kernels(NamedTuple):
    """What an activation does to a covariance, and to the square of a derivative."""

    values: Callable[[np.ndarray], np.ndarray]  # C -> E[phi(u) phi(v)]
    slopes: Callable[[np.ndarray], np.ndarray]  # C -> E[phi'(u) phi'(v)]


def relu_values(C: np.ndarray) -> np.ndarray:
    """Arc-cosine kernel of degree 1, halved. Source: Cho & Saul 2009, equations 3 and 6."""
    scale, rho = _split(C)
    angle = np.arccos(rho)
    return scale * (np.sin(angle) + (np.pi - angle) * rho) / (2 * np.pi)


def relu_slopes(C: np.ndarray) -> np.ndarray:
    """Arc-cosine kernel of degree 0, halved. Source: Cho & Saul 2009, equations 3 and 5."""
    return (np.pi - np.arccos(_split(C)[1])) / (2 * np.pi)


def gelu(x: np.ndarray) -> np.ndarray:
    """GELU by tanh, as jax.nn.gelu computes it. Source: Hendrycks & Gimpel 2016 (1606.08415)."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


# GELU up to variance 1: values to 1e-10, slopes to 1e-9; at variance 4 to 1e-5 and 3e-4
TERMS = 32
NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(96)


def _hermite() -> np.ndarray:
    """Normalised Hermite polynomials at the nodes, times the weights: (TERMS, nodes)."""
    rows = [np.ones_like(NODES), NODES]
    for k in range(1, TERMS - 1):
        rows.append((NODES * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
    return np.stack(rows) * (WEIGHTS / WEIGHTS.sum())


HERMITE = _hermite()


def smooth(phi: Callable[[np.ndarray], np.ndarray]) -> Kernels:
    """Kernels of a smooth function, by its Hermite series; too slow to converge for a kink.

    With a_k(s) = E[phi(s z) He_k(z)]: E[phi(u) phi(v)] = sum_k a_k(s_u) a_k(s_v) rho^k (Mehler
    1866), and its derivative by the covariance is E[phi'(u) phi'(v)] (Price 1958).
    """

    def coefficients(C: np.ndarray) -> np.ndarray:
        stds, which = np.unique(np.sqrt(np.diag(C)), return_inverse=True)
        return (phi(np.outer(stds, NODES)) @ HERMITE.T)[which]

    def values(C: np.ndarray) -> np.ndarray:
        return _series(coefficients(C), _split(C)[1])

    def slopes(C: np.ndarray) -> np.ndarray:
        scale, rho = _split(C)
        return _series(coefficients(C)[:, 1:] * np.sqrt(np.arange(1, TERMS)), rho) / scale

    return Kernels(values, slopes)


KERNELS = {"relu": Kernels(relu_values, relu_slopes), "gelu": smooth(gelu)}


def _split(C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(std_i std_j, correlation_ij) of a covariance matrix."""
    std = np.sqrt(np.diag(C))
    scale = np.outer(std, std)
    return scale, np.clip(C / scale, -1.0, 1.0)


def _series(a: np.ndarray, rho: np.ndarray) -> np.ndarray:
    """sum_k a_ik a_jk rho_ij^k, by Horner's rule; a: (N, terms)."""
    total = np.zeros_like(rho)
    for column in a.T[::-1]:
        total = total * rho + np.outer(column, column)
    return total
