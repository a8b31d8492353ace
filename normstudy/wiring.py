"""What a sublayer really computes, read back from outside, against what its placement declares.

The branch f is replaced by a known output g and the sublayer runs once on a known stream x. What
comes out, y, and what the branch was given, h, are fitted by every equation of one family:

    y = k after(a skip(x) + b out(f(h)))        h = c before(x)

where skip, out, after and before are each nothing, LayerNorm or RMSNorm. At one position x and
norm(x) point the same way; but scale and mean of x and g change from position to position, so one
set of factors serves them all only under the right equation. A norm after the add hides the common
scale of a and b: only a/b can be known there. Norms are read at gain 1 and bias 0.

Takes callables and arrays. Knows no model, and no placement but by its row.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from normstudy import config, theory
from normstudy.errors import UserError
from normstudy.placements import PLACEMENTS, SUBLAYERS, Placement, row
from normstudy.roles import ROLES
from normstudy.trees import path_names

Apply = Callable[[Any, Callable], Any]  # (stream (B, T, D), branch) -> the stream after a sublayer
AlphaOf = Callable[[int], theory.Constants]  # a row's constants of the number of layers

SAME = 1e-3  # relative; alpha may be written with three digits, and L and L + 1 differ by 1/(4L)
SLOPE = 0.5  # of DyT, where norms are read: as at its init
SIGMAS = 5.0  # standard errors beyond which a standard deviation is not the declared one
FUSED = {"qkv": ("q", "k", "v")}  # matrices that hold several projections side by side
# what the field calls norms in these places
FAMILIES = {
    (): "no norm",
    ("before the branch",): "pre-norm",
    ("after the add",): "post-norm",
    ("on the branch's output",): "reordered norm",  # Swin v2 (2111.09883), OLMo 2 (2501.00656)
    ("before the branch", "on the branch's output"): "peri-norm",  # Kim et al. 2025 (2502.02732)
    # y = norm(x); x <- y + f(y) is norm(x + f(x)) with every norm moved into the next sublayer
    ("on the skip", "before the branch"): "normalised skip: post-norm but for the stack's ends",
}


class Probe(NamedTuple):
    """A stream and a branch output, (1, T, D) in float32."""

    x: Any
    g: Any


class Observation(NamedTuple):
    """What came out of the sublayer, and what its branch was given at each call."""

    y: Any
    given: tuple


class Term(NamedTuple):
    """factor * norm(·); factor 0: not there; norm None: no norm on it."""

    factor: float
    norm: str | None = None  # layer or rms


class Where(NamedTuple):
    """A sublayer of the stack."""

    layer: int
    name: str


class Finding(NamedTuple):
    """One disagreement between what was found and what was declared."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Reading:
    """The equation of the family that reproduces what was observed; no terms where none does."""

    skip: Term  # a, and the norm between the stream and the add
    branch: Term  # b, and the norm on the branch's output; 1 where a norm after the add hides it
    after: Term  # k, and the norm after the add
    before: Term | None  # c, and the norm before the branch; None: it was given something else
    calls: int  # of the branch
    residual: float  # of the nearest equation: largest distance from y over positions, relative
    rounding: float  # what the residual may be, for the dtype of y

    @property
    def understood(self) -> bool:
        """Is nothing left of y but rounding?"""
        return self.residual <= self.rounding

    @property
    def text(self) -> str:
        """The equation, e.g. 'norm(2.632 x + f(x))', or that there is none."""
        if not self.understood:
            return f"not understood (residual {self.residual:.2g})"
        parts = ((self.skip, "x"), (self.branch, f"f({self.branch_reads})"))
        terms = [_times(term, name, self.rounding) for term, name in parts if term.factor]
        return _times(self.after, " + ".join(terms) or "0", self.rounding)

    @property
    def skip_starts(self) -> str:
        """x, norm(x) or missing; ? where nothing was understood."""
        if not self.understood:
            return "?"
        return _times(Term(1.0, self.skip.norm), "x") if self.skip.factor else MISSING

    @property
    def branch_reads(self) -> str:
        """x or norm(x), with a factor in front where it is not 1; ? for something else."""
        return "?" if self.before is None else _times(self.before, "x", self.rounding)

    @property
    def ratio(self) -> float | None:
        """a / b, skip to branch; None where one of them is missing or nothing was understood."""
        both = self.skip.factor and self.branch.factor
        return self.skip.factor / self.branch.factor if both else None

    @property
    def norms(self) -> dict[str, str]:
        """{where it sits: layer or rms} of every norm found."""
        places = {
            "on the skip": self.skip,
            "before the branch": self.before,
            "on the branch's output": self.branch,
            "after the add": self.after,
        }
        return {place: term.norm for place, term in places.items() if term and term.norm}

    @property
    def family(self) -> str:
        """What the field calls norms in these places; empty where it has no word."""
        return FAMILIES.get(tuple(self.norms), "") if self.ratio and self.before else ""


