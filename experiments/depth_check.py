"""Theory beside measurement at step 0, over depth and for every row of the placements table.

Claims C2, C4, C5 and C14: how branch shares, norm factors, the skip path, Jacobians, gradients and
the first update change with the number of blocks. Line: the mean field of normstudy/meanfield.py,
which runs the row's equation at infinite width; marker: the model at step 0, mean over seeds.

Command   make depth      or   python experiments/depth_check.py
Time      about 4 minutes on two CPU cores, nearly all of it compiling
Expect    runs/depth_check/depth_check.csv and .png, depth_slopes.csv, a table of exponents of L:
          the gradient of the last matrix, 0 where the skip path crosses a norm, -1/2 where not
          (Xiong et al.); the first update of DeepNet's matrices, 0 by SGD and 1/2 by sign, Adam's
          first step. With the norms' gains moving too, which beta does not scale, it grows by SGD
          as well. Post-norm's update grows faster than the papers' criterion, as about L^2 by SGD:
          its gradients and its changes are the same at all positions and add up.
          Over 192 blocks of width 64 the seeds of post-norm differ by factors: the mean field is of
          the mean square, the marker the geometric mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro
from jaxtyping import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import NullLocator

from normstudy import (
    cli,
    config,
    data,
    figures,
    frames,
    inits,
    meanfield,
    mesh,
    placements,
    probes,
    programs,
    runtime,
    tables,
    theory,
    train,
)
from normstudy.errors import UserError
from normstudy.frames import Table
from normstudy.model import Model
from normstudy.progress import say
from normstudy.roles import ROLES, role_of
from normstudy.trees import path_names


@dataclass(frozen=True)
class Options:
    """What to compare, and where to write it."""

    placements: tuple[str, ...] = ("pre", "post", "deepnorm", "keel")  # rows of the table
    depths: tuple[int, ...] = (6, 12, 24, 48, 96, 192)  # L, blocks
    seeds: int = 5  # initializations of each model; one gives no standard errors
    width: int = 64
    heads: int = 4
    ff: int = 256
    context: int = 32  # T, tokens
    batch: int = 2  # B, held-out sequences
    activation: Literal["gelu", "relu"] = "gelu"
    vectors: int = 4  # Rademacher vectors for each Jacobian norm
    corpus: str = "kjv"
    out: Path = Path("runs/depth_check")

    def __post_init__(self):
        if len(set(self.depths)) < 2:
            raise UserError(f"a slope needs two depths or more, not {self.depths}")
        for name in self.placements:
            if not meanfield.has_mean_field(placements.row(name)):
                raise UserError(f"{name} has no mean field to compare with")
        if self.seeds < 1:
            raise UserError(f"seeds must be at least 1, not {self.seeds}")


def run_of(options: Options, placement: str, layers: int, seed: int = 0) -> config.Run:
    """The run whose step 0 is looked at."""
    return config.override(
        config.Run(), placement=placement, layers=layers, seed=seed, width=options.width,
        heads=options.heads, ff=options.ff, context=options.context, batch=options.batch,
        probe_batch=options.batch, activation=options.activation, vectors=options.vectors,
        corpus=options.corpus,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- the frame

BLOCKS = "function_update_with_norms"  # gains and biases of the norms move too: no prediction
COSINES = ("similarity",)


gradients = jax.jit(jax.grad(programs.token_loss))  # (model, batch) -> a tree like the model


@jax.jit
def first_step(model: Model, batch: Array, gradients: Model) -> dict[str, Array]:
    """Change of x_L and of the logits by one step at step 0, relative, per unit learning rate.

    In the limit of a small rate: the derivative along the step, so that no step size is chosen and
    nothing saturates. Moved are the matrices of the branches, and, where the name says so, the
    norms of the blocks as well.
    """
    x0 = model.start(batch[:, :-1])

    def outputs(model):
        top = model.stack(x0)[0]
        return top, model.read(top)

    (top, logits), along = jax.linearize(outputs, model)
    found = {}
    for name, step in (("sgd", lambda g: -g), ("sign", lambda g: -jnp.sign(g))):
        moved_top, moved_logits = along(_where(_is_branch_matrix, step, gradients))
        found[f"function_update/{name}"] = _relative(moved_top, top)
        found[f"logit_update/{name}"] = _relative(moved_logits, logits)
        found[f"{BLOCKS}/{name}"] = _relative(along(_where(_is_in_block, step, gradients))[0], top)
    return found


def measured(run: config.Run) -> dict[str, np.ndarray]:
    """What the probes and the first step see of the model at step 0, by the names of the logs."""
    compiled, devices = programs.of(run)
    feed = data.feed(run)
    batch = mesh.put_batch(devices, feed.probe_batch)
    # not by the compiled init, though bit for bit the same: this way all placements share its parts
    model = Model(run.model, programs.standard_deviations(run), jax.random.key(run.seed))
    return jax.device_get(look(compiled, model, batch, feed.unigram, train.probe_key(run, 0)))


def look(compiled: programs.Programs, model: Model, batch: Array, unigram: Any, key: Array) -> dict:
    """All measurements of one model, on the device."""
    step_0 = gradients(model, batch)
    return (
        compiled.measure(model, batch, jnp.asarray(unigram), key)
        | probes.by_layer("gradient", step_0)
        | first_step(model, batch, step_0)
    )


def predicted(run: config.Run) -> dict[str, Any]:
    """What the mean field says of the same model, on the same tokens."""
    stds = programs.standard_deviations(run)
    return meanfield.predict(run.model, stds, data.feed(run).probe_batch)


def headline(values: dict[str, Any]) -> dict[str, float]:
    """One number a quantity: from the bottom to the end, at the top, or over the upper half."""
    found = {}
    for name, value in values.items():
        layers = np.atleast_1d(np.asarray(value, float))
        if name in ("jacobian_to_end", "skip_gain"):
            found[name] = float(layers[0])
        elif name.startswith(("branch_share", "norm_factor")):  # of single blocks they fluctuate
            found[name] = float(np.mean(layers[len(layers) // 2 :]))
        else:
            found[name] = float(layers[-1])
    gradient = values["stream_gradient"]
    found["stream_gradient_bottom_over_top"] = float(gradient[0] / gradient[-1])
    return found


def frame(options: Options) -> Table:
    """One row per depth, placement and quantity: predicted, measured, standard error over seeds."""
    arms = [(layers, name) for layers in options.depths for name in options.placements]
    began, table = time.monotonic(), []
    for i, (layers, name) in enumerate(arms):
        runs = [run_of(options, name, layers, seed) for seed in range(options.seeds)]
        theirs = [headline(measured(run)) for run in runs]
        ours = headline(predicted(runs[0]))
        for quantity in (*ours, f"{BLOCKS}/sgd", f"{BLOCKS}/sign"):
            mean, se = _over_seeds(quantity, np.array([of_seed[quantity] for of_seed in theirs]))
            table.append(
                {"quantity": quantity, "placement": name, "L": layers,
                 "predicted": ours.get(quantity), "measured": mean, "se": se}
            )  # fmt: skip
        left = (time.monotonic() - began) / (i + 1) * (len(arms) - i - 1)
        say(f"[{i + 1}/{len(arms)}] {name}, L = {layers} (about {left:.0f} s left)")
    return table


def _over_seeds(quantity: str, values: np.ndarray) -> tuple[float, float | None]:
    """(mean, its standard error); the error is None for one seed or a mean of 0.

    The geometric mean, but for cosines: the others are products over the depth, whose logarithms
    scatter evenly. Where they scatter widely it lies below the mean square that theory gives.
    """
    if quantity in COSINES:
        mean, spread = float(np.mean(values)), np.std(values, ddof=1) if len(values) > 1 else None
    elif np.all(values > 0):
        mean = float(np.exp(np.mean(np.log(values))))
        spread = mean * np.std(np.log(values), ddof=1) if len(values) > 1 else None
    else:
        mean, spread = 0.0, None
    return mean, None if spread is None else float(spread / np.sqrt(len(values)))


# --------------------------------------------------------------------------------- the slopes

POWERS = (
    "rms", "jacobian_to_end", "stream_gradient", "stream_gradient_bottom_over_top",
    "gradient/mlp.down", "function_update/sgd", "function_update/sign", f"{BLOCKS}/sgd",
    f"{BLOCKS}/sign", "logit_update/sgd", "logit_update/sign",
)  # fmt: skip


def slopes(table: Table, options: Options) -> Table:
    """Exponents p of L^p, fitted over all depths: closed form where there is one, mean field,
    measured and its standard error."""
    found = []
    for quantity, of_quantity in frames.by(table, "quantity"):
        if quantity not in POWERS:
            continue
        for placement, rows in frames.by(of_quantity, "placement"):
            depths, theirs, ours, errors = (
                np.array([row[column] for row in rows], float)
                for column in ("L", "measured", "predicted", "se")
            )
            with np.errstate(divide="ignore", invalid="ignore"):  # branches that start at 0
                slope, se = theory.log_slope(depths, theirs, errors)
                expected, _ = theory.log_slope(depths, ours)
            found.append(
                {
                    "quantity": quantity,
                    "placement": placement,
                    "closed form": closed_form(quantity, placement, options),
                    "mean field": _rounded(expected),
                    "measured": _rounded(slope),
                    "se": _rounded(se),
                }
            )
    return found


def closed_form(quantity: str, placement: str, options: Options) -> float | None:
    """The exponent that the papers give (theory.py), over the same depths; None where none does."""
    place = placements.row(placement)
    on_skip_path = bool(place.skip_norms)
    laws: dict[str, Callable[..., float]] = {
        "gradient/mlp.down": lambda n, a, v, w: theory.top_gradient(n, a, v, w, on_skip_path),
        "stream_gradient": lambda n, a, v, w: 1 / theory.top_norm_std(n, a, v, w, False),
        "rms": lambda n, a, v, w: theory.top_norm_std(n, a, v, w, False),
    }
    if on_skip_path:
        laws |= {
            "stream_gradient": lambda n, a, v, w: 1.0,  # x_L is what that norm puts out
            "rms": lambda n, a, v, w: 1.0,
            "function_update/sgd": theory.sgd_criterion,
            "function_update/sign": theory.sign_criterion,
        }
    if quantity not in laws:
        return None
    values = []
    for layers in options.depths:
        run = run_of(options, placement, layers)
        gains = inits.gains_over_xavier(run.model, programs.standard_deviations(run))
        alpha = float(np.ravel(place.constants(layers).alpha)[-1])  # of the top
        values.append(laws[quantity](layers, alpha, gains["v"], gains["o"]))
    return _rounded(theory.log_slope(np.array(options.depths), np.array(values))[0])


# --------------------------------------------------------------------------------- the figure

PER_STEP = "|Δ$x_L$| / |$x_L$| per unit learning rate"
PANELS = (  # title, what the axis shows, pattern of the quantities
    ("branch share, attention", "Var f / Var αx, upper half", "branch_share/attn"),
    ("norm factor, MLP", "1 / σ, upper half", "norm_factor_*/mlp"),
    ("stream at the top", "root mean square of $x_L$", "rms"),
    ("token similarity at the top", "mean cosine between positions", "similarity"),
    ("skip path", "gain from $x_0$ to $x_L$", "skip_gain"),
    ("full Jacobian", "norm from $x_0$ to $x_L$; identity: 1", "jacobian_to_end"),
    ("gradient of the last matrix", "norm, nats per unit weight", "gradient/mlp.down"),
    ("stream gradient at the top", "norm, nats per unit stream", "stream_gradient"),
    ("stream gradient", "at $x_0$ / at $x_L$", "stream_gradient_bottom_over_top"),
    ("SGD step, matrices", PER_STEP, "function_update/sgd"),
    ("sign step, matrices", PER_STEP, "function_update/sign"),
    ("SGD step, norms too (not predicted)", PER_STEP, f"{BLOCKS}/sgd"),
)


def draw(table: Table) -> Canvas:
    """Small multiples against L: the mean field as lines, the model as markers with two errors."""
    canvas, grid = plt.subplots(4, 3, figsize=(6.6, 7.6), sharex=True)
    for axes, (title, unit, pattern) in zip(grid.flat, PANELS, strict=True):
        _draw_panel(axes, [row for row in table if fnmatchcase(row["quantity"], pattern)])
        axes.set(xscale="log", yscale="linear" if pattern in COSINES else "log")
        axes.set_title(f"{title}\n{unit}")
    depths = sorted({row["L"] for row in table})
    grid[0, 0].set_xticks(depths, [str(depth) for depth in depths])
    grid[0, 0].xaxis.set_minor_locator(NullLocator())
    handles, labels = grid[0, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside upper center", ncols=6)
    canvas.supxlabel("L, blocks   (line: mean field; marker: model at step 0, 2 s.e.)", fontsize=9)
    return canvas


def _draw_panel(axes: Axes, table: Table) -> None:
    for i, (_, of_placement) in enumerate(frames.by(table, "placement")):
        placement = of_placement[0]["placement"]
        for _, rows in frames.by(of_placement, "quantity"):
            depths, theirs, se, ours = (
                np.array([row[column] for row in rows], float)
                for column in ("L", "measured", "se", "predicted")
            )
            theirs[theirs == 0] = np.nan  # underflowed
            factor = np.exp(2 * np.nan_to_num(se / theirs))
            axes.errorbar(
                depths, theirs, (theirs - theirs / factor, theirs * factor - theirs),
                fmt=figures.MARKERS[i % len(figures.MARKERS)], color=f"C{i % 10}", ms=4, mfc="none",
                lw=0.8, label=placement,
            )  # fmt: skip
            axes.plot(depths, ours, color=f"C{i % 10}")


def write(table: Table, folder: Path) -> None:
    """depth_check.csv and depth_check.png; the same table gives the same bytes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "depth_check.csv").write_text(frames.to_csv(table), encoding="utf-8")
        with plt.rc_context(figures.STYLE):
            canvas = draw(table)
            canvas.savefig(folder / "depth_check.png", metadata={"Software": None})
            plt.close(canvas)
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None


