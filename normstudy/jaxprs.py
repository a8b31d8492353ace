"""Reading a jaxpr: places and passes of its equations, the programs inside them. jax 0.10 to 0.12.

A program here is a jaxpr with its constants (ClosedJaxpr; the same class as Jaxpr from 0.12 on).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.extend import core, source_info_util
from jax.extend.core import primitives

JAXPRS = (core.Jaxpr, core.ClosedJaxpr)
Direction = Literal["forward", "recomputed", "backward"]
WORDS = {
    "add_any": "add", "broadcast_in_dim": "broadcast", "convert_element_type": "cast",
    "cumsum": "running sum", "div": "divide", "dot_general": "matmul", "integer_pow": "power",
    "mul": "multiply", "neg": "negate", "pow": "power", "reduce_max": "max", "reduce_sum": "sum",
    "rsqrt": "1/sqrt", "scatter-add": "scatter add", "select_n": "select", "sub": "subtract",
}  # fmt: skip
# parts of a name stack that say how the equation came about, not where it stands
MACHINERY = {"rematted_computation", "checkpoint", "remat", "backward"}


class Place(NamedTuple):
    """Where an interpreter stands."""

    layer: int | None = None  # turn of the outermost scan
    stack: str = ""  # name stacks of the equation and of those around it

    def inside(self, equation: core.JaxprEqn) -> Place:
        """The place of an equation of the program that stands here."""
        return self._replace(stack=f"{self.stack}/{equation.source_info.name_stack}")

    @property
    def where(self) -> str:
        """The named scopes alone: 'transpose(jvp(mlp))/down' is 'mlp/down'."""
        names = re.sub(r"\w+\(|\)", "", self.stack).split("/")
        # an einsum leaves its equation, 'BTNH,BSNH->BNTS'
        return "/".join(n for n in names if n and n not in MACHINERY and "->" not in n)

    @property
    def direction(self) -> Direction:
        """The pass, as far as the names tell; a scope "backward" says it by hand."""
        if "rematted_computation" in self.stack:
            return "recomputed"
        by_hand = "backward" in self.stack.split("/")
        return "backward" if by_hand or "transpose(" in self.stack else "forward"


class Passes:
    """Which pass each equation of a program serves.

    jax computes what only the derivative needs beside the forward pass, 1 / (2 sqrt(x)) next to
    sqrt(x), and gives it the same name and line of code. It is told apart by who uses it.
    """

    def __init__(self, program: Any):
        self.forward: set[tuple[str, str]] = set()  # operations of the forward pass, their lines
        self.factors: set[int] = set()  # ids of equations that only the derivative needs
        self._sort(program, [True] * len(program.outvars), Place())

    def direction(self, equation: core.JaxprEqn, place: Place) -> Direction:
        """The pass of an equation at its place."""
        found = place.direction
        if found == "recomputed" and (words(equation), source(equation)) not in self.forward:
            return "backward"
        return "backward" if id(equation) in self.factors else found

    def _sort(self, program: Any, needed: list[bool], place: Place) -> None:
        outputs = zip(program.outvars, needed, strict=True)
        wanted = _variables(variable for variable, needs in outputs if needs)
        used = _variables(program.outvars)
        used |= _variables(v for equation in program.eqns for v in equation.invars)
        for equation in reversed(program.eqns):
            here = place.inside(equation)
            if here.direction != "forward":
                continue
            needs = [v in wanted or v not in used for v in equation.outvars]
            if any(needs):
                wanted |= _variables(equation.invars)
                self.forward.add((words(equation), source(equation)))
            else:
                self.factors.add(id(equation))
            for inner in programs(equation):
                self._sort(inner, _needed(equation, needs, inner), here)


def words(equation: core.JaxprEqn) -> str:
    """The operation: 'matmul' for dot_general."""
    return WORDS.get(equation.primitive.name, equation.primitive.name)


def source(equation: core.JaxprEqn) -> str:
    """The line of code, without folders: 'model.py:40:8 (read)'."""
    return re.split(r"[/\\]", source_info_util.summarize(equation.source_info))[-1]


def closed(jaxpr: Any) -> Any:
    """The program of a jaxpr; jax.checkpoint holds one without constants."""
    return jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())


def programs(equation: core.JaxprEqn) -> list[Any]:
    """All programs that an equation holds."""
    values = equation.params.values()
    held = [v for value in values for v in (value if isinstance(value, tuple) else (value,))]
    return [closed(value) for value in held if isinstance(value, JAXPRS)]


def body(equation: core.JaxprEqn) -> Any:
    """The jaxpr that the equation calls on its own inputs (jit, checkpoint, custom_vjp), or None.

    Not that of a shard_map, which sees a part of them and knows the mesh.
    """
    outside = _types(equation.invars), _types(equation.outvars)
    for held in equation.params.values() if equation.primitive.name != "shard_map" else ():
        if isinstance(held, JAXPRS):
            inner = closed(held)
            if outside == (_types(inner.invars), _types(inner.outvars)):
                return held
    return None


def grows(outer: Any, inner: Any) -> bool:
    """Has a scan's variable an axis more outside than in its body?"""
    return outer.aval.ndim > inner.aval.ndim


