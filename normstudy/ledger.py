"""Tables of evidence -> a verdict on every claim, by rules. No jax here.

A verdict is one of SUPPORTED, `supported only if ...`, NOT and OPEN. Each rule is a function under
the claim's name; what would count against a claim stands in its first lines. Numbers that a rule
looked at go to numbers.csv with their interval and source, whatever the verdict.

Intervals, 95%: of a share of seeds, Clopper & Pearson 1934; of a positive quantity, Student's t over
seeds in the logarithm, around the geometric mean. n is the number of seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats  # jax depends on it

from normstudy import evidence, frames
from normstudy.frames import Table

SUPPORTED, NOT, OPEN = "supported", "not supported", "open at this scale"
ONLY_IF = "supported only if "
TRAINS = ("trained", "spiked")
FAILS = ("stalled", "collapsed", "diverged")
# of the grid, in the order in which they are told: the refactor, then the fixes
RECIPES = (
    "pre", "post", "post+warmup", "post+1/sqrt(2L)", "post+1/sqrt(2L)+warmup", "deepnet",
    "deepnet+warmup",
)  # fmt: skip
USUAL = 1e-3  # Adam's default, the rate of the ablations
DEATH = 300  # updates within which claim C6 sees the loss diverge
FACTOR = 10.0  # a bottom gradient is even within such a factor of the top's (claims C4)
SHARE = 0.1  # a branch with less of the skip path's variance counts as none (C5)
CLOSE = {"cosine": 0.95, "distance": 1 / 3}  # a block that starts close to the identity (C14)
TELLS = 0.9  # probability of ordering a run that fails and one that trains rightly (M1)
EXACT = 1e-10  # of an identity in float64, relative


class Number(NamedTuple):
    """One number of the paper, with what it was computed from."""

    name: str  # as the paper asks for it
    text: str  # as it is printed
    value: float  # nan for what is no number
    low: float  # 95%
    high: float
    n: int
    claim: str
    source: str  # file and rows


@dataclass
class Case:
    """What a rule may look at, and where it writes the numbers that it looked at."""

    claim: str
    runs: Table
    probes: Table
    checks: Table
    ramp: Table  # of max_lr.py
    numbers: list[Number] = field(default_factory=list)

    @property
    def rate(self) -> float | None:
        """The largest rate of the grid at which pre-norm trains for every seed."""
        good = [lr for lr in self.rates("pre") if _all_train(self.of("pre", lr))]
        return max(good, default=None)

    def of(self, recipe: str, lr: float | None = None) -> Table:
        """The runs of a recipe."""
        rows = [row for row in self.runs if row["recipe"] == recipe]
        return [row for row in rows if lr is None or _same(row["lr"], lr)]

    def rates(self, recipe: str) -> list[float]:
        return sorted({row["lr"] for row in self.of(recipe)})

    def probed(self, recipe: str, lr: float, step: int | None = None) -> Table:
        """The probes of a recipe."""
        rows = [r for r in self.probes if r["recipe"] == recipe and _same(r["lr"], lr)]
        return [row for row in rows if step is None or row["step"] == step]

    def mean(self, name: str, values: Iterable[float | None], source: str) -> Number:
        """Geometric mean over the seeds whose value is positive, and its interval."""
        logs = np.log(np.array([v for v in values if v is not None and v > 0], float))
        n, middle = len(logs), float(np.mean(logs)) if len(logs) else math.nan
        half = math.nan
        if n > 1:
            half = float(stats.t.ppf(0.975, n - 1) * np.std(logs, ddof=1) / math.sqrt(n))
        value, low, high = (float(np.exp(middle + d)) for d in (0.0, -half, half))
        return self.note(name, _text(value), value, low, high, n, source)

    def root(self, name: str, squares: Sequence[float], source: str) -> Number:
        """Root of a mean over seeds, and its interval; an estimate of 0 may come out below it."""
        n, middle = len(squares), float(np.mean(squares))
        half = math.nan
        if n > 1:
            half = float(stats.t.ppf(0.975, n - 1) * np.std(squares, ddof=1) / math.sqrt(n))
        value, low, high = (
            math.nan if math.isnan(square) else math.sqrt(max(square, 0.0))
            for square in (middle, middle - half, middle + half)
        )
        return self.note(name, _text(value), value, low, high, n, source)

    def count(self, name: str, rows: Table, words: Sequence[str], source: str) -> Number:
        """k of n seeds, and the interval of the share."""
        n, k = len(rows), sum(row["outcome"] in words for row in rows)
        low = float(stats.beta.ppf(0.025, k, n - k + 1)) if k else 0.0
        high = float(stats.beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
        return self.note(name, f"{k} of {n}", k / n if n else math.nan, low, high, n, source)

    def tally(self, name: str, value: int | float, source: str, n: int = 0) -> Number:
        """A whole number."""
        return self.note(name, f"{value:.0f}", float(value), n=n, source=source)

    def note(
        self, name: str, text: str, value: float = math.nan, low: float = math.nan,
        high: float = math.nan, n: int = 0, source: str = "",
    ) -> Number:  # fmt: skip
        number = Number(name, text, value, low, high, n, self.claim, source)
        self.numbers.append(number)
        return number


class Verdict(NamedTuple):
    """A row of claims.csv."""

    claim: str
    says: str  # the claim in words
    verdict: str
    measured: str
    n: int
    conditions: str


Ruling = tuple[str, str, int]  # verdict, what was measured, n


# -------------------------------------------------------------------------------------- rules


def c1(case: Case) -> Ruling:
    """Against: any parameter that is no norm differs, or the wiring is not the equation's."""
    found = {row["check"]: row for row in case.checks if row["claim"] == "C1"}
    if not found:
        return OPEN, "not checked", 0
    wrong = sum(row["value"] for name, row in found.items() if name.startswith("wiring"))
    other = found["parameters that differ, norms aside"]["value"]
    final = found["a final norm beside pre-norm alone"]["value"]
    lines = found["equations that differ"]
    case.tally("wiring findings", wrong, "checks.csv: C1")
    measured = (
        f"equations {lines['says']}; wiring read back from outside: {wrong:.0f} deviations; "
        f"{other:.0f} other parameters differ"
    )
    if wrong or other or not lines["value"]:
        return NOT, measured, 1
    if final:
        return f"{ONLY_IF}pre-norm's final norm before the readout counts with it", measured, 1
    return SUPPORTED, measured, 1


