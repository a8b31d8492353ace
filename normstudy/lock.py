"""One trainer for one folder. The kernel opens the lock when its holder ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from normstudy.errors import UserError

NAME = "lock"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Raises UserError, which names the holder, while another process has it."""
    with (folder / NAME).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"{folder} is being trained by {_holder(file.read())}") from None
        file.truncate(0)
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%FT%T%z")}
        file.write(json.dumps(me))
        file.flush()
        yield
        file.truncate(0)


def _holder(text: str) -> str:
    try:
        who = json.loads(text)
        return (
            f"process {who['pid']} on {who['host']} since {who['since']}; wait for it, stop it, "
            "or give another folder by --out"
        )
    except (ValueError, KeyError, TypeError):
        return "another process; wait for it, or give another folder by --out"
