"""Which outcome at which depth, initial gain, learning rate and warmup: logs -> cells. No jax here.

Beside the logs of such a study may lie two files, which the diagrams draw over the cells:
max_lr.csv, the largest stable learning rates as measured (placement, layers, seed, max_stable_lr,
kind; no rate: it never trained, `survived`: a lower bound), and theory.csv, what theory says of the
first update (placement, layers, law, update).
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normstudy import config, frames, outcome, placements, record
from normstudy.errors import UserError
from normstudy.frames import Logs, Table

KIND = "phase diagram"  # of a study folder
MAX_LR, THEORY = "max_lr.csv", "theory.csv"
MEASURED = "largest stable rate"  # in the column `what` of a table; theory's laws have their names
CELL = ("placement", "layers", "gain", "lr", "warmup")
COLUMNS = ("what", *CELL, "n", *outcome.WORDS, "seed", "kind", "scaled_at")


class Lines(NamedTuple):
    """What is drawn over the cells."""

    max_lr: Table
    theory: Table


def base(folder: Path) -> config.Run:
    """The run whose fields the arms of a study change."""
    tree = record.read_identity(folder / record.CONFIG, KIND)
    return config.from_json(json.dumps(tree["config"]), where=str(folder / record.CONFIG))


def lines(folders: Sequence[Path]) -> Lines:
    """What lies beside the logs in any of these folders; each row once."""
    numbers = {"layers": int, "seed": int, "max_stable_lr": float, "update": float}
    measured = read(folders, MAX_LR, ("placement", "layers", "seed", "max_stable_lr", "kind"))
    measured = [row for row in measured if row["max_stable_lr"]]
    predicted = read(folders, THEORY, ("placement", "layers", "law", "update"))
    return Lines(
        *(
            [{name: numbers.get(name, str)(value) for name, value in row.items()} for row in rows]
            for rows in (measured, predicted)
        )
    )


def read(folders: Sequence[Path], name: str, columns: Sequence[str]) -> Table:
    """These columns of FOLDER/name, as text. Raises UserError for a file without one of them."""
    found: dict[tuple[str, ...], None] = {}
    for path in (folder / name for folder in folders):
        if not path.exists():
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            missing = [column for column in columns if column not in (rows.fieldnames or ())]
            if missing:
                raise UserError(f"{path} has no column {', '.join(missing)}")
            found |= {tuple(row[column] for column in columns): None for row in rows}
    return [dict(zip(columns, values, strict=True)) for values in found]


# ------------------------------------------------------------------------------------- cells


def cells(runs: list[Logs]) -> Table:
    """One row per placement, depth, gain, learning rate and warmup: of n seeds, how many came to
    each outcome. Runs that go on are left out."""
    words: dict[tuple, list[str]] = {}
    for logs in runs:
        if logs.outcome:
            words.setdefault(cell_of(logs.run), []).append(logs.outcome["word"])
    rank = {name: i for i, name in enumerate(placements.PLACEMENTS)}
    found = []
    for key in sorted(words, key=lambda key: (rank.get(key[0], len(rank)), *key)):
        tally = Counter(words[key])
        counts = {word: tally[word] for word in outcome.WORDS}
        found.append(_row("cell", **dict(zip(CELL, key, strict=True)), n=tally.total(), **counts))
    return found


def over_depth(table: Table, base: config.Run) -> Table:
    """The cells at the base's gain; not the row of the other diagram, where that is all there is
    of a placement."""
    own = [row for row in table if row["gain"] == base.init.gain]
    if over_gain(table, base):
        depths = {name: {row["layers"] for row in rows} for name, rows in frames.by(own, CELL[0])}
        alone = (base.model.placement, {base.model.layers})
        own = [row for row in own if (row["placement"], depths[row["placement"]]) != alone]
    return own


def over_gain(table: Table, base: config.Run) -> Table:
    """The cells of the base's placement and depth, where there are several gains."""
    place = base.model.placement, base.model.layers
    own = [row for row in table if (row["placement"], row["layers"]) == place]
    return own if len({row["gain"] for row in own}) > 1 else []


