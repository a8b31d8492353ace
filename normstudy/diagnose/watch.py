"""Follow a run while it goes on, and warn: normstudy watch RUN_DIR. No jax here.

RUN_DIR is a run folder of normstudy, or a file of JSON lines, a row an update, with columns that
subject.py reads. Alarms are those of alarms.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from normstudy import record
from normstudy.diagnose import alarms, subject
from normstudy.diagnose.alarms import Alarm
from normstudy.errors import UserError


def follow(
    path: Path, every: float, patience: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Alarm | str]:
    """Alarms as they go, and a last sentence on how it ended.

    It looks again every so many seconds, and ends with the run, or when nothing was written for
    `patience` seconds. Raises UserError for what is neither a run folder nor a file of rows.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    gone: set[str] = set()
    seen, idle = -1, 0.0
    while True:
        over = path.is_dir() and (path / record.OUTCOME).exists()
        metrics, probes = _rows(path)
        for alarm in alarms.alarms(metrics, probes):
            if alarm.name not in gone:
                gone.add(alarm.name)
                yield alarm
        if over:
            ended = record.read_json(path / record.OUTCOME)
            yield f"ended after {len(metrics)} updates: {ended['word']}: {ended['why']}"
            return
        idle = 0.0 if len(metrics) > seen else idle + every
        seen = len(metrics)
        if idle >= patience:
            yield f"nothing new for {idle:.0f} s, after {len(metrics)} updates"
            return
        sleep(every)


def _rows(path: Path) -> tuple[list, list]:
    """(metrics, probes) so far; a torn last line is left out."""
    if path.is_dir():
        logs = (path / record.METRICS, path / record.PROBES)
        metrics, probes = (record.read_rows(log) if log.exists() else [] for log in logs)
        return metrics, probes
    return subject.rows(path), []
