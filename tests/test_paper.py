"""Tables to the paper: what its text may ask for, figures, LaTeX; and the committed paper."""

import csv
import math
import re
import shutil
import subprocess
from pathlib import Path

import claims_tables as made
import matplotlib.pyplot as plt
import pytest
import tiny
from matplotlib.colors import to_rgba

from normstudy import cli, config, evidence, ledger, paper, paper_figures
from normstudy.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PAPER, DATA = ROOT / "paper", ROOT / "paper" / "data"

latexmk = pytest.mark.skipif(shutil.which("latexmk") is None, reason="latexmk is not installed")
pdffonts = pytest.mark.skipif(
    shutil.which("pdffonts") is None, reason="pdffonts (Debian: poppler-utils) is not installed"
)

TEXT = r"""
\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage{mathptmx,graphicx,xcolor,longtable}
\input{macros}
\begin{document}
%s
\end{document}
"""
ASKS = r"""
Slope \ci{pre ratio slope} over \val{runs} runs; C6 is \verdict{C6}: \measured{C6}.
By \study{command}; with \study{code} and \study{weight_decay}.

\begin{longtable}{lp{4cm}p{4cm}r}
\claimrows
\end{longtable}
\includegraphics[width=5cm]{figures/leads.pdf}
\includegraphics{figures/grid.pdf}
"""


@pytest.fixture(scope="module")
def tables():
    claims = tiny.experiment("claims")
    options = claims.Options(parts=",".join(claims.PARTS))
    return made.whole(claims.arms_of(options, config.PRESETS["cpu"]))


@pytest.fixture(scope="module")
def whole(tables, tmp_path_factory):
    """A folder of all tables, as experiments/claims.py leaves it."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "_bootstrap", lambda *_: (0.25, 1.0))  # slow
        made.write(folder, tables)
    return folder


@pytest.fixture
def data(whole, tmp_path):
    """The same in a folder of one's own."""
    return Path(shutil.copytree(whole, tmp_path / "data"))


@pytest.fixture(scope="module")
def drawn(whole, tmp_path_factory):
    """All figures."""
    folder = tmp_path_factory.mktemp("drawn")
    paper_figures.draw_all(whole, folder)
    return folder


@pytest.fixture
def copied(drawn, monkeypatch):
    """Figures are copied in place of drawn."""

    def draw_all(data, out, some=False):
        shutil.copytree(drawn, out, dirs_exist_ok=True)

    monkeypatch.setattr(paper.paper_figures, "draw_all", draw_all)


def write(folder: Path, text: str = ASKS) -> Path:
    """FOLDER/paper with a main.tex of this text."""
    source = folder / "paper"
    source.mkdir(exist_ok=True)
    (source / "main.tex").write_text(TEXT.replace("%s", text), encoding="utf-8")
    return source


def macros(out: Path) -> dict[tuple[str, str], str]:
    """{(kind, name): LaTeX} of macros.tex."""
    text = (out / "macros.tex").read_text(encoding="utf-8")
    found = re.findall(r"^\\setval\{(\w+)\}\{([^{}]+)\}\{(.*)\}(?: %.*)?$", text, re.M)
    return {(kind, name): own for kind, name, own in found}


