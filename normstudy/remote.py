"""Run folders on an object store, gs://BUCKET/NAME: worked on in a local copy, kept over there.

Objects cannot be appended to, so logs are written locally and copied whole whenever a checkpoint is
sealed; checkpoints go there at once. What the store has is what counts: a process that starts takes
its copy from there. file:///FOLDER is treated the same way.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etils import epath

from normstudy.errors import UserError

CHECKPOINTS = "ckpt"  # what no copy is made of

_stores: dict[Path, Any] = {}  # local copy: where it is kept


def local(out: Path) -> Path:
    """The folder to work in: OUT itself, or the local copy of what lies at a URL."""
    found = re.match(r"^(gs|s3|file):/*(.*)$", str(out))  # pathlib makes one slash of two
    if found is None:
        return out
    scheme, name = found.groups()
    name = name.rstrip("/")
    if not name:
        raise UserError(f"{out} names no folder; give {scheme}://BUCKET/NAME")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    copy = cache / "normstudy" / "remote" / scheme / name
    _stores[copy] = epath.Path(f"/{name}" if scheme == "file" else f"{scheme}://{name}")
    return copy


def home(folder: Path) -> Any:
    """Where the checkpoints of a run folder are, and what all its processes share."""
    for copy, store in _stores.items():
        if folder == copy or copy in folder.parents:
            return store / folder.relative_to(copy)
    return folder


def pull(folder: Path) -> None:
    """Make the local copy anew from the store; nothing for a folder that is no copy."""
    store = home(folder)
    if store == folder:
        return
    shutil.rmtree(folder, ignore_errors=True)
    if store.exists():
        for path in files(store, without=CHECKPOINTS):
            target = folder / path.relative_to(store)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def push(written: Path) -> None:
    """Copy a file of a local copy, or all under it, to the store; nothing where there is none."""
    if home(written) == written:
        return
    for path in files(written, without=CHECKPOINTS) if written.is_dir() else [written]:
        target = home(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Push once more at the end, when all files are closed; a store out of reach hides no error."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            push(folder)
        raise
    push(folder)


def files(folder: Any, without: str = "") -> Iterator[Any]:
    """All files under a folder, in order, but for those under folders of one name."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            yield path
        elif path.name != without:
            yield from files(path, without)
