"""The smallest change that would remove a suspected cause, run beside the baseline.

TABLE has a row for each change: what it changes, which cause it speaks for, and where it is known
from. A change that makes every seed train, alone, is a cure, and its cause a tested finding. One
that only moves the failure to a later step is a delay. Causes are told in the order of the loss
that their cures reached; one with a larger batch has seen more text by then.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from normstudy import config, outcome, placements, record, study, theory, train
from normstudy.diagnose.verdicts import Finding
from normstudy.progress import say

ALIVE = ("trained", "spiked")
LATER = 1.25  # times the failure step from which on a failure counts as moved
KIND = "diagnosis"  # of the folder of trials
FLOPS = 30e9  # a second, of two CPU cores in a step of these sizes (make bench): plans only
START = 5.0  # seconds to compile and to evaluate a run: plans only
RUNS = 8  # that a budget should hold; a config too large for that is tried at the proxy scale

Effect = Literal["cures", "cures some seeds", "delays", "no effect", "harms", "undecided"]


class Trial(NamedTuple):
    """One change."""

    name: str
    change: Callable[[config.Run], dict[str, Any]]  # {} where there is nothing to change
    cause: str  # a verdict: what it speaks for, if it cures
    source: str


def _crosses(run: config.Run) -> bool:
    return bool(placements.row(run.model.placement).skip_norms)


def _longer_warmup(run: config.Run) -> dict[str, Any]:
    """Half of the run: 10% of a long run is more updates than all of a short one."""
    return {"warmup": run.steps // 2} if run.optim.warmup < run.steps // 4 else {}


def _depth_scaled(run: config.Run) -> dict[str, Any]:
    counted = placements.row(run.model.placement).counts_depth()
    return {} if run.init.depth_scaled or counted else {"depth_scaled": True}


def _four_matrices(run: config.Run) -> dict[str, Any]:
    """DeepNet's beta without its alpha."""
    scaled = run.init.depth_scaled or placements.row(run.model.placement).counts_depth()
    if scaled or run.init.beta != 1 or not _crosses(run):
        return {}
    return {"beta": theory.deepnorm_decoder(run.model.layers).beta}


def _final_norm(run: config.Run) -> dict[str, Any]:
    place = placements.row(run.model.placement)
    return {"final_norm": True} if place.norms_branches_alone(run.model) else {}


def _no_decay(run: config.Run) -> dict[str, Any]:
    decays = run.optim.optimizer == "adamw" and run.optim.weight_decay
    return {"weight_decay": 0.0} if decays else {}


def _placement(name: str) -> Callable[[config.Run], dict[str, Any]]:
    def change(run: config.Run) -> dict[str, Any]:
        if run.model.placement == name or not _crosses(run):
            return {}
        counted = placements.row(name).counts_depth() and run.init.depth_scaled
        return {"placement": name} | ({"depth_scaled": False} if counted else {})

    return change


def _usual_init(run: config.Run) -> dict[str, Any]:
    usual = config.Init()
    fields = ("init", "gain", "beta", "embed_std")
    return {n: getattr(usual, n) for n in fields if getattr(run.init, n) != getattr(usual, n)}


def _untied(run: config.Run) -> dict[str, Any]:
    return {"tied": False} if run.model.tied else {}


def _other_schedule(run: config.Run) -> dict[str, Any]:
    falls = run.optim.schedule.startswith("inverse_sqrt")
    return {"schedule": "linear"} if falls and run.optim.warmup <= 1 else {}


