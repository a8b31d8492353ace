"""Devices as a mesh, and who holds what. The only room that names a mesh axis."""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from normstudy import config
from normstudy.errors import UserError
from normstudy.roles import ROLES, role_of
from normstudy.trees import path_names

BATCH = ("data", "fsdp")  # both split the batch
SMALL = 2**11  # entries; leaves below it are replicated, sending them costs more than holding them


def start(cpu_devices: int | None = None) -> None:
    """Before any other call to jax: as many CPU devices as cores, unless XLA_FLAGS says otherwise.

    One device per core is faster than one device with two threads, and makes every run a sharded
    one. It changes nothing on GPU and TPU.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
        cores = len(affinity(0)) if affinity else os.cpu_count() or 1
        jax.config.update("jax_num_cpu_devices", cpu_devices or cores)


def make(cfg: config.Mesh, batch: int, probe_batch: int) -> jax.sharding.Mesh:
    """The mesh over all devices. Raises UserError when sizes do not fit the devices or batches.

    On CPUs the number of devices is an accident of the cores: without an explicit `data`, as many
    are used as divide the batches.
    """
    devices = jax.device_count()
    rest = cfg.fsdp * cfg.tensor
    data = cfg.data if cfg.data > 0 else devices // max(rest, 1)
    may_shrink = cfg.data < 0 and jax.default_backend() == "cpu" and jax.process_count() == 1
    if may_shrink and rest > 0 and devices % rest == 0:
        while data > 1 and (batch % (data * cfg.fsdp) or probe_batch % (data * cfg.fsdp)):
            data -= 1
        devices = data * rest
    if rest < 1 or data * rest != devices:
        raise UserError(
            f"mesh data={cfg.data} x fsdp={cfg.fsdp} x tensor={cfg.tensor} does not use the "
            f"{devices} devices found; the product must be {devices}"
        )
    for name, size in (("batch", batch), ("probe_batch", probe_batch)):
        if size % (data * cfg.fsdp):
            raise UserError(
                f"{name} {size} is not divided by the {data * cfg.fsdp} parts that the mesh splits "
                f"it into (data {data} x fsdp {cfg.fsdp}); make it a multiple of {data * cfg.fsdp}"
            )
    return jax.make_mesh(
        (data, cfg.fsdp, cfg.tensor),
        ("data", "fsdp", "tensor"),
        axis_types=(AxisType.Auto,) * 3,
        devices=jax.devices()[:devices],
    )


def describe(mesh: jax.sharding.Mesh) -> str:
    """One line for people, e.g. '2 of 2 cpu devices (data 2, fsdp 1, tensor 1)'."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    device = mesh.devices.flat[0]
    return f"{mesh.devices.size} of {jax.device_count()} {device.device_kind} devices ({sizes})"


def state_shardings(mesh: jax.sharding.Mesh, tree: Any) -> Any:
    """Shardings with the structure of the tree, by the role and shape of each leaf."""

    def rule(path, leaf):
        names = path_names(path)
        spec: list[str | None] = [None] * len(leaf.shape)
        matrix = leaf.ndim >= 2 and ROLES[role_of(names)].fan is not None
        if matrix and math.prod(leaf.shape) >= SMALL:
            stacked = 1 if "layers" in names else 0  # axis 0 of a stacked leaf is the depth
            split = ROLES[role_of(names)].split
            if split is not None and leaf.shape[split] % mesh.shape["tensor"] == 0:
                spec[split] = "tensor"
            free = [d for d in range(stacked, leaf.ndim) if spec[d] is None]
            free = [d for d in free if leaf.shape[d] % mesh.shape["fsdp"] == 0]
            if free:
                spec[max(free, key=lambda d: leaf.shape[d])] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(rule, tree)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Every device holds the whole."""
    return NamedSharding(mesh, PartitionSpec())


def put_batch(mesh: jax.sharding.Mesh, batch: np.ndarray) -> jax.Array:
    """A batch (B, ...), the same on every process, laid out by its first axis."""
    sharding = NamedSharding(mesh, PartitionSpec(BATCH))
    return jax.make_array_from_callback(batch.shape, sharding, lambda index: batch[index])
