"""THE TABLE: where the norm sits. One row per placement, and the row is the equation.

    x  stream       f  sublayer (attention or MLP): f(h), or f(h, n.mid) with a norm before its last
                       matrix, or f(h, heads=(n.q_norm, ...)) with norms on q, k and v
    n  this sublayer's norms: n.pre(h), or n.pre(h, c.before), which is h where c.before is 0
    c  numbers: constants of the depth (theory.Constants), and gains that are learned (Gain)

A row whose attention and MLP differ has a second equation, the MLP's. Nothing else in the package
branches on a placement's name. To add a method, add a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from normstudy import config, theory
from normstudy.errors import choose
from normstudy.theory import Constants, Scales, Tuning, no_constants, no_scales, no_tuning

Equation = Callable[[Any, Callable, Any, Any], Any]

SUBLAYERS = ("attn", "mlp")  # the order in which the stream passes them


class Gain(NamedTuple):
    """A learned factor of the equation, c.NAME."""

    size: Literal["", "D", "H"]  # one number, one for each channel, one for each head
    start: float | None = None  # at step 0; None: the constant of the same name
    shared: bool = False  # one for both sublayers of a block


@dataclass(frozen=True)
class Placement:
    """One row. Checks itself when made: raises ValueError where equation and columns disagree."""

    equation: Equation  # of attention, and of the MLP where that has none of its own
    norms: tuple[str, ...]  # all that the equations call
    final_norm: bool  # does a norm stand between x_L and the readout?
    constants: Callable[[int], Constants]  # of the number of blocks L
    source: str
    mlp: Equation | None = None
    gains: Mapping[str, Gain] = field(default_factory=dict)
    init: Callable[[int], Scales] = no_scales  # of L: factors on the init, beside the beta
    tuning: Callable[[int], Tuning] = no_tuning  # of L: what it asks of Adam
    kind: Literal["scale", "tanh"] | None = None  # the norm it is made of; None: as configured
    profiled: str = ""  # the gain that one forward pass at step 0 sets
    skip_norms: tuple[str, ...] = field(init=False)  # the norms that the skip path crosses
    text: str = field(init=False)  # as it stands in the table: 'x + f(n.pre(x))'
    uses: Mapping[str, tuple[str, ...]] = field(init=False)  # {sublayer: its norms and gains}
    inner: bool = field(init=False)  # does it hand a branch something for its inside?

    def __post_init__(self):
        if not self.source:
            raise ValueError("a row needs a source")
        found = {name: _trace(self.of(name), self.norms, self.gains) for name in SUBLAYERS}
        called = {name for each in found.values() for name in each.norms}
        if called != set(self.norms):
            raise ValueError(
                f"the equation calls norms {sorted(called)}, the row declares {self.norms}"
            )
        used = {name for each in found.values() for name in each.gains}
        if used != set(self.gains):
            raise ValueError(f"the equation uses gains {sorted(used)}, the row declares others")
        crossed = {name for each in found.values() for name in each.crossed}
        texts = dict.fromkeys(_text(self.of(name)) for name in SUBLAYERS)
        object.__setattr__(self, "skip_norms", tuple(n for n in self.norms if n in crossed))
        object.__setattr__(self, "text", "; MLP: ".join(texts))
        uses = {name: (*each.norms, *each.gains) for name, each in found.items()}
        object.__setattr__(self, "uses", uses)
        object.__setattr__(self, "inner", any(each.inner for each in found.values()))

    def has_final_norm(self, model: config.Model) -> bool:
        """Does a norm stand between x_L and the readout: as the config says, or as the row?"""
        return self.final_norm if model.final_norm is None else model.final_norm

    def norms_branches_alone(self, model: config.Model) -> bool:
        """Does it have norms, and none that the stream passes, not even before the readout?"""
        return bool(self.norms) and not self.skip_norms and not self.has_final_norm(model)

    def of(self, sublayer: str) -> Equation:
        """The equation of attn or mlp."""
        return self.mlp if sublayer == "mlp" and self.mlp is not None else self.equation

    def norms_of(self, sublayer: str) -> tuple[str, ...]:
        """The norms that attn or mlp owns."""
        return tuple(name for name in self.norms if name in self.uses[sublayer])

    def gains_of(self, sublayer: str) -> dict[str, Gain]:
        """The gains that attn or mlp uses."""
        return {name: own for name, own in self.gains.items() if name in self.uses[sublayer]}

    def starts(self, layers: int) -> dict[str, float]:
        """The gains at step 0; of a profiled one, what stands before the profile."""
        constants = self.constants(layers)
        return {
            name: float(getattr(constants, name) if gain.start is None else gain.start)
            for name, gain in self.gains.items()
        }

    def counts_depth(self) -> bool:
        """Does the row itself scale anything by the depth?"""
        few, many = (
            [*self.constants(L), *self.init(L).values(), *self.tuning(L)] for L in (12, 48)
        )
        return any(np.shape(a) != np.shape(b) or np.any(a != b) for a, b in zip(few, many))  # noqa: B905


class _Traced(NamedTuple):
    norms: tuple[str, ...]  # called
    gains: tuple[str, ...]  # used
    crossed: tuple[str, ...]  # norms on the skip path
    inner: bool  # was the branch handed more than what it reads?


class _Spy:
    """Attributes that remember which were asked for."""

    def __init__(self, **values: Any):
        self.values, self.asked = values, []

    def __getattr__(self, name: str) -> Any:
        if name not in self.values:
            raise AttributeError(name)
        self.asked.append(name)
        return self.values[name]


def _trace(equation: Equation, norms: tuple[str, ...], gains: Mapping[str, Gain]) -> _Traced:
    """What the equation calls, and the norms that the skip path crosses, found by running it.

    Each norm multiplies by a prime of its own and the sublayer by 0, so that only the skip path is
    left: the primes that divide the result name the norms on it.
    """
    primes = dict(zip(norms, (2, 3, 5, 7, 11), strict=False))
    own = _Spy(**{name: lambda x, *_, p=p: p * x for name, p in primes.items()})
    numbers = _Spy(**Constants()._asdict() | dict.fromkeys(gains, 1.0))
    handed = []

    def branch(h: float, *mid: Any, **heads: Any) -> float:
        handed.extend((*mid, *heads))
        return 0.0 * h

    try:
        result = equation(1.0, branch, own, numbers)
    except AttributeError as error:
        raise ValueError(f"the equation uses what the row does not declare: {error}") from None
    crossed = tuple(name for name, prime in primes.items() if round(result) % prime == 0)
    used = tuple(dict.fromkeys(name for name in numbers.asked if name in gains))
    return _Traced(tuple(dict.fromkeys(own.asked)), used, crossed, bool(handed))


def _text(equation: Equation) -> str:
    """The equation as it is written: from its colon to the comma or bracket that ends it."""
    line = inspect.getsource(equation).split("lambda x, f, n, c: ")[1]
    depth = 0
    for i, sign in enumerate(line):
        depth += (sign in "([") - (sign in ")]")
        if depth < 0 or (sign in ",\n" and depth == 0):
            return line[:i].strip()
    return line.strip()


# fmt: off
PLACEMENTS: dict[str, Placement] = {
    #                                what the residual stream does                       norms              final norm  depth constants
    # the two of 2017 and 2020, and what scales their init by the depth
    "pre":            Placement(lambda x, f, n, c: x + f(n.pre(x)),                      ("pre",),          True,  no_constants,
        "Xiong et al. 2020 (2002.04745); GPT-2, Radford et al. 2019"),
    "pre-gpt2":       Placement(lambda x, f, n, c: x + f(n.pre(x)),                      ("pre",),          True,  no_constants,
        "Radford et al. 2019 (GPT-2), section 2.3; its N is 2L", init=theory.out_scales),
    "pre-olmo":       Placement(lambda x, f, n, c: x + f(n.pre(x)),                      ("pre",),          True,  no_constants,
        "Groeneveld et al. 2024 (OLMo, 2402.00838)", init=theory.out_scales_by_block),
    "post":           Placement(lambda x, f, n, c: n.post(x + f(x)),                     ("post",),         False, no_constants,
        "Vaswani et al. 2017 (1706.03762), section 3.1"),
    "post-gpt2":      Placement(lambda x, f, n, c: n.post(x + f(x)),                     ("post",),         False, no_constants,
        "post with the init of Radford et al. 2019 (GPT-2)", init=theory.out_scales),
    "ds-init":        Placement(lambda x, f, n, c: n.post(x + f(x)),                     ("post",),         False, no_constants,
        "Zhang et al. 2019 (1908.11365)", init=theory.ds_scales),
    # post-norm with a heavier skip path
    "deepnorm":       Placement(lambda x, f, n, c: n.post(c.alpha * x + f(x)),           ("post",),         False, theory.deepnorm_decoder,
        "Wang et al. 2022 (2203.00555), section 4.3, decoder-only"),
    "admin":          Placement(lambda x, f, n, c: n.post(c.alpha * x + f(x)),           ("post",),         False, theory.admin,
        "admin-torch 2022; Liu et al. 2020 (2004.08249)", gains={"alpha": Gain("D")}),
    "admin-profiled": Placement(lambda x, f, n, c: n.post(c.alpha * x + f(x)),           ("post",),         False, no_constants,
        "Liu et al. 2020 (2004.08249), section 4.2", gains={"alpha": Gain("D")}, profiled="alpha"),
    "keel":           Placement(lambda x, f, n, c: n.post(c.alpha * x + f(n.pre(x)), c.after), ("pre", "post"), False, theory.keel,
        "Chen & Wei 2026 (2601.19895), equation 8 and section 3.1"),
    # no norm at all, or a gain in its place
    "t-fixup":        Placement(lambda x, f, n, c: x + f(x),                             (),                False, theory.t_fixup,
        "Huang et al. 2020 (ICML), section 3.3", init=theory.t_fixup_scales),
    "fixup":          Placement(lambda x, f, n, c: x + c.gain * f(x + c.into) + c.onto,  (),                False, no_constants,
        "Zhang et al. 2019 (1901.09321)", init=theory.fixup_scales, gains={"gain": Gain("", 1.0), "into": Gain("", 0.0), "onto": Gain("", 0.0)}),
    "rezero":         Placement(lambda x, f, n, c: x + c.gain * f(x),                    (),                False, no_constants,
        "Bachlechner et al. 2020 (2003.04887)", gains={"gain": Gain("", 0.0, shared=True)}),
    "skipinit":       Placement(lambda x, f, n, c: x + c.gain * f(x),                    (),                False, no_constants,
        "De & Smith 2020 (2002.10444)", gains={"gain": Gain("", 0.0)}),
    "layerscale":     Placement(lambda x, f, n, c: x + c.gain * f(n.pre(x)),             ("pre",),          True,  no_constants,
        "Touvron et al. 2021 (2103.17239); 1e-4 as its code", gains={"gain": Gain("D", 1e-4)}),
    # another norm, or more of them
    "scalenorm":      Placement(lambda x, f, n, c: x + f(n.pre(x)),                      ("pre",),          True,  no_constants,
        "Nguyen & Salazar 2019 (1910.05895), without FixNorm", init=theory.small_scales, kind="scale"),
    "dyt":            Placement(lambda x, f, n, c: x + f(n.pre(x)),                      ("pre",),          True,  no_constants,
        "Zhu et al. 2025 (2503.10622)", kind="tanh"),
    "peri":           Placement(lambda x, f, n, c: x + n.post(f(n.pre(x))),              ("pre", "post"),   True,  no_constants,
        "Kim et al. 2025 (2502.02732)"),
    "sandwich":       Placement(lambda x, f, n, c: x + n.post(f(n.pre(x))),              ("pre", "post"),   True,  no_constants,
        "Ding et al. 2021 (CogView, 2105.13290)", init=theory.out_scales),
    "reordered":      Placement(lambda x, f, n, c: x + n.post(f(x)),                     ("post",),         True,  no_constants,
        "Liu et al. 2022 (Swin v2, 2111.09883); OLMo 2 (2501.00656), without its QK-norm"),
    "sub-ln":         Placement(lambda x, f, n, c: x + f(n.pre(x), n.mid),               ("pre", "mid"),    True,  theory.sub_ln,
        "Wang et al. 2022 (Magneto, 2210.06423), decoder-only"),
    "normformer":     Placement(lambda x, f, n, c: x + n.post(f(n.pre(x), c.heads)),     ("pre", "mid", "post"), True, no_constants,
        "Shleifer et al. 2021 (2110.09456)", gains={"heads": Gain("H", 1.0), "alpha": Gain("D")},
                            mlp=lambda x, f, n, c: c.alpha * x + f(n.pre(x), n.mid)),
    "hybridnorm":     Placement(lambda x, f, n, c: x + f(x, heads=(n.q_norm, n.k_norm, n.v_norm)),      ("q_norm", "k_norm", "v_norm", "pre"), True, no_constants,
        "Zhuo et al. 2025 (2503.04598)", init=theory.out_scales,
                            mlp=lambda x, f, n, c: n.pre(x) + f(n.pre(x))),
    # what differs from block to block, or follows the depth
    "mix-ln":         Placement(lambda x, f, n, c: n.post(x + f(n.pre(x, c.before)), c.after), ("pre", "post"), True, theory.mix_ln,
        "Li et al. 2024 (2412.13795)"),
    "lns":            Placement(lambda x, f, n, c: x + f(c.branch * n.pre(x)),           ("pre",),          True,  theory.layer_norm_scaling,
        "Sun et al. 2025 (LayerNorm Scaling, 2502.05795)"),
    "depth-mup":      Placement(lambda x, f, n, c: x + c.branch * f(n.pre(x)),           ("pre",),          True,  theory.depth_mup,
        "Yang et al. 2023 (2310.02244)", tuning=theory.depth_mup_tuning),
    "completep":      Placement(lambda x, f, n, c: x + c.branch * f(n.pre(x)),           ("pre",),          True,  theory.complete_p,
        "Dey et al. 2025 (2505.01618)", tuning=theory.complete_p_tuning),
}
# fmt: on

# what the one line cannot hold, and why
LEFT_OUT = {
    "ResiDual (2304.14802)": "two streams, of which the second is normed at the end alone",
    "B2T (2206.00330)": "its MLP adds the block's input, which the stream no longer holds",
    "nGPT (2410.01131)": "projects every matrix of the model after every update",
    "hyper-connections (2409.19606)": "several streams, mixed by learned matrices",
}


def as_rows(layers: int = 48, measured: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """The table for people, its numbers at so many blocks.

    measured: {placement: max stable learning rate in words}, where there is one.
    """
    rows = []
    for name, place in PLACEMENTS.items():
        kind = {"scale": " (ScaleNorm)", "tanh": " (DyT)"}.get(place.kind or "", "")
        row = {
            "placement": name,
            "the stream": place.text,
            "final norm": ("yes" if place.final_norm else "no") + kind,
            f"c at L = {layers}": _numbers(place, layers),
            f"init and Adam at L = {layers}": _scales(place, layers),
        }
        if measured is not None:
            row[f"max stable LR at L = {layers}"] = measured.get(name, "-")
        rows.append(row | {"source": place.source})
    return rows


def row(name: str) -> Placement:
    """The row of that name. Raises UserError that lists the valid ones."""
    return PLACEMENTS[choose("placement", name, PLACEMENTS)]


def _numbers(place: Placement, layers: int) -> str:
    """What the equation multiplies by, where it is not 1: 'alpha 3.13', 'gain 0, learned'."""
    found = []
    for name, own in place.constants(layers)._asdict().items():
        if name != "beta" and name not in place.gains and np.any(own != 1.0):
            switch = " (1: there, 0: not)" if name in ("before", "after") else ""
            found.append(f"{name} {_words(own)}{switch}")
    for name, start in place.starts(layers).items():
        how = "from a profile" if name == place.profiled else f"{start:.4g}"
        found.append(f"{name} {how}, learned")
    return "; ".join(found) or "-"


def _scales(place: Placement, layers: int) -> str:
    """Factors on the init as it is configured, and on Adam's numbers for the layers."""
    factors: dict[str, list[str]] = {}
    beta = place.constants(layers).beta
    if beta != 1.0:
        factors[_words(beta)] = ["v", "o", "up", "down"]
    for role, own in place.init(layers).items():
        factors.setdefault(_words(own), []).append(role)
    found = [f"{' '.join(roles)} x {factor}" for factor, roles in factors.items()]
    tuning = place.tuning(layers)._asdict()
    found += [f"{name} x {_words(own)}" for name, own in tuning.items() if own != 1.0]
    return "; ".join(found) or "-"


def _words(number: float | np.ndarray) -> str:
    """'2.632', or 'first to last' where it goes with the depth."""
    flat = np.atleast_1d(np.asarray(number, float)).ravel()
    ends = dict.fromkeys(f"{value:.4g}" for value in (flat[0], flat[-1]))
    return " to ".join(ends)
