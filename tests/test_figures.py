"""Pictures and the page, from logs alone: the same bytes each time, the numbers of the summary."""

import csv
import dataclasses
import html
import json
import re
import shutil

import matplotlib.pyplot as plt
import numpy as np
import pytest
import tiny

from normstudy import config, figures, frames, outcome, record, report, sentences, tables
from normstudy.errors import UserError

NAMES = [figure.name for figure in figures.FIGURES]

WITHOUT_JAX = (
    "import sys\n"
    "for name in ('jax', 'flax', 'optax', 'orbax', 'grain'): sys.modules[name] = None\n"
    "from normstudy import cli\n"
    "cli.guarded(cli.dispatch)"
)


@pytest.fixture(scope="module")
def runs(drawn_study):
    return frames.load(drawn_study[0])


@pytest.fixture(scope="module")
def logs_only(drawn_study, tmp_path_factory):
    """A copy of the study as a laptop gets it: logs, no checkpoints, no figures."""
    copy = tmp_path_factory.mktemp("laptop") / "out"
    unwanted = shutil.ignore_patterns("ckpt", "tb", "figures", "*.html", "*.md")
    shutil.copytree(drawn_study[0], copy, ignore=unwanted)
    return copy


@pytest.fixture(scope="module")
def redrawn(logs_only):
    """`normstudy figures` on the copy, in a process where jax cannot be imported."""
    return tiny.python("-c", WITHOUT_JAX, "figures", str(logs_only), "--json")


