"""Does a run fit a slice of TPUs? Asked of XLA for TPU, ahead of time, where there is no TPU.

The programs are those that the run would execute on the slice, on its mesh. Nothing is allocated.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies as compile_only

from normstudy import collectives, config, jaxprs, mesh, programs, tables
from normstudy.collectives import Collective
from normstudy.errors import OutOfMemory, UserError, Wasteful, choose
from normstudy.progress import say
from normstudy.topologies import GIB, Slice
from normstudy.trees import path_names

# what each program of a training step takes; those of Programs that are not here run outside it
TAKES = {
    "step": ("state", "batch", "lr"),
    "measure": ("model", "probe_batch", "unigram", "key"),
    "effect": ("model", "model", "batch"),
}
_TOO_LARGE = re.compile(r"([\d.]+)([KMGT]?)\) exceeds available HBM \(")


class Memory(NamedTuple):
    """What one device has to hold while a program runs, bytes."""

    arguments: int
    outputs: int  # without those that take the place of an argument
    temporary: int
    beside: int  # of the state, what the program does not take
    code: int

    @property
    def needed(self) -> int:
        return sum(self)


class Floor(NamedTuple):
    """Seconds that a program takes at the least; each part alone, at the chip's peak."""

    compute: float  # matrix products
    hbm: float  # arguments and outputs once, temporaries written and read once
    links: float  # what collectives bring, all links busy

    @property
    def bound(self) -> str:
        """The part that takes longest."""
        return max(self._fields, key=lambda part: getattr(self, part))


class Program(NamedTuple):
    """A program as compiled for the slice. Where XLA found it too large: what it said it needs."""

    name: str
    needed: float  # bytes on each device
    hbm: int  # bytes that there are
    seconds: float  # to trace and compile
    memory: Memory | None = None
    flops: float = 0  # of matrix products, on each device
    meetings: tuple[Collective, ...] = ()
    gathered_whole: tuple[str, ...] = ()  # split parameters that come together for all layers

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.needed <= self.hbm


class Proof(NamedTuple):
    """Every program of a run's step on a slice."""

    run: config.Run
    slice: Slice
    slices: int
    axes: dict[str, int]  # of the mesh
    programs: tuple[Program, ...]

    @property
    def fits(self) -> bool:
        return all(program.fits for program in self.programs)


