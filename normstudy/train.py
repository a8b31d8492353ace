"""State, the two compiled steps, the loop. A non-finite loss is a result here, not a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from normstudy import (
    anatomy,
    checkpoint,
    config,
    corpus,
    curvature,
    data,
    inits,
    mesh,
    optim,
    origin,
    outcome,
    placements,
    probes,
    record,
    schedules,
    theory,
)
from normstudy.errors import Interrupted
from normstudy.model import Model
from normstudy.progress import say
from normstudy.runlog import RunLog


class State(NamedTuple):
    """All that changes during training."""

    step: Array  # updates done
    alive: Array  # False once a loss or gradient was not finite: the state then stays as it was
    model: Model
    opt_state: Any


Starts = tuple[Array, Array]  # vectors for the search of the two largest eigenvalues


class Programs(NamedTuple):
    """The compiled functions of one shape; arms that share it share them."""

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


def _loss_and_forward(model: Model, batch: Array) -> tuple[Array, anatomy.Forward]:
    """The loss, and what the model made of the batch on the way."""
    forward = anatomy.forward(model, batch[:, :-1])
    with jax.named_scope("loss"):
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(
            forward.logits, batch[:, 1:]
        )
        return losses.mean(), forward


def update(
    state: State, batch: Array, lr: Array, *, transform: optax.GradientTransformation
) -> tuple[State, dict[str, Array], tuple]:
    """One update: (new state, scalars, (forward pass before it, gradients, updates))."""
    model: Any = state.model  # optax's own type of a pytree leaves modules out
    (loss, forward), gradients = jax.value_and_grad(_loss_and_forward, has_aux=True)(model, batch)
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


@functools.cache
def programs(
    model: config.Model, optimizer: config.Optim, vectors: int, devices: jax.sharding.Mesh
) -> Programs:
    """Compile-once functions for one architecture, optimizer (see optim.static_part) and mesh."""
    transform = optim.direction(optimizer)

    def init(key: Array, stds: dict) -> State:
        params = Model(model, stds, key)
        return State(jnp.int32(0), jnp.bool(True), params, transform.init(params))  # type: ignore[arg-type]

    def plain(state: State, batch: Array, lr: Array):
        new, scalars, _ = update(state, batch, lr, transform=transform)
        return new, clipped(scalars)

    def clipped(scalars: dict[str, Array]) -> dict[str, Array]:
        """Beside the raw norm of the gradient, what of it was applied."""
        if optimizer.clip:
            applied = jnp.minimum(scalars["gradient_norm"], optimizer.clip)
            scalars["gradient_norm_applied"] = applied
        return scalars

    def probing(state, batch, lr, probe_batch, unigram, key):
        new, scalars, (forward, gradients, updates) = update(state, batch, lr, transform=transform)
        models = (state.model, new.model)
        probe = {
            **probes.measure(state.model, probe_batch, unigram, key, vectors),
            **probes.by_layer("gradient", gradients),
            **probes.by_layer("update", updates),
            **probes.by_layer("weight", state.model),
            **anatomy.of_update(models, forward, gradients, updates, batch),
        }
        return new, clipped(scalars) | {"probe": probe}

    def measure(params, probe_batch, unigram, key):
        return probes.measure(params, probe_batch, unigram, key, vectors)

    stds = inits.standard_deviations(model, config.Init(), 1.0)
    abstract = jax.eval_shape(init, jax.random.key(0), stds)
    shardings = mesh.state_shardings(devices, abstract)
    abstract = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
        abstract,
        shardings,
    )
    both = (shardings, mesh.replicated(devices))
    return Programs(
        init=jax.jit(init, out_shardings=shardings),
        plain=jax.jit(plain, donate_argnums=0, out_shardings=both),
        probing=jax.jit(probing, donate_argnums=0, out_shardings=both),
        measure=jax.jit(measure),
        sharpness=jax.jit(functools.partial(sharpness, optimizer=optimizer)),
        loss=jax.jit(token_loss),
        abstract=abstract,
    )


def programs_for(run: config.Run) -> tuple[Programs, jax.sharding.Mesh]:
    """The programs of a run, and the mesh they run on."""
    devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    optimizer = optim.static_part(run.optim)
    return programs(run.model, optimizer, run.probe.vectors, devices), devices


def initial_state(run: config.Run, compiled: Programs) -> State:
    """The state at step 0: a function of config and seed, the same on any mesh."""
    return compiled.init(jax.random.key(run.seed), standard_deviations(run))


def standard_deviations(run: config.Run) -> dict[str, float]:
    """{role: std at step 0}, with the placement's beta."""
    beta = placements.row(run.model.placement).constants(run.model.layers).beta
    return inits.standard_deviations(run.model, run.init, beta)


