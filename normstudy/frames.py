"""Logs -> tables. Each figure draws one of these tables and nothing else. No jax here."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import config, outcome, record, theory
from normstudy.errors import UserError
from normstudy.roles import BRANCH_MATRICES

Table = list[dict[str, Any]]

CLOSING_COLUMNS = {
    "arm": "arm",
    "seed": "seed",
    "outcome": "outcome",
    "at_step": "at step",
    "best_loss": "best loss (nats)",
    "last_loss": "last loss (nats)",
    "best_bits": "best (bits per byte)",
    "last_bits": "last (bits per byte)",
    "gradient_bottom_over_top": "gradient bottom/top, step 0",
    "skip_gain": "skip-path gain, step 0",
    "max_jacobian": "max Jacobian norm",
}


@dataclass(frozen=True)
class Logs:
    """All that one run wrote, read back."""

    name: str
    run: config.Run
    h1: float  # nats
    alpha: float | list  # the placement's skip constant, from config.json; (L, 2) where it varies
    skip_norms: tuple[str, ...]  # the norms on its skip path
    metrics: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    outcome: dict[str, Any]  # empty while the run goes on

    @property
    def label(self) -> str:
        return self.name if self.run.seed == 0 else f"{self.name} seed {self.run.seed}"


def load(folder: Path, *others: Path) -> list[Logs]:
    """The runs of a study folder in the order they were asked for, or the one of a run folder.

    others: more folders of the same study, e.g. of its shards. A run that is in two of them counts
    once, from where it has come further. Raises UserError when a folder is neither, when they are
    of different studies (names the fields), hold no run, or a log line is damaged.
    """
    folders = [folder, *others]
    runs: dict[tuple[str, int], Logs] = {}
    for path in sorted(_run_folders(folders), key=lambda path: path.parts[-2:]):
        logs = _load_run(path)
        if not logs.metrics or (logs.run.probe.probe_every and not logs.probes):
            continue
        twin = runs.setdefault((logs.name, logs.run.seed), logs)
        if unlike := config.differences(twin.run, logs.run):
            raise UserError(f"{path} and another {logs.label} differ in {', '.join(unlike)}")
        if (bool(twin.outcome), len(twin.metrics)) < (bool(logs.outcome), len(logs.metrics)):
            runs[logs.name, logs.run.seed] = logs
    if not runs:
        raise UserError(f"no run with logs yet in {' and '.join(map(str, folders))}")
    return list(runs.values())


def _run_folders(folders: Sequence[Path]) -> list[Path]:
    """Those in folders of one study that have logs. Raises UserError where they are of several."""
    identities: list[dict[str, Any]] = []
    for folder in folders:
        if not (folder / record.CONFIG).exists():
            raise UserError(f"{folder} is neither a run nor a study: it has no {record.CONFIG}")
        identities.append(record.read_identity(folder / record.CONFIG))
        first, last = identities[0], identities[-1]
        pairs = record.differences(first, last)
        pairs["kind"] = first["kind"], last["kind"]
        pairs["sha256 of the text"] = _sha256(first), _sha256(last)
        unlike = [f"{name}: {a} there, {b} here" for name, (a, b) in pairs.items() if a != b]
        if unlike:
            raise UserError(
                f"{folders[0]} and {folder} are not of one study; nothing was drawn. "
                f"{'. '.join(unlike)}. Draw each by itself"
            )
    found = []
    for folder, identity in zip(folders, identities, strict=True):
        is_run = identity["kind"] == "run"
        within = [folder / record.CONFIG] if is_run else folder.glob(f"arms/*/*/{record.CONFIG}")
        found += [path.parent for path in within if (path.parent / record.METRICS).exists()]
    return found


def _sha256(identity: dict[str, Any]) -> str | None:
    return identity.get("corpus", {}).get("sha256")


def _load_run(folder: Path) -> Logs:
    needed = ("name", "h1_nats", "placement")
    tree = record.read_identity(folder / record.CONFIG, "run", *needed)
    finished = folder / record.OUTCOME
    return Logs(
        name=tree["name"],
        run=record.load_config(folder),
        h1=tree["h1_nats"],
        alpha=tree["placement"]["alpha"],
        skip_norms=tuple(tree["placement"]["skip_norms"]),
        metrics=record.read_rows(folder / record.METRICS),
        probes=record.read_rows(folder / record.PROBES),
        outcome=record.read_json(finished) if finished.exists() else {},
    )


def first_seeds(runs: list[Logs]) -> list[Logs]:
    """One run of each arm, the one with the lowest seed: for figures with a panel an arm."""
    lowest: dict[str, Logs] = {}
    for logs in runs:
        if logs.name not in lowest or logs.run.seed < lowest[logs.name].run.seed:
            lowest[logs.name] = logs
    return list(lowest.values())


def loss(runs: list[Logs]) -> Table:
    """Training loss of every step, raw and smoothed as the outcome rule sees it; nats."""
    table = []
    for logs in runs:
        word = logs.outcome.get("word", "running")
        losses = np.array([row["loss"] for row in logs.metrics])
        for row, smoothed in zip(logs.metrics, outcome.smooth(losses), strict=True):
            table.append(
                {"arm": logs.name, "run": logs.label, "outcome": word, "step": row["step"],
                 "loss": row["loss"], "smoothed": smoothed, "h1": logs.h1}
            )  # fmt: skip
    return table


def schedules(runs: list[Logs]) -> Table:
    """Learning rate applied at every update."""
    return [
        {"run": logs.label, "update": row["step"] + 1, "lr": row["lr"]}
        for logs in runs
        for row in logs.metrics
    ]


def layers(runs: list[Logs]) -> Table:
    """One row per run, probed step and layer: what the layer-by-layer figures draw."""
    table = []
    for logs in runs:
        for probe in logs.probes:
            predicted = predicted_skip_gain(logs, probe)
            for layer in range(logs.run.model.layers):
                table.append(
                    {
                        "run": logs.label,
                        "step": probe["step"],
                        "layer": layer,
                        "jacobian_to_end": probe["jacobian_to_end"][layer],
                        "jacobian_to_end_se": probe["jacobian_to_end_se"][layer],
                        "jacobian_of_block": probe["jacobian_of_block"][layer],
                        "jacobian_of_block_se": probe["jacobian_of_block_se"][layer],
                        "skip_gain": probe["skip_gain"][layer],
                        "skip_gain_predicted": predicted[layer],
                        "stream_gradient": probe["stream_gradient"][layer],
                        "norm_factor": _norm_factor(probe, layer),
                        "branch_share_attn": probe["branch_share/attn"][layer],
                        "branch_share_mlp": probe["branch_share/mlp"][layer],
                        "similarity": probe["similarity"][layer],
                        "rms": probe["rms"][layer],
                        "update_ratio": _update_ratio(probe, layer),
                    }
                )
    return table


def matrices(runs: list[Logs]) -> Table:
    """One row per run, probed step, layer and matrix kind: gradient, update, weight norms."""
    kinds = [f"{'attn' if kind in 'qkvo' else 'mlp'}.{kind}" for kind in BRANCH_MATRICES]
    return [
        {
            "run": logs.label,
            "step": probe["step"],
            "layer": layer,
            "matrix": kind.split(".")[1],
            "gradient": probe[f"gradient/{kind}"][layer],
            "update": probe[f"update/{kind}"][layer],
            "weight": probe[f"weight/{kind}"][layer],
        }
        for logs in runs
        for probe in logs.probes
        for layer in range(logs.run.model.layers)
        for kind in kinds
    ]


def predicted_skip_gain(logs: Logs, probe: dict[str, Any]) -> np.ndarray:
    """Product of the norm factors (and alphas) from each layer up, from the logged factors."""
    factors = [
        probe[f"norm_factor_{name}/{sublayer}"]
        for name in logs.skip_norms
        for sublayer in ("attn", "mlp")
        if f"norm_factor_{name}/{sublayer}" in probe
    ]
    stacked = np.array(factors).T if factors else np.ones((logs.run.model.layers, 0))
    alphas = np.array(np.broadcast_to(np.asarray(logs.alpha, float), (len(stacked), 2)))
    for i, sublayer in enumerate(("attn", "mlp")):
        alphas[:, i] = probe.get(f"skip_factor/{sublayer}", alphas[:, i])
    return theory.skip_path_gain(stacked, alphas)


def summary_row(logs: Logs) -> dict[str, Any]:
    """The row of the closing table: outcome and losses, and what probes saw, if any."""
    row = {
        "arm": logs.name,
        "seed": logs.run.seed,
        "outcome": logs.outcome.get("word", "running"),
        "at_step": logs.outcome.get("step"),
        "steps_done": len(logs.metrics),
        "why": logs.outcome.get("why", ""),
        "stopped_because": logs.outcome.get("stopped_because", ""),
        "best_loss": logs.outcome.get("best_loss"),
        "last_loss": logs.outcome.get("last_loss"),
        "val_loss": logs.outcome.get("val_loss"),
        "h1": logs.h1,
        **(_seen(logs.probes) if logs.probes else {}),
    }
    for name in ("best", "last", "val"):
        nats = row[f"{name}_loss"]
        bytewise = not logs.run.data.corpus.endswith(".bin")  # its tokens may be longer than a byte
        row[f"{name}_bits"] = float(nats / np.log(2)) if bytewise and nats is not None else None
    return row


def _seen(probes: list[dict[str, Any]]) -> dict[str, float]:
    """Columns of the closing table."""
    first, last = probes[0], probes[-1]
    return {
        # at the inputs of the bottom and of the top block, x_0 and x_{L-1}
        "gradient_bottom_over_top": first["stream_gradient"][0] / first["stream_gradient"][-2],
        "skip_gain": first["skip_gain"][0],
        "jacobian_at_init": first["jacobian_to_end"][0],
        "max_jacobian": max(max(probe["jacobian_to_end"]) for probe in probes),
        "similarity_at_init": first["similarity"][-1],
        "unigram_kl": last["unigram_kl"],
    }


def minutes_of_steps(runs: list[Logs]) -> float:
    """How long all logged steps took, compiling and probes with them; evaluation without."""
    return round(sum(row.get("seconds", 0.0) for own in runs for row in own.metrics) / 60, 2)


def closing_table(rows: list[dict[str, Any]]) -> Table:
    """The closing table, with headings and units; the seed column only where there are several,
    what probes saw only where there were any."""
    several = len({row["seed"] for row in rows}) > 1
    known = [name for name in CLOSING_COLUMNS if all(name in row for row in rows)]
    shown = [name for name in known if name != "seed" or several]
    return [{CLOSING_COLUMNS[name]: row[name] for name in shown} for row in rows]


def by(table: Iterable[dict[str, Any]], column: str) -> list[tuple[Any, Table]]:
    """Rows grouped by a column, groups in the order of their first row."""
    groups: dict[Any, Table] = {}
    for row in table:
        groups.setdefault(row[column], []).append(row)
    return list(groups.items())


def to_csv(table: Table) -> str:
    """A table as CSV text; floats with nine digits, enough to give a float32 back."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]), lineterminator="\n")
    writer.writeheader()
    for row in table:
        writer.writerow({k: f"{v:.9g}" if isinstance(v, float) else v for k, v in row.items()})
    return text.getvalue()


def nearest_steps(logs: Logs, wanted: tuple[int, ...]) -> list[int]:
    """Probed steps nearest to the wanted ones, each once, in order."""
    probed = np.array([probe["step"] for probe in logs.probes])
    return sorted({int(probed[np.argmin(abs(probed - step))]) for step in wanted})


def _norm_factor(probe: dict[str, Any], layer: int) -> float:
    """Mean over the norms of a block."""
    names = [name for name in probe if name.startswith("norm_factor")]
    return float(np.mean([probe[name][layer] for name in names]))


def _update_ratio(probe: dict[str, Any], layer: int) -> float:
    """Norm of the update over norm of the weights, over all branch matrices of a block."""

    def norm(prefix: str) -> float:
        values = [v[layer] for k, v in probe.items() if k.startswith(prefix) and _is_matrix(k)]
        return float(np.linalg.norm(values))

    return norm("update/") / norm("weight/")


def _is_matrix(key: str) -> bool:
    return key.rsplit(".", 1)[-1] in BRANCH_MATRICES
