"""Tables -> pictures: PDF and PNG, each with the CSV that it draws. No accelerator, no training.

A figure is a frame (frames.py makes it), a drawing of that frame, and one sentence computed from
it. The same logs give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.textpath import TextPath

from normstudy import frames, sentences
from normstudy.errors import UserError
from normstudy.frames import Logs, Table

WIDTH = 5.5  # inches: the text width of NeurIPS and ICLR
STYLE: Any = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral"],
    "mathtext.fontset": "stix",
    "font.size": 9,
    "axes.titlesize": 7.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": plt.cycler(color=plt.color_sequences["petroff10"]),
    "lines.linewidth": 1.2,
    "figure.constrained_layout.use": True,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
}
ALIVE = ("trained", "spiked", "running", "undecided")
MARKERS = "osDv^P*X<>"


@dataclass(frozen=True)
class Figure:
    """One picture: its file name, title, the frame it draws, the drawing, and what it shows."""

    name: str
    title: str
    frame: Callable[[list[Logs]], Table]
    draw: Callable[[Table], Canvas]
    sentence: Callable[[Table], str]
    all_seeds: bool = False  # False: the lowest seed of each arm


@dataclass(frozen=True)
class Drawn:
    """A figure on disk, with the sentence that its frame gave."""

    name: str
    title: str
    sentence: str
    png: Path
    csv: Path


def draw_all(runs: list[Logs], folder: Path, chosen: Sequence[Figure] | None = None) -> list[Drawn]:
    """Write FOLDER/<name>.csv, .pdf and .png for every figure. Raises UserError if it cannot.

    chosen: default FIGURES, and of those what can be drawn from runs that were never probed.
    """
    if chosen is None:
        chosen = FIGURES if all(logs.probes for logs in runs) else WITHOUT_PROBES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [_write(figure, runs, folder) for figure in chosen]
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None


def _write(figure: Figure, runs: list[Logs], folder: Path) -> Drawn:
    table = figure.frame(runs if figure.all_seeds else frames.first_seeds(runs))
    csv, png = folder / f"{figure.name}.csv", folder / f"{figure.name}.png"
    csv.write_text(frames.to_csv(table), encoding="utf-8")
    with plt.rc_context(STYLE):
        canvas = figure.draw(table)
        # no dates and no versions in the files: the same logs give the same bytes
        canvas.savefig(folder / f"{figure.name}.pdf", metadata={"CreationDate": None})
        canvas.savefig(png, metadata={"Software": None})
        plt.close(canvas)
    sentence = figure.sentence(table)
    if not figure.all_seeds and len({logs.run.seed for logs in runs}) > 1:
        sentence += " Of each arm the run with the lowest seed is shown."
    return Drawn(figure.name, figure.title, sentence, png, csv)


# ------------------------------------------------------------------------------------- frames


def _chosen_steps(runs: list[Logs]) -> Table:
    """The layer table at the probes nearest to steps 0, 10, 50 and the end of each run."""
    chosen = {logs.label: frames.nearest_steps(logs, (0, 10, 50, 10**9)) for logs in runs}
    return [row for row in frames.layers(runs) if row["step"] in chosen[row["run"]]]


def _only(*columns: str) -> Callable[[list[Logs]], Table]:
    """The layer table at the chosen steps, cut to the columns that a figure draws."""

    def frame(runs: list[Logs]) -> Table:
        names = ("run", "step", "layer", *columns)
        return [{name: row[name] for name in names} for row in _chosen_steps(runs)]

    return frame


def _every_step(*columns: str) -> Callable[[list[Logs]], Table]:
    """The layer table at every probe, cut to the columns that a figure draws."""

    def frame(runs: list[Logs]) -> Table:
        names = ("run", "step", "layer", *columns)
        return [{name: row[name] for name in names} for row in frames.layers(runs)]

    return frame


def _matrices_at_first_step(runs: list[Logs]) -> Table:
    return [
        {k: row[k] for k in ("run", "layer", "matrix", "gradient")}
        for row in frames.matrices(runs)
        if row["step"] == 0
    ]


def _skip_at_first_step(runs: list[Logs]) -> Table:
    names = ("run", "layer", "skip_gain", "skip_gain_predicted", "jacobian_to_end")
    return [{k: row[k] for k in names} for row in frames.layers(runs) if row["step"] == 0]


def _update_ratio(runs: list[Logs]) -> Table:
    """Bottom, middle and top layer at every probe."""
    depth = {logs.label: logs.run.model.layers for logs in runs}
    return [
        {k: row[k] for k in ("run", "step", "layer", "update_ratio")}
        for row in frames.layers(runs)
        if row["layer"] in (0, depth[row["run"]] // 2, depth[row["run"]] - 1)
    ]


# ----------------------------------------------------------------------------------- drawings


def _draw_loss(table: Table) -> Canvas:
    canvas, axes = plt.subplots(figsize=(WIDTH, 3.4))
    for i, (arm, of_arm) in enumerate(frames.by(table, "arm")):
        seeds = frames.by(of_arm, "run")
        words = [rows[0]["outcome"] for _, rows in seeds]
        for j, (_, rows) in enumerate(seeds):
            axes.plot(
                _column(rows, "step"), _column(rows, "smoothed"), f"C{i % 10}",
                ls="-" if words[j] in ALIVE else "--", **_marked(i), markevery=(i * 7, 70),
                label=f"{arm}: {sentences.tally(words)}" if j == 0 else None,
            )  # fmt: skip
            axes.plot(_column(rows, "step"), _column(rows, "loss"), f"C{i % 10}", lw=0.4, alpha=0.2)
    h1 = table[0]["h1"]
    axes.axhline(h1, color="black", lw=0.8, ls=":")
    axes.annotate(
        f"$H_1$ = {h1:.2f}: unigram entropy", (1, h1), xycoords=("axes fraction", "data"),
        xytext=(-2, -11), textcoords="offset points", ha="right", fontsize=8,
    )  # fmt: skip
    low = min(row["smoothed"] for row in table)
    high = max(h1, low) + 1.5  # the first steps, from ln(256), are not what one looks for
    axes.set(xlabel="update", ylabel="training loss (nats)", ylim=(min(low, h1) - 0.1, high))
    labels = axes.get_legend_handles_labels()[1]
    columns = _columns(labels, 3)
    canvas.set_figheight(3.4 + 0.15 * max(-(-len(labels) // columns) - 4, 0))
    canvas.legend(loc="outside lower center", ncols=columns, handlelength=2.5, fontsize=7)
    return canvas


def _marked(i: int) -> dict[str, Any]:
    """The marker of the i-th arm: hollow ones for those whose colour was there before."""
    hollow = {"markerfacecolor": "white"} if i >= 10 else {}
    return {"marker": MARKERS[(i + i // 10) % len(MARKERS)], "markersize": 3.5} | hollow


def _columns(labels: list[str], most: int) -> int:
    """How many columns of a legend fit the width at 7 points: a handle takes 0.4 in there, and 0.2
    in lie between columns."""
    widths = [TextPath((0, 0), own, size=7).get_extents().width / 72 for own in labels]

    def wide(n: int) -> float:
        rows = -(-len(labels) // n)
        columns = [widths[i : i + rows] for i in range(0, len(labels), rows)]
        return sum(0.4 + max(own) for own in columns) + 0.2 * (n - 1)

    return next((n for n in range(most, 1, -1) if wide(n) <= WIDTH), 1)


def _draw_schedules(table: Table) -> Canvas:
    canvas, axes = plt.subplots(figsize=(WIDTH, 2.4))
    groups: list[list[tuple[str, Table]]] = []  # runs with the same rates, the longest first
    for run, rows in sorted(frames.by(table, "run"), key=lambda pair: -len(pair[1])):
        rates = _column(rows, "lr")
        same = (g for g in groups if np.allclose(_column(g[0][1], "lr")[: len(rates)], rates))
        group = next(same, None)
        if group is None:
            groups.append([(run, rows)])
        else:
            group.append((run, rows))
    for i, group in enumerate(groups):
        name, rows = group[0]
        label = name if len(group) == 1 else f"{name} and {len(group) - 1} more"
        axes.plot(
            _column(rows, "update"), _column(rows, "lr"), label=label,
            marker=MARKERS[i % len(MARKERS)], markevery=(i * 10, 60), markersize=3.5,
        )  # fmt: skip
    axes.set(xlabel="update", ylabel="learning rate", ylim=(0, None))
    canvas.legend(loc="outside lower center", ncols=2)
    return canvas


def _layer_curves(column: str, label: str, log: bool = True, error: str = "") -> Callable:
    """Small multiples, one panel a run: the column against the layer at a few steps."""

    def draw(table: Table) -> Canvas:
        canvas, panels = _panels(table)
        shades = plt.get_cmap("viridis")
        last = {run: max(row["step"] for row in rows) for run, rows in frames.by(table, "run")}
        ends = {(run, step) for run, step in last.items() if step > 0}
        labels = [f"step {s}" for s in sorted({r["step"] for r in table if _key(r) not in ends})]
        labels += ["last probe"] * bool(ends)
        lines: dict[str, Any] = {}
        for axes, (run, rows) in panels:
            for step, here in frames.by(rows, "step"):
                at = "last probe" if (run, step) in ends else f"step {step}"
                i = labels.index(at)
                layer, value = _column(here, "layer"), _column(here, column)
                colour = shades(0.9 * i / max(len(labels) - 1, 1))
                (lines[at],) = axes.plot(
                    layer, value, color=colour, marker=MARKERS[i % len(MARKERS)],
                    markevery=(min(2 * i, len(layer) - 1), 12), markersize=3, label=at,
                )  # fmt: skip
                if error:
                    se = _column(here, error)
                    low = np.maximum(value - 2 * se, value * 1e-2)
                    axes.fill_between(layer, low, value + 2 * se, color=colour, alpha=0.25, lw=0)
            axes.set_title(run)
            if log:
                axes.set_yscale("log")
        shown = [lines[at] for at in labels]
        canvas.legend(handles=shown, loc="outside upper center", ncols=min(len(shown), 6))
        canvas.supxlabel("layer (0 = bottom)", fontsize=9)
        canvas.supylabel(label, fontsize=9)
        return canvas

    return draw


def _heat_maps(column: str, label: str) -> Callable:
    """Layer x step, one panel a run, log colour on one scale for all."""

    def draw(table: Table) -> Canvas:
        canvas, panels = _panels(table, share=False)
        values = _column(table, column)
        positive = values[np.isfinite(values) & (values > 0)]
        # the lowest per cent is far below the rest in collapsed runs: the colour bar says so
        low = float(np.percentile(positive, 1))
        norm = LogNorm(low, positive.max())
        image: Any = None
        for axes, (run, rows) in panels:
            steps = sorted({row["step"] for row in rows})
            depth = 1 + max(row["layer"] for row in rows)
            grid = np.full((depth, len(steps)), np.nan)
            for row in rows:
                grid[row["layer"], steps.index(row["step"])] = row[column]
            image = axes.imshow(
                np.maximum(grid, low), norm=norm, cmap="viridis", aspect="auto",
                origin="lower", interpolation="nearest",
            )  # fmt: skip
            shown = np.unique(np.linspace(0, len(steps) - 1, 4).round().astype(int))
            axes.set_xticks(shown, [str(steps[i]) for i in shown])
            axes.set_title(run)
        canvas.colorbar(
            image, ax=[axes for axes, _ in panels], label=label, extend="min", aspect=40
        )
        canvas.supxlabel("step (one column a probe: not to scale)", fontsize=9)
        canvas.supylabel("layer (0 = bottom)", fontsize=9)
        return canvas

    return draw


def _draw_matrices(table: Table) -> Canvas:
    canvas, panels = _panels(table)
    for i, (axes, (run, rows)) in enumerate(panels):
        for j, (kind, here) in enumerate(frames.by(rows, "matrix")):
            axes.plot(
                _column(here, "layer"), _column(here, "gradient"), label=kind if i == 0 else None,
                marker=MARKERS[j], markevery=(2 * j, 12), markersize=3,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_title(run)
    canvas.legend(loc="outside upper center", ncols=6)
    canvas.supxlabel("layer (0 = bottom)", fontsize=9)
    canvas.supylabel("gradient norm of each matrix, step 0", fontsize=9)
    return canvas


def _draw_skip(table: Table) -> Canvas:
    canvas, panels = _panels(table)
    lines = (
        ("jacobian_to_end", "full Jacobian", "-", ""),
        ("skip_gain", "skip path, measured", "-", "s"),
        ("skip_gain_predicted", "skip path, product of norm factors", ":", ""),
    )
    for i, (axes, (run, rows)) in enumerate(panels):
        for column, label, dash, marker in lines:
            axes.plot(
                _column(rows, "layer"), _column(rows, column), dash, marker=marker, markevery=12,
                markersize=3, label=label if i == 0 else None,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_title(run)
    canvas.legend(loc="outside upper center", ncols=3)
    canvas.supxlabel("layer (0 = bottom)", fontsize=9)
    canvas.supylabel("norm from this layer to the end, step 0", fontsize=9)
    return canvas


def _draw_update_ratio(table: Table) -> Canvas:
    canvas, panels = _panels(table)
    for i, (axes, (run, rows)) in enumerate(panels):
        depths = frames.by(rows, "layer")
        names = ("bottom", "middle", "top") if len(depths) == 3 else ("bottom", "top")
        for j, (_, here) in enumerate(depths):
            axes.plot(
                _column(here, "step"), _column(here, "update_ratio"), marker=MARKERS[j],
                markersize=2.5, label=f"{names[j]} layer" if i == 0 else None,
            )  # fmt: skip
        axes.set_yscale("log")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_title(run)
    canvas.legend(loc="outside upper center", ncols=3)
    canvas.supxlabel("step", fontsize=9)
    canvas.supylabel("norm of update / norm of weights", fontsize=9)
    return canvas


# -------------------------------------------------------------------------------------- pieces


def _panels(table: Table, share: bool = True):
    """A grid of panels, at most four a row, one for each run: [(axes, (run, rows))]."""
    runs = list(frames.by(table, "run"))
    columns = min(4, len(runs))
    rows = -(-len(runs) // columns)
    canvas, grid = plt.subplots(
        rows, columns, figsize=(WIDTH, 0.75 + 1.3 * rows), squeeze=False, sharex=share,
        sharey=share,
    )  # fmt: skip
    flat = list(grid.flat)
    for axes in flat[len(runs) :]:
        axes.remove()
    return canvas, list(zip(flat, runs, strict=False))


def _key(row: dict) -> tuple[str, int]:
    return row["run"], row["step"]


def _column(rows: Table, name: str) -> np.ndarray:
    return np.array([row[name] for row in rows], float)


FIGURES = [
    Figure("loss", "Loss", frames.loss, _draw_loss, sentences.loss, all_seeds=True),
    Figure(
        "jacobian",
        "Jacobian norm from each layer to the end",
        _only("jacobian_to_end", "jacobian_to_end_se"),
        _layer_curves("jacobian_to_end", "Jacobian norm to the end", error="jacobian_to_end_se"),
        sentences.jacobian,
    ),
    Figure(
        "skip_path",
        "Skip path and full Jacobian",
        _skip_at_first_step,
        _draw_skip,
        sentences.skip_path,
    ),
    Figure(
        "similarity",
        "Token similarity",
        _only("similarity"),
        _layer_curves("similarity", "mean cosine between positions", log=False),
        sentences.similarity,
    ),
    Figure(
        "jacobian_map",
        "Jacobian norm to the end, layer by step",
        _every_step("jacobian_to_end"),
        _heat_maps("jacobian_to_end", "Jacobian norm to the end"),
        sentences.jacobian_map,
    ),
    Figure(
        "block_map",
        "Jacobian norm of each block, layer by step",
        _every_step("jacobian_of_block"),
        _heat_maps("jacobian_of_block", "Jacobian norm of the block"),
        sentences.block_map,
    ),
    Figure(
        "stream_gradient",
        "Stream gradients",
        _only("stream_gradient"),
        _layer_curves("stream_gradient", "norm of d loss / d stream"),
        sentences.stream_gradient,
    ),
    Figure(
        "matrix_gradient",
        "Gradients of each matrix at initialization",
        _matrices_at_first_step,
        _draw_matrices,
        sentences.matrix_gradient,
    ),
    Figure(
        "norm_factor",
        "Norm factors",
        _only("norm_factor"),
        _layer_curves("norm_factor", "mean of gain / sigma in the block's norms"),
        sentences.norm_factor,
    ),
    Figure(
        "update_ratio",
        "How far each update moves the weights",
        _update_ratio,
        _draw_update_ratio,
        sentences.update_ratio,
    ),
    Figure("schedules", "Schedules", frames.schedules, _draw_schedules, sentences.schedules),
]
WITHOUT_PROBES = [figure for figure in FIGURES if figure.name in ("loss", "schedules")]