class Projection(NamedTuple):
    """How large one matrix of one layer is, against Xavier's standard deviation."""

    layer: int
    sublayer: str
    matrix: str
    entries: int
    std: float
    gain: float  # std over Xavier's
    declared: float  # the gain by the init rule
    whole: float  # Xavier's for the fused matrix over Xavier's for this slice; 1 if not fused


@dataclass(frozen=True)
class Report:
    """All readings of a stack, and where they disagree with the declaration."""

    declared: config.Model
    readings: dict[Where, Reading]
    names: dict[Where, str]  # rows that read the same, or what the field calls it
    final_norm: bool | None  # None: not asked, or it cannot be told
    projections: list[Projection]
    findings: list[Finding]
    notes: list[str]

    @property
    def agrees(self) -> bool:
        """Is everything as declared?"""
        return not self.findings

    def rows(self) -> list[dict[str, Any]]:
        """One row per sublayer, for a table."""
        return [
            {
                "layer": where.layer,
                "sublayer": where.name,
                "wired as": reading.text,
                "placement": self.names[where],
                "skip starts at": reading.skip_starts,
                "branch reads": reading.branch_reads,
                "norms": ", ".join(f"{kind} {at}" for at, kind in reading.norms.items()),
                "skip/branch": reading.ratio,
                "residual": reading.residual,
            }
            for where, reading in self.readings.items()
        ]

    def sentences(self) -> list[str]:
        """The findings, or that there is none; then the notes."""
        row_text = row(self.declared.placement).text
        equations = dict.fromkeys(
            reading.text if reading.understood else row_text for reading in self.readings.values()
        )
        agreed = (
            f"{len(self.readings)} of {len(self.readings)} sublayers wired as declared "
            f"({self.declared.placement}): {', '.join(equations)}"
        )
        return [*([str(finding) for finding in self.findings] or [agreed]), *self.notes]


def check(
    sublayers: Mapping[Where, Apply],
    declared: config.Model,
    read_out: Callable[[Any], Any] | None = None,
) -> Report:
    """Every sublayer, in the order of the stack, against the placement that is declared.

    read_out: x_L -> logits, to look for a final norm. Raises UserError for an unknown placement.
    """
    known = probe(declared.width)
    seen = {where: observe(apply, _on_device(known)) for where, apply in sublayers.items()}
    return _judge(seen, known, declared, read_out)


def check_model(
    model: Any,
    declared: config.Model,
    stds: Mapping[str, float | np.ndarray] | None = None,
    parts: Sequence[str] = ("attn", "mlp"),
    fused: Mapping[str, Sequence[str]] = FUSED,
) -> Report:
    """The same for a model with stacked layers, all of them at once.

    model: has read(x), layers (their parameters) and stacked, the layers along axis 0, each with
    the sublayers `parts`, each of which has a branch f and is callable as sublayer(x) -> (y, taps).
    stds: {role: declared std at step 0}, for a model that has not been trained. Gains and biases,
    also learned factors of the equation, are put to 1 and 0: their values are not wiring.
    """
    known = probe(declared.width)
    given = _on_device(known)

    def of_block(block: Any) -> dict[str, Observation]:
        return {name: observe(_with_branch(getattr(block, name)), given) for name in parts}

    layers = jax.tree.leaves(model.stacked)[0].shape[0]
    stacked = jax.device_get(jax.jit(jax.vmap(of_block))(_with_plain_norms(model.stacked)))
    seen = {
        Where(layer, name): jax.tree.map(lambda leaf, i=layer: leaf[i], stacked[name])
        for layer in range(layers)
        for name in parts
    }
    report = _judge(seen, known, declared, model.read)
    projections = [] if stds is None else projection_gains(model.layers, stds, fused)
    findings, notes = [*report.findings, *_projection_findings(projections)], []
    if layers != declared.layers:
        findings.append(Finding("stack", f"{layers} layers, {declared.layers} declared"))
    if _norms_moved(model.layers):
        moved = "norm gains not all 1 or biases not all 0; equations were read with them at 1 and 0"
        if stds is None:
            notes.append(moved)
        else:
            findings.append(Finding("layers", moved))
    return dataclasses.replace(report, projections=projections, findings=findings, notes=notes)


