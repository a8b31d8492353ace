"""The two operations in which a step spends its time, each in two forms.

PLAIN has every derivative, forward and reverse of any order: what probes measure. FUSED has a
backward pass of its own and no forward-mode derivative: what the training step runs. Both compute
the same function; tests hold their values and gradients together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

ATTENDED = "attended"  # name of what attention makes, for a backward pass that keeps it


class Operations(NamedTuple):
    """What the sublayers compute with."""

    matmul: Callable[[Array, Array], Array]
    attend: Callable[[Array, Array, Array], Array]
    hold: Callable[[Array], Array] = lambda x: x  # the stream, as the devices are to hold it


def matmul(x: Float[Array, "*B D"], w: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """x @ w in the dtype of x."""
    return x @ w.astype(x.dtype)


@jax.custom_vjp
def matmul_fused(x: Float[Array, "*B D"], w: Float[Array, "D F"]) -> Float[Array, "*B F"]:
    """The same. Its gradient by w is x^T g with x first, in the dtype of w.

    jax puts g first: on a CPU XLA then writes the wide gradient of the hidden layer out a second
    time, transposed, which took longer than the matmul. And in bfloat16 it rounds what a float32
    weight is about to receive.
    """
    return matmul(x, w)


def _matmul_forward(x: Array, w: Array) -> tuple[Array, tuple[Array, Array]]:
    return matmul(x, w), (x, w)


def _matmul_backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, w = kept
    rows, g_rows = (a.reshape(-1, a.shape[-1]) for a in (x, g))
    by_x = jax.lax.dot_general(g, w.astype(x.dtype), (((g.ndim - 1,), (1,)), ((), ())))
    return by_x, jnp.matmul(rows.T, g_rows, preferred_element_type=w.dtype)


matmul_fused.defvjp(_matmul_forward, _matmul_backward)


def attend(
    q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], v: Float[Array, "B T H K"]
) -> Float[Array, "B T H K"]:
    """Causal softmax(q k^T / sqrt(K)) v, scores in float32 or wider.

    The division by the softmax's sum comes after the product with v: its gradient is then a sum
    over K instead of one over positions, of a matrix that is never made (as in FlashAttention,
    Dao et al. 2022, 2205.14135, section 3.1). Source: Vaswani et al. 2017, section 3.2.1.
    """
    T, K = q.shape[1], q.shape[3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = jnp.einsum("BTHK,BSHK->BHTS", q * K**-0.5, k, preferred_element_type=wide)
    # added, not selected: an addition has no mask to carry and to apply again in its backward pass
    scores += jnp.where(jnp.tri(T, dtype=bool), 0, -jnp.inf).astype(wide)[None, None]
    largest = jax.lax.stop_gradient(jnp.max(scores, -1, keepdims=True))
    weights = jnp.exp(scores - largest)
    total = jnp.sum(weights, -1).transpose(0, 2, 1)[..., None]
    y = jnp.einsum("BHTS,BSHK->BTHK", weights.astype(v.dtype), v, preferred_element_type=wide)
    # named before the division, whose gradient asks for what was divided
    return (checkpoint_name(y, ATTENDED) / total).astype(v.dtype)


def attend_fused(q: Array, k: Array, v: Array) -> Array:
    """The same; on a GPU in 16 bits by cuDNN, which never holds the scores."""
    if jax.default_backend() == "gpu" and q.dtype.itemsize == 2:
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return checkpoint_name(y, ATTENDED)
    return attend(q, k, v)


PLAIN = Operations(matmul, attend)
FUSED = Operations(matmul_fused, attend_fused)
