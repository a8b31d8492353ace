"""A checkpoint under the probes: opened with the config beside it, on whatever devices are here."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from normstudy import (
    anatomy,
    checkpoint,
    config,
    corpus,
    curvature,
    data,
    memory,
    mesh,
    optim,
    placements,
    probes,
    programs,
    quantities,
    record,
    schedules,
    spectra,
    train,
    wiring,
)
from normstudy.errors import UserError, choose
from normstudy.measured import Findings, Measured
from normstudy.progress import say

DEEP = 64  # layers; above, the spectrum to the end is taken at a few layers unless asked for
WHOLE = 2048  # T * D; above, the whole spectrum of a block is not taken
POSITIONS = 8  # of the first sequence, at which a norm's own Jacobian is decomposed
PLACE = ("layer", "residual", "skip/branch")  # of a wiring row: not what tells wirings apart
CHUNK = 256  # rows of a Jacobian made at a time


@dataclass(frozen=True)
class Options:
    """What to measure, and how well."""

    what: tuple[str, ...] = ("stream", "gradient", "jacobian")  # of quantities.GROUPS
    steps: str = "newest"  # newest, all, or steps with commas; 0 is made again from the config
    layers: str = "all"  # all, or indices with commas: 0,1,mid,-2,-1
    vectors: int = 8
    batches: int = 1  # held-out batches to average over
    sequences: int | None = None  # of each batch; None: as many as the run's own probes
    tolerance: float = 0.01  # residual over value at which a largest singular or eigenvalue stops
    corpus: str | None = None  # another text than the run's

    def __post_init__(self):
        for group in self.what:
            choose("quantity group in --what", group, (*quantities.GROUPS, "all"))
        if self.vectors < 2:
            raise UserError(
                f"vectors must be at least 2 (for a standard error), not {self.vectors}"
            )
        for name in ("batches", "sequences", "tolerance"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UserError(f"{name} must be positive, not {value}")

    def wants(self, group: str) -> bool:
        return group in self.what or "all" in self.what


def inspect(paths: Sequence[Path], options: Options) -> Iterator[Measured]:
    """One Measured for each checkpoint asked for: path by path, oldest first.

    Raises UserError when there is no such checkpoint, its shapes are not those of its config, or
    an option does not fit it; OutOfMemory when a measurement does not fit. What can be known of all
    paths is looked at before the first is measured.
    """
    opened = [_steps(path, options.steps) for path in paths]
    runs = [_probing_config(folder, options) for folder, _ in opened]
    for run in runs:
        layers_of(options.layers, run.model.layers)
    names = [_name(folder, run) for (folder, _), run in zip(opened, runs, strict=True)]
    if len(set(names)) < len({folder for folder, _ in opened}):
        names = [str(path) for path in paths]
    for (folder, steps), run, name in zip(opened, runs, names, strict=True):
        instruments = _Instruments(run, folder, name, options)
        for step in steps:
            yield instruments.measure(step)


def _name(folder: Path, run: config.Run) -> str:
    """What a run calls itself, with its seed where that is not 0."""
    name = record.read_identity(folder / record.CONFIG, "run").get("name", folder.name)
    return name if run.seed == 0 else f"{name} seed {run.seed}"


def layers_of(text: str, depth: int) -> tuple[int, ...]:
    """Blocks named by `all` or by indices such as 0,1,mid,-2,-1, in order, each once.

    Raises UserError for one that is no number, or outside 0..L-1.
    """
    if text == "all":
        return tuple(range(depth))
    chosen = set()
    for word in text.split(","):
        name = word.strip()
        try:
            index = depth // 2 if name == "mid" else int(name)
        except ValueError:
            raise UserError(
                f"--layers takes all, or numbers and mid with commas between them, not {name!r}"
            ) from None
        if not -depth <= index < depth:
            raise UserError(f"--layers {name}: the model has layers 0 to {depth - 1}")
        chosen.add(index % depth)
    return tuple(sorted(chosen))


def _steps(path: Path, asked: str) -> tuple[Path, list[int]]:
    """(run folder, steps to open)."""
    if asked == "newest":
        folder, step = checkpoint.locate(path, None)
        return folder, [step]
    if asked == "all":
        folder, _ = checkpoint.locate(path, None)
        return folder, sorted({0, *checkpoint.steps(folder)})
    try:
        wanted = [int(word) for word in asked.split(",")]
    except ValueError:
        raise UserError(
            f"--step takes newest, all, or numbers with commas between them, not {asked!r}"
        ) from None
    made_again = (path / record.CONFIG).exists()  # step 0 needs no checkpoint
    folder = path.resolve() if made_again else checkpoint.locate(path, None)[0]
    for step in set(wanted) - {0}:
        checkpoint.locate(folder, step)
    return folder, sorted(set(wanted))


def _probing_config(folder: Path, options: Options) -> config.Run:
    """The run's config with what --vectors, --sequences and --corpus change; any mesh will do."""
    saved = record.load_config(folder)
    sequences = options.sequences or saved.probe.probe_batch
    probe = dataclasses.replace(saved.probe, vectors=options.vectors, probe_batch=sequences)
    text = dataclasses.replace(saved.data, corpus=options.corpus or saved.data.corpus)
    return dataclasses.replace(saved, mesh=config.Mesh(), probe=probe, data=text)