def table(folder, name) -> list[dict[str, str]]:
    with (folder / "figures" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", NAMES)
def test_figure_is_a_pdf_a_png_and_the_csv_that_it_draws(drawn_study, name):
    folder = drawn_study[0] / "figures"
    assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len(table(drawn_study[0], name)) >= 2


def test_figures_redraw_without_jax_to_the_same_bytes(drawn_study, logs_only, redrawn):
    assert redrawn.returncode == 0, redrawn.stderr
    ours, theirs = drawn_study[0] / "figures", logs_only / "figures"
    names = sorted(path.name for path in ours.iterdir())
    assert names == sorted(path.name for path in theirs.iterdir())
    assert len(names) == 3 * len(NAMES)
    for name in names:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name


def test_figures_json_lists_each_picture_with_its_sentence(logs_only, redrawn):
    rows = json.loads(redrawn.stdout)
    assert [row["figure"] for row in rows] == [
        str(logs_only / "figures" / f"{name}.png") for name in NAMES
    ]
    assert all(len(row["shows"]) > 40 for row in rows)


def test_redrawing_touches_no_log(drawn_study, logs_only, redrawn):
    assert redrawn.returncode == 0
    for path in logs_only.glob("arms/*/*/*.json*"):
        original = drawn_study[0] / path.relative_to(logs_only)
        assert path.read_bytes() == original.read_bytes()


def test_loss_csv_holds_the_logged_losses(drawn_study, runs):
    found = table(drawn_study[0], "loss")
    logged = [(logs.label, row) for logs in runs for row in logs.metrics]
    assert len(found) == len(logged)
    for row, (label, metrics) in zip(found, logged, strict=True):
        assert row["run"] == label and int(row["step"]) == metrics["step"]
        # nine digits give the float32 back
        np.testing.assert_array_equal(np.float32(row["loss"]), np.float32(metrics["loss"]))


def test_jacobian_csv_holds_the_logged_norms_of_every_layer(drawn_study, runs):
    found = table(drawn_study[0], "jacobian")
    expected = {
        (logs.label, probe["step"], layer): probe["jacobian_to_end"][layer]
        for logs in runs
        for probe in logs.probes
        for layer in range(2)
    }
    assert {row["run"] for row in found} == {logs.label for logs in runs}
    for row in found:
        key = row["run"], int(row["step"]), int(row["layer"])
        np.testing.assert_array_equal(np.float32(row["jacobian_to_end"]), np.float32(expected[key]))


def test_predicted_skip_gain_is_near_the_measured_one(drawn_study):
    """Post-norm at init: the product of mean factors against the gradient-stopped Jacobian."""
    for row in table(drawn_study[0], "skip_path"):
        measured, predicted = float(row["skip_gain"]), float(row["skip_gain_predicted"])
        if row["run"] == "pre":
            assert measured == predicted == 1
        else:
            # width 8: each norm also projects two of eight directions away, (6/8)^(1/2) a norm,
            # and the mean of products is not the product of means
            assert 0.3 < measured / predicted < 1.3


def test_schedule_csv_counts_updates_from_1(drawn_study):
    found = [row for row in table(drawn_study[0], "schedules") if row["run"] == "pre"]
    assert [int(row["update"]) for row in found] == list(range(1, 9))
    assert float(found[0]["lr"]) == pytest.approx(0.01 / 3, rel=1e-6)
    assert max(float(row["lr"]) for row in found) == pytest.approx(0.01, rel=1e-6)


def test_update_ratio_csv_is_update_over_weight(drawn_study, runs):
    first = runs[0].probes[0]
    kinds = [f"attn.{k}" for k in "qkvo"] + ["mlp.up", "mlp.down"]
    update, weight = (
        np.sqrt(sum(first[f"{what}/{kind}"][0] ** 2 for kind in kinds))
        for what in ("update", "weight")
    )
    found = table(drawn_study[0], "update_ratio")[0]
    assert (found["run"], found["step"], found["layer"]) == ("post", "0", "0")
    assert float(found["update_ratio"]) == pytest.approx(update / weight, rel=1e-8)


def test_axis_of_a_layer_figure_names_the_quantity(runs):
    shown = {}
    for figure in figures.FIGURES:
        if figure.name in ("jacobian", "similarity", "stream_gradient", "norm_factor"):
            canvas = figure.draw(figure.frame(runs))
            shown[figure.name] = canvas.get_supylabel()
            plt.close(canvas)
    assert shown == {
        "jacobian": "Jacobian norm to the end",
        "similarity": "mean cosine between positions",
        "stream_gradient": "norm of d loss / d stream",
        "norm_factor": "mean of gain / sigma in the block's norms",
    }


def test_sentences_take_their_numbers_from_the_frame(runs):
    rows = frames.loss(runs)
    sentence = sentences.loss(rows)
    assert "diverged: post/blows-up" in sentence.lower()
    assert "undecided: post, pre" in sentence.lower()
    assert f"{runs[0].h1:.2f} nats" in sentence
    rates = sentences.schedules(frames.schedules(runs))
    assert "post 0.01 to 0.01" in rates and "pre 0.00333 to 0.01" in rates


def test_several_seeds_share_the_loss_figure_and_the_lowest_stands_for_its_arm(
    runs, tmp_path, monkeypatch
):
    post = runs[0]
    again = dataclasses.replace(post, run=config.override(post.run, seed=1))
    chosen = [figure for figure in figures.FIGURES if figure.name in ("loss", "jacobian")]
    monkeypatch.setattr(figures, "FIGURES", chosen)
    figures.draw_all([again, post], tmp_path / "figures")
    assert {row["run"] for row in table(tmp_path, "loss")} == {"post", "post seed 1"}
    assert {row["run"] for row in table(tmp_path, "jacobian")} == {"post"}


# ------------------------------------------------------------------------------------ the page


def page_table(page: str) -> list[list[str]]:
    body = page.split("<table>")[1].split("</table>")[0]
    return [
        [html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body, flags=re.S)
    ]


def test_page_shows_the_numbers_of_the_summary(drawn_study):
    out, _ = drawn_study
    summary = json.loads((out / "summary.json").read_text())
    head, *shown = page_table((out / "report.html").read_text())
    assert head == [h for name, h in frames.CLOSING_COLUMNS.items() if name != "seed"]
    summed = [row for arm in summary["arms"].values() for row in arm["runs"]]
    columns = {h: name for name, h in frames.CLOSING_COLUMNS.items()}
    assert [row[0] for row in shown] == [row["arm"] for row in summed]
    for cells, row in zip(shown, summed, strict=True):
        for name, cell in zip(head, cells, strict=True):
            assert cell == tables.cell(record._numbers(row[columns[name]])), (row["arm"], name)


def test_page_makes_no_request_and_runs_no_script(drawn_study):
    page = (drawn_study[0] / "report.html").read_text()
    for forbidden in ("http://", "https://", "<script", "<link", "<iframe", "@import"):
        assert forbidden not in page
    assert page.count('src="data:image/png;base64,') == page.count("<img") == len(NAMES)
    for target in re.findall(r'href="([^"]+)"', page):
        assert (drawn_study[0] / target).exists()


def test_page_begins_with_the_outcome_of_every_run(drawn_study):
    page = (drawn_study[0] / "report.html").read_text()
    first = html.unescape(page.split("<p>")[1].split("</p>")[0])
    assert first == "1 of 3 runs diverged: post/blows-up. 2 of 3 runs undecided: post, pre."


def test_page_escapes_names(tmp_path, drawn_study, runs):
    out, rows = drawn_study
    drawn = [
        figures.Drawn(
            "loss", "<b>", "a < b & c", out / "figures/loss.png", out / "figures/loss.csv"
        )
    ]
    strange = [rows[0] | {"arm": "<script>alert(1)</script>"}]
    report.write(tmp_path / "x.html", "<title>", "a & b", runs, strange, drawn)
    page = (tmp_path / "x.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "a &lt; b &amp; c" in page


def test_summary_md_is_the_closing_table(drawn_study):
    out, rows = drawn_study
    expected = tables.markdown(frames.closing_table(rows))
    assert (out / "summary.md").read_text() == f"# A tiny study\n\n{expected}\n"


def test_verdict_knows_every_word(drawn_study):
    rows = [drawn_study[1][0] | {"outcome": word, "arm": f"arm-{word}"} for word in outcome.WORDS]
    said = report.verdict(rows)
    for word in outcome.WORDS:
        assert f"1 of 6 runs {word}: arm-{word}" in said


# ------------------------------------------------------------------------------------- damage


def damaged(logs_only, tmp_path, name: str, change):
    """A copy with figures drawn before, and line 3 of the first run's log changed."""
    copy = tmp_path / "out"
    shutil.copytree(logs_only, copy)
    path = copy / "arms" / "00-post" / "seed0" / name
    lines = path.read_text().split("\n")
    lines[2] = change(lines[2])
    path.write_text("\n".join(lines))
    return copy, path


@pytest.mark.parametrize("name", ["metrics.jsonl", "probes.jsonl"])
def test_damaged_line_stops_the_drawing_and_nothing_is_overwritten(
    logs_only, redrawn, tmp_path, name
):
    assert redrawn.returncode == 0
    copy, path = damaged(logs_only, tmp_path, name, lambda line: line[: len(line) // 2])
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    assert any(p.suffix == ".png" for p in before)
    done = tiny.python("-c", WITHOUT_JAX, "figures", str(copy))
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"{path}, line 3 is damaged" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_unfinished_run_is_drawn_as_running(logs_only, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(logs_only / "arms" / "00-post" / "seed0", copy)
    (copy / "outcome.json").unlink()
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')  # the writer is at work
    (logs,) = frames.load(copy)
    assert frames.summary_row(logs)["outcome"] == "running"
    assert {row["outcome"] for row in frames.loss([logs])} == {"running"}


def test_arm_that_has_not_begun_is_left_out(logs_only, tmp_path):
    copy = tmp_path / "out"
    shutil.copytree(logs_only, copy)
    for path in (copy / "arms").glob("02-*/*/*.jsonl"):
        path.unlink()
    assert [logs.name for logs in frames.load(copy)] == ["post", "post/blows-up"]


def test_folder_without_runs_is_refused(tmp_path, logs_only):
    with pytest.raises(UserError, match="neither a run nor a study"):
        frames.load(tmp_path)
    shutil.copy(logs_only / "config.json", tmp_path)
    with pytest.raises(UserError, match="no run with logs yet"):
        frames.load(tmp_path)


def test_config_of_another_program_is_refused(tmp_path):
    """A folder of another library also has a config.json."""
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 12}')
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        frames.load(tmp_path)


def test_csv_gives_float32_back():
    values = np.random.default_rng(0).normal(size=50).astype(np.float32)
    text = frames.to_csv([{"x": float(value)} for value in values])
    found = [np.float32(row["x"]) for row in csv.DictReader(text.splitlines())]
    np.testing.assert_array_equal(found, values)


def test_nearest_steps_are_probed_ones_each_once(runs):
    assert frames.nearest_steps(runs[0], (0, 10, 50, 10**9)) == [0, 7]
    assert frames.nearest_steps(runs[0], (4, 6)) in ([3, 5], [3, 7], [5, 7])


@pytest.mark.parametrize("letters", [3, 20, 36])
def test_legend_of_many_arms_fits_the_figure_and_no_two_arms_look_alike(letters):
    words = "warmup over half of the run, a small gain"
    names = [f"{chr(97 + i)} {words}"[:letters] for i in range(14)]
    table = [
        {"arm": name, "run": name, "outcome": "trained", "step": step, "loss": 2.0, "smoothed": 2.0,
         "h1": 3.0}
        for name in names for step in range(3)
    ]  # fmt: skip
    canvas = figures._draw_loss(table)
    canvas.draw_without_rendering()
    box = canvas.legends[0].get_window_extent()
    assert canvas.bbox.x0 <= box.x0 and box.x1 <= canvas.bbox.x1
    looks = {
        (line.get_color(), line.get_marker(), line.get_markerfacecolor())
        for line in canvas.axes[0].get_lines() if not line.get_label().startswith("_")
    }  # fmt: skip
    assert len(looks) == len(names)
    plt.close(canvas)


@pytest.mark.parametrize(
    "value, shown",
    [(None, ""), (3, "3"), (0.123456, "0.1235"), (12345.678, "1.23e+04"), (3.55e-15, "3.55e-15"),
     (float("nan"), "nan"), (float("inf"), "inf"), ("word", "word")],
)  # fmt: skip
def test_cells_have_three_or_four_digits(value, shown):
    assert tables.cell(value) == shown


def test_text_table_puts_words_left_and_numbers_right():
    found = tables.text([{"arm": "a", "loss": 2.5}, {"arm": "long name", "loss": None}])
    assert found == "arm        loss\na           2.5\nlong name"


def test_markdown_table_escapes_its_own_sign():
    assert tables.markdown([{"x": "a|b", "n": 1}]) == "| x | n |\n| --- | --- |\n| a\\|b | 1 |"
