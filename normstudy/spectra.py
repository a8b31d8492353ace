"""Singular values of Jacobians: the largest to a stated tolerance, all of them where they fit.

Matrix-free: a Jacobian is seen through its products with vectors, one sequence at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from matfree import decomp

from normstudy.dims import Streams

DEPTH = 12  # of the Krylov space between two restarts; memory: 2 DEPTH vectors
RESTARTS = 50  # at most; what is not converged by then says so by its residual


class Singular(NamedTuple):
    """A largest singular value as found: never above the true one, to rounding."""

    value: Array
    residual: Array  # some singular value lies within it of `value`
    products: Array  # J v and J^T u taken


def largest(
    apply: Callable[[Array], Array], like: Array, key: Array, tolerance: float | Array
) -> Singular:
    """The largest singular value of a linear map, by restarted Golub-Kahan bidiagonalization.

    apply: x -> J x for x with the shape and dtype of `like`. Stops once the residual is at most
    tolerance * value, or after RESTARTS. Source: Golub & Kahan 1965; restarts from the best vector.
    """
    image = jax.eval_shape(apply, like)
    depth = min(DEPTH, like.size, image.size)
    bidiagonalize = decomp.bidiag(depth)
    start = jax.random.normal(key, like.shape, like.dtype)
    # lengths are taken through squares, which underflow below 1e-19: so in units of a first product
    unit = jnp.max(jnp.abs(apply(start)))
    unit = jnp.where(unit > 0, unit, 1)

    def scaled(v: Array) -> Array:
        # held apart from what is made of it: XLA takes (x / unit) / unit for x / unit^2
        return jax.lax.optimization_barrier(apply(v) / unit)

    def once(v: Array) -> tuple[Array, Array, Array]:
        found = bidiagonalize(scaled, v)
        right = jnp.linalg.svd(_before_breakdown(jnp.asarray(found.J_small)))[2]
        best = jnp.tensordot(right[0], jnp.nan_to_num(found.Q_tall[1]), 1)
        best = best / jnp.linalg.norm(jnp.ravel(best))
        # the recursion's own residual knows nothing of rounding in the products: take it anew
        up, pull = jax.vjp(scaled, best)
        value = jnp.linalg.norm(jnp.ravel(up))
        (down,) = pull(up / jnp.where(value > 0, value, 1))
        return value, jnp.linalg.norm(jnp.ravel(down - value * best)), best

    def unfinished(carry: tuple) -> Array:
        i, value, residual, _ = carry
        return (i < RESTARTS) & (residual > tolerance * value)

    def again(carry: tuple) -> tuple:
        i, _, _, v = carry
        return (i + 1, *once(v))

    infinite = jnp.full((), jnp.inf, like.dtype)
    n, value, residual, _ = jax.lax.while_loop(
        unfinished, again, (jnp.int32(0), jnp.zeros_like(infinite), infinite, start)
    )
    return Singular(unit * value, unit * residual, 1 + 2 * (depth + 1) * n)


def of_blocks(
    block: Callable[[Any, Array], Array], layers: Any, inputs: Streams, key: Array, tolerance: float
) -> Singular:
    """`largest` of d x_{l+1} / d x_l for each layer and sequence: arrays (L, B).

    block: (parameters of one layer, stream (1, T, D)) -> stream. inputs: x_0..x_{L-1}.
    """

    def one_layer(layer: tuple) -> Singular:
        parameters, x_BTD = layer

        def one_sequence(x_TD: Array) -> Singular:
            x = x_TD[None]
            tangent = lambda v: jax.jvp(lambda x: block(parameters, x), (x,), (v,))[1]
            return largest(tangent, x, key, tolerance)

        return jax.lax.map(one_sequence, x_BTD)

    return jax.lax.map(one_layer, (layers, inputs))


def to_end(
    stack: Callable[[Streams], Array], nudge: Streams, wanted: Array, key: Array, tolerance: float
) -> Singular:
    """`largest` of d x_L / d x_l at each of the wanted layers l, of all sequences of the nudge
    together: arrays (len(wanted),). A product costs a pass through the whole stack, so that all
    layers of a deep stack cost L^2.
    """

    def one_layer(index: Array) -> Singular:
        def tangent(v: Array) -> Array:
            at_layer = jax.lax.dynamic_update_index_in_dim(jnp.zeros_like(nudge), v, index, 0)
            return jax.jvp(stack, (nudge,), (at_layer,))[1]

        return largest(tangent, nudge[0], key, tolerance)

    return jax.lax.map(one_layer, wanted)


def whole(
    function: Callable[[Array], Array], x: Float[Array, "T D"], chunk: int
) -> Float[Array, " N"]:
    """All singular values, largest first, of the Jacobian of a map (T, D) -> (T, D) at x; N = T D.

    Rows are made `chunk` at a time: beside the N x N matrix memory holds chunk backward passes.
    """
    y, pull = jax.vjp(function, x)
    basis = jnp.eye(y.size, dtype=y.dtype).reshape(y.size, *y.shape)
    rows = jax.lax.map(lambda row: pull(row)[0], basis, batch_size=chunk)
    return jnp.linalg.svd(rows.reshape(y.size, x.size), compute_uv=False)


def _before_breakdown(small: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """An upper bidiagonal matrix up to where the Krylov space became invariant, then zeros.

    From there on the recursion divides rounding errors (or 0) by their length, and what it makes of
    them may grow: so an entry is compared with those before it alone.
    """
    small = jnp.nan_to_num(small, nan=0.0, posinf=0.0, neginf=0.0)
    beside = jnp.append(jnp.diagonal(small, 1), 0)
    entries = jnp.ravel(jnp.stack([jnp.diagonal(small), beside], 1))  # as the recursion makes them
    goes_on = entries > jnp.finfo(small.dtype).eps ** 0.75 * jax.lax.cummax(entries)
    alive = jnp.cumprod(goes_on).astype(bool)
    columns = jnp.concatenate([jnp.ones(1, bool), alive[1:-1:2]])
    return jnp.where(jnp.outer(alive[::2], columns), small, 0)
