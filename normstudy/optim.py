"""The optimizer, without its learning rate.

The rate enters the compiled step as data, from the audited table of schedules.py: what is printed
is what is applied, and arms that differ in their schedule alone share one program.
"""

from __future__ import annotations

import dataclasses

import jax
import optax

from normstudy.config import Optim
from normstudy.roles import OF_NORMS, ROLES, role_of
from normstudy.theory import Tuning
from normstudy.trees import path_names

NO_TUNING = Tuning()


def static_part(optim: Optim) -> Optim:
    """The config with its schedule fields at their defaults: what the compiled step depends on."""
    plain = Optim()
    schedule = ("lr", "schedule", "warmup", "end_fraction", "decay_fraction", "schedule_scale")
    return dataclasses.replace(optim, **{name: getattr(plain, name) for name in schedule})


def direction(optim: Optim, tuning: Tuning = NO_TUNING) -> optax.GradientTransformation:
    """Gradient -> direction; the update is minus learning rate times it.

    tuning: what a placement asks of Adam for the layers; SGD takes none of it.
    """
    adam = optax.scale_by_adam(b1=optim.b1, b2=optim.b2, eps=optim.eps)
    if tuning != NO_TUNING:
        # m / s / (sqrt(v) / s + eps) = m / (sqrt(v) + s eps)
        adam = optax.chain(_times_layers(1 / tuning.eps), adam, _times_layers(tuning.rate))
    chains = {
        "sgd": [],
        "adam": [adam],
        "adamw": [adam, optax.add_decayed_weights(optim.weight_decay, mask=decayed)],
    }
    clip = [optax.clip_by_global_norm(optim.clip)] if optim.clip else []
    kept = [optax.masked(optax.set_to_zero(), of_norms)] if optim.frozen == "norms" else []
    return optax.chain(optax.identity(), *clip, *chains[optim.optimizer], *kept)


def _times_layers(factor: float) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, params: times_layers(updates, factor))


def times_layers(tree, factor: float):
    """The tree with every leaf of the layers multiplied by the factor."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: factor * leaf if path_names(path)[0] == "layers" else leaf, tree
    )


def of_norms(params):
    """Mask with the structure of params: True where the role is a norm's."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: role_of(path_names(path)) in OF_NORMS, params
    )


def decayed(params):
    """Mask with the structure of params: True where the role takes weight decay."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: ROLES[role_of(path_names(path))].decay, params
    )
