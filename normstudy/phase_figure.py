"""Phase diagrams: outcome over depth or gain and learning rate, from the cells of phases.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import NullFormatter, NullLocator

from normstudy import config, frames, outcome, phases
from normstudy.errors import UserError
from normstudy.figures import WIDTH, Figure
from normstudy.frames import Logs, Table

# P. Tol's light scheme: told apart by colour-blind people, and black text is legible on each
COLOURS = {
    "trained": "#77AADD",
    "spiked": "#99DDFF",
    "undecided": "#DDDDDD",
    "stalled": "#EEDD88",
    "collapsed": "#EE8866",
    "diverged": "#FFAABB",
}
ORDER = [*COLOURS, *(word for word in outcome.WORDS if word not in COLOURS)]  # within a cell
LOWER_BOUND = "survived"  # kind of a largest stable rate
STYLES: dict[str, Any] = {  # of lines
    phases.MEASURED: {"ls": "-", "marker": "o", "ms": 3.5, "mfc": "white"},
    "mean field": {"ls": "--"},
    "DeepNet's criterion": {"ls": ":"},
}
KEY = "k/n: k of n seeds trained"
FEW = 4  # learning rates that are all named on the axis; of more, the powers of ten
LEGIBLE = 2  # panels in a row, up to which there is room for k/n in a cell


def of(folders: Sequence[Path], runs: list[Logs]) -> list[Figure]:
    """The figures of a phase study: over depth, for all placements and for each, and over gain.

    folders: those of the study, with what lies beside the logs. Raises UserError when no run has
    finished.
    """
    base, over = phases.base(folders[0]), phases.lines(folders)
    table = phases.cells(runs)
    if not table:
        raise UserError(f"no run of {folders[0]} has finished yet: there is no cell to draw")
    names = list(dict.fromkeys(row["placement"] for row in phases.over_depth(table, base)))
    found = [_depth_figure(name, [name], base, over) for name in names]
    if len(names) > 1:
        found.insert(0, _depth_figure("", names, base, over))
    if phases.over_gain(table, base):
        what = f"{base.model.placement}, {base.model.layers} blocks"
        found.append(
            Figure(
                "phase_gain",
                f"Outcome over initial gain and learning rate: {what}",
                lambda runs: gain_table(runs, base),
                draw_gain,
                gain_sentence,
                all_seeds=True,
            )
        )
    return found


def _depth_figure(name: str, names: list[str], base: config.Run, over: phases.Lines) -> Figure:
    return Figure(
        f"phase_depth_{name}" if name else "phase_depth",
        f"Outcome over depth and learning rate: {name or 'all placements'}",
        lambda runs: depth_table(runs, base, over, names),
        draw_depth,
        depth_sentence,
        all_seeds=True,
    )


# ------------------------------------------------------------------------------------- frames


def depth_table(
    runs: list[Logs], base: config.Run, over: phases.Lines, names: Sequence[str]
) -> Table:
    """The cells of these placements, and what is drawn over them."""
    cells = phases.over_depth(phases.cells(runs), base)
    found = [row for row in cells if row["placement"] in names]
    for name in names:
        found += phases.measured_lines(name, over.max_lr)
        found += phases.theory_lines(name, cells, over.theory)
    return found


def gain_table(runs: list[Logs], base: config.Run) -> Table:
    """The cells, each with the token similarity at step 0 over its seeds: mean, least, largest."""
    tops = {
        gain: [row["similarity"] for row in rows]
        for gain, rows in frames.by(phases.similarities(runs, base), "gain")
    }
    return [
        row
        | {
            "similarity": float(np.mean(tops[row["gain"]])),
            "similarity_min": min(tops[row["gain"]]),
            "similarity_max": max(tops[row["gain"]]),
        }
        for row in phases.over_gain(phases.cells(runs), base)
    ]


# ----------------------------------------------------------------------------------- drawings


def draw_depth(table: Table) -> Canvas:
    """Depth against learning rate: a panel for each placement and warmup."""
    cells = [row for row in table if row["what"] == "cell"]
    warmups = sorted({row["warmup"] for row in cells})
    of_placement = frames.by(cells, "placement")
    columns = len(warmups) * min(max(4 // len(warmups), 1), len(of_placement))
    rows = -(-len(of_placement) * len(warmups) // columns)
    wide = columns <= LEGIBLE
    height = 1.1 + (2.2 if wide else 1.5) * rows
    canvas, grid = plt.subplots(
        rows, columns, figsize=(WIDTH, height), squeeze=False, sharex=True, sharey=True
    )
    panels = [(name, own, warmup) for name, own in of_placement for warmup in warmups]
    for axes, (name, own, warmup) in zip(grid.flat, panels, strict=False):
        here = [row for row in own if row["warmup"] == warmup]
        _draw_cells(axes, here, cells, "layers", text=wide)
        over = [row for row in table if row["what"] != "cell" and row["placement"] == name]
        for what, line in frames.by(over, "what"):
            _draw_line(axes, what, line)
        axes.set_title(f"{name}, {_with(warmup)}" if wide else f"{name}\n{_with(warmup)}")
    for axes in list(grid.flat)[len(panels) :]:
        axes.remove()
    for axes in list(grid.flat)[len(panels) - columns : len(panels)]:  # nothing is below these
        axes.tick_params(labelbottom=True)
    measured = [row["lr"] for row in table if row["what"] == phases.MEASURED]
    _frame_cells(list(grid.flat)[: len(panels)], cells, "layers", measured)
    canvas.supxlabel("peak learning rate", fontsize=9)
    canvas.supylabel("depth $L$ (blocks)", fontsize=9)
    _legend(canvas, table, KEY if wide else "")
    return canvas


def draw_gain(table: Table) -> Canvas:
    """Gain against learning rate, a panel for each warmup, and token similarity beside it."""
    warmups = sorted({row["warmup"] for row in table})
    canvas, grid = plt.subplots(
        1, len(warmups) + 1, figsize=(WIDTH, 3.6), sharey=True, squeeze=False,
        width_ratios=[*[1.0] * len(warmups), 0.6],
    )  # fmt: skip
    *maps, beside = grid.flat
    for axes, warmup in zip(maps, warmups, strict=True):
        here = [row for row in table if row["warmup"] == warmup]
        _draw_cells(axes, here, table, "gain", text=True)
        axes.set(title=_with(warmup), xlabel="peak learning rate")
    by_gain = [rows[0] for _, rows in frames.by(sorted(table, key=lambda r: r["gain"]), "gain")]
    gains, mean, low, high = (
        np.array([row[name] for row in by_gain], float)
        for name in ("gain", "similarity", "similarity_min", "similarity_max")
    )
    beside.errorbar(
        mean, gains, xerr=(np.maximum(mean - low, 0), np.maximum(high - mean, 0)), color="black",
        marker="o", ms=3.5, elinewidth=0.8,
    )  # fmt: skip
    beside.set(xlim=(min(0.0, low.min() - 0.05), 1.05), title="step 0")
    beside.set_xlabel("token similarity of $x_L$\n(mean cosine)")
    _frame_cells(maps, table, "gain")
    maps[0].set_ylabel("initial gain (times Xavier)")
    _legend(canvas, table, KEY)
    return canvas


# ------------------------------------------------------------------------------------ sentences


def depth_sentence(table: Table) -> str:
    """The largest rate at which all trained, for each placement, warmup and depth."""
    cells = [row for row in table if row["what"] == "cell"]
    parts = []
    for name, own in frames.by(cells, "placement"):
        for warmup, rows in frames.by(sorted(own, key=lambda row: row["warmup"]), "warmup"):
            rates = [f"{_largest(of)} at {layers}" for layers, of in frames.by(rows, "layers")]
            parts.append(f"{name} {_with(warmup)}: {', '.join(rates)}")
    said = (
        f"{_counted(cells)} Largest learning rate of the grid at which every seed trained, by "
        f"depth in blocks: {'; '.join(parts)}."
    )
    laws = {row["what"]: row["scaled_at"] for row in table if row["scaled_at"] is not None}
    if laws:
        anchors = dict.fromkeys(
            f"{row['placement']} at {row['scaled_at']}" for row in table if row["scaled_at"]
        )
        said += (
            f" Lines of theory ({', '.join(laws)}) say how the rate should change with the depth, "
            "as 1 / (change of x_L by the first update per unit rate); their height is free, one "
            "factor for each placement, taken from the boundary of the cells with the least warmup "
            f"at one depth ({', '.join(anchors)} blocks)."
        )
    return said


def gain_sentence(table: Table) -> str:
    """The same for each gain, with the similarity that it starts from."""
    parts = []
    for warmup, rows in frames.by(sorted(table, key=lambda row: row["warmup"]), "warmup"):
        rates = [f"{_largest(of)} at {gain:g}" for gain, of in frames.by(rows, "gain")]
        parts.append(f"{_with(warmup)}: {', '.join(rates)}")
    tops = [f"{rows[0]['similarity']:.3g} at {gain:g}" for gain, rows in frames.by(table, "gain")]
    return (
        f"{_counted(table)} Largest learning rate of the grid at which every seed trained, by "
        f"initial gain: {'; '.join(parts)}. Token similarity of x_L at step 0: {', '.join(tops)}."
    )


def _counted(cells: Table) -> str:
    counts = sorted({row["n"] for row in cells})
    seeds = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
    runs = {word: sum(row[word] for row in cells) for word in ORDER}
    words = ", ".join(f"{n} {word}" for word, n in runs.items() if n)
    return f"{len(cells)} cells of {seeds} seed{'s' if seeds != '1' else ''}: {words}."


def _largest(cells: Table) -> str:
    rate = phases.largest_rate(cells)
    if rate is None:
        return "none"
    return f"{rate:g}" + (" or more" if phases.boundary(cells) is None else "")


# -------------------------------------------------------------------------------------- pieces


def _draw_cells(axes: Axes, rows: Table, whole: Table, y: str, text: bool) -> None:
    """A rectangle a cell, divided by outcome as its seeds are; k/n: k of n seeds trained.

    whole: the cells of all panels, which share their edges.
    """
    across, up = _edges(whole, "lr"), _edges(whole, y)
    for row in rows:
        (left, right), (bottom, top) = across[row["lr"]], up[row[y]]
        done = 0
        for word in ORDER:
            if row[word]:
                begin, end = (
                    left * (right / left) ** (n / row["n"]) for n in (done, done + row[word])
                )
                done += row[word]
                axes.add_patch(
                    Rectangle((begin, bottom), end - begin, top - bottom, fc=COLOURS[word], lw=0)
                )
        axes.add_patch(
            Rectangle((left, bottom), right - left, top - bottom, fill=False, ec="white", lw=0.6)
        )
        if text:
            # below the middle, where the lines go through
            at = np.sqrt(left * right), bottom ** (3 / 4) * top ** (1 / 4)
            axes.text(*at, f"{row['trained']}/{row['n']}", ha="center", va="center", fontsize=6.5)


def _edges(rows: Table, column: str) -> dict[float, tuple[float, float]]:
    """{value: (lower, upper edge of its cells)}: half way to its neighbours, in logarithms."""
    values = np.array(sorted({row[column] for row in rows}), float)
    half = np.diff(np.log(values)) / 2 if len(values) > 1 else np.array([0.5])
    below = values / np.exp([half[0], *half][: len(values)])
    above = values * np.exp([*half, half[-1]][: len(values)])
    return {value: (lo, hi) for value, lo, hi in zip(values, below, above, strict=True)}


def _frame_cells(maps: list[Axes], rows: Table, y: str, also: Sequence[float] = ()) -> None:
    """Log axes to the edges of the cells, with their values on them; also: rates to take in."""
    rates, values = _edges(rows, "lr"), _edges(rows, y)
    left = min(*(lo for lo, _ in rates.values()), *(lr / 1.2 for lr in also), math.inf)
    right = max(*(hi for _, hi in rates.values()), *(lr * 1.2 for lr in also), 0.0)
    for axes in maps:
        axes.set(xscale="log", yscale="log", xlim=(left, right))
        axes.set_ylim(min(lo for lo, _ in values.values()), max(hi for _, hi in values.values()))
        axes.set_yticks(list(values), [f"{value:g}" for value in values])
        axes.yaxis.set_minor_locator(NullLocator())
        if len(rates) <= FEW:
            axes.set_xticks(list(rates), [f"{rate:g}" for rate in rates])
            axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_line(axes: Axes, what: str, rows: Table) -> None:
    """Of several seeds the median as a line, each as a marker."""
    own = frames.by(sorted(rows, key=lambda row: row["layers"]), "layers")
    style = dict(STYLES.get(what, {"ls": "-."}))
    marker = {name: style.pop(name) for name in ("marker", "ms", "mfc") if name in style}
    axes.plot(
        [np.median([row["lr"] for row in at]) for _, at in own], [layers for layers, _ in own],
        color="black", **style,
    )  # fmt: skip
    for kind, at in frames.by(rows, "kind") if marker else []:
        lr, layers = ([row[name] for row in at] for name in ("lr", "layers"))
        shape: dict[str, Any] = marker | ({"marker": ">"} if kind == LOWER_BOUND else {})
        axes.plot(lr, layers, color="black", ls="", **shape)


def _legend(canvas: Canvas, table: Table, title: str) -> None:
    """The outcome words that occur, and the lines."""
    cells = [row for row in table if row["what"] == "cell"]
    handles: list[Any] = [
        Patch(fc=COLOURS[word], label=word) for word in ORDER if any(row[word] for row in cells)
    ]
    for what, rows in frames.by([row for row in table if row["what"] != "cell"], "what"):
        anchors = {row["scaled_at"] for row in rows} - {None}
        at = f"scaled at $L$ = {anchors.pop()}" if len(anchors) == 1 else "scaled at one $L$"
        label = f"{what} ({at})" if rows[0]["scaled_at"] else what
        if any(row["kind"] == LOWER_BOUND for row in rows):
            label += " (triangle: at least)"
        handles.append(Line2D([], [], color="black", label=label, **STYLES.get(what, {"ls": "-."})))
    canvas.legend(
        handles=handles, loc="outside upper center", ncols=min(len(handles), 4), fontsize=7,
        title=title or None, title_fontsize=7,
    )  # fmt: skip


def _with(warmup: int) -> str:
    return f"{warmup} updates of warmup" if warmup else "no warmup"