def read_sublayer(apply: Apply, width: int, seed: int = 0) -> Reading:
    """The equation of one sublayer. apply: (x (B, T, D), branch) -> y, with f replaced by `branch`.

    The norms' gains must be 1 (or equal for all channels) and biases 0, as at init. Of a block,
    give one sublayer: lambda x, f: block(x, attn=f, mlp=zero).
    """
    known = probe(width, seed=seed)
    return read(observe(apply, _on_device(known)), known)


def read_row(place: Placement, layers: int, norm: str, known: Probe) -> Reading:
    """What a row of the placements table reads as in the attention of its last layer, from its own
    equation and a plain norm."""
    return read(_observe_row(place, layers, norm, known, Where(layers - 1, "attn")), known)


def final_norm(read_out: Callable[[Any], Any], width: int, seed: int = 0) -> bool | None:
    """Does a norm stand before the readout? read_out: x_L (B, T, D) -> logits (B, T, V).

    With one, logits do not feel the scale of x; without, what x adds to them grows with it. None:
    neither holds (a soft cap alone), or both, since the logits do not depend on x.
    """
    x = _on_device(probe(width, seed=seed)).x
    # powers of two are exact in any precision: the readout's matmul rounds all three alike
    less, once, more = (_positions(read_out(c * x)) for c in (-1.0, 1.0, 8.0))
    slope = (once - less) / 2.0
    rounding = 0.02 * np.abs(slope).max()
    invariant = np.abs(more - once).max() <= rounding
    homogeneous = np.abs(more - once - 7.0 * slope).max() <= 7.0 * rounding
    return bool(invariant) if invariant != homogeneous else None


def projection_gains(
    layers: Any, stds: Mapping[str, float | np.ndarray], fused: Mapping[str, Sequence[str]] = FUSED
) -> list[Projection]:
    """Measured against declared standard deviation, for each branch matrix of each layer.

    layers: stacked blocks, leaves (L, in, out); stds: {role: declared std}. A fused matrix
    (L, in, n * out) is split into its n slices, for a rule may hold for one of them alone (DeepNet:
    V, not Q and K). Raises UserError for a leaf of another shape.
    """
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(layers):
        names = path_names(path)
        known = next((name for name in reversed(names) if name in fused or name in ROLES), "")
        slices = fused.get(known, (known,))
        if not (known and ROLES[slices[0]].branch):
            continue
        weights = np.asarray(leaf, np.float64)
        if weights.ndim != 3 or weights.shape[-1] % len(slices):
            raise UserError(
                f"{'/'.join(names)} has shape {weights.shape}, not (layers, in, out) "
                f"with out = {' + '.join(slices)} of equal widths"
            )
        for matrix, part in zip(slices, np.split(weights, len(slices), -1), strict=True):
            xavier = theory.xavier_std(*part.shape[1:])
            whole = theory.xavier_std(*weights.shape[1:]) / xavier
            own = np.broadcast_to(np.divide(stds[matrix], xavier), len(part)).tolist()
            found += [
                Projection(layer, names[0], matrix, part[0].size, std, std / xavier, own, whole)
                for layer, (std, own) in enumerate(zip(part.std((1, 2)).tolist(), own, strict=True))
            ]  # fmt: skip
    return found


# ------------------------------------------------------------------------- how an equation is found


