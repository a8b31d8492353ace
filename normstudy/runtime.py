"""What a process sets up once, before it computes: devices, memory, the cache of programs."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import jax

from normstudy import config, preemption, watchdog
from normstudy.errors import UserError
from normstudy.hosts import join


def start(
    cpu_devices: int | None = None, cache: bool = True, launch: config.Launch | None = None
) -> None:
    """Before any other call to jax: devices, freed memory and, if so asked, the compile cache.

    launch: for what trains; meets the other processes, and watches for signals and standstill.

    As many CPU devices as cores, unless XLA_FLAGS says otherwise: one device per core is faster
    than one device with two threads, and makes every run a sharded one. Changes nothing of that on
    GPU and TPU.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        jax.config.update("jax_num_cpu_devices", cpu_devices or cores)
    keep_freed_memory()
    if cache and getattr(jax.config, "jax_compilation_cache_dir", None) is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder()))
    if launch is not None:
        join(launch)
        preemption.watch()
        watchdog.start(launch.watchdog)
        if not launch.allow_unsafe_rng:
            refuse_unsafe_rng()


def refuse_unsafe_rng() -> None:
    """Raises UserError for settings under which the same seed may give other parameters on another
    mesh: they were made for speed, and normstudy draws too little to gain by them.
    """
    found = []
    settings: Any = jax.config  # its type leaves these out
    kind = settings.jax_default_prng_impl
    if kind != "threefry2x32":
        found.append(f"jax_default_prng_impl is {kind} (JAX_DEFAULT_PRNG_IMPL)")
    if not settings.jax_threefry_partitionable:
        found.append("jax_threefry_partitionable is off")
    unsafe = "spmd_rng_bit_generator_unsafe"
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS"):
        for flag in os.environ.get(name, "").split():
            if unsafe in flag and flag.rpartition("=")[2].lower() not in ("false", "0"):
                found.append(f"{name} has {flag}")
    if found:
        raise UserError(
            f"{'; '.join(found)}: parameters would depend on the mesh. Unset it, or give "
            "--allow-unsafe-rng"
        )


def compiler_options(platform: str) -> dict[str, Any] | None:
    """What the programs of a run are compiled with.

    On a CPU at LLVM's first level: it takes a third less time to compile than the third, XLA's
    default, and the program runs as fast, for its loops are simple and its matmuls are a library's.
    """
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else None


def cache_folder() -> Path:
    """Where compiled programs are kept: a folder of this user, for processors like this one.

    A program compiled for one processor may not run on another that shares the home folder, so the
    name says what it can do. JAX_COMPILATION_CACHE_DIR names another folder, and
    JAX_ENABLE_COMPILATION_CACHE=0 does without. Who can write there can run code as this user.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with contextlib.suppress(OSError):
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        flags = sorted({line for line in about.splitlines() if line.startswith("flags")})
        abilities = hashlib.sha256("".join(flags).encode()).hexdigest()[:12]
        return home / "normstudy" / f"{platform.machine()}-{abilities}"
    return home / "normstudy" / platform.machine()


def keep_freed_memory() -> bool:
    """Ask glibc to keep what a step frees for the next one, which needs as much. False: no glibc.

    XLA's CPU backend takes the scratch memory of a step from malloc at each step. Where it goes
    back to the system in between, each step begins with thousands of page faults.
    Blocks above 64 MiB, the size of a heap of glibc's, go back all the same.
    """
    trim_threshold, top_pad, mmap_max = -1, -2, -4  # as in glibc's malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    # an empty heap is given back unless it is smaller than the top pad
    wanted = ((trim_threshold, 2**31 - 1), (top_pad, 2**27), (mmap_max, 0))
    return all(mallopt(what, value) for what, value in wanted)
