"""The experiments: arms do what their names say, the learning rate follows its rule."""

import csv

import pytest
import tiny

from normstudy import config, placements, theory, train
from normstudy.errors import UserError

BASE = config.PRESETS["cpu"]


@pytest.fixture(scope="module")
def reproduce():
    return tiny.experiment("reproduce")


@pytest.fixture(scope="module")
def tune_lr():
    return tiny.experiment("tune_lr")


def said_by(name: str) -> dict:
    """The fields that an arm's name announces, against the preset (which warms up)."""
    parts = name.replace("@", "+").split("+")
    said = {"placement": {"pre": "pre", "post": "post", "deepnet": "deepnorm"}[parts[0]]}
    words = {
        "warmup": {},
        "inverse-sqrt": {"schedule": "inverse_sqrt"},
        "LR/4": {"lr": BASE.optim.lr / 4},
        "1/sqrt(2L)": {"depth_scaled": True},
        "half-gain": {"gain": 0.5},
    }
    for part in parts[1:]:
        said |= words[part]
    if not {"warmup", "inverse-sqrt"} & set(parts):
        said["warmup"] = 0
    return said


def test_each_arm_differs_from_the_base_by_what_its_name_says_alone(reproduce):
    for name, arm in reproduce.ARMS.items():
        run = config.override(BASE, **arm(BASE))
        assert run == config.override(BASE, **said_by(name)), name


def test_pre_and_post_differ_in_the_placement_alone(reproduce):
    pre, post = (config.override(BASE, **reproduce.ARMS[name](BASE)) for name in ("pre", "post"))
    assert config.differences(pre, post) == {"placement": ("pre", "post")}


def test_card_mentions_every_arm_on_a_line_of_its_own(reproduce):
    lines = reproduce.__doc__.splitlines()
    for name in reproduce.ARMS:
        assert sum(line.split()[:1] == [name] for line in lines) == 1, name


@pytest.mark.parametrize("name", ["reproduce", "tune_lr", "max_lr", "write_readme"])
def test_card_says_command_time_and_expectation(name, monkeypatch):
    monkeypatch.syspath_prepend(str(tiny.ROOT / "experiments"))  # as for a script
    card = tiny.experiment(name).__doc__
    for heading in ("\nCommand  ", "\nTime  ", "\nExpect  "):
        assert heading in card


def test_warmup_is_only_where_the_name_says_so(reproduce):
    for name, arm in reproduce.ARMS.items():
        run = config.override(BASE, **arm(BASE))
        rates = train.schedules.table(run.optim, run.model.width, 8)
        rises = rates[0] < rates[-1]
        assert rises == ("warmup" in name or "inverse-sqrt" in name), name


def test_inverse_sqrt_arm_has_the_peak_of_the_warmup_arm(reproduce):
    peaks = {}
    for name in ("post+warmup", "post+inverse-sqrt"):
        run = config.override(BASE, **reproduce.ARMS[name](BASE))
        peaks[name] = train.schedules.table(run.optim, run.model.width, run.steps).max()
    assert peaks["post+warmup"] == pytest.approx(peaks["post+inverse-sqrt"], rel=1e-6)


def test_deepnet_arm_has_deepnet_s_constants(reproduce):
    run = config.override(BASE, **reproduce.ARMS["deepnet"](BASE))
    constants = placements.row(run.model.placement).constants(run.model.layers)
    assert constants == theory.deepnorm_decoder(48)
    assert not run.init.depth_scaled and run.init.gain == 1


def test_every_arm_runs_at_48_layers(reproduce):
    assert BASE.model.layers == 48
    assert {config.override(BASE, **arm(BASE)).model.layers for arm in reproduce.ARMS.values()} == {
        48
    }


def outcomes(**at: str) -> list[dict]:
    """Rows from lr_0_1="trained stalled": one word a seed."""
    return [
        {"lr": float(name[3:].replace("_", ".")), "outcome": word}
        for name, words in at.items()
        for word in words.split()
    ]


def test_chosen_rate_is_the_largest_at_which_every_seed_trains(tune_lr):
    rows = outcomes(
        lr_0_001="trained trained", lr_0_01="trained trained", lr_0_1="trained stalled",
        lr_1_0="diverged diverged",
    )  # fmt: skip
    assert tune_lr.choose_lr(rows) == 0.01
    assert tune_lr.choose_lr(rows[::-1]) == 0.01


def test_rate_above_a_failing_one_may_be_chosen(tune_lr):
    """The rule is the largest, not the last before the first failure; the grid is reported."""
    rows = outcomes(lr_0_001="trained", lr_0_01="stalled", lr_0_1="trained")
    assert tune_lr.choose_lr(rows) == 0.1


@pytest.mark.parametrize("word", ["spiked", "undecided", "collapsed", "diverged", "stalled"])
def test_no_other_word_counts_as_trained(tune_lr, word):
    rows = outcomes(lr_0_01="trained", lr_0_1=f"trained {word}")
    assert tune_lr.choose_lr(rows) == 0.01


def test_no_rate_that_trains_is_an_error(tune_lr):
    with pytest.raises(UserError, match="at no learning rate of the grid"):
        tune_lr.choose_lr(outcomes(lr_0_1="stalled"))


def test_rate_of_preset_cpu_is_the_one_that_the_rule_takes_from_the_grid(tune_lr):
    path = tiny.ROOT / "experiments" / "results" / "lr_grid.csv"
    with path.open(encoding="utf-8") as file:
        rows = [row | {"lr": float(row["lr"])} for row in csv.DictReader(file)]
    assert {row["lr"] for row in rows} == set(tune_lr.GRID)
    assert len({row["seed"] for row in rows}) >= 3
    assert BASE.optim.lr == tune_lr.choose_lr(rows)


def test_grid_runs_pre_norm_without_warmup_and_to_the_end(tune_lr):
    assert len(tune_lr.ARMS) == len(tune_lr.GRID) == 6
    for rate, arm in zip(tune_lr.GRID, tune_lr.ARMS.values(), strict=True):
        run = config.override(BASE, **arm(BASE))
        assert (run.optim.lr, run.optim.warmup, run.stop_after) == (rate, 0, 0)
        assert run.model.placement == "pre"


TINY = [
    "--preset", "smoke", "--layers", "2", "--width", "8", "--heads", "2", "--ff", "16",
    "--context", "8", "--batch", "8", "--probe-batch", "8", "--steps", "8", "--eval-batches", "1",
    "--checkpoint-every", "8", "--no-draw",
]  # fmt: skip


def test_part_of_the_grid_can_be_run_after_the_whole(tune_lr, tmp_path, no_start, capsys):
    """Eight updates decide nothing, so the rule ends both calls with its message."""
    for arms in ("pre at 0.001,pre at 0.01", "pre at 0.01"):
        with pytest.raises(UserError, match="at no learning rate"):
            tune_lr.main([*TINY, "--arms", arms, "--out", str(tmp_path / "out")])
        with (tmp_path / "out" / "lr_grid.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        assert {float(row["lr"]) for row in rows} >= {0.01}
        assert {row["outcome"] for row in rows} == {"undecided"}
