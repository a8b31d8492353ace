"""What an equation is run on: the stream as the sum of its skip path and of what branches add."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Array = Any  # NumPy's or jax's
Seen = Callable[[Array, Array], None]


class Parts:
    """skip + branch, either of which may not be there yet. Placements' equations run on it.

    seen(skip, branch) is called once, where the two are added up for good: at a norm of the sum, or
    at the end.
    """

    __array_ufunc__ = None  # numbers leave the product to __rmul__

    def __init__(self, skip: Array | None, branch: Array | None, seen: Seen):
        self.skip, self.branch, self.seen = skip, branch, seen

    def whole(self) -> Array:
        """The sum."""
        if self.skip is None or self.branch is None:
            return self.branch if self.skip is None else self.skip  # type: ignore[return-value]
        self.seen(self.skip, self.branch)
        return self.skip + self.branch

    def normed(self, norm: Callable[[Array], Array]) -> Parts:
        """What a norm makes of it: of a sum, the skip path of what follows."""
        y = norm(self.whole())
        if self.skip is None:
            return Parts(None, y, self.seen)
        return Parts(y, None, self.seen)

    def __add__(self, other: Any) -> Parts:
        if not isinstance(other, Parts):  # a bias goes with the branch, if there is one
            if self.branch is None:
                return Parts(self.skip + other, None, self.seen)
            return Parts(self.skip, self.branch + other, self.seen)
        return Parts(_sum(self.skip, other.skip), _sum(self.branch, other.branch), self.seen)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> Parts:
        return Parts(_times(factor, self.skip), _times(factor, self.branch), self.seen)

    __rmul__ = __mul__

    def __sub__(self, other: Any) -> Parts:
        return self + -1.0 * other

    def __truediv__(self, divisor: Any) -> Parts:
        return self * (1.0 / divisor)


def _sum(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


def _times(factor: Any, part: Array | None) -> Array | None:
    return None if part is None else factor * part
