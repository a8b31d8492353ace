"""Which figures a study has: those of its kind, or the common ones of figures.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normstudy import phase_figure, phases, ramp, ramp_figure, record
from normstudy.figures import Figure
from normstudy.frames import Logs

OF_KIND = {
    phases.KIND: phase_figure.of,
    ramp.KIND: lambda folders, runs: ramp_figure.FIGURES,
}


def of(folders: Sequence[Path], runs: list[Logs]) -> Sequence[Figure] | None:
    """The figures of these folders, which are of one study or run; None: the common ones."""
    kind = record.read_identity(folders[0] / record.CONFIG)["kind"]
    return OF_KIND[kind](folders, runs) if kind in OF_KIND else None
