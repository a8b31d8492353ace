"""What one checkpoint says: is it finite, wired as declared, better than letter frequencies?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normstudy import (
    anatomy,
    checkpoint,
    config,
    inspection,
    outcome,
    probes,
    programs,
    record,
    schedules,
)
from normstudy.diagnose import alarms
from normstudy.diagnose.subject import Baseline, Subject
from normstudy.diagnose.verdicts import Finding
from normstudy.errors import UserError
from normstudy.measured import Measured

WHAT = ("stream", "gradient", "jacobian", "update", "wiring", "finite")
UNIGRAM = 0.05  # nats; KL(unigram || prediction) below which a model predicts letter frequencies


def from_checkpoint(path: Path) -> Subject:
    """The newest step of a run folder, or one step of it, with what its probe says.

    Raises UserError for what is no checkpoint, or one whose shapes are not those of its config.
    """
    (found,) = inspection.inspect([path], inspection.Options(what=WHAT, vectors=2))
    run = found.run
    h1 = float(found.facts["H1, unigram entropy (nats)"])
    seen = (*_loss(found, h1), *_checks(found), *_signs(found))
    return Subject(
        found.label, run, frozenset(config.fields_of(run)), (), Baseline(h1), tuple(seen)
    )


def moved_between(there: Path, here: Path) -> Finding:
    """Which share of the parameters is not the same in two checkpoints, by matrix.

    Raises UserError for what is no checkpoint, for one and the same, or where shapes differ.
    """
    (old, before), (new, after) = checkpoint.locate(there, None), checkpoint.locate(here, None)
    if (old, before) == (new, after):
        raise UserError(f"--against {there} is the same checkpoint, step {after} of {new}")
    run = dataclasses.replace(record.load_config(new), mesh=config.Mesh())
    like = programs.of(run)[0].abstract
    pair = [
        checkpoint.restore(own, step, like).model for own, step in ((old, before), (new, after))
    ]
    shares = probes.by_layer("moved", jax.tree.map(anatomy.moved, *pair), jnp.mean)
    share = {name.removeprefix("moved/"): float(jnp.mean(own)) for name, own in shares.items()}
    told = ", ".join(f"{name} {own:.0%}" for name, own in share.items())
    if any(share.values()):
        still = [name for name, own in share.items() if not own]
        says = "entries that differ between the two checkpoints"
        says += f": none in {', '.join(still)}" if still else ": some in every matrix"
        return Finding("note", says, (told,))
    if old != new:
        return Finding("note", f"the parameters are those of {old}, step {before}, to the last bit")
    first, last = sorted((before, after))
    says = f"no update happened between step {first} and step {last}"
    rates = schedules.table(run.optim, run.model.width, run.steps)[first:last]
    largest = f"the learning rate went up to {rates.max():.3g} there"  # ours is never 0
    advice = "updates below half a unit in the last place are lost: keep parameters in float32"
    return Finding("update underflow", f"{says}, for no parameter differs", (largest,), "measured",
                   advice)  # fmt: skip


def _loss(found: Measured, h1: float) -> list[Finding]:
    loss = float(found.values["probe_loss"])
    kl = float(found.values["unigram_kl"])
    told = (f"held-out loss {loss:.2f} nats, H1 {h1:.2f}; KL(unigram || prediction) {kl:.3f}",)
    if not np.isfinite(loss):
        return [Finding("diverged", f"the loss is {loss} at step {found.step}", told)]
    if abs(loss - h1) < outcome.RULE.near and kl < UNIGRAM:
        return [Finding("stalled", "it predicts letter frequencies and nothing else", told)]
    if loss < h1 - outcome.RULE.margin:
        return [Finding("healthy", "better than letter frequencies", told)]
    says = f"not yet better than letter frequencies at step {found.step}"
    return [Finding("undecided", says, told)]


def _checks(found: Measured) -> list[Finding]:
    wiring, finite = found.findings["wiring"], found.findings["finite"]
    made = [Finding("note" if wiring.sound else "structure", wiring.sentences[0])]
    if not finite.sound:
        made.append(Finding("precision", finite.sentences[0]))
    return made


def _signs(found: Measured) -> list[Finding]:
    """What a probe of a live run would have warned of."""
    probe: dict[str, Any] = {"step": found.step, **found.values}
    made = [Finding("note", alarm.says) for alarm in alarms.alarms([], [probe])]
    lost = alarms.far([probe], found.label, found.run.model.dtype)
    return [*made, *alarms.still([probe], found.label), *lost]
