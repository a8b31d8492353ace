"""Where the devices of a compiled program meet, and what they send: read from its text (HLO)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import NamedTuple

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all",
    "collective-permute", "collective-broadcast",
)  # fmt: skip
BETWEEN_SLICES = "between slices"  # through the hosts and the network of the data centre

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][a-z-]*)\(", re.M)
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class Collective(NamedTuple):
    """One instruction by which devices meet."""

    kind: str
    shapes: tuple[tuple[int, ...], ...]  # of what one device then has
    bytes: int  # the same
    group: int  # devices that meet
    loops: tuple[int, ...]  # turns of the loops around it, outermost first

    @property
    def times(self) -> int:
        """How often one run of the program executes it."""
        return math.prod(self.loops)

    @property
    def received(self) -> float:
        """Bytes that a device has to receive each time, at the least.

        Source: Thakur et al. 2005, Optimization of collective communication operations in MPICH.
        """
        others = (self.group - 1) / self.group
        factor = {
            "all-reduce": 2 * others,
            "reduce-scatter": self.group - 1,
            "all-gather": others,
            "all-to-all": others,
        }
        return float(factor.get(self.kind, 1) * self.bytes)


def read(text: str) -> list[Collective]:
    """All collectives of a compiled program, from compiled.as_text().

    A loop whose number of turns the text does not show counts as one turn.
    """
    entry, bodies = "", {}
    for start, name, body in _COMPUTATION.findall(text):
        bodies[name] = body
        entry = name if start else entry
    around = _loops_around(entry, bodies)
    return [
        collective
        for name, body in bodies.items()
        for loops in around[name]
        for line in body.splitlines()
        if (collective := _collective(line, loops, "all-reduce-scatter" in name)) is not None
    ]


def _loops_around(entry: str, bodies: dict[str, str]) -> dict[str, list[tuple[int, ...]]]:
    """{computation: for each place that runs it, the turns of the loops around}."""
    found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    waiting = [(entry, ())]
    while waiting:
        name, loops = waiting.pop()
        found[name].append(loops)
        for line in bodies[name].splitlines():
            called = {how: re.findall(r"[\w.-]+", who) for how, who in _CALLED.findall(line)}
            turns = _turns(bodies.get(called.get("condition", [""])[0], ""))
            for how, who in called.items():
                # to_apply is what an all-reduce adds up with, or a call
                inside = (*loops, turns) if how == "body" else loops
                waiting += [(own, inside) for own in who if own in bodies and how != "condition"]
    return found


def _turns(condition: str) -> int:
    """Of a loop that counts from 0 up to a constant."""
    compared = re.search(r"ROOT .* compare\((.*?)\).*direction=LT", condition)
    for name in re.findall(r"%?([\w.-]+)(?:,|$)", compared[1] if compared else ""):
        value = re.search(rf"%?{re.escape(name)} = [su]\d+\[\]\S* constant\((\d+)\)", condition)
        if value:
            return int(value[1])
    return 1


def _collective(line: str, loops: tuple[int, ...], scattered: bool) -> Collective | None:
    """The collective of a line. scattered: it is an all-reduce of which each keeps its part."""
    matched = _INSTRUCTION.match(line)
    if matched is None:
        return None
    made, operation = matched.groups()
    kind, start = operation.removesuffix("-start"), operation.endswith("-start")
    arrays = [
        (tuple(map(int, filter(None, dims.split(",")))), math.ceil(int(bits or 8) / 8))
        for _, bits, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", made))
    ]
    if kind == "send" and "megascale" in line:
        kind, arrays = BETWEEN_SLICES, arrays[:1]
    elif kind not in KINDS:
        return None
    elif start and kind in ("all-gather", "collective-permute"):
        arrays = [array for array in arrays if array[0]]  # without the handles of the transfer
        arrays = arrays[len(arrays) // 2 :]  # operands come first
    size = sum(math.prod(shape) * width for shape, width in arrays)
    group = _group(line)
    if scattered and kind == "all-reduce":
        kind, size = "reduce-scatter", size // group
    return Collective(kind, tuple(shape for shape, _ in arrays), size, group, loops)


def _group(line: str) -> int:
    """How many devices meet, in any of the three ways in which XLA writes groups."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if counted := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(counted[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(listed[1].split(","))
    return 2  # a pair: permute, send
