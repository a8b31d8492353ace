"""Does a compiled program fit? Asked before it runs: the kernel kills what does not, unasked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from normstudy.errors import OutOfMemory

GIB = 2**30


def compile_to_fit(function: Any, args: tuple, advice: str) -> Any:
    """The jitted function compiled for these arguments.

    Raises OutOfMemory, with the advice, when the program says it needs more than there is.
    """
    with told(advice):
        compiled = function.lower(*args).compile()
    analysis = compiled.memory_analysis()
    free = available()
    if analysis is not None and free is not None:
        needed = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
        if needed > free:
            raise OutOfMemory(
                f"this needs {needed / GIB:.1f} GiB of memory and {free / GIB:.1f} GiB are free; "
                + advice
            )
    return compiled


@contextlib.contextmanager
def told(advice: str) -> Iterator[None]:
    """Turns the backend's own out-of-memory error into OutOfMemory with the advice."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        line = str(error).splitlines()[0]
        raise OutOfMemory(f"out of memory ({line}); {advice}") from None


def available() -> int | None:
    """Bytes that this process may still take on the device it computes on; None: not known."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    free = [_machine(), _control_group()]
    return min((bytes for bytes in free if bytes is not None), default=None)


def _machine() -> int | None:
    """What Linux says is available."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line)
    except (OSError, StopIteration):
        return None


def _control_group() -> int | None:
    """What a container leaves (cgroup v2); files that are only cached can go."""
    try:
        limit, used, stat = (
            Path("/sys/fs/cgroup", name).read_text("ascii").strip()
            for name in ("memory.max", "memory.current", "memory.stat")
        )
        cached = dict(line.split() for line in stat.splitlines()).get("inactive_file", "0")
        return None if limit == "max" else int(limit) - int(used) + int(cached)
    except (OSError, ValueError):
        return None
