"""Logs -> the tables that a paper keeps: a row a run, a probe, a layer. Small CSV. No jax here.

runs.csv      every run: what it was, what became of it
probes.csv    every probe: one number for each quantity, see SCALARS
layers.csv    by layer, at a few steps, of the runs that are looked at closely
curves.csv    the smoothed loss of these, every tenth update
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import config, frames, outcome
from normstudy.errors import UserError
from normstudy.frames import Logs, Table
from normstudy.roles import BRANCH_MATRICES

FOLDER = "tables"  # of a study, where they lie
Probe = dict[str, Any]
STEPS = (0, 50)  # at which layers are kept
EVERY = 10  # updates between two points of a curve
# columns of whole numbers; the others have floats or words
WHOLE = {
    "seed", "layers", "width", "warmup", "steps", "at_step", "step", "layer", "n", "runs", "failed",
    "leads_from",
}  # fmt: skip
# columns that are printed as they are, whatever they look like: 0.50, or a commit of digits alone
TEXTS = {"numbers": ("name", "text"), "study": ("what", "value")}
LAYERS = (
    "stream_gradient", "jacobian_to_end", "jacobian_to_end_se", "skip_gain", "similarity",
    "gradient/attn.q", "gradient/mlp.down",
)  # fmt: skip


def of(
    runs: list[Logs], folder: Path, curves: Collection[str] = (), layers: Collection[str] = ()
) -> dict[str, Table]:
    """{name: table} of all finished runs.

    curves: recipes whose loss curves are kept, of the runs that were probed more than once. layers:
    arms whose layers are kept.
    """
    done = [logs for logs in runs if logs.outcome]
    if not done:
        raise UserError(f"no run of {folder} has finished yet: there is nothing to tell")
    near = [logs for logs in done if recipe(logs) in curves and len(logs.probes) > 1]
    return {
        "runs": [_run(logs) for logs in done],
        "probes": [_key(logs) | _scalars(probe) for logs in done for probe in logs.probes],
        "layers": [row for logs in done if logs.name in layers for row in _layers(logs)],
        "curves": [row for logs in near for row in _curve(logs)],
    }


def with_others(tables: dict[str, Table], folder: Path) -> dict[str, Table]:
    """The tables, and beside them FOLDER's rows of other runs: arm by arm, seeds in their order."""
    new = {_run_of(row) for row in tables["runs"]}
    found = {}
    for name, rows in tables.items():
        old = read(folder, name) if (folder / f"{name}.csv").exists() else []
        both = [row for row in old if _run_of(row) not in new] + rows
        arms = {_run_of(row)[:2]: None for row in both}
        order = {arm: i for i, arm in enumerate(arms)}
        found[name] = sorted(both, key=lambda row: (order[_run_of(row)[:2]], row["seed"]))
    return found


def _run_of(row: dict[str, Any]) -> tuple[str, float, int]:
    return row["recipe"], row["lr"], row["seed"]


def recipe(logs: Logs) -> str:
    """The name of an arm without its learning rate."""
    return logs.name.rpartition(" lr ")[0] or logs.name