def evaluate(equation: core.JaxprEqn, arrays: Sequence[Any], **changed: Any) -> list[Any]:
    """Outputs of one equation on arrays, with some of its parameters changed."""
    primitive = equation.primitive
    parameters = primitive.get_bind_params(equation.params | changed)
    outputs = primitive.bind(*arrays, **parameters)
    return list(outputs) if primitive.multiple_results else [outputs]


def for_cpu(program: Any) -> Any:
    """The program without matmul algorithms of accelerators.

    jax.nn.dot_product_attention asks for one in float16, which the CPU refuses; without it the CPU
    adds up in the same float32.
    """
    equations = []
    for equation in program.eqns:
        parameters = {name: _value_for_cpu(value) for name, value in equation.params.items()}
        changed = any(parameters[name] is not value for name, value in equation.params.items())
        equations.append(equation.replace(params=parameters) if changed else equation)
    if all(new is old for new, old in zip(equations, program.eqns, strict=True)):
        return program
    if isinstance(program, core.Jaxpr):
        return program.replace(eqns=equations)
    return core.ClosedJaxpr(program.jaxpr.replace(eqns=equations), program.consts)


def _value_for_cpu(value: Any) -> Any:
    """A parameter of an equation; programs stand there alone or in a tuple (branches, solvers)."""
    if isinstance(value, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset):
        return None
    if isinstance(value, JAXPRS):
        return for_cpu(value)
    if isinstance(value, tuple) and any(isinstance(held, JAXPRS) for held in value):
        held = [_value_for_cpu(inner) for inner in value]
        return type(value)(*held) if hasattr(value, "_fields") else tuple(held)
    return value


def _needed(equation: core.JaxprEqn, needs: list[bool], inner: Any) -> list[bool]:
    """Which outputs of a program are needed if these of the equation that holds it are."""
    if len(inner.outvars) != len(needs):
        return [any(needs)] * len(inner.outvars)
    if not any(needs) or equation.primitive not in (primitives.scan_p, primitives.while_p):
        return needs
    # a loop needs all that it carries
    pairs = zip(needs, equation.outvars, inner.outvars, strict=True)
    return [needed or not grows(outside, inside) for needed, outside, inside in pairs]


def _variables(atoms: Iterable[Any]) -> set[core.Var]:
    return {atom for atom in atoms if isinstance(atom, core.Var)}


def _types(variables: Sequence[Any]) -> list[str]:
    """Shapes and dtypes, e.g. ['f32[2,3]']."""
    return [variable.aval.str_short(short_dtypes=True) for variable in variables]
