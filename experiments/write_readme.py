"""Fill the generated parts of README.md: the placements table, the outcome words, the results.

Command   python experiments/write_readme.py
Time      seconds
Expect    README.md and experiments/results/placements.md as they stand in the repository;
          tests/test_readme.py compares

The results come from experiments/results/*.json, each the summary.json of `make reproduce`.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import placement_pages

from normstudy import evidence, frames, outcome, placements, quantities, ramp, tables

ROOT = Path(__file__).resolve().parent.parent
RESULTS = {
    "reproduce.json": "`make reproduce`: learning rate {lr:g}, the largest of the grid at which "
    "pre-norm trains for every seed ([lr_grid.csv](experiments/results/lr_grid.csv))",
    "reproduce_lr1e-3.json": '`make reproduce ARGS="--lr 1e-3 --out runs/lr1e-3"`: learning rate '
    "{lr:g}, a common default of Adam",
}


EXPONENTS = (
    "gradient/mlp.down", "stream_gradient", "function_update/sgd", "function_update/sign",
    "function_update_with_norms/sgd", "function_update_with_norms/sign",
)  # fmt: skip


def regions() -> dict[str, str]:
    """{marker: Markdown that stands between <!-- marker --> and <!-- /marker --> in README.md}."""
    return {
        "claims": tables.markdown(_claims()),
        "placements": tables.markdown(placements.as_rows()),
        "quantities": tables.markdown(quantities.as_rows()),
        "bench": tables.markdown(_bench()),
        "profile": tables.markdown(_rows("profile.csv")),
        "thousand": tables.markdown(_rows("thousand_layers.csv")),
        "depth": tables.markdown(_depth()),
        "max_lr": tables.markdown(_max_lr()),
        "outcomes": "\n".join(f"- `{word}`: {says}" for word, says in outcome.WORDS.items()),
        "results": "\n\n".join(
            _result(name, heading) for name, heading in RESULTS.items() if _path(name).exists()
        ),
    }


def _bench() -> list[dict[str, Any]]:
    """Of what `make bench ARGS="--json experiments/results/bench.json"` wrote, what to look at."""
    rows = json.loads(_path("bench.json").read_text(encoding="utf-8")).values()
    aside = re.compile(r"rounds|memory|speed|^(tracing|compiling) a plain step")
    return [row for row in rows if not aside.search(row["what"])]


def _claims() -> list[dict[str, Any]]:
    """The verdicts of paper/data/claims.csv, which experiments/claims.py wrote."""
    return [
        {"": row["claim"], "claim": row["says"], "verdict": row["verdict"], "n": row["n"]}
        for row in evidence.read(ROOT / "paper" / "data", "claims")
    ]


def _max_lr() -> list[dict[str, Any]]:
    """Max stable rates by depth, of the max_lr.csv that experiments/max_lr.py wrote."""
    return ramp.by_depth(placement_pages.rows("max_lr.csv"))


def _depth() -> list[dict[str, Any]]:
    """The rows of depth_slopes.csv that `make depth ARGS="--out experiments/results"` wrote."""
    return [
        {
            "quantity": row["quantity"],
            "placement": row["placement"],
            "closed form": row["closed form"],
            "mean field": row["mean field"],
            "measured": f"{row['measured']} ± {row['se']}",
        }
        for row in _rows("depth_slopes.csv")
        if row["quantity"] in EXPONENTS
    ]


def _rows(name: str) -> list[dict[str, Any]]:
    """A CSV file of the results: `make profile`, `make thousand` and `make depth` write them."""

    def short(text: str) -> str:
        try:
            return tables.cell(float(text))
        except ValueError:
            return text

    with _path(name).open(encoding="utf-8", newline="") as file:
        return [{key: short(text) for key, text in row.items()} for row in csv.DictReader(file)]


def fill(text: str) -> str:
    """README.md with every region replaced by what it should be."""
    for name, content in regions().items():
        pattern = rf"(<!-- {name} -->).*?(<!-- /{name} -->)"
        text = re.sub(pattern, lambda m, c=content: f"{m[1]}\n{c}\n{m[2]}", text, flags=re.S)
    return text


def _path(name: str) -> Path:
    return ROOT / "experiments" / "results" / name


def _result(name: str, heading: str) -> str:
    summary = json.loads(_path(name).read_text(encoding="utf-8"))
    rows = [row for arm in summary["arms"].values() for row in arm["runs"]]
    h1 = summary["h1_nats"]
    return (
        f"{heading.format(lr=summary['config']['optim']['lr'])}; {summary['seeds']} of each arm, "
        f"H1 = {h1:.2f} nats.\n\n{tables.markdown(frames.closing_table(rows))}"
    )


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(fill(readme.read_text(encoding="utf-8")), encoding="utf-8")
    placement_pages.PATH.write_text(placement_pages.text(), encoding="utf-8")