def probe(width: int, positions: int = 32, seed: int = 0) -> Probe:
    """The known pair. Raises UserError below width 4: no room for x, g and their means.

    Their spreads lie within 8 to 512 and 8 to 80,000: far above any norm's epsilon, and so far
    apart that a branch damped by 1e-6 still shows. The cosine between x and g, less their means,
    is another at each position: else a norm(x) + b norm(g) would have one length at all of them,
    as if a norm came after the add.
    """
    if width < 4:
        raise UserError(f"the wiring of a stream of width {width} cannot be read; it takes 4")
    random = np.random.default_rng(seed)
    vectors = random.normal(size=(positions, width, 3))
    vectors[..., 0] = 1.0
    _, x, other = np.moveaxis(np.linalg.qr(vectors)[0] * math.sqrt(width), -1, 0)
    cosine = random.permutation(np.linspace(-0.7, 0.7, positions))[:, None]
    g = cosine * x + np.sqrt(1.0 - cosine**2) * other

    def scaled(direction: np.ndarray, largest: float) -> np.ndarray:
        scale = random.permutation(np.geomspace(8.0, largest, positions))
        mean = random.permutation(np.linspace(-2.0, 2.0, positions))
        return (scale[:, None] * (direction + mean[:, None])).astype(np.float32)[None]

    return Probe(scaled(x, 512.0), scaled(g, 8e4))


def observe(apply: Apply, known: Probe) -> Observation:
    """Run a sublayer once with its branch forced to return g. Traceable: it returns all it saw."""
    given = []

    def branch(h: Any, *_: Any, **__: Any) -> Any:  # what is normed inside it is of no matter here
        given.append(h)
        return known.g.astype(h.dtype)

    y = apply(known.x, branch)
    return Observation(y, tuple(given))


def read(seen: Observation, known: Probe) -> Reading:
    """The simplest equation that leaves nothing of y but rounding."""
    y, x, g = (_positions(array) for array in (seen.y, *known))
    fits = [_fit(y, x, g, *norms) for norms in EQUATIONS] if np.isfinite(y).all() else [NO_FIT]
    rounding = _rounding(seen.y)
    nearest = min(fits, key=lambda fit: fit.residual)
    found = [fit for fit in fits if fit.residual <= rounding] or [
        NO_FIT._replace(residual=nearest.residual)
    ]
    best = min(found, key=lambda fit: (fit.terms, fit.residual))
    before = [_input(_positions(h), x, _rounding(h)) for h in seen.given]
    return Reading(
        skip=best.skip,
        branch=best.branch,
        after=best.after,
        before=before[0] if len(before) == 1 else None,
        calls=len(before),
        residual=best.residual,
        rounding=rounding,
    )


def _layer_norm(v: np.ndarray) -> np.ndarray:
    centred = v - v.mean(-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True))


def _rms_norm(v: np.ndarray) -> np.ndarray:
    return v / np.sqrt(np.mean(v**2, -1, keepdims=True))


# no epsilon: the probe is so large that it does not count
NORMS: dict[str | None, Callable[[np.ndarray], np.ndarray]] = {
    None: lambda v: v,
    "layer": _layer_norm,
    "rms": _rms_norm,
}
# those that are not of the family, which rows may ask for; DyT at the slope of its init
OTHERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "scale": lambda v: v / np.linalg.norm(v, axis=-1, keepdims=True),
    "tanh": lambda v: np.tanh(SLOPE * v),
}
MISSING = "missing"

# (after, skip, branch), each the name of a norm or MISSING. Of two that are one function, one: a
# norm on the only term is a norm after it; a sum of LayerNorms has no mean, so RMSNorm after it is
# LayerNorm.
EQUATIONS = [
    (after, skip, branch)
    for after in NORMS
    for skip, branch in (
        (None, MISSING),
        (MISSING, None),
        *((skip, branch) for skip in NORMS for branch in NORMS),
    )
    if (after, skip, branch) != ("rms", "layer", "layer")
]


class _Fit(NamedTuple):
    skip: Term
    branch: Term
    after: Term
    terms: int
    residual: float


NO_FIT = _Fit(Term(0.0), Term(0.0), Term(0.0), 0, math.inf)


def _fit(
    y: np.ndarray, x: np.ndarray, g: np.ndarray,
    after: str | None, skip: str | None, branch: str | None,
) -> _Fit:  # fmt: skip
    """The factors that bring one equation nearest to y, all arrays (T, D)."""
    terms = np.stack([NORMS[n](v) for n, v in ((skip, x), (branch, g)) if n != MISSING])
    if after is None:
        factors, gain = _factors(y, terms), 1.0
        nearest = np.tensordot(factors, terms, 1)
    else:
        ratio = [_ratio(y, *terms, centre=after == "layer")] if len(terms) == 2 else []
        factors = np.array([*ratio, 1.0])
        normed = NORMS[after](np.tensordot(factors, terms, 1))
        gain = float(_factors(y, normed[None])[0])
        nearest = gain * normed
    return _Fit(
        Term(0.0) if skip == MISSING else Term(float(factors[0]), skip),
        Term(0.0) if branch == MISSING else Term(float(factors[-1]), branch),
        Term(gain, after),
        len(terms),
        _distance(y, nearest),
    )


