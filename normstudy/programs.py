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
    data,
    inits,
    mesh,
    operations,
    optim,
    placements,
    probes,
    runtime,
    theory,
)
from normstudy.errors import UserError
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
    step: Callable  # (state, batch, lr) -> (state, metrics); the state given is given away
    measure: Callable  # (model, probe_batch, unigram, key) -> probe
    effect: Callable  # (model before, model after, batch) -> what the update between them did
    sharpness: Callable  # (state, batch, lr, start vectors) -> (probe, where to start next time)
    profile: Callable  # (model, batch) -> the model with its profiled gain set
    loss: Callable  # (model, batch) -> mean loss
    abstract: State  # shapes, dtypes and shardings


def token_loss(model: Model, batch: Array, ops: operations.Operations = operations.PLAIN) -> Array:
    """Mean next-token cross-entropy in nats; batch: (B, T + 1) tokens."""
    logits = anatomy.forward(model, batch[:, :-1], ops=ops).logits
    with jax.named_scope("loss"):
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:])
        return losses.mean()


def update(
    state: State,
    batch: Array,
    lr: Array,
    *,
    transform: optax.GradientTransformation,
    devices: jax.sharding.Mesh | None = None,
) -> tuple[State, dict[str, Any], tuple[Any, Any]]:
    """One update: (new state, what is logged of it, (gradients, updates)).

    Logged: scalars, and "update": what a probe says of it that nothing but the update knows.
    """
    model: Any = state.model  # optax's own type of a pytree leaves modules out
    ops = _on(devices, operations.FUSED)
    gradient = jax.value_and_grad(functools.partial(token_loss, ops=ops))
    if devices is not None:
        gradient = mesh.mean_over_data(devices, gradient)
    loss, gradients = gradient(model, batch)
    direction, opt_state = transform.update(gradients, state.opt_state, model)
    updates = jax.tree.map(lambda d: -lr * d, direction)
    made = anatomy.of_update(gradients, updates)
    gradient_norm, update_norm = (_norm_of_all(made, name) for name in ("gradient", "update"))
    alive = state.alive & jnp.isfinite(loss) & jnp.isfinite(gradient_norm)
    new = State(state.step + 1, alive, optax.apply_updates(model, updates), opt_state)  # type: ignore[arg-type]
    frozen = state._replace(alive=alive)
    new = jax.tree.map(lambda a, b: jnp.where(alive, a, b), new, frozen)
    logged = {
        "loss": loss,
        "gradient_norm": gradient_norm,
        "update_norm": update_norm,
        "alive": alive,
        "update": made,
    }
    return new, logged, (gradients, updates)


def _on(
    devices: jax.sharding.Mesh | None, ops: operations.Operations = operations.PLAIN
) -> operations.Operations:
    """The operations on a mesh, which has to be told how to lay the stream out."""
    if devices is None or mesh.data_alone(devices):
        return ops
    return ops._replace(hold=functools.partial(mesh.split_by_batch, devices))


def _norm_of_all(by_layer: dict[str, Array], name: str) -> Array:
    """The norm of a whole tree, from those of its parts."""
    return optax.tree.norm([own for key, own in by_layer.items() if key.startswith(name + "/")])