class _Instruments:
    """The compiled measurements of one run's shapes, used on one checkpoint after the other."""

    def __init__(self, run: config.Run, folder: Path, name: str, options: Options):
        self.run, self.folder, self.name, self.options = run, folder, name, options
        self.layers = layers_of(options.layers, run.model.layers)
        self.place = placements.row(run.model.placement)
        self.programs, self.devices = programs.of(run)
        self.feed = data.feed(run)
        self._same_text()
        held_out = dataclasses.replace(run.data, batch=run.probe.probe_batch)
        self.held_out = data.feed(dataclasses.replace(run, data=held_out)).held_out
        self.rates = schedules.table(run.optim, run.model.width, run.steps)
        self.transform = programs.direction(run.model, optim.static_part(run.optim))
        self.advice = f"lower --sequences (now {run.probe.probe_batch}), or ask for less by --what"
        self.compiled: dict[str, Callable] = {}
        self.start: programs.Starts | None = None  # where the last search for an eigenvector ended

    def _same_text(self) -> None:
        """Raises UserError where the text has changed since the run."""
        tree = record.read_identity(self.folder / record.CONFIG, "run")
        before = tree.get("corpus", {}).get("sha256")
        now = corpus.as_dict(self.feed.text)["sha256"]
        if self.options.corpus is None and before not in (None, now):
            raise UserError(
                f"{self.folder} was trained on another text (sha256 {before}) than "
                f"{self.run.data.corpus} holds now ({now}); name the text to probe on by --corpus"
            )

    def measure(self, step: int) -> Measured:
        if step in checkpoint.steps(self.folder):
            state = checkpoint.restore(self.folder, step, self.programs.abstract)
        else:
            state = programs.initial_state(self.run, self.programs)
        values, errors = self._over_batches(state, step)
        residuals: dict[str, np.ndarray] = {}
        where: dict[str, np.ndarray] = {}
        for group, instrument in (
            ("update", self._update),
            ("spectrum", self._spectrum),
            ("singular-values", self._singular_values),
            ("curvature", self._curvature),
        ):
            if self.options.wants(group):
                with memory.told(self.advice):
                    found = instrument(state, step)
                values |= found.get("values", {})
                residuals |= found.get("residuals", {})
                where |= found.get("where", {})
        wanted = {n for n in values if self.options.wants(quantities.of(n).group)}
        return Measured(
            label=f"{self.name} step {step}",
            step=step,
            run=self.run,
            layers=self.layers,
            facts=self._facts(step),
            values={name: np.asarray(values[name]) for name in values if name in wanted},
            errors={name: np.asarray(errors[name]) for name in errors if name in wanted},
            residuals=residuals,
            where=where,
            findings={
                group: check(state, step)
                for group, check in (("wiring", self._wiring), ("finite", self._finite))
                if self.options.wants(group)
            },
        )

    def _facts(self, step: int) -> dict[str, Any]:
        run, options = self.run, self.options
        return {
            "checkpoint": f"step {step} of {self.name}"
            + (
                ""
                if step in checkpoint.steps(self.folder)
                else " (made again from config and seed)"
            ),
            "placement": f"{run.model.placement}: {self.place.text}",
            "layers, width, context": f"{run.model.layers}, {run.model.width}, {run.model.context}",
            "H1, unigram entropy (nats)": self.feed.h1,
            "text": run.data.corpus,
            "batches x sequences": f"{options.batches} x {run.probe.probe_batch}, held out",
            "vectors": options.vectors,
            "standard errors over": "batches" if options.batches > 1 else "vectors",
        }

    # ------------------------------------------------------------- averaged over batches

    def _over_batches(self, state: programs.State, step: int) -> tuple[dict, dict]:
        """Means over the batches, and standard errors: of the vectors where there is one batch."""
        options, found = self.options, []
        one_pass = {"stream", "gradient", "jacobian", "skips"}
        if not any(options.wants(group) for group in one_pass):
            return {}, {}
        for i in range(options.batches):
            if options.batches > 1:
                say(f"{self.name} step {step}: batch {i + 1} of {options.batches}")
            batch = mesh.put_batch(self.devices, self.held_out[i])
            key = train.probe_key(self.run, step)  # of the first batch: as in training
            key = jax.random.fold_in(key, i) if i else key
            with memory.told(self.advice):
                found.append(jax.device_get(self._one_batch(state.model, batch, key)))
        of_vectors = {name for name in found[0] if name.partition("/")[0].endswith("_se")}
        errors = {name.replace("_se", "", 1): found[0][name] for name in of_vectors}
        names = [name for name in found[0] if name not in of_vectors]
        values = {name: np.mean([own[name] for own in found], 0) for name in names}
        if options.batches > 1:
            spread = {name: np.std([own[name] for own in found], 0, ddof=1) for name in names}
            errors = {name: own / options.batches**0.5 for name, own in spread.items()}
        return values, errors

    def _one_batch(self, model: Any, batch: Array, key: Array) -> dict[str, Array]:
        unigram = jnp.asarray(self.feed.unigram)
        found: dict[str, Array] = {}
        if any(self.options.wants(group) for group in ("stream", "gradient", "jacobian")):
            program = self._fitted("measure", self.programs.measure, model, batch, unigram, key)
            found |= program(model, batch, unigram, key)
        if self.options.wants("gradient"):
            found |= self._fitted("gradients", _gradients, model, batch)(model, batch)
        if self.options.wants("skips"):
            skips = functools.partial(_skips, vectors=self.options.vectors)
            found |= self._fitted("skips", jax.jit(skips), model, batch, key)(model, batch, key)
        return found

    def _fitted(self, name: str, function: Any, *args: Any) -> Callable:
        """The function compiled once for this run, after asking whether it fits."""
        if name not in self.compiled:
            self.compiled[name] = memory.compile_to_fit(function, args, self.advice)
        return self.compiled[name]

    # ------------------------------------------------------------------ of the training step

    def _next_batch(self, step: int) -> tuple[Array, Array]:
        """The batch and the learning rate of the update that follows (the last rate at the end)."""
        batch = mesh.put_batch(self.devices, self.feed.batches[step])
        return batch, jnp.float32(self.rates[min(step, len(self.rates) - 1)])

    def _update(self, state: programs.State, step: int) -> dict[str, Any]:
        batch, lr = self._next_batch(step)
        program = jax.jit(functools.partial(_anatomy, transform=self.transform))
        found = self._fitted("anatomy", program, state, batch, lr)(state, batch, lr)
        return {"values": jax.device_get(found)}

    def _curvature(self, state: programs.State, step: int) -> dict[str, Any]:
        batch, lr = self._next_batch(step)
        optimizer = optim.static_part(self.run.optim)
        search = functools.partial(
            programs.sharpness, optimizer=optimizer, tolerance=self.options.tolerance
        )
        if self.start is None:
            random = curvature.start_vector(state.model, train.probe_key(self.run, step))
            self.start = (random, random)
        program = self._fitted("sharpness", jax.jit(search), state, batch, lr, self.start)
        found, self.start = program(state, batch, lr, self.start)
        found = jax.device_get(found)
        residuals = {name: own for name, own in found.items() if name.endswith("_residual")}
        return {
            "values": {name: found[name] for name in found if name not in residuals},
            "residuals": {name.removesuffix("_residual"): own for name, own in residuals.items()},
        }

    # ----------------------------------------------------------------------------- checks

    def _wiring(self, state: programs.State, step: int) -> Findings:
        """What the sublayers compute against what the config declares, and at step 0 the init."""
        stds = programs.standard_deviations(self.run) if step == 0 else None
        report = wiring.check_model(state.model, self.run.model, stds)
        rows = [row for row in report.rows() if row["layer"] in self.layers]
        if report.agrees:  # one line for all that are alike
            alike = {tuple(v for k, v in row.items() if k not in PLACE): row for row in rows}
            rows = [{**row, "layer": f"all {len(self.layers)}"} for row in alike.values()]
        return Findings(report.sentences(), rows, report.agrees)

    def _finite(self, state: programs.State, step: int) -> Findings:
        """Where the next update would first stop being finite."""
        found = train.not_finite(state.model, self.feed.batches[step])
        shown = ("kind", "layer", "where", "operation", "direction", "magnitude", "limit", "dtype")
        rows = [{name: own[name] for name in shown} for own in found["origins"]]
        told = [f"the update after step {step}: {found['sentence']}"]
        return Findings(told, rows, not rows)

    # ---------------------------------------------------------------------------- spectra

    def _spectrum(self, state: programs.State, step: int) -> dict[str, Any]:
        model, key = state.model, train.probe_key(self.run, step)
        batch = mesh.put_batch(self.devices, self.held_out[0])
        x0, streams = _streams(model, batch)
        tolerance = self.options.tolerance
        of_block = jax.jit(functools.partial(_sigma_of_block, tolerance=tolerance))
        to_end = jax.jit(functools.partial(_sigma_to_end, tolerance=tolerance))
        few = self.options.layers == "all" and self.run.model.layers > DEEP
        far = layers_of("0,1,mid,-2,-1", self.run.model.layers) if few else self.layers
        blocks, ends, norms = [], [], []
        for layer in self.layers:
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], model.stacked)
            x = streams[layer]
            blocks.append(self._fitted("block", of_block, block, x, key)(block, x, key))
            norms.append(_sigma_of_norms(block, x[:1]))
            self._say("spectrum", layer, step)
        for layer in far:
            index = jnp.asarray([layer])
            ends.append(self._fitted("end", to_end, model, x0, index, key)(model, x0, index, key))
            self._say("spectrum to the end", layer, step)
        names = {"sigma_max_of_block": blocks, "sigma_max_to_end": ends}
        here = {"sigma_max_of_block": self.layers, "sigma_max_to_end": far}
        return {
            "values": {
                **{name: np.array([own.value.max() for own in of]) for name, of in names.items()},
                **{name: np.array([own[name] for own in norms]) for name in norms[0]},
            },
            "residuals": {
                name: np.array([own.residual.ravel()[own.value.argmax()] for own in of])
                for name, of in names.items()
            },
            "where": {
                **{name: np.array(layers) for name, layers in here.items()},
                **{name: np.array(self.layers) for name in norms[0]},
            },
        }

    def _singular_values(self, state: programs.State, step: int) -> dict[str, Any]:
        size = self.run.model.context * self.run.model.width
        if size > WHOLE:
            say(f"singular-values: left out, T x D = {size} is above {WHOLE}")
            return {}
        batch = mesh.put_batch(self.devices, self.held_out[0])
        _, streams = _streams(state.model, batch)
        rows = []
        for layer in self.layers:
            block = jax.tree.map(lambda leaf, layer=layer: leaf[layer], state.model.stacked)
            rows.append(np.asarray(_all_of_block(block, streams[layer][0])))
            self._say("singular values", layer, step)
        spectrum = np.array(rows)
        shares = {"max": 1.0, "q90": 0.9, "median": 0.5, "q10": 0.1, "min": 0.0}
        values = {
            f"singular_value/{name}": np.quantile(spectrum, share, axis=1)
            for name, share in shares.items()
        }
        values["stable_rank"] = (spectrum**2).sum(1) / spectrum.max(1) ** 2
        return {"values": values, "where": dict.fromkeys(values, np.array(self.layers))}

    def _say(self, what: str, layer: int, step: int) -> None:
        if layer % 8 == 0 or layer == self.layers[-1]:
            say(f"{self.name} step {step}: {what}, layer {layer} of {self.layers[-1]}")


