"""Where a computation first stops being finite: layer, place, operation, and in which pass.

A function is replayed on the CPU, operation by operation, and every entry that is not finite is
followed back to the operation that made it from finite ones: its origin. Only origins that reach a
returned value are reported, so a NaN that a mask throws away, or an exp that turns -inf into 0, is
no news. Places are the names that `jax.named_scope` gave; a layer is a turn of the outermost scan.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.core import primitives

from normstudy import blame, jaxprs
from normstudy.blame import Mask, Value
from normstudy.jaxprs import Direction, Passes, Place
from normstudy.trees import path_names

ARGUMENT = "argument"  # the operation of an origin that came in from outside
CONSTANT = "constant"  # and of one that the program's text holds
HASTY = {"xla_backend_optimization_level": 0}  # run a few times: half the time to compile


@dataclass(frozen=True)
class Origin:
    """One operation that made values that are not finite from finite ones."""

    kind: Literal["inf", "nan"]  # inf where it made both
    layer: int | None  # turn of the outermost scan, counted along its inputs; None: in no scan
    where: str  # named scopes, e.g. "mlp/down"; for an argument its path
    operation: str
    # recomputed: in the forward pass as the backward pass repeats it (jax.checkpoint), where the
    # forward pass itself was fine. A scope "backward" marks what follows the gradients
    direction: Direction
    dtype: str
    limit: float  # largest finite number of that dtype
    # above the limit: the result in float64. Else the largest finite input; None: there is none
    magnitude: float | None = None
    source: str = ""  # line of code, e.g. "model.py:40:8 (read)"; "" for an argument
    then: str | None = None  # for inf: where a NaN first came of it

    def place(self) -> str:
        """'layer 3 mlp/down, matmul'."""
        return _in_words(self.layer, self.where, self.source, self.operation)

    def text(self) -> str:
        """A sentence for people."""
        parts = [f"{self.kind}: {self.place()}"]
        if self.magnitude is not None and self.magnitude > self.limit:
            parts.append(f"{_number(self.magnitude)} above {self.dtype}'s {_number(self.limit, 6)}")
        elif self.magnitude is not None:
            parts.append(f"from {self.dtype} inputs up to {_number(self.magnitude)}")
        if self.operation != ARGUMENT:
            parts.append(self.direction)
        if self.then is None:
            return ", ".join(parts)
        later = "in the same operation" if self.then == self.place() else f"later in {self.then}"
        return f"{', '.join(parts)}; NaN appears {later}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; kind as words, since a run folder's JSON reads "inf" and "nan" as numbers."""
        kind = {"inf": "infinite", "nan": "not a number"}[self.kind]
        return {**dataclasses.asdict(self), "kind": kind}


def sentence(origins: Sequence[Origin]) -> str:
    """The first origin in words, and how many more there are."""
    if not origins:
        return "all is finite"
    more = f" (and {len(origins) - 1} more)" if len(origins) > 1 else ""
    return f"first {origins[0].text()}{more}"


def find(function: Callable, *arguments: Any) -> list[Origin]:
    """Origins of what is not finite in function(*arguments), earliest first; [] if all is finite.

    arguments: pytrees of arrays on any devices; they are copied to the CPU and not changed.
    Raises what tracing or an operation raises.
    """
    arguments = jax.device_get(arguments)
    with _on_cpu(), jax.debug_nans(False), jax.debug_infs(False):
        program = jaxprs.for_cpu(jax.make_jaxpr(function)(*arguments))
        replay = _Replay(Passes(program))
        leaves = jax.tree_util.tree_leaves_with_path(arguments)
        inputs = [replay.argument(path, jnp.asarray(leaf)) for path, leaf in leaves]
        outputs = replay.settled(replay.interpret(program, inputs, Place()), Place())
    return replay.reported(set().union(*(value.blame for value in outputs)))


class Turn(NamedTuple):
    """Where entries that were inf first made one that is NaN."""

    origin: int  # of the inf
    place: str


