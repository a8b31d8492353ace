"""attempts.jsonl of a run folder: when somebody worked on it, and how that ended."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
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
            lost = {"attempt": before[-1]["attempt"], **LOST}
            self.journal.write(lost | {"seconds": _logged_since(folder, before[-1]["from_step"])})
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


def read(folder: Any) -> list[dict[str, Any]]:
    """The rows: of each attempt one when it began, and one with "how" when it ended."""
    path = folder / NAME
    return record.read_lines(path) if path.exists() else []


def goodput(folder: Any) -> float | None:
    """Share of the time of all attempts on a run, or on the runs of a study, that went into steps
    that count: not into compiling (the first step of an attempt), saving, evaluating, nor into
    steps that were done again. None: nothing is known yet.

    folder: a path here or on an object store. An attempt without an end lasted to its last row.
    """
    counted = wall = 0.0
    for own in [folder, *folder.glob("arms/*/*")]:
        rows = read(own)
        begun = [row["from_step"] for row in rows if "from_step" in row]
        wall += sum(row.get("seconds", 0) for row in rows)
        if rows and "how" not in rows[-1]:
            wall += _logged_since(own, begun[-1])
        counted += _logged_since(own, 0, without=begun)
    return counted / wall if wall else None


def _logged_since(folder: Any, step: int, without: Sequence[int] = ()) -> float:
    """Seconds of the rows of metrics.jsonl from a step on."""
    path = folder / record.METRICS
    rows = record.read_rows(path) if path.exists() else []
    wanted = (row for row in rows if row["step"] >= step and row["step"] not in without)
    return round(sum((row.get("seconds", 0) for row in wanted), 0.0), 3)


def _now() -> str:
    return time.strftime("%FT%T%z")
