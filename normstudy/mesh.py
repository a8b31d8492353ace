"""Devices as a mesh, and who holds what. The only room that names a mesh axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from normstudy import config
from normstudy.errors import UserError
from normstudy.roles import ROLES, role_of
from normstudy.trees import path_names

BATCH = ("data", "fsdp")  # both split the batch
SMALL = 2**11  # entries; leaves below it are replicated, sending them costs more than holding them


def make(
    cfg: config.Mesh, batch: int, probe_batch: int, of: Sequence[Any] | None = None
) -> jax.sharding.Mesh:
    """The mesh over all devices, or over those given: these may be a topology that is only compiled
    for. Raises UserError when sizes do not fit the devices or batches.

    On CPUs the number of devices is an accident of the cores: without an explicit `data`, as many
    are used as divide the batches.
    """
    found = list(of or jax.devices()[: jax.device_count()])
    devices = len(found)
    rest = cfg.fsdp * cfg.tensor
    data = cfg.data if cfg.data > 0 else devices // max(rest, 1)
    may_shrink = cfg.data < 0 and found[0].platform == "cpu" and jax.process_count() == 1
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
    laid_out = _laid_out((data, cfg.fsdp, cfg.tensor), found[:devices])
    return jax.sharding.Mesh(laid_out, ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)


def _laid_out(shape: tuple[int, int, int], devices: list[Any]) -> np.ndarray:
    """The devices in the shape of the mesh, neighbours along an axis being neighbours in the torus.

    Slices of a TPU meet over the network of the data centre, which takes the data axis alone.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    if shape[0] % slices:
        raise UserError(
            f"data {shape[0]} is not divided by the {slices} slices; fsdp and tensor have to fit "
            f"into one slice of {len(devices) // slices} devices"
        )
    return mesh_utils.create_hybrid_device_mesh(
        (shape[0] // slices, *shape[1:]),
        (slices, 1, 1),
        devices,
        allow_split_physical_axes=True,
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


def placed(tree: Any, shardings: Any) -> Any:
    """Abstract arrays with these shardings."""
    return jax.tree.map(
        lambda leaf, own: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own),
        tree,
        shardings,
    )


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Every device holds the whole."""
    return NamedSharding(mesh, PartitionSpec())


def put_replicated(mesh: jax.sharding.Mesh, value: Any) -> jax.Array:
    """A value, the same on every process, whole on every device."""
    return jax.make_array_from_callback(
        np.shape(value), replicated(mesh), lambda index: np.asarray(value)[index]
    )


def put_batch(mesh: jax.sharding.Mesh, batch: np.ndarray) -> jax.Array:
    """A batch (B, ...), the same on every process, laid out by its first axis."""
    return jax.make_array_from_callback(batch.shape, by_batch(mesh), lambda index: batch[index])


def by_batch(mesh: jax.sharding.Mesh) -> NamedSharding:
    """The first axis is the batch, split over all parts; the rest is whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def split_by_batch(mesh: jax.sharding.Mesh, x: jax.Array) -> jax.Array:
    """x, axis 0 = B, held by the parts of the batch.

    Has to be said of the stream where fsdp splits the parameters: the compiler would rather split
    it by width, as the tables are that it is looked up in. Then every device has the whole batch,
    and all meet in every matrix product.
    """
    return jax.lax.with_sharding_constraint(x, by_batch(mesh))


def size_without_fsdp(leaf: Any) -> int | None:
    """Entries of an abstract leaf that a device holds once all parts of fsdp have come together;
    None where fsdp does not split it."""
    parts = leaf.sharding.mesh.shape["fsdp"]
    if "fsdp" not in leaf.sharding.spec or parts == 1:
        return None
    held = leaf.sharding.shard_shape(leaf.shape)
    return math.prod(held) * parts


def data_alone(devices: jax.sharding.Mesh) -> bool:
    """Is the data axis the only one that splits anything?"""
    return devices.size == devices.shape["data"]


def mean_over_data(devices: jax.sharding.Mesh, f: Callable) -> Callable:
    """f(model, batch) -> (loss, gradients), each part of the data axis on its own rows.

    Loss and gradients are averaged once, at the end. Left to the compiler, the average of the
    gradients of a scanned stack stands in the scan, and all devices meet once for every layer.
    That is so where fsdp or tensor split the parameters, which takes them to meet in any case.
    """
    if not data_alone(devices):
        return f
    return _by_part(
        lambda model, batch: jax.lax.pmean(f(model, batch), "data"),
        devices,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
    )


def can_spread(devices: jax.sharding.Mesh, members: int) -> bool:
    """Can each part of the data axis take as many members for itself as any other?"""
    return data_alone(devices) and members % devices.size == 0


def of_members(alone: Any, spread: bool) -> Any:
    """Shardings of stacked members, axis 0 = M, from the abstract state of one.

    spread: over the data axis; otherwise every part of it holds all of them.
    """
    first = "data" if spread else None
    return jax.tree.map(
        lambda leaf: NamedSharding(leaf.sharding.mesh, PartitionSpec(first, *leaf.sharding.spec)),
        alone,
    )


def members_over_data(devices: jax.sharding.Mesh, f: Callable, axes: tuple) -> Callable:
    """f of stacked members, each part of the data axis on its own: they never meet.

    axes: of each argument, 0 where its axis 0 is the members, None where they share it.
    """
    specs = tuple(PartitionSpec("data") if axis == 0 else PartitionSpec() for axis in axes)
    return _by_part(f, devices, in_specs=specs, out_specs=PartitionSpec("data"))


def _by_part(f: Callable, devices: jax.sharding.Mesh, **specs: Any) -> Callable:
    """f on each part of the data axis by itself.

    Unchecked, for jax would then add up over all parts any derivative by what it knows to be the
    same on them: the gradient by a shared parameter inside the scan, the one by a probe's zeros
    over runs that have nothing to do with each other.
    """
    return jax.shard_map(f, mesh=devices, check_vma=False, **specs)