def c2(case: Case) -> Ruling:
    """Against: growth that is exponential in L. A power of L is a condition, none is support."""
    ratio, depth = _over_depth(case, "pre", "gradient_ratio")
    if len(set(depth)) < 3:
        return OPEN, "fewer than three depths were run", 0
    slope = _slope(case, "pre ratio slope", ratio, depth)
    top, _ = _over_depth(case, "pre", "top_gradient")
    top_slope = _slope(case, "pre top slope", top, depth)
    power = _residual(np.log(depth), np.log(ratio))
    exponential = _residual(np.array(depth, float), np.log(ratio))
    measured = (
        f"bottom/top stream gradient as L^{_around(slope)} over L = {min(depth)} to {max(depth)} "
        f"(residual {power:.2g} by a power, {exponential:.2g} by an exponential); the last "
        f"matrix's gradient as L^{_around(top_slope)}"
    )
    if slope.low <= 0 <= slope.high:
        return SUPPORTED, measured, slope.n
    if power < exponential and abs(slope.value) <= 1:
        return f"{ONLY_IF}growth by a power of the depth below 1 is allowed", measured, slope.n
    return NOT, measured, slope.n


def c3(case: Case) -> Ruling:
    """Against: nothing, it is an identity; a deviation would be a defect of the package."""
    off = [row["value"] for row in case.checks if row["claim"] == "C3"]
    if not off:
        return OPEN, "not checked", 0
    case.note("norm identity", f"{max(off):.1g}", max(off), n=len(off), source="checks.csv: C3")
    measured = f"singular values of the norm's Jacobian are 1/sigma to {max(off):.1g} (float64)"
    return (SUPPORTED if max(off) < EXACT else NOT), measured, len(off)


def c4(case: Case) -> Ruling:
    """Against: bottom/top within a factor 10. Asked of every init and embedding, as intervals."""
    outside, inside, told, n = [], [], [], 0
    for recipe in sorted(
        {r["recipe"] for r in case.runs if r["recipe"].startswith("start: post, ")}
    ):
        what = recipe.removeprefix("start: post, ")
        if what.endswith("blocks"):
            continue
        rows = case.probed(recipe, USUAL, 0)
        where = f"probes.csv: {recipe}, step 0"
        ratio = case.mean(f"ratio {what}", [r["gradient_ratio"] for r in rows], where)
        for column in ("jacobian_bottom", "skip_gain", "query_gradient_ratio", "similarity"):
            case.mean(f"{column} {what}", [r[column] for r in rows], where)
        n = max(n, ratio.n)
        told.append(f"{what} {_around(ratio)}")
        apart = ratio.low > FACTOR or ratio.high < 1 / FACTOR
        (outside if apart else inside).append(what)
    measured = "stream gradient bottom/top at step 0: " + "; ".join(told)
    if n < 2:
        return OPEN, measured if told else "not run", n
    if not inside:
        return SUPPORTED, measured, n
    if outside:
        return f"{ONLY_IF}the start is {' or '.join(outside)}", measured, n
    return NOT, measured, n


