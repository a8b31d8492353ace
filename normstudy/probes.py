"""Measurements at every layer at once: sampler x integrand, mean and standard error.

A probe takes the model as a callable and derivatives by `nudge`: zeros added to the stream before
every block. Reductions are in float32 or wider. Definitions: README, "what is measured".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from normstudy.dims import Stream, Streams


class Estimate(NamedTuple):
    """A norm and its standard error, one entry per layer."""

    norm: Array
    se: Array


def rademacher(key: Array, like: Array) -> Array:
    """Signs +-1 with the shape and dtype of `like`."""
    return jax.random.rademacher(key, like.shape, like.dtype)


def norm_from_squares(squares_KLB: Float[Array, "K L B"]) -> Estimate:
    """sqrt of the mean square over vectors K and sequences B, with its standard error.

    The sequences of the batch are fixed, so they add no sampling error of their own; the vectors'
    error is estimated within each sequence and added up (vectors are independent between them).
    """
    K, _, B = squares_KLB.shape
    mean = jnp.mean(squares_KLB, (0, 2))
    within = jnp.var(squares_KLB, axis=0, ddof=1) / K
    se_of_mean = jnp.sqrt(jnp.sum(within, -1)) / B
    norm = jnp.sqrt(mean)
    return Estimate(norm, se_of_mean / (2 * jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)))


def stream_gradients(loss: Callable[[Streams], Array], nudge: Streams) -> Float[Array, " S"]:
    """Frobenius norm of d loss / d x_l for l = 0..L, from one backward pass."""
    return jnp.sqrt(jnp.sum(_squares(jax.grad(loss)(nudge)), -1))


def jacobian_to_end(
    stack: Callable[[Streams], Stream], nudge: Streams, key: Array, vectors: int
) -> Estimate:
    """sqrt((1/(B T D)) E ||J^T v||^2), J = d x_L / d x_l, l = 0..L-1; 1 for the identity.

    One backward pass per vector, whatever the depth; one vector at a time, so that memory does not
    grow with their number.
    """
    top, pull = jax.vjp(stack, nudge)

    def one(key):
        return _squares(pull(rademacher(key, top))[0][:-1])

    return norm_from_squares(jax.lax.map(one, jax.random.split(key, vectors)) / _size(top))


def jacobian_of_blocks(
    block: Callable[[Any, Stream], Stream], layers: Any, inputs: Streams, key: Array, vectors: int
) -> Estimate:
    """The same norm for each block alone, J = d x_{l+1} / d x_l at the stream that it received."""

    def one_layer(key, layer):
        parameters, x = layer
        y, pull = jax.vjp(lambda x: block(parameters, x), x)
        key, *keys = jax.random.split(key, vectors + 1)
        squares = [_squares(pull(rademacher(k, y))[0]) for k in keys]
        return key, jnp.stack(squares)

    _, squares_LKB = jax.lax.scan(one_layer, key, (layers, inputs))
    return norm_from_squares(jnp.swapaxes(squares_LKB, 0, 1) / _size(inputs[0]))


def token_similarity(streams: Streams) -> Float[Array, " S"]:
    """Mean cosine between the stream vectors of a sequence's positions; 1 = collapsed."""
    T = streams.shape[2]
    unit = streams / jnp.linalg.norm(streams, axis=-1, keepdims=True)
    total = jnp.sum(jnp.sum(unit, 2) ** 2, -1)  # sum over all pairs of positions, i = j included
    return jnp.mean((total - T) / (T * (T - 1)), -1)


def activation_rms(streams: Streams) -> Float[Array, " S"]:
    """Root mean square of the entries of x_l, l = 0..L."""
    return jnp.sqrt(jnp.mean(streams.astype(jnp.float32) ** 2, (1, 2, 3)))


def measure(model: Any, batch: Array, unigram: Array, key: Array, vectors: int) -> dict[str, Any]:
    """All quantities of one probe, as a flat dict of arrays with axis 0 = layer.

    model: has start(tokens), stack(x, nudge, skip_only=), read(x) and layers (stacked blocks).
    batch: (B, T + 1) tokens. unigram: frequencies of the training split, shape (V,).
    """
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x0 = model.start(tokens)
    _, streams, taps = model.stack(x0)
    nudge = jnp.zeros_like(streams)
    end_key, block_key = jax.random.split(key)

    def loss(nudge):
        logits = model.read(model.stack(x0, nudge)[0])
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    log_p = jax.nn.log_softmax(model.read(streams[-1]))
    to_end = jacobian_to_end(lambda n: model.stack(x0, n)[0], nudge, end_key, vectors)
    skip = jacobian_to_end(lambda n: model.stack(x0, n, skip_only=True)[0], nudge, end_key, vectors)
    of_block = jacobian_of_blocks(
        lambda block, x: block(x)[0], model.layers, streams[:-1], block_key, vectors
    )
    return {
        "probe_loss": -jnp.mean(jnp.take_along_axis(log_p, targets[..., None], -1)),
        # KL(unigram || prediction): 0 where the model predicts letter frequencies and nothing else
        "unigram_kl": jnp.sum(jax.scipy.special.xlogy(unigram, unigram))
        - jnp.mean(log_p @ unigram),
        "stream_gradient": stream_gradients(loss, nudge),
        "jacobian_to_end": to_end.norm,
        "jacobian_to_end_se": to_end.se,
        "jacobian_of_block": of_block.norm,
        "jacobian_of_block_se": of_block.se,
        "skip_gain": skip.norm,
        "skip_gain_se": skip.se,
        "similarity": token_similarity(streams),
        "rms": activation_rms(streams),
        **{
            f"{name}/{sublayer}": values
            for sublayer, own in taps.items()
            for name, values in own.items()
        },
    }


def _squares(x: Array) -> Array:
    """Sum of squares over the last two axes (positions, channels), in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(wide * wide, (-2, -1))


def _size(x: Stream) -> int:
    """Entries of one sequence, T * D: a mean over sequences then gives 1/(B T D)."""
    return x.shape[-2] * x.shape[-1]
