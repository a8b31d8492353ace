"""What a probe found in one checkpoint, and the tables made of it. No jax here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from normstudy import config, quantities, tables
from normstudy.errors import UserError
from normstudy.tables import cell

Table = list[dict[str, Any]]


class Findings(NamedTuple):
    """What a check found: sentences for people, and its rows."""

    sentences: list[str]
    rows: Table
    sound: bool  # nothing is wrong


@dataclass(frozen=True)
class Measured:
    """All that was measured in one checkpoint, by the names of the logs."""

    label: str
    step: int
    run: config.Run
    layers: tuple[int, ...]  # those asked for, of blocks 0..L-1
    facts: dict[str, Any]  # about the checkpoint and how it was measured
    values: dict[str, np.ndarray]  # axis 0 = layer where there is one
    errors: dict[str, np.ndarray]  # standard errors
    residuals: dict[str, np.ndarray]  # of lower bounds
    where: dict[str, np.ndarray]  # layers of values that are not on all of them
    findings: dict[str, Findings]  # what is not a number, by group

    def scalars(self) -> dict[str, float]:
        """The values that have no layer."""
        return {name: float(own) for name, own in self.values.items() if np.ndim(own) == 0}

    def by_layer(self, name: str) -> list[tuple[int, int]]:
        """[(layer, its place in the array)] of the layers asked for; L is the stream x_L."""
        depth, size = self.run.model.layers, len(self.values[name])
        if name in self.where:
            return [(int(layer), i) for i, layer in enumerate(self.where[name])]
        top = [depth] if size == depth + 1 and len(self.layers) == depth else []
        return [(layer, layer) for layer in (*self.layers, *top)]

    def layered(self) -> list[str]:
        """Names of the values that have a layer, in the order of quantities.py."""
        names = [name for name, own in self.values.items() if np.ndim(own) == 1]
        lines = list(quantities.QUANTITIES.values())
        return sorted(names, key=lambda name: lines.index(quantities.of(name)))


def long_table(found: list[Measured]) -> Table:
    """One row for each number: what a program reads. `error` is a standard error over vectors or
    batches, the residual of a lower bound, empty for what is exact.
    """
    return [
        {
            "checkpoint": own.label,
            "step": own.step,
            "quantity": name,
            "layer": layer,
            "value": value,
            "error": error,
            "kind": quantities.of(name).kind,
            "unit": quantities.of(name).unit,
        }
        for own in found
        for name, layer, value, error in _numbers(own)
    ]


def layer_tables(own: Measured) -> list[tuple[list[str], Table]]:
    """For people: [(names, one row a layer, one column a name, numbers with their errors)].

    One table a group; one a quantity where its matrices would make the group too wide.
    """
    groups: dict[str, list[str]] = {}
    for name in own.layered():
        base, part = quantities.split(name)
        key = base if "." in part else quantities.of(name).group
        groups.setdefault(key, []).append(name)
    tables = []
    for key, names in groups.items():
        rows: dict[int, dict[str, Any]] = {}
        heads = [name.removeprefix(f"{key}/") for name in names]
        for name, head in zip(names, heads, strict=True):
            for layer, i in own.by_layer(name):
                row = rows.setdefault(layer, {"layer": str(layer)} | dict.fromkeys(heads, ""))
                row[head] = _with_error(own, name, i)
        tables.append((names, [rows[layer] for layer in sorted(rows)]))
    return tables


def scalar_table(found: list[Measured]) -> Table:
    """One row a quantity that has no layer, one column a checkpoint; empty when there is none."""
    names = list(dict.fromkeys(name for own in found for name in own.scalars()))
    columns = list(zip(_headings(found), found, strict=True))
    return [
        {
            "quantity": name,
            "unit": quantities.of(name).unit,
            **{
                heading: _with_error(own, name, ()) if name in own.values else ""
                for heading, own in columns
            },
        }
        for name in names
    ]


def text(found: list[Measured]) -> str:
    """All of it for a terminal: facts, scalars and tables with their units."""
    parts = []
    for own in found:
        parts.append("\n".join(f"{name}: {cell(value)}" for name, value in own.facts.items()))
        for names, table in layer_tables(own):
            parts.append(f"{_legend(names)}\n\n{tables.text(table)}")
        parts += _checks(own)
    parts += _scalars(scalar_table(found))
    return "\n\n".join(parts)


def side_by_side(a: Measured, b: Measured) -> str:
    """Two checkpoints for a terminal, one table a quantity, with the ratio b over a."""
    scalars, layered = against(a, b)
    parts = [f"{a.label} against {b.label}; ratio: the second over the first"]
    parts += [f"{_legend([name])}\n\n{tables.text(table)}" for name, table in layered]
    parts += _scalars(scalars)
    for heading, own in zip(_headings([a, b]), (a, b), strict=True):
        parts += [heading, *_checks(own)] if own.findings else []
    return "\n\n".join(parts)


def as_dict(own: Measured) -> dict[str, Any]:
    """The whole as nested dicts for JSON: facts, and each quantity with its layers and errors."""
    return {
        "checkpoint": own.label,
        "step": own.step,
        "facts": own.facts,
        "quantities": {
            name: {
                **{k: getattr(quantities.of(name), k) for k in ("group", "unit", "kind", "text")},
                "layers": [layer for layer, _, _ in rows],
                "values": [value for _, value, _ in rows],
                "errors": None if rows[0][2] is None else [error for _, _, error in rows],
            }
            for name in own.values
            if (rows := [row for other, *row in _numbers(own) if other == name])
        },
        "findings": {group: check._asdict() for group, check in own.findings.items()},
    }


def against(a: Measured, b: Measured) -> tuple[Table, list[tuple[str, Table]]]:
    """Two checkpoints side by side: (scalars, [(quantity, one row a layer: a, b, b over a)]).

    Raises UserError when the two have another number of layers.
    """
    depths = [own.run.model.layers for own in (a, b)]
    if depths[0] != depths[1]:
        raise UserError(
            f"--against: {a.label} has {depths[0]} layers, {b.label} has {depths[1]}; "
            "only checkpoints of the same depth stand side by side"
        )
    left, right = _headings([a, b])
    tables = []
    for name in a.layered():
        if name in b.values and len(a.values[name]) == len(b.values[name]):
            rows = [
                {
                    "layer": str(layer),
                    left: _with_error(a, name, i),
                    right: _with_error(b, name, i),
                    "ratio": cell(float(b.values[name][i]) / (float(a.values[name][i]) or np.nan)),
                }
                for layer, i in a.by_layer(name)
            ]
            tables.append((name, rows))
    return scalar_table([a, b]), tables


def _headings(found: list[Measured]) -> list[str]:
    """The labels, told apart where the same checkpoint stands beside itself."""
    labels = [own.label for own in found]
    return [
        f"{label} ({labels[:i].count(label) + 1})" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def _checks(own: Measured) -> list[str]:
    """Findings for a terminal: sentences, then rows."""
    parts = []
    for group, check in own.findings.items():
        parts.append("\n".join(f"{group}: {sentence}" for sentence in check.sentences))
        parts += [tables.text(check.rows)] if check.rows else []
    return parts


def _scalars(table: Table) -> list[str]:
    """The table of `scalar_table` for a terminal, below what its quantities are; [] for none."""
    names = [row["quantity"] for row in table]
    return [f"{_legend(names)}\n\n{tables.text(table)}"] if table else []


def _legend(names: list[str]) -> str:
    """'norm_factor: mean over ...; kind: sampled' once for each quantity among the names."""
    lines = {}
    for name in names:
        quantity = quantities.of(name)
        unit = "" if quantity.unit == "1" else f", in {quantity.unit}"
        kind = "" if quantity.kind == "exact" else f" [{quantity.kind}]"
        lines[quantity.text] = f"{quantities.split(name)[0]}: {quantity.text}{unit}{kind}"
    return "\n".join(lines.values())


def _numbers(own: Measured) -> Iterator[tuple[str, int | None, float, float | None]]:
    """(name, layer or None, value, error or None)."""
    for name, values in own.values.items():
        error = own.errors.get(name, own.residuals.get(name))
        places = own.by_layer(name) if np.ndim(values) else [(None, ())]
        for layer, i in places:
            yield name, layer, float(values[i]), None if error is None else float(error[i])


def _with_error(own: Measured, name: str, i: Any) -> str:
    """For people: '1.234 ±0.005', '>= 2.5 (residual 0.01)' for a bound, '3.1' for what is exact."""
    value = cell(float(own.values[name][i]))
    if quantities.of(name).kind == "lower bound":
        residual = own.residuals.get(name)
        return f">= {value}" + ("" if residual is None else f" (residual {residual[i]:.1g})")
    if name in own.errors:
        return f"{float(own.values[name][i]):#.4g} ±{float(own.errors[name][i]):.1g}"
    return value
