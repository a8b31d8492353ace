"""What a norm computes. Where it sits is a row of placements.py."""

from __future__ import annotations

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


def unit_norm(x: Float[Array, "*B D"], eps: float) -> tuple[Array, Array]:
    """(x / sigma, 1 / sigma), sigma = ||x||, what ScaleNorm divides by.

    Source: Nguyen & Salazar 2019 (1910.05895), equation 6; there max(||x||, eps).
    """
    y, inverse = rms_norm(x, eps)
    root = x.shape[-1] ** -0.5
    return y * root, inverse * root


NORMS = {"layer": layer_norm, "rms": rms_norm, "scale": unit_norm}
SLOPE = 0.5  # of DyT at init. Source: Zhu et al. 2025 (2503.10622), section 4


class Norm(nnx.Module):
    """A norm with its gain (scale) and, where it has one, its shift (bias); 1 and 0 at init.

    kind: layer; rms; scale, with one gain for all channels, sqrt(width) at init; or tanh (DyT),
    scale * tanh(slope * x) + bias, which divides by nothing.
    """

    def __init__(self, kind: str, width: int, eps: float):
        self.kind, self.eps = kind, eps
        self.scale = nnx.Param(jnp.full((), width**0.5) if kind == "scale" else jnp.ones(width))
        if kind in ("layer", "tanh"):
            self.bias = nnx.Param(jnp.zeros(width))
        if kind == "tanh":
            self.slope = nnx.Param(jnp.full((), SLOPE))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        return self.measured(x)[0]

    def measured(self, x: Float[Array, "*B D"]) -> tuple[Array, Array]:
        """The output, and 1 / sigma at each position: (*B, D), (*B,)."""
        y, inverse = self._plain(x)
        y = y * _as_last_axis(self.scale[...], y)
        if self.kind in ("layer", "tanh"):
            y = y + _as_last_axis(self.bias[...], y)
        return y, inverse

    def _plain(self, x: Float[Array, "*B D"]) -> tuple[Array, Array]:
        """Without gain and shift. DyT's 1 / sigma: the root mean square of its slopes."""
        if self.kind != "tanh":
            return NORMS[self.kind](x, self.eps)
        wide = _wide(x)
        y = jnp.tanh(self.slope[...].astype(wide.dtype) * wide)
        slopes = self.slope[...].astype(wide.dtype) * (1 - y**2)
        return y.astype(x.dtype), jnp.sqrt(jnp.mean(slopes**2, -1))

    def gain(self) -> Float[Array, ""]:
        """rms(scale): what the norm multiplies by, on average over the channels."""
        return jnp.sqrt(jnp.mean(_wide(self.scale[...]) ** 2))

    def jacobian(self, x: Float[Array, " D"]) -> Float[Array, "D D"]:
        """d norm(x) / d x at one position, exactly, eps included.

        LayerNorm: diag(scale) / sigma (I - 11^T / D - y y^T / D), y = (x - mean) / sigma; RMSNorm
        and ScaleNorm lack the mean, DyT's is diagonal. Source: Xiong et al. 2020 (2002.04745),
        Lemma 3, in its exact form.
        """
        y, inverse = self._plain(x)
        D = x.shape[0]
        gain = jnp.diag(jnp.broadcast_to(self.scale[...].astype(x.dtype), (D,)))
        if self.kind == "tanh":
            return gain * self.slope[...].astype(x.dtype) @ jnp.diag(1 - y**2)
        unit = 1.0 if self.kind == "scale" else D**0.5  # the length of y
        inner = jnp.eye(D, dtype=x.dtype) - jnp.outer(y, y) / unit**2
        if self.kind == "layer":
            inner = inner - 1 / D
        return gain @ inner * inverse


def _as_last_axis(vector: Array, x: Array) -> Array:
    """A vector over the channels, or one number, with the rank and dtype of x."""
    return vector.astype(x.dtype).reshape((1,) * (x.ndim - vector.ndim) + vector.shape)


def _wide(x: Array) -> Array:
    """float32 at least: the reductions of a norm overflow and lose digits in bfloat16."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
