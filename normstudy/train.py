"""State, the two compiled steps, the loop. A non-finite loss is a result here, not a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from normstudy import (
    checkpoint,
    config,
    corpus,
    data,
    inits,
    mesh,
    optim,
    outcome,
    placements,
    probes,
    record,
    schedules,
)
from normstudy.errors import Interrupted
from normstudy.model import Model
from normstudy.progress import Progress, say
from normstudy.tensorboard import Board
from normstudy.trees import path_names, to_dict


class State(NamedTuple):
    """All that changes during training."""

    step: Array  # updates done
    alive: Array  # False once a loss or gradient was not finite: the state then stays as it was
    model: Model
    opt_state: Any


class Programs(NamedTuple):
    """The compiled functions of one shape; arms that share it share them."""

    init: Callable  # (key, stds) -> State
    plain: Callable  # (state, batch, lr) -> (state, metrics)
    probing: Callable  # (state, batch, lr, probe_batch, unigram, key) -> (state, metrics)
    measure: Callable  # (model, probe_batch, unigram, key) -> probe
    loss: Callable  # (model, batch) -> mean loss
    where: Callable  # (model, batch) -> what is finite
    abstract: State  # shapes, dtypes and shardings


def token_loss(model: Model, batch: Array) -> Array:
    """Mean next-token cross-entropy in nats; batch: (B, T + 1) tokens."""
    logits = model(batch[:, :-1]).astype(jnp.float32)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def update(
    state: State, batch: Array, lr: Array, *, transform: optax.GradientTransformation
) -> tuple[State, dict[str, Array], tuple]:
    """One update: (new state, scalars, (gradients, updates))."""
    model: Any = state.model  # optax's own type of a pytree leaves modules out
    loss, gradients = jax.value_and_grad(token_loss)(model, batch)
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
    }
    return new, scalars, (gradients, updates)


@functools.cache
def programs(
    model: config.Model, optimizer: config.Optim, vectors: int, devices: jax.sharding.Mesh
) -> Programs:
    """Compile-once functions for one architecture, optimizer (see optim.static_part) and mesh."""
    transform = optim.direction(optimizer)

    def init(key: Array, stds: dict[str, float]) -> State:
        params = Model(model, stds, key)
        return State(jnp.int32(0), jnp.bool(True), params, transform.init(params))  # type: ignore[arg-type]

    def plain(state: State, batch: Array, lr: Array):
        return update(state, batch, lr, transform=transform)[:2]

    def probing(state, batch, lr, probe_batch, unigram, key):
        new, scalars, (gradients, updates) = update(state, batch, lr, transform=transform)
        probe = probes.measure(state.model, probe_batch, unigram, key, vectors)
        probe |= by_layer("gradient", gradients) | by_layer("update", updates)
        return new, scalars | {"probe": probe | by_layer("weight", state.model)}

    def measure(params, probe_batch, unigram, key):
        weights = by_layer("weight", params)
        return probes.measure(params, probe_batch, unigram, key, vectors) | weights

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
        loss=jax.jit(token_loss),
        where=jax.jit(finite_parts),
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


def by_layer(name: str, tree: Any) -> dict[str, Array]:
    """Frobenius norm of every stacked leaf in every layer: {name/sublayer.kind: (L,)}."""
    layers = to_dict(tree)["layers"]
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(layers):
        square = leaf.astype(jnp.float32) ** 2
        found[f"{name}/{'.'.join(path_names(path))}"] = jnp.sqrt(
            jnp.sum(square, tuple(range(1, leaf.ndim)))
        )
    return found


def finite_parts(model: Model, batch: Array) -> dict[str, Any]:
    """Is each part finite on this batch? The stream at each layer, and each gradient."""
    _, streams, _ = model.stack(model.start(batch[:, :-1]))
    gradients = jax.grad(token_loss)(model, batch)
    return {
        "stream": jnp.isfinite(streams).all((1, 2, 3)),
        "gradient": jax.tree.map(lambda g: jnp.isfinite(g).all(), to_dict(gradients)),
    }


def probe_steps(steps: int, every: int) -> set[int]:
    """Steps at which the probing program runs: dense at first, where everything happens."""
    dense = (0, 1, 2, 3, 5, 8, 13, 20, 30, 50, 80, 130)
    return {s for s in (*dense, *range(0, steps, every), steps - 1) if 0 <= s < steps}


def check(run: config.Run) -> None:
    """Raises UserError for what would stop the run before its first step; writes nothing."""
    placements.row(run.model.placement)
    schedules.table(run.optim, run.model.width, run.steps)
    mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    text = corpus.load(run.data.corpus)
    for tokens in text.split(run.data.val_fraction):
        data.batches(tokens, run.model.context, run.data.batch, 0, run.model.vocab)


def train(run: config.Run, folder: Path, name: str = "run") -> dict[str, Any]:
    """Run to the end, or on from the newest checkpoint, and return what outcome.json holds.

    Raises UserError for a folder that is not this run's, Interrupted after Ctrl-C (all is saved).
    """
    place = placements.row(run.model.placement)
    text = corpus.load(run.data.corpus)
    train_tokens, val_tokens = text.split(run.data.val_fraction)
    frequencies = corpus.unigram(train_tokens, run.model.vocab)
    h1 = corpus.entropy(frequencies)
    rates = schedules.table(run.optim, run.model.width, run.steps)
    compiled, devices = programs_for(run)
    shape = (run.model.context, run.data.batch, run.data.data_seed, run.model.vocab)
    batches = data.batches(train_tokens, *shape)
    held_out = data.batches(val_tokens, *shape)
    put = functools.partial(mesh.put_batch, devices)
    probe_batch = put(
        data.batches(
            val_tokens,
            run.model.context,
            run.probe.probe_batch,
            run.data.data_seed,
            run.model.vocab,
        )[0]
    )
    unigram = jnp.asarray(frequencies, jnp.float32)

    identity = record.identity(
        dataclasses.asdict(run),
        "run",
        name=name,
        corpus={"name": text.name, "sha256": text.sha256, "licence": text.licence,
                "provenance": text.provenance, "tokens": len(text.tokens), "h1_nats": h1},
        placement={"equation": place.text, "skip_norms": place.skip_norms,
                   **place.constants(run.model.layers)._asdict()},
        gains_over_xavier=inits.gains_over_xavier(run.model, standard_deviations(run)),
        devices=mesh.describe(devices),
    )  # fmt: skip
    resumed = record.open_folder(folder, identity, "run")
    if resumed and (folder / record.OUTCOME).exists():
        return record.read_json(folder / record.OUTCOME)
    begin = (checkpoint.latest(folder) if resumed else None) or 0
    if begin:
        state = checkpoint.restore(folder, begin, compiled.abstract)
    else:
        state = initial_state(run, compiled)
    for log in (record.METRICS, record.PROBES):
        record.truncate(folder / log, begin)
    losses = [r["loss"] for r in record.read_rows(folder / record.METRICS)] if begin else []

    metrics, probe_log = (
        record.Journal(folder / record.METRICS),
        record.Journal(folder / record.PROBES),
    )
    board = Board(folder / "tb", begin)
    bar = Progress(name, begin, run.steps, run.data.batch * run.model.context)
    asked_to_stop = _watch_interrupt()
    at = probe_steps(run.steps, run.probe.probe_every)
    pending: tuple[int, dict[str, Any]] | None = None
    settled = time.monotonic()

    def settle() -> None:
        """Fetch and log the step that is in flight; called after the next one was dispatched."""
        nonlocal pending, settled
        if pending is None:
            return
        step, values = pending
        pending = None
        values = jax.device_get(values)
        before, settled = settled, time.monotonic()
        probe = values.pop("probe", None)
        row = {"step": step, "lr": rates[step], **values}
        losses.append(float(values["loss"]))
        metrics.write(row | {"seconds": round(settled - before, 4)})
        board.scalars(row)
        if probe is not None:
            probe_log.write({"step": step, **probe})
            board.layers(step, probe)
        bar.at(step + 1, losses[-1])

    step, why = begin, "all steps done"
    try:
        while step < run.steps:
            batch, lr = put(batches[step]), jnp.float32(rates[step])
            if step in at:
                key = jax.random.fold_in(jax.random.key(run.seed), step)
                state, values = compiled.probing(state, batch, lr, probe_batch, unigram, key)
            else:
                state, values = compiled.plain(state, batch, lr)
            settle()
            pending = (step, values)
            step += 1
            due = step % run.checkpoint_every == 0 and step < run.steps
            if due or asked_to_stop() or step == run.steps:
                settle()
            if losses and not math.isfinite(losses[-1]):
                why = "a loss that is not finite"
                break
            if asked_to_stop():
                checkpoint.save(folder, step, state)
                raise Interrupted(f"interrupted at step {step}; saved. The same command goes on")
            if due:
                checkpoint.save(folder, step, state)
            if run.stop_after and step % 10 == 0:
                sealed = outcome.sealed_for(np.array(losses), h1, run.optim.warmup)
                if sealed >= run.stop_after:
                    why = f"its fate has been sealed for {sealed} updates"
                    break
        settle()
        checkpoint.save(folder, int(state.step), state)
    finally:
        bar.close()
        metrics.close()
        probe_log.close()
        board.close()

    curve = outcome.smooth(np.array(losses))
    finite = bool(state.alive)
    result: dict[str, Any] = {
        "name": name,
        **outcome.classify(np.array(losses), h1, run.optim.warmup).as_dict(),
        "steps_done": len(losses),
        "stopped_because": why,
        "best_loss": float(np.nanmin(curve)),
        "last_loss": float(curve[-1]),
        "val_loss": float(
            np.mean([compiled.loss(state.model, put(held_out[i])) for i in range(run.eval_batches)])
        ),
        "h1": h1,
        "outcome_rule": dataclasses.asdict(outcome.RULE),
    }
    if not finite:
        step = int(state.step)  # the update that was refused
        result["not_finite"] = _names(compiled.where(state.model, put(batches[step])))
    record.write_json(folder / record.OUTCOME, result)
    say(f"{name}: {result['word']} (step {result['step']}): {result['why']}; stopped: {why}")
    return result


def _names(parts: dict[str, Any]) -> dict[str, Any]:
    """First layer with a stream that is not finite (None: all are); gradients that are not."""
    stream = np.asarray(parts["stream"])
    gradients = [
        "/".join(path_names(path))
        for path, ok in jax.tree_util.tree_leaves_with_path(parts["gradient"])
        if not ok
    ]
    return {"stream_from_layer": None if stream.all() else int(np.argmin(stream)),
            "gradients": gradients}  # fmt: skip


def _watch_interrupt() -> Callable[[], bool]:
    """Ctrl-C once asks the loop to save and stop at the next step; twice ends at once."""
    asked = []

    def handler(number, frame):
        asked.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        say("\ninterrupt: saving at the next step (again: stop at once)")

    with contextlib.suppress(ValueError):  # not the main thread: the caller watches
        signal.signal(signal.SIGINT, handler)
    return lambda: bool(asked)
