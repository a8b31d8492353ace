"""What one checkpoint says: is it finite, wired as declared, better than letter frequencies?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from normstudy import config, inspection, outcome
from normstudy.diagnose import alarms
from normstudy.diagnose.subject import Baseline, Subject
from normstudy.diagnose.verdicts import Finding
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
    agrees = any(row["layer"].startswith("all") for row in wiring.rows if type(row["layer"]) is str)
    made = [Finding("note" if agrees else "structure", wiring.sentences[0])]
    if finite.rows:
        made.append(Finding("precision", finite.sentences[0]))
    return made


def _signs(found: Measured) -> list[Finding]:
    """What a probe of a live run would have warned of."""
    probe: dict[str, Any] = {"step": found.step, **found.values}
    made = [Finding("note", alarm.says) for alarm in alarms.alarms([], [probe])]
    return [*made, *alarms.still([probe], found.label)]
