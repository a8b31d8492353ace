"""Figures of the paper, from the tables of evidence.py and ledger.py. No accelerator, no training.

One message each; every seed is seen, geometric means on logarithmic axes are drawn over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from normstudy import evidence, frames, ledger
from normstudy.errors import UserError
from normstudy.figures import STYLE, WIDTH
from normstudy.frames import Table
from normstudy.phase_figure import COLOURS, ORDER

# Okabe & Ito's, told apart by colour-blind people; each recipe has a dash and a marker as well
INK = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: Any = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = "osD^vP*"
PAPER: Any = STYLE | {"axes.titlesize": 8, "legend.fontsize": 7, "axes.labelsize": 8}

Tables = dict[str, Table]


class Picture(NamedTuple):
    """File name, the tables it needs, the drawing."""

    name: str
    needs: tuple[str, ...]
    draw: Callable[[Tables], Canvas | None]  # None: they have no rows for it


def draw_all(data: Path, out: Path, some: bool = False) -> list[Path]:
    """OUT/NAME.pdf and .png for every figure whose tables lie in DATA; the same tables give the
    same bytes. Raises UserError where none does, unless some: None is enough then."""
    drawn = []
    for picture in PICTURES:
        if not all((data / f"{name}.csv").exists() for name in picture.needs):
            continue
        tables = {name: evidence.read(data, name) for name in picture.needs}
        with plt.rc_context(PAPER):
            canvas = picture.draw(tables)
            if canvas is None:
                continue
            out.mkdir(parents=True, exist_ok=True)
            drawn.append(out / f"{picture.name}.pdf")
            canvas.savefig(drawn[-1], metadata={"CreationDate": None})
            canvas.savefig(drawn[-1].with_suffix(".png"), metadata={"Software": None})
            plt.close(canvas)
    if not drawn and not some:
        raise UserError(f"{data} has no tables of experiments/claims.py: there is nothing to draw")
    return drawn


# ----------------------------------------------------------------------------------- drawings


def draw_grid(tables: Tables) -> Canvas:
    """Recipe by learning rate: what became of the seeds."""
    rows = [row for row in tables["runs"] if row["recipe"] in _recipes(tables["runs"])]
    recipes, rates = _recipes(rows), sorted({row["lr"] for row in rows})
    canvas, axes = plt.subplots(figsize=(WIDTH, 0.9 + 0.28 * len(recipes)))
    for y, recipe in enumerate(recipes):
        for x, lr in enumerate(rates):
            words = [r["outcome"] for r in rows if r["recipe"] == recipe and r["lr"] == lr]
            if not words:
                continue
            left = float(x)
            for word in ORDER:
                width = words.count(word) / len(words)
                axes.add_patch(Rectangle((left, y), width, 1, fc=COLOURS[word], lw=0))
                left += width
            axes.add_patch(Rectangle((x, y), 1, 1, fill=False, ec="white", lw=1))
            k = sum(word in ledger.TRAINS for word in words)
            axes.text(x + 0.5, y + 0.5, f"{k}/{len(words)}", ha="center", va="center", fontsize=7)
    axes.set(xlim=(0, len(rates)), ylim=(len(recipes), 0), xlabel="peak learning rate")
    axes.set_xticks([x + 0.5 for x in range(len(rates))], [f"{lr:g}" for lr in rates])
    axes.set_yticks([y + 0.5 for y in range(len(recipes))], recipes)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    found = [word for word in ORDER if any(row["outcome"] == word for row in rows)]
    canvas.legend(
        handles=[Patch(fc=COLOURS[word], label=word) for word in found],
        loc="outside upper center", ncols=len(found),
    )  # fmt: skip
    return canvas


def draw_loss(tables: Tables) -> Canvas:
    """Loss curves, a panel for each of the two rates."""
    rows = tables["curves"]
    rates, recipes = sorted({row["lr"] for row in rows}), _recipes(rows)
    canvas, grid = plt.subplots(1, len(rates), figsize=(WIDTH, 2.6), sharey=True, squeeze=False)
    h1 = tables["runs"][0]["h1"]
    for axes, lr in zip(grid.flat, rates, strict=True):
        here = [row for row in rows if row["lr"] == lr]
        for recipe in recipes:
            i = ledger.RECIPES.index(recipe)
            of_recipe = [row for row in here if row["recipe"] == recipe]
            for _, own in frames.by(of_recipe, "seed"):
                axes.plot(*_xy(own, "step", "loss"), c=INK[i], ls=DASHES[i], lw=0.8)
        axes.axhline(h1, color="grey", lw=0.6)
        axes.set(title=f"learning rate {lr:g}", xlabel="update", ylim=(2.0, 4.5))
    grid.flat[0].set_ylabel("training loss (nats)")
    canvas.legend(
        handles=_handles(recipes, " " * len(MARKERS)), loc="outside upper center", ncols=4
    )
    return canvas


def draw_start(tables: Tables) -> Canvas:
    """By layer at step 0: skip path and whole Jacobian; similarity; gradient of the queries."""
    panels = (
        ("jacobian_to_end", "Jacobian norm, layer to end", True),
        ("skip_gain", "the skip path alone", True),
        ("similarity", "token similarity", False),
        ("gradient/attn.q", "gradient norm of queries", True),
    )
    rows = [r for r in tables["layers"] if r["step"] == 0 and math.isclose(r["lr"], ledger.USUAL)]
    recipes = [name for name in _recipes(rows) if "warmup" not in name]
    canvas, grid = plt.subplots(2, 2, figsize=(WIDTH, 3.8), sharex=True)
    for axes, (column, label, log) in zip(grid.flat, panels, strict=True):
        for place, recipe in enumerate(recipes):
            i = ledger.RECIPES.index(recipe)
            own = [row for row in rows if row["recipe"] == recipe]
            _spread(axes, own, "layer", column, INK[i], DASHES[i], log)
            if f"{column}_se" in own[0]:
                _probe_error(axes, own, column, INK[i], MARKERS[i], place)
        axes.set(title=label, yscale="log" if log else "linear")
    canvas.supxlabel("layer (0 = bottom)", fontsize=8)
    canvas.legend(handles=_handles(recipes), loc="outside upper center", ncols=4)
    return canvas


def draw_collapse(tables: Tables) -> Canvas:
    """Along the first updates: what changes while post-norm stops learning."""
    panels = (
        ("jacobian_bottom", "Jacobian norm, $x_0$ to $x_L$", True),
        ("similarity", "token similarity of $x_L$", False),
        ("function_update", "change of $x_L$ by an update", True),
        ("query_share", "queries' and keys' part of the gradient", True),
    )
    rows = [r for r in tables["probes"] if math.isclose(r["lr"], ledger.USUAL)]
    recipes = [n for n in _recipes(rows) if "warmup" not in n]
    canvas, grid = plt.subplots(2, 2, figsize=(WIDTH, 3.8), sharex=True)
    for axes, (column, label, log) in zip(grid.flat, panels, strict=True):
        for recipe in recipes:
            i = ledger.RECIPES.index(recipe)
            own = [row for row in rows if row["recipe"] == recipe and row[column] is not None]
            _spread(axes, own, "step", column, INK[i], DASHES[i], log, MARKERS[i])
        axes.set(title=label, yscale="log" if log else "linear")
        axes.set_xscale("symlog", linthresh=1)
        axes.set_xticks([0, 1, 10, 100], ["0", "1", "10", "100"])
    canvas.supxlabel("update", fontsize=8)
    canvas.legend(handles=_handles(recipes), loc="outside upper center", ncols=4)
    return canvas


def draw_depth(tables: Tables) -> Canvas | None:
    """Over depth at step 0: a power of L in pre-norm, none in post-norm."""
    panels = (
        ("gradient_ratio", "stream gradient, bottom over top"),
        ("top_gradient", "gradient norm of the last matrix"),
    )
    found = {
        name: [
            row | {"layers": int(row["recipe"].split()[-2])}
            for row in tables["probes"]
            if row["recipe"].startswith(f"start: {name}, ") and row["recipe"].endswith(" blocks")
        ]
        for name in ("pre", "post")
    }
    if not all(found.values()):
        return None
    canvas, grid = plt.subplots(1, 2, figsize=(WIDTH, 2.3))
    for axes, (column, label) in zip(grid.flat, panels, strict=True):
        for i, own in enumerate(found.values()):
            _spread(axes, own, "layers", column, INK[i], DASHES[i], True, MARKERS[i])
        axes.set(xscale="log", yscale="log", title=label, xlabel="depth $L$ (blocks)")
        ticks = sorted({row["layers"] for own in found.values() for row in own})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
    canvas.legend(handles=_handles(("pre", "post")), loc="outside upper center", ncols=2)
    return canvas


def draw_ablations(tables: Tables) -> Canvas | None:
    """Last loss of each change alone at 1e-3, every seed a point, the best on top."""
    rows = [
        row
        for row in tables["runs"]
        if not row["recipe"].startswith("start: ") and not row["schedule"].startswith("inverse")
        and (row["optimizer"] == "sgd" or math.isclose(row["lr"], ledger.USUAL))
        and row["steps"] == tables["runs"][0]["steps"]
    ]  # fmt: skip
    if not rows:
        return None
    groups = sorted(
        frames.by(rows, "recipe"),
        key=lambda own: np.median(np.nan_to_num([r["last_loss"] for r in own[1]], nan=np.inf)),
    )
    canvas, axes = plt.subplots(figsize=(WIDTH, 0.7 + 0.135 * len(groups)))
    for y, (_, own) in enumerate(groups):
        for row in own:
            loss = row["last_loss"]
            axes.plot(
                loss if loss < 6.0 else 6.0, y, "o",  # nan is as far out as it gets
                ms=4, mfc=COLOURS[row["outcome"]], mec="black",
                mew=0.4,
            )  # fmt: skip
    h1 = tables["runs"][0]["h1"]
    axes.axvline(h1, color="grey", lw=0.6)
    axes.set_yticks(range(len(groups)), [name for name, _ in groups], fontsize=6.5)
    axes.set(ylim=(len(groups) - 0.5, -0.5), xlabel="last training loss (nats); line: $H_1$")
    found = [word for word in ORDER if any(row["outcome"] == word for row in rows)]
    canvas.legend(handles=_points(found), loc="outside upper center", ncols=len(found))
    return canvas


def draw_apart(tables: Tables) -> Canvas | None:
    """At step 0: what is left of a gradient on the skip path, how alike positions are, and what
    became of the run. A point a seed."""
    starts = {
        (row["recipe"], row["seed"]): row
        for row in tables["probes"]
        if row["step"] == 0 and math.isclose(row["lr"], ledger.USUAL) and row["skip_gain"]
    }
    runs = [row for row in ledger.pooled(tables["runs"]) if (row["recipe"], row["seed"]) in starts]
    if not runs:
        return None
    canvas, axes = plt.subplots(figsize=(WIDTH, 3.0))
    named: list[tuple[float, float]] = []
    axes.set(xscale="log", xlabel="left of a gradient on the skip path, top to bottom",
             ylabel="token similarity of $x_L$", ylim=(0, 1.12))  # fmt: skip
    groups = frames.by(runs, "recipe")
    for recipe, own in sorted(groups, key=lambda own: own[0] not in ledger.RECIPES):
        points = np.array(
            [[starts[recipe, r["seed"]][name] for name in ("skip_gain", "similarity")] for r in own]
        )
        for (x, y), row in zip(points, own, strict=True):
            axes.plot(x, y, "o", ms=4.5, mfc=COLOURS[row["outcome"]], mec="black", mew=0.4)
        x, y = float(np.exp(np.mean(np.log(points[:, 0])))), float(np.mean(points[:, 1]))
        if all(abs(math.log10(x / a)) > 1.2 or abs(y - b) > 0.07 for a, b in named):
            named.append((x, y))  # one name where several recipes lie together: the first's
            side = "right" if x > 1e-3 else "left"
            axes.annotate(recipe, (x, y), (-6 if side == "right" else 6, 5), fontsize=6,
                          textcoords="offset points", ha=side)  # fmt: skip
    words = [word for word in ORDER if any(row["outcome"] == word for row in runs)]
    canvas.legend(handles=_points(words), loc="outside upper center", ncols=len(words))
    return canvas


def draw_leads(tables: Tables) -> Canvas:
    """How well each quantity tells runs that will fail from runs that will train, by step: a cell
    each; what tells earliest on top, framed from where it leads."""
    rows = sorted(
        tables["leads"],
        key=lambda row: (_or_never(row["leads_from"]), -row["at_start"], row["what"]),
    )
    found = [dict(_areas(row)) for row in rows]
    steps = sorted({step for own in found for step in own})
    areas = np.array([[own.get(step, np.nan) for step in steps] for own in found])
    canvas, axes = plt.subplots(figsize=(WIDTH, 0.6 + 0.22 * len(rows)))
    axes.imshow(
        areas, cmap="PuOr", vmin=-0.5, vmax=1.5, aspect="auto"
    )  # light: there is text on it
    most = max(row["runs"] for row in rows)
    names = [row["what"] + (f" ({row['runs']} runs)" if row["runs"] < most else "") for row in rows]
    for y, row in enumerate(rows):
        for x in range(len(steps)):
            if not np.isnan(areas[y, x]):
                axes.text(x, y, f"{areas[y, x]:.2f}", ha="center", va="center", fontsize=6)
        if row["leads_from"] is not None:
            first = steps.index(row["leads_from"])
            axes.add_patch(
                Rectangle((first - 0.5, y - 0.5), len(steps) - first, 1, fill=False, lw=1.2)
            )
    axes.set_xticks(range(len(steps)), [str(step) for step in steps])
    axes.set_yticks(range(len(rows)), names)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"update (median failure: {rows[0]['failure']:.0f})")
    return canvas


PICTURES = (
    Picture("grid", ("runs", "curves"), draw_grid),
    Picture("loss", ("runs", "curves"), draw_loss),
    Picture("start", ("layers",), draw_start),
    Picture("depth", ("runs", "probes"), draw_depth),
    Picture("collapse", ("probes", "curves"), draw_collapse),
    Picture("ablations", ("runs",), draw_ablations),
    Picture("apart", ("runs", "probes"), draw_apart),
    Picture("leads", ("leads",), draw_leads),
)


# -------------------------------------------------------------------------------------- pieces


def _xy(rows: Table, x: str, y: str) -> tuple[list, list]:
    return [row[x] for row in rows], [row[y] for row in rows]


def _points(words: Sequence[str]) -> list[Any]:
    """Outcomes, for a legend."""
    return [
        Line2D([], [], ls="", marker="o", ms=4, mfc=COLOURS[w], mec="black", mew=0.4, label=w)
        for w in words
    ]


def _areas(row: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, probability) of a row of leads.csv."""
    pairs = [part.split(":") for part in row["areas"].split()]
    return [(int(step), float(own)) for step, own in pairs]


