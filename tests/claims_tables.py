"""Tables of evidence made by hand, with the columns that evidence.of gives them. No training."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normstudy import config, evidence, frames, ledger

ROOT = Path(__file__).resolve().parents[1]
RAMP = ROOT / "experiments" / "results" / "max_lr.csv"
USUAL = ledger.USUAL
RATES = (3.2e-4, 1e-3, 3.2e-3, 0.01, 0.032, 0.1, 0.32)
SEEDS = (0, 1, 2)
DENSE = (0, 1, 2, 3, 5, 10, 20, 30, 50, 100)  # where a run looked at closely is probed
H1 = 3.0
BASE = config.PRESETS["cpu"]
JITTER = (0.98, 1.0, 1.02)  # of a quantity, by seed: an interval that is narrow and not empty

# one plain value for each scalar: no rule sees anything in it
PLAIN = dict.fromkeys(evidence.SCALARS, 1.0) | {"similarity": 0.5, "edge_ratio": None}


def run(
    recipe: str,
    lr: float = USUAL,
    seed: int = 0,
    word: str = "trained",
    at_step: int = 60,
    **fields: Any,
) -> dict[str, Any]:
    """A row of runs.csv."""
    own = {
        "recipe": recipe, "lr": lr, "seed": seed, "placement": recipe, "layers": 48, "width": 32,
        "optimizer": "adam", "schedule": "constant", "warmup": 0, "steps": 400, "outcome": word,
        "at_step": at_step, "best_loss": 2.5, "last_loss": 2.6, "h1": H1, "minutes": 0.25,
    }  # fmt: skip
    assert fields.keys() <= own.keys()
    return own | fields


def runs(recipe: str, lr: float = USUAL, words: str = "trained", **fields: Any) -> frames.Table:
    """Rows of runs.csv: a seed for each word; one word is that of all SEEDS."""
    said = words.split()
    said = said * len(SEEDS) if len(said) == 1 else said
    return [run(recipe, lr, seed, word, **fields) for seed, word in enumerate(said)]


def probe(
    recipe: str, lr: float = USUAL, seed: int = 0, step: int = 0, **scalars: Any
) -> dict[str, Any]:
    """A row of probes.csv."""
    assert scalars.keys() <= PLAIN.keys()
    return {"recipe": recipe, "lr": lr, "seed": seed, "step": step} | PLAIN | scalars


def probes(
    recipe: str,
    lr: float = USUAL,
    seeds: Sequence[int] = SEEDS,
    steps: Sequence[int] = (0,),
    **scalars: float,
) -> frames.Table:
    """Rows of probes.csv: at every seed the scalars times its JITTER."""
    return [
        probe(recipe, lr, seed, step, **{name: v * JITTER[seed] for name, v in scalars.items()})
        for seed, step in itertools.product(seeds, steps)
    ]


def check(claim: str, name: str, value: float, says: str | None = None) -> dict[str, Any]:
    """A row of checks.csv."""
    return {"claim": claim, "check": name, "seed": None, "value": value, "says": says}


def one_line(wiring: int = 0, other: int = 0, final: int = 1, lines: int = 1) -> frames.Table:
    """What C1 looks at; as the models of the package have it where nothing is said."""
    return [
        check("C1", "wiring findings, pre", wiring),
        check("C1", "wiring findings, post", 0),
        check("C1", "parameters that differ, norms aside", other),
        check("C1", "a final norm beside pre-norm alone", final),
        check("C1", "equations that differ", lines, "x + f(N(x)) | N(x + f(x))"),
    ]


def identity(*off: float) -> frames.Table:
    """What C3 looks at."""
    name = "relative distance of the norm's singular values from 1/sigma"
    return [check("C3", name, value) | {"seed": seed} for seed, value in enumerate(off)]


def gpt2(moved: float = 0.0) -> frames.Table:
    """What C15 looks at."""
    return [
        check("C15", "GPT-2's block moves x where its branches are 0, largest of 48", moved),
        check("C15", "a norm before GPT-2's readout", 1.0),
    ]


def ramp(placement: str, *rates: float | None, layers: int = 48) -> frames.Table:
    """Rows of max_lr.csv, a seed for each rate."""
    return [
        {"placement": placement, "layers": layers, "seed": seed, "max_stable_lr": rate}
        for seed, rate in enumerate(rates)
    ]


# ------------------------------------------------------------------------------ a whole study


def whole(arms: dict[str, Any], seeds: Sequence[int] = (0, 1)) -> dict[str, frames.Table]:
    """All tables that experiments/claims.py keeps, of these arms of its: {name: rows}.

    Nothing was trained: post-norm fails without warmup, everything trains with it, and above 0.1
    nothing does.
    """
    found: dict[str, frames.Table] = {name: [] for name in ("runs", "probes", "layers", "curves")}
    for (name, arm), seed in itertools.product(arms.items(), seeds):
        own = config.override(BASE, **arm(BASE), seed=seed)
        recipe, lr = name.rpartition(" lr ")[0], own.optim.lr
        word = "undecided" if own.steps == 1 else _word(recipe, own)
        flat = config.fields_of(own)
        fields = ("placement", "layers", "width", "optimizer", "schedule", "warmup", "steps")
        loss = {"trained": 2.5, "stalled": H1, "diverged": 9.0}.get(word, 5.5)
        found["runs"].append(
            run(recipe, lr, seed, word, 55 + seed, last_loss=loss, **{n: flat[n] for n in fields})
        )
        once = own.probe.probe_once or own.steps == 1
        found["probes"] += [
            probe(recipe, lr, seed, step, **_scalars(own, word, step))
            for step in ((0,) if once else DENSE)
        ]
        key = {"recipe": recipe, "lr": lr, "seed": seed}
        if recipe in ledger.RECIPES and not once:
            found["curves"] += [
                key | {"step": step, "loss": 2.5 + math.exp(-step / 50)} for step in (0, 200, 399)
            ]
            if math.isclose(lr, USUAL) and not own.optim.warmup:
                found["layers"] += [
                    key | {"step": step, "layer": layer} | _by_layer(layer, seed)
                    for step, layer in itertools.product((0, 50), range(12))
                ]
    found["checks"] = one_line() + identity(1e-14, 2e-14) + gpt2()
    said = {"preset": "cpu", "command": "python experiments/claims.py --preset cpu", "seeds": "2",
            "code": "abc_def, & more", "weight_decay": "0.1"}  # fmt: skip
    found["study"] = [{"what": what, "value": value} for what, value in said.items()]
    return found


def _word(recipe: str, own: config.Run) -> str:
    if own.optim.lr > 0.1:
        return "diverged"
    calm = own.model.placement in ("pre", "pre-damped", "deepnorm") or own.optim.warmup
    return "trained" if calm or "half gain" in recipe else "stalled"


def _scalars(own: config.Run, word: str, step: int) -> dict[str, float]:
    """Numbers that depend on the run, each in its own way."""
    wobble = 1 + 0.02 * own.seed + 0.001 * step
    failing = word == "stalled"
    return {
        "gradient_ratio": own.model.layers**0.3 * wobble,
        "top_gradient": own.model.layers**-0.5 * wobble,
        "jacobian_bottom": (1e3 if failing else 2.0) * wobble,
        "similarity": min((0.9 if failing else 0.3) + 1e-3 * step, 1.0),
        "query_share": 0.01 / wobble if failing and step > 5 else 0.1 * wobble,
        "norm_factor": 0.7 / wobble,
        "branch_share": 0.9 * wobble,
        "sigma_update_mean": (0.3 if own.model.placement == "post" else 0.03) * wobble,
        "function_update": (1.2 if own.model.placement == "post" else 0.2) * wobble,
        "loss_change": -0.1 * wobble,
        "loss_change_predicted": -0.2,
        "cosine_to_next": 0.97 / wobble,
        "minus_identity": 0.3 * wobble,
    }


def _by_layer(layer: int, seed: int) -> dict[str, float]:
    plain = dict.fromkeys(evidence.LAYERS, (1 + layer) * (1 + 0.05 * seed))
    return plain | {"similarity": layer / 12, "jacobian_to_end_se": 0.1}


def write(folder: Path, tables: dict[str, frames.Table]) -> None:
    """The folder as experiments/claims.py leaves it: the tables, then the ledger of them."""
    evidence.write(folder, tables)
    ledger.write(folder, RAMP)
