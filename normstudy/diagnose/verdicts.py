"""The verdicts, and what a finding is: a verdict with its evidence and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["fine", "open", "symptom", "cause", "note"]
Sure = Literal["tested", "measured", "likely", "possible"]

# {verdict: (kind, meaning)}. fine and open: nothing wrong, or too early; symptom: what happened;
# cause: why; note: worth knowing, wrong or not
VERDICTS: dict[str, tuple[Kind, str]] = {
    "healthy": ("fine", "trains, and nothing that was looked at speaks against it"),
    "undecided": ("open", "too early to tell, or not enough is known"),
    "stalled": ("symptom", "never better than the unigram entropy (or than predicting the mean)"),
    "collapsed": ("symptom", "was better than that, fell back to it and stays there"),
    "diverged": ("symptom", "the loss is no number, or above its start and not coming back"),
    "spiked": ("symptom", "the loss rose far above its best and came back"),
    "borderline": ("symptom", "some seeds train and some do not"),
    "placement without warmup": ("cause", "the skip path crosses norms, and the rate starts high"),
    "learning rate too high": ("cause", "for this width, depth, placement and batch"),
    "batch too small": ("cause", "for the learning rate"),
    "init scale": ("cause", "branch matrices are far larger or smaller than their rule asks"),
    "logit scale": ("cause", "the model starts sure of what it cannot know"),
    "schedule": ("cause", "the learning rate is not what it was meant to be at every update"),
    "structure": ("cause", "the model is not wired as it is called"),
    "optimizer": ("cause", "the optimizer, its clipping, its decay or its epsilon"),
    "update underflow": ("cause", "updates are lost in rounding: parameters do not move"),
    "precision": ("cause", "a number outgrew its dtype; the first bad tensor is named"),
    "resume mismatch": ("cause", "what was resumed is not what was stopped"),
    "duplicate data": ("cause", "the same text comes again and again"),
    "not attributable": ("cause", "no norm, rate or schedule that was tried is to blame"),
    "note": ("note", "worth knowing"),
}
SURE: dict[Sure, str] = {  # the surest first
    "tested": "a run with nothing else changed",
    "measured": "read off the numbers",
    "likely": "follows from the config by theory or by other people's runs",
    "possible": "cannot be ruled out",
}


@dataclass(frozen=True)
class Finding:
    """One verdict: a sentence, its evidence, how sure, what to do, and where that is known from."""

    verdict: str  # a key of VERDICTS
    says: str
    evidence: tuple[str, ...] = ()
    sure: Sure = "measured"
    advice: str = ""
    source: str = ""

    def __post_init__(self):
        if self.verdict not in VERDICTS or self.sure not in SURE:
            raise ValueError(f"{self.verdict!r} ({self.sure}) is no verdict")

    @property
    def kind(self) -> Kind:
        return VERDICTS[self.verdict][0]

    def as_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self), "evidence": list(self.evidence)}


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """What happened, then why, the surest first; what is fine or open; notes last."""
    kinds, sure = ("symptom", "cause", "fine", "open", "note"), list(SURE)
    return sorted(findings, key=lambda f: (kinds.index(f.kind), sure.index(f.sure)))


def exit_code(findings: Sequence[Finding]) -> int:
    """0 healthy, 1 findings, 3 could not decide (2 is bad input)."""
    kinds = {finding.kind for finding in findings}
    if kinds & {"symptom", "cause"}:
        return 1
    return 0 if "fine" in kinds else 3
