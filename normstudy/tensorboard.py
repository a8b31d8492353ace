"""TensorBoard as a view of the logs, written with tensorboardX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter


class Board:
    """Scalars of every step; of every probe, five layers from bottom to top."""

    def __init__(self, folder: Path, begin: int):
        # a resumed run writes its steps again: readers are told to drop the ones from before. The
        # suffix keeps their file: names hold whole seconds, one of the same second would be emptied
        suffix = f".{begin:09d}"
        self.writer = SummaryWriter(
            str(folder), purge_step=begin or None, flush_secs=30, filename_suffix=suffix
        )

    def scalars(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""
        for name, value in row.items():
            if name != "step":
                self.writer.add_scalar(f"train/{name}", float(value), row["step"])

    def layers(self, step: int, probe: dict[str, Any]) -> None:
        """One row of probes.jsonl: tags name/layer_00 ... at the quarters of the depth."""
        for name, values in probe.items():
            values = np.asarray(values)
            if values.ndim == 0:
                self.writer.add_scalar(f"probe/{name}", float(values), step)
                continue
            for layer in sorted({round(q * (len(values) - 1) / 4) for q in range(5)}):
                self.writer.add_scalar(f"{name}/layer_{layer:02d}", float(values[layer]), step)

    def close(self) -> None:
        self.writer.close()
