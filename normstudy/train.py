"""The loop: steps, logs, checkpoints, outcomes. A non-finite loss is a result here, not a crash."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from normstudy import (
    attempts,
    checkpoint,
    config,
    corpus,
    data,
    hosts,
    inits,
    lock,
    mesh,
    optim,
    origin,
    outcome,
    placements,
    preemption,
    programs,
    record,
    remote,
    schedules,
    watchdog,
)
from normstudy.programs import State
from normstudy.progress import Progress
from normstudy.runlog import RunLog


def probe_key(run: config.Run, step: int) -> Array:
    """Key of the probe vectors at a step."""
    return jax.random.fold_in(jax.random.key(run.seed), step)


def probe_steps(steps: int, every: int, once: bool = False) -> set[int]:
    """Steps at which the probing program runs: dense at first, where everything happens.

    None where every is 0. once: step 0 alone.
    """
    if once:
        return {0}
    if not every:
        return set()
    dense = (0, 1, 2, 3, 5, 10, 20, 30, 50)
    return {s for s in (*dense, *range(0, steps, every), steps - 1) if 0 <= s < steps}


def check(run: config.Run) -> None:
    """Raises UserError for what would stop the run before its first step; writes nothing."""
    programs.standard_deviations(run)
    schedules.table(run.optim, run.model.width, run.steps)
    mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    data.feed(run)


class Member(NamedTuple):
    """A run, the folder that it writes, and what people call it."""

    run: config.Run
    folder: Path
    name: str = "run"


def train(
    run: config.Run,
    folder: Path,
    name: str = "run",
    may_change: Collection[str] = (),
    keep: int = 0,
) -> dict[str, Any]:
    """Run to the end, or on from the newest checkpoint, and return what outcome.json holds.

    may_change: fields that may differ from those the folder was made with. keep: so many of the
    newest checkpoints stay; 0: all.

    Raises UserError for a folder that is not this run's or that another process trains in,
    Interrupted after Ctrl-C and Preempted after SIGTERM (all is saved), NotSaved.
    """
    return together([Member(run, folder, name)], may_change, keep)[0]


def shared(run: config.Run) -> config.Run:
    """What runs must have in common to train together: all but seed, init and schedule."""
    return dataclasses.replace(run, seed=0, init=config.Init(), optim=optim.static_part(run.optim))


def together(
    members: Sequence[Member], may_change: Collection[str] = (), keep: int = 0
) -> list[dict[str, Any]]:
    """Train runs that differ in seed, initial scales and schedule alone, one program for all.

    Each writes its own folder as it would alone, and ends for itself; one whose loss or gradient
    is no longer finite stays as it was and touches no other. What runs alone is split over the
    data axis, what runs together has its members on it (see programs.Ensemble): the numbers agree
    to float32 rounding. Options and errors as of `train`, and ValueError for runs that share too
    little.
    """
    if len({shared(member.run) for member in members}) > 1:
        raise ValueError("these runs differ in more than seed, init and schedule")
    feed = data.feed(members[0].run)
    compiled, devices = programs.of(members[0].run)
    results: dict[Path, dict[str, Any]] = {}
    waiting: dict[int, list[Member]] = {}
    for member in members:
        run, folder, name = member
        hosts.meet_in(folder)
        identity = _identity(run, name, feed, devices)
        found = hosts.first(functools.partial(_opened, folder, identity, may_change))
        if isinstance(found, dict):
            results[folder] = found
        else:
            waiting.setdefault(found, []).append(member)
    for begin, group in waiting.items():
        results |= _loop(group, begin, feed, compiled, devices, keep)
    return [results[member.folder] for member in members]


def _opened(
    folder: Path, identity: dict[str, Any], may_change: Collection[str]
) -> dict[str, Any] | int:
    """The result of a run that is finished, or the step at which it begins or goes on."""
    if not record.open_folder(folder, identity, "run", may_change):
        return 0
    if (folder / record.OUTCOME).exists():
        return record.read_json(folder / record.OUTCOME)
    with lock.held(folder):
        step = checkpoint.newest_sound(folder) or 0
        checkpoint.discard_after(folder, step)
    return step


def _loop(
    members: list[Member],
    begin: int,
    feed: data.Feed,
    compiled: programs.Programs,
    devices: jax.sharding.Mesh,
    keep: int,
) -> dict[Path, dict[str, Any]]:
    """Steps begin..end of all members at once: {folder: result}.

    Values are fetched one step late, once the next one has been dispatched.
    """
    run, alone = members[0].run, len(members) == 1  # of run: what the members share
    put, everywhere = (functools.partial(f, devices) for f in (mesh.put_batch, mesh.put_replicated))
    probe_batch, unigram = put(feed.probe_batch), everywhere(feed.unigram)
    probed = probe_steps(run.steps, run.probe.probe_every, run.probe.probe_once)
    rates = np.stack([schedules.table(m.run.optim, run.model.width, run.steps) for m in members])
    states = [
        checkpoint.restore(member.folder, begin, compiled.abstract)
        if begin
        else programs.initial_state(member.run, compiled)
        for member in members
    ]
    if alone:
        step_of: Any = compiled
        state, own_state = states[0], lambda i: state
        every, own = (lambda values: values[0]), (lambda tree, i: tree)
    else:
        step_of = programs.ensemble_of(run, len(members))
        state, own_state = step_of.join(*states), lambda i: step_of.own(state, i)
        every, own = jnp.stack, (lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree))
    del states
    attempts_at: list[attempts.Attempt] = []
    results: dict[int, dict[str, Any]] = {}
    in_flight: tuple[int, dict[str, Any]] | None = None
    start = None

    def going() -> list[int]:
        return [i for i in range(len(members)) if i not in results]

    def settle() -> None:
        """Fetch and log the step in flight."""
        nonlocal in_flight
        if in_flight is None:
            return
        step, values = in_flight
        values, in_flight = jax.device_get(values), None
        bar.at(step + 1, [float(own(values["loss"], i)) for i in going()])
        for i in going():
            mine = own(values, i)
            alive = bool(mine.pop("alive"))
            logs[i].write(step, rates[i, step], mine)
            if not alive:  # a step dispatched since changed nothing of it, and goes unlogged
                end(i, "a loss or gradient that is not finite")

    def save(i: int) -> State:
        mine = own_state(i)
        savers[i].save(int(mine.step), mine)
        return mine

    def last_words() -> None:
        for own in attempts_at:
            own.end("preempted", "before the next step: the last checkpoint counts")
        for m in members if hosts.leads() else ():
            remote.push(m.folder)

    def end(i: int, why: str) -> None:
        """The last checkpoint of a member, and its outcome."""
        member = members[i]
        state = save(i)
        results[i] = _result(member, feed, compiled, devices, state, logs[i].losses, why)
        savers[i].close()
        if hosts.leads():
            record.write_json(member.folder / record.OUTCOME, results[i])
            remote.push(member.folder)
            attempts_at[i].end("done", why)
        word, step, because = (results[i][key] for key in ("word", "step", "why"))
        who = member.name if alone else f"{member.name}, seed {member.run.seed}"
        bar.say(f"{who}: {word} (step {step}): {because}; stopped: {why}")

    with contextlib.ExitStack() as files:
        if hosts.leads():
            for m in members:
                files.enter_context(remote.kept(m.folder))
                files.enter_context(lock.held(m.folder))
            attempts_at = [files.enter_context(attempts.attempt(m.folder, begin)) for m in members]
        files.enter_context(preemption.at_work(last_words))
        savers = [
            files.enter_context(checkpoint.Saver(m.folder, {"seed": m.run.seed}, keep))
            for m in members
        ]
        logs = [files.enter_context(RunLog(m.folder, m.run, begin)) for m in members]
        tokens = len(members) * run.data.batch * run.model.context
        bar = files.enter_context(Progress(_names(members), begin, run.steps, tokens))
        for step in range(begin, run.steps):
            batch, lr = put(feed.batches[step]), jnp.float32(every(list(rates[:, step])))
            probe = None
            if step in probed:
                key, edge = every([probe_key(m.run, step) for m in members]), {}
                if run.probe.curvature:  # a resumed run searches from random vectors once
                    edge, start = compiled.sharpness(state, batch, lr, start)
                probe = edge | step_of.measure(state.model, probe_batch, unigram, key)
                before = _copied(state.model)  # a step gives its state away
            state, values = step_of.step(state, batch, lr)
            of_update = values.pop("update")
            if probe is not None:
                probe |= of_update | step_of.effect(before, state.model, batch)
                values["probe"], before = probe, None
            settle()
            if not going():
                break
            in_flight, done = (step, values), step + 1
            watchdog.feed()
            if asked := preemption.asked():
                settle()
                for i in going():
                    save(i)
                    savers[i].close()
                how = asked.__name__.lower()
                raise asked(f"{how} at step {done}; saved. The same command goes on")
            if done % run.checkpoint_every == 0 and done < run.steps:
                settle()
                for i in going():
                    save(i)
            if run.stop_after and done % 10 == 0:
                sealed = {
                    i: outcome.sealed_for(
                        np.array(logs[i].losses), feed.h1, members[i].run.optim.warmup
                    )
                    for i in going()
                }
                if max(sealed.values(), default=0) >= run.stop_after:
                    settle()
                for i in going():
                    if sealed[i] >= run.stop_after:
                        end(i, f"its fate has been sealed for {sealed[i]} updates")
        settle()
        for i in going():
            end(i, "all steps done")
    return {members[i].folder: result for i, result in results.items()}


@jax.jit
def _copied(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def _names(members: list[Member]) -> str:
    """What the progress of these members is called."""
    more = f" and {len(members) - 1} more" if len(members) > 1 else ""
    return members[0].name + more


def _result(
    member: Member,
    feed: data.Feed,
    compiled: programs.Programs,
    devices: jax.sharding.Mesh,
    state: State,
    losses: list[float],
    why: str,
) -> dict[str, Any]:
    """Outcome, losses, and where it stopped being finite: what outcome.json holds."""
    run = member.run
    put = functools.partial(mesh.put_batch, devices)
    found = outcome.classify(np.array(losses), feed.h1, run.optim.warmup)
    bad = {}
    if not state.alive:
        step = int(state.step)  # the update that was refused
        if found.word != "diverged":
            found = outcome.Outcome("diverged", step, f"a gradient is not finite at step {step}")
        bad = not_finite(hosts.gathered(state.model), feed.batches[step])
        found = dataclasses.replace(found, why=f"{found.why}; {bad['sentence']}")
    curve = outcome.smooth(np.array(losses))
    finite = curve[np.isfinite(curve)]
    held_out = [compiled.loss(state.model, put(feed.held_out[i])) for i in range(run.eval_batches)]
    if run.optim.clip:
        norms = hosts.first(lambda: record.column(member.folder / record.METRICS, "gradient_norm"))
        clipped = {"clip_fraction": float(np.mean([norm > run.optim.clip for norm in norms]))}
    else:
        clipped = {}
    return {
        "name": member.name,
        **found.as_dict(),
        "steps_done": len(losses),
        "stopped_because": why,
        "best_loss": float(finite.min()) if finite.size else math.nan,
        "last_loss": float(curve[-1]),
        "val_loss": float(np.mean(held_out)),
        "h1": feed.h1,
        "outcome_rule": dataclasses.asdict(outcome.RULE),
        **({"not_finite": bad} if bad else {}),
        **clipped,
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
        gains_over_xavier=inits.gains_over_xavier(run.model, programs.standard_deviations(run)),
        devices=mesh.describe(devices),
    )


def not_finite(model: Any, batch: np.ndarray) -> dict[str, Any]:
    """Where loss, gradients or their norm stop being finite: a sentence, and all origins.

    The refused update, replayed on this host's CPU from the parameters before it.
    """

    def judged(model: Any, batch: Array) -> tuple[Array, Any, Array]:
        loss, gradients = jax.value_and_grad(programs.token_loss)(model, batch)
        with jax.named_scope("backward"), jax.named_scope("gradient_norm"):
            return loss, gradients, optax.tree.norm(gradients)

    try:
        origins = origin.find(judged, model, batch)
    except Exception as error:  # the run has its result: whatever ails the search must not lose it
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"sentence": f"its replay on the CPU failed ({reason})", "origins": []}
    sentence = origin.sentence(origins) if origins else "its replay on the CPU is finite"
    return {"sentence": sentence, "origins": [found.as_dict() for found in origins]}