@jax.jit
def _streams(model: Any, batch: Array) -> tuple[Array, Array]:
    x0 = model.start(batch[:, :-1])
    return x0, model.stack(x0)[1]


@jax.jit
def _gradients(model: Any, batch: Array) -> dict[str, Array]:
    gradients = jax.grad(programs.token_loss)(model, batch)
    return probes.by_layer("gradient", gradients) | probes.by_layer("weight", model)


def _skips(model: Any, batch: Array, key: Array, vectors: int) -> dict[str, Array]:
    x0, streams = _streams(model, batch)
    found = {}
    for branch in probes.BRANCHES:
        gain = probes.skip_gain(model, x0, jnp.zeros_like(streams), key, vectors, (branch,))
        found[f"skip_gain_cut/{branch}"], found[f"skip_gain_cut_se/{branch}"] = gain
    return found


def _anatomy(
    state: programs.State, batch: Array, lr: Array, transform: optax.GradientTransformation
) -> dict[str, Array]:
    new, logged, (_, updates) = programs.update(state, batch, lr, transform=transform)
    found = logged["update"] | anatomy.effect(state.model, new.model, batch)
    half = anatomy.half_curvature(programs.token_loss, state.model, updates, batch)
    found["loss_change_second"] = found["loss_change_predicted"] + half
    return {name: own for name, own in found.items() if quantities.of(name).group == "update"}