def c5(case: Case) -> Ruling:
    """Against: branch share near 0, so that a norm has nothing to take back."""
    told, holds, n = [], [], 0
    for law in ("xavier", "kaiming"):
        recipe = f"start: post, {law}, unit embedding"
        rows = case.probed(recipe, USUAL, 0)
        if not rows:
            return OPEN, "not run", 0
        where = f"probes.csv: {recipe}, step 0"
        share = case.mean(f"branch share {law}", [r["branch_share"] for r in rows], where)
        factor = case.mean(f"norm factor {law}", [r["norm_factor"] for r in rows], where)
        told.append(f"{law}: branch share {_around(share)}, norm factor {_around(factor)}")
        holds.append(share.low > SHARE and factor.high < 1)
        n = share.n
    if n < 2:
        return OPEN, "; ".join(told), n
    if all(holds):
        return SUPPORTED, "; ".join(told), n
    return (f"{ONLY_IF}init is not the other law" if any(holds) else NOT), "; ".join(told), n


def c6(case: Case) -> Ruling:
    """Against: it trains; or it fails in another way, and then the word is wrong."""
    if case.rate is None:
        return OPEN, "pre-norm trains at no rate of the grid for every seed", 0
    case.note("operating rate", f"{case.rate:g}", case.rate, source="runs.csv: pre")
    rows = case.of("post", case.rate)
    tally = {word: case.count(f"post {word}", rows, (word,), "runs.csv: post") for word in FAILS}
    died = [row["at_step"] for row in rows if row["outcome"] in FAILS]
    latest = max(died, default=0)
    case.tally("post latest death", latest, "runs.csv: post", n=len(died))
    words = ", ".join(f"{own.text} {word}" for word, own in tally.items() if own.value > 0)
    measured = f"at {case.rate:g}: {words or 'none failed'}, the last from step {latest}"
    usual = case.of("post", USUAL)
    if usual:
        case.count("post fails usual", usual, FAILS, f"runs.csv: post, {USUAL:g}")
        measured += f"; at {USUAL:g}: {_words(usual)}"
    if len(died) < len(rows) or not rows:
        return (OPEN if not rows else NOT), measured, len(rows)
    if tally["diverged"].value == 1 and latest <= DEATH:
        return SUPPORTED, measured, len(rows)
    if latest <= DEATH:
        said = "diverging means that learning ends: the loss stays at the unigram entropy"
        return f"{ONLY_IF}{said}", measured, len(rows)
    return NOT, measured, len(rows)


def c7(case: Case) -> Ruling:
    """Against: the first update changes post-norm's denominators no more than pre-norm's."""
    told, ratios, n = [], {}, 0
    for column, what in (("sigma_update_mean", "sigma"), ("function_update", "x_L")):
        pairs = _paired(case, column, "post", "pre", USUAL, 0)
        if not pairs:
            return OPEN, "not run", 0
        where = f"probes.csv: post over pre, {USUAL:g}, step 0, {column}"
        own = case.mean(f"first {what} post over pre", [a / b for a, b in pairs], where)
        post = case.mean(f"first {what} post", [a for a, _ in pairs], where)
        ratios[what], n = own, own.n
        told.append(f"{what} changes by {_around(post)} in post-norm, {_around(own)} of pre-norm's")
    for step in (1, 2, 3, 5, 10, 30):  # beside the claim, which is about the first
        pairs = _paired(case, "sigma_update_mean", "post", "pre", USUAL, step)
        where = f"probes.csv: post over pre, {USUAL:g}, step {step}, sigma_update_mean"
        case.mean(f"sigma post over pre step {step}", [a / b for a, b in pairs if b], where)
    for name in ("post", "pre"):
        rows = case.probed(name, USUAL, 0)
        miss = [
            abs(r["loss_change"] - r["loss_change_predicted"]) / abs(r["loss_change_predicted"])
            for r in rows
        ]
        where = f"probes.csv: {name}, {USUAL:g}, step 0"
        own = case.mean(f"first miss {name}", miss, where)
        told.append(f"loss change off its first-order value by {_around(own)} of it in {name}")
    measured = "first update: " + "; ".join(told)
    if n < 2:
        return OPEN, measured, n
    if ratios["sigma"].low > 1:
        return SUPPORTED, measured, n
    if ratios["x_L"].low > 1:
        return f"{ONLY_IF}what moves is the output, not the denominators", measured, n
    return NOT, measured, n


