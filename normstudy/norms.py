"""What a norm computes. Where it sits is a row of placements.py."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def layer_norm(x: Float[Array, "*B D"], eps: float) -> tuple[Array, Array]:
    """((x - mean) / sigma, 1 / sigma), sigma = sqrt(var + eps), statistics in float32 or wider.

    Source: Ba et al. 2016 (1607.06450), equation 4. Returns shapes (*B, D) and (*B,).
    """
    wide = _wide(x)
    centred = wide - jnp.mean(wide, -1, keepdims=True)
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + eps)
    return (centred * inverse).astype(x.dtype), inverse[..., 0]


def rms_norm(x: Float[Array, "*B D"], eps: float) -> tuple[Array, Array]:
    """(x / sigma, 1 / sigma), sigma = sqrt(mean x^2 + eps). Source: Zhang & Sennrich 2019."""
    wide = _wide(x)
    inverse = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (wide * inverse).astype(x.dtype), inverse[..., 0]


NORMS = {"layer": layer_norm, "rms": rms_norm}


class Norm(nnx.Module):
    """A norm with its gain (scale) and, for LayerNorm, its shift (bias); 1 and 0 at init."""

    def __init__(self, kind: Literal["layer", "rms"], width: int, eps: float):
        self.kind, self.eps = kind, eps
        self.scale = nnx.Param(jnp.ones(width))
        if kind == "layer":
            self.bias = nnx.Param(jnp.zeros(width))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.measured(x)[0]

    def measured(self, x: Float[Array, "*B D"]) -> tuple[Array, Array]:
        """The output, and 1 / sigma at each position: (*B, D), (*B,)."""
        y, inverse = NORMS[self.kind](x, self.eps)
        y = y * _as_last_axis(self.scale[...], y)
        if self.kind == "layer":
            y = y + _as_last_axis(self.bias[...], y)
        return y, inverse

    def gain(self) -> Float[Array, ""]:
        """rms(scale): what the norm multiplies by, on average over the channels."""
        return jnp.sqrt(jnp.mean(_wide(self.scale[...]) ** 2))

    def jacobian(self, x: Float[Array, " D"]) -> Float[Array, "D D"]:
        """d norm(x) / d x at one position, exactly, eps included.

        LayerNorm: diag(scale) / sigma (I - 11^T / D - y y^T / D), y = (x - mean) / sigma; RMSNorm
        lacks the mean. Source: Xiong et al. 2020 (2002.04745), Lemma 3, in its exact form.
        """
        y, inverse = NORMS[self.kind](x, self.eps)
        D = x.shape[0]
        inner = jnp.eye(D, dtype=x.dtype) - jnp.outer(y, y) / D
        if self.kind == "layer":
            inner = inner - 1 / D
        return jnp.diag(self.scale[...].astype(x.dtype)) @ inner * inverse


def _as_last_axis(vector: Float[Array, " D"], x: Array) -> Array:
    """A vector over the channels with the rank and dtype of x."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - 1) + vector.shape)


def _wide(x: Array) -> Array:
    """float32 at least: the reductions of a norm overflow and lose digits in bfloat16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