def _factors(y: np.ndarray, terms: np.ndarray) -> np.ndarray:
    """Least squares over all positions, each weighted by 1 / its size, so that none drowns."""
    weights = 1.0 / _sizes(y)
    columns = (weights * terms).reshape(len(terms), -1).T
    lengths = np.linalg.norm(columns, axis=0)
    return np.linalg.lstsq(columns / lengths, (weights * y).ravel())[0] / lengths


def _ratio(y: np.ndarray, skip: np.ndarray, branch: np.ndarray, *, centre: bool) -> float:
    """a / b under a norm after the add, whose scale is another at each position.

    The median over positions: where one term dwarfs the other, rounding eats the ratio.
    """
    if centre:
        skip, branch = (v - v.mean(-1, keepdims=True) for v in (skip, branch))
    ss, sb, bb, sy, by = (
        np.sum(p * q, -1)
        for p, q in ((skip, skip), (skip, branch), (branch, branch), (skip, y), (branch, y))
    )
    a, b = sy * bb - by * sb, by * ss - sy * sb  # least squares by Cramer, less the determinant
    there = np.abs(b) > 1e-12 * np.abs(a)
    return float(np.median(np.divide(a, b, out=np.full_like(a, 1e12), where=there)))


def _input(h: np.ndarray, x: np.ndarray, rounding: float) -> Term | None:
    """c and norm with h = c norm(x), or None."""
    if h.shape != x.shape or not np.isfinite(h).all():
        return None
    for norm, plain in NORMS.items():
        factor = float(_factors(h, plain(x)[None])[0])
        if factor and _distance(h, factor * plain(x)) <= rounding:
            return Term(factor, norm)
    return None


def _distance(y: np.ndarray, other: np.ndarray) -> float:
    """Largest distance over positions, relative to y; infinite where it is not a number."""
    far = np.max(np.linalg.norm(y - other, axis=-1) / _sizes(y)[:, 0])
    return math.inf if np.isnan(far) else float(far)


def _sizes(y: np.ndarray) -> np.ndarray:
    return np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), np.finfo(np.float32).tiny)


def _positions(array: Any) -> np.ndarray:
    """(B, T, D) of any dtype as (B * T, D) in float64."""
    wide = np.asarray(array).astype(np.float64)
    return wide.reshape(-1, wide.shape[-1])


def _rounding(array: Any) -> float:
    """What a norm with its epsilon (below 1e-3) and an add may lose on a stream of rms 8 and up.

    A norm after a sum of norms sees less than that: there, factors far below 1 bring its epsilon
    out, and the sublayer is not understood.
    """
    return max(1e-4, 8.0 * float(jnp.finfo(array.dtype).eps))


def _on_device(known: Probe) -> Probe:
    return Probe(*map(jnp.asarray, known))


def _observe_row(
    place: Placement, layers: int, norm: str, known: Probe, where: Where
) -> Observation:
    """What a row's equation does in one sublayer, its learned factors at 1."""
    plain = {**NORMS, **OTHERS}[place.kind or norm]
    norms = dict.fromkeys(place.norms, lambda h, on=1.0: plain(h) if on else h)
    index = SUBLAYERS.index(where.name) if where.name in SUBLAYERS else 0
    constants = place.constants(layers).at(min(where.layer, layers - 1), index)
    numbers = SimpleNamespace(**constants._asdict() | dict.fromkeys(place.gains, 1.0))
    wide = Probe(*(array.astype(np.float64) for array in known))
    equation, own = place.of(where.name), SimpleNamespace(**norms)
    return observe(lambda x, f: equation(x, f, own, numbers), wide)


def _with_branch(sublayer: Any) -> Apply:
    """The sublayer as a function of the stream and of its branch."""

    def apply(x: Any, branch: Callable) -> Any:
        forced = copy.copy(sublayer)
        forced.f = lambda h, *_, **__: branch(h)  # what it computes with is of no matter here
        return forced(x)[0]

    return apply