def c8(case: Case) -> Ruling:
    """Against: pre-norm bears no more than post-norm; or bears it also with a damped skip path."""
    depths = {row["layers"] for row in case.ramp}
    layers = 48 if 48 in depths else max(depths, default=0)
    rates: dict[str, list[float | None]] = {
        name: [r["max_stable_lr"] for r in case.ramp
               if r["placement"] == name and r["layers"] == layers]
        for name in ("pre", "post")
    }  # fmt: skip
    where = f"max_lr.csv: {layers} blocks"
    pre = case.mean("ramp pre", rates["pre"], where)
    never = rates["post"].count(None)
    case.note("ramp post never", f"{never} of {len(rates['post'])}", float(never), source=where)
    damped, whole = (case.of(name, USUAL) for name in ("pre, skip x 1/sqrt(2)", "pre"))
    told = f"ramp at {layers} blocks: pre-norm to {_around(pre)}, post-norm trains at no rate in "
    told += (
        f"{never} of {len(rates['post'])}; at {USUAL:g} pre-norm {_words(whole)}, with its skip "
    )
    told += f"path damped by 1/sqrt(2) a sublayer {_words(damped)}"
    if not damped or not rates["pre"] or not rates["post"] or not _all_train(whole):
        return OPEN, told, len(damped)
    case.count("damped trains", damped, TRAINS, f"runs.csv: pre, skip x 1/sqrt(2), {USUAL:g}")
    # a rate of None: it trained at none
    if max(r or 0.0 for r in rates["post"]) >= min(r or 0.0 for r in rates["pre"]):
        return NOT, told, len(damped)
    if _all_train(damped):
        return f"{ONLY_IF}the identity path is left out as the cause", told, len(damped)
    failed = all(row["outcome"] in FAILS for row in damped)
    return (SUPPORTED if failed else OPEN), told, len(damped)


def c9(case: Case) -> Ruling:
    """Against: post-norm still fails under the 2017 schedule. Its own rate, and peaks of others."""
    cells = {
        (row["recipe"], row["lr"]): case.of(row["recipe"], row["lr"])
        for row in case.runs
        if row["recipe"].startswith(("post+2017", "post+inverse-sqrt"))
    }
    return _any_of(case, cells)


def c10(case: Case) -> Ruling:
    """Against: post-norm fails at every length. Where it trains without warmup none is needed: such
    a cell counts neither way."""
    cells = {}
    for row in case.runs:
        plain = row["recipe"].partition("+warmup")[0]
        bare = case.of(plain, row["lr"])
        warms = row["recipe"].startswith(("post+warmup", "post, half gain+warmup"))
        if warms and bare and not _all_train(bare):
            cells[row["recipe"], row["lr"]] = case.of(row["recipe"], row["lr"])
    return _any_of(case, cells)


def c11(case: Case) -> Ruling:
    """Against: failure only moves later. One step of the grid is a factor 3.2, within 2 to 4."""
    opened, told, n = [], [], 0
    for recipe in ("post", "post+warmup"):
        rates = case.rates(recipe)
        for lower, higher in pairwise(rates):
            below, above = case.of(recipe, lower), case.of(recipe, higher)
            n = max(n, len(below))
            if _all_train(below) and not _all_train(above):
                opened.append(f"the rate falls from {higher:g} to {lower:g} ({recipe})")
        steps = [
            np.median([r["at_step"] for r in case.of(recipe, lr) if r["outcome"] in FAILS])
            for lr in rates
            if any(r["outcome"] in FAILS for r in case.of(recipe, lr))
        ]
        if len(steps) > 1:
            told.append(
                f"{recipe}: fails from step {steps[0]:.0f} at the lowest rate that fails, from "
                f"{steps[-1]:.0f} at the highest"
            )
        told.append(
            f"{recipe}: " + "; ".join(f"{lr:g} {_words(case.of(recipe, lr))}" for lr in rates)
        )
    if not n:
        return OPEN, "not run", 0
    measured = "; ".join(told)
    return (ONLY_IF + " or ".join(opened) if opened else NOT), measured, n


def c12(case: Case) -> Ruling:
    """Against: even gradients at step 0 and still no training."""
    return _fix(case, "post+1/sqrt(2L)")


def c13(case: Case) -> Ruling:
    """Against: it fails, or needs warmup too."""
    return _fix(case, "deepnet")


def c14(case: Case) -> Ruling:
    """Against: far from the identity. Close: cosine above 0.95 in every block, and the Jacobian
    within a third of the norm's projector. J = P J for a norm of gain 1, so that
    |J - 1|^2 = |J - P|^2 + |1 - P|^2, the last of two channels in D."""
    told, holds, n = [], [], 0
    fixes = ("post+1/sqrt(2L)", "deepnet")
    for recipe in ("post", *fixes):
        rows, runs = case.probed(recipe, USUAL, 0), case.of(recipe, USUAL)
        if not rows or not runs:
            return OPEN, "not run", 0
        width = runs[0]["width"]
        away = [(r["minus_identity"] ** 2 - 2 / width) / (1 - 2 / width) for r in rows]
        where = f"probes.csv: {recipe}, {USUAL:g}, step 0"
        turned = case.mean(f"block turn {recipe}", [1 - r["cosine_to_next"] for r in rows], where)
        distance = case.root(f"block distance {recipe}", away, where)
        whole = case.mean(f"stack turn {recipe}", [1 - r["cosine_to_start"] for r in rows], where)
        told.append(
            f"{recipe}: 1 - cosine over a block at most {_around(turned)}, over the stack "
            f"{_around(whole)}; distance to the projector {_around(distance)}"
        )
        if recipe in fixes:
            least = min(r["cosine_to_next"] for r in rows)
            holds.append(least > CLOSE["cosine"] and distance.value < CLOSE["distance"])
        n = len(rows)
    if all(holds):
        return SUPPORTED, "; ".join(told), n
    one = "1/sqrt(2L)" if holds[0] else "DeepNet"
    return (f"{ONLY_IF}it is {one}" if any(holds) else NOT), "; ".join(told), n


