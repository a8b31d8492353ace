"""A run folder: config.json, metrics.jsonl, probes.jsonl, ckpt/, tb/, outcome.json. No jax here.

JSONL is the truth; TensorBoard is a view of it. One row per line, one line per step.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import config
from normstudy.errors import UserError

METRICS, PROBES, CONFIG, OUTCOME = "metrics.jsonl", "probes.jsonl", "config.json", "outcome.json"


def open_folder(
    folder: Path, identity: dict[str, Any], kind: str, may_change: Collection[str] = ()
) -> bool:
    """Make the folder ours, or find that it is; True when work in it goes on from before.

    identity["config"] is what must agree, but for the fields that may change: where they do,
    config.json says so from then on, and a finished run is no longer finished. Raises UserError,
    and writes nothing, when the folder is not writable, holds something else, or was made with
    another config (names the fields).
    """
    path = folder / CONFIG
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is a file; give a folder by --out")
        if not path.exists():
            ours = {path.name + ".partial"}  # a kill while it was being written
            if folder.exists() and {found.name for found in folder.iterdir()} - ours:
                raise UserError(
                    f"{folder} holds files but is no {kind} of normstudy; nothing was written. "
                    "Give a new or empty folder by --out"
                )
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, identity)
            return False
        if not os.access(folder, os.W_OK):
            raise PermissionError
    except (PermissionError, NotADirectoryError, FileExistsError):
        raise UserError(f"{folder} cannot be written; give another folder by --out") from None
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None
    before = read_identity(path)
    if before["kind"] != identity["kind"]:
        raise UserError(f"{folder} holds a {before['kind']}, not a {kind}; nothing was written")
    changed = differences(before, identity)
    if {name.rpartition(".")[2] for name in changed} - set(may_change):
        what = "".join(f"{n}: {old} there, {new} now. " for n, (old, new) in changed.items())
        raise UserError(
            f"{folder} was made with another config; nothing was written. {what}"
            "Give another folder by --out, the same settings to go on, or the fields that may "
            "change by --allow-config-change"
        )
    texts = [tree.get("corpus", {}).get("sha256") for tree in (before, identity)]
    if texts[0] != texts[1]:
        raise UserError(
            f"{folder} was made with another text (sha256 {texts[0]} there, {texts[1]} now); "
            "nothing was written. Give another folder by --out"
        )
    if changed:
        history = [*before.get("changes", []), {"from": before["code"], "fields": changed}]
        write_json(path, identity | {"changes": history})
        (folder / OUTCOME).unlink(missing_ok=True)
    return True


def identity(run_config: dict[str, Any], kind: str, **extra: Any) -> dict[str, Any]:
    """What config.json holds: kind, config, code identity, versions, and what else is given."""
    names = ("normstudy", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain")
    return {
        "kind": kind,
        "config": run_config,
        "code": _git(),
        "versions": {name: _version(name) for name in names}
        | {"python": platform.python_version()},
        **extra,
    }


def load_config(folder: Path) -> config.Run:
    """The config of a run folder. Raises UserError when there is none or it is damaged, or when a
    newer normstudy wrote what this one does not know (names both versions).
    """
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder} is no run folder: it has no {CONFIG}")
    tree = read_identity(path, "run")
    try:
        return config.from_json(json.dumps(tree["config"]), where=str(path))
    except UserError as error:
        wrote, here = tree.get("versions", {}).get("normstudy"), _version("normstudy")
        message = str(error) if str(path) in str(error) else f"{path}: {error}"
        if wrote not in (None, here):
            message += f" (normstudy {wrote} wrote it, this is {here}: install that one to read it)"
        raise UserError(message) from None


def read_identity(path: Path, kind: str | None = None, *needed: str) -> dict[str, Any]:
    """A config.json that normstudy wrote. Raises UserError for any other, or another kind."""
    tree = read_json(path)
    missing = [name for name in ("kind", "config", *needed) if name not in tree]
    if missing:
        raise UserError(f"{path} was not written by normstudy: it has no {', '.join(missing)}")
    if kind is not None and tree["kind"] != kind:
        raise UserError(f"{path} belongs to a {tree['kind']}, not to a {kind}")
    return tree


def differences(before: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{field: (before, now)} of what differs in the configs of two identities.

    A field that an older version did not have is at its default there: a default is chosen so that
    it changes nothing.
    """
    usual = _flat(dataclasses.asdict(config.Run()))
    flat_a, flat_b = _flat(before["config"]), _flat(json.loads(json.dumps(now["config"])))
    flat_a = {name: usual[name] for name in flat_b if name in usual} | flat_a
    names = sorted(n for n in {**flat_a, **flat_b} if flat_a.get(n) != flat_b.get(n))
    return {name: (flat_a.get(name), flat_b.get(name)) for name in names}


