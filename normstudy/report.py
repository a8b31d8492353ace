"""A single page that a person opens: pictures first. No scripts, no requests."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import Any

from normstudy import frames, outcome, tables
from normstudy.figures import Drawn
from normstudy.frames import Logs

CSS = """
body { font: 16px/1.5 Georgia, serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; }
img { width: 100%; max-width: 46rem; height: auto; display: block; margin: .6rem auto; }
table { border-collapse: collapse; font: 13px/1.3 ui-monospace, monospace; width: 100%; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .word { text-align: left; }
.trained, .spiked { color: #00691c; } .collapsed, .stalled, .diverged { color: #b00020; }
pre { white-space: pre-wrap; font: 13px/1.4 ui-monospace, monospace; }
.wide { overflow-x: auto; } .small { color: #555; font-size: .85rem; }
a { color: #00457c; }
"""


def write(
    path: Path,
    title: str,
    card: str,
    runs: list[Logs],
    rows: list[dict[str, Any]],
    drawn: list[Drawn],
    told: str = "",
) -> None:
    """Write the page: verdict, table, every figure with its sentence, how it was made.

    told: a text that stands before all of it, as it is for a terminal.
    """
    first, *others = drawn
    figures = "\n".join(_figure(figure) for figure in others)
    page = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{CSS}</style></head><body>
<h1>{html.escape(title)}</h1>
{f"<pre>{html.escape(told)}</pre>" if told else ""}
<p>{html.escape(verdict(rows))}</p>
{_figure(first)}
<h2>What became of each arm</h2>
<div class="wide">{_table(rows)}</div>
<p class="small">{html.escape(_words(rows))}</p>
{figures}
<h2>How this was made</h2>
<p class="small">{html.escape(card)}</p>
<p class="small">{html.escape(_made(runs))}</p>
</body></html>
"""
    path.write_text(page, encoding="utf-8")


def verdict(rows: list[dict[str, Any]]) -> str:
    """The first sentence of the page: who trained, who did not, from the outcomes alone."""
    parts = []
    for word in (*outcome.WORDS, "running"):
        names = [row["arm"] for row in rows if row["outcome"] == word]
        if names:
            parts.append(f"{len(names)} of {len(rows)} runs {word}: {', '.join(names)}")
    return ". ".join(parts) + "."


def _words(rows: list[dict[str, Any]]) -> str:
    used = {row["outcome"] for row in rows}
    return ". ".join(f"{w}: {meaning}" for w, meaning in outcome.WORDS.items() if w in used) + "."


def _figure(figure: Drawn) -> str:
    png = base64.b64encode(figure.png.read_bytes()).decode()
    return (
        f"<h2>{html.escape(figure.title)}</h2>\n"
        f'<img alt="{html.escape(figure.title)}" src="data:image/png;base64,{png}">\n'
        f"<p>{html.escape(figure.sentence)} "
        f'<a class="small" href="figures/{figure.csv.name}">data</a></p>'
    )


def _table(rows: list[dict[str, Any]]) -> str:
    table = frames.closing_table(rows)
    kinds = {"outcome": ' class="word"'}
    head = "".join(f"<th{kinds.get(name, '')}>{html.escape(name)}</th>" for name in table[0])
    body = ""
    for row in table:
        cells = ""
        for name, value in row.items():
            kind = f' class="word {value}"' if name == "outcome" else ""
            cells += f"<td{kind}>{html.escape(tables.cell(value))}</td>"
        body += f"<tr>{cells}</tr>\n"
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _made(runs: list[Logs]) -> str:
    first = runs[0].run
    m, d, o, p = first.model, first.data, first.optim, first.probe
    return (
        f"{m.layers} layers, width {m.width}, {m.heads} heads, MLP {m.ff} ({m.activation}), "
        f"context {m.context} tokens, vocabulary {m.vocab}; corpus {d.corpus}, batch {d.batch}; "
        f"{o.optimizer}, peak learning rate {o.lr:g}, b1 {o.b1}, b2 {o.b2}, eps {o.eps:g}, clip "
        f"{o.clip:g}; init {first.init.init}; probes on {p.probe_batch} held-out sequences with "
        f"{p.vectors} vectors. A run ends early once it has been collapsed or stalled for "
        f"{first.stop_after} updates after its warmup (0: never). Losses are training losses, "
        f"smoothed over {outcome.RULE.window} updates."
    )