def c15(case: Case) -> Ruling:
    """Against: its block changes x where its branches are 0. 48 blocks: Radford et al. 2019, table
    2, not measured here."""
    found = {row["check"]: row["value"] for row in case.checks if row["claim"] == "C15"}
    if not found:
        return OPEN, "transformers is not installed", 0
    moved = next(v for name, v in found.items() if name.startswith("GPT-2's block"))
    case.note("gpt two moved", f"{moved:g}", moved, source="checks.csv: C15")
    measured = f"largest change of x by 48 blocks whose branches are 0: {moved:g}"
    return (SUPPORTED if moved == 0 else NOT), measured, 1


def c16(case: Case) -> Ruling:
    """Against: no relation. Rank correlation, along steps 0 to 300, of the logarithms of
    bottom/top and of the mean norm factor, in each seed of post-norm."""
    told, related, n = [], {}, 0
    for lr in sorted({USUAL, case.rate or USUAL}):
        each = []
        for _, rows in frames.by(case.probed("post", lr), "seed"):
            pairs = [
                (r["norm_factor"], r["gradient_ratio"])
                for r in rows
                if r["step"] <= DEATH and r["norm_factor"] and r["gradient_ratio"]
                and math.isfinite(r["gradient_ratio"])
            ]  # fmt: skip
            if len(pairs) > 3:
                each.append(_rank_correlation(pairs))
        if len(each) < 2:
            continue
        z = np.arctanh(np.clip(each, -0.999, 0.999))
        half = float(stats.t.ppf(0.975, len(z) - 1) * np.std(z, ddof=1) / math.sqrt(len(z)))
        value, low, high = (float(np.tanh(np.mean(z) + d)) for d in (0, -half, half))
        where = f"probes.csv: post, {lr:g}, steps 0 to {DEATH}"
        own = case.note(
            f"factor correlation {lr:g}", f"{value:.2f}", value, low, high, len(z), where
        )
        told.append(f"at {lr:g} rank correlation {_around(own)}")
        related[f"{lr:g}"] = abs(value) >= 0.5 and low * high > 0
        n = len(z)
    if not told:
        return OPEN, "not run for two seeds", n
    there = [lr for lr, holds in related.items() if holds]
    verdict = SUPPORTED if len(there) == len(related) else NOT
    if 0 < len(there) < len(related):
        verdict = f"{ONLY_IF}the learning rate is {' or '.join(there)}"
    return verdict, "; ".join(told), n


# what could lead the collapse: (column, what it is, is a large value the bad one)
LEADERS: tuple[tuple[str, str, bool], ...] = (
    ("gradient_ratio", "bottom/top gradient, either way", True),
    ("jacobian_bottom", "Jacobian of the whole stack, either way", True),
    ("skip_gain", "skip-path gain", False),
    ("similarity", "token similarity", True),
    ("query_share", "gradient of queries and keys", False),
    ("norm_factor", "norm factors, either way", True),
    ("sigma_update_mean", "change of sigma by an update", True),
    ("function_update", "change of x_L by an update", True),
    ("update_ratio", "update over weights", True),
    ("edge_ratio", "sharpness times learning rate", True),
)
EITHER_WAY = ("gradient_ratio", "jacobian_bottom", "norm_factor")


