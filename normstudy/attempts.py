"""attempts.jsonl of a run folder: when somebody worked on it, and how that ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normstudy import record
from normstudy.errors import Interrupted, Preempted

NAME = "attempts.jsonl"
LOST = {"how": "lost", "why": "no word of its end: killed, out of memory, or a peer was lost"}


class Attempt:
    """One attempt; says how it ended, once."""

    def __init__(self, folder: Path, begin: int):
        path = folder / NAME
        before = read(folder)
        record.rewrite(path, before)  # without a line that a killed writer left torn
        self.number = len({row["attempt"] for row in before}) + 1
        self.journal = record.Journal(path)
        if before and "how" not in before[-1]:
            self.journal.write({"attempt": before[-1]["attempt"], **LOST})
        self.began = time.time()
        self.over = False
        self.journal.write(
            {
                "attempt": self.number,
                "begin": _now(),
                "from_step": begin,
                "pid": os.getpid(),
                "host": socket.gethostname(),
            }
        )

    def end(self, how: str, why: str = "") -> None:
        """how: done, preempted, interrupted or failed."""
        if self.over:
            return
        self.over = True
        row = {"attempt": self.number, "how": how, "why": why, "end": _now()}
        self.journal.write(row | {"seconds": round(time.time() - self.began, 3)})
        self.journal.close()


@contextlib.contextmanager
def attempt(folder: Path, begin: int) -> Iterator[Attempt]:
    """What is not ended by name ends as the exception says."""
    own = Attempt(folder, begin)
    try:
        yield own
    except (Preempted, Interrupted) as error:
        own.end(type(error).__name__.lower(), str(error))
        raise
    except BaseException as error:
        own.end("failed", f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    finally:
        own.end("done")


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows: of each attempt one when it began, and one with "how" when it ended."""
    path = folder / NAME
    return record.read_lines(path) if path.exists() else []


def _now() -> str:
    return time.strftime("%FT%T%z")
