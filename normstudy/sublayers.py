"""What a sublayer computes: attention mixes positions, the MLP mixes channels.

They know nothing of the norms on the stream, nor of the residual add. A placement may hand them
norms for their inside: one before the last matrix, and in attention one each for q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array

from normstudy.config import Model
from normstudy.dims import Stream
from normstudy.inits import matrix
from normstudy.operations import PLAIN, Operations

ACTIVATIONS = {"gelu": jax.nn.gelu, "relu": jax.nn.relu}

Inner = Callable[[Array], Array]


def _nothing(h: Array) -> Array:
    return h


class Attention(nnx.Module):
    """Causal multi-head attention without biases. Source: Vaswani et al. 2017, section 3.2."""

    def __init__(self, cfg: Model, stds: dict, key: Array):
        self.heads, self.inner_width = cfg.heads, cfg.width
        square = (cfg.width, cfg.width)
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.q = nnx.Param(matrix(q_key, square, stds["q"]))
        self.k = nnx.Param(matrix(k_key, square, stds["k"]))
        self.v = nnx.Param(matrix(v_key, square, stds["v"]))
        self.o = nnx.Param(matrix(o_key, square, stds["o"]))

    def __call__(
        self,
        x_BTD: Stream,
        ops: Operations = PLAIN,
        mid: Inner = _nothing,
        heads: tuple[Inner, Inner, Inner] = (_nothing, _nothing, _nothing),
    ) -> Stream:
        """mid: of what attention makes, (B, T, D); heads: of q, k and v, (B, T, H, K)."""
        B, T, D = x_BTD.shape
        q, k, v = (
            norm(_project(ops, name, x_BTD, w).reshape(B, T, self.heads, D // self.heads))
            for name, w, norm in zip("qkv", (self.q, self.k, self.v), heads, strict=True)
        )
        with jax.named_scope("attention"):
            y_BTHK = ops.attend(q, k, v)
        return _project(ops, "o", mid(y_BTHK.reshape(B, T, D)), self.o)


class Mlp(nnx.Module):
    """down(activation(up(x))) without biases. Source: Vaswani et al. 2017, section 3.3."""

    def __init__(self, cfg: Model, stds: dict, key: Array):
        self.activation, self.inner_width = cfg.activation, cfg.ff
        up_key, down_key = jax.random.split(key)
        self.up = nnx.Param(matrix(up_key, (cfg.width, cfg.ff), stds["up"]))
        self.down = nnx.Param(matrix(down_key, (cfg.ff, cfg.width), stds["down"]))

    def __call__(self, x_BTD: Stream, ops: Operations = PLAIN, mid: Inner = _nothing) -> Stream:
        """mid: of what the activation makes, (B, T, F)."""
        h_BTF = _project(ops, "up", x_BTD, self.up)
        with jax.named_scope("activation"):
            h_BTF = ACTIVATIONS[self.activation](h_BTF)
        return _project(ops, "down", mid(h_BTF), self.down)


def _project(ops: Operations, name: str, x: Array, w: nnx.Param) -> Array:
    """x @ w in the dtype of x, under the matrix's own name (a place that origin.py can name)."""
    with jax.named_scope(name):
        return ops.matmul(x, w[...])