def m1(case: Case) -> Ruling:
    """Against: no quantity tells early which runs will fail.

    Over all runs of the Adam arms at 1e-3, fixes and ablations: the probability that a quantity
    orders a run that fails and one that trains as expected (area under the ROC curve), at each
    probed step. A quantity leads from the first step from which on, up to the median step of
    failure, that probability is at least 0.9; by so many updates. 95% interval: bootstrap over
    recipes. The verdict is the first to lead; a tie is told as one."""
    table = leads(case)
    if not table:
        return OPEN, "no runs that fail beside runs that train", 0
    widest = max(table, key=lambda row: row["runs"])  # curvature is followed in a few runs alone
    n, failure = widest["runs"], widest["failure"]
    where = "probes.csv and runs.csv: 1e-3, Adam, no warmup"
    case.tally("told apart", n, where)
    case.tally("failed of these", widest["failed"], where)
    case.tally("failure step", failure, where)
    by_sgd = [row for row in case.runs if row["optimizer"] == "sgd"]
    for recipe, rows in frames.by(by_sgd, "recipe"):
        case.count(f"SGD: {recipe}", rows, TRAINS, f"runs.csv: {recipe}")
    for recipe, rows in frames.by(pooled(case.runs), "recipe"):
        case.count(f"alone: {recipe}", rows, TRAINS, f"runs.csv: {recipe}")
        starts = case.probed(recipe, USUAL, 0)
        for column in ("skip_gain", "similarity", "query_share", "gradient_ratio"):
            where = f"probes.csv: {recipe}, {USUAL:g}, step 0"
            case.mean(f"{column} of {recipe}", [row[column] for row in starts], where)
    for row in table:
        case.note(
            f"tells {row['quantity']}", f"{row['at_start']:.2f}", row["at_start"], row["low"],
            row["high"], row["runs"], "leads.csv: step 0",
        )  # fmt: skip
        case.tally(f"runs of {row['quantity']}", row["runs"], "leads.csv")
        for pair in row["areas"].split():
            step, own = pair.split(":")
            name = f"tells {row['quantity']} step {step}"
            case.note(name, f"{float(own):.2f}", float(own), n=row["runs"], source="leads.csv")
        if row["leads_from"] is not None:
            case.tally(f"lead {row['quantity']}", row["lead"], "leads.csv", n=row["runs"])
    leading = [row for row in table if row["leads_from"] is not None]
    told = "; ".join(
        f"{row['what']}: {row['at_start']:.2f} at step 0"
        + (f" ({row['runs']} runs)" if row["runs"] < n else "")
        + (f", from step {row['leads_from']} on" if row["leads_from"] is not None else ", no lead")
        for row in table
    )
    measured = f"probability of telling {n} runs apart: {told}"
    if not leading:
        return NOT, measured, n
    first = min(row["leads_from"] for row in leading)
    names = [row["what"] for row in leading if row["leads_from"] == first]
    by = f"by {failure - first:.0f} updates"
    if len(names) == 1:
        return f"{names[0]} leads, {by}", measured, n
    return f"no single one: {', '.join(names)} lead together, {by}", measured, n


def pooled(runs: Table) -> Table:
    """The runs of M1: at 1e-3 by Adam without warmup, whole ones."""
    longest = max((row["steps"] for row in runs if row["recipe"] in RECIPES), default=0)
    return [
        row
        for row in runs
        if _same(row["lr"], USUAL) and row["optimizer"] == "adam" and not row["warmup"]
        and row["schedule"] == "constant" and row["steps"] == longest
    ]  # fmt: skip


def leads(case: Case) -> Table:
    """For each of LEADERS how well it tells runs apart, and from which probed step on."""
    word = {(r["recipe"], r["seed"]): r for r in pooled(case.runs)}
    failed = {key for key, r in word.items() if r["outcome"] in FAILS}
    fine = {key for key, r in word.items() if r["outcome"] in TRAINS}
    if not failed or not fine:
        return []
    failure = float(np.median([word[key]["at_step"] for key in failed]))
    found = []
    for column, what, large in LEADERS:
        at: dict[int, dict[tuple[str, int], float]] = {}
        for r in case.probes:
            key = (r["recipe"], r["seed"])
            if _same(r["lr"], USUAL) and key in failed | fine and r.get(column) is not None:
                at.setdefault(r["step"], {})[key] = _badness(column, r[column], large)
        areas: dict[int, float] = {}
        for step, values in sorted(at.items()):
            bad, good = ([values[k] for k in keys if k in values] for keys in (failed, fine))
            if bad and good and step <= failure:
                areas[step] = area(bad, good)
        if not areas:
            continue
        below = [step for step, own in areas.items() if own < TELLS]
        after = [step for step in areas if not below or step > max(below)]
        start = min(areas)
        low, high = _bootstrap(at[start], failed, fine)
        probed = {key for values in at.values() for key in values}
        found.append(
            {
                "quantity": column, "what": what, "runs": len(probed),
                "failed": len(probed & failed), "failure": failure, "at_start": areas[start],
                "low": low, "high": high, "leads_from": min(after, default=None),
                "lead": failure - min(after) if after else None,
                "areas": " ".join(f"{step}:{own:.3f}" for step, own in areas.items()),
            }
        )  # fmt: skip
    return found


def area(bad: Sequence[float], good: Sequence[float]) -> float:
    """P(bad > good) + P(equal) / 2: the area under the ROC curve, Mann & Whitney 1947."""
    a, b = np.array(bad, float)[:, None], np.array(good, float)[None, :]
    return float(np.mean((a > b) + 0.5 * (a == b)))


def _badness(column: str, value: float, large: bool) -> float:
    if not math.isfinite(value):
        return math.inf
    if column in EITHER_WAY:
        return abs(math.log(value)) if value > 0 else math.inf
    return value if large else -value


