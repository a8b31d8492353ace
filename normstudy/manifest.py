"""What a checkpoint held when it was whole: the sha256 of every file of it. No jax here.

orbax loads flipped bits without a word; a step is sound when it is what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from normstudy.errors import UserError

NAME = "manifest.json"


class Found(NamedTuple):
    """What a look at a step finds."""

    problem: str  # "" when it is sound
    files: int
    size: int  # bytes


def write(folder: Path, about: dict[str, Any]) -> None:
    """Seal a step that orbax has finished; on the disk before this returns. about: JSON values."""
    files = {
        str(path.relative_to(folder)): {"sha256": _sha256(path), "bytes": path.stat().st_size}
        for path in _files(folder)
    }
    partial = folder / f"{NAME}.partial"
    with partial.open("w", encoding="utf-8") as file:
        json.dump({**about, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(folder / NAME)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def look(folder: Path) -> Found:
    """Read every file of a step again."""
    path = folder / NAME
    if not path.exists():
        return Found("it was never finished (no manifest: killed while it was being saved?)", 0, 0)
    try:
        sealed = json.loads(path.read_text(encoding="utf-8"))["files"]
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


def look_at_all(path: Path) -> list[dict[str, Any]]:
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


def _problem(path: Path, sealed: dict[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != sealed["bytes"]:
            return f"has {size} bytes instead of {sealed['bytes']}"
        return "" if _sha256(path) == sealed["sha256"] else "is not what was saved (other bytes)"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _leaf(name: str) -> str:
    """The array that a file holds a part of, for people: orbax gives each a folder."""
    parts = name.split("/")
    return f" (of {parts[1]})" if len(parts) > 2 and parts[0] == "state" else ""


def _files(folder: Path) -> list[Path]:
    ours = (NAME, f"{NAME}.partial")
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name not in ours)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
