"""A ramp study in two pictures: how large a rate each placement bears, and its loss on the way."""

from __future__ import annotations

from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from normstudy import frames, ramp
from normstudy.figures import WIDTH, Figure
from normstudy.frames import Table

LEGEND = {  # kinds of ramp.KINDS: marker, label
    "failed": ("o", "a seed"),
    "survived": (">", "a seed, lower bound"),
    "never trained": ("x", "a seed that never trained"),
}
EDGE = 0.012  # where in the width of the axes stands what has no rate
WORST = 1.5  # times H1: the upper end of the losses that are drawn


# ----------------------------------------------------------------------------------- drawings


def draw_max_lr(table: Table) -> Canvas:
    """A line of dots a placement, a colour a depth; the one that bears most stands at the top."""
    names = _ranked(table)
    colours = _colours(table)
    canvas, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.19 * len(names)))
    for y, name in enumerate(reversed(names)):
        of_name = [row for row in table if row["placement"] == name]
        for depth, rows in frames.by(of_name, "layers"):
            for row in rows:
                _dot(axes, row, y, colours[depth])
    rates = [row["max_stable_lr"] for row in table if row["max_stable_lr"]] or [1.0]
    axes.set(xscale="log", xlim=(min(rates) / 2, max(rates) * 1.5), ylim=(-0.7, len(names) - 0.3))
    axes.set_yticks(range(len(names)), names[::-1])
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(axis="y", color="0.92", lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("max stable learning rate")
    kinds = {row["kind"] for row in table}
    keys = _depth_keys(colours, marker="o", ls="") if len(colours) > 1 else []
    keys += [
        Line2D([], [], ls="", color="0.3", marker=marker, ms=3.5, label=label)
        for kind, (marker, label) in LEGEND.items()
        if kind in kinds and not (kind == "failed" and keys)
    ]
    canvas.legend(handles=keys, loc="outside upper center", ncols=min(5, len(keys)), fontsize=7)
    return canvas


def draw_ramps(table: Table) -> Canvas:
    """A panel a placement: loss against the rate that rises, a line a depth, H1, and dots where
    the last healthy step was."""
    names, colours, h1 = list(dict(frames.by(table, "placement"))), _colours(table), table[0]["h1"]
    columns = min(5, len(names))
    lines = -(-len(names) // columns)
    canvas, grid = plt.subplots(
        lines, columns, figsize=(WIDTH, 0.9 + 1.05 * lines), squeeze=False, sharex=True, sharey=True
    )
    for axes in grid.flat[len(names) :]:
        axes.remove()
    for axes, name in zip(grid.flat, names, strict=False):
        axes.axhline(h1, color="black", lw=0.6, ls=":")
        of_name = [row for row in table if row["placement"] == name]
        for depth, rows in frames.by(of_name, "layers"):
            lr, loss, last = (
                np.array([row[key] for row in rows]) for key in ("lr", "smoothed", "last")
            )
            axes.plot(lr, loss, color=colours[depth], lw=0.9)
            axes.plot(lr[last], loss[last], "o", color=colours[depth], ms=2.5)
        axes.set_title(name)
    axes = grid[0, 0]
    finite = [row["smoothed"] for row in table if np.isfinite(row["smoothed"])]
    axes.set(xscale="log", ylim=(min(finite) - 0.15, WORST * h1))
    axes.xaxis.set_major_locator(LogLocator(numticks=4))
    axes.xaxis.set_minor_locator(NullLocator())
    for i in range(len(names) - columns, len(names)):  # where the row below is not full
        grid.flat[i].tick_params(labelbottom=True)
    keys = _depth_keys(colours)
    keys.append(Line2D([], [], color="0.3", marker="o", ms=2.5, ls="", label="last healthy step"))
    keys.append(Line2D([], [], color="black", lw=0.6, ls=":", label=f"$H_1$ = {h1:.2f}"))
    canvas.legend(handles=keys, loc="outside upper center", ncols=len(keys), fontsize=7)
    canvas.supxlabel("learning rate, which rises with every update", fontsize=9)
    canvas.supylabel("training loss, smoothed (nats)", fontsize=9)
    return canvas


def _dot(axes: Axes, row: dict[str, Any], y: int, colour: str) -> None:
    """One run; without a rate at the left edge."""
    style = {"ls": "", "color": colour, "ms": 3.5, "mew": 0.9, "marker": LEGEND[row["kind"]][0]}
    if row["max_stable_lr"]:
        axes.plot(row["max_stable_lr"], y, **style)
    else:
        axes.plot(EDGE, y, transform=axes.get_yaxis_transform(), **style)


def _colours(table: Table) -> dict[int, str]:
    """A shade a depth, the darkest the deepest."""
    depths = sorted({row["layers"] for row in table})
    shades = plt.get_cmap("viridis_r")(np.linspace(0.25, 1, len(depths)) if depths[1:] else [0.6])
    return dict(zip(depths, map(to_hex, shades), strict=True))


def _depth_keys(colours: dict[int, str], **style: Any) -> list[Line2D]:
    return [
        Line2D([], [], color=colour, ms=3.5, label=f"L = {depth}", **style)
        for depth, colour in colours.items()
    ]


def _ranked(table: Table) -> list[str]:
    """Placements, the one whose middle seed bears most at the greatest depth first; those that
    were not run so deep come last."""
    deepest = max(row["layers"] for row in table)
    groups = dict(frames.by(table, "placement"))

    def rank(name: str) -> tuple[float, bool]:
        rows = [row for row in groups[name] if row["layers"] == deepest]
        return ramp.rank(ramp.middle(rows)) if rows else (-1.0, False)

    return sorted(groups, key=rank, reverse=True)


# ---------------------------------------------------------------------------------- sentences


def sentence(table: Table) -> str:
    """What each placement bears at the greatest depth, from the most to the least."""
    deepest = max(row["layers"] for row in table)
    groups = frames.by([row for row in table if row["layers"] == deepest], "placement")
    ranked = sorted(groups, key=lambda pair: ramp.rank(ramp.middle(pair[1])), reverse=True)
    told = ", ".join(f"{name} {ramp.tell(rows)}" for name, rows in ranked)
    return f"Max stable learning rate at {deepest} blocks, the largest first: {told}."


def curves_sentence(table: Table) -> str:
    """Where to look."""
    names = dict(frames.by(table, "placement"))
    return (
        f"Loss of {len(names)} placements while the learning rate rises: back on H1 where a run "
        "collapsed, above it where it diverged, never below it where it never trained."
    )


MAX_LR = Figure(
    "max_lr", "Max stable learning rate over depth", ramp.runs, draw_max_lr, sentence,
    all_seeds=True,
)  # fmt: skip
RAMPS = Figure("ramps", "Loss along the ramp", ramp.curves, draw_ramps, curves_sentence)
FIGURES = [MAX_LR, RAMPS]