def main(argv: Sequence[str]) -> None:
    options = tyro.cli(Options, args=list(argv), description=__doc__)
    runtime.start(
        cpu_devices=1
    )  # models this small: what costs time is compiling, and it costs least
    table = frame(options)
    write(table, options.out)
    exponents = slopes(table, options)
    (options.out / "depth_slopes.csv").write_text(frames.to_csv(exponents), encoding="utf-8")
    print(tables.text(exponents))
    say(f"written: depth_check.csv, depth_slopes.csv and depth_check.png in {options.out}")


# ------------------------------------------------------------------------------------- pieces


def _is_in_block(path: tuple) -> bool:
    return path_names(path)[0] == "layers"


def _is_branch_matrix(path: tuple) -> bool:
    return _is_in_block(path) and ROLES[role_of(path_names(path))].branch


def _where(chosen: Callable[[tuple], bool], step: Callable[[Array], Array], gradients: Model):
    """The step in the chosen leaves, zero in the others."""
    return jax.tree_util.tree_map_with_path(
        lambda path, g: step(g) if chosen(path) else jnp.zeros_like(g), gradients
    )


def _relative(change: Array, of: Array) -> Array:
    return jnp.linalg.norm(change) / jnp.linalg.norm(of)


def _rounded(value: float) -> float | None:
    return round(value, 2) + 0.0 if np.isfinite(value) else None  # no minus zero


if __name__ == "__main__":
    cli.guarded(main)