def _sigma_of_block(block: Any, x: Array, key: Array, tolerance: float) -> spectra.Singular:
    layers = jax.tree.map(lambda leaf: leaf[None], block)
    return spectra.of_blocks(lambda block, x: block(x)[0], layers, x[None], key, tolerance)


def _sigma_to_end(
    model: Any, x0: Array, index: Array, key: Array, tolerance: float
) -> spectra.Singular:
    nudge = jnp.zeros((model.cfg.layers + 1, *x0.shape), x0.dtype)
    return spectra.to_end(lambda n: model.stack(x0, n)[0], nudge, index, key, tolerance)


@jax.jit
def _all_of_block(block: Any, x_TD: Array) -> Array:
    return spectra.whole(lambda x: block(x[None])[0][0], x_TD, CHUNK)


@jax.jit
def _sigma_of_norms(layer: Any, x: Array) -> dict[str, Array]:
    """{sigma_max_of_norm_NORM/SUBLAYER: largest over the positions}, exact; x: (1, T, D).

    Of norms on the stream; what is normed inside a branch has other channels.
    """
    found = {}
    for name in probes.BRANCHES:
        placed, seen = getattr(layer, name), {}
        own = placed.sublayer
        placed.sublayer = copy.copy(own)
        norms = [n for n in ("pre", "post") if hasattr(own, n)]
        for norm in norms:
            setattr(placed.sublayer, norm, _Listening(getattr(own, norm), norm, seen))
        x, _ = placed(x)
        for norm in norms:
            T = seen[norm].shape[1]
            at = np.unique(np.linspace(0, T - 1, min(POSITIONS, T)).astype(int))
            jacobians = jax.vmap(getattr(own, norm).jacobian)(seen[norm][0, at])
            largest = jnp.linalg.svd(jacobians, compute_uv=False)[:, 0]
            found[f"sigma_max_of_norm_{norm}/{name}"] = jnp.max(largest)
    return found


class _Listening:
    """A norm that remembers what it was given."""

    def __init__(self, norm: Any, name: str, seen: dict[str, Array]):
        self.norm, self.name, self.seen = norm, name, seen

    def measured(self, h: Array) -> tuple[Array, Array]:
        self.seen[self.name] = h
        return self.norm.measured(h)

    def gain(self) -> Array:
        return self.norm.gain()