def raw(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def printed(pdf: Path) -> str:
    """Words of a PDF, with single spaces between them."""
    done = subprocess.run(["pdftotext", pdf, "-"], capture_output=True, text=True, check=True)
    return " ".join(done.stdout.split())


# ---------------------------------------------------------------------------- what may be asked


def test_every_number_claim_and_setting_can_be_asked_for(data, tmp_path, copied):
    found = paper.build(write(tmp_path), data, tmp_path / "out", pdf=False)
    assert found == tmp_path / "out" / "main.tex" and found.exists()
    known = macros(tmp_path / "out")
    expected = {(kind, row["name"]) for row in raw(data / "numbers.csv") for kind in ("val", "ci")}
    expected |= {
        (kind, row["claim"]) for row in raw(data / "claims.csv") for kind in ("verdict", "measured")
    }
    expected |= {("study", row["what"]) for row in raw(data / "study.csv")}
    assert known.keys() == expected
    assert known["study", "code"] == r"abc\_def, \& more"


def test_number_is_printed_as_its_row_has_it(data, tmp_path, copied):
    """Text that was made to be printed: 0.50 is no 0.5, and 1e+02 no 100.0."""
    rows = raw(data / "numbers.csv")
    shape = dict.fromkeys(rows[0], "") | {"claim": "C1", "source": "here", "n": "1"}
    for i, text in enumerate(("0.50", "-0.00", "1e+02", "2.0e+05", "3 of 5")):
        rows.append(shape | {"name": f"made {i}", "text": text, "value": "1"})
    evidence.write(data, {"numbers": rows})
    paper.build(write(tmp_path), data, tmp_path / "out", pdf=False)
    known = macros(tmp_path / "out")
    unlike = {
        row["name"]: (row["text"], known["val", row["name"]])
        for row in rows
        if known["val", row["name"]] != paper.number(row["text"])
    }
    assert not unlike


@pytest.mark.parametrize("value", ["3.10", "1234e56789", "0012345678", ""])
def test_setting_is_printed_as_its_row_has_it(data, tmp_path, copied, value):
    """A version, the first digits of a commit, and a setting that is the empty text."""
    evidence.write(data, {"study": [{"what": "made", "value": value}]})
    paper.build(write(tmp_path, r"\study{made}"), data, tmp_path / "out", pdf=False)
    assert macros(tmp_path / "out")["study", "made"] == value


def test_interval_is_printed_where_there_is_one(data, tmp_path, copied):
    shape = {"text": "2", "value": 2.0, "n": 3, "claim": "C1", "source": "here"}
    none = {"low": math.nan, "high": math.nan}
    evidence.write(
        data,
        {
            "numbers": [
                {"name": "with", "low": 1.234, "high": 0.00321} | shape,
                {"name": "without"} | none | shape,
            ]
        },
    )
    paper.build(write(tmp_path, r"\ci{with}"), data, tmp_path / "out", pdf=False)
    known = macros(tmp_path / "out")
    assert known["ci", "with"] == "2 [1.2, 0.0032]"
    assert known["ci", "without"] == "2"
    assert known["val", "with"] == "2"


def test_every_number_carries_its_source_along(data, tmp_path, copied):
    paper.build(write(tmp_path), data, tmp_path / "out", pdf=False)
    lines = (tmp_path / "out" / "macros.tex").read_text(encoding="utf-8").splitlines()
    for row in raw(data / "numbers.csv"):
        (line,) = (own for own in lines if own.startswith(f"\\setval{{val}}{{{row['name']}}}"))
        assert line.endswith(f" % {row['source']}")


@pytest.mark.parametrize("kind", ["val", "ci", "verdict", "measured", "study"])
def test_name_that_no_table_has_ends_the_build_and_is_named(data, tmp_path, kind):
    source = write(tmp_path, rf"\{kind}{{no such thing}} and \val{{runs}}")
    with pytest.raises(UserError) as error:
        paper.build(source, data, tmp_path / "out", pdf=False)
    assert f"\\{kind}{{no such thing}}" in str(error.value)
    assert r"\val{runs}" not in str(error.value)


def test_name_of_another_kind_is_no_number(data, tmp_path):
    with pytest.raises(UserError, match=r"\\val\{C6\}"):
        paper.build(write(tmp_path, r"\val{C6}"), data, tmp_path / "out", pdf=False)


def test_figure_that_nobody_draws_ends_the_build_and_is_named(data, tmp_path):
    source = write(tmp_path, r"\includegraphics[width=2cm]{figures/gird.pdf}")
    with pytest.raises(UserError, match=r"gird\.pdf.*grid\.pdf"):
        paper.build(source, data, tmp_path / "out", pdf=False)


@pytest.mark.parametrize("name", paper.TABLES)
def test_table_that_is_missing_ends_the_build_and_is_named(data, tmp_path, name):
    (data / f"{name}.csv").unlink()
    with pytest.raises(UserError, match=rf"{name}\.csv does not exist"):
        paper.build(write(tmp_path), data, tmp_path / "out", pdf=False)


def test_folder_without_a_main_tex_is_refused(data, tmp_path):
    with pytest.raises(UserError, match=r"main\.tex does not exist"):
        paper.build(tmp_path, data, tmp_path / "out")


@pytest.mark.parametrize("preset, marked", [("smoke", True), ("cpu", False), ("tpu", False)])
def test_pages_of_the_smoke_preset_are_marked_and_no_others(data, tmp_path, copied, preset, marked):
    evidence.write(data, {"study": [{"what": "preset", "value": preset}]})
    paper.build(write(tmp_path, r"\val{runs}"), data, tmp_path / "out", pdf=False)
    text = (tmp_path / "out" / "macros.tex").read_text(encoding="utf-8")
    assert ("SMOKE RUN: these numbers mean nothing" in text) is marked


def test_files_beside_the_text_are_taken_along_whatever_else_lies_there(data, tmp_path, copied):
    source = write(tmp_path, r"\val{runs}")
    (source / "references.bib").write_text("@misc{a}", encoding="utf-8")
    (source / ".cache.d").mkdir()
    paper.build(source, data, tmp_path / "out", pdf=False)
    assert (tmp_path / "out" / "references.bib").read_text(encoding="utf-8") == "@misc{a}"


def test_commands_take_the_folder_and_print_what_they_made(data, tmp_path, copied, capsys):
    source = write(tmp_path)
    shutil.copytree(data, source / "data")
    cli.paper(["--source", str(source), "--no-pdf"])
    assert capsys.readouterr().out.strip() == str(source / "build" / "main.tex")
    others = ["--data", str(data), "--out", str(tmp_path / "out")]
    cli.paper(["--source", str(source), *others, "--no-pdf"])
    assert macros(source / "build") == macros(tmp_path / "out")


# ---------------------------------------------------------------------------------------- drafts


def test_draft_without_any_data_has_boxes_that_say_so(tmp_path):
    source = write(tmp_path)
    paper.build(source, tmp_path / "nowhere", tmp_path / "out", draft=True, pdf=False)
    text = (tmp_path / "out" / "macros.tex").read_text(encoding="utf-8")
    assert r"\fbox{no data" in text and macros(tmp_path / "out") == {}
    assert "no data" in text[text.index("claimrows") :]


@pytest.mark.parametrize("name", paper.TABLES)
def test_draft_is_made_from_any_one_table(whole, tmp_path, name):
    (tmp_path / "data").mkdir()
    shutil.copy(whole / f"{name}.csv", tmp_path / "data")
    source = write(tmp_path, r"\val{runs}")
    paper.build(source, tmp_path / "data", tmp_path / "out", draft=True, pdf=False)
    assert (tmp_path / "out" / "macros.tex").exists()


@latexmk
def test_draft_without_any_data_compiles(tmp_path):
    source = write(tmp_path, ASKS)
    found = paper.build(source, tmp_path / "nowhere", tmp_path / "out", draft=True)
    assert found.read_bytes().startswith(b"%PDF")
    assert "no data" in printed(found)


# ---------------------------------------------------------------------------------------- LaTeX


@pytest.mark.parametrize("sign", "\\{}_^%&#$|<>~")
def test_sign_that_latex_reads_otherwise_is_escaped(sign):
    found = paper.escape(f"a{sign}b")
    assert found[0] == "a" and found[-1] == "b" and found != f"a{sign}b"
    # nothing of it is read as a sign: what is left are commands, escaped signs and empty groups
    bare = re.sub(r"\\[a-z]+\{\}|\\[{}_%&#$]", "", found)
    assert bare == "ab"


@pytest.mark.parametrize(
    "text, printed",
    [("1.2e-09", r"1.2\ensuremath{\times10^{-9}}"), ("2e+05", r"2\ensuremath{\times10^{5}}"),
     ("0.50", "0.50"), ("-0.00", "-0.00"), ("3 of 5", "3 of 5"), ("one 5e", "one 5e")],
)  # fmt: skip
def test_number_is_printed_with_its_power_of_ten(text, printed):
    assert paper.number(text) == printed


def test_words_and_numbers_are_not_escaped():
    plain = "n/a: 3 of 5 (95%), 1e-3 [0.1, 2.5]; DeepNet's 'x+y'".replace("%", "")
    assert paper.escape(plain) == plain
    assert paper.escape(0.25) == "0.25"
    assert paper.escape("--preset x-y") == "-{}-preset x-y"


@latexmk
def test_text_compiles_with_its_numbers_figures_and_every_sign(data, tmp_path, copied):
    signs = r"a\b{c}d_e^f%g&h#i$j|k<l>m~n"
    rows = [row for row in raw(data / "study.csv") if row["what"] != "code"]
    evidence.write(data, {"study": [*rows, {"what": "code", "value": signs}]})
    found = paper.build(write(tmp_path), data, tmp_path / "out")
    assert found == tmp_path / "out" / "main.pdf"
    words = printed(found)
    runs = next(row["text"] for row in raw(data / "numbers.csv") if row["name"] == "runs")
    assert f"over {runs} runs" in words
    # two of them are accents in the font: for people the same
    for sign in "\\{}_%&#$|<>":
        assert sign in words
    assert "no data" not in words and "GPT-2" in words
    log = (tmp_path / "out" / "main.log").read_text(encoding="utf-8", errors="replace")
    assert "undefined" not in log


@latexmk
def test_mark_of_the_smoke_preset_is_on_the_page(data, tmp_path, copied):
    evidence.write(data, {"study": [{"what": "preset", "value": "smoke"}]})
    found = paper.build(write(tmp_path, r"\val{runs}"), data, tmp_path / "out")
    assert "SMOKE RUN" in printed(found)


@latexmk
def test_text_that_does_not_compile_is_refused_with_the_line_of_the_log(data, tmp_path, copied):
    with pytest.raises(
        UserError, match=r"does not compile: ! Undefined control sequence.*main\.log"
    ):
        paper.build(write(tmp_path, r"\nosuchcommand"), data, tmp_path / "out")


def test_without_latexmk_debians_packages_are_named(data, tmp_path, copied, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as error:
        paper.build(write(tmp_path), data, tmp_path / "out")
    for package in ("latexmk", "texlive-latex-recommended", "texlive-fonts-recommended"):
        assert package in str(error.value)
    assert (tmp_path / "out" / "macros.tex").exists()


def test_latexmk_without_a_latex_is_refused_without_a_traceback(
    data, tmp_path, copied, monkeypatch
):
    """It ends before there is a log."""
    broken = tmp_path / "bin" / "latexmk"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\necho 'sh: pdflatex: not found'\nexit 12\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", str(broken.parent))
    with pytest.raises(UserError, match="pdflatex: not found"):
        paper.build(write(tmp_path), data, tmp_path / "out")


# -------------------------------------------------------------------------------------- figures


def test_every_figure_is_drawn_and_the_same_tables_give_the_same_bytes(whole, drawn, tmp_path):
    again = paper_figures.draw_all(whole, tmp_path / "again")
    assert [path.stem for path in again] == [picture.name for picture in paper_figures.PICTURES]
    for path in again:
        for own in (path, path.with_suffix(".png")):
            assert own.read_bytes() == (drawn / own.name).read_bytes(), own.name


def test_figures_have_no_type_3_fonts(drawn):
    """Printers and archives refuse them."""
    for path in drawn.glob("*.pdf"):
        content = path.read_bytes()
        assert b"/Font" in content  # that there are fonts, and that the file is read as it is
        assert b"/Type3" not in content and b"/FontType 3" not in content, path.name


def test_figure_without_its_tables_is_left_out(data, tmp_path, monkeypatch):
    kept = [own for own in paper_figures.PICTURES if own.name in ("leads", "ablations")]
    monkeypatch.setattr(paper_figures, "PICTURES", kept)  # the others take their time
    (data / "leads.csv").unlink()
    found = paper_figures.draw_all(data, tmp_path / "figures")
    assert [path.name for path in found] == ["ablations.pdf"]


def test_folder_without_tables_has_nothing_to_draw(tmp_path):
    with pytest.raises(UserError, match="nothing to draw"):
        paper_figures.draw_all(tmp_path, tmp_path / "figures")


@pytest.fixture
def draw():
    """Draws in the paper's style, and closes what was drawn."""
    canvases = []

    def drawing(function, tables):
        with plt.rc_context(paper_figures.PAPER):
            canvases.append(function(tables))
            canvases[-1].canvas.draw()
        return canvases[-1]

    yield drawing
    for canvas in canvases:
        plt.close(canvas)


def test_grid_counts_the_seeds_that_trained_in_the_order_of_the_recipes(draw):
    rows = [
        *made.runs("post", 0.001, "stalled stalled trained"),
        *made.runs("pre", 0.001), *made.runs("pre", 0.1, "spiked trained"),
        *made.runs("post, b1 0", 0.001),
    ]  # fmt: skip
    (axes,) = draw(paper_figures.draw_grid, {"runs": rows}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pre", "post"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.001", "0.1"]
    shown = {(text.get_position()): text.get_text() for text in axes.texts}
    assert shown == {(0.5, 0.5): "3/3", (1.5, 0.5): "2/2", (0.5, 1.5): "1/3"}


def test_loss_has_a_panel_for_each_rate_and_a_line_for_each_seed(draw, tables):
    canvas = draw(paper_figures.draw_loss, tables)
    assert [axes.get_title() for axes in canvas.axes] == [
        "learning rate 0.001", "learning rate 0.1"
    ]  # fmt: skip
    for axes in canvas.axes:
        assert len(axes.lines) == 2 * len(ledger.RECIPES) + 1  # and the unigram entropy
        assert set(axes.lines[-1].get_ydata()) == {made.H1}


def test_ablations_show_every_seed_the_best_recipe_on_top(draw):
    rows = [
        *made.runs("pre"), *made.runs("post", words="stalled", last_loss=3.0),
        *made.runs("start: post, 6 blocks", words="undecided", steps=1),
        *made.runs("pre", 0.1), *made.runs("post, SGD 1", 1.0, "diverged", optimizer="sgd",
                                           last_loss=50.0),
    ]  # fmt: skip
    (axes,) = draw(paper_figures.draw_ablations, {"runs": rows}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pre", "post", "post, SGD 1"]
    points = [line for line in axes.lines if line.get_marker() == "o"]
    assert len(points) == 9
    assert max(float(line.get_xdata()[0]) for line in points) == 6.0  # beyond it: at the edge


def test_ablations_show_a_run_whose_loss_is_not_a_number(draw):
    rows = [*made.runs("pre"), *made.runs("post, SGD 1", 1.0, "diverged", optimizer="sgd",
                                          last_loss=math.nan)]  # fmt: skip
    (axes,) = draw(paper_figures.draw_ablations, {"runs": rows}).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["pre", "post, SGD 1"]
    diverged = to_rgba(paper_figures.COLOURS["diverged"])
    points = [line for line in axes.lines if to_rgba(line.get_markerfacecolor()) == diverged]
    assert len(points) == 3
    assert all(math.isfinite(float(line.get_xdata()[0])) for line in points)


def test_leads_draws_the_areas_of_every_quantity(draw, whole):
    rows = evidence.read(whole, "leads")
    (axes,) = draw(paper_figures.draw_leads, {"leads": rows}).axes
    steps = [label.get_text() for label in axes.get_xticklabels()]
    names = [label.get_text().partition(" (")[0] for label in axes.get_yticklabels()]
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    for row in rows:
        pairs = [part.split(":") for part in row["areas"].split()]
        y = names.index(row["what"])
        own = {(steps.index(step), y): f"{float(area):.2f}" for step, area in pairs}
        assert own.items() <= shown.items()
    framed = {names[round(patch.get_y() + 0.5)] for patch in axes.patches}
    assert framed == {row["what"] for row in rows if row["leads_from"] is not None}
    assert names[: len(framed)] and set(names[: len(framed)]) == framed  # they stand on top


def test_apart_shows_each_run_where_it_started(draw):
    rows = [*made.runs("pre"), *made.runs("post", words="stalled"), *made.runs("pre", 0.1),
            *made.runs("post, SGD 0.1", optimizer="sgd")]  # fmt: skip
    starts = [
        *made.probes("pre", skip_gain=1.0, similarity=0.8),
        *made.probes("post", steps=(0, 1), skip_gain=1e-8, similarity=0.9),
        *made.probes("post, SGD 0.1", skip_gain=1e-8),
    ]
    (axes,) = draw(paper_figures.draw_apart, {"runs": rows, "probes": starts}).axes
    found = {
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])): to_rgba(
            line.get_markerfacecolor()
        )
        for line in axes.lines
    }
    colour = {word: to_rgba(paper_figures.COLOURS[word]) for word in ("trained", "stalled")}
    assert found == {
        (row["skip_gain"], row["similarity"]): colour["trained" if i < 3 else "stalled"]
        for i, row in enumerate(row for row in starts[:9] if row["step"] == 0)
    }
    assert [text.get_text() for text in axes.texts] == ["pre", "post"]
    assert paper_figures.draw_apart({"runs": rows[:0], "probes": starts}) is None


