"""From a subject to all that is told of it: symptoms, audits, trials, in that order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normstudy import config
from normstudy.diagnose import alarms, audits, curves, trials
from normstudy.diagnose.subject import Subject, from_run
from normstudy.diagnose.trials import Result
from normstudy.diagnose.verdicts import Finding


@dataclass(frozen=True)
class Diagnosis:
    """All that is told."""

    name: str  # of what was diagnosed
    findings: Sequence[Finding]
    results: Sequence[Result] = ()  # of trials, the baseline first
    scale: str = ""  # how the trials differ from what was asked; empty: they do not
    literature: Sequence[str] = ()  # what was not tried here
    unchecked: Sequence[str] = ()
    differences: Sequence[dict[str, Any]] = ()  # against another side, see against.py


@dataclass(frozen=True)
class Trying:
    """Whether and how changes are tried."""

    out: Path
    budget: float = 240.0  # seconds
    seeds: int = 1


def make(subject: Subject, trying: Trying | None) -> Diagnosis:
    """The diagnosis of a subject; trying: None tries nothing.

    Raises UserError for a config that cannot be trained, and where OUT holds something else.
    """
    found = [*subject.seen, *_of_curves(subject)]
    happened = bool(found)
    unchecked = _without(subject)
    if subject.run is None:
        return Diagnosis(subject.name, _undetermined(found), (), "", (), unchecked)
    audited, left = audits.findings(subject.run, subject.known)
    found, unchecked = [*found, *audited], [*unchecked, *left]
    whole = subject.known >= frozenset(config.fields_of(subject.run))
    suspects = [f.verdict for f in found if f.kind == "cause"]
    failed = any(f.kind == "symptom" for f in found)
    if not whole:
        unchecked.append("trials: the config is known in part")
        return Diagnosis(subject.name, _undetermined(found), (), "", (), unchecked)
    if trying is None:
        books = trials.literature(subject.run, suspects) if failed or suspects else []
        if not happened:
            unchecked.append("whether it trains: nothing was run (--no-runs)")
            found.append(Finding("undecided", "nothing was run"))
        return Diagnosis(subject.name, _agreed(found), (), "", books, unchecked)
    if happened and not failed:
        return Diagnosis(subject.name, _agreed(found), (), "", (), unchecked)
    return _tried(subject, found, suspects, unchecked, trying)


def _of_curves(subject: Subject) -> list[Finding]:
    """All that logs or a loss curve say."""
    return [*curves.findings(subject), *alarms.rounding(subject), *_signs(subject)]


def _signs(subject: Subject) -> list[Finding]:
    """Early signs in the runs that failed."""
    told = {curve.name: curves.tell(curve, subject.baseline) for curve in subject.curves}
    failed = {name: own.step for name, own in told.items() if own.word in curves.DEAD}
    return alarms.findings(subject, failed)


def _tried(
    subject: Subject,
    found: list[Finding],
    suspects: list[str],
    unchecked: list[str],
    trying: Trying,
) -> Diagnosis:
    assert subject.run is not None
    run, scale = trials.proxy(subject.run, trying.budget)
    bench = trials.Bench(run, trying.out, trying.budget, trying.seeds)
    base, folder = bench.baseline()
    seen = _of_curves(from_run(folder))
    if not subject.curves and not subject.seen:
        found = [*seen, *found]
    elif base.trained == len(base.words):  # what happened is known, and does not happen here
        says = "the failure does not show in the trials' baseline: nothing could be tried on it"
        found.append(Finding("note", says, (f"at {scale}" if scale else "same config",)))
        unchecked.append("changes: the baseline of the trials trains")
    if base.trained == len(base.words):
        return Diagnosis(subject.name, _agreed(found), [base], scale, (), unchecked)
    suspects += [finding.verdict for finding in seen if finding.kind == "cause"]
    results, left = bench.attempt(base, trials.chosen(run, suspects))
    found += trials.causes(base, results, left)
    unchecked += [f"{name}: no budget left" for name in left]
    return Diagnosis(subject.name, _agreed(found), [base, *results], scale, (), unchecked)


def _agreed(found: list[Finding]) -> list[Finding]:
    """Suspicions that a trial has confirmed are told by the trial; in a healthy run those that only
    follow from the config are notes."""
    tested = {f.verdict for f in found if f.sure == "tested"}
    kept = [f for f in found if f.sure == "tested" or f.verdict not in tested]
    if any(f.verdict == "healthy" for f in kept):
        return [_as_note(f) if f.sure in ("likely", "possible") else f for f in kept]
    return kept


def _as_note(finding: Finding) -> Finding:
    if finding.kind != "cause":
        return finding
    says = f"{finding.verdict}? {finding.says}; it trains all the same"
    return dataclasses.replace(finding, verdict="note", says=says)


def _undetermined(found: list[Finding]) -> list[Finding]:
    """Nothing at all was found: that is said."""
    if any(f.kind != "note" for f in found):
        return found
    return [Finding("undecided", "nothing that was looked at says whether it trains"), *found]


def _without(subject: Subject) -> list[str]:
    """What cannot be told for lack of input."""
    lacks = []
    if subject.run is None:
        lacks.append("the cause: only a loss curve is known (give the config's fields, or --run)")
    if subject.curves and subject.baseline.loss is None:
        lacks.append("whether a plateau is the unigram entropy: give --h1, or --mean-loss")
    if subject.curves and all(curve.rates is None for curve in subject.curves):
        lacks.append("the learning rate at each update: the file has no column of it")
    return lacks