def _or_never(step: int | None) -> float:
    return math.inf if step is None else float(step)


def _handles(names: Sequence[str], markers: str = MARKERS) -> list[Any]:
    """A recipe looks the same in every figure."""
    places = [ledger.RECIPES.index(name) for name in names]
    return [
        Line2D([], [], c=INK[i], ls=DASHES[i], marker=markers[i], ms=3.5, lw=1.2, label=name)
        for i, name in zip(places, names, strict=True)
    ]


def _spread(
    axes: Any, rows: Table, x: str, y: str, colour: str, dash: Any, log: bool, marker: str = ""
) -> None:
    """Every seed as a thin line, their mean as a thick one: geometric on a logarithmic axis."""
    for _, own in frames.by(rows, "seed"):
        axes.plot(*_xy(own, x, y), c=colour, lw=0.4, alpha=0.5)
    places = sorted({row[x] for row in rows})
    means = []
    for place in places:
        values = np.array([row[y] for row in rows if row[x] == place], float)
        if log:
            positive = values[values > 0]
            means.append(np.exp(np.mean(np.log(positive))) if len(positive) else np.nan)
        else:
            means.append(np.mean(values))
    axes.plot(places, means, c=colour, ls=dash, lw=1.3, marker=marker, ms=3.5)


def _probe_error(axes: Any, rows: Table, column: str, colour: str, marker: str, place: int) -> None:
    """Two standard errors of the first seed's estimate, at a few layers; not the spread."""
    seed = min(row["seed"] for row in rows)
    own = [row for row in rows if row["seed"] == seed][2 * place :: 12]  # beside one another
    low = [min(2 * row[f"{column}_se"], 0.99 * row[column]) for row in own]
    high = [2 * row[f"{column}_se"] for row in own]
    axes.errorbar(
        *_xy(own, "layer", column), yerr=(low, high), fmt=marker, c=colour, ms=3, elinewidth=1,
        capsize=2,
    )  # fmt: skip


def _recipes(rows: Table) -> list[str]:
    """Those of the grid, in its order."""
    present = {row["recipe"] for row in rows}
    return [name for name in ledger.RECIPES if name in present]
