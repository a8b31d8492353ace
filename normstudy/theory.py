"""Closed forms: depth constants, standard deviations, skip-path gain, exponents. NumPy only."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

BRANCH_ROLES = ("q", "k", "v", "o", "up", "down")


class Constants(NamedTuple):
    """What a placement's equation and its init rule take from the depth.

    Each a number, or (L, 2) where it differs between blocks and sublayers (attention, MLP).
    """

    alpha: float | np.ndarray = 1.0  # multiplies the skip path
    beta: float = 1.0  # multiplies the init of V, O, up and down (never Q, K)
    branch: float | np.ndarray = 1.0  # multiplies the branch, or what it reads
    before: float | np.ndarray = 1.0  # 0: no norm before this branch
    after: float | np.ndarray = 1.0  # 0: no norm after this add

    def varying(self) -> dict[str, np.ndarray]:
        """Those that differ between sublayers, (L, 2)."""
        return {name: own for name, own in self._asdict().items() if isinstance(own, np.ndarray)}

    def at(self, layer: int, sublayer: int) -> Constants:
        """The numbers of one sublayer: 0 attention, 1 MLP."""
        return self._replace(
            **{name: float(own[layer, sublayer]) for name, own in self.varying().items()}
        )


def no_constants(layers: int) -> Constants:
    """All 1, whatever the depth."""
    del layers
    return Constants()


def deepnorm_decoder(layers: int) -> Constants:
    """alpha = (2M)^(1/4), beta = (8M)^(-1/4), M = blocks; decoder-only and encoder-only alike.

    Source: Wang et al. 2022 (DeepNet, 2203.00555), section 4.3.
    """
    return Constants(alpha=(2 * layers) ** 0.25, beta=(8 * layers) ** -0.25)


def deepnorm_encoder_decoder(encoder: int, decoder: int) -> tuple[Constants, Constants]:
    """Constants of the encoder and of the decoder, N and M blocks, of one model with both.

    0.81 (N^4 M)^(1/16) and 0.87 (N^4 M)^(-1/16); (3M)^(1/4) and (12M)^(-1/4), for a decoder with
    cross-attention. Source: Wang et al. 2022 (2203.00555), section 4.3. torchscale divides by
    (N^4 M)^(1/16) / 1.15 instead, a beta 1.32 times too large.
    """
    both = encoder**4 * decoder
    return (
        Constants(alpha=0.81 * both ** (1 / 16), beta=0.87 * both ** (-1 / 16)),
        Constants(alpha=(3 * decoder) ** 0.25, beta=(12 * decoder) ** -0.25),
    )


def admin(layers: int) -> Constants:
    """alpha = sqrt((n + 1) / ln(n + 1) - 1), n = 2L sublayers: Admin without its profiling.

    Source: microsoft/admin-torch 2022, output change O(log n); Liu et al. 2020 (2004.08249).
    """
    n = 2 * layers
    return Constants(alpha=math.sqrt((n + 1) / math.log(n + 1) - 1))


def sub_ln(layers: int) -> Constants:
    """beta = sqrt(ln 2M), above 1. Source: Wang et al. 2022 (Magneto, 2210.06423), decoder-only."""
    return Constants(beta=math.sqrt(math.log(2 * layers)))


def t_fixup(layers: int) -> Constants:
    """beta = 0.67 N^(-1/4). Source: Huang et al. 2020 (T-Fixup), section 3.3, its encoder.

    The paper has no decoder-only stack; its encoder has the same two sublayers a block.
    """
    return Constants(beta=0.67 * layers**-0.25)


def keel(layers: int) -> Constants:
    """alpha = 2L; the first block has alpha = 1, and its attention no norm after the add.

    Source: Chen & Wei 2026 (KEEL, 2601.19895), equation 8 and section 3.1; its L counts sublayers.
    """
    alpha, after = np.full((layers, 2), 2.0 * layers), np.ones((layers, 2))
    alpha[0], after[0, 0] = 1.0, 0.0
    return Constants(alpha=alpha, after=after)


def mix_ln(layers: int, share: float = 0.25) -> Constants:
    """Post-norm in the first floor(share * L) blocks, pre-norm in the others.

    Source: Li et al. 2024 (Mix-LN, 2412.13795), section 3; share 0.25.
    """
    lower = np.repeat(np.arange(layers)[:, None] < math.floor(share * layers), 2, axis=1)
    return Constants(after=lower.astype(float), before=(~lower).astype(float))


def layer_norm_scaling(layers: int) -> Constants:
    """branch = 1 / sqrt(l), l = 1.. counts blocks. Source: Sun et al. 2025 (2502.05795), sec. 4."""
    blocks = np.arange(1, layers + 1)[:, None]
    return Constants(branch=np.repeat(blocks**-0.5, 2, axis=1))


BASE_DEPTH = 2  # blocks at which depth-muP and CompleteP are plain pre-norm


def depth_mup(layers: int) -> Constants:
    """branch = m^(-1/2), m = L / BASE_DEPTH. Source: Yang et al. 2023 (2310.02244), table 1."""
    return Constants(branch=(layers / BASE_DEPTH) ** -0.5)


def complete_p(layers: int) -> Constants:
    """branch = 1 / m, m = L / BASE_DEPTH. Source: Dey et al. 2025 (2505.01618), table 1."""
    return Constants(branch=BASE_DEPTH / layers)


class Tuning(NamedTuple):
    """What a method asks of Adam for the parameters of the layers; 1 for all others."""

    rate: float = 1.0  # multiplies the learning rate
    eps: float = 1.0  # multiplies Adam's epsilon


def no_tuning(layers: int) -> Tuning:
    """The optimizer as it is configured."""
    del layers
    return Tuning()


def depth_mup_tuning(layers: int) -> Tuning:
    """rate m^(-1/2), eps m^(-1/2), m = L / BASE_DEPTH.

    Source: Yang et al. 2023 for the rate; Dey et al. 2025, table 1 at alpha = 1/2, for eps.
    """
    m = layers / BASE_DEPTH
    return Tuning(rate=m**-0.5, eps=m**-0.5)


def complete_p_tuning(layers: int) -> Tuning:
    """rate 1, eps 1 / m, m = L / BASE_DEPTH. Source: Dey et al. 2025 (2505.01618), table 1.

    The width is held: factors of the width are 1.
    """
    return Tuning(eps=BASE_DEPTH / layers)


Scales = dict[str, Any]  # {role: factor on its std at init, or (L,) by block}


def no_scales(layers: int) -> Scales:
    """The init as it is configured."""
    del layers
    return {}


def out_scales(layers: int) -> Scales:
    """O and down times 1/sqrt(2L). Source: Radford et al. 2019 (GPT-2), section 2.3."""
    return dict.fromkeys(("o", "down"), depth_scale(layers))


def out_scales_by_block(layers: int) -> Scales:
    """O and down of block l = 1.. times 1/sqrt(2l).

    Source: Groeneveld et al. 2024 (OLMo, 2402.00838). Its code carries the factor over to the up
    projection of the MLP, too; this is the rule.
    """
    return dict.fromkeys(("o", "down"), (2.0 * np.arange(1, layers + 1)) ** -0.5)


def ds_scales(layers: int) -> Scales:
    """All matrices of block l = 1.. times 1/sqrt(l). Source: Zhang et al. 2019 (1908.11365)."""
    return dict.fromkeys(BRANCH_ROLES, np.arange(1, layers + 1) ** -0.5)


def t_fixup_scales(layers: int) -> Scales:
    """Embeddings times (9N)^(-1/4). Source: Huang et al. 2020 (T-Fixup), section 3.3."""
    return dict.fromkeys(("embed", "positions"), (9 * layers) ** -0.25)


def fixup_scales(layers: int) -> Scales:
    """n^(-1/(2m - 2)) for all matrices of a branch but its last, which is 0; n = 2L branches.

    m = 4 matrices in attention, 2 in the MLP. Source: Zhang et al. 2019 (1901.09321), section 3.
    """
    n = 2 * layers
    attention = dict.fromkeys(("q", "k", "v"), n ** (-1 / 6))
    return {**attention, "o": 0.0, "up": n**-0.5, "down": 0.0}


def small_scales(layers: int) -> Scales:
    """SmallInit: Q, K, V, O with variance 2 / (5 D). Source: Nguyen & Salazar 2019 (1910.05895).

    As a factor on Xavier's 2 / (D + D).
    """
    del layers
    return dict.fromkeys(("q", "k", "v", "o"), math.sqrt(2 / 5))


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


def skip_path_gain(norm_factors: np.ndarray, alpha: float | np.ndarray) -> np.ndarray:
    """Gain of the skip path alone from the input of each block to the top of the stack.

    norm_factors: (L, S), the factors of the norms that sit on the skip path of each block
    (S = 0 where none does). alpha: a number, or (L, 2). Returns (L,): the product over blocks
    l..L-1 of the factors and of the alphas of both sublayers. Post-norm under Xavier: about
    (1/sqrt 2)^(2L). Source: KEEL (2601.19895), equations 14-15, extended by alpha.
    """
    layers = norm_factors.shape[0]
    alphas = np.broadcast_to(np.asarray(alpha, float), (layers, 2))
    per_block = np.sum(np.log(norm_factors), axis=1) + np.sum(np.log(alphas), axis=1)
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
