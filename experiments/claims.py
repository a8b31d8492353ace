"""Is each claim on why a 48-layer model dies after a pre- to post-norm refactor true? The ledger.

Claims C1 to C16, and M1: which quantity leads the collapse. What they need is run here, resumably;
the verdicts are computed from the logs by the rules of normstudy/ledger.py.

Command   python experiments/claims.py --preset cpu --seeds 5
          ... --shard 2/4 --out runs/claims2      a part of it on another machine; put the folders
                                                  arms/* into one --out, then once more without
          ... --parts grid,ablations              a part of the questions
          ... --seed 3 --seeds 2 --add --tables paper/data    two seeds more, to tables of others
Time      on two CPU cores, a seed: 30 minutes without `long` (minutes_of_steps in summary.json, of
          one core), 16 more with it; what is finished is skipped
Expect    paper/data/*.csv (--tables): runs, probes and layers from the logs, checks, and from these
          claims.csv, a verdict a row, and numbers.csv, every number that the paper prints

Learning rates, in factors of sqrt(10): all of RATES, reported whole. Two are looked at closely,
with probes, both by a rule that asks nothing of post-norm: the preset's, the largest that pre-norm
bears (tune_lr.py; the ledger finds it again from the runs here), and 1e-3, Adam's default (Kingma &
Ba 2015). Warmup is the preset's: half of a run of 400 updates on a CPU, 4000 updates on a pod.

Parts
  grid        the refactor and its fixes, with and without warmup, at every rate
  schedules   the 2017 schedule, at its own rate and at the same peak as the others
  warmups     shorter warmups, and smaller branches at init, around 1e-3
  start       one update: depths from 6 to 192, laws of init, sizes of the embedding
  ablations   at 1e-3 without warmup, one change each, to tell the stories of the mechanism apart
  long        warmup of 4000 updates in runs of 5000, as the claim words it
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from normstudy import (
    cli,
    config,
    evidence,
    frames,
    hosts,
    ledger,
    norms,
    paper_figures,
    placements,
    programs,
    record,
    runtime,
    study,
    tables,
    theory,
    wiring,
)
from normstudy.errors import UserError, choose
from normstudy.frames import Table
from normstudy.placements import PLACEMENTS, Placement
from normstudy.progress import say
from normstudy.trees import path_names, to_dict

KIND = "claims"  # of the study folder
RAMP = Path(__file__).parent / "results" / "max_lr.csv"  # of max_lr.py
PARTS = ("grid", "schedules", "warmups", "start", "ablations", "long")
RATES = tuple(float(f"{10 ** (n / 2):.2g}") for n in range(-7, 0))  # 3.2e-4 to 0.32
USUAL = 1e-3  # Adam's default, Kingma & Ba 2015
AROUND = (3.2e-4, 1e-3, 3.2e-3)  # rates of the part `warmups`
DEPTHS = (6, 12, 24, 48, 96, 192)  # blocks
LONG = {"steps": 5000, "warmup": 4000, "probe_once": True, "checkpoint_every": 1000}

Changes = dict[str, Any]

# the refactor, and the fixes that the claims name; warmup is the preset's unless it is 0 here
RECIPES: dict[str, Changes] = {
    "pre": {"placement": "pre", "warmup": 0},
    "post": {"placement": "post", "warmup": 0},
    "post+warmup": {"placement": "post"},
    "post+1/sqrt(2L)": {"placement": "post", "depth_scaled": True, "warmup": 0},
    "post+1/sqrt(2L)+warmup": {"placement": "post", "depth_scaled": True},
    "deepnet": {"placement": "deepnorm", "warmup": 0},
    "deepnet+warmup": {"placement": "deepnorm"},
}
assert tuple(RECIPES) == ledger.RECIPES
FOLLOWED = ("pre", "post", "deepnet")  # with their curvature, at USUAL
INITS: dict[str, Changes] = {
    "xavier": {},
    "kaiming": {"init": "kaiming"},
    "normal 0.02": {"init": "normal", "init_std": 0.02},
    "xavier, 1/sqrt(2L)": {"depth_scaled": True},
}
SMALL = {"embed_std": 0.02, "embed_multiplier": 1.0}  # N(0, 0.02) without the factor sqrt(D)
EMBEDDINGS: dict[str, Changes] = {"unit embedding": {}, "embedding 0.02": SMALL}

# rows that only this experiment has: nobody trains them for their own sake
DAMPED = "pre-damped"


def _scaled(row: str, o: float | None = 1.0, down: float | None = 1.0) -> Placement:
    """A row whose attention (o) or MLP (down) is so much larger at init; None: by 1/sqrt(2L)."""
    factors = {"o": o, "down": down}
    return dataclasses.replace(
        placements.row(row),
        init=lambda layers: {
            name: theory.depth_scale(layers) if own is None else own
            for name, own in factors.items()
        },
        source="ablation",
    )


ROWS = {
    # a skip path that loses what post-norm's does, and no norm on it
    DAMPED: Placement(
        lambda x, f, n, c: c.alpha * x + f(n.pre(x)),
        ("pre",),
        True,
        lambda layers: theory.Constants(alpha=2**-0.5),
        "ablation: pre-norm with the factor 1/sqrt(2) of KEEL (Chen & Wei 2026), equation 14",
    ),
    # the two matrices of 1/sqrt(2L), one at a time: which branch it is that must be small
    "post-small-attention": _scaled("post", o=None),
    "post-small-mlp": _scaled("post", down=None),
    # at step 0 a skip path that passes as little as where runs fail, and positions that stay apart
    "post-small-attention-mlp-2": _scaled("post", o=None, down=2.0),
    "post-small-attention-mlp-3": _scaled("post", o=None, down=3.0),
    # a skip path that passes all, positions more alike than in pre-norm, and uneven gradients
    "pre-attention-10": _scaled("pre", o=10.0),
}


@contextlib.contextmanager
def with_ablations() -> Iterator[None]:
    """The placements table with the rows that only this experiment has."""
    PLACEMENTS.update(ROWS)
    try:
        yield
    finally:
        for name in ROWS:
            del PLACEMENTS[name]


@dataclass(frozen=True)
class Options(cli.Study):
    """What to run, and where to."""

    parts: str = ",".join(name for name in PARTS if name != "long")  # of the questions
    tables: Path | None = None  # folder of the CSV; default: OUT/tables
    add: bool = False  # to the CSV that are there, in place of them
    out: Path = Path("runs/claims")

    @property
    def asked(self) -> list[str]:
        """The parts. Raises UserError for one that there is not."""
        return [choose("part", name.strip(), PARTS) for name in self.parts.split(",")]


def ablations(base: config.Run) -> dict[str, Changes]:
    """One change each, from post-norm without warmup unless the name says another."""
    L, warmup = base.model.layers, base.optim.warmup
    beta = theory.deepnorm_decoder(L).beta
    post = RECIPES["post"]
    return {
        # init gradients: larger at the bottom by the first norm alone, or turned over
        "post, embedding 0.02": post | SMALL,
        "post, ds-init": post | {"placement": "ds-init"},
        # rank collapse and the function update: two matrices, four, all six; alpha and beta apart
        "post, four matrices (2L)^-1/4": post | {"beta": (2 * L) ** -0.25},
        "post, DeepNet's beta alone": post | {"beta": beta},
        "deepnet, its alpha alone": RECIPES["deepnet"] | {"beta": 1 / beta},
        "post, half gain": post | {"gain": base.init.gain / 2},
        # norm-factor drift
        "post, frozen norms": post | {"frozen": "norms"},
        "post+1/sqrt(2L), frozen norms": RECIPES["post+1/sqrt(2L)"] | {"frozen": "norms"},
        # the size of Adam's updates
        "post, b2 0.95": post | {"b2": 0.95},
        "post, b1 0": post | {"b1": 0.0},
        "post, clip 1": post | {"clip": 1.0},
        "post, eps 1e-3": post | {"eps": 1e-3},
        "post, SGD 0.1": post | {"optimizer": "sgd", "lr": 0.1},
        "pre, SGD 0.1": RECIPES["pre"] | {"optimizer": "sgd", "lr": 0.1},
        "post, SGD 1": post | {"optimizer": "sgd", "lr": 1.0},
        "pre, SGD 1": RECIPES["pre"] | {"optimizer": "sgd", "lr": 1.0},
        # pre-norm without its identity path
        "pre, skip x 1/sqrt(2)": RECIPES["pre"] | {"placement": DAMPED},
        "pre, skip x 1/sqrt(2), warmup": {"placement": DAMPED, "warmup": warmup},
        # attention mixes positions, the MLP does not: rank collapse apart from the skip path. Added
        # after the first seed of the others was read, which could not tell the two apart; the last
        # three were chosen by what they do to both at step 0
        "post, o x 1/sqrt(2L)": post | {"placement": "post-small-attention"},
        "post, down x 1/sqrt(2L)": post | {"placement": "post-small-mlp"},
        "post, o x 1/sqrt(2L), down x 2": post | {"placement": "post-small-attention-mlp-2"},
        "post, o x 1/sqrt(2L), down x 3": post | {"placement": "post-small-attention-mlp-3"},
        "pre, o x 10": RECIPES["pre"] | {"placement": "pre-attention-10"},
    }


def arms_of(options: Options, base: config.Run) -> study.Arms:
    """All runs of the parts asked for: {recipe lr RATE: its changes}."""
    whole, eighth, first = base.optim.warmup, max(base.steps // 8, 1), {"probe_once": True}
    found: dict[str, Changes] = {}

    def add(recipe: str, lr: float, changes: Changes) -> None:
        found.setdefault(f"{recipe} lr {lr:g}", {"lr": lr} | changes)

    for part in options.asked:
        if part == "grid":
            for (name, changes), lr in itertools.product(RECIPES.items(), RATES):
                if lr == max(RATES) and name != "pre":
                    continue  # there to see where pre-norm ends; the others end before
                close = lr in (USUAL, base.optim.lr)
                curvature = {"curvature": True} if lr == USUAL and name in FOLLOWED else {}
                add(name, lr, changes | curvature | ({} if close else first))
        if part == "schedules":
            for lr in (USUAL, base.optim.lr):
                add(
                    "post+inverse-sqrt",
                    lr,
                    {"placement": "post", "schedule": "inverse_sqrt"} | first,
                )
            for warmup in (whole, eighth):
                peak = (base.model.width * warmup) ** -0.5
                own = {"schedule": "inverse_sqrt_2017", "warmup": warmup, "placement": "post"}
                add(f"post+2017, warmup {warmup}", float(f"{peak:.2g}"), own | first)
        if part == "warmups":
            half = {"placement": "post", "gain": base.init.gain / 2}
            for lr in AROUND:
                add(f"post+warmup {eighth}", lr, {"placement": "post", "warmup": eighth} | first)
                for warmup in (0, eighth, whole):
                    name = "post, half gain" + (f"+warmup {warmup}" if warmup else "")
                    close = {} if lr == USUAL and not warmup else first
                    add(name, lr, half | {"warmup": warmup} | close)
        if part == "start":
            one = {"steps": 1, "warmup": 0}
            for name, layers in itertools.product(("pre", "post"), DEPTHS):
                add(f"start: {name}, {layers} blocks", USUAL,
                    one | {"placement": name, "layers": layers})  # fmt: skip
            for (law, init), (size, embed) in itertools.product(INITS.items(), EMBEDDINGS.items()):
                add(
                    f"start: post, {law}, {size}", USUAL, one | {"placement": "post"} | init | embed
                )
        if part == "ablations":
            for name, changes in ablations(base).items():
                add(name, changes.get("lr", USUAL), changes)
        if part == "long":
            for lr in (USUAL, base.optim.lr):
                add("post+warmup 4000", lr, {"placement": "post"} | LONG)
            peak = (base.model.width * LONG["warmup"]) ** -0.5
            add("post+2017, warmup 4000", float(f"{peak:.2g}"),
                {"placement": "post", "schedule": "inverse_sqrt_2017"} | LONG)  # fmt: skip
    return {name: _arm(changes) for name, changes in found.items()}


def _arm(changes: Changes):
    return lambda base: changes


# ------------------------------------------------------------------- what needs no training


def checks(base: config.Run, seeds: Iterable[int]) -> Table:
    """What C1, C3 and C15 ask: {claim, check, seed, value, says}."""
    found = list(_one_line(base))
    found += [_norm_jacobian(seed) for seed in seeds]
    return [*found, *_gpt2()]


def _row(claim: str, check: str, value: float, says: str = "", seed: int | None = None) -> Changes:
    return {"claim": claim, "check": check, "seed": seed, "value": value, "says": says}


def _one_line(base: config.Run) -> Iterator[Changes]:
    """What differs between the two rows, in the table and in the models that it makes."""
    models = {}
    for name in ("pre", "post"):
        run = config.override(base, placement=name)
        compiled, _ = programs.of(run)
        model = programs.initial_state(run, compiled).model
        report = wiring.check_model(model, run.model, programs.standard_deviations(run))
        models[name] = {
            ".".join(path_names(path)): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(to_dict(model))
        }
        yield _row("C1", f"wiring findings, {name}", len(report.findings),
                   "; ".join(map(str, report.findings)))  # fmt: skip
    unlike = {name for name in models["pre"] if models["pre"][name] != models["post"].get(name)}
    unlike |= models["post"].keys() - models["pre"].keys()
    of_norms = {name for name in unlike if {"pre", "post", "final"} & set(name.split("."))}
    yield _row("C1", "parameters that differ, norms aside", len(unlike - of_norms),
               ", ".join(sorted(unlike - of_norms)))  # fmt: skip
    pre, post = (placements.row(name) for name in ("pre", "post"))
    yield _row("C1", "a final norm beside pre-norm alone", pre.final_norm - post.final_norm)
    yield _row("C1", "equations that differ", int(pre.text != post.text),
               f"{pre.text} | {post.text}")  # fmt: skip


def _norm_jacobian(seed: int, width: int = 32) -> Changes:
    """Largest relative distance of a LayerNorm's singular values from 1/sigma, float64, eps 0."""
    with jax.enable_x64(True):
        # activations from 0.01 to 100, by turns
        x = jax.random.normal(jax.random.key(seed), (width,), jnp.float64) * 10.0 ** (seed % 5 - 2)
        y = lambda x: norms.layer_norm(x, 0.0)[0]
        values = np.linalg.svd(np.asarray(jax.jacrev(y)(x)), compute_uv=False)
        sigma = float(np.std(np.asarray(x)))
    off = float(np.max(np.abs(values[: width - 2] * sigma - 1)))
    return _row(
        "C3", "relative distance of the norm's singular values from 1/sigma", off, seed=seed
    )