def _with_plain_norms(layers: Any) -> Any:
    """The same tree with every gain at 1 and every bias at 0: their values are not wiring."""
    plain = {"scale": 1.0, "bias": 0.0, "slope": SLOPE}

    def leaf(path: tuple, own: Any) -> Any:
        *parents, name = path_names(path)
        to = 1.0 if "gain" in parents else plain.get(name)
        return own if to is None else jnp.full_like(own, to)

    return jax.tree_util.tree_map_with_path(leaf, layers)


def _norms_moved(layers: Any) -> bool:
    """Is a norm's gain not 1 or its bias not 0? One gain for all channels starts elsewhere."""

    def moved(path: tuple, own: Any, plain: Any) -> bool:
        there = path_names(path)[-1] in ("scale", "bias") and own.ndim > 1
        return there and bool(jnp.any(own != plain))

    found = jax.tree_util.tree_map_with_path(moved, layers, _with_plain_norms(layers))
    return any(jax.tree.leaves(found))


# ------------------------------------------------------------------------- how it is put into words


def differences(
    found: Reading, declared: Reading, constants: AlphaOf = theory.no_constants
) -> list[str]:
    """In words, all that tells the two equations apart; empty where they are the same.

    constants: the row's, to name the depth whose alpha was found.
    """
    if math.isinf(found.residual):
        return ["the output is not finite"]
    if not found.understood:
        return [
            f"no equation of the family comes nearer than {found.residual:.2g} of the output "
            "(norm gains that differ between channels look like this, too)"
        ]
    parts = (_term_words, _norm_words, _input_words)
    return [
        *(words for part in parts for words in part(found, declared)),
        *_factor_words(found, declared, constants),
    ]


def _term_words(found: Reading, declared: Reading) -> list[str]:
    said = []
    if declared.skip.factor and not found.skip.factor:
        said.append("missing residual")
    if found.skip.factor and not declared.skip.factor:
        said.append("a residual, none declared")
    if declared.branch.factor and not found.branch.factor:
        said.append(f"the branch is {'called, but not added' if found.calls else 'never called'}")
    return said


def _norm_words(found: Reading, declared: Reading) -> list[str]:
    seen = found.before is not None or not found.calls  # else it may stand where we cannot see it
    if declared.norms and not found.norms and seen:
        return ["norm never applied"]
    said = []
    for place in dict.fromkeys((*found.norms, *declared.norms)):
        ours, theirs = found.norms.get(place), declared.norms.get(place)
        if ours == theirs or (place == "before the branch" and found.before is None):
            continue
        if ours and theirs:
            said.append(f"{ours} norm {place}, {theirs} norm declared")
        elif place == "on the skip":
            said.append(f"the skip starts {'after' if ours else 'before'} the norm")
        else:
            said.append(f"a norm {place}, none declared" if ours else f"no norm {place}")
    return said


def _input_words(found: Reading, declared: Reading) -> list[str]:
    if found.calls > 1:
        return [f"the branch is called {found.calls} times"]
    if found.calls == 0 or declared.before is None:
        return []
    if found.before is None:
        return ["the branch reads neither x nor norm(x)"]
    if not _same(found.before.factor, declared.before.factor, found.rounding):
        return [f"the branch reads {found.branch_reads}, {declared.branch_reads} declared"]
    return []


def _factor_words(found: Reading, declared: Reading, constants: AlphaOf) -> list[str]:
    same = functools.partial(_same, rounding=found.rounding)
    said = []
    if "after the add" in {*found.norms, *declared.norms}:  # one of them has no scale of its own
        if found.ratio and declared.ratio and not same(found.ratio, declared.ratio):
            said.append(_ratio_words(found.ratio, declared.ratio, same, constants))
        if found.after.norm and declared.after.norm and not same(found.after.factor, 1.0):
            said.append(f"the norm after the add has gain {found.after.factor:.4g}, 1 declared")
    else:
        for name, ours, theirs in (
            ("skip", found.skip.factor, declared.skip.factor),
            ("branch", found.branch.factor, declared.branch.factor),
        ):
            if ours and theirs and not same(ours, theirs):
                said.append(f"the {name} is multiplied by {ours:.4g}, {theirs:.4g} declared")
    if _grows(found) and not _grows(declared):
        gain = abs(found.skip.factor)
        said.append(f"no norm on the skip path, which grows {gain:.4g}-fold at each sublayer")
    return said


