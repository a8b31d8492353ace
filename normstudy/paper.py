"""Tables -> the paper: figures, macros.tex, then the PDF by latexmk. No jax here.

In the text \\val{NAME} is a number of numbers.csv, \\ci{NAME} the same with its interval,
\\verdict{C6} and \\measured{C6} are columns of claims.csv, \\claimrows all of it, \\study{WHAT} a
row of study.csv. A name that is not there ends the build; with draft it is a box that says "no
data". Data of the smoke preset are marked on every page.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normstudy import evidence, paper_figures
from normstudy.errors import UserError
from normstudy.frames import Table
from normstudy.progress import say

PACKAGES = "latexmk texlive-latex-recommended texlive-fonts-recommended"  # Debian's names
TABLES = ("runs", "probes", "layers", "curves", "checks", "study", "claims", "numbers", "leads")
USES = re.compile(r"\\(val|ci|verdict|measured|study)\{([^{}#]+)\}")
FIGURE = re.compile(r"\\includegraphics(?:\[[^\]]*\])?\{figures/([^{}#]+)\}")
POWER = re.compile(r"(\d)e([+-]\d+)\b")
SMOKE = "smoke"  # the preset whose numbers mean nothing
HEAD = r"""% written by `normstudy paper` from the tables; not to be edited
\makeatletter
\newcommand{\setval}[3]{\@namedef{#1@#2}{#3}}
\newcommand{\getval}[2]{\ifcsname #1@#2\endcsname\csname #1@#2\endcsname\else\missing{#2}\fi}
\makeatother
\newcommand{\val}[1]{\getval{val}{#1}}
\newcommand{\ci}[1]{\getval{ci}{#1}}
\newcommand{\verdict}[1]{\getval{verdict}{#1}}
\newcommand{\measured}[1]{\getval{measured}{#1}}
\newcommand{\study}[1]{\getval{study}{#1}}
"""
MISSING = {
    True: r"""\newcommand{\missing}[1]{\fbox{no data: \detokenize{#1}}}
\let\drawn\includegraphics
\renewcommand{\includegraphics}[2][]{\IfFileExists{#2}{\drawn[#1]{#2}}{\missing{#2}}}""",
    False: r"\newcommand{\missing}[1]{\errmessage{no data for \detokenize{#1}}}",
}
WATERMARK = (
    r"\AddToHook{shipout/background}{\put(40,-40)"
    r"{\color{red}\Large SMOKE RUN: these numbers mean nothing}}"
)
SPECIAL = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "_": r"\_", "^": r"\textasciicircum{}",
    "%": r"\%", "&": r"\&", "#": r"\#", "$": r"\$", "|": r"\textbar{}", "<": r"\textless{}",
    ">": r"\textgreater{}", "~": r"\textasciitilde{}",
}  # fmt: skip


def build(folder: Path, data: Path, out: Path, draft: bool = False, pdf: bool = True) -> Path:
    """OUT/main.pdf (or main.tex) from FOLDER/main.tex and the tables in DATA.

    draft: what has no data is a box that says so. pdf: False leaves out LaTeX. Raises UserError for
    a table or a number that is missing (names it), where latexmk is not installed (names Debian's
    packages), and where the text does not compile (quotes the log).
    """
    text = folder / "main.tex"
    if not text.exists():
        raise UserError(f"{text} does not exist: {folder} is no folder of a paper")
    tables = {name: _read(data, name, draft) for name in TABLES}
    out.mkdir(parents=True, exist_ok=True)
    values = list(_values(tables))
    if not draft:
        _check(text.read_text(encoding="utf-8"), {(kind, name) for kind, name, _ in values}, data)
    source = {row["name"]: f" % {row['source']}" for row in tables["numbers"]}
    lines = [
        rf"\setval{{{kind}}}{{{name}}}{{{own}}}{source.get(name, '')}" for kind, name, own in values
    ]
    rows = f"\\newcommand{{\\claimrows}}{{%\n{_claims(tables['claims'])}}}\n"
    mark = WATERMARK if _preset(tables["study"]) == SMOKE else ""
    (out / "macros.tex").write_text("\n".join([HEAD + MISSING[draft], mark, *lines, rows]))
    paper_figures.draw_all(data, out / "figures", some=draft)
    for path in folder.glob("*.*"):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    return _compile(out) if pdf else out / text.name


def escape(text: Any) -> str:
    """Text as LaTeX prints it."""
    escaped = "".join(SPECIAL.get(sign, sign) for sign in str(text))
    return escaped.replace("--", "-{}-")  # of an option: two signs, no dash


def number(text: str) -> str:
    """The text of a number as LaTeX prints it: 1.2e-09 as 1.2 times a power of ten."""
    power = lambda found: rf"{found[1]}\ensuremath{{\times10^{{{int(found[2])}}}}}"
    return POWER.sub(power, escape(text))


def _read(data: Path, name: str, draft: bool) -> Table:
    if draft and not (data / f"{name}.csv").exists():
        return []
    return evidence.read(data, name)


def _values(tables: dict[str, Table]) -> Iterator[tuple[str, str, str]]:
    """(kind, name, LaTeX) of everything that the text may ask for."""
    for row in tables["numbers"]:
        text = number(row["text"])
        yield "val", row["name"], text
        low, high = row["low"], row["high"]
        known = isinstance(low, int | float) and not math.isnan(low)
        yield "ci", row["name"], text + number(f" [{low:.2g}, {high:.2g}]" if known else "")
    for row in tables["claims"]:
        yield "verdict", row["claim"], escape(row["verdict"])
        yield "measured", row["claim"], escape(row["measured"])
    for row in tables["study"]:
        yield "study", row["what"], escape(row["value"])


def _check(text: str, known: set[tuple[str, str]], data: Path) -> None:
    """Raises UserError for a name in the text that no table has, or a figure nobody draws."""
    asked = dict.fromkeys(USES.findall(text))
    missing = [f"\\{kind}{{{name}}}" for kind, name in asked if (kind, name) not in known]
    if missing:
        raise UserError(f"no number in {data} for {', '.join(missing)}; --draft leaves boxes")
    drawn = {f"{picture.name}.pdf" for picture in paper_figures.PICTURES}
    if unknown := set(FIGURE.findall(text)) - drawn:
        raise UserError(f"no figure is called {', '.join(sorted(unknown))}: {sorted(drawn)}")


def _preset(study: Table) -> str | None:
    return next((row["value"] for row in study if row["what"] == "preset"), None)


def _claims(rows: Table) -> str:
    """The ledger as the rows of a table: claim, words, verdict, n."""
    lines = [
        rf"{row['claim']} & {escape(row['says'])} & {escape(row['verdict'])} & {row['n']} \\"
        for row in rows
    ]
    return "\n".join(lines or [r"& no data & & \\"]) + "\n"


def _compile(out: Path) -> Path:
    """main.pdf by latexmk, without dates in it."""
    if shutil.which("latexmk") is None:
        raise UserError(f"latexmk is not installed; on Debian: apt-get install {PACKAGES}")
    say("latexmk: main.tex")
    still = os.environ | {"SOURCE_DATE_EPOCH": "0", "FORCE_SOURCE_DATE": "1"}
    command = ["latexmk", "-pdf", "-halt-on-error", "-interaction=nonstopmode", "main.tex"]
    done = subprocess.run(command, cwd=out, env=still, capture_output=True, text=True, check=False)
    if done.returncode:
        log = out / "main.log"  # none where latexmk found no LaTeX
        lines = (
            log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        )
        wrong = [line for line in lines if line.startswith("!")] or [done.stdout[-500:].strip()]
        raise UserError(f"{out / 'main.tex'} does not compile: {wrong[0]}; see {log}")
    return out / "main.pdf"
