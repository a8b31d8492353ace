"""Which figures a study has: those of its kind, or the common ones of figures.py."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from normstudy import figures, phase_figure, phases, record
from normstudy.figures import Figure
from normstudy.frames import Logs

OF_KIND = {phases.KIND: phase_figure.of}


def of(folders: Sequence[Path], runs: list[Logs]) -> Sequence[Figure]:
    """The figures of these folders, which are of one study, or of one run."""
    kind = record.read_identity(folders[0] / record.CONFIG)["kind"]
    return OF_KIND[kind](folders, runs) if kind in OF_KIND else figures.FIGURES
