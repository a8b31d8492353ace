"""A diagnosis for people and for programs: verdict, evidence, what to do, what was not checked."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normstudy import figures, frames, report, tables
from normstudy.diagnose.diagnosis import Diagnosis
from normstudy.diagnose.trials import Result
from normstudy.diagnose.verdicts import Finding, exit_code, ranked

SCHEMA = 1  # of as_dict; grows when a field changes its meaning or goes


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """The --json output, schema 1.

    schema, subject, verdict (the first finding's), exit_code, findings (each verdict, kind, says,
    evidence, sure, advice, source; in their order of rank), trials (each name, changes, effect,
    words and steps by seed, best_loss by seed in nats), scale, literature, unchecked, differences
    (what, there, here, how: set, follows or measured).
    """
    order = ranked(diagnosis.findings)
    return {
        "schema": SCHEMA,
        "subject": diagnosis.name,
        "verdict": order[0].verdict,
        "exit_code": exit_code(order),
        "findings": [finding.as_dict() for finding in order],
        "trials": [
            {
                "name": own.name, "changes": own.changes, "effect": own.effect,
                "words": list(own.words), "steps": list(own.steps), "best_loss": list(own.best),
            }
            for own in diagnosis.results
        ],
        "scale": diagnosis.scale,
        "literature": list(diagnosis.literature),
        "unchecked": list(diagnosis.unchecked),
        "differences": list(diagnosis.differences),
    }  # fmt: skip


def text(diagnosis: Diagnosis) -> str:
    """The page for a terminal."""
    order = ranked(diagnosis.findings)
    causes = [finding for finding in order if finding.kind != "note"]
    notes = [finding for finding in order if finding.kind == "note"]
    lines = [f"{diagnosis.name}: {verdict(order)}", ""]
    for finding in causes:
        lines += _wrapped(f"{finding.verdict} ({finding.sure}): {finding.says}", "", "  ")
        for evidence in finding.evidence:
            lines += _wrapped(evidence, "  - ", "    ")
    advice = [finding for finding in causes if finding.advice]
    if advice:
        lines += ["", "What to do"]
        for finding in advice:
            source = f" [{finding.source}]" if finding.source else ""
            tried = "tried here" if finding.sure == "tested" else "not tried here"
            lines += _wrapped(f"{finding.advice} ({tried}){source}", "  ", "    ")
    if diagnosis.results:
        lines += ["", "What was tried" + (" at a proxy scale" if diagnosis.scale else "")]
        if diagnosis.scale:
            lines += _wrapped(diagnosis.scale, "  ", "  ")
        lines += [f"  {line}" for line in tables.text(_trials(diagnosis.results)).splitlines()]
    if diagnosis.differences:
        lines += ["", "Differences from the other side"]
        lines += [f"  {line}" for line in tables.text(diagnosis.differences).splitlines()]
    if diagnosis.literature:
        lines += ["", "From literature, not tested here"]
        for entry in diagnosis.literature:
            lines += _wrapped(entry, "  - ", "    ")
    if notes:
        lines += ["", "Also seen"]
        for finding in notes:
            lines += _wrapped(finding.says, "  - ", "    ")
            for evidence in finding.evidence:
                lines += _wrapped(evidence, "      ", "      ")
    if diagnosis.unchecked:
        lines += ["", "Not checked"]
        for entry in diagnosis.unchecked:
            lines += _wrapped(entry, "  - ", "    ")
    return "\n".join(lines)


def write_report(diagnosis: Diagnosis, out: Path, card: str) -> Path:
    """OUT/report.html and OUT/figures, of the trials under OUT."""
    runs = frames.load(out)
    names = [own.name for own in diagnosis.results]
    runs = sorted((logs for logs in runs if logs.name in names), key=lambda r: names.index(r.name))
    drawn = figures.draw_all(runs, out / "figures", figures.WITHOUT_PROBES)
    rows = [frames.summary_row(logs) for logs in runs]
    path = out / "report.html"
    report.write(path, f"Diagnosis of {diagnosis.name}", card, runs, rows, drawn, text(diagnosis))
    return path


def verdict(order: Sequence[Finding]) -> str:
    """The first line: what happened, and the surest causes."""
    symptoms = [finding for finding in order if finding.kind == "symptom"]
    causes = [finding for finding in order if finding.kind == "cause"]
    sure = [f for f in causes if f.sure == "tested"] or [f for f in causes if f.sure == "measured"]
    shown = list(dict.fromkeys(f.verdict for f in (sure or causes)))
    if symptoms:
        why = "; ".join(shown) if shown else "cause undetermined"
        return f"{symptoms[0].verdict}; {why}" + ("" if sure or not shown else " (suspected)")
    if shown:
        return "; ".join(shown) + ("" if sure else " (suspected)")
    return order[0].verdict


def _trials(results: Sequence[Result]) -> list[dict[str, Any]]:
    return [
        {
            "change": own.name,
            "effect": own.effect or "",
            "trained": f"{own.trained} of {len(own.words)}",
            "came to": ", ".join(dict.fromkeys(own.words)),
            "at step": ", ".join(map(str, own.steps)),
            "best loss (nats)": ", ".join(f"{best:.3f}" for best in own.best),
        }
        for own in results
    ]


def _wrapped(words: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(words, 98, initial_indent=first, subsequent_indent=rest)
