"""What a sublayer computes: attention mixes positions, the MLP mixes channels.

They know nothing of the norms on the stream, nor of the residual add.
"""

from __future__ import annotations

import jax
from flax import nnx
from jaxtyping import Array

from normstudy.config import Model
from normstudy.dims import Stream
from normstudy.inits import matrix

ACTIVATIONS = {"gelu": jax.nn.gelu, "relu": jax.nn.relu}


class Attention(nnx.Module):
    """Causal multi-head attention without biases. Source: Vaswani et al. 2017, section 3.2."""

    def __init__(self, cfg: Model, stds: dict, key: Array):
        self.heads = cfg.heads
        square = (cfg.width, cfg.width)
        q_key, k_key, v_key, o_key = jax.random.split(key, 4)
        self.q = nnx.Param(matrix(q_key, square, stds["q"]))
        self.k = nnx.Param(matrix(k_key, square, stds["k"]))
        self.v = nnx.Param(matrix(v_key, square, stds["v"]))
        self.o = nnx.Param(matrix(o_key, square, stds["o"]))

    def __call__(self, x_BTD: Stream) -> Stream:
        B, T, D = x_BTD.shape
        q, k, v = (
            (x_BTD @ w[...].astype(x_BTD.dtype)).reshape(B, T, self.heads, D // self.heads)
            for w in (self.q, self.k, self.v)
        )
        # the XLA implementation: fused kernels have no JVP, and the probes need every derivative
        y_BTHK = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")
        return y_BTHK.reshape(B, T, D) @ self.o[...].astype(x_BTD.dtype)


class Mlp(nnx.Module):
    """down(activation(up(x))) without biases. Source: Vaswani et al. 2017, section 3.3."""

    def __init__(self, cfg: Model, stds: dict, key: Array):
        self.activation = cfg.activation
        up_key, down_key = jax.random.split(key)
        self.up = nnx.Param(matrix(up_key, (cfg.width, cfg.ff), stds["up"]))
        self.down = nnx.Param(matrix(down_key, (cfg.ff, cfg.width), stds["down"]))

    def __call__(self, x_BTD: Stream) -> Stream:
        h_BTF = ACTIVATIONS[self.activation](x_BTD @ self.up[...].astype(x_BTD.dtype))
        return h_BTF @ self.down[...].astype(x_BTD.dtype)