def probe_key(run: config.Run, step: int) -> Array:
    """Key of the probe vectors at a step."""
    return jax.random.fold_in(jax.random.key(run.seed), step)


def probe_steps(steps: int, every: int) -> set[int]:
    """Steps at which the probing program runs: dense at first, where everything happens."""
    dense = (0, 1, 2, 3, 5, 8, 13, 20, 30, 50, 80, 130)
    return {s for s in (*dense, *range(0, steps, every), steps - 1) if 0 <= s < steps}


def check(run: config.Run) -> None:
    """Raises UserError for what would stop the run before its first step; writes nothing."""
    placements.row(run.model.placement)
    schedules.table(run.optim, run.model.width, run.steps)
    mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    data.feed(run)


def train(run: config.Run, folder: Path, name: str = "run") -> dict[str, Any]:
    """Run to the end, or on from the newest checkpoint, and return what outcome.json holds.

    Raises UserError for a folder that is not this run's, Interrupted after Ctrl-C (all is saved).
    """
    feed = data.feed(run)
    rates = schedules.table(run.optim, run.model.width, run.steps)
    compiled, devices = programs_for(run)
    resumed = record.open_folder(folder, _identity(run, name, feed, devices), "run")
    if resumed and (folder / record.OUTCOME).exists():
        return record.read_json(folder / record.OUTCOME)

    begin = (checkpoint.latest(folder) if resumed else None) or 0
    if begin:
        state = checkpoint.restore(folder, begin, compiled.abstract)
    else:
        state = initial_state(run, compiled)
    with RunLog(folder, run, name, begin) as log:
        state, why = _loop(run, folder, feed, rates, compiled, devices, state, log, begin)
        checkpoint.save(folder, int(state.step), state)
    result = {"name": name, **_result(run, feed, compiled, devices, state, log.losses, why)}
    if run.optim.clip:
        norms = [row["gradient_norm"] for row in record.read_rows(folder / record.METRICS)]
        result["clip_fraction"] = float(np.mean([norm > run.optim.clip for norm in norms]))
    record.write_json(folder / record.OUTCOME, result)
    say(f"{name}: {result['word']} (step {result['step']}): {result['why']}; stopped: {why}")
    return result


def _loop(
    run: config.Run,
    folder: Path,
    feed: data.Feed,
    rates: np.ndarray,
    compiled: Programs,
    devices: jax.sharding.Mesh,
    state: State,
    log: RunLog,
    begin: int,
) -> tuple[State, str]:
    """Steps begin..run.steps: (last state, why it stopped). Metrics are fetched one step late."""
    put = functools.partial(mesh.put_batch, devices)
    probe_batch, unigram = put(feed.probe_batch), jnp.asarray(feed.unigram)
    probed = probe_steps(run.steps, run.probe.probe_every)
    in_flight: tuple[int, dict[str, Any]] | None = None
    alive, start = True, None

    def settle() -> None:
        """Fetch and log the step in flight: called once the next one has been dispatched."""
        nonlocal in_flight, alive
        if in_flight is not None:
            step, values = in_flight
            values = jax.device_get(values)
            alive = bool(values.pop("alive"))
            log.write(step, rates[step], values)
            in_flight = None

    with _interruptible() as asked_to_stop:
        for step in range(begin, run.steps):
            batch, lr = put(feed.batches[step]), jnp.float32(rates[step])
            if step in probed:
                key, edge = probe_key(run, step), {}
                if run.probe.curvature:  # a resumed run searches from random vectors once
                    edge, start = compiled.sharpness(state, batch, lr, start)
                state, values = compiled.probing(state, batch, lr, probe_batch, unigram, key)
                values["probe"] |= edge
            else:
                state, values = compiled.plain(state, batch, lr)
            settle()
            if not alive:  # the step just dispatched changed nothing: it goes unlogged
                return state, "a loss or gradient that is not finite"
            in_flight, done = (step, values), step + 1
            if asked_to_stop():
                settle()
                checkpoint.save(folder, int(state.step), state)
                raise Interrupted(f"interrupted at step {done}; saved. The same command goes on")
            if done % run.checkpoint_every == 0 and done < run.steps:
                settle()
                if alive:
                    checkpoint.save(folder, done, state)
            if run.stop_after and done % 10 == 0:
                sealed = outcome.sealed_for(np.array(log.losses), feed.h1, run.optim.warmup)
                if sealed >= run.stop_after:
                    settle()
                    return state, f"its fate has been sealed for {sealed} updates"
        settle()
    return state, "all steps done" if alive else "a loss or gradient that is not finite"