class _Replay:
    """An interpreter of jaxprs that keeps the blame. Calls run compiled while all is finite."""

    def __init__(self, passes: Passes):
        self.passes = passes
        self.events: list[Origin | Turn] = []  # what entries are blamed on, by index
        self.known: dict[Any, int] = {}  # index of an event by what identifies it
        self.compiled: dict[int, Callable] = {}

    # ------------------------------------------------------------------ programs and equations

    def interpret(self, program: Any, inputs: list[Value], place: Place) -> list[Value]:
        """Outputs of a program, equation by equation."""
        values = dict(zip(program.invars, inputs, strict=True))
        for variable, array in zip(program.constvars, program.consts, strict=True):
            values[variable] = Value(array, constant=True)

        def read(atom: Any) -> Value:
            if isinstance(atom, core.Literal):
                kind: Any = atom.aval
                return Value(np.asarray(atom.val, kind.dtype), constant=True)
            return values[atom]

        for equation in program.eqns:
            arguments = [read(atom) for atom in equation.invars]
            found = self.equation(equation, arguments, place.inside(equation))
            values.update(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in program.outvars]

    def equation(self, equation: core.JaxprEqn, inputs: list[Value], place: Place) -> list[Value]:
        """Outputs of one equation: of the program that it runs, or as an operation."""
        if equation.primitive is primitives.scan_p and equation.params["length"]:
            return self.scan(equation, inputs, place)
        if equation.primitive is primitives.while_p:
            return self.loop(equation, inputs, place)
        if equation.primitive is primitives.cond_p:
            branches = equation.params["branches"]
            branch = min(max(int(inputs[0].array), 0), len(branches) - 1)
            outputs = self.call(branches[branch], inputs[1:], place)
            return outputs if inputs[0].constant else self.settled(outputs, place)
        body = jaxprs.body(equation)
        if body is not None:
            return self.call(body, inputs, place)
        return self.operation(equation, inputs, place)

    def call(self, jaxpr: Any, inputs: list[Value], place: Place) -> list[Value]:
        """Outputs of a program inside another; what does not leave it is of no interest."""
        arrays = self.run(jaxpr, [value.array for value in inputs])
        if not blame.some(blame.bad(arrays)):
            return blame.outputs(arrays, inputs)
        passed = self.passed_on(jaxpr, inputs, arrays)
        return self.interpret(jaxprs.closed(jaxpr), inputs, place) if passed is None else passed

    def run(self, jaxpr: Any, arrays: list[Any]) -> list[Any]:
        """The program compiled as one, without blame."""
        if id(jaxpr) not in self.compiled:
            program = core.jaxpr_as_fun(jaxprs.closed(jaxpr))
            self.compiled[id(jaxpr)] = jax.jit(program, compiler_options=HASTY)
        return self.compiled[id(jaxpr)](*arrays)

    def passed_on(self, jaxpr: Any, inputs: list[Value], arrays: list[Any]) -> list[Value] | None:
        """Outputs of a call that only passes on what came in; None: it has to be looked into."""
        groups, run = blame.sources(inputs), functools.partial(self.run, jaxpr)
        if not groups or blame.some(blame.born(run, inputs, arrays)[0]):
            return None
        values = blame.outputs(arrays, inputs)
        for same in groups:
            found = arrays if len(groups) == 1 else run([v.well(1, but=same[0]) for v in inputs])
            blame.add(values, blame.both(blame.bad(arrays), found), same)
        blame.add_rest(values, groups)
        return None if self.turned(inputs, values) else values

    def scan(self, equation: core.JaxprEqn, inputs: list[Value], place: Place) -> list[Value]:
        """A scan turn by turn: the outermost one is over the layers."""
        body, length = equation.params["jaxpr"], equation.params["length"]
        inner = jaxprs.closed(body)
        # inputs are constants, carry, xs; outputs carry, ys; xs and ys have an axis more outside
        stacked = sum(map(jaxprs.grows, equation.invars, inner.invars))
        carried = sum(
            not jaxprs.grows(*v) for v in zip(equation.outvars, inner.outvars, strict=True)
        )
        fixed = len(inputs) - stacked - carried
        constants, carry, xs = inputs[:fixed], inputs[fixed : fixed + carried], inputs[-stacked:]
        turns: list[list[Value]] = [[]] * length
        for i in reversed(range(length)) if equation.params["reverse"] else range(length):
            here = place._replace(layer=i) if place.layer is None else place
            rows = [self.in_layer(x.row(i), here.layer) for x in (xs if stacked else ())]
            outputs = self.settled(self.call(body, [*constants, *carry, *rows], here), here)
            carry, turns[i] = outputs[:carried], outputs[carried:]
        return [*carry, *map(blame.stack, zip(*turns, strict=True))]

    def loop(self, equation: core.JaxprEqn, inputs: list[Value], place: Place) -> list[Value]:
        """A while loop, turn by turn if its outputs are not finite."""
        arrays = jaxprs.evaluate(equation, [value.array for value in inputs])
        if not blame.some(blame.bad(arrays)):
            return blame.outputs(arrays, inputs)
        condition, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
        first = equation.params["cond_nconsts"]
        second = first + equation.params["body_nconsts"]
        ours, theirs, carry = inputs[:first], inputs[first:second], inputs[second:]
        while self.run(condition, [value.array for value in (*ours, *carry)])[0]:
            carry = self.call(body, [*theirs, *carry], place)
        return carry

    def operation(self, equation: core.JaxprEqn, inputs: list[Value], place: Place) -> list[Value]:
        """Outputs of one operation, with the blame for each entry that is not finite."""
        evaluate = functools.partial(jaxprs.evaluate, equation)
        arrays = evaluate([value.array for value in inputs])
        values, bad = blame.outputs(arrays, inputs), blame.bad(arrays)
        if not blame.some(bad):
            return values
        born, shown = blame.born(evaluate, inputs, arrays)
        meant = values[0].constant and any(value.meant() for value in inputs)
        if blame.some(born) and not meant:
            blame.add(values, born, [self.birth(equation, inputs, shown, born, place)])
        groups = blame.sources(inputs)
        for same in groups:
            found = evaluate([value.alone(same[0]) for value in inputs])
            blame.add(values, blame.both(bad, found), same)
        blame.add_rest(values, groups)
        for index, nans in self.turned(inputs, values):
            name = _in_words(
                place.layer, place.where, jaxprs.source(equation), jaxprs.words(equation)
            )
            blame.add(values, nans, [self.index(Turn(index, name), Turn(index, name))])
        return values

    # ------------------------------------------------------------------------------- events

    def index(self, key: Any, event: Origin | Turn) -> int:
        """Index of the event of that key, which is new or known."""
        if key not in self.known:
            self.known[key] = len(self.events)
            self.events.append(event)
        return self.known[key]

    def birth(
        self,
        equation: core.JaxprEqn,
        inputs: list[Value],
        arrays: Sequence[Any],
        born: list[Mask],
        place: Place,
    ) -> int:
        """Index of the origin that stands at this equation, in this layer."""
        direction, source = self.passes.direction(equation, place), jaxprs.source(equation)
        event = (place.layer, place.where, jaxprs.words(equation))
        if direction == "recomputed" and (*event, source) in self.known:
            return self.known[*event, source]  # the forward pass met it before
        key = (id(equation), place.layer)
        if key in self.known:
            return self.known[key]
        well = [value.well(0) for value in inputs]
        largest = _overflow(equation, well, born)
        magnitude = _largest(well) if largest is None else largest
        about = _about(arrays, born)
        origin = Origin(about.kind, *event, direction, about.dtype, about.limit, magnitude, source)
        if direction == "forward":
            self.known.setdefault((*event, source), len(self.events))
        return self.index(key, origin)

    def turned(self, inputs: list[Value], outputs: list[Value]) -> list[tuple[int, list[Mask]]]:
        """Origins of inf that are NaN here for the first time, and where in the outputs."""
        came = [self.events[index] for index in set().union(*(value.blame for value in inputs))]
        before = {event.origin for event in came if isinstance(event, Turn)}
        found = []
        for index in sorted(set().union(*(value.blame for value in outputs)) - before):
            event = self.events[index]
            if isinstance(event, Origin) and event.kind == "inf":
                nans = [value.nans(index) for value in outputs]
                if blame.some(nans) and not blame.some([value.nans(index) for value in inputs]):
                    found.append((index, nans))
        return found

    def reported(self, reached: set[int]) -> list[Origin]:
        """The origins among these events, each with the first of its turns."""
        turns: dict[int, str] = {}
        for event in (self.events[index] for index in sorted(reached)):
            if isinstance(event, Turn):
                turns.setdefault(event.origin, event.place)
        return [
            dataclasses.replace(event, then=turns.get(index))
            for index, event in enumerate(self.events)
            if index in reached and isinstance(event, Origin)
        ]

    # ---------------------------------------------------------------- values from elsewhere

    def argument(self, path: tuple, array: Any) -> Value:
        """An argument; where it is not finite it is an origin itself."""
        names = path_names(path)
        where = "/".join(names[1:]) or f"argument {names[0]}"
        return self.given(Value(array), Place(None, where), ARGUMENT)

    def settled(self, values: list[Value], place: Place) -> list[Value]:
        """Values that leave a layer, a branch or the whole: an inf that was meant is not any more.

        Used further on it would be found there, in another layer.
        """
        return [self.given(v, place, CONSTANT) if v.meant() else v for v in values]

    def given(self, value: Value, place: Place, operation: str) -> Value:
        """The value, with this place to blame for entries that are not finite."""
        mask = blame.not_finite(value.array)
        if not mask.any():
            return value
        about = _about([value.array], [mask])
        origin = Origin(
            about.kind, place.layer, place.where, operation, place.direction, about.dtype,
            about.limit,
        )  # fmt: skip
        return dataclasses.replace(value, blame={self.index(object(), origin): mask})

    def in_layer(self, row: Value, layer: int | None) -> Value:
        """A layer's share of a stacked argument: the origin is then in that layer."""
        moved = {}
        for index, mask in row.blame.items():
            event = self.events[index]
            if isinstance(event, Origin) and event.operation == ARGUMENT and event.layer is None:
                kind = _about([row.array], [mask]).kind
                event = dataclasses.replace(event, layer=layer, kind=kind)
                index = self.index((ARGUMENT, index, layer), event)
            moved[index] = mask
        return dataclasses.replace(row, blame=moved)


