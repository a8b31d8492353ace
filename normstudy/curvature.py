"""Sharpness: the largest eigenvalue of the loss's Hessian, plain and as Adam sees it.

Matrix-free: the Hessian is seen through its products with vectors, two gradients each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float
from matfree import decomp

DEPTH = 12  # of the Krylov space between two restarts; memory: DEPTH copies of the parameters
RESTARTS = 20  # at most; what is not converged by then says so by its residual


class Eigenvalue(NamedTuple):
    """A largest eigenvalue as found: never above the true one, to rounding."""

    value: Array
    residual: Array  # some eigenvalue lies within it of `value`
    products: Array  # Hessian-vector products taken
    vector: Array  # unit length; where the next search along a run may start


def largest(
    apply: Callable[[Array], Array], start: Float[Array, " N"], tolerance: float | Array
) -> Eigenvalue:
    """The largest eigenvalue of a symmetric map on vectors, by restarted Lanczos.

    Stops once the residual is at most tolerance * |value|, or after RESTARTS. Source: Lanczos 1950;
    restarts from the best vector.
    """
    depth = min(DEPTH, start.size)
    tridiagonalize = decomp.tridiag_sym(depth, custom_vjp=False)

    def once(v: Array) -> tuple[Array, Array, Array]:
        found = tridiagonalize(apply, v)
        small = _before_breakdown(jnp.asarray(found.J_small))
        best = jnp.linalg.eigh(small)[1][:, -1] @ jnp.nan_to_num(jnp.asarray(found.Q_tall))
        best = best / jnp.linalg.norm(best)
        # the recursion's own residual knows nothing of rounding in the products: take it anew
        image = apply(best)
        value = jnp.vdot(best, image)
        return value, jnp.linalg.norm(image - value * best), best

    def unfinished(carry: tuple) -> Array:
        i, value, residual, _ = carry
        return (i < RESTARTS) & (residual > tolerance * jnp.abs(value))

    def again(carry: tuple) -> tuple:
        i, *_, v = carry
        return (i + 1, *once(v))

    zero = jnp.zeros((), start.dtype)
    n, value, residual, vector = jax.lax.while_loop(
        unfinished, again, (jnp.int32(0), zero, zero + jnp.inf, start)
    )
    return Eigenvalue(value, residual, (depth + 1) * n, vector)


def sharpness(
    loss: Callable[[Any], Array],
    model: Any,
    start: Float[Array, " N"],
    tolerance: float,
    preconditioner: Any = None,
) -> Eigenvalue:
    """`largest` of H, or of P^-1/2 H P^-1/2 with a diagonal P > 0 of the model's structure.

    loss: model -> scalar. Source of the preconditioned form: Cohen et al. 2022 (2207.14484), §2.
    """
    flat, unravel = ravel_pytree(model)
    scale = jnp.ones_like(flat)
    if preconditioner is not None:
        scale = jax.lax.rsqrt(ravel_pytree(preconditioner)[0])

    def apply(v: Array) -> Array:
        gradient = lambda flat: ravel_pytree(jax.grad(loss)(unravel(flat)))[0]
        return scale * jax.jvp(gradient, (flat,), (scale * v,))[1]

    return largest(apply, start, tolerance)


def adam_preconditioner(nu: Any, count: Array, b1: float, b2: float, eps: float) -> Any:
    """P = (1 - b1^t) (sqrt(nu / (1 - b2^t)) + eps) at update t = count, nu after that update.

    What Adam divides by, with its bias corrections. Source: Cohen et al. 2022 (2207.14484), §2.
    """
    early, late = 1 - b1**count, 1 - b2**count
    return jax.tree.map(lambda v: early * (jnp.sqrt(v / late) + eps), nu)


def start_vector(model: Any, key: Array) -> Float[Array, " N"]:
    """A random first vector for `sharpness` of this model, entries normal."""
    flat, _ = ravel_pytree(model)
    return jax.random.normal(key, flat.shape, flat.dtype)


def _before_breakdown(small: Float[Array, "K K"]) -> Float[Array, "K K"]:
    """A tridiagonal matrix up to where the Krylov space became invariant, what follows put last.

    From there on the recursion divides rounding errors (or 0) by their length.
    """
    small = jnp.nan_to_num(small, nan=0.0, posinf=0.0, neginf=0.0)
    size = jnp.max(jnp.abs(small))
    couples = jnp.diagonal(small, 1) > jnp.finfo(small.dtype).eps ** 0.75 * size
    alive = jnp.concatenate([jnp.ones(1, bool), jnp.cumprod(couples).astype(bool)])
    both = jnp.outer(alive, alive)
    last = -2 * jnp.where(size > 0, size, 1)
    return jnp.where(both, small, 0) + jnp.diag(jnp.where(alive, 0, last))
