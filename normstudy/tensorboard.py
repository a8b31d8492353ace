"""TensorBoard as a view of the logs, written with tensorboardX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter
from tensorboardX.proto import summary_pb2


class Board:
    """Scalars of every step; of every probe, five layers from bottom to top."""

    def __init__(self, folder: Path, begin: int):
        # a resumed run writes its steps again: readers are told to drop the ones from before. The
        # suffix keeps their file: names hold whole seconds, one of the same second would be emptied
        suffix = f".{begin:09d}"
        self.writer = SummaryWriter(
            str(folder), purge_step=begin or None, flush_secs=30, filename_suffix=suffix
        )
        self.file: Any = self.writer.file_writer

    def scalars(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""
        self._write({f"train/{name}": row[name] for name in row if name != "step"}, row["step"])

    def layers(self, step: int, probe: dict[str, Any]) -> None:
        """One row of probes.jsonl: tags name/layer_00 ... at the quarters of the depth."""
        found = {}
        for name, values in probe.items():
            values = np.asarray(values)
            if values.ndim == 0:
                found[f"probe/{name}"] = values
                continue
            for layer in sorted({round(q * (len(values) - 1) / 4) for q in range(5)}):
                found[f"{name}/layer_{layer:02d}"] = values[layer]
        self._write(found, step)

    def _write(self, values: dict[str, Any], step: int) -> None:
        """All values of a step as one event: one for each takes longer than a training step."""
        made: Any = summary_pb2  # its names are made when it is imported
        scalars = [
            made.Summary.Value(tag=tag, simple_value=float(own)) for tag, own in values.items()
        ]
        self.file.add_summary(made.Summary(value=scalars), step)

    def close(self) -> None:
        self.writer.close()
