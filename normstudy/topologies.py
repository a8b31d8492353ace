"""The TPU slices of Google Cloud: what a name stands for, what its chips can do. No jax here."""

from __future__ import annotations

import itertools
import math
import os
import sys
from typing import Literal, NamedTuple

from normstudy.errors import UserError, choose

GIB = 2**30

# read by jax as it is imported, and by libtpu as it is loaded
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the TPU is compiled for, and nothing runs
    "JAX_ENABLE_COMPILATION_CACHE": "0",  # what it keeps cannot be read back without a device
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud which machine this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # two processes at once; there is no chip to share
}
# what libtpu would say about the missing machine otherwise
QUIET = {
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v4-8",  # of the machine that is not there; any will do
    "TPU_STDERR_LOG_LEVEL": "4",
    "TPU_MIN_LOG_LEVEL": "4",
    "TPU_LOG_DIR": "disabled",
}


class Family(NamedTuple):
    """A generation of chips; numbers of one chip. One jax device is one chip in all four."""

    counts: Literal["TensorCores", "chips"]  # what the number in a name counts
    cores: int  # TensorCores of a chip; two work as one megacore
    xla: str  # what XLA calls it
    pod: tuple[int, ...]  # chips along each axis of the whole pod
    most: int  # chips of the largest slice
    hbm: float  # GiB that a program may use, as XLA for TPU says: less than the chip has
    flops: float  # peak of bfloat16 matrix products, FLOP/s
    hbm_bandwidth: float  # bytes/s
    # bytes/s that all links of a chip can send, half of what Google calls bidirectional
    ici_bandwidth: float


# hbm: libtpu 0.0.50 and 0.0.52, "exceeds available HBM" (tests/test_aot.py asks it again).
# The rest: docs.cloud.google.com/tpu/docs/NAME, table of key specifications, late 2025:
# v4: 275 TFLOP/s, 1200 GB/s, pod of 4096 chips, of which a slice is half at most; its links from
#     Jouppi et al. 2023 (2304.01433), table 4: 6 of 50 GB/s
# v5e: 197 TFLOP/s, 819 GB/s, links 400 GB/s in both directions
# v5p: 459 TFLOP/s, 2765 GB/s, links 1200 GB/s in both directions, largest slice 6144 chips
# v6e: 918 TFLOP/s, 1638 GB/s, links 800 GB/s in both directions
FAMILIES = {
    "v4": Family("TensorCores", 2, "v4", (16, 16, 16), 2048, 30.75, 275e12, 1200e9, 300e9),
    "v5e": Family("chips", 1, "v5e", (16, 16), 256, 15.75, 197e12, 819e9, 200e9),
    "v5p": Family("TensorCores", 2, "v5", (16, 20, 28), 6144, 95.73, 459e12, 2765e9, 600e9),
    "v6e": Family("chips", 1, "v6e", (16, 16), 256, 31.24, 918e12, 1638e9, 400e9),
}
# below a full cube of 4x4x4, or a full torus: same pages, "configurations"
SMALL = {3: ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)), 2: ((1, 1), (2, 2), (2, 4))}


class Slice(NamedTuple):
    """Chips that are rented together, joined by their own links."""

    name: str
    family: Family
    shape: tuple[int, ...]  # chips along each axis

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def hbm(self) -> int:
        """Bytes that a program may use on each device."""
        return int(self.family.hbm * GIB)

    @property
    def topology(self) -> dict:
        """What jax.experimental.topologies.get_topology_desc takes."""
        # links wrap around along an axis that is as long as the torus is
        closed = 16 if len(self.shape) == 2 else 4
        wrap = tuple(length % closed == 0 for length in self.shape)
        if len(self.shape) == 3:
            wrap = (all(wrap),) * 3  # cubes are wrapped as a whole, or not at all
        return {
            "platform": "tpu",
            "topology_name": f"{self.family.xla}:{'x'.join(map(str, self.shape))}",
            "chip_config_name": "megacore" if self.family.cores == 2 else "default",
            "chips_per_host_bounds": (1, 1, 1) if self.chips == 1 else (2, 2, 1),
            "wrap": (*wrap, False)[:3],
        }


def shapes(family: Family) -> list[tuple[int, ...]]:
    """Every shape of a slice, one for each number of chips: the most compact, smallest first."""
    axes = len(family.pod)
    if axes == 2:
        sides = (4, 8, 16)
        larger = [(a, b) for a in sides for b in sides if b in (a, 2 * a)]
    else:
        cubes = itertools.combinations_with_replacement(range(4, max(family.pod) + 1, 4), axes)
        larger = [c for c in cubes if all(a <= b for a, b in zip(c, family.pod, strict=True))]
    best: dict[int, tuple[int, ...]] = {}
    for shape in sorted([*SMALL[axes], *larger], key=sum):
        best.setdefault(math.prod(shape), shape)
    return [best[chips] for chips in sorted(best) if chips <= family.most]


def names(family: str) -> dict[str, tuple[int, ...]]:
    """{name of a slice: its shape}, as 'v5p-64'."""
    own = FAMILIES[family]
    each = own.cores if own.counts == "TensorCores" else 1
    return {f"{family}-{each * math.prod(shape)}": shape for shape in shapes(own)}


def slice_of(name: str) -> Slice:
    """The slice of a name like v4-32, v5e-16, v5p-64, v6e-16.

    N of v4-N and v5p-N counts TensorCores, two to a chip; of v5e-N and v6e-N, chips.
    Raises UserError that lists the valid ones.
    """
    family = name.split("-")[0]
    if family not in FAMILIES:
        some = ", ".join(f"{own}-N" for own in FAMILIES)
        raise UserError(f"unknown TPU {name!r}. Valid: {some}; for example v4-32 or v5e-16")
    valid = names(family)
    return Slice(name, FAMILIES[family], valid[choose("TPU", name, valid)])


def prepare() -> None:
    """Set the environment of this process for compiling without a TPU, before jax is imported.

    Raises UserError when jax is there already and was imported with something else.
    """
    late = {name: os.environ.get(name) for name in ENVIRONMENT}
    if "jax" in sys.modules and late != ENVIRONMENT:
        raise UserError(
            "jax was imported before its environment was set for compiling without a TPU; "
            "run this as a process of its own: normstudy aot"
        )
    os.environ.update(ENVIRONMENT)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
