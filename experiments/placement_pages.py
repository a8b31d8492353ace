"""A page of results for each row of the placements table: experiments/results/placements.md.

Command   python experiments/write_readme.py, which writes this file too
Time      seconds
Expect    what the row is, how every ramp of experiments/max_lr.py ended, and at which rates
          experiments/phase_diagram.py saw it train; tests/test_readme.py compares

From experiments/results/max_lr.csv and phase_depth.csv, as far as the row was run.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from normstudy import frames, phases, placements, ramp, tables
from normstudy.frames import Table

RESULTS = Path(__file__).resolve().parent / "results"
PATH = RESULTS / "placements.md"

HEAD = """# The rows of the placements table, and what became of them

Written by `experiments/write_readme.py` from [max_lr.csv](max_lr.csv) and
[phase_depth.csv](phase_depth.csv). The definitions stand in `normstudy/ramp.py` (max stable
learning rate) and `normstudy/outcome.py` (what a run came to). Losses in nats, smoothed.

![loss along the ramp](ramps.png)
"""


def text() -> str:
    """The whole file."""
    ramps, cells = rows("max_lr.csv"), rows("phase_depth.csv")
    about = {row["placement"]: row for row in placements.as_rows()}
    parts = [HEAD]
    for name, row in about.items():
        parts += [f"## {name}", _about(row)]
        if own := [r for r in ramps if r["placement"] == name]:
            parts += [_told(own), tables.markdown([_ramp(r) for r in own])]
        if own := [r for r in cells if r["placement"] == name]:
            parts += ["Constant rates, and what became of the runs:", tables.markdown(_window(own))]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def rows(name: str) -> Table:
    """A CSV of the results with its numbers as numbers; nothing where it was not made yet."""
    if not (RESULTS / name).exists():
        return []
    with (RESULTS / name).open(encoding="utf-8", newline="") as file:
        return [{key: _number(own) for key, own in row.items()} for row in csv.DictReader(file)]


def _number(entry: str) -> Any:
    for kind in (int, float):
        try:
            return kind(entry)
        except ValueError:
            pass
    return entry or None


def _about(row: dict[str, str]) -> str:
    shown = [f"- {name}: {own}" for name, own in row.items() if name != "placement" and own != "-"]
    return "\n".join(shown).replace(row["the stream"], f"`{row['the stream']}`")


def _told(own: Table) -> str:
    """'Max stable learning rate: 0.44 at 12 blocks, none at 48 blocks.'"""
    depths = frames.by(own, "layers")
    told = ", ".join(f"{ramp.tell(of_depth)} at {layers} blocks" for layers, of_depth in depths)
    return f"Max stable learning rate: {told}."


def _ramp(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "blocks": row["layers"],
        "seed": row["seed"],
        "max stable LR": ramp.tell([row]),
        "best loss": row["best_loss"],
        "at LR": row["lr_at_best"],
        "what ended it": row["why"],
    }


def _window(own: Table) -> Table:
    return [
        {
            "blocks": row["layers"],
            "warmup (updates)": row["warmup"],
            "rates": row["rates"],
            "all seeds trained at": row["all seeds trained at"],
            "some": row["some"],
        }
        for row in phases.windows(own)
    ]
