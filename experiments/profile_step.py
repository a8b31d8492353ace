"""Where does the time of a training step go, operation by operation?

A trace of the compiled step by jax's own profiler, on CPU devices. Every instruction of the
compiled program carries the scope it came from (layer part and pass); its time is added up by them.

Command   make profile      or   python experiments/profile_step.py --csv FILE
Time      half a minute on two CPU cores
Expect    a table: milliseconds of a step, on one of the devices, by part (rows) and pass (columns).
          `again` is what the backward pass makes a second time; `once`, what stands outside the
          scan over layers. Matrix products take most of it
"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from contenders import LR, tokens

from normstudy import cli, config, frames, mesh, programs, runtime, tables
from normstudy.errors import UserError
from normstudy.progress import say

STEPS = 5
WHOLE = "a step"
PASSES = ("forward", "again", "backward", "once")
# the first pattern that a scope has names its part
PARTS = {
    "attention core": r"/attention/",
    "q, k, v, o": r"attn/[qkvo]\b",
    "activation": r"/activation/",
    "up, down": r"mlp/(up|down)\b",
    "norms": r"/norm_|final_norm",
    "rest of the layer": r"/(attn|mlp)\b",
    "scan itself": r"while/body",
    "embedding, readout, loss": r"embed|readout|loss|softmax",
}


@dataclass(frozen=True)
class Options:
    """Whose step: the shape that make bench times."""

    placement: str = "post"
    layers: int = 48
    width: int = 64  # 4 heads, 4 D units
    context: int = 64
    batch: int = 16
    csv: Path | None = None

    def __post_init__(self):
        if self.csv and not self.csv.parent.is_dir():
            raise UserError(f"{self.csv}: the folder {self.csv.parent} does not exist")


def main(argv: Sequence[str]) -> None:
    options = tyro.cli(Options, args=list(argv), description=__doc__)
    shape = {n: getattr(options, n) for n in ("placement", "layers", "width", "context", "batch")}
    run = config.override(config.PRESETS["cpu"], **shape, ff=4 * options.width)
    runtime.start()
    rows = table(*trace(run))
    print(tables.text(rows))
    if options.csv:
        options.csv.write_text(frames.to_csv(rows), encoding="utf-8")
        say(f"rows: {options.csv}")


def trace(run: config.Run) -> tuple[dict[str, str], dict[str, float], dict[str, float]]:
    """({instruction: scope}, {instruction: ms of a step}, {instruction: times it ran in a step}).

    Of one device, on average.
    """
    compiled, devices = programs.of(run)
    state = programs.initial_state(run, compiled)
    batch, lr = mesh.put_batch(devices, tokens(run)), jnp.float32(LR)
    text = compiled.step.lower(state, batch, lr).compile().as_text()
    for _ in range(3):
        state, metrics = compiled.step(state, batch, lr)
    jax.block_until_ready(metrics)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(STEPS):
                state, metrics = compiled.step(state, batch, lr)
            jax.block_until_ready((state, metrics))
        (written,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    spent: defaultdict[str, float] = defaultdict(float)
    times: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.get("ph") == "X" and "hlo_op" in event.get("args", {}):
            spent[event["name"]] += event["dur"] / 1e3 / STEPS / devices.size
            times[event["name"]] += 1 / STEPS / devices.size
    scopes = re.findall(r'^\s*(?:ROOT )?%(\S+) = .*?op_name="([^"]*)"', text, re.M)
    return dict(scopes), dict(spent), dict(times)


def table(
    scopes: dict[str, str], spent: dict[str, float], times: dict[str, float]
) -> list[dict[str, Any]]:
    """Rows by part, columns by pass, milliseconds; the loops themselves hold what is in them."""
    cells: dict[str, dict[str, float]] = {}
    for name, milliseconds in spent.items():
        if name.startswith(("while", "call", "conditional")):
            continue
        part, when = place(name, scopes.get(name, ""), times[name])
        for row in (part, WHOLE):
            own = cells.setdefault(row, dict.fromkeys(PASSES, 0.0))
            own[when] += milliseconds
    whole = sum(cells[WHOLE].values())
    order = sorted(cells, key=lambda part: (part == WHOLE, -sum(cells[part].values())))
    return [
        {
            "part": part,
            **{f"{when} (ms)": round(cells[part][when], 1) for when in PASSES},
            "all (ms)": round(sum(cells[part].values()), 1),
            "share (per cent)": round(100 * sum(cells[part].values()) / whole, 1),
        }
        for part in order
    ]


def place(name: str, scope: str, times: float) -> tuple[str, str]:
    """(part, pass) of an instruction that ran so many times a step."""
    if name.startswith(("all-reduce", "all-gather", "reduce-scatter")):
        return "devices meet", "once" if times < 2 else "backward"
    if times < 2:
        when = "once"
    elif "rematted_computation" in scope:
        when = "again"
    else:
        when = "backward" if "transpose(" in scope else "forward"
    for part, pattern in PARTS.items():
        if re.search(pattern, scope):
            return part, when
    return ("optimizer and the rest" if when == "once" else "scan itself"), when


if __name__ == "__main__":
    cli.guarded(main)