def _ratio_words(
    found: float, expected: float, same: Callable[[float, float], bool], constants: AlphaOf
) -> str:
    if same(expected, 1.0):
        return f"skip-to-branch ratio {found:.4g}, 1 declared"
    words = f"alpha {expected:.4g} expected on the skip, found {found:.4g}"
    if same(found * expected, 1.0):
        return f"{words}: alpha sits on the branch"
    if same(found, 1.0):
        return f"{words}: alpha is missing"

    def alpha(layers: int) -> float:
        return float(np.ravel(constants(layers).alpha)[-1])

    depth = min(range(1, 1025), key=lambda layers: abs(alpha(layers) - found))
    if math.isclose(alpha(depth), found, rel_tol=1e-4):
        return f"{words}: alpha of {depth} layers"
    return words


def _grows(reading: Reading) -> bool:
    """Does the skip path alone, with no norm on it, multiply the stream by more than 1?"""
    normed = {"on the skip", "after the add"} & set(reading.norms)
    return not normed and abs(reading.skip.factor) > 1.0 + max(SAME, reading.rounding)


def _judge(
    seen: Mapping[Where, Observation],
    known: Probe,
    declared: config.Model,
    read_out: Callable[[Any], Any] | None,
) -> Report:
    place = row(declared.placement)
    ideals = {
        where: _observe_row(place, declared.layers, declared.norm, known, where) for where in seen
    }
    readings = _read_all(seen, known)
    names = dict.fromkeys(seen, declared.placement)
    apart = {where: _apart(each, ideals[where]) for where, each in seen.items()}
    # the same numbers are the same function, in the family or not
    off = [where for where in seen if apart[where] > readings[where].rounding]
    table = _table(declared, known) if off else {}
    declared_as = _read_all({where: ideals[where] for where in off}, known)
    wrong = {}
    for where in off:
        reading, ideal = readings[where], declared_as[where]
        names[where] = _name(reading, table)
        words = differences(reading, ideal, place.constants) if ideal.understood else []
        if not words and apart[where] > max(SAME, reading.rounding):
            words = [f"{apart[where]:.2g} of the output away from {place.text}"]
        if words:
            wired = "wired as " * reading.understood + reading.text
            wired += f" ({names[where]})" * bool(names[where])
            wrong[where] = f"declared {declared.placement}, {wired}: {'; '.join(words)}"
    normed = None if read_out is None else final_norm(read_out, declared.width)
    findings = _by_layers(wrong, list(seen))
    if read_out is not None:  # of a DyT it cannot be told: it squashes, and divides by nothing
        expected = place.has_final_norm(declared)
        if expected and place.kind == "tanh":
            expected = None
        findings += _final_norm_findings(normed, expected, list(readings.values())[-1])
    return Report(declared, readings, names, normed, [], findings, [])


def _read_all(seen: Mapping[Where, Observation], known: Probe) -> dict[Where, Reading]:
    """Readings of all sublayers; those that gave the same bits are read once."""
    read_before: dict[tuple[bytes, ...], Reading] = {}
    readings = {}
    for where, each in seen.items():
        bits = tuple(np.asarray(array).tobytes() for array in (each.y, *each.given))
        if bits not in read_before:
            read_before[bits] = read(each, known)
        readings[where] = read_before[bits]
    return readings


def _apart(seen: Observation, ideal: Observation) -> float:
    """Largest relative distance over y and all that the branch was given; infinite: other calls."""
    pairs = list(zip((seen.y, *seen.given), (ideal.y, *ideal.given), strict=False))
    if len(seen.given) != len(ideal.given) or any(a.shape != b.shape for a, b in pairs):
        return math.inf
    return max(_distance(_positions(b), _positions(a)) for a, b in pairs)


def _table(declared: config.Model, known: Probe) -> dict[tuple[str, str], Reading]:
    """Readings of all rows, {(name, norm): reading}, at the declared depth."""
    return {
        (name, norm): read_row(place, declared.layers, norm, known)
        for name, place in PLACEMENTS.items()
        for norm in ("layer", "rms")
    }


def _name(reading: Reading, table: Mapping[tuple[str, str], Reading]) -> str:
    """The first row of the table that reads the same, or what the field calls it."""
    same = (
        name
        for (name, _), other in table.items()
        if other.ratio and other.before and not differences(reading, other)
    )
    return next(same, "") or reading.family


