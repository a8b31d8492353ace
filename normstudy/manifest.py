"""What a checkpoint held when it was whole: the sha256 of every file of it. No jax here.

orbax loads flipped bits without a word; a step is sound when it is what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from normstudy import remote
from normstudy.errors import UserError

NAME = "manifest.json"
CHUNK = 2**22  # bytes read at a time


class Found(NamedTuple):
    """What a look at a step finds."""

    problem: str  # "" when it is sound
    files: int
    size: int  # bytes


def write(folder: Any, about: dict[str, Any]) -> None:
    """Seal a step that orbax has finished; on the disk before this returns.

    folder: a path here or on an object store. about: JSON values.
    """
    files = {str(path.relative_to(folder)): _sum(path) for path in _files(folder)}
    text = json.dumps({**about, "files": files}, indent=1)
    if not isinstance(folder, Path):  # an object is there whole or not at all
        (folder / NAME).write_text(text)
        return
    partial = folder / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / NAME)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def look(folder: Any) -> Found:
    """Read every file of a step again."""
    path = folder / NAME
    if not path.exists():
        return Found(
            "it was never finished (no manifest: killed while it was being saved, or deleted?)",
            0,
            0,
        )
    try:
        sealed = json.loads(path.read_text())["files"]
        size = sum(own["bytes"] for own in sealed.values())
    except (OSError, ValueError, KeyError, TypeError):
        return Found(f"{NAME} is damaged", 0, 0)
    for name, own in sealed.items():
        problem = _problem(folder / name, own)
        if problem:
            return Found(f"{name}{_leaf(name)} {problem}", len(sealed), size)
    strange = {str(file.relative_to(folder)) for file in _files(folder)} - set(sealed)
    if strange:
        return Found(f"{min(strange)} was added since it was saved", len(sealed), size)
    return Found("", len(sealed), size)


def look_at_all(path: Any) -> list[dict[str, Any]]:
    """One row for each checkpoint of a study, a run, a ckpt folder, or of that one step.

    Raises UserError when there is none.
    """
    steps = [path] if path.name.isdigit() and path.is_dir() else []
    for pattern in ("[0-9]*", "ckpt/[0-9]*", "arms/*/*/ckpt/[0-9]*"):
        steps += [own for own in path.glob(pattern) if own.name.isdigit()]
    if not steps:
        raise UserError(f"{path} holds no checkpoint (a run keeps them in ckpt/STEP)")
    rows = []
    for step in sorted(steps, key=lambda own: (str(own.parent), int(own.name))):
        found = look(step)
        rows.append(
            {
                "checkpoint": str(step),
                "files": found.files,
                "MiB": round(found.size / 2**20, 2),
                "problem": found.problem,
            }
        )
    return rows


def _problem(path: Any, sealed: dict[str, Any]) -> str:
    try:
        found = _sum(path)
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    if found["bytes"] != sealed["bytes"]:
        return f"has {found['bytes']} bytes instead of {sealed['bytes']}"
    return "" if found == sealed else "is not what was saved (other bytes)"


def _leaf(name: str) -> str:
    """The array that a file holds a part of, for people: orbax gives each a folder."""
    parts = name.split("/")
    return f" (of {parts[1]})" if len(parts) > 2 and parts[0] == "state" else ""


def _files(folder: Any) -> list[Any]:
    ours = (NAME, f"{NAME}.partial")
    return [path for path in remote.files(folder) if path.name not in ours]


def _sum(path: Any) -> dict[str, Any]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(CHUNK):
            digest.update(part)
            size += len(part)
    return {"sha256": digest.hexdigest(), "bytes": size}