def test_depth_draws_both_placements_over_depth(draw, tables):
    canvas = draw(paper_figures.draw_depth, tables)
    for axes in canvas.axes:
        means = [line for line in axes.lines if line.get_marker() in paper_figures.MARKERS]
        assert [list(line.get_xdata()) for line in means] == [[6, 12, 24, 48, 96, 192]] * 2
    # geometric mean over the seeds of L^0.3, each times 1 and 1.02, see claims_tables.py
    first = canvas.axes[0].lines[2]
    expected = [L**0.3 * math.sqrt(1.02) for L in (6, 12, 24, 48, 96, 192)]
    assert list(first.get_ydata()) == pytest.approx(expected, rel=1e-12)  # float64, a few roundings


def test_what_changes_along_the_first_updates_is_drawn_of_the_recipes_without_warmup(draw, tables):
    canvas = draw(paper_figures.draw_collapse, tables)
    (legend,) = canvas.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["pre", "post", "post+1/sqrt(2L)", "deepnet"]
    for axes in canvas.axes:
        means = [line for line in axes.lines if line.get_marker() in paper_figures.MARKERS]
        assert [tuple(line.get_xdata()) for line in means] == [made.DENSE] * len(names)


def test_figures_of_the_starts_alone_are_drawn(tables, tmp_path):
    """`--parts start`: no run of the grid, and none that was trained."""
    starts = {
        name: [row for row in tables[name] if row["recipe"].startswith("start: ")]
        for name in ("runs", "probes")
    }
    evidence.write(tmp_path, starts)
    found = paper_figures.draw_all(tmp_path, tmp_path / "figures")
    assert "depth.pdf" in [path.name for path in found]


