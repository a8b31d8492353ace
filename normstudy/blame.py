"""An array, and for each entry that is not finite the events that made it so.

Blame is found by counterfactuals. An entry is born where it is not finite even if all that came in
sick had been well; it comes of an event if that event's entries alone are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

Mask = np.ndarray | np.bool_  # numpy makes the latter of an array without axes


@dataclass(frozen=True)
class Value:
    """An array with the blame for its entries."""

    array: Any
    blame: dict[int, Mask] = field(default_factory=dict)  # {index of an event: mask}
    # computed from no argument: an inf without blame in it was meant, such as the -inf of a mask
    constant: bool = False

    def well(self, instead: int, but: int | None = None) -> Any:
        """The array with this number for the entries that are blamed on events, but for one."""
        masks = [mask for index, mask in self.blame.items() if index != but]
        if not masks:
            return self.array
        kept = np.asarray(False if but is None else self.blame.get(but, False))
        return _replaced(self.array, np.logical_or.reduce(masks) & ~kept, instead)

    def alone(self, index: int) -> Any:
        """The array with 1 for all entries but those that are blamed on this event."""
        if not inexact(self.array):
            return self.array
        return _replaced(self.array, ~self.mask(index), 1)

    def mask(self, index: int) -> Mask:
        """The entries that are blamed on this event."""
        return self.blame.get(index, np.zeros(self.array.shape, bool))

    def nans(self, index: int) -> Mask:
        """Those of them that are NaN."""
        mask = self.mask(index)
        return mask & np.isnan(np.asarray(self.array)) if mask.any() else mask

    def meant(self) -> bool:
        """Does it hold an inf or NaN that the program put there?"""
        return self.constant and not self.blame and bool(not_finite(self.array).any())

    def row(self, i: int) -> Value:
        """Entry i of axis 0."""
        masks = {index: np.asarray(mask)[i] for index, mask in self.blame.items()}
        blame = {index: mask for index, mask in masks.items() if mask.any()}
        return Value(host(self.array)[i], blame, self.constant)


def stack(rows: Sequence[Value]) -> Value:
    """The inverse of `row`."""
    events = set().union(*(row.blame for row in rows))
    blame: dict[int, Mask] = {i: np.stack([row.mask(i) for row in rows]) for i in events}
    arrays = [host(row.array) for row in rows]
    join = np.stack if isinstance(arrays[0], np.ndarray) else jnp.stack
    return Value(join(arrays), blame, all(row.constant for row in rows))


def outputs(arrays: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
    """What an operation gave, without blame as yet."""
    constant = all(value.constant for value in inputs)
    return [Value(array, constant=constant) for array in arrays]


def sources(inputs: Sequence[Value]) -> list[list[int]]:
    """Events that came in; those that hold the same entries stand together."""
    groups: dict[tuple, list[int]] = {}
    for index in sorted(set().union(*(value.blame for value in inputs))):
        held = tuple(v.blame[index].tobytes() if index in v.blame else b"" for v in inputs)
        groups.setdefault(held, []).append(index)
    return list(groups.values())


def born(
    evaluate: Callable, inputs: Sequence[Value], arrays: Sequence[Any]
) -> tuple[list[Mask], Sequence[Any]]:
    """Entries of these outputs that come of nothing that came in, and outputs that show it."""
    masks, shown = bad(arrays), arrays
    # twice, since the number put in may itself be too much: 0 for a quotient, 1 for a sum
    for instead in (1, 0) if any(value.blame for value in inputs) else ():
        if some(masks):
            found = evaluate([value.well(instead) for value in inputs])
            masks, shown = both(masks, found), found if instead else shown
    return masks, shown


def add(values: Sequence[Value], masks: Sequence[Mask], events: Sequence[int]) -> None:
    """Blame these entries on these events too."""
    for value, mask in zip(values, masks, strict=True):
        for index in events if mask.any() else ():
            value.blame[index] = value.mask(index) | mask


def add_rest(values: Sequence[Value], groups: Sequence[Sequence[int]]) -> None:
    """Blame on all of them the entries that none alone made not finite: it took several."""
    rest = [
        mask & ~np.logical_or.reduce([np.zeros_like(mask), *value.blame.values()])
        for mask, value in zip(bad([v.array for v in values]), values, strict=True)
    ]
    add(values, rest, [index for group in groups for index in group])


def not_finite(array: Any) -> Mask:
    """Mask of the entries that are inf or NaN."""
    return ~np.isfinite(np.asarray(array)) if inexact(array) else np.zeros(array.shape, bool)


def bad(arrays: Sequence[Any]) -> list[Mask]:
    """`not_finite` of each."""
    return [not_finite(array) for array in arrays]


def both(masks: Sequence[Mask], arrays: Sequence[Any]) -> list[Mask]:
    """The masks, where these arrays are not finite either."""
    return [mask & not_finite(array) for mask, array in zip(masks, arrays, strict=True)]


def some(masks: Sequence[Mask]) -> bool:
    """Is any entry of any mask set?"""
    return any(bool(mask.any()) for mask in masks)


def inexact(array: Any) -> bool:
    """Can it hold an inf?"""
    return jnp.issubdtype(array.dtype, np.inexact)


def host(array: Any) -> Any:
    """As numpy, but for random keys."""
    return np.asarray(array) if isinstance(array.dtype, np.dtype) else array


def _replaced(array: Any, mask: Mask, instead: int) -> np.ndarray:
    array = np.asarray(array)
    return np.where(mask, np.asarray(instead, array.dtype), array)
