"""The compiled functions: one update, what is measured beside it, and the state they change.

Arms that share shapes and optimizer share them: rates, initial scales and seeds enter as data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from normstudy import (
    anatomy,
    config,
    curvature,
    inits,
    mesh,
    operations,
    optim,
    placements,
    probes,
    theory,
)
from normstudy.model import Model


class State(NamedTuple):
    """All that changes during training."""

    step: Array  # updates done
    alive: Array  # False once a loss or gradient was not finite: the state then stays as it was
    model: Model
    opt_state: Any


Starts = tuple[Array, Array]  # vectors for the search of the two largest eigenvalues


class Programs(NamedTuple):
    """The compiled functions of one shape."""

    init: Callable  # (key, stds) -> State
    plain: Callable  # (state, batch, lr) -> (state, metrics)
    probing: Callable  # (state, batch, lr, probe_batch, unigram, key) -> (state, metrics)
    measure: Callable  # (model, probe_batch, unigram, key) -> probe
    sharpness: Callable  # (state, batch, lr, start vectors) -> (probe, where to start next time)
    loss: Callable  # (model, batch) -> mean loss
    abstract: State  # shapes, dtypes and shardings


def token_loss(model: Model, batch: Array) -> Array:
    """Mean next-token cross-entropy in nats; batch: (B, T + 1) tokens."""
    return _loss_and_forward(model, batch)[0]


def _loss_and_forward(
    model: Model, batch: Array, ops: operations.Operations = operations.PLAIN
) -> tuple[Array, anatomy.Forward]:
    """The loss, and what the model made of the batch on the way."""
    forward = anatomy.forward(model, batch[:, :-1], ops=ops)
    with jax.named_scope("loss"):
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            forward.logits, batch[:, 1:]
        )
        return losses.mean(), forward


def update(
    state: State,
    batch: Array,
    lr: Array,
    *,
    transform: optax.GradientTransformation,
    devices: jax.sharding.Mesh | None = None,
) -> tuple[State, dict[str, Array], tuple]:
    """One update: (new state, scalars, (forward pass before it, gradients, updates))."""
    model: Any = state.model  # optax's own type of a pytree leaves modules out
    ops = operations.FUSED
    if devices is not None and not mesh.data_alone(devices):
        ops = ops._replace(hold=functools.partial(mesh.split_by_batch, devices))
    loss = functools.partial(_loss_and_forward, ops=ops)
    gradient = jax.value_and_grad(loss, has_aux=True)
    if devices is not None:
        gradient = mesh.mean_over_data(devices, gradient, anatomy.BATCH_AXES)
    (loss, forward), gradients = gradient(model, batch)
    direction, opt_state = transform.update(gradients, state.opt_state, model)
    updates = jax.tree.map(lambda d: -lr * d, direction)
    gradient_norm = optax.tree.norm(gradients)
    alive = state.alive & jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
    new = State(state.step + 1, alive, optax.apply_updates(model, updates), opt_state)  # type: ignore[arg-type]
    frozen = state._replace(alive=alive)
    new = jax.tree.map(lambda a, b: jnp.where(alive, a, b), new, frozen)
    scalars = {
        "loss": loss,
        "gradient_norm": gradient_norm,
        "update_norm": optax.tree.norm(updates),
        "alive": alive,
    }
    return new, scalars, (forward, gradients, updates)


def sharpness(
    state: State,
    batch: Array,
    lr: Array,
    start: Starts | None,
    *,
    optimizer: config.Optim,
    tolerance: float = 0.01,
) -> tuple[dict[str, Array], Starts]:
    """Largest eigenvalue of the training loss's Hessian, and as the optimizer sees it.

    Names as in quantities.py, NAME_residual beside each. start: the vectors of the search before,
    or None for random ones. Decay and clipping are left out.
    """
    loss = lambda model: token_loss(model, batch)
    if start is None:
        random = curvature.start_vector(state.model, jax.random.key(0))
        start = (random, random)
    found = {"sharpness": curvature.sharpness(loss, state.model, start[0], tolerance)}
    own, threshold = found["sharpness"], theory.stability_threshold(None)
    if optimizer.optimizer != "sgd":
        model: Any = state.model
        gradients = jax.grad(loss)(model)
        _, after = optim.direction(optimizer).update(gradients, state.opt_state, model)
        nu, count = (optax.tree.get(after, name) for name in ("nu", "count"))
        scale = curvature.adam_preconditioner(nu, count, optimizer.b1, optimizer.b2, optimizer.eps)
        own = curvature.sharpness(loss, model, start[1], tolerance, scale)
        found["sharpness_adam"] = own
        threshold = theory.stability_threshold(optimizer.b1)
    probe = {
        "edge_ratio": own.value * lr / threshold,
        "edge_ratio_residual": own.residual * lr / threshold,
    }
    for name, eigenvalue in found.items():
        probe |= {name: eigenvalue.value, f"{name}_residual": eigenvalue.residual}
    return probe, (found["sharpness"].vector, own.vector)


def _one(model: config.Model, optimizer: config.Optim, vectors: int) -> tuple[Callable, Callable]:
    """(plain, probing) of one run, not yet compiled; devices: the mesh its batch is split over."""
    transform = optim.direction(optimizer)

    def plain(state, batch, lr, devices=None):
        new, scalars, _ = update(state, batch, lr, transform=transform, devices=devices)
        return new, clipped(scalars)

    def clipped(scalars: dict[str, Array]) -> dict[str, Array]:
        """Beside the raw norm of the gradient, what of it was applied."""
        if optimizer.clip:
            applied = jnp.minimum(scalars["gradient_norm"], optimizer.clip)
            scalars["gradient_norm_applied"] = applied
        return scalars

    def probing(state, batch, lr, probe_batch, unigram, key, devices=None):
        new, scalars, (forward, gradients, updates) = update(
            state, batch, lr, transform=transform, devices=devices
        )
        models = (state.model, new.model)
        probe = {
            **probes.measure(state.model, probe_batch, unigram, key, vectors),
            **probes.by_layer("gradient", gradients),
            **probes.by_layer("update", updates),
            **probes.by_layer("weight", state.model),
            **anatomy.of_update(models, forward, gradients, updates, batch),
        }
        return new, clipped(scalars) | {"probe": probe}

    return plain, probing


@functools.cache
def _compiled(
    model: config.Model, optimizer: config.Optim, vectors: int, devices: jax.sharding.Mesh
) -> Programs:
    """Compile-once functions for one architecture, optimizer (see optim.static_part) and mesh."""
    transform = optim.direction(optimizer)
    plain, probing = _one(model, optimizer, vectors)

    def init(key: Array, stds: dict) -> State:
        params = Model(model, stds, key)
        return State(jnp.int32(0), jnp.bool(True), params, transform.init(params))  # type: ignore[arg-type]

    def measure(params, probe_batch, unigram, key):
        return probes.measure(params, probe_batch, unigram, key, vectors)

    stds = inits.standard_deviations(model, config.Init(), 1.0)
    abstract = jax.eval_shape(init, jax.random.key(0), stds)
    abstract = mesh.placed(abstract, mesh.state_shardings(devices, abstract))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = functools.partial(
        jax.jit, donate_argnums=0, out_shardings=(shardings, mesh.replicated(devices))
    )
    return Programs(
        init=jax.jit(init, out_shardings=shardings),
        plain=step(functools.partial(plain, devices=devices)),
        probing=step(functools.partial(probing, devices=devices)),
        measure=jax.jit(measure),
        sharpness=jax.jit(functools.partial(sharpness, optimizer=optimizer)),
        loss=jax.jit(token_loss),
        abstract=abstract,
    )


class Ensemble(NamedTuple):
    """One program for M runs that differ in seed, initial scales and rates; axis 0 = M."""

    join: Callable  # (M states) -> states
    plain: Callable  # (states, batch, lr (M,)) -> (states, metrics)
    probing: Callable  # (states, batch, lr (M,), probe_batch, unigram, keys (M,)) -> the same
    own: Callable  # (states, m) -> State of member m, laid out as the run alone has it


@functools.cache
def _ensemble(
    model: config.Model,
    optimizer: config.Optim,
    vectors: int,
    devices: jax.sharding.Mesh,
    members: int,
) -> Ensemble:
    """Members are spread over the data axis where it divides them, or else their batches are."""
    alone = _compiled(model, optimizer, vectors, devices).abstract
    plain, probing = _one(model, optimizer, vectors)
    spread = mesh.can_spread(devices, members)

    def all_members(one: Callable, axes: tuple[int | None, ...]) -> Callable:
        if spread:
            each = jax.vmap(one, in_axes=axes)
            return mesh.members_over_data(devices, each, axes)
        return jax.vmap(functools.partial(one, devices=devices), in_axes=axes)

    shardings = mesh.of_members(alone, spread)
    step = functools.partial(
        jax.jit, donate_argnums=0, out_shardings=(shardings, mesh.replicated(devices))
    )
    return Ensemble(
        join=jax.jit(
            lambda *states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
            out_shardings=shardings,
        ),
        plain=step(all_members(plain, (0, None, 0))),
        probing=step(all_members(probing, (0, None, 0, None, None, 0))),
        own=jax.jit(
            lambda states, m: jax.tree.map(lambda leaf: leaf[m], states),
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, alone),
        ),
    )


def of(run: config.Run) -> tuple[Programs, jax.sharding.Mesh]:
    """The programs of a run, and the mesh they run on."""
    devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    return on(run, devices), devices


def on(run: config.Run, devices: jax.sharding.Mesh) -> Programs:
    """The programs of a run on a mesh, which may be of devices that are only compiled for."""
    optimizer = optim.static_part(run.optim)
    return _compiled(run.model, optimizer, run.probe.vectors, devices)


def ensemble_of(run: config.Run, members: int) -> Ensemble:
    """The program of so many runs like this one; they share all but seed, init and schedule."""
    devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    optimizer = optim.static_part(run.optim)
    return _ensemble(run.model, optimizer, run.probe.vectors, devices, members)


def initial_state(run: config.Run, compiled: Programs) -> State:
    """The state at step 0: a function of config and seed, the same on any mesh."""
    return compiled.init(jax.random.key(run.seed), standard_deviations(run))


def standard_deviations(run: config.Run) -> dict[str, float]:
    """{role: std at step 0}, with the placement's beta."""
    beta = placements.row(run.model.placement).constants(run.model.layers).beta
    return inits.standard_deviations(run.model, run.init, beta)
