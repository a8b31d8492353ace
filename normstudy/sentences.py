"""One sentence for each figure, with its numbers taken from the frame that the figure draws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from normstudy.frames import Table, by


def loss(table: Table) -> str:
    """Who trains, who does not, and against what."""
    arms: dict[str, dict[str, str]] = {}
    for run, rows in by(table, "run"):
        arms.setdefault(rows[0]["arm"], {})[run] = rows[0]["outcome"]
    words: dict[str, list[str]] = {}
    for arm, outcomes in arms.items():
        words.setdefault(tally(list(outcomes.values())), []).append(arm)
    parts = [f"{word.capitalize()}: {', '.join(names)}" for word, names in words.items()]
    return (
        f"Training loss, smoothed (bold) and raw (faint); the dotted line is the unigram entropy "
        f"of the corpus, {table[0]['h1']:.2f} nats: a model there has learned letter frequencies "
        f"and nothing else. {'. '.join(parts)}."
    )


def jacobian(table: Table) -> str:
    """Bottom of the stack at the first and the last step."""
    ends = _first_and_last(table, "jacobian_to_end", 0)
    return (
        "How strongly the top of the stack still depends on each layer's input (1 = identity; "
        f"bands: two standard errors). From the bottom layer, at step 0 and at the end: {ends}."
    )


def jacobian_map(table: Table) -> str:
    """Extremes over all layers and steps."""
    return (
        "The Jacobian norm to the end over the whole run, one column a probe. "
        "Smallest and largest value of each run: "
        f"{_extremes(table, 'jacobian_to_end')}."
    )


def block_map(table: Table) -> str:
    """Extremes over all blocks and steps."""
    return (
        "Each block alone (1 = identity). Smallest and largest value of each run: "
        f"{_extremes(table, 'jacobian_of_block')}."
    )


def skip_path(table: Table) -> str:
    """The gap between the skip path and the full Jacobian at the bottom."""
    parts = []
    for run, rows in by(table, "run"):
        bottom = min(rows, key=lambda row: row["layer"])
        parts.append(
            f"{run} {_number(bottom['skip_gain'])} against {_number(bottom['jacobian_to_end'])}"
        )
    return (
        "Step 0: the gain of the skip path alone (branches cut; dotted: the product of the norm "
        "factors) beside the full Jacobian, to which the branches add. From the bottom layer, skip "
        f"path against full: {'; '.join(parts)}."
    )


def similarity(table: Table) -> str:
    """Top of the stack at the first and last step."""
    ends = _first_and_last(table, "similarity", -1)
    return (
        "Mean cosine between the stream vectors of different positions: at 1 the model no longer "
        f"sees which token it is at. At the top layer, at step 0 and at the end: {ends}."
    )


def stream_gradient(table: Table) -> str:
    """Bottom over top at step 0."""
    parts = []
    for run, rows in by(table, "run"):
        first = _at(rows, min(row["step"] for row in rows), "stream_gradient")
        parts.append(f"{run} {_number(first[0] / first[-1])}")
    return (
        "Norm of the loss gradient at each layer's input. Bottom layer over top layer, step 0: "
        f"{'; '.join(parts)}."
    )


def matrix_gradient(table: Table) -> str:
    """How far the gradient of Q changes over the depth."""
    parts = []
    for run, rows in by(table, "run"):
        q = [row["gradient"] for row in rows if row["matrix"] == "q"]
        parts.append(f"{run} {_number(q[0] / max(q[-1], 1e-300))}")
    return (
        "Gradients at step 0 by matrix. An even stream gradient can hide a query and key gradient "
        "that is lost where all positions look alike. Query gradient, bottom layer over top: "
        f"{'; '.join(parts)}."
    )


def norm_factor(table: Table) -> str:
    """Mean over layers at the first and last step."""
    return (
        "What each block's norms multiply their input by (gain / sigma, mean over positions). "
        "Mean over the layers at step 0 and at the end: "
        f"{_mean_first_and_last(table, 'norm_factor')}."
    )


def update_ratio(table: Table) -> str:
    """The first update of the bottom layer."""
    parts = [f"{run} {_number(rows[0]['update_ratio'])}" for run, rows in by(table, "run")]
    return (
        "Norm of what the optimizer applied over the norm of the weights, all branch matrices of "
        f"a block. Bottom layer at the first update: {'; '.join(parts)}."
    )


def schedules(table: Table) -> str:
    """First and highest learning rate."""
    parts = []
    for run, rows in by(table, "run"):
        rates = [row["lr"] for row in rows]
        parts.append(f"{run} {_number(rates[0])} to {_number(max(rates))}")
    return f"Learning rate as applied. At update 1, and at its highest: {'; '.join(parts)}."


def tally(words: list[str]) -> str:
    """'trained' for one seed; 'trained 2 of 3, stalled 1 of 3' for several."""
    if len(words) == 1:
        return words[0]
    return ", ".join(f"{word} {n} of {len(words)}" for word, n in Counter(words).items())


def _at(rows: Table, step: int, column: str) -> list[float]:
    """The column over the layers at one step, bottom first."""
    here = sorted((row for row in rows if row["step"] == step), key=lambda row: row["layer"])
    return [row[column] for row in here]


def _pairs(table: Table, column: str, pick: Callable[[list[float]], float]) -> str:
    parts = []
    for run, rows in by(table, "run"):
        steps = [row["step"] for row in rows]
        first, last = (pick(_at(rows, step, column)) for step in (min(steps), max(steps)))
        parts.append(f"{run} {_number(first)} and {_number(last)}")
    return "; ".join(parts)


def _first_and_last(table: Table, column: str, layer: int) -> str:
    return _pairs(table, column, lambda values: values[layer])


def _mean_first_and_last(table: Table, column: str) -> str:
    return _pairs(table, column, lambda values: float(np.mean(values)))


def _extremes(table: Table, column: str) -> str:
    parts = []
    for run, rows in by(table, "run"):
        values = [row[column] for row in rows]
        parts.append(f"{run} {_number(min(values))} to {_number(max(values))}")
    return "; ".join(parts)


def _number(value: float) -> str:
    return f"{value:.3g}"