def _result(
    run: config.Run,
    feed: data.Feed,
    compiled: Programs,
    devices: jax.sharding.Mesh,
    state: State,
    losses: list[float],
    why: str,
) -> dict[str, Any]:
    """Outcome, losses, and where it stopped being finite: what outcome.json holds."""
    put = functools.partial(mesh.put_batch, devices)
    found = outcome.classify(np.array(losses), feed.h1, run.optim.warmup)
    bad = {}
    if not state.alive:
        step = int(state.step)  # the update that was refused
        if found.word != "diverged":
            found = outcome.Outcome("diverged", step, f"a gradient is not finite at step {step}")
        bad = not_finite(state.model, feed.batches[step])
        found = dataclasses.replace(found, why=f"{found.why}; {bad['sentence']}")
    curve = outcome.smooth(np.array(losses))
    finite = curve[np.isfinite(curve)]
    held_out = [compiled.loss(state.model, put(feed.held_out[i])) for i in range(run.eval_batches)]
    return {
        **found.as_dict(),
        "steps_done": len(losses),
        "stopped_because": why,
        "best_loss": float(finite.min()) if finite.size else math.nan,
        "last_loss": float(curve[-1]),
        "val_loss": float(np.mean(held_out)),
        "h1": feed.h1,
        "outcome_rule": dataclasses.asdict(outcome.RULE),
        **({"not_finite": bad} if bad else {}),
    }


def _identity(
    run: config.Run, name: str, feed: data.Feed, devices: jax.sharding.Mesh
) -> dict[str, Any]:
    """What config.json of a run holds."""
    place = placements.row(run.model.placement)
    return record.identity(
        dataclasses.asdict(run),
        "run",
        name=name,
        corpus=corpus.as_dict(feed.text),
        h1_nats=feed.h1,
        placement={
            "equation": place.text,
            "skip_norms": place.skip_norms,
            **place.constants(run.model.layers)._asdict(),
        },
        gains_over_xavier=inits.gains_over_xavier(run.model, standard_deviations(run)),
        devices=mesh.describe(devices),
    )


def not_finite(model: Any, batch: np.ndarray) -> dict[str, Any]:
    """Where loss, gradients or their norm stop being finite: a sentence, and all origins.

    The refused update, replayed on this host's CPU from the parameters before it.
    """

    def judged(model: Any, batch: Array) -> tuple[Array, Any, Array]:
        loss, gradients = jax.value_and_grad(token_loss)(model, batch)
        with jax.named_scope("backward"), jax.named_scope("gradient_norm"):
            return loss, gradients, optax.tree.norm(gradients)

    try:
        origins = origin.find(judged, model, batch)
    except Exception as error:  # the run has its result: whatever ails the search must not lose it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"sentence": f"its replay on the CPU failed ({reason})", "origins": []}
    sentence = origin.sentence(origins) if origins else "its replay on the CPU is finite"
    return {"sentence": sentence, "origins": [found.as_dict() for found in origins]}


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C once asks the loop to save and stop at the next step; twice ends at once."""
    asked = []

    def handler(number, frame):
        asked.append(number)
        signal.signal(signal.SIGINT, before)
        say("\ninterrupt: saving at the next step (again: stop at once)")

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals reach the main thread alone: the caller watches
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)