def _gpt2() -> Iterator[Changes]:
    """Does the block of GPT-2, in the port of it that runs its weights, pass x on unchanged where
    its branches give 0, as x + f(norm(x)) does and norm(x + f(x)) does not?"""
    try:
        torch: Any = importlib.import_module("torch")
        hub: Any = importlib.import_module("transformers")
    except ImportError:
        say("C15: transformers is not installed (pip install '.[bench]'): left open")
        return
    torch.manual_seed(0)
    shape: Any = {"n_layer": 48, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 256}
    model = hub.GPT2LMHeadModel(hub.GPT2Config(**shape)).eval()
    x = 3 + 2 * torch.randn(1, 8, 64)
    moved = []
    with torch.no_grad():
        for block in model.transformer.h:
            for matrix in (block.attn.c_proj, block.mlp.c_proj):
                matrix.weight.zero_()
                matrix.bias.zero_()
            y = block(x)
            y = y[0] if isinstance(y, tuple) else y
            moved.append(float((y - x).abs().max()))
    yield _row("C15", "GPT-2's block moves x where its branches are 0, largest of 48", max(moved))
    yield _row("C15", "a norm before GPT-2's readout", float(hasattr(model.transformer, "ln_f")))


def about(options: Options, command: str, seeds: int, before: Table) -> Table:
    """What the runs were made by and with: {what, value}. before: the same of the tables that are
    added to. Raises UserError where these are of another study."""
    identity = record.read_identity(options.out / record.CONFIG, KIND)
    each = options.out.glob(f"arms/*/*/{record.CONFIG}")
    others = sorted({record.read_identity(path)["code"] for path in each} - {identity["code"]})
    codes = [identity["code"], *others]  # runs may have been added by a later version
    found = {"preset": options.preset, "command": command, "code": "; ".join(codes)}
    found["commit"] = "; ".join(code[:10] for code in codes)
    found |= {f"version of {name}": own for name, own in identity["versions"].items()}
    made_by = set(found) - {"preset"}
    for section in identity["config"].values():
        found |= section if isinstance(section, dict) else {}
    found |= {"steps": identity["config"]["steps"]}
    told = {name: str(own) for name, own in found.items()}
    for row in before:
        name, old = row["what"], row["value"] or ""
        if name in made_by:  # all of them, each once
            told[name] = "; ".join(dict.fromkeys([*old.split("; "), *told[name].split("; ")]))
        elif old != told.get(name, old):
            raise UserError(
                f"{options.tables} is of another study: {name} {old} there, {told[name]} here; "
                "--tables for a folder of its own"
            )
    return [{"what": name, "value": own} for name, own in told.items()] + [
        {"what": "seeds", "value": str(seeds)}
    ]