def _bootstrap(values: dict, failed: set, fine: set, times: int = 2000) -> tuple[float, float]:
    """95% of the area when recipes are drawn anew, with replacement."""
    rng = np.random.default_rng(0)
    recipes = sorted({recipe for recipe, _ in values})
    own = {r: [k for k in values if k[0] == r] for r in recipes}
    areas = []
    for _ in range(times):
        keys = [k for i in rng.integers(len(recipes), size=len(recipes)) for k in own[recipes[i]]]
        bad, good = ([values[k] for k in keys if k in group] for group in (failed, fine))
        if bad and good:
            areas.append(area(bad, good))
    low, high = np.quantile(areas, (0.025, 0.975)) if areas else (0.0, 1.0)
    return float(low), float(high)


CLAIMS: dict[str, tuple[str, Callable[[Case], Ruling], str]] = {
    "C1": ("pre-norm and post-norm differ at one line", c1, "exact"),
    "C2": ("pre-norm: gradients reach every layer without depth-dependent amplification", c2, "step 0"),
    "C3": ("the gradient through post-norm's norm depends on the activation scale there", c3, "exact"),
    "C4": ("across 48 layers the bottom gradient is too big or too small at initialization", c4, "step 0"),
    "C5": ("with Xavier or Kaiming init every norm rescales the identity path", c5, "step 0"),
    "C6": ("without warmup the loss diverges within the first 300 steps", c6, "48 blocks, pre-norm's largest rate"),
    "C7": ("the first step lands where norm denominators differ from what the rest expects", c7, "1e-3, first update"),
    "C8": ("pre-norm tolerates the same schedule because of its identity path", c8, "ramp; 1e-3"),
    "C9": ("the 2017 schedule prevents it", c9, "own rate and equal peaks"),
    "C10": ("linear warmup over 4000 to 10000 steps prevents it", c10, "warmup as a share of the run"),
    "C11": ("a 2 to 4 times lower peak rate adds margin", c11, "the grid, with and without warmup"),
    "C12": ("1/sqrt(2L) on the output projections prevents it", c12, "the grid, with and without warmup"),
    "C13": ("DeepNet prevents it", c13, "the grid, with and without warmup"),
    "C14": ("with either each block starts close to the identity", c14, "step 0"),
    "C15": ("GPT-2's 48-layer model is pre-norm", c15, "its port's block, exact"),
    "C16": ("the bottom gradient is sensitive to activation magnitudes early in training", c16, "steps 0 to 300"),
    "M1": ("which quantity leads the collapse, and by how many steps", m1, "1e-3, no warmup, Adam"),
}  # fmt: skip


def of(tables: dict[str, Any]) -> tuple[list[Verdict], list[Number], Table]:
    """(a verdict a claim, every number that the rules looked at, the table of M1)."""
    verdicts, numbers = [], _of_all(Case("all", **tables))
    for name, (says, rule, conditions) in CLAIMS.items():
        case = Case(name, **tables)
        verdict, measured, n = rule(case)
        verdicts.append(Verdict(name, says, verdict, measured, n, conditions))
        numbers += case.numbers
    return verdicts, numbers, leads(Case("M1", **tables))


def _of_all(case: Case) -> list[Number]:
    """What the whole study took."""
    trained = [row for row in case.runs if row["steps"] > 1]
    minutes = sum(row["minutes"] for row in case.runs)
    where = "runs.csv"
    case.tally("runs", len(trained), where)
    case.tally("starts", len(case.runs) - len(trained), where)
    case.note("hours", f"{minutes / 60:.1f}", minutes / 60, source=where)
    for name in ("seed", "recipe"):
        case.tally(f"{name}s", len({row[name] for row in trained}), where)
    seeds = len({row["seed"] for row in trained})
    if seeds:  # what k = n tells of a rate, Clopper & Pearson
        least = 0.025 ** (1 / seeds)
        case.note("least rate of all", f"{least:.2f}", least, n=seeds, source=where)
    case.tally("claims", sum(name.startswith("C") for name in CLAIMS), "ledger.py")
    if case.runs:
        case.note("H1", f"{case.runs[0]['h1']:.2f}", case.runs[0]["h1"], source=where)
    return case.numbers


def write(folder: Path, ramp: Path) -> list[dict[str, Any]]:
    """FOLDER/claims.csv, numbers.csv and leads.csv from the tables there and max_lr.csv (ramp); the
    verdicts. Raises UserError for a table that is missing."""
    tables = {name: evidence.read(folder, name) for name in ("runs", "probes", "checks")}
    tables["ramp"] = evidence.read(ramp.parent, ramp.stem)
    verdicts, numbers, leading = of(tables)
    claims = [verdict._asdict() for verdict in verdicts]
    told = [number._asdict() for number in numbers]
    evidence.write(folder, {"claims": claims, "numbers": told, "leads": leading})
    return claims


# ------------------------------------------------------------------------------------- pieces


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3)


def _all_train(rows: Table) -> bool:
    return bool(rows) and all(row["outcome"] in TRAINS for row in rows)


