"""THE TABLE: where the norm sits. One row per placement, and the row is the equation.

    x  stream       f  sublayer (attention or MLP)
    n  this sublayer's norms, n.pre and n.post       c  constants of the depth, c.alpha and c.beta

Nothing else in the package branches on a placement's name. To add a method, add a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from normstudy.errors import choose
from normstudy.theory import Constants, deepnorm_decoder, no_constants


@dataclass(frozen=True)
class Placement:
    """One row. Checks itself when made: raises ValueError where equation and columns disagree."""

    equation: Callable[[Any, Callable, Any, Constants], Any]
    norms: tuple[str, ...]  # the norms that each sublayer owns
    final_norm: bool  # does a norm stand between x_L and the readout?
    constants: Callable[[int], Constants]  # of the number of blocks L
    source: str
    skip_norms: tuple[str, ...] = field(init=False)  # the norms that the skip path crosses
    text: str = field(init=False)  # the equation as it stands in the table: 'x + f(n.pre(x))'

    def __post_init__(self):
        called, _ = _trace(self.equation, self.norms, branch=1.0)
        if set(called) != set(self.norms):
            raise ValueError(f"the equation calls norms {called}, the row declares {self.norms}")
        if not self.source:
            raise ValueError("a row needs a source")
        _, gains = _trace(self.equation, self.norms, branch=0.0)
        object.__setattr__(self, "skip_norms", gains)
        line = inspect.getsource(self.equation).split("lambda x, f, n, c: ")[1]
        object.__setattr__(self, "text", line.split(",  ")[0].strip(" ,\n"))


def _trace(equation: Callable, norms: tuple[str, ...], branch: float):
    """Norms that are called, and those that the skip path crosses, found by running the row.

    Each norm multiplies by a prime of its own and the sublayer by `branch`: with branch = 0 only
    the skip path is left, so the primes that divide the result name the norms on it.
    """
    called: list[str] = []
    primes = dict(zip(norms, (2, 3, 5, 7, 11), strict=False))

    def norm(name: str):
        def call(x: float) -> float:
            called.append(name)
            return primes[name] * x

        return call

    spies = SimpleNamespace(**{name: norm(name) for name in norms})
    try:
        result = equation(1.0, lambda x: branch * x, spies, Constants())
    except AttributeError as error:
        raise ValueError(
            f"the equation uses a norm that the row does not declare: {error}"
        ) from None
    return called, tuple(name for name in norms if round(result) % primes[name] == 0)


# fmt: off
PLACEMENTS: dict[str, Placement] = {
    #                                what the residual stream does           norms      final norm  depth constants
    "pre":      Placement(lambda x, f, n, c: x + f(n.pre(x)),                ("pre",),  True,       no_constants,
                          "Xiong et al. 2020 (2002.04745); GPT-2, Radford et al. 2019"),
    "post":     Placement(lambda x, f, n, c: n.post(x + f(x)),               ("post",), False,      no_constants,
                          "Vaswani et al. 2017 (1706.03762), section 3.1"),
    "deepnorm": Placement(lambda x, f, n, c: n.post(c.alpha * x + f(x)),     ("post",), False,      deepnorm_decoder,
                          "Wang et al. 2022 (2203.00555), section 4.3, decoder-only"),
}
# fmt: on


def as_rows() -> list[dict[str, str]]:
    """The table for people: name, equation, final norm, alpha and beta at L = 48, source."""
    rows = []
    for name, place in PLACEMENTS.items():
        c = place.constants(48)
        rows.append(
            {
                "placement": name,
                "the stream": place.text,
                "final norm": "yes" if place.final_norm else "no",
                "alpha, beta at L = 48": f"{c.alpha:.4g}, {c.beta:.4g}",
                "source": place.source,
            }
        )
    return rows


def row(name: str) -> Placement:
    """The row of that name. Raises UserError that lists the valid ones."""
    return PLACEMENTS[choose("placement", name, PLACEMENTS)]