def write(folder: Path, tables: dict[str, Table]) -> None:
    """FOLDER/NAME.csv of every table; none of one without rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        path = folder / f"{name}.csv"
        if rows:
            path.write_text(frames.to_csv(rows), encoding="utf-8")
        else:
            path.unlink(missing_ok=True)


def read(folder: Path, name: str) -> Table:
    """FOLDER/NAME.csv: numbers as numbers, nothing as None, columns of TEXTS as they are. Raises
    UserError where it is not."""
    path = folder / f"{name}.csv"
    if not path.exists():
        raise UserError(f"{path} does not exist: experiments/claims.py writes it")
    texts = TEXTS.get(name, ())
    with path.open(encoding="utf-8", newline="") as file:
        return [
            {
                column: text if column in texts else _value(column, text)
                for column, text in row.items()
            }
            for row in csv.DictReader(file)
        ]


def _value(column: str, text: str) -> Any:
    if not text:
        return None
    try:
        return int(text) if column in WHOLE else float(text)
    except ValueError:
        return text


def _key(logs: Logs) -> dict[str, Any]:
    return {"recipe": recipe(logs), "lr": logs.run.optim.lr, "seed": logs.run.seed}


def _run(logs: Logs) -> dict[str, Any]:
    run, found = logs.run, logs.outcome
    fields = ("placement", "layers", "width", "optimizer", "schedule", "warmup", "steps")
    return {
        **_key(logs),
        **{name: config.fields_of(run)[name] for name in fields},
        "outcome": found["word"],
        "at_step": found["step"],
        "best_loss": found["best_loss"],
        "last_loss": found["last_loss"],
        "h1": logs.h1,
        "minutes": frames.minutes_of_steps([logs]),
    }


# ------------------------------------------------------------------------------------ scalars


def _mean(prefix: str) -> Callable[[Probe], float | None]:
    """Geometric mean over layers and sublayers."""

    def of_probe(probe: Probe) -> float | None:
        found = [probe[name] for name in probe if name.startswith(prefix) and "_se" not in name]
        return _geometric(np.concatenate(found)) if found else None

    return of_probe


def _geometric(values: Any) -> float:
    values = np.asarray(values, float)
    return 0.0 if (values <= 0).any() else float(np.exp(np.mean(np.log(values))))


def _largest(prefix: str) -> Callable[[Probe], float | None]:
    def of_probe(probe: Probe) -> float | None:
        found = [probe[name] for name in probe if name.startswith(prefix)]
        return float(np.max(found)) if found else None

    return of_probe


def _end_over_end(name: str, top: int = -1) -> Callable[[Probe], float | None]:
    def of_probe(probe: Probe) -> float | None:
        values = probe.get(name)
        return None if values is None else _ratio(values[0], values[top])

    return of_probe


def _ratio(a: float, b: float) -> float:
    return float(a / b) if b else math.inf


def _share_of_queries(probe: Probe) -> float | None:
    """Norm of the gradient of all queries and keys over that of all branch matrices."""
    squares = dict.fromkeys(BRANCH_MATRICES, 0.0)
    for name, values in probe.items():
        kind = name.rpartition(".")[2]
        if name.startswith("gradient/") and kind in squares:
            squares[kind] += float(np.sum(np.square(values)))
    total = sum(squares.values())
    return math.sqrt((squares["q"] + squares["k"]) / total) if total else None


def _update_ratio(probe: Probe) -> float | None:
    """Largest over layers of the norm of an update over that of the weights, branch matrices."""
    ratios = []
    for name in probe:
        if name.startswith("update/") and name.rpartition(".")[2] in BRANCH_MATRICES:
            weights = np.asarray(probe[name.replace("update/", "weight/", 1)], float)
            ratios.append(np.asarray(probe[name], float) / np.maximum(weights, 1e-30))
    return float(np.max(ratios)) if ratios else None


def _at(name: str, layer: int) -> Callable[[Probe], float | None]:
    def of_probe(probe: Probe) -> float | None:
        return float(probe[name][layer]) if name in probe else None

    return of_probe


SCALARS: dict[str, Callable[[Probe], float | None]] = {
    # the stream's gradient at the input of the bottom block over that of the top block
    "gradient_ratio": _end_over_end("stream_gradient", -2),
    "query_gradient_ratio": _end_over_end("gradient/attn.q"),
    "down_gradient_ratio": _end_over_end("gradient/mlp.down"),
    "top_gradient": _at("gradient/mlp.down", -1),
    "query_share": _share_of_queries,
    "jacobian_bottom": _at("jacobian_to_end", 0),
    "skip_gain": _at("skip_gain", 0),
    "similarity": _at("similarity", -1),
    "norm_factor": _mean("norm_factor"),
    "branch_share": _mean("branch_share"),
    "sigma_update": _largest("sigma_update"),
    "sigma_update_mean": _mean("sigma_update"),
    "function_update": _at("function_update", -1),
    "logits_update": lambda probe: probe.get("logits_update"),
    "update_ratio": _update_ratio,
    "loss_change": lambda probe: probe.get("loss_change"),
    "loss_change_predicted": lambda probe: probe.get("loss_change_predicted"),
    "edge_ratio": lambda probe: probe.get("edge_ratio"),
    "cosine_to_next": lambda probe: float(np.min(probe["cosine_to_next"])),
    "cosine_to_start": _at("cosine_to_start", -1),
    # of the blocks above the first, whose input is not normed yet: root mean square
    "minus_identity": lambda probe: float(
        np.sqrt(np.mean(np.square(probe["jacobian_minus_identity"][1:])))
    ),
    "unigram_kl": lambda probe: probe.get("unigram_kl"),
}


def _scalars(probe: Probe) -> dict[str, Any]:
    return {"step": probe["step"]} | {name: scalar(probe) for name, scalar in SCALARS.items()}


def _layers(logs: Logs) -> Table:
    wanted = frames.nearest_steps(logs, STEPS)
    return [
        _key(logs)
        | {"step": probe["step"], "layer": layer}
        | {name: probe[name][layer] for name in LAYERS if name in probe}
        for probe in logs.probes
        if probe["step"] in wanted
        for layer in range(logs.run.model.layers)
    ]


def _curve(logs: Logs) -> Table:
    smoothed = outcome.smooth(np.array([row["loss"] for row in logs.metrics]))
    last = len(smoothed) - 1
    return [
        _key(logs) | {"step": row["step"], "loss": float(loss)}
        for i, (row, loss) in enumerate(zip(logs.metrics, smoothed, strict=True))
        if i % EVERY == 0 or i == last
    ]