def _final_norm_findings(found: bool | None, declared: bool | None, last: Reading) -> list[Finding]:
    if found == declared:
        return []
    if found is None:
        what = (
            "cannot tell whether there is a final norm: logits neither scale with x nor ignore it"
        )
    elif declared and "after the add" in last.norms:
        what = "no final norm, one declared; the last sublayer ends in a norm"
    elif declared:
        what = f"{last.family or last.text} without final norm: nothing normalises the stream here"
    else:
        what = "a final norm, none declared"
    return [Finding("readout", what)]


def _projection_findings(projections: Iterable[Projection]) -> list[Finding]:
    """One finding for each matrix that is not as declared, over all layers where it is not."""
    groups: dict[tuple[str, str], list[Projection]] = {}
    for p in projections:
        groups.setdefault((p.sublayer, p.matrix), []).append(p)
    found = []
    for (sublayer, matrix), group in groups.items():
        off = [p for p in group if abs(_standard_errors([p])) > SIGMAS]
        rest = [p for p in group if p not in off]
        if rest and abs(_standard_errors(rest)) > SIGMAS:
            off = group  # too little to be seen in one layer, but not in all together
        if off:
            others = {m: g[0].declared for (s, m), g in groups.items() if s == sublayer}
            where = f"{sublayer} {matrix} of {_layers([p.layer for p in off])}"
            found.append(Finding(where, _projection_words(off, others)))
    return found


def _projection_words(off: Sequence[Projection], others: Mapping[str, float]) -> str:
    """others: {matrix of the same sublayer: its declared gain}."""
    gain, declared, whole = (
        _rms([p.gain for p in off]),
        _rms([p.declared for p in off]),
        off[0].whole,
    )
    near = SIGMAS / math.sqrt(2 * sum(p.entries for p in off))

    def is_like(other: float) -> bool:
        return abs(gain / other - 1.0) <= near

    words = (
        f"std is {gain:.4g} of Xavier's, {declared:.4g} declared "
        f"({abs(_standard_errors(off)):.0f} standard errors off)"
    )
    if declared != 1.0 and is_like(1.0 / declared):
        return f"{words}: the reciprocal, as if its exponent had the wrong sign"
    if whole != 1.0 and is_like(declared * whole):
        return f"{words}: as if Xavier's of the whole fused matrix"
    if declared != 1.0 and is_like(1.0):
        return f"{words}: as if not scaled at all"
    alike = [name for name, other in others.items() if is_like(other)]
    if alike:
        fused = ", the fused matrix scaled whole" if whole != 1.0 else ""
        return f"{words}: as if with the factor of {', '.join(alike)}{fused}"
    return words


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))


def _standard_errors(group: Sequence[Projection]) -> float:
    """How far found lies from declared, in standard errors of a standard deviation, over several
    layers of one matrix, all of one size.

    1 / sqrt(2n), relative, for a normal law; less for shorter tails (uniform, truncated normal).
    """
    if not all(p.declared for p in group):  # declared to be 0
        return math.inf if any(p.gain for p in group) else 0.0
    entries = sum(p.entries for p in group)
    return (_rms([p.gain / p.declared for p in group]) - 1.0) * math.sqrt(2 * entries)


def _by_layers(wrong: Mapping[Where, str], order: Sequence[Where]) -> list[Finding]:
    """The same words about several sublayers are one finding."""
    groups: dict[str, list[Where]] = {}
    for where, words in wrong.items():
        groups.setdefault(words, []).append(where)
    found = []
    for words, places in groups.items():
        names = dict.fromkeys(where.name for where in places)
        at = " and ".join(
            f"{name} of {_layers([where.layer for where in places if where.name == name])}"
            for name in names
        )
        if len(places) == 1:
            at = f"sublayer {order.index(places[0]) + 1} (layer {places[0].layer} {places[0].name})"
        found.append(Finding(at, words))
    return found


def _layers(layers: Sequence[int]) -> str:
    """'layer 3', 'layers 0-23', 'layers 0-3, 7'."""
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {text}"


def _times(term: Term, name: str, rounding: float = SAME) -> str:
    """'2.632 norm(x)'; the factor is left out where it is 1."""
    body = f"norm({name})" if term.norm else name
    return body if _same(term.factor, 1.0, rounding) else f"{term.factor:.4g} {body}"


def _same(a: float, b: float, rounding: float) -> bool:
    return math.isclose(a, b, rel_tol=max(SAME, rounding))