# ------------------------------------------------------------------------------------ the run


def main(argv: Sequence[str]) -> None:
    options, base = cli.parse_own(Options(), argv, __doc__ or "")
    arms = arms_of(options, base)
    chosen = cli.chosen_arms(options, base, arms)
    runtime.start(launch=options.launch)
    with with_ablations():
        study.run_arms(
            base, arms, chosen, options.seeds, options.out, KIND, options.together,
            options.launch.may_change, options.part, numbered=False, keep=options.launch.keep,
        )  # fmt: skip
    if not hosts.leads():
        return
    folder = options.tables or options.out / evidence.FOLDER
    plain = [f"{name} lr {USUAL:g}" for name in RECIPES if not RECIPES[name].get("warmup", 1)]
    made = evidence.of(frames.load(options.out), options.out, curves=RECIPES, layers=plain)
    how = cli.command_line("experiments/claims.py", options, argv)
    known = options.add and (folder / "study.csv").exists()
    before: dict[str, Table] = {"study": [], "checks": []}
    if known:
        made = evidence.with_others(made, folder)
        before = {name: evidence.read(folder, name) for name in before}
    seeds = sorted({row["seed"] for row in made["runs"]})
    made["study"] = about(options, how, len(seeds), before["study"])
    made["checks"] = checks(base, seeds)
    here = {row["claim"] for row in made["checks"]}
    made["checks"] += [row for row in before["checks"] if row["claim"] not in here]
    evidence.write(folder, made)
    verdicts = ledger.write(folder, RAMP)
    study.sum_up(options.out, "The ledger of claims", how, draw=False)
    if options.draw:
        say("drawing the figures")
        paper_figures.draw_all(folder, options.out / "figures")
    if options.json:
        print((options.out / "summary.json").read_text(encoding="utf-8"), end="")
    else:
        print(tables.text([{n: row[n] for n in ("claim", "verdict")} for row in verdicts]))
    say(f"{folder}: claims.csv, numbers.csv and what they are computed from")


if __name__ == "__main__":
    cli.guarded(main)