TABLE = (
    Trial("warmup over half of the run", _longer_warmup, "placement without warmup",
          "Xiong et al. 2020 (2002.04745), section 3"),
    Trial("lr / 2", lambda r: {"lr": r.optim.lr / 2}, "learning rate too high",
          "Xiong et al. 2020"),
    Trial("lr / 4", lambda r: {"lr": r.optim.lr / 4}, "learning rate too high",
          "Xiong et al. 2020"),
    Trial("1/sqrt(2L) on o and down", _depth_scaled, "init scale",
          "Radford et al. 2019 (GPT-2), section 2.3"),
    Trial("DeepNet's beta on v, o, up, down", _four_matrices, "init scale",
          "Wang et al. 2022 (2203.00555), section 4.3, without its alpha"),
    Trial("init by its rule", _usual_init, "init scale",
          "BigScience, chronicles of tr8-104B: std 0.02 at width 11600"),
    Trial("DeepNorm", _placement("deepnorm"), "placement without warmup",
          "Wang et al. 2022 (2203.00555)"),
    Trial("pre-norm", _placement("pre"), "placement without warmup", "Xiong et al. 2020"),
    Trial("a final norm", _final_norm, "structure", "PaddleNLP#571"),
    Trial("no clipping", lambda r: {"clip": 0.0} if r.optim.clip else {}, "optimizer",
          "pytorch/examples#846"),
    Trial("clip 1", lambda r: {} if r.optim.clip else {"clip": 1.0}, "optimizer",
          "Pascanu et al. 2013 (1211.5063)"),
    Trial("Adam at 1e-3",
          lambda r: {"optimizer": "adam", "lr": 1e-3} if r.optim.optimizer == "sgd" else {},
          "optimizer", "Zhang et al. 2020 (1912.03194)"),
    Trial("eps 1e-6 and b2 0.95",
          lambda r: {"eps": 1e-6, "b2": 0.95} if r.optim.optimizer != "sgd" else {},
          "optimizer", "disputed: no consensus in public threads"),
    Trial("no weight decay", _no_decay, "optimizer", "Loshchilov & Hutter 2019 (1711.05101)"),
    Trial("batch x 8", lambda r: {"batch": r.data.batch * 8}, "batch too small",
          "fairseq: Ott et al. 2018 (1806.00187)"),
    Trial("linear schedule", _other_schedule, "schedule", "Transformer-Clinic#16"),
    Trial("readout of its own", _untied, "logit scale", "Press & Wolf 2017 (1608.05859)"),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What came of a change, over its seeds."""

    name: str
    changes: dict[str, Any]
    cause: str
    source: str
    words: tuple[str, ...]
    steps: tuple[int, ...]  # that each word dates from
    best: tuple[float, ...]  # smoothed loss, nats
    effect: Effect | None = None  # None: the baseline

    @property
    def trained(self) -> int:
        return sum(word in ALIVE for word in self.words)


def proxy(run: config.Run, budget: float) -> tuple[config.Run, str]:
    """(the run, "") where RUNS of it fit the budget in seconds; else one of the cpu preset's
    sizes, with the same placement and depth, and in words what is another there.

    Its rate is larger by the ratio of the widths, as muP asks of Adam's (Yang et al. 2021).
    """
    if RUNS * run.steps * _flops(run) / FLOPS <= budget:
        return run, ""
    small = config.PRESETS["cpu"]
    width = min(run.model.width, small.model.width)
    steps = min(run.steps, small.steps)
    heads = max(h for h in range(1, min(run.model.heads, width // 8 or 1) + 1) if width % h == 0)
    ratio = run.model.width / width
    changes: dict[str, Any] = {
        "width": width, "heads": heads, "ff": max(round(run.model.ff / ratio), 1),
        "context": min(run.model.context, small.model.context),
        "batch": min(run.data.batch, small.data.batch), "steps": steps,
        "warmup": math.ceil(run.optim.warmup * steps / run.steps),
        "vocab": small.model.vocab, "corpus": small.data.corpus,
        "layers": min(run.model.layers, small.model.layers), "dtype": "float32",
    }  # fmt: skip
    if run.optim.optimizer != "sgd":
        changes["lr"] = run.optim.lr * ratio
    if run.init.init == "normal":  # the same gain over Xavier at another width
        changes["init_std"] = run.init.init_std * ratio**0.5
    proxied = config.override(run, **changes)
    told = ", ".join(
        f"{name} {new} for {old}" for name, (old, new) in config.differences(run, proxied).items()
    )
    return proxied, told


def _flops(run: config.Run) -> float:
    """Of a step: 6 for each parameter of the blocks and each token, and the readout's."""
    m = run.model
    parameters = m.layers * (4 * m.width**2 + 2 * m.width * m.ff) + m.width * m.vocab
    return 6.0 * parameters * run.data.batch * m.context


def chosen(run: config.Run, causes: Sequence[str]) -> list[tuple[Trial, dict[str, Any]]]:
    """The changes that change something, those for a suspected cause first; of a placement whose
    skip path crosses norms, then those that speak of it."""
    suspected = list(causes)
    if _crosses(run):
        suspected.append("placement without warmup")
    own = [(trial, trial.change(run)) for trial in TABLE]
    own = [(trial, changes) for trial, changes in own if changes]
    order = {cause: i for i, cause in enumerate(dict.fromkeys(suspected))}
    return sorted(own, key=lambda pair: order.get(pair[0].cause, len(order)))


class Bench:
    """Where changes are tried: OUT/arms holds their runs, and finished ones are not run again."""

    def __init__(self, run: config.Run, out: Path, budget: float, seeds: int):
        """budget: seconds, for all that is tried. Raises UserError where OUT holds the trials of
        another config."""
        record.open_folder(out, record.identity(dataclasses.asdict(run), KIND), KIND)
        self.run, self.out, self.budget, self.seeds = run, out, budget, seeds
        self.began = time.monotonic()
        self.pace = 1 / FLOPS  # seconds for each FLOP, of the last run

    @property
    def left(self) -> float:
        """Seconds of the budget."""
        return self.budget - (time.monotonic() - self.began)

    def baseline(self) -> tuple[Result, Path]:
        """The run as it is, probed as its config says, whatever the budget; and its folder."""
        found = self._seeds("baseline", self.run)
        return Result("baseline", {}, "", "", *_columns(found)), self.out / "arms" / "baseline"

    def attempt(
        self, base: Result, changes: Sequence[tuple[Trial, dict[str, Any]]]
    ) -> tuple[list[Result], list[str]]:
        """(results of the changes, names of those that the budget did not hold), in their order."""
        results, without = [], []
        plain = dataclasses.replace(self.run.probe, probe_every=0)
        for i, (trial, changed) in enumerate(changes, start=1):
            arm = dataclasses.replace(config.override(self.run, **changed), probe=plain)
            if self._cost(arm) > self.left:
                without.append(trial.name)
                continue
            say(f"[{i}/{len(changes)}] {trial.name} ({self.left:.0f} s of the budget left)")
            found = self._seeds(trial.name, arm)
            own = Result(trial.name, changed, trial.cause, trial.source, *_columns(found))
            results.append(dataclasses.replace(own, effect=effect(base, own)))
        return results, without

    def _seeds(self, name: str, arm: config.Run) -> list[dict[str, Any]]:
        """What each seed came to; the first in any case, others while the budget lasts."""
        found = []
        for seed in range(arm.seed, arm.seed + self.seeds):
            if found and self._cost(arm) > self.left:
                break
            folder = self.out / "arms" / study.slug(name) / f"seed{seed}"
            found.append(train.train(dataclasses.replace(arm, seed=seed), folder, name))
            steps = record.column(folder / record.METRICS, "seconds")[1:]  # the first compiles
            if steps:
                self.pace = float(np.median(steps)) / _flops(arm)
        return found

    def _cost(self, arm: config.Run) -> float:
        """Seconds that it will take at the pace of the last one."""
        return START + self.pace * _flops(arm) * arm.steps


def _columns(found: list[dict[str, Any]]) -> tuple[tuple, tuple, tuple]:
    """(words, steps, best losses) of the seeds."""
    return (
        tuple(row["word"] for row in found),
        tuple(int(row["step"]) for row in found),
        tuple(float(row["best_loss"]) for row in found),
    )


def effect(base: Result, own: Result) -> Effect:
    """What a change did, by outcomes; a failure that comes later is a delay and no cure."""
    if base.trained == len(base.words):
        return "no effect" if own.trained == len(own.words) else "harms"
    if own.trained == len(own.words):
        return "cures"
    if own.trained / len(own.words) > base.trained / len(base.words):
        return "cures some seeds"
    if "undecided" in own.words:
        return "undecided"
    fell = {"collapsed", "diverged"}  # a run that never trained has no step at which it failed
    if not fell >= {*base.words, *own.words}:
        return "no effect"
    if np.median(own.steps) >= LATER * max(np.median(base.steps), outcome.RULE.window):
        return "delays"
    return "no effect"


def causes(base: Result, results: Sequence[Result], untried: Sequence[str] = ()) -> list[Finding]:
    """The findings that trials are evidence for; that nothing cures is one, too.

    untried: names of changes that were not tried: as long as there are any, one may cure it.
    """
    if base.trained == len(base.words):
        return []
    found: list[Finding] = []
    cured = sorted((own for own in results if own.effect == "cures"), key=_reached)
    kinds = list(dict.fromkeys(own.cause for own in cured))
    if len(kinds) > 1:
        says = (
            f"changes of {len(kinds)} kinds cure it, each alone: no one of them is the only cause"
        )
        found.append(Finding("note", says, (), "tested"))
    for cause in kinds:
        cures = [own for own in cured if own.cause == cause]
        says = f"{' and '.join(_quoted(own) for own in cures)} {_each(cures)}"
        evidence = tuple(tell(own, base) for own in cures)
        advice = "; ".join(_options(own.changes) for own in cures)
        found.append(Finding(cause, says, evidence, "tested", advice))
    placement = [own for own in results if "placement" in own.changes]
    dead = [own for own in placement if own.effect in ("no effect", "harms", "delays")]
    if dead and len(dead) == len(placement):
        says = f"not the placement: {', '.join(own.name for own in dead)} fails too"
        found.append(Finding("note", says, tuple(tell(own, base) for own in dead), "tested"))
    for own in results:
        if own.effect == "delays":
            says = f"{own.name} is a delay and no cure: it only moves the failure"
            found.append(Finding("note", says, (tell(own, base),), "tested"))
    if results and not any(own.effect in ("cures", "cures some seeds") for own in results):
        says = f"none of {len(results)} changes that were tried cures it"
        evidence = tuple(tell(own, base) for own in results)
        if untried:
            says += f"; {len(untried)} were not tried"
        verdict = "note" if untried else "not attributable"
        found.append(Finding(verdict, says, evidence, "tested"))
    return found


def _reached(own: Result) -> float:
    """What changes are ordered by: the best loss of the seed in the middle."""
    return float(np.median(own.best))


def tell(own: Result, base: Result) -> str:
    """'lr / 4: trained 3 of 3, best 2.31 nats (baseline: 0 of 3, 3.02)'."""
    return (
        f"{own.name}: {own.trained} of {len(own.words)} train ({_dates(own)}), best "
        f"{_reached(own):.2f} nats; baseline {base.trained} of {len(base.words)} "
        f"({_dates(base)}), {_reached(base):.2f}"
    )


def _dates(own: Result) -> str:
    pairs = zip(own.words, own.steps, strict=True)
    return ", ".join(dict.fromkeys(f"{word} at step {step}" for word, step in pairs))


def _quoted(own: Result) -> str:
    return f"'{own.name}'"


def _each(cures: Sequence[Result]) -> str:
    return "cures it, and nothing else was changed" if len(cures) == 1 else "cure it, each alone"


def _options(changes: dict[str, Any]) -> str:
    usual = config.fields_of(config.Run())

    def option(name: str, value: Any) -> str:
        flag = name.replace("_", "-")
        if isinstance(usual[name], bool):
            return f"--{flag}" if value else f"--no-{flag}"
        return f"--{flag} {value:g}" if isinstance(value, float) else f"--{flag} {value}"

    return " ".join(option(name, value) for name, value in changes.items() if value is not None)


def literature(run: config.Run, suspects: Sequence[str]) -> list[str]:
    """What has been proposed, untested here."""
    return [
        f"{trial.name} ({_options(changes)}): {trial.source}"
        for trial, changes in chosen(run, suspects)
    ]