def _words(rows: Table) -> str:
    """'4 trained, 1 stalled'."""
    words = [row["outcome"] for row in rows]
    return ", ".join(f"{words.count(w)} {w}" for w in dict.fromkeys(words)) or "not run"


def _text(value: float) -> str:
    if 0.95 < value < 1.05:  # how far from 1 is what one wants to see
        return f"{value:.3f}"
    return f"{value:.2g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.1e}"


def _around(number: Number) -> str:
    if math.isnan(number.low):
        return number.text
    return f"{number.text} [{_text(number.low) if number.low >= 0 else f'{number.low:.2g}'}, " + (
        f"{_text(number.high) if number.high >= 0 else f'{number.high:.2g}'}]"
    )


def _over_depth(case: Case, placement: str, column: str) -> tuple[list[float], list[int]]:
    """The column at step 0 of all seeds and depths, and the depths."""
    values, depths = [], []
    for row in case.probes:
        if row["recipe"].startswith(f"start: {placement}, ") and row["recipe"].endswith(" blocks"):
            values.append(row[column])
            depths.append(int(row["recipe"].split()[-2]))
    return values, depths


def _slope(case: Case, name: str, values: Sequence[float], depths: Sequence[int]) -> Number:
    """Exponent of L, and its interval over all runs."""
    fit: Any = stats.linregress(np.log(depths), np.log(values))
    n = len(values)
    half = float(stats.t.ppf(0.975, n - 2) * fit.stderr)
    value, where = float(fit.slope), "probes.csv: start, all depths"
    return case.note(name, f"{value:.2f}", value, value - half, value + half, n, where)


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    a, b = (np.array(own) for own in zip(*pairs, strict=True))
    found: Any = stats.spearmanr(a, b)
    return float(found.statistic)


def _residual(x: np.ndarray, y: np.ndarray) -> float:
    """Root mean square distance from the best line."""
    fit = np.polyval(np.polyfit(x, y, 1), x)
    return float(np.sqrt(np.mean((y - fit) ** 2)))


def _paired(
    case: Case, column: str, a: str, b: str, lr: float, step: int
) -> list[tuple[float, float]]:
    """(of a, of b) for every seed that has both."""
    first, second = ({r["seed"]: r[column] for r in case.probed(name, lr, step)} for name in (a, b))
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def _any_of(case: Case, cells: dict[tuple[str, float], Table]) -> Ruling:
    """Supported where all seeds train in every cell; else where, or nowhere."""
    if not cells:
        return OPEN, "not run", 0
    works: dict[str, list[float]] = {}
    told: dict[str, list[str]] = {}
    for (recipe, lr), rows in sorted(cells.items()):
        name = f"{case.claim} {recipe} {lr:g}"
        case.count(name, rows, TRAINS, f"runs.csv: {recipe}, {lr:g}")
        told.setdefault(recipe, []).append(f"{lr:g} {_words(rows)}")
        if _all_train(rows):
            works.setdefault(recipe, []).append(lr)
    n = max(len(rows) for rows in cells.values())
    measured = "; ".join(f"{recipe}: {'; '.join(own)}" for recipe, own in told.items())
    if sum(map(len, works.values())) == len(cells):
        return SUPPORTED, measured, n
    said = " or ".join(
        f"{recipe} at {', '.join(f'{lr:g}' for lr in rates)}" for recipe, rates in works.items()
    )
    return (f"{ONLY_IF}the recipe is {said}" if works else NOT), measured, n


def _fix(case: Case, recipe: str) -> Ruling:
    """Supported where it trains at pre-norm's largest rate without warmup, in all seeds."""
    told, works, n = [], [], 0
    for name in (recipe, f"{recipe}+warmup"):
        rates = case.rates(name)
        for lr in rates:
            case.count(f"{name} {lr:g}", case.of(name, lr), TRAINS, f"runs.csv: {name}, {lr:g}")
        good = [lr for lr in rates if _all_train(case.of(name, lr))]
        n = max([n, *(len(case.of(name, lr)) for lr in rates)])
        told.append(f"{name}: " + "; ".join(f"{lr:g} {_words(case.of(name, lr))}" for lr in rates))
        if good:
            with_warmup = " with warmup" if name != recipe else ""
            case.note(f"{name} largest", f"{max(good):g}", max(good), source=f"runs.csv: {name}")
            works.append((max(good), with_warmup))
    measured = "; ".join(told)
    if not n or case.rate is None:
        return OPEN, measured, n
    plain = [lr for lr, warmup in works if not warmup]
    if plain and max(plain) >= case.rate:
        return SUPPORTED, measured, n
    if works:
        limits = " or ".join(f"{lr:g}{warmup}" for lr, warmup in works)
        return (
            f"{ONLY_IF}the rate is at most {limits} (pre-norm's largest: {case.rate:g})",
            measured,
            n,
        )
    return NOT, measured, n
