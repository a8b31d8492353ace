"""Anatomy of one update: what a step of the optimizer does to streams, sigmas, logits and loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from normstudy.probes import by_layer, frobenius


class Forward(NamedTuple):
    """What a model makes of a batch."""

    logits: Array  # (B, T, V), float32 or wider
    streams: Array  # (S, B, T, D)
    taps: dict[str, Any]  # of every sublayer, axis 0 = L


def forward(model: Any, tokens: Array, **how: Any) -> Forward:
    """model: has start, stack and read; how: keywords of its stack. tokens: (B, T)."""
    top, streams, taps = model.stack(model.start(tokens), **how)
    logits = model.read(top)
    return Forward(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), streams, taps)


def of_update(gradients: Any, updates: Any) -> dict[str, Array]:
    """Norms of gradients and updates by layer, and the change of the loss in nats that they
    predict to first order.
    """
    return {
        **by_layer("gradient", gradients),
        **by_layer("update", updates),
        "loss_change_predicted": jnp.asarray(optax.tree.vdot(gradients, updates)),
    }


def effect(before: Any, after: Any, batch: Array, **how: Any) -> dict[str, Array]:
    """What an update did to the batch that gave its gradients, batch (B, T + 1).

    before, after: models; how: keywords of their stack. Values: relative Frobenius norms of
    changes, `function_update` (S,) of x_0..x_L and `logits_update`; `sigma_update_NORM/SUBLAYER`
    (L,), mean over positions of |sigma'/sigma - 1|; `moved/MATRIX`, the share of entries that are
    not what they were (an update below half a unit in the last place is lost); `loss_change` in
    nats; the norms of the weights before.
    Source of the function update: Wang et al. 2022 (DeepNet, 2203.00555), section 3.
    """
    logits, streams, taps = forward(before, batch[:, :-1], **how)
    new_logits, new_streams, new_taps = forward(after, batch[:, :-1], **how)
    found = {
        "function_update": _relative(new_streams - streams, streams, (1, 2, 3)),
        "logits_update": _relative(new_logits - logits, logits, (0, 1, 2)),
        "loss_change": _loss(new_logits, batch) - _loss(logits, batch),
    }
    for sublayer, own in taps.items():
        for name, inverse in own.items():
            if name.startswith("inverse_sigma_"):
                ratio = inverse / new_taps[sublayer][name]  # sigma' / sigma
                norm = name.removeprefix("inverse_sigma_")
                change = jnp.mean(jnp.abs(ratio - 1), (1, 2))
                found[f"sigma_update_{norm}/{sublayer}"] = change
    share = by_layer("moved", jax.tree.map(moved, before, after), jnp.mean)
    return found | share | by_layer("weight", before)


def moved(before: Array, after: Array) -> Array:
    """1 where an entry changed, 0 where it did not, in float32."""
    return (before != after).astype(jnp.float32)


def half_curvature(loss: Any, model: Any, updates: Any, batch: Array) -> Array:
    """Half the second derivative of loss(model, batch) along the updates, in nats: what the
    first-order prediction leaves out at second order.
    """
    gradient = lambda model: jax.grad(loss)(model, batch)
    image = jax.jvp(gradient, (model,), (updates,))[1]
    return jnp.asarray(optax.tree.vdot(updates, image)) / 2


def _loss(logits: Array, batch: Array) -> Array:
    targets = batch[:, 1:]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _relative(change: Array, of: Array, axes: tuple[int, ...]) -> Array:
    return frobenius(change, axes) / frobenius(of, axes)
