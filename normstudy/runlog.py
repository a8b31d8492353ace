"""What a run writes as it goes: both JSONL logs, and TensorBoard. From process 0 alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from normstudy import config, hosts, record
from normstudy.errors import UserError
from normstudy.tensorboard import Board


class RunLog:
    """Takes the values of one step after the other; a context manager that closes its files."""

    def __init__(self, folder: Path, run: config.Run, begin: int):
        # nats, of every step so far; the decimals in the log give the same float32 back
        self.losses: list[float] = hosts.first(lambda: _resume(folder, begin))
        self.writes = hosts.leads()
        self.settled = time.monotonic()
        if self.writes:
            self.metrics = record.Journal(folder / record.METRICS)
            self.probes = record.Journal(folder / record.PROBES)
            self.board = Board(folder / "tb", begin)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.writes:
            self.metrics.close()
            self.probes.close()
            self.board.close()

    def write(self, step: int, lr: float, values: dict[str, Any]) -> None:
        """Log the values of one step (host arrays): scalars, and "probe" where it was probed."""
        before, self.settled = self.settled, time.monotonic()
        probe = values.get("probe")
        row = {"step": step, "lr": lr, **{k: v for k, v in values.items() if k != "probe"}}
        self.losses.append(float(values["loss"]))
        if not self.writes:
            return
        self.metrics.write(row | {"seconds": round(self.settled - before, 4)})
        self.board.scalars(row)
        if probe is not None:
            self.probes.write({"step": step, **probe})
            self.board.layers(step, probe)


def _resume(folder: Path, begin: int) -> list[float]:
    """Cut both logs at the step that goes on; the losses before it."""
    for log in (record.METRICS, record.PROBES):
        record.truncate(folder / log, begin)
    rows = record.read_rows(folder / record.METRICS) if begin else []
    if [row["step"] for row in rows] != list(range(begin)):
        raise UserError(
            f"{folder / record.METRICS} lacks steps before the checkpoint at step {begin}; "
            "delete the run folder and run the arm again"
        )
    return [float(np.float32(row["loss"])) for row in rows]
