"""What can be known before any training: each audit reads a config and says what it finds."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from normstudy import config, data, inits, meanfield, mesh, placements, programs, schedules, wiring
from normstudy.diagnose.verdicts import Finding

LARGE = 2.0  # times the std of its rule: a branch matrix that is larger is suspected
SURE = 1.0  # nats above ln V at step 0: the model is sure of what it cannot know
VANISHED = 0.05  # skip-path gain below which the skip path carries nothing to the bottom
DUPLICATES = 0.05  # share of the text that comes again
STRETCH, SAMPLE = 64, 16  # tokens of a stretch; one in so many stands for all
LARGEST = 1e8  # parameters of a model that is made: 400 MB
POSITIONS, SEQUENCES = 32, 2  # that the mean field follows


def schedule(run: config.Run) -> list[Finding]:
    """The rate at each update that matters."""
    rates = schedules.table(run.optim, run.model.width, run.steps)
    asked = sorted(
        {u for u in (1, 2, 3, 10, 100, run.optim.warmup, run.steps) if 1 <= u <= len(rates)}
    )
    values = ", ".join(f"{u}: {rates[u - 1]:.3g}" for u in asked)
    found = [Finding("note", f"learning rate by update ({run.optim.schedule}): {values}")]
    peak = int(np.argmax(rates)) + 1
    if run.optim.schedule == "inverse_sqrt_2017" and not 0.5 < rates.max() / run.optim.lr < 2:
        says = (
            f"the 2017 schedule peaks at {rates.max():.3g}, whatever --lr {run.optim.lr:g} says: "
            "its peak is schedule_scale / sqrt(width * warmup)"
        )
        found.append(Finding("schedule", says, (values,), "measured"))
    falls = run.optim.schedule.startswith("inverse_sqrt") and run.optim.warmup <= 1
    if falls and len(rates) >= 100:
        says = (
            f"the rate is largest at update 1 and falls as a root from there: by update 100 it is "
            f"{rates[99] / rates[0]:.0%} of the peak; a linear or constant schedule is another one"
        )
        found.append(Finding("schedule", says, (values,), "possible"))
    elif peak == run.steps and run.optim.warmup >= run.steps > 1:
        found.append(Finding("schedule", "the run ends before its warmup is over", (values,)))
    return found


def init(run: config.Run) -> list[Finding]:
    """Standard deviations against the rule of the row, role by role."""
    usual = dataclasses.replace(run, init=config.Init())
    ours, theirs = (
        inits.gains_over_xavier(run.model, programs.standard_deviations(own))
        for own in (run, usual)
    )
    ratio = {name: _middle(ours[name]) / _middle(theirs[name]) for name in ours}
    large = {name: own for name, own in ratio.items() if own > LARGE}
    small = {name: own for name, own in ratio.items() if own < 1 / LARGE}
    told = inits.describe(run.model, programs.standard_deviations(run))
    found = []
    if large:
        worst = max(large, key=lambda name: large[name])
        says = (
            f"{', '.join(large)} start {large[worst]:.1f} times as large as Xavier with the "
            f"placement's own factors would make them"
        )
        advice = "--init xavier --gain 1, or a std that falls with the width: sqrt(2 / (5 D))"
        found.append(
            Finding("init scale", says, (told,), "likely", advice, "chronicles of tr8-104B")
        )
    elif small:
        says = f"{', '.join(small)} start at {min(small.values()):.2f} of Xavier: small, not wrong"
        found.append(Finding("note", says, (told,)))
    return found


def first_loss(run: config.Run) -> list[Finding]:
    """The loss at step 0 against ln V, of the real model on the real text."""
    compiled, devices = programs.of(run)
    batch = mesh.put_batch(devices, data.feed(run).held_out[0])
    loss = float(compiled.loss(_start(run).model, batch))
    uniform = math.log(run.model.vocab)
    if not math.isfinite(loss):
        return [Finding("precision", f"the loss is {loss} at step 0, before any update")]
    if loss < uniform + SURE:
        return [Finding("note", f"loss at step 0: {loss:.2f} nats; ln V = {uniform:.2f}")]
    says = f"the loss at step 0 is {loss:.2f} nats, and ln V = {uniform:.2f}: logits are too large"
    if placements.row(run.model.placement).norms_branches_alone(run.model):
        return [Finding("structure", f"{says}, for nothing norms the stream before the readout")]
    advice = "a readout with std D^-0.5 (--embed-std for a tied one; default: width^-0.5)"
    return [Finding("logit scale", says, (), "measured", advice)]


def structure(run: config.Run) -> list[Finding]:
    """What the row lacks, and sizes that are not the usual ones."""
    place, found = placements.row(run.model.placement), []
    if place.norms_branches_alone(run.model):
        says = (
            f"{run.model.placement} norms its branches and nothing norms the stream: no final norm "
            f"stands before the readout, where the stream has grown with the depth"
        )
        advice = "--final-norm True: a norm between the last block and the readout"
        found.append(Finding("structure", says, (place.text,), "measured", advice))
    if run.model.ff != 4 * run.model.width:
        says = f"ff is {run.model.ff}, not 4 x width {run.model.width}"
        found.append(Finding("note", says))
    if run.model.width // run.model.heads < 8:
        says = f"{run.model.heads} heads of {run.model.width // run.model.heads}: small ones"
        found.append(Finding("note", says))
    return found


def wired(run: config.Run) -> list[Finding]:
    """What the blocks really compute, by the wiring check."""
    report = wiring.check_model(_start(run).model, run.model)
    if report.agrees:
        return [Finding("note", report.sentences()[0])]
    text = placements.row(run.model.placement).text
    return [Finding("structure", "; ".join(report.sentences()), (text,))]


def placement(run: config.Run) -> list[Finding]:
    """A skip path through norms, without warmup."""
    place = placements.row(run.model.placement)
    if not place.skip_norms or not meanfield.has_mean_field(place):
        return []
    rates = schedules.table(run.optim, run.model.width, run.steps)
    few = dataclasses.replace(run.model, context=min(run.model.context, POSITIONS))
    tokens = data.feed(run).probe_batch[:SEQUENCES, : few.context + 1]
    seen = meanfield.predict(few, programs.standard_deviations(run), tokens)
    gain = float(seen["skip_gain"][0])
    step = "sgd" if run.optim.optimizer == "sgd" else "sign"
    change = float(seen[f"function_update/{step}"]) * rates[0]
    evidence = (
        f"the skip path crosses {', '.join(place.skip_norms)} in every block: at step 0 it passes "
        f"{gain:.2g} of a gradient at the top to the bottom (mean field)",
        f"update 1 at rate {rates[0]:.3g} changes x_L by {change:.2g} times itself, were the model "
        "linear in it (mean field)",
    )
    early = rates[0] >= 0.5 * rates.max()
    if gain >= VANISHED or not early:
        return [Finding("note", evidence[0], evidence[1:])]
    says = f"{run.model.placement} at {run.model.layers} blocks, and update 1 has the full rate"
    advice = "--warmup, or --depth-scaled, or --placement deepnorm, or --placement pre"
    source = "Xiong et al. 2020 (2002.04745); Wang et al. 2022 (DeepNet, 2203.00555)"
    return [Finding("placement without warmup", says, evidence, "likely", advice, source)]


def optimizer(run: config.Run) -> list[Finding]:
    """Options that do nothing, or not what their name says."""
    o, found = run.optim, []
    if o.optimizer != "adamw" and o.weight_decay != config.Optim().weight_decay:
        says = f"weight_decay {o.weight_decay:g} does nothing: {o.optimizer} has none (adamw has)"
        found.append(Finding("optimizer", says))
    if o.optimizer != "sgd" and o.eps > 1e-6:
        says = f"eps {o.eps:g} is above 1e-6: where gradients are smaller, Adam is gradient descent"
        found.append(Finding("optimizer", says, (), "possible"))
    return found


def text(run: config.Run) -> list[Finding]:
    """How much of the training text comes again."""
    feed = data.feed(run)
    train, _ = feed.text.split(run.data.val_fraction)
    share = copies(train)
    words = f"{share:.1%} of the training text's stretches of {STRETCH} tokens are copies of others"
    if share > DUPLICATES:
        return [Finding("duplicate data", words, (feed.text.name,), "measured")]
    tokens = run.data.batch * run.model.context
    return [Finding("note", f"{words}; H1 = {feed.h1:.2f} nats; {tokens} tokens an update")]


def copies(tokens: np.ndarray) -> float:
    """Share of the stretches of STRETCH tokens, at any offset, that were there before.

    Each has a hash mod 2^64, sum of token * base^offset; those whose hash has SAMPLE as a factor
    stand for all: which they are depends on what they say and not on where they are.
    """
    if len(tokens) < STRETCH:
        return 0.0
    base = np.uint64(0x9E3779B97F4A7C15)  # odd: has an inverse
    inverse = np.uint64(pow(int(base), -1, 2**64))
    powers, back = (
        np.cumprod(np.concatenate([[np.uint64(1)], np.full(len(tokens) - 1, own)]), dtype=np.uint64)
        for own in (base, inverse)
    )
    sums = np.concatenate([[np.uint64(0)], np.cumsum((tokens + np.uint64(1)) * powers)])
    hashes = (sums[STRETCH:] - sums[:-STRETCH]) * back[: len(tokens) - STRETCH + 1]
    hashes ^= hashes >> np.uint64(29)  # the low bits of such a sum hang on the low bits alone
    hashes = hashes[hashes % np.uint64(SAMPLE) == 0]
    return 1 - len(np.unique(hashes)) / len(hashes) if len(hashes) else 0.0


@functools.lru_cache(maxsize=1)
def _start(run: config.Run) -> programs.State:
    """The state at step 0."""
    return programs.initial_state(run, programs.of(run)[0])


def _middle(value: float | np.ndarray) -> float:
    return float(np.median(value))


# {what is looked at: (audit, the fields it needs to be known)}
AUDITS: dict[str, tuple[Callable[[config.Run], list[Finding]], frozenset[str]]] = {
    "schedule": (schedule, frozenset({"lr", "schedule", "warmup", "steps"})),
    "init": (init, frozenset({"placement", "layers", "width", "init"})),
    "loss at step 0": (first_loss, frozenset({"placement", "layers", "width", "vocab", "corpus"})),
    "structure": (structure, frozenset({"placement", "width", "heads"})),
    "wiring": (wired, frozenset({"placement", "layers", "width", "heads"})),
    "placement": (placement, frozenset({"placement", "layers", "lr", "warmup"})),
    "optimizer": (optimizer, frozenset({"optimizer", "lr"})),
    "text": (text, frozenset({"corpus"})),
}


MADE = (first_loss, wired)  # audits that make the model


def findings(run: config.Run, known: frozenset[str]) -> tuple[list[Finding], list[str]]:
    """(what was found, what could not be looked at and why)."""
    found, left = [], []
    for name, (audit, needs) in AUDITS.items():
        if missing := sorted(needs - known):
            left.append(f"{name}: {', '.join(missing)} not known")
        elif audit in MADE and (size := _parameters(run.model)) > LARGEST:
            left.append(f"{name}: {size:.2g} parameters are too many to make here")
        else:
            found += audit(run)
    return found, left


def _parameters(model: config.Model) -> float:
    """How many there are, but for norms and gains."""
    m = model
    return m.layers * (4.0 * m.width**2 + 2 * m.width * m.ff) + (2 * m.vocab + m.context) * m.width