def sharpness(
    state: State,
    batch: Array,
    lr: Array,
    start: Starts | None,
    *,
    optimizer: config.Optim,
    tuning: theory.Tuning = optim.NO_TUNING,
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
        transform = optim.direction(optimizer, tuning)
        _, after = transform.update(gradients, state.opt_state, model)
        nu, count = (optax.tree.get(after, name) for name in ("nu", "count"))
        scale = curvature.adam_preconditioner(nu, count, optimizer.b1, optimizer.b2, optimizer.eps)
        if tuning != optim.NO_TUNING:
            scale = optim.times_layers(scale, tuning.eps / tuning.rate)
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


def direction(model: config.Model, optimizer: config.Optim) -> optax.GradientTransformation:
    """Gradient -> direction, with what the placement asks of Adam."""
    return optim.direction(optimizer, _tuning(model))


def _tuning(model: config.Model) -> theory.Tuning:
    return placements.row(model.placement).tuning(model.layers)


def _step(model: config.Model, optimizer: config.Optim) -> Callable:
    """One update of one run, not yet compiled; devices: the mesh its batch is split over."""
    transform = direction(model, optimizer)

    def step(state, batch, lr, devices=None):
        new, logged, _ = update(state, batch, lr, transform=transform, devices=devices)
        if optimizer.clip:  # beside the raw norm of the gradient, what of it was applied
            logged["gradient_norm_applied"] = jnp.minimum(logged["gradient_norm"], optimizer.clip)
        return new, logged

    return step


def _measure(vectors: int, devices: jax.sharding.Mesh | None = None) -> Callable:
    return lambda params, batch, unigram, key: probes.measure(
        params, batch, unigram, key, vectors, ops=_on(devices)
    )


@functools.cache
def _compiled(
    model: config.Model, optimizer: config.Optim, vectors: int, devices: jax.sharding.Mesh
) -> Programs:
    """Compile-once functions for one architecture, optimizer (see optim.static_part) and mesh."""
    transform = direction(model, optimizer)

    def init(key: Array, stds: dict) -> State:
        params = Model(model, stds, key)
        return State(jnp.int32(0), jnp.bool(True), params, transform.init(params))  # type: ignore[arg-type]

    stds = inits.standard_deviations(model, config.Init(), 1.0)
    abstract = jax.eval_shape(init, jax.random.key(0), stds)
    abstract = mesh.placed(abstract, mesh.state_shardings(devices, abstract))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    jit = _jit_on(devices)
    return Programs(
        init=jit(init, out_shardings=shardings),
        step=jit(
            functools.partial(_step(model, optimizer), devices=devices),
            donate_argnums=0,
            out_shardings=(shardings, mesh.replicated(devices)),
        ),
        measure=jit(_measure(vectors, devices), out_shardings=mesh.replicated(devices)),
        effect=jit(
            functools.partial(anatomy.effect, ops=_on(devices)),
            out_shardings=mesh.replicated(devices),
        ),
        sharpness=jit(functools.partial(sharpness, optimizer=optimizer, tuning=_tuning(model))),
        profile=jit(
            lambda model, batch: model.profiled(batch[:, :-1]), out_shardings=shardings.model
        ),
        loss=jit(token_loss, out_shardings=mesh.replicated(devices)),
        abstract=abstract,
    )


def _jit_on(devices: jax.sharding.Mesh) -> Callable:
    options = runtime.compiler_options(devices.devices.flat[0].platform)
    return functools.partial(jax.jit, compiler_options=options)


class Ensemble(NamedTuple):
    """The programs of M runs that differ in seed, initial scales and rates; axis 0 = M."""

    join: Callable  # (M states) -> states
    step: Callable  # (states, batch, lr (M,)) -> (states, metrics)
    measure: Callable  # (models, probe_batch, unigram, keys (M,)) -> probe
    effect: Callable  # (models before, models after, batch) -> what the updates did
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
    step = _step(model, optimizer)
    spread = mesh.can_spread(devices, members)

    def all_members(one: Callable, axes: tuple[int | None, ...]) -> Callable:
        each = jax.vmap(one, in_axes=axes)
        return mesh.members_over_data(devices, each, axes) if spread else each

    shardings = mesh.of_members(alone, spread)
    step = step if spread else functools.partial(step, devices=devices)
    jit = _jit_on(devices)
    return Ensemble(
        join=jit(
            lambda *states: jax.tree.map(lambda *leaves: jnp.stack(leaves), *states),
            out_shardings=shardings,
        ),
        step=jit(
            all_members(step, (0, None, 0)),
            donate_argnums=0,
            out_shardings=(shardings, mesh.replicated(devices)),
        ),
        measure=jit(
            all_members(_measure(vectors), (0, None, None, 0)),
            out_shardings=mesh.replicated(devices),
        ),
        effect=jit(
            all_members(anatomy.effect, (0, 0, None)), out_shardings=mesh.replicated(devices)
        ),
        own=jit(
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
    """The state at step 0: a function of config and seed, the same on any mesh.

    Of a profiled placement also of the first training batch (Liu et al. 2020, section 4.2).
    """
    state = compiled.init(jax.random.key(run.seed), standard_deviations(run))
    if not placements.row(run.model.placement).profiled:
        return state
    sharding: Any = compiled.abstract.step.sharding
    devices = sharding.mesh
    batch = mesh.put_batch(devices, data.feed(run).batches[0])
    return state._replace(model=compiled.profile(state.model, batch))


def standard_deviations(run: config.Run) -> inits.Stds:
    """{role: std at step 0}, with what the placement scales.

    Raises UserError where the config scales by the depth what the placement scales already.
    """
    place, layers = placements.row(run.model.placement), run.model.layers
    if run.init.depth_scaled and place.counts_depth():
        raise UserError(
            f"{run.model.placement} scales by the depth itself; with depth_scaled (1/sqrt(2L) on "
            "the output projections) the depth would count twice: leave one of them out"
        )
    beta = place.constants(layers).beta
    return inits.standard_deviations(run.model, run.init, beta, place.init(layers))
