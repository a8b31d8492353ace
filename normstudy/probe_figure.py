"""The picture of a probe: quantities against the layer, against the step, or as layer x step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import LogNorm, Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from normstudy import frames, quantities
from normstudy.errors import UserError
from normstudy.figures import MARKERS, STYLE, WIDTH
from normstudy.measured import Measured, long_table
from normstudy.roles import BRANCH_MATRICES

KINDS = (".png", ".pdf", ".svg")
FEW = 8  # layers that are drawn as lines over the steps; more become a heat map
SPAN = 20  # between the least and the largest value, from which on an axis is logarithmic
DASHES = ("-", "--", ":", "-.", (0, (4, 1, 1, 1, 1, 1)))
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
    bases = list(dict.fromkeys(quantities.split(name)[0] for name in names))
    along = len(found) >= MANY and len({own.label.split(" step ")[0] for own in found}) == 1
    with plt.rc_context(STYLE):
        columns = min(3, len(bases))
        rows = -(-len(bases) // columns)
        canvas, grid = plt.subplots(
            rows, columns, figsize=(WIDTH * columns / 2.4, 0.8 + 1.75 * rows), squeeze=False
        )
        for axes, base in zip(grid.flat, bases, strict=False):
            parts = _parts(found[0], base)
            if not along:
                _against_layer(axes, found, base)
            elif len(found[0].layers) <= FEW:
                _against_step(axes, found, parts)
            else:
                _layer_by_step(canvas, axes, found, parts)
            quantity = quantities.of(base)
            unit = "" if quantity.unit == "1" else f" ({quantity.unit})"
            bound = ", lower bound" if quantity.kind == "lower bound" else ""
            part = f", {quantities.split(parts[0])[1]}" if along and len(parts) > 1 else ""
            axes.set_title(f"{base}{part}{unit}{bound}")
        for axes in list(grid.flat)[len(bases) :]:
            axes.remove()
        if along:  # every layer once, also one that only some panels have
            pairs = [axes.get_legend_handles_labels() for axes in canvas.axes]
            layers = {label: line for pair in pairs for line, label in zip(*pair, strict=True)}
            labels = sorted(layers, key=lambda label: int(label.split()[-1]))
            handles = [layers[label] for label in labels]
        else:
            handles = [Line2D([], [], color=f"C{i % 10}") for i in range(len(found))]
            labels = [own.label for own in found]
        if len(labels) > 1:
            canvas.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 4))
        else:
            title = labels[0] if labels else found[0].label.split(" step ")[0]
            canvas.suptitle(title, fontsize=9)
        if along and len(found[0].layers) > FEW:
            canvas.supxlabel("step (one column a checkpoint: not to scale)", fontsize=9)
            canvas.supylabel("layer (0 = bottom)", fontsize=9)
        else:
            canvas.supxlabel("step" if along else "layer (0 = bottom)", fontsize=9)
        try:
            canvas.savefig(path)
            path.with_suffix(".csv").write_text(frames.to_csv(long_table(found)), "utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error.strerror}") from None
        finally:
            plt.close(canvas)


def _against_layer(axes: Any, found: list[Measured], base: str) -> None:
    """One colour a checkpoint, one dash a part of the block; of one checkpoint, a colour a part."""
    drawn = []
    for i, own in enumerate(found):
        shown = _shown(_parts(own, base), len(found))
        for j, name in enumerate(shown):
            n = i if len(found) > 1 else j
            layers, at = np.array(own.by_layer(name)).T
            value = own.values[name][at]
            drawn.append(value)
            axes.plot(
                layers, value, f"C{n % 10}", ls=DASHES[j % len(DASHES)],
                marker=MARKERS[n % len(MARKERS)], markevery=max(1, len(layers) // 6), ms=3,
            )  # fmt: skip
            if name in own.errors:
                spread = 2 * own.errors[name][at]
                low = np.maximum(value - spread, value * 1e-2)
                axes.fill_between(layers, low, value + spread, color=f"C{n % 10}", alpha=0.25, lw=0)
        if len(shown) > 1 and i == 0:
            parts = [quantities.split(name)[1] for name in shown]
            axes.legend(axes.get_lines(), parts, fontsize=6, handlelength=2.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _scale(axes, np.concatenate(drawn))


def _parts(own: Measured, base: str) -> list[str]:
    """Names of one quantity that have layers, e.g. for each sublayer."""
    return [name for name in own.layered() if quantities.split(name)[0] == base]


def _shown(parts: list[str], checkpoints: int) -> list[str]:
    """The parts that are drawn: of a block's matrices no vectors, and two beside other curves."""
    matrices = [name for name in parts if name.rpartition(".")[2] in BRANCH_MATRICES]
    if not matrices:
        return parts
    few = [name for name in matrices if name.endswith((".q", ".down"))]
    return matrices if checkpoints == 1 else few


def _against_step(axes: Any, found: list[Measured], parts: list[str]) -> None:
    """One line a layer, over the checkpoints of a run."""
    steps = [own.step for own in found]
    shades = plt.get_cmap("viridis")
    layers = [*found[0].layers, found[0].run.model.layers]  # a layer looks alike in all panels
    everything = []
    for layer, at in found[0].by_layer(parts[0]):
        n = layers.index(layer)
        value = np.array([own.values[parts[0]][at] for own in found])
        everything.append(value)
        axes.plot(
            steps, value, color=shades(0.9 * n / (len(layers) - 1)),
            marker=MARKERS[n % len(MARKERS)], ms=3, label=f"layer {layer}",
        )  # fmt: skip
    axes.set_xscale("symlog", linthresh=1)
    _scale(axes, np.concatenate(everything))


def _layer_by_step(canvas: Any, axes: Any, found: list[Measured], parts: list[str]) -> None:
    """A heat map, one column a checkpoint."""
    places = found[0].by_layer(parts[0])
    grid = np.array([[own.values[parts[0]][at] for own in found] for _, at in places])
    positive = grid[np.isfinite(grid) & (grid > 0)]
    log = positive.size > 0 and positive.max() > SPAN * positive.min()
    norm = LogNorm(positive.min(), positive.max()) if log else Normalize()
    image = axes.imshow(
        grid, norm=norm, cmap="viridis", aspect="auto", origin="lower", interpolation="nearest"
    )
    shown = _spread(len(found), 4)
    axes.set_xticks(shown, [str(found[i].step) for i in shown])
    shown = _spread(len(places), 5)
    axes.set_yticks(shown, [str(places[i][0]) for i in shown])
    canvas.colorbar(image, ax=axes)


def _spread(size: int, most: int) -> list[int]:
    """At most so many of the indices 0..size-1, the first and the last among them."""
    return sorted({round(i) for i in np.linspace(0, size - 1, most)})


def _scale(axes: Any, values: np.ndarray) -> None:
    """A log axis where the positive values span more than a factor SPAN and none is negative."""
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size and positive.max() > SPAN * positive.min() and not (values < 0).any():
        axes.set_yscale("log")
