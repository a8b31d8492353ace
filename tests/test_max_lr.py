"""The largest rate a placement survives: an arm a row and depth, a number a run, KEEL's order."""

import csv
import json

import numpy as np
import pytest
import tiny
from scipy.stats import kendalltau  # jax depends on it

from normstudy import (
    cli,
    config,
    figures,
    frames,
    outcome,
    pictures,
    ramp,
    ramp_figure,
    record,
    train,
)
from normstudy.errors import UserError
from normstudy.placements import PLACEMENTS

max_lr = tiny.experiment("max_lr")

H1 = 3.0
RUN = config.override(config.PRESETS["cpu"], **max_lr.RAMP)


def logs(placement: str, layers: int, fails_at: int | None, seed: int = 0, learns: bool = True):
    """A run whose loss falls to 2 by step 200 and is 3.2 from fails_at on."""
    losses = np.concatenate([np.linspace(6, 2 if learns else 3.1, 200), np.full(300, 2.0)])
    losses[200:] = losses[199]
    if fails_at is not None:
        losses[fails_at:] = 3.2
    run = config.override(RUN, placement=placement, layers=layers, seed=seed)
    rates = train.schedules.table(run.optim, run.model.width, run.steps)
    metrics = [
        {"step": s, "loss": loss, "lr": rate}
        for s, (loss, rate) in enumerate(zip(losses.tolist(), rates.tolist(), strict=True))
    ]
    outcome = {"word": "collapsed", "best_loss": 2.0}
    return frames.Logs(f"{placement} at {layers}", run, H1, 1.0, (), metrics, [], outcome)


RUNS = [
    logs("pre", 12, None), logs("pre", 48, 450), logs("pre", 48, 460, seed=1),
    logs("post", 12, 300), logs("post", 48, None, learns=False),
    logs("post", 48, 260, seed=1), logs("deepnorm", 12, 350), logs("deepnorm", 48, 340),
]  # fmt: skip


@pytest.fixture(scope="module")
def table():
    return ramp.runs(RUNS)


def test_every_row_of_the_table_is_an_arm_at_every_depth_and_nothing_else_differs():
    arms = max_lr.arms_of(max_lr.Options(depths=(12, 48)))
    assert len(arms) == 2 * len(PLACEMENTS)
    for name, arm in arms.items():
        placement, _, layers = name.partition(" at ")
        said = {"placement": placement, "layers": int(layers)}
        assert config.override(RUN, **arm(RUN)) == config.override(RUN, **said)
    depths = [arm(RUN)["layers"] for arm in arms.values()]
    assert depths == sorted(depths, reverse=True)


def test_placements_can_be_chosen_and_unknown_ones_are_refused():
    arms = max_lr.arms_of(max_lr.Options(placements="post, pre", depths=(3,)))
    assert list(arms) == ["post at 3", "pre at 3"]
    with pytest.raises(UserError, match="unknown placement 'prae'"):
        max_lr.arms_of(max_lr.Options(placements="prae"))
    with pytest.raises(UserError, match="depths"):
        max_lr.Options(depths=(0,))


def test_ramp_of_the_card_is_the_ramp_of_the_experiment():
    rates = train.schedules.table(RUN.optim, RUN.model.width, RUN.steps)
    assert (len(rates), rates[-1]) == (500, 1.0)
    assert rates[0] == pytest.approx(1e-4)
    decade = (len(rates) - 1) / np.log10(rates[-1] / rates[0])
    assert decade == pytest.approx(125, abs=0.5) and RUN.stop_after == 125
    assert "from 1e-4 to 1 over 500 updates" in max_lr.__doc__


def test_any_part_of_the_ramp_is_an_option(no_start):
    argv = ["--preset", "cpu", "--lr", "0.05", "--steps", "5000", "--schedule", "ramp"]
    options, base = cli.parse_own(max_lr.Options(), argv, "card", **max_lr.RAMP)
    assert (base.optim.lr, base.steps, base.optim.schedule) == (0.05, 5000, "ramp")
    assert (base.stop_after, base.probe.probe_every, base.optim.warmup) == (125, 0, 0)
    arms = max_lr.arms_of(options)
    assert cli.chosen_arms(options, base, arms) == list(arms)


def test_frame_has_a_row_a_run_with_the_number_that_the_rule_gives(table):
    assert [(row["placement"], row["layers"], row["seed"]) for row in table] == [
        ("pre", 12, 0), ("pre", 48, 0), ("pre", 48, 1), ("post", 12, 0), ("post", 48, 0),
        ("post", 48, 1), ("deepnorm", 12, 0), ("deepnorm", 48, 0),
    ]  # fmt: skip
    for row, own in zip(table, RUNS, strict=True):  # made in the order of the table
        columns = ([m[name] for m in own.metrics] for name in ("loss", "lr"))
        found = ramp.survival(*map(np.array, columns), H1)
        assert (row["kind"], row["max_stable_lr"]) == (found.kind, found.max_stable_lr)
    assert [row["kind"] for row in table[:5]] == [
        "survived", "failed", "failed", "failed", "never trained"
    ]  # fmt: skip


def test_running_and_unstarted_runs_have_no_row():
    going = RUNS[0].__class__(**{**vars(RUNS[0]), "outcome": {}})
    assert len(ramp.runs([going, RUNS[1]])) == 1
    with pytest.raises(UserError, match="no run is finished"):
        ramp.runs([going])


def rows(*rates: float | None) -> list[dict]:
    kind = {True: "never trained", False: "failed"}
    return [{"max_stable_lr": rate, "kind": kind[rate is None]} for rate in rates]


def test_middle_seed_is_a_run_and_never_an_average():
    assert ramp.middle(rows(0.3, 0.1, 0.2))["max_stable_lr"] == 0.2
    assert ramp.middle(rows(0.1, 0.4))["max_stable_lr"] == 0.1
    assert ramp.middle(rows(0.1, None, None))["max_stable_lr"] is None


def test_told_are_bounds_and_what_never_trained():
    bound = {"max_stable_lr": 1.0, "kind": "survived"}
    assert ramp.tell(rows(0.0184)) == "0.018"
    assert ramp.tell(rows(None)) == "none"
    assert ramp.tell([bound]) == ">1"
    assert ramp.tell([*rows(0.2, None), bound]) == "0.2 (none to >1)"
    assert ramp.tell(rows(0.2, 0.2)) == "0.2"
    assert ramp.tell([]) == ""


def test_closing_table_is_placement_by_depth(table):
    closing = ramp.by_depth(table)
    assert [row["placement"] for row in closing] == ["pre", "post", "deepnorm"]
    assert list(closing[0]) == ["placement", "L = 12", "L = 48"]
    assert closing[0]["L = 12"] == ">1"
    assert closing[1]["L = 48"].startswith("none (none to ")


THEIRS = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0}


@pytest.mark.parametrize(
    "ours, swapped, tied",
    [
        ((1, 2, 3, 4, 5), "", ""),
        ((5, 4, 3, 1, 2), "a > b, a > c, a > d, a > e, b > c, b > d, b > e, c > d, c > e", ""),
        ((1, 3, 2, 4, 5), "b > c", ""),
        ((None, None, 2, 5, 4), "d > e", "a = b"),
        ((3, 3, 3, 1, 2), "a > d, a > e, b > d, b > e, c > d, c > e", "a = b, a = c, b = c"),
    ],
)  # fmt: skip
def test_order_is_kendall_s_tau_b_and_names_the_pairs(ours, swapped, tied):

    made = [
        {"placement": name, "layers": 24, **own}
        for name, own in zip(THEIRS, rows(*ours), strict=True)
    ]
    (found,) = max_lr.order(made, THEIRS)
    expected = kendalltau([rate or 0 for rate in ours], list(THEIRS.values())).statistic
    assert found["tau"] == pytest.approx(expected, abs=5e-4)  # three decimals
    assert (found["swapped"], found["tied"], found["placements"]) == (swapped, tied, 5)


def test_order_knows_only_placements_of_both_and_none_of_equals():
    made = [{"placement": name, "layers": 12, **rows(None)[0]} for name in ("a", "b", "new")]
    (found,) = max_lr.order(made, THEIRS)
    assert (found["placements"], found["tau"], found["tied"]) == (2, None, "a = b")


def test_placements_that_were_here_from_the_first_are_compared():
    assert {"pre", "post", "deepnorm"} <= set(max_lr.KEEL_TABLE_1) & set(PLACEMENTS)


def test_figures_are_drawn_with_their_csv_and_the_same_bytes_again(tmp_path):
    for folder in ("a", "b"):
        rates, ramps = figures.draw_all(RUNS, tmp_path / folder, ramp_figure.FIGURES)
    assert rates.sentence.endswith(
        "pre 0.52 (0.52 to 0.63), deepnorm 0.069, post none (none to 0.016)."
    )
    assert ramps.sentence.startswith("Loss of 3 placements")
    for name in ("max_lr.csv", "max_lr.png", "max_lr.pdf", "ramps.csv", "ramps.png", "ramps.pdf"):
        a, b = ((tmp_path / folder / name).read_bytes() for folder in ("a", "b"))
        assert a == b


def test_curves_are_the_smoothed_losses_and_mark_the_last_healthy_step(table):
    curves = ramp.curves(RUNS)
    for row, run in zip(table, RUNS, strict=True):
        names = ("placement", "layers", "seed")
        own = [c for c in curves if all(c[name] == row[name] for name in names)]
        losses = np.array([m["loss"] for m in run.metrics])
        assert [c["smoothed"] for c in own] == outcome.smooth(losses).tolist()
        marked = [c["lr"] for c in own if c["last"]]
        assert marked == [row["max_stable_lr"]] * (row["max_stable_lr"] is not None)


def dots(table):
    """{placement: [(marker, rate or None)]}, the top line of the figure first."""
    axes = ramp_figure.draw_max_lr(table).axes[0]
    names = [label.get_text() for label in axes.get_yticklabels()]
    found = {name: [] for name in reversed(names)}
    for line in axes.lines:
        x, y = float(line.get_xdata()[0]), int(line.get_ydata()[0])
        marker = line.get_marker()
        found[names[y]].append((marker, None if marker == "x" else x))
    return found


def test_every_run_is_a_dot_and_the_placement_that_bears_most_is_at_the_top(table):
    found = dots(table)
    assert list(found) == ["pre", "deepnorm", "post"]
    for name, own in found.items():
        rows = [row for row in table if row["placement"] == name]
        assert own == [(ramp_figure.LEGEND[r["kind"]][0], r["max_stable_lr"]) for r in rows]


def test_one_depth_and_a_placement_that_was_not_run_so_deep_are_drawn(table):
    shallow = [row for row in table if row["layers"] == 12]
    assert list(dots(shallow)) == ["pre", "deepnorm", "post"]
    uneven = [row for row in table if (row["placement"], row["layers"]) != ("pre", 48)]
    assert list(dots(uneven)) == ["deepnorm", "post", "pre"]


def test_normstudy_figures_knows_a_ramp_study(tmp_path):
    record.write_json(tmp_path / record.CONFIG, {"kind": ramp.KIND, "config": {}})
    assert pictures.of([tmp_path], RUNS) == ramp_figure.FIGURES


def test_merged_shards_are_one_study(tmp_path, no_start, capsys):
    """Two parts, each in a folder of its own; then one folder, where nothing is left to train."""
    command = [
        "--preset", "smoke", "--placements", "post", "--depths", "1", "--seeds", "2",
        "--width", "8", "--heads", "2", "--ff", "16", "--context", "8", "--steps", "8",
        "--eval-batches", "1",
    ]  # fmt: skip
    for i in range(2):
        own = ["--shard", f"{i + 1}/2", "--out", str(tmp_path / "out"), "--no-draw"]
        max_lr.main([*command, *own])
        with (tmp_path / "out" / "max_lr.csv").open(encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [row["seed"] for row in found] == [["0"], ["0", "1"]][i]
    capsys.readouterr()
    max_lr.main([*command, "--out", str(tmp_path / "out"), "--json"])
    printed = capsys.readouterr()
    assert "2 of 2 runs are finished" in printed.err
    summary = json.loads(printed.out)
    assert summary["max_lr"] == [{"placement": "post", "L = 1": "none"}]
    assert set(summary) >= {"code", "versions", "config", "command", "arms", "keel"}
    for name in ("max_lr.csv", "keel_order.csv", "figures/max_lr.png", "figures/ramps.png"):
        assert (tmp_path / "out" / name).exists()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Loss along the ramp" in page