# ------------------------------------------------------------------------- the committed paper


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The committed paper, built from the committed tables."""
    return paper.build(PAPER, DATA, tmp_path_factory.mktemp("built"))


def log_of(pdf: Path) -> str:
    """main.log without the breaks that TeX makes after 79 signs."""
    lines = pdf.with_suffix(".log").read_text(encoding="utf-8", errors="replace").split("\n")
    return "".join(line if len(line) == 79 else f"{line}\n" for line in lines)


@latexmk
def test_committed_paper_has_no_reference_that_leads_nowhere(built):
    assert "undefined" not in log_of(built)
    words = printed(built)
    assert "??" not in words and "no data" not in words and "SMOKE" not in words


@latexmk
def test_committed_paper_runs_into_no_margin(built):
    """5 points, two millimetres: a line that ends there is seen by nobody."""
    widths = re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide\)", log_of(built))
    assert [width for width in widths if float(width) > 5] == []


@latexmk
@pdffonts
def test_committed_paper_has_no_type_3_fonts_and_carries_all_others(built):
    done = subprocess.run(["pdffonts", built], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()[2:]
    assert lines and not [line for line in lines if "Type 3" in line]
    assert {line.split()[-5] for line in lines} == {"yes"}  # embedded


def test_every_number_of_the_committed_paper_has_a_row_with_a_source():
    text = (PAPER / "main.tex").read_text(encoding="utf-8")
    known = {row["name"]: row for row in raw(DATA / "numbers.csv")}
    asked = [name for kind, name in paper.USES.findall(text) if kind in ("val", "ci")]
    assert asked
    assert [name for name in asked if name not in known or not known[name]["source"]] == []


def test_committed_ledger_is_what_its_rules_make_of_the_committed_tables(tmp_path):
    for name in ("runs", "probes", "checks"):
        shutil.copy(DATA / f"{name}.csv", tmp_path)
    ledger.write(tmp_path, made.RAMP)
    for name in ("claims", "numbers", "leads"):
        assert (tmp_path / f"{name}.csv").read_text(encoding="utf-8") == (
            DATA / f"{name}.csv"
        ).read_text(encoding="utf-8"), name