def largest_rate(table: Table) -> float | None:
    """The largest learning rate at which every seed trained, as experiments/tune_lr.py chooses."""
    rates = {row["lr"] for row in table}
    good = [
        lr for lr in rates if all(row["trained"] == row["n"] for row in table if row["lr"] == lr)
    ]
    return max(good, default=None)


def boundary(table: Table) -> float | None:
    """Geometric mean of that rate and the next one; None where the grid does not enclose it."""
    below = largest_rate(table)
    above = [row["lr"] for row in table if below is not None and row["lr"] > below]
    return math.sqrt(below * min(above)) if below is not None and above else None


def windows(table: Table) -> Table:
    """One row per placement, depth, gain and warmup: the rates at which every seed trained, or a
    part of them."""
    found = []
    for key in dict.fromkeys(_window(row) for row in table):
        own = [row for row in table if _window(row) == key]
        of_all = [f"{row['lr']:g}" for row in own if row["trained"] == row["n"]]
        of_some = [f"{row['lr']:g}" for row in own if 0 < row["trained"] < row["n"]]
        found.append(
            dict(zip(("placement", "layers", "gain", "warmup"), key, strict=True))
            | {"rates": len(own), "all seeds trained at": " ".join(of_all) or "none"}
            | {"some": " ".join(of_some)}
        )
    return found


# ------------------------------------------------------------------------------------- lines


def measured_lines(placement: str, max_lr: Table) -> Table:
    """The largest stable rates of a placement: one row per depth and seed."""
    return [
        _row(
            MEASURED, placement=placement, layers=row["layers"], lr=row["max_stable_lr"],
            seed=row["seed"], kind=row["kind"],
        )
        for row in sorted(max_lr, key=lambda row: (row["layers"], row["seed"]))
        if row["placement"] == placement
    ]  # fmt: skip


def theory_lines(placement: str, table: Table, theory: Table) -> Table:
    """How the largest rate should change with the depth, for each law: as 1 / update.

    The factor is free. It is such that the line passes the boundary of the cells with the least
    warmup, at the least depth where the grid encloses it (`scaled_at`); no line where none does.
    """
    own = [row for row in table if row["placement"] == placement]
    warmup = min(row["warmup"] for row in own)
    edges = {
        layers: boundary(rows)
        for layers, rows in frames.by([row for row in own if row["warmup"] == warmup], "layers")
    }
    found = []
    for law, rows in frames.by([row for row in theory if row["placement"] == placement], "law"):
        update = {row["layers"]: row["update"] for row in rows}
        enclosed = sorted(layers for layers in update if edges.get(layers))
        for layers in sorted(update) if enclosed else []:
            lr = edges[enclosed[0]] * update[enclosed[0]] / update[layers]
            found.append(
                _row(law, placement=placement, layers=layers, lr=lr, scaled_at=enclosed[0])
            )
    return found


def similarities(runs: list[Logs], base: config.Run) -> Table:
    """Token similarity of x_L at step 0, in the model of the base: one row per gain and seed."""
    found = {}
    for logs in runs:
        place = logs.run.model.placement, logs.run.model.layers
        if place == (base.model.placement, base.model.layers):
            top = logs.probes[0]["similarity"][-1]
            found.setdefault((logs.run.init.gain, logs.run.seed), top)
    return [
        {"gain": gain, "seed": seed, "similarity": top}
        for (gain, seed), top in sorted(found.items())
    ]


def cell_of(run: config.Run) -> tuple[Any, ...]:
    """Where a run belongs: its values of CELL."""
    values = config.fields_of(run)
    return tuple(values[name] for name in CELL)


def _window(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("placement", "layers", "gain", "warmup"))


def _row(what: str, **values: Any) -> dict[str, Any]:
    return dict.fromkeys(COLUMNS) | {"what": what} | values
