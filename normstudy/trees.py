"""Parameter trees as nested dicts with plain names: what checkpoints, logs and rules address."""

from __future__ import annotations

from typing import Any

import jax

from normstudy.errors import UserError


def path_names(path: tuple) -> tuple[str, ...]:
    """Plain names of a jax key path, e.g. ("layers", "attn", "q"); flax's "value" and the
    branch's "f" are left out."""
    names = []
    for entry in path:
        for attribute in ("name", "key", "idx"):
            if hasattr(entry, attribute):
                names.append(str(getattr(entry, attribute)))
                break
    return tuple(name for name in names if name not in ("value", "f"))


def to_dict(tree: Any) -> dict[str, Any]:
    """The leaves of any pytree as nested dicts of plain names."""
    nested: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = path_names(path)
        here = nested
        for name in parents:
            here = here.setdefault(name, {})
        here[last] = leaf
    return nested


def from_dict(like: Any, nested: dict[str, Any]) -> Any:
    """The inverse of `to_dict`: leaves of the nested dict in the structure of `like`.

    Raises UserError that names the first path that is missing or has another shape.
    """

    def leaf(path, expected):
        names, found = path_names(path), nested
        for name in names:
            if not isinstance(found, dict) or name not in found:
                raise UserError(
                    f"the checkpoint has no {'/'.join(names)} of shape {expected.shape}"
                )
            found = found[name]
        if found.shape != expected.shape:  # type: ignore[attr-defined]
            raise UserError(
                f"{'/'.join(names)}: the config gives shape {expected.shape}, "
                f"the checkpoint holds {found.shape}"  # type: ignore[attr-defined]
            )
        return found

    return jax.tree_util.tree_map_with_path(leaf, like)