def devices_of(slice: Slice, slices: int = 1) -> list[Any]:
    """Devices that can be compiled for and nothing else.

    Raises UserError when libtpu, which holds XLA for TPU, is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "compiling for a TPU takes libtpu, which is not installed: pip install 'normstudy[aot]'"
        )
    found = compile_only.get_topology_desc(**slice.topology, num_slices=slices)
    return list(found.devices)


def prove(run: config.Run, slice: Slice, slices: int = 1, only: str = "all") -> Proof:
    """Compile every program of the run's step, or those named with commas between them.

    Raises UserError for a mesh or batch that the devices do not allow, and an unknown program.
    """
    found = devices_of(slice, slices)
    devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch, found)
    every = step_programs(run, devices)
    names = list(every) if only == "all" else [name.strip() for name in only.split(",")]
    chosen = [choose("program", name, every) for name in names]
    compiled = [compile_one(name, *every[name], devices, slice.hbm) for name in chosen]
    return Proof(run, slice, slices, dict(devices.shape), tuple(compiled))


def step_programs(
    run: config.Run, devices: jax.sharding.Mesh
) -> dict[str, tuple[Callable, tuple, int]]:
    """{name: (jitted function, its abstract arguments, bytes that stay beside them on each device)}
    of all that a training step runs."""
    compiled = programs.on(run, devices)
    tokens = run.model.context + 1
    whole, by_batch = mesh.replicated(devices), mesh.by_batch(devices)

    def array(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    values = {
        "state": compiled.abstract,
        "model": compiled.abstract.model,
        "batch": array((run.data.batch, tokens), jnp.int32, by_batch),
        "probe_batch": array((run.probe.probe_batch, tokens), jnp.int32, by_batch),
        "lr": array((), jnp.float32, whole),
        "unigram": array((run.model.vocab,), jnp.float32, whole),
        "key": array((), jax.eval_shape(lambda: jax.random.key(0)).dtype, whole),
    }
    moments = _bytes_held(compiled.abstract.opt_state)
    return {
        name: (
            getattr(compiled, name),
            tuple(values[own] for own in takes),
            0 if "state" in takes else moments,
        )
        for name, takes in TAKES.items()
    }


def _bytes_held(tree: Any) -> int:
    """Of abstract arrays, by one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def compile_one(
    name: str, function: Any, args: tuple, beside: int, devices: jax.sharding.Mesh, hbm: int
) -> Program:
    """A jitted function compiled for abstract arguments on these devices. hbm: bytes of each, of
    which some hold what stays beside the arguments."""
    begin = time.perf_counter()
    traced = function.trace(*args)
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        wanted = _TOO_LARGE.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or wanted is None:
            raise
        unit = 1024 ** " KMGT".index(wanted[2] or " ")
        needed = float(wanted[1]) * unit + beside
        return Program(name, needed, hbm, time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    memory = memory_of(compiled, beside)
    meetings = tuple(collectives.read(compiled.as_text()))
    return Program(
        name,
        memory.needed,
        hbm,
        seconds,
        memory,
        matmul_flops(traced.jaxpr) / devices.size,
        meetings,
        tuple(gathered_whole(meetings, args)),
    )


def memory_of(compiled: Any, beside: int = 0) -> Memory:
    """From XLA's own plan of a compiled program."""
    plan = compiled.memory_analysis()
    return Memory(
        plan.argument_size_in_bytes,
        plan.output_size_in_bytes - plan.alias_size_in_bytes,
        plan.temp_size_in_bytes,
        beside,
        plan.generated_code_size_in_bytes,
    )


def matmul_flops(program: Any) -> float:
    """FLOPs of all matrix products of a traced program, over all devices.

    Counted here, since XLA's own cost analysis takes the body of a loop for one turn. A loop whose
    turns depend on data counts as one turn, a choice as the dearest of what it chooses from.
    """
    total = 0.0
    for equation in program.eqns:
        parts, name = 1, equation.primitive.name
        if name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, made = equation.invars[0].aval, equation.outvars[0].aval
            total += 2 * math.prod(made.shape) * math.prod(left.shape[d] for d in contracted)
        elif name == "scan":
            parts = equation.params["length"]
        elif name == "shard_map":
            parts = equation.params["mesh"].size
        inner = [matmul_flops(held) for held in jaxprs.programs(equation)]
        total += parts * (max(inner, default=0) if name == "cond" else sum(inner))
    return total


def gathered_whole(meetings: tuple[Collective, ...], args: Any) -> Iterator[str]:
    """Paths of stacked matrices, split over the devices, that an all-gather makes whole for all
    layers at once. Each layer has to gather its own when it needs it: otherwise the model has to
    fit one device, and splitting it was for nothing. args[0] holds the model, or is it.
    """
    made = {
        (shape, math.prod(shape))
        for meeting in meetings
        if meeting.kind == "all-gather"
        for shape in meeting.shapes
    }
    for path, leaf in jax.tree_util.tree_leaves_with_path(args[0]):
        names, size = path_names(path), mesh.size_without_fsdp(leaf)
        matrix = "layers" in names and "opt_state" not in names and leaf.ndim > 2
        if matrix and any(leaf.shape[0] in shape and entries == size for shape, entries in made):
            yield "/".join(names)


def floor(program: Program, slice: Slice) -> Floor:
    """The least time of one run of the program; what the links between slices carry is left out."""
    memory, chip = program.memory or Memory(0, 0, 0, 0, 0), slice.family
    return Floor(
        program.flops / chip.flops,
        (memory.arguments + memory.outputs + 2 * memory.temporary) / chip.hbm_bandwidth,
        sum(
            meeting.times * meeting.received
            for meeting in program.meetings
            if meeting.kind != collectives.BETWEEN_SLICES
        )
        / chip.ici_bandwidth,
    )


def smaller(run: config.Run, devices: int) -> Iterator[config.Run]:
    """Runs that need less memory, the mildest change first: fsdp, then tensor, then half the
    batch and half again."""
    fsdp, tensor = run.mesh.fsdp, run.mesh.tensor
    while 2 * fsdp * tensor <= devices:
        fsdp *= 2
        yield dataclasses.replace(run, mesh=config.Mesh(fsdp=fsdp, tensor=tensor))
    widest = fsdp * tensor
    while 2 * tensor <= math.gcd(run.model.heads, widest):
        tensor *= 2
        yield dataclasses.replace(run, mesh=config.Mesh(fsdp=widest // tensor, tensor=tensor))
    batch, probe_batch = run.data.batch, run.probe.probe_batch
    while batch > 1:
        batch, probe_batch = batch // 2, max(probe_batch // 2, 1)
        sizes = config.override(run, batch=batch, probe_batch=probe_batch)
        yield dataclasses.replace(sizes, mesh=config.Mesh(fsdp=fsdp, tensor=run.mesh.tensor))


def first_that_fits(proof: Proof) -> config.Run | None:
    """The mildest change with which every program of the proof fits, by XLA's own answer."""
    # what failed comes first: it says no soonest
    names = [p.name for p in sorted(proof.programs, key=lambda program: program.fits)]
    found = devices_of(proof.slice, proof.slices)
    for run in smaller(proof.run, len(found)):
        try:
            devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch, found)
        except UserError:  # sizes that do not divide each other
            continue
        say(f"does it fit with {flags(proof.run, run)}?")
        every = step_programs(run, devices)
        if all(compile_one(name, *every[name], devices, proof.slice.hbm).fits for name in names):
            return run
    return None


def flags(run: config.Run, other: config.Run) -> str:
    """Options of the command line that make the other run of this one."""
    changes = config.differences(run, other)
    return " ".join(f"--{name.replace('_', '-')} {new}" for name, (_, new) in changes.items())


def check(proof: Proof) -> None:
    """Raises OutOfMemory when a program does not fit, with options by which all of them do, and
    Wasteful when one gathers the parameters of all layers at once."""
    large = [program for program in proof.programs if not program.fits]
    if large:
        worst = max(large, key=lambda program: program.needed)
        other = first_that_fits(proof)
        advice = (
            f"it fits with {flags(proof.run, other)} (compiled and seen)"
            if other
            else "no mesh and no batch makes it fit here; take a larger slice, or lower --layers, "
            "--width or --context"
        )
        raise OutOfMemory(
            f"{worst.name} needs {worst.needed / GIB:.2f} GiB on each device, a program can have "
            f"{worst.hbm / GIB:.2f} GiB; {advice}"
        )
    for program in proof.programs:
        if program.gathered_whole:
            raise Wasteful(
                f"{program.name} gathers the parameters of all layers at once "
                f"({', '.join(program.gathered_whole)}), though the mesh splits them: a bug in the "
                "program, for the model then has to fit one device"
            )


def text(proof: Proof) -> str:
    """For people: the slice and the mesh, then memory, least times, and where devices meet."""
    parts = [headline(proof), tables.text(memory_rows(proof))]
    if proof.fits:
        parts += [tables.text(floor_rows(proof))]
        parts += [tables.text(rows) for rows in [meeting_rows(proof)] if rows]
    return "\n\n".join(parts)


def headline(proof: Proof) -> str:
    """One sentence about the devices, one about the run."""
    slice, shape = proof.slice, proof.run.model
    count = f"{proof.slices} x {slice.name}" if proof.slices > 1 else slice.name
    axes = ", ".join(f"{name} {size}" for name, size in proof.axes.items())
    return (
        f"{count}: {proof.slices * slice.chips} devices ({'x'.join(map(str, slice.shape))} chips), "
        f"{slice.family.hbm} GiB of HBM each for programs; mesh {axes}\n"
        f"{shape.placement}, {shape.layers} layers, width {shape.width}, context {shape.context}, "
        f"batch {proof.run.data.batch}, probe batch {proof.run.probe.probe_batch}, {shape.dtype}"
    )


def memory_rows(proof: Proof) -> list[dict[str, Any]]:
    """One row a program; bytes are those of one device."""
    names = [f"{field} (GiB)" for field in Memory._fields[:4]]
    rows = []
    for program in proof.programs:
        of = program.memory
        parts = [n / GIB for n in of[:4]] if of else [None] * 4
        rows.append(
            {
                "program": program.name,
                **dict(zip(names, parts, strict=True)),
                "code (MiB)": of.code / 2**20 if of else None,
                "needed (GiB)": program.needed / GIB,
                "headroom (per cent)": 100 * (1 - program.needed / program.hbm),
                "compiled in (s)": program.seconds,
            }
        )
    return rows


def floor_rows(proof: Proof) -> list[dict[str, Any]]:
    """One row a program: no run of it can be faster than the floor."""
    rows = []
    for program in proof.programs:
        least = floor(program, proof.slice)
        rows.append(
            {
                "program": program.name,
                "matmuls (TFLOP)": program.flops / 1e12,
                **{f"{part} (ms)": 1e3 * time for part, time in least._asdict().items()},
                "floor (ms)": 1e3 * max(least),
                "bound by": least.bound,
            }
        )
    return rows


def meeting_rows(proof: Proof) -> list[dict[str, Any]]:
    """One row for each kind of collective, inside and outside of loops; GiB of one device."""
    rows = []
    for program in proof.programs:
        kinds = sorted({(meeting.kind, bool(meeting.loops)) for meeting in program.meetings})
        for kind, looped in kinds:
            own = [m for m in program.meetings if (m.kind, bool(m.loops)) == (kind, looped)]
            rows.append(
                {
                    "program": program.name,
                    "devices meet by": kind,
                    "where": "in loops over layers" if looped else "once",
                    "times a step": sum(meeting.times for meeting in own),
                    "received (GiB)": sum(m.times * m.received for m in own) / GIB,
                }
            )
    return rows


def as_dict(proof: Proof) -> dict[str, Any]:
    """The same for machines: bytes, FLOPs and seconds."""
    return {
        "tpu": proof.slice.name,
        "slices": proof.slices,
        "devices": proof.slices * proof.slice.chips,
        "mesh": proof.axes,
        "hbm_bytes": proof.slice.hbm,
        "fits": proof.fits,
        "programs": [
            {
                "name": program.name,
                "fits": program.fits,
                "needed_bytes": int(program.needed),
                "memory_bytes": program.memory._asdict() if program.memory else None,
                "matmul_flops": program.flops,
                "compile_seconds": program.seconds,
                "floor_seconds": floor(program, proof.slice)._asdict() if program.memory else None,
                "gathered_whole": list(program.gathered_whole),
            }
            for program in proof.programs
        ],
        "collectives": [
            {
                "program": row["program"],
                "kind": row["devices meet by"],
                "in_loops": row["where"] != "once",
                "times": row["times a step"],
                "received_bytes": int(row["received (GiB)"] * GIB),
            }
            for row in meeting_rows(proof)
        ],
        "config": dataclasses.asdict(proof.run),
    }