class Journal:
    """Appends rows to a JSONL file, each on the disk's way before the next."""

    def __init__(self, path: Path):
        self.file = path.open("a", encoding="utf-8")

    def write(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(plain(row), allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def read_lines(path: Any, fault: Callable[[dict, dict], str] = lambda row, before: "") -> list:
    """Rows of a JSONL file. A torn last line (a killed writer) is left out.

    path: here or on an object store. fault: what is wrong with a row, given the one before it ({}
    at first). Raises UserError that names file and line when one is damaged.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; is {path.parent} a run folder?")
    text = path.read_bytes().decode("utf-8", errors="replace")
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not a row")
            if found := fault(row, rows[-1] if rows else {}):
                raise ValueError(found)
        except ValueError as error:
            raise UserError(
                f"{path}, line {number} is damaged ({error}); nothing was drawn or overwritten. "
                "Restore the line, or delete the run folder and run the arm again"
            ) from None
        rows.append(_numbers(row))
    return rows


def read_rows(path: Any) -> list[dict[str, Any]]:
    """Rows of a log, each with a step, in order. As `read_lines`."""

    def fault(row: dict[str, Any], before: dict[str, Any]) -> str:
        if "step" not in row:
            return "not a row with a step"
        if before and row["step"] <= before["step"]:
            return f"step {row['step']} stands after step {before['step']}"
        return ""

    return read_lines(path, fault)


def column(path: Path, name: str) -> list[Any]:
    """One entry of every row of a log."""
    return [row[name] for row in read_rows(path)]


def truncate(path: Path, step: int) -> None:
    """Drop the rows of `step` and after, and a torn last line: what a resumed run writes again."""
    if path.exists():
        rewrite(path, [row for row in read_rows(path) if row["step"] < step])


def rewrite(path: Path, rows: list[dict[str, Any]]) -> None:
    """A JSONL file anew, whole or not at all."""
    partial = path.with_suffix(".partial")
    text = "".join(json.dumps(plain(row), allow_nan=False) + "\n" for row in rows)
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises UserError that names the file."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ValueError("not an object")
        return _numbers(tree)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None


def write_json(path: Path, tree: dict[str, Any]) -> None:
    """Written whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(plain(tree), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def plain(value: Any) -> Any:
    """Numbers as JSON: float32 with all its nine digits, non-finite ones as strings."""
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, np.ndarray):
        listed = (_short(value) if value.dtype == np.float32 else value).tolist()
        return listed if value.dtype.kind == "f" and np.isfinite(value).all() else plain(listed)
    if isinstance(value, np.generic):
        return plain(np.asarray(value))
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _short(array: np.ndarray) -> np.ndarray:
    """The shortest decimals that give the same float32 back."""
    return array.astype(str).astype(np.float64)


def _numbers(value: Any) -> Any:
    """The inverse of `plain` for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {name: _numbers(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_numbers(v) for v in value]
    return float(value) if value in ("nan", "inf", "-inf") else value


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _git() -> str:
    """Commit of the checkout this package runs from, with '+changes' where it is not clean."""
    here = Path(__file__).parent
    try:
        commit = _output(["git", "-C", str(here), "rev-parse", "HEAD"])
        dirty = _output(["git", "-C", str(here), "status", "--porcelain", "--", str(here)])
    except (OSError, subprocess.SubprocessError):
        return "no git"
    return commit + ("+changes" if dirty else "")


def _output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat
