"""Phase diagrams: what a cell counts, parts that cover the grid, and what is drawn of both."""

import csv
import json
import shutil
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import pytest
import tiny
from matplotlib.patches import Rectangle

from normstudy import (
    cli,
    config,
    frames,
    outcome,
    phase_figure,
    phases,
    pictures,
    record,
    study,
    train,
)
from normstudy.errors import UserError

BASE = config.PRESETS["cpu"]
CRITERION = "DeepNet's criterion"

TINY = [
    "--preset", "smoke", "--layers", "2", "--width", "8", "--heads", "2", "--ff", "16",
    "--context", "8", "--batch", "8", "--probe-batch", "8", "--steps", "8", "--eval-batches", "1",
    "--checkpoint-every", "8", "--placements", "post", "--depths", "1", "2", "--rates", "0.01",
    "1e30", "--warmups", "0", "--gains", "0.5", "1.0",
]  # fmt: skip
RUNS = 6  # two depths and one more gain, at two rates each


@pytest.fixture(scope="module")
def experiment():
    return tiny.experiment("phase_diagram")


@pytest.fixture(scope="module")
def shards(experiment, tmp_path_factory):
    """Two folders, each with its part of one tiny study."""
    folder = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment.runtime, "start", lambda **_: None)
        patch.setattr(jax, "device_count", lambda: 1)  # a mesh of one: less to compile
        # where a run blew up is no matter here, and is searched operation by operation
        patch.setattr(train, "not_finite", lambda *_: {"sentence": "somewhere", "origins": []})
        for i in (1, 2):
            out = ["--out", str(folder / f"part{i}"), "--shard", f"{i}/2", "--no-draw"]
            experiment.main([*TINY, *out])
    return [folder / "part1", folder / "part2"]


@pytest.fixture(scope="module")
def whole(experiment, shards):
    """One folder that holds the runs of both parts, and the command run in it."""
    out = shards[0].parent / "whole"
    shutil.copytree(shards[0], out)
    shutil.copytree(shards[1] / "arms", out / "arms", dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment.runtime, "start", lambda **_: None)
        patch.setattr(jax, "device_count", lambda: 1)
        patch.setattr(train, "_loop", lambda *args: pytest.fail("trained again"))
        experiment.main([*TINY, "--out", str(out)])
    return out


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# ------------------------------------------------------------------------------------ the grid


@pytest.mark.parametrize("heading", ["\nCommand  ", "\nTime  ", "\nExpect  "])
def test_card_says_command_time_and_expectation(experiment, heading):
    assert heading in experiment.__doc__


def test_every_cell_is_one_arm_that_changes_what_it_says_alone(experiment):
    grid = experiment.Grid(placements="pre,post", depths=(12, 48), gains=(0.5, 1.0))
    arms = experiment.arms_of(grid, BASE)
    runs = {name: config.override(BASE, **arm(BASE)) for name, arm in arms.items()}
    cells = [phases.cell_of(run) for run in runs.values()]
    assert len(set(cells)) == len(cells)
    # two placements at two depths, and of the other diagram one gain that is not among them
    assert len(cells) == (2 * 2 + 1) * 2 * len(experiment.RATES)
    for name, run in runs.items():
        own = dict(zip(phases.CELL, phases.cell_of(run), strict=True))
        assert run == config.override(BASE, **own, probe_once=True)
        assert name == (
            f"{own['placement']} L={own['layers']} gain {own['gain']:g} lr {own['lr']:g} "
            f"warmup {own['warmup']}"
        )
    assert len({study.slug(name) for name in runs}) == len(runs)


def test_default_grid_holds_both_ends_of_what_is_claimed(experiment):
    arms = experiment.arms_of(experiment.Grid(), BASE)
    runs = [config.override(BASE, **arm(BASE)) for arm in arms.values()]
    assert {run.optim.warmup for run in runs} == {0, BASE.optim.warmup}
    assert {run.init.gain for run in runs if run.model.layers == 48} == set(experiment.GAINS)
    assert {"pre", "post", "deepnorm"} <= {run.model.placement for run in runs}
    assert all(run.stop_after == 0 for run in runs)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"diagrams": "width"}, "unknown diagram 'width'"),
        ({"placements": "nowhere"}, "unknown placement 'nowhere'"),
        ({"rates": (0.1, 0.0)}, "rates takes positive numbers"),
        ({"depths": ()}, "depths takes positive numbers"),
    ],
)
def test_grid_that_is_none_is_refused(experiment, options, message):
    with pytest.raises(UserError, match=message):
        experiment.Grid(**options)


def test_option_that_every_cell_sets_is_refused(experiment, tmp_path, no_start):
    with pytest.raises(UserError, match="--lr would do nothing"):
        experiment.main(["--preset", "smoke", "--lr", "0.5", "--out", str(tmp_path / "out")])


@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_parts_cover_all_jobs_once(n):
    jobs = [train.Member(config.Run(seed=i), Path(str(i))) for i in range(7)]
    parts = [study.part(jobs, (i, n)) for i in range(n)]
    assert sorted((job for part in parts for job in part), key=lambda j: j.run.seed) == jobs
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "1/0", "a/b", "-1/2", "1/2/3"])
def test_part_that_does_not_exist_is_refused(shard):
    with pytest.raises(UserError, match="from 1 to n"):
        cli.parse_study(["--preset", "smoke", f"--shard={shard}"], "card", out="runs")


def test_empty_part_is_refused():
    with pytest.raises(UserError, match="3/3 is empty: there are 2 runs"):
        study.part([train.Member(config.Run(), Path("x"))] * 2, (2, 3))


# ------------------------------------------------------------------------------------ the runs


def test_shards_hold_every_run_once(shards):
    names = [{path.parent.name for path in own.glob("arms/*/*/outcome.json")} for own in shards]
    arms = [{path.name for path in own.glob("arms/*")} for own in shards]
    assert names == [{"seed0"}, {"seed0"}]
    assert not arms[0] & arms[1]
    assert len(arms[0]) + len(arms[1]) == RUNS


def test_only_step_0_is_probed(shards):
    for logs in frames.load(*shards):
        assert [probe["step"] for probe in logs.probes] == [0]
    assert train.probe_steps(400, 50, once=True) == {0}
    assert train.probe_steps(400, 0) == set()


def test_cell_counts_the_outcomes_of_its_runs(whole):
    for name, others in (("depth", {"gain": "1"}), ("gain", {"layers": "2"})):
        table = rows(whole / f"phase_{name}.csv")
        assert len(table) == 4
        for row in table:
            word = "diverged" if float(row["lr"]) > 1 else "undecided"
            assert {own: row[own] for own in others} == others
            assert row["n"] == row[word] == "1"
            assert sum(int(row[word]) for word in outcome.WORDS) == 1


def test_merging_shards_gives_the_pictures_of_one_folder(shards, whole, capsys, tmp_path):
    cli.figures([*map(str, shards), "--out", str(tmp_path / "merged"), "--json"])
    shown = json.loads(capsys.readouterr().out)
    assert [Path(row["figure"]).stem for row in shown] == ["phase_depth_post", "phase_gain"]
    assert "4 cells of 1 seed: 2 undecided, 2 diverged" in shown[0]["shows"]
    ours = {path.name: path.read_bytes() for path in (whole / "figures").iterdir()}
    theirs = {path.name: path.read_bytes() for path in (tmp_path / "merged").iterdir()}
    assert ours == theirs and len(ours) == 6


def test_one_shard_alone_draws_its_part(shards, capsys, tmp_path):
    cli.figures([str(shards[0]), "--out", str(tmp_path)])
    drawn = {Path(line).stem for line in capsys.readouterr().out.split()}
    assert drawn and drawn <= {"phase_depth_post", "phase_gain"}


def test_figures_without_a_folder_say_what_is_missing():
    with pytest.raises(UserError, match="give a run or study folder"):
        cli.figures([])


def test_run_in_two_folders_counts_once(shards, whole):
    once = phases.cells(frames.load(*shards))
    assert phases.cells(frames.load(whole, *shards)) == once == phases.cells(frames.load(whole))


def test_run_that_came_further_counts(shards, tmp_path):
    behind = tmp_path / "behind"
    shutil.copytree(shards[0], behind)
    for path in behind.glob("arms/*/*/outcome.json"):
        path.unlink()
    for folders in ((behind, shards[0]), (shards[0], behind)):
        assert all(logs.outcome for logs in frames.load(*folders))
    assert phases.cells(frames.load(behind)) == []
    with pytest.raises(UserError, match="has finished yet"):
        pictures.of([behind], frames.load(behind))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tree: tree["config"]["optim"].update(b1=0.5), r"optim\.b1: 0\.9 there, 0\.5 here"),
        (lambda tree: tree.update(kind="reproduction"), "kind: phase diagram there, reproduction"),
        (lambda tree: tree["corpus"].update(sha256="0"), "sha256 of the text: "),
    ],
)
def test_folders_of_different_studies_are_refused(shards, tmp_path, change, message):
    other = tmp_path / "other"
    shutil.copytree(shards[1], other)
    tree = record.read_json(other / record.CONFIG)
    change(tree)
    record.write_json(other / record.CONFIG, tree)
    with pytest.raises(UserError, match=message) as error:
        cli.figures([str(shards[0]), str(other), "--out", str(tmp_path / "figures")])
    assert str(shards[0]) in str(error.value) and str(other) in str(error.value)
    assert not (tmp_path / "figures").exists()


def test_grid_may_grow_in_its_folder(experiment, whole):
    """Folders have no number in them, which would change with the arms before."""
    few, more = (
        experiment.arms_of(experiment.Grid(depths=depths), BASE) for depths in ((6,), (3, 6))
    )
    assert list(few) != list(more)[: len(few)]
    assert all(not path.name[0].isdigit() for path in whole.glob("arms/*"))


# ----------------------------------------------------------------------------------- the cells


def logs(word: str, seed: int = 0, similarity: float = 0.5, **fields) -> frames.Logs:
    """A finished run that came to this outcome."""
    run = config.override(BASE, **({"warmup": 0, "seed": seed} | fields))
    return frames.Logs(
        name="made", run=run, h1=3.0, alpha=1.0, skip_norms=(), metrics=[{"step": 0}],
        probes=[{"step": 0, "similarity": [0.0, similarity]}],
        outcome={"word": word} if word else {},
    )  # fmt: skip


def grid(words: dict[tuple[int, float], str], **fields) -> list[frames.Logs]:
    """Runs from {(layers, lr): one word a seed}."""
    return [
        logs(word, seed, layers=layers, lr=lr, **fields)
        for (layers, lr), said in words.items()
        for seed, word in enumerate(said.split())
    ]


def test_k_of_n_seeds_are_counted_and_a_run_that_goes_on_is_not():
    runs = [logs(word, seed) for seed, word in enumerate(("trained", "stalled", "trained", ""))]
    (cell,) = phases.cells(runs)
    assert (cell["n"], cell["trained"], cell["stalled"], cell["diverged"]) == (3, 2, 1, 0)
    assert sum(cell[word] for word in outcome.WORDS) == cell["n"]


@pytest.mark.parametrize("field, value", [("lr", 0.5), ("warmup", 9), ("gain", 0.3),
                                          ("layers", 7), ("placement", "pre")])  # fmt: skip
def test_runs_that_differ_in_an_axis_are_in_two_cells(field, value):
    assert len(phases.cells([logs("trained"), logs("trained", 1, **{field: value})])) == 2


WINDOW = {
    (6, 0.001): "trained trained", (6, 0.01): "trained trained", (6, 0.1): "trained stalled",
    (24, 0.001): "trained trained", (24, 0.01): "stalled stalled", (24, 0.1): "diverged diverged",
    (96, 0.001): "stalled trained", (96, 0.01): "collapsed stalled", (96, 0.1): "stalled spiked",
}  # fmt: skip


def test_largest_rate_is_that_at_which_every_seed_trained():
    table = dict(frames.by(phases.cells(grid(WINDOW)), "layers"))
    assert [phases.largest_rate(table[layers]) for layers in (6, 24, 96)] == [0.01, 0.001, None]
    assert phases.boundary(table[6]) == pytest.approx(np.sqrt(0.01 * 0.1))
    assert phases.boundary(table[96]) is None
    assert phases.boundary([row for row in table[6] if row["lr"] < 0.1]) is None


def test_window_names_the_rates_of_all_and_of_some_seeds():
    found = {row["layers"]: row for row in phases.windows(phases.cells(grid(WINDOW)))}
    assert found[6]["all seeds trained at"] == "0.001 0.01" and found[6]["some"] == "0.1"
    assert found[96]["all seeds trained at"] == "none" and found[96]["some"] == "0.001"


THEORY = [
    {"placement": "post", "layers": layers, "law": "mean field", "update": layers**1.5}
    for layers in (6, 24, 96)
]


def test_line_of_theory_is_one_over_the_update_and_passes_the_boundary_once():
    table = phases.cells(grid(WINDOW))
    found = phases.theory_lines("post", table, THEORY)
    at = {row["layers"]: row["lr"] for row in found}
    assert at[6] == pytest.approx(np.sqrt(0.01 * 0.1))
    assert at[6] / at[96] == pytest.approx(16**1.5)
    assert {row["scaled_at"] for row in found} == {6}


def test_line_of_theory_is_scaled_where_the_grid_encloses_the_boundary():
    runs = grid({(6, 0.001): "trained", (6, 0.01): "trained", (24, 0.001): "trained",
                 (24, 0.01): "stalled"})  # fmt: skip
    found = phases.theory_lines("post", phases.cells(runs), THEORY)
    assert {row["scaled_at"] for row in found} == {24}
    open_above = [run for run in runs if run.run.model.layers == 6]
    assert phases.theory_lines("post", phases.cells(open_above), THEORY) == []


def test_warmup_does_not_move_the_line_of_theory():
    cold = grid(WINDOW)
    warm = grid(dict.fromkeys(WINDOW, "trained trained"), warmup=100)
    assert phases.theory_lines("post", phases.cells(cold + warm), THEORY) == phases.theory_lines(
        "post", phases.cells(cold), THEORY
    )


def test_laws_come_from_the_row_of_the_table(experiment):
    base = config.override(BASE, width=8, heads=2, ff=16, context=8, batch=8)
    found = experiment.laws(base, ["pre", "post"], [2, 4])
    assert {(row["placement"], row["law"]) for row in found} == {
        ("pre", "mean field"), ("post", "mean field"), ("post", CRITERION)
    }  # fmt: skip
    update = {(row["placement"], row["law"], row["layers"]): row["update"] for row in found}
    assert update["post", CRITERION, 4] == pytest.approx(2 * update["post", CRITERION, 2])
    growth = {
        name: update[name, "mean field", 4] / update[name, "mean field", 2]
        for name in ("pre", "post")
    }
    assert 1 < growth["pre"] < growth["post"]


def test_criterion_has_no_law_for_a_row_whose_alpha_is_another_in_some_block(experiment):
    base = config.override(BASE, width=8, heads=2, ff=16, context=8, batch=8)
    found = experiment.laws(base, ["keel", "deepnorm"], [4])
    laws = {(row["placement"], row["law"]) for row in found}
    assert ("keel", CRITERION) not in laws and {
        ("keel", "mean field"),
        ("deepnorm", CRITERION),
    } <= laws


def test_cells_of_the_gain_diagram_alone_make_no_depth_diagram():
    runs = [logs("trained", gain=gain, lr=lr) for gain in (0.5, 1.0) for lr in (0.01, 0.1)]
    table = phases.cells(runs)
    assert phases.over_depth(table, BASE) == [] and len(phases.over_gain(table, BASE)) == 4
    table = phases.cells([*runs, logs("trained", layers=6)])
    assert {row["layers"] for row in phases.over_depth(table, BASE)} == {6, 48}


def test_file_beside_the_logs_without_its_columns_is_refused(tmp_path):
    (tmp_path / phases.MAX_LR).write_text("placement,layers\npost,6\n", encoding="utf-8")
    with pytest.raises(UserError, match="has no column seed, max_stable_lr, kind"):
        phases.lines([tmp_path])


def test_placement_that_never_trained_has_no_largest_rate(tmp_path):
    text = "placement,layers,seed,max_stable_lr,kind\npost,6,0,,never trained\n"
    (tmp_path / phases.MAX_LR).write_text(text, encoding="utf-8")
    assert phases.lines([tmp_path]).max_lr == []


def test_rows_beside_the_logs_of_several_shards_count_once(tmp_path):
    text = "placement,layers,seed,max_stable_lr,kind\npost,6,0,0.02,ramp\n"
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / phases.MAX_LR).write_text(text, encoding="utf-8")
    found = phases.lines([tmp_path / "a", tmp_path / "b"])
    assert found.max_lr == [
        {"placement": "post", "layers": 6, "seed": 0, "max_stable_lr": 0.02, "kind": "ramp"}
    ]
    assert found.theory == []


# --------------------------------------------------------------------------------- the drawings

MAX_LR = [
    {"placement": "post", "layers": layers, "seed": seed, "max_stable_lr": lr, "kind": "ramp"}
    for layers, lr in ((6, 0.02), (24, 0.004))
    for seed in (0, 1)
]


@pytest.fixture
def drawn():
    """Draws, and closes what was drawn."""
    made = []

    def draw(function, table):
        made.append(function(table))
        made[-1].canvas.draw()
        return made[-1]

    yield draw
    for canvas in made:
        plt.close(canvas)


def test_cell_is_divided_as_its_seeds_are(drawn):
    runs = grid({(6, 0.01): "trained trained stalled", (24, 0.01): "diverged diverged diverged"})
    canvas = drawn(phase_figure.draw_depth, phases.cells(runs))
    (axes,) = canvas.axes
    filled = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.fill]
    width = {
        word: np.log((own.get_x() + own.get_width()) / own.get_x())
        for own in filled
        for word, colour in phase_figure.COLOURS.items()
        if own.get_facecolor() == plt.matplotlib.colors.to_rgba(colour)
    }
    assert width["trained"] == pytest.approx(2 * width["stalled"])
    assert width["diverged"] == pytest.approx(3 * width["stalled"])
    assert [text.get_text() for text in axes.texts] == ["2/3", "0/3"]


def test_depth_diagram_has_its_axes_legend_and_lines(drawn):
    runs = grid(WINDOW) + grid(WINDOW, warmup=100)
    table = phase_figure.depth_table(runs, BASE, phases.Lines(MAX_LR, THEORY), ["post"])
    canvas = drawn(phase_figure.draw_depth, table)
    assert [axes.get_title() for axes in canvas.axes] == [
        "post, no warmup", "post, 100 updates of warmup"
    ]  # fmt: skip
    assert canvas.get_supxlabel() == "peak learning rate"
    assert canvas.get_supylabel() == "depth $L$ (blocks)"
    (legend,) = canvas.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert labels == ["trained", "spiked", "stalled", "collapsed", "diverged",
                      "largest stable rate", "mean field (scaled at $L$ = 6)"]  # fmt: skip
    sentence = phase_figure.depth_sentence(table)
    assert "0.01 at 6, 0.001 at 24, none at 96" in sentence
    assert "their height is free" in sentence and "post at 6 blocks" in sentence


def test_lower_bound_is_marked_and_lies_in_the_picture(drawn):
    bound = [MAX_LR[0] | {"max_stable_lr": 0.9, "kind": "survived"}, *MAX_LR[2:]]
    table = phase_figure.depth_table(grid(WINDOW), BASE, phases.Lines(bound, []), ["post"])
    canvas = drawn(phase_figure.draw_depth, table)
    (axes,) = canvas.axes
    markers = {line.get_marker(): list(line.get_xdata()) for line in axes.lines}
    assert markers[">"] == [0.9] and markers["o"] == [0.004, 0.004]
    assert axes.get_xlim()[1] > 0.9
    labels = [text.get_text() for text in canvas.legends[0].get_texts()]
    assert "largest stable rate (triangle: at least)" in labels


def test_every_placement_has_a_diagram_and_all_have_one(tmp_path):
    runs = [run for name in ("post", "pre") for run in grid(WINDOW, placement=name)]
    record.write_json(
        tmp_path / record.CONFIG,
        {"kind": phases.KIND, "config": json.loads(config.to_json(BASE))},
    )
    found = pictures.of([tmp_path], runs)
    names = ["phase_depth", "phase_depth_pre", "phase_depth_post"]  # in the order of the table
    assert [figure.name for figure in found] == names
    cells = found[0].frame(runs)
    assert {row["placement"] for row in cells} == {"pre", "post"}
    canvas = found[0].draw(cells)
    assert [axes.get_title() for axes in canvas.axes] == ["pre, no warmup", "post, no warmup"]
    plt.close(canvas)


def test_gain_diagram_shows_the_similarity_it_starts_from(drawn):
    runs = [
        logs(word, seed, similarity=gain / 2 + seed / 100, gain=gain, lr=lr)
        for gain, lr, said in ((0.5, 0.01, "trained trained"), (0.5, 0.1, "trained stalled"),
                               (1.0, 0.01, "stalled stalled"), (1.0, 0.1, "stalled diverged"))
        for seed, word in enumerate(said.split())
    ]  # fmt: skip
    table = phase_figure.gain_table(runs, BASE)
    canvas = drawn(phase_figure.draw_gain, table)
    cells, beside = canvas.axes
    assert cells.get_ylabel() == "initial gain (times Xavier)"
    assert "token similarity" in beside.get_xlabel()
    shown = dict(zip(*beside.lines[0].get_data()[::-1], strict=True))
    assert shown == pytest.approx({0.5: 0.255, 1.0: 0.505})
    sentence = phase_figure.gain_sentence(table)
    assert "no warmup: 0.01 at 0.5, none at 1" in sentence
    assert "0.255 at 0.5, 0.505 at 1" in sentence


def test_every_outcome_word_has_a_colour():
    assert set(phase_figure.COLOURS) == set(outcome.WORDS)
    assert len(set(phase_figure.COLOURS.values())) == len(outcome.WORDS)
