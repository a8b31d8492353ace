"""What is diagnosed: a config, the logs of a run or a study, or a loss curve from anywhere.

A loss file is CSV with a header, JSON lines, or TensorBoard events, a row an update. Its columns
may have any of the names in COLUMNS; without one of steps the rows are numbered from 0; gradient
norms are those before clipping.
"""

from __future__ import annotations

import csv
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import config, frames, record
from normstudy.diagnose.verdicts import Finding
from normstudy.errors import UserError
from normstudy.frames import Logs

COLUMNS = {
    "loss": ("loss", "train/loss", "train_loss", "training_loss"),
    "step": ("step", "steps", "iteration", "update"),
    "lr": ("lr", "train/lr", "learning_rate"),
    "gradient_norm": ("gradient_norm", "train/gradient_norm", "grad_norm"),
}


@dataclass(frozen=True)
class Baseline:
    """The loss of a model that knows frequencies and nothing else."""

    loss: float | None  # None: not known
    name: str = "the unigram entropy H1"


@dataclass(frozen=True)
class Curve:
    """A run as its numbers tell it, one entry an update."""

    name: str
    losses: np.ndarray
    steps: np.ndarray
    rates: np.ndarray | None = None
    gradients: np.ndarray | None = None  # norm before clipping
    warmup: int = 0  # updates
    logs: Logs | None = None  # where normstudy wrote it


@dataclass(frozen=True)
class Subject:
    """What is known of it."""

    name: str
    run: config.Run | None = None  # None: no config is known
    known: frozenset[str] = frozenset()  # fields of it that somebody gave; the rest are defaults
    curves: tuple[Curve, ...] = ()
    baseline: Baseline = field(default_factory=lambda: Baseline(None))
    seen: tuple[Finding, ...] = ()  # what was found when it was read, of a checkpoint


def from_config(run: config.Run, h1: float, name: str = "this config") -> Subject:
    """A config that was not run yet. h1 in nats."""
    return Subject(name, run, frozenset(config.fields_of(run)), (), Baseline(h1))


def read_config(path: Path) -> config.Run:
    """A config file: the "config" of a run folder's config.json, or the fields alone."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = json.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if isinstance(tree, dict) and isinstance(tree.get("config"), dict):
        text = json.dumps(tree["config"])
    return config.from_json(text, where=str(path))


def from_run(folder: Path) -> Subject:
    """The logs of a run, or of all seeds of an arm. Raises UserError for several arms."""
    seeds = sorted(folder.glob("seed*/config.json"))
    runs = [logs for seed in seeds for logs in frames.load(seed.parent)] or frames.load(folder)
    names = list(dict.fromkeys(logs.name for logs in runs))
    if len(names) > 1:
        raise UserError(
            f"{folder} holds {len(names)} arms; name one: "
            + ", ".join(str(path) for path in sorted(folder.glob("arms/*")))
        )
    curves = tuple(_curve_of(logs) for logs in runs)
    run = runs[0].run
    fields = frozenset(config.fields_of(run))
    return Subject(str(folder), run, fields, curves, Baseline(runs[0].h1))


def other_side(path: Path) -> Subject:
    """A run folder, or a config file."""
    if path.is_dir():
        return from_run(path)
    run = read_config(path)
    return Subject(str(path), run, frozenset(config.fields_of(run)))


def _curve_of(logs: Logs) -> Curve:
    column = {
        name: np.array([row[name] for row in logs.metrics], float)
        for name in ("step", "loss", "lr", "gradient_norm")
    }
    return Curve(
        logs.label, column["loss"], column["step"].astype(int), column["lr"],
        column["gradient_norm"], logs.run.optim.warmup, logs,
    )  # fmt: skip


def from_losses(
    path: Path, baseline: Baseline, run: config.Run | None, known: frozenset[str]
) -> Subject:
    """A loss curve from anywhere. run: what is known of it, in the fields `known`."""
    rows = _read(path)
    if not rows:
        raise UserError(f"{path} holds no row")
    losses = _column(rows, "loss")
    if losses is None:
        raise UserError(
            f"{path} has no column of losses: looked for {', '.join(COLUMNS['loss'])}; it has "
            + ", ".join(rows[0])
        )
    steps = _column(rows, "step")
    order = np.arange(len(rows)) if steps is None else steps.astype(int)
    warmup = run.optim.warmup if run is not None and "warmup" in known else 0
    curve = Curve(
        path.name, losses, order, _column(rows, "lr"), _column(rows, "gradient_norm"), warmup
    )
    return Subject(str(path), run, known, (curve,), baseline)


def rows(path: Path) -> list[dict[str, Any]]:
    """A loss file as rows with the names that normstudy gives them; a torn last line left out."""
    found = []
    for number, row in enumerate(record.read_lines(path)):
        own = {name: _number(row[key]) for name, key in _keys(row).items()}
        if "loss" not in own:
            raise UserError(f"{path}, line {number + 1} has no loss")
        found.append(own | {"step": int(own.get("step", number))})
    return found


def _keys(row: dict[str, Any]) -> dict[str, str]:
    """{our name: theirs} of the columns that a row has."""
    present = {ours: [name for name in names if name in row] for ours, names in COLUMNS.items()}
    return {ours: names[0] for ours, names in present.items() if names}


def _column(rows: list[dict[str, Any]], name: str) -> np.ndarray | None:
    """A column by any of its names; a gap is no number (nan)."""
    key = _keys(rows[0]).get(name)
    return None if key is None else np.array([_number(row.get(key)) for row in rows])


def _number(entry: Any) -> float:
    try:
        return float(entry)
    except (TypeError, ValueError):
        return math.nan


def _read(path: Path) -> list[dict[str, Any]]:
    """The rows of any of the three formats."""
    try:
        if "tfevents" in path.name:
            return _events(path)
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if text.lstrip().startswith("{"):
        return list(_json_lines(path, text))
    return list(csv.DictReader(text.splitlines()))


def _json_lines(path: Path, text: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            raise UserError(f"{path}, line {number} is no JSON object") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number} is no JSON object")
        yield row


def _events(path: Path) -> list[dict[str, Any]]:
    """Scalars of a TensorBoard file, a row a step. Format: length (8 bytes), its checksum (4), the
    event, its checksum (4); a torn last event is left out."""
    from tensorboardX.proto import event_pb2

    content, at, rows = path.read_bytes(), 0, {}
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        body = content[at + 12 : at + 12 + length]
        if len(body) < length:
            break
        event: Any = event_pb2.Event.FromString(body)  # type: ignore[attr-defined]
        for value in event.summary.value:
            rows.setdefault(event.step, {"step": event.step})[value.tag] = value.simple_value
        at += 16 + length
    return [rows[step] for step in sorted(rows) if len(rows[step]) > 1]