class _About(NamedTuple):
    """What is told of entries that are not finite."""

    kind: Literal["inf", "nan"]
    dtype: str
    limit: float


def _about(arrays: Sequence[Any], masks: Sequence[Mask]) -> _About:
    held = [np.asarray(x)[mask] for x, mask in zip(arrays, masks, strict=True) if mask.any()]
    kind = "inf" if any(np.isinf(x).any() for x in held) else "nan"
    return _About(kind, str(held[0].dtype), float(jnp.finfo(held[0].dtype).max))


def _overflow(equation: core.JaxprEqn, inputs: list[Any], born: list[Mask]) -> float | None:
    """Largest size in float64 of the entries that overflowed; None: they do there too."""
    if jaxprs.programs(equation):
        return None  # they are written for their own dtype (a solver, how a scatter adds)
    wide = np.dtype(np.float64)
    parameters = {
        name: wide
        for name, value in equation.params.items()
        if isinstance(value, np.dtype) and jnp.issubdtype(value, np.floating)
    }
    arrays = [np.asarray(x, wide) if jnp.issubdtype(x.dtype, np.floating) else x for x in inputs]
    with jax.enable_x64(True):
        try:
            found = jaxprs.evaluate(equation, arrays, **parameters)
        except (TypeError, ValueError, NotImplementedError):
            return None  # an operation that float64 does not have
    return _largest([np.asarray(x)[mask] for x, mask in zip(found, born, strict=True)])


def _largest(arrays: Sequence[Any]) -> float | None:
    """Largest size of the finite entries; None: there are none."""
    sizes = [np.abs(np.asarray(x)).astype(np.float64) for x in arrays if blame.inexact(x)]
    finite = [size[np.isfinite(size)] for size in sizes]
    return max((float(size.max()) for size in finite if size.size), default=None)


def _in_words(layer: int | None, where: str, source: str, operation: str) -> str:
    """'layer 3 mlp/down, matmul'; the line of code stands in for scopes that are not there."""
    stands = where or source
    layers = "" if layer is None else f"layer {layer}{' ' if where else ', '}"
    return f"{layers}{stands}{', ' if stands else ''}{operation}"


def _number(x: float, digits: int = 2) -> str:
    """12, 7.0e4; with 6 digits 65504, 3.40282e38."""
    if x == 0 or 1e-3 <= x < 1e4 or (digits > 2 and x < 1e6):
        return f"{x:.{max(digits, 3)}g}"
    size, power = f"{x:.{digits - 1}e}".split("e")
    return f"{size}e{int(power)}"


def _on_cpu() -> contextlib.AbstractContextManager:
    """Operations on the host's CPU, where this process has one as a device."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        return contextlib.nullcontext()
