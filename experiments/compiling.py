"""What a plain step takes to compile, and what memory it then needs: no parameter is allocated."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from normstudy import config, mesh, programs
from normstudy.errors import UserError


class Memory(NamedTuple):
    """What a compiled program asks for, bytes on each device."""

    temporary: int
    arguments: int
    outputs: int  # without those that take the place of an argument given away

    @property
    def total(self) -> int:
        return sum(self)


class Compiled(NamedTuple):
    """One compilation, from nothing."""

    trace: float  # seconds from Python to the program that XLA reads
    compile: float  # seconds that XLA takes
    memory: Memory


def plain_step(run: config.Run) -> Compiled:
    """Trace and compile the run's plain step."""
    compiled, devices = programs.of(run)
    tokens = np.zeros((run.data.batch, run.model.context + 1), np.int32)
    batch, lr = mesh.put_batch(devices, tokens), jnp.float32(run.optim.lr)
    return from_nothing(compiled.step, compiled.abstract, batch, lr)


def from_nothing(program: Any, *args: Any) -> Compiled:
    """Trace and compile with all of jax's caches empty: what one has traced the next would find."""
    jax.clear_caches()
    jax.config.update("jax_enable_compilation_cache", False)
    begin = time.perf_counter()
    lowered = program.lower(*args)
    traced = time.perf_counter()
    executable = lowered.compile()
    done = time.perf_counter()
    return Compiled(traced - begin, done - traced, memory_of(executable))


def memory_of(executable: Any) -> Memory:
    """From the compiler's own plan. Raises UserError where the backend does not tell."""
    plan = executable.memory_analysis()
    if plan is None:
        raise UserError(f"the backend {jax.default_backend()} does not tell what a program needs")
    outputs = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return Memory(plan.temp_size_in_bytes, plan.argument_size_in_bytes, outputs)


def bytes_of(tree: Any) -> int:
    """Bytes of all leaves, whole, of arrays or of their abstract shapes."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in leaves)
