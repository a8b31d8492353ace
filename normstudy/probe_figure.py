"""The picture of a probe: quantities against the layer, against the step, or as layer x step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm, Normalize

from normstudy import frames, quantities
from normstudy.errors import UserError
from normstudy.figures import MARKERS, STYLE, WIDTH
from normstudy.measured import Measured, long_table

KINDS = (".png", ".pdf", ".svg")
FEW = 8  # layers that are drawn as lines over the steps; more become a heat map
MANY = 3  # checkpoints of one run, from which on the step has an axis of its own


def check(path: Path) -> None:
    """Raises UserError for a file that could not be drawn, before anything is measured."""
    if path.suffix not in KINDS:
        raise UserError(f"--figure {path}: give a name that ends in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise UserError(f"--figure {path}: the folder {path.parent} does not exist")


def draw(found: list[Measured], path: Path) -> None:
    """Write the picture, and beside it as .csv the numbers that it draws.

    Raises UserError when nothing measured has layers, or the file cannot be written.
    """
    names = found[0].layered()
    if not names:
        raise UserError("--figure: nothing that was measured has layers; ask for more by --what")
    bases = list(dict.fromkeys(name.split("/")[0] for name in names))
    along = len(found) >= MANY and len({own.label.split(" step ")[0] for own in found}) == 1
    with plt.rc_context(STYLE):
        columns = min(3, len(bases))
        rows = -(-len(bases) // columns)
        canvas, grid = plt.subplots(
            rows, columns, figsize=(WIDTH * columns / 2.4, 0.8 + 1.75 * rows), squeeze=False
        )
        for axes, base in zip(grid.flat, bases, strict=False):
            parts = [name for name in names if name.split("/")[0] == base]
            if not along:
                _against_layer(axes, found, parts)
            elif len(found[0].layers) <= FEW:
                _against_step(axes, found, parts)
            else:
                _layer_by_step(canvas, axes, found, parts)
            quantity = quantities.of(base)
            unit = "" if quantity.unit == "1" else f" ({quantity.unit})"
            bound = ", lower bound" if quantity.kind == "lower bound" else ""
            axes.set_title(f"{base}{unit}{bound}")
        for axes in list(grid.flat)[len(bases) :]:
            axes.remove()
        handles, labels = grid.flat[0].get_legend_handles_labels()
        if handles:
            canvas.legend(handles, labels, loc="outside upper center", ncols=min(len(handles), 4))
        canvas.supxlabel("step" if along else "layer (0 = bottom)", fontsize=9)
        try:
            canvas.savefig(path)
            path.with_suffix(".csv").write_text(frames.to_csv(long_table(found)), "utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        finally:
            plt.close(canvas)


def _against_layer(axes: Any, found: list[Measured], parts: list[str]) -> None:
    """One line a checkpoint; the parts of a block differ by their dashes."""
    for i, own in enumerate(found):
        for j, name in enumerate(parts):
            if name not in own.values:
                continue
            layers, at = np.array(own.by_layer(name)).T
            value = own.values[name][at]
            axes.plot(
                layers, value, f"C{i % 10}", ls=("-", "--", ":", "-.")[j % 4],
                marker=MARKERS[i % len(MARKERS)], markevery=max(1, len(layers) // 6), ms=3,
                label=own.label if j == 0 else None,
            )  # fmt: skip
            if name in own.errors:
                spread = 2 * own.errors[name][at]
                low = np.maximum(value - spread, value * 1e-2)
                axes.fill_between(layers, low, value + spread, color=f"C{i % 10}", alpha=0.25, lw=0)
            if len(parts) > 1 and i == 0:
                part = name.split("/")[1]
                axes.annotate(part, (layers[-1], value[-1]), fontsize=6, ha="right", va="bottom")
    _scale(axes, parts[0], np.concatenate([own.values[parts[0]] for own in found]))


def _against_step(axes: Any, found: list[Measured], parts: list[str]) -> None:
    """One line a layer, over the checkpoints of a run."""
    steps = [own.step for own in found]
    places = found[0].by_layer(parts[0])
    shades = plt.get_cmap("viridis")
    everything = []
    for n, (layer, at) in enumerate(places):
        value = np.array([own.values[parts[0]][at] for own in found])
        everything.append(value)
        axes.plot(
            steps, value, color=shades(0.9 * n / max(len(places) - 1, 1)),
            marker=MARKERS[n % len(MARKERS)], ms=3, label=f"layer {layer}",
        )  # fmt: skip
    if len(parts) > 1:
        axes.annotate(parts[0].split("/")[1], (0.02, 0.02), xycoords="axes fraction", fontsize=6)
    axes.set_xscale("symlog", linthresh=1)
    _scale(axes, parts[0], np.concatenate(everything))


def _layer_by_step(canvas: Any, axes: Any, found: list[Measured], parts: list[str]) -> None:
    """A heat map, one column a checkpoint."""
    places = found[0].by_layer(parts[0])
    grid = np.array([[own.values[parts[0]][at] for own in found] for _, at in places])
    positive = grid[np.isfinite(grid) & (grid > 0)]
    log = quantities.of(parts[0]).log and positive.size > 0
    norm = LogNorm(positive.min(), positive.max()) if log else Normalize()
    image = axes.imshow(
        grid, norm=norm, cmap="viridis", aspect="auto", origin="lower", interpolation="nearest"
    )
    shown = np.unique(np.linspace(0, len(found) - 1, 4).round().astype(int))
    axes.set_xticks(shown, [str(found[i].step) for i in shown])
    canvas.colorbar(image, ax=axes)


def _scale(axes: Any, name: str, values: np.ndarray) -> None:
    """A log axis where the quantity asks for one and has positive values."""
    if quantities.of(name).log and (values > 0).any():
        axes.set_yscale("log")
