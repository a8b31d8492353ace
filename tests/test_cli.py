"""The command line: bad input is one message and exit code 2; --json is JSON."""

import dataclasses
import json
import sys

import pytest
import tiny

from normstudy import cli, config, study, train
from normstudy.errors import Interrupted, UserError
from normstudy.placements import PLACEMENTS

SMOKE = ["--preset", "smoke"]


@pytest.fixture
def command(monkeypatch, capsys, no_start):
    """Run a main function with arguments: (exit code, stdout, stderr). It must not train."""
    monkeypatch.setattr(train, "train", lambda *args: pytest.fail("trained"))

    def call(main, *argv):
        monkeypatch.setattr(sys, "argv", ["command", *map(str, argv)])
        code = 0
        try:
            cli.guarded(main)
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture(scope="module")
def reproduce():
    return tiny.experiment("reproduce")


def assert_one_message(found, *names):
    code, out, err = found
    assert code == 2
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ") and err.count("\n") == 1
    for name in names:
        assert name in err


def test_unknown_arm_lists_the_arms(command, reproduce):
    found = command(reproduce.main, *SMOKE, "--arms", "pre,psot")
    assert_one_message(found, "unknown arm 'psot'", "Did you mean 'post'", *reproduce.ARMS)


def test_unknown_preset_lists_the_presets(command, reproduce):
    found = command(reproduce.main, "--preset", "laptop")
    assert_one_message(found, "unknown preset 'laptop'", *config.PRESETS)


def test_unknown_option_lists_the_options(command, reproduce):
    found = command(reproduce.main, *SMOKE, "--learning-rate", "3")
    fields = config.fields_of(config.Run())
    assert_one_message(found, "'learning_rate'", "arms", "seeds", "preset", "out", *fields)


def test_unknown_placement_lists_the_placements(command, tmp_path):
    """In a study whose arms leave the placement to the base."""
    arms = {"one": lambda base: {}}

    def main(argv):
        options, base = cli.parse_study(argv, "card", out="runs")
        chosen = cli.chosen_arms(options, base, arms)
        study.run_arms(base, arms, chosen, 1, options.out, "test")

    found = command(
        main, *SMOKE, "--placement", "club-sandwich", "--batch", 8, "--out", tmp_path / "out"
    )
    assert_one_message(found, "unknown placement 'club-sandwich'", *PLACEMENTS)
    assert not (tmp_path / "out").exists()


def test_option_that_every_chosen_arm_overrules_is_refused(command, reproduce):
    found = command(reproduce.main, *SMOKE, "--placement", "club-sandwich")
    assert_one_message(found, "--placement would do nothing", "--arms")
    found = command(reproduce.main, *SMOKE, "--warmup", 3, "--arms", "pre,post")
    assert_one_message(found, "--warmup would do nothing")
    found = command(reproduce.main, *SMOKE, "--depth-scaled", "--arms", "post+1/sqrt(2L)")
    assert_one_message(found, "--depth-scaled would do nothing")


def test_unknown_command_lists_the_commands(command):
    found = command(cli.dispatch, "prob")
    assert_one_message(found, "unknown command 'prob'", "Did you mean 'probe'", *cli.COMMANDS)


def test_unknown_option_of_a_command_lists_its_options(command, tmp_path):
    found = command(cli.dispatch, "probe", tmp_path, "--stepp", "3")
    assert_one_message(found, "'stepp'", "step", "vectors", "format")


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--seeds", "0"], "seeds must be at least 1, not 0"),
        (["--heads", "5"], "width 16 is not divided by heads 5"),
        (["--steps", "4"], "warmup 6 is longer than the run of 4 steps"),
        (["--lr", "-1"], "lr must be positive"),
        (["--vectors", "1"], "vectors must be at least 2"),
    ],
)
def test_value_that_cannot_be_is_one_message(command, reproduce, argv, says):
    assert_one_message(command(reproduce.main, *SMOKE, *argv), says)


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--layers", "many"], "--layers"),
        (["--norm", "batch"], "layer"),
        (["--schedule", "triangle"], "inverse_sqrt_2017"),
        (["-x"], "-x"),
        (["stray"], "stray"),
    ],
)
def test_value_of_another_type_is_exit_code_2_without_traceback(command, reproduce, argv, says):
    code, out, err = command(reproduce.main, *SMOKE, *argv)
    assert (code, out) == (2, "")
    assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    "argv, says",
    [
        (["figures", "nowhere"], "neither a run nor a study"),
        (["probe", "nowhere"], "holds no checkpoint"),
        (["probe", "nowhere", "--vectors", "1"], "vectors must be at least 2"),
    ],
)
def test_path_that_holds_nothing_is_one_message(command, tmp_path, argv, says):
    argv = [str(tmp_path / word) if word == "nowhere" else word for word in argv]
    assert_one_message(command(cli.dispatch, *argv), says)


def test_probe_of_a_study_folder_names_a_run_of_it(command, drawn_study):
    found = command(cli.dispatch, "probe", drawn_study[0])
    assert_one_message(found, "it is a study, probe one of its runs", "00-post/seed0")


def test_missing_argument_is_exit_code_2_without_traceback(command):
    code, out, err = command(cli.dispatch, "probe")
    assert (code, out) == (2, "")
    assert err and "Traceback" not in err


def test_errors_of_a_process_are_one_line_on_stderr():
    done = tiny.python("experiments/reproduce.py", *SMOKE, "--arms", "nothing")
    assert_one_message((done.returncode, done.stdout, done.stderr), "unknown arm 'nothing'")


def test_ctrl_c_is_exit_code_130(command):
    def main(argv):
        raise KeyboardInterrupt

    code, out, err = command(main)
    assert (code, out) == (130, "")
    assert "goes on" in err and "Traceback" not in err


def test_interrupted_study_is_exit_code_130_and_no_error(command):
    def main(argv):
        raise Interrupted("interrupted at step 3; saved. The same command goes on")

    code, _, err = command(main)
    assert code == 130
    assert err == "interrupted at step 3; saved. The same command goes on\n"


def test_bug_is_not_hidden_as_bad_input(command):
    def main(argv):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        command(main)


def test_help_without_a_command_names_every_command(command):
    code, out, _ = command(cli.dispatch)
    assert code == 0
    for name in cli.COMMANDS:
        assert name in out


def test_help_of_an_experiment_shows_its_card(command, reproduce):
    code, out, _ = command(reproduce.main, "--help")
    assert code == 0
    assert "post+1/sqrt(2L)+warmup" in out and "--layers" in out


def test_options_reach_the_config(no_start):
    options, run = cli.parse_study(
        ["--preset", "smoke", "--layers", "3", "--lr", "0.5", "--seeds", "2", "--no-draw",
         "--tied", "--embed-std", "0.1", "--out", "somewhere"], "card", out="runs/x",
    )  # fmt: skip
    assert (options.seeds, options.draw, str(options.out)) == (2, False, "somewhere")
    changed = config.differences(config.PRESETS["smoke"], run)
    assert {name: pair[1] for name, pair in changed.items()} == {
        "layers": 3, "lr": 0.5, "tied": True, "embed_std": 0.1
    }  # fmt: skip


def test_study_may_have_options_of_its_own_and_change_the_preset(no_start):
    @dataclasses.dataclass(frozen=True)
    class Own(cli.Study):
        depths: tuple[int, ...] = (12, 24)

    argv = ["--preset", "smoke", "--depths", "3", "4", "--lr", "0.5", "--seeds", "2"]
    options, run = cli.parse_own(Own(), argv, "card", steps=99, lr=2.0)
    assert (options.depths, options.seeds, options.preset) == ((3, 4), 2, "smoke")
    changed = config.differences(config.PRESETS["smoke"], run)
    assert {name: pair[1] for name, pair in changed.items()} == {"steps": 99, "lr": 0.5}


def test_shard_is_a_part_and_a_number_of_parts(no_start):
    options, _ = cli.parse_study(["--preset", "smoke", "--shard", "3/4"], "card", out="runs/x")
    assert options.part == (2, 4)
    assert cli.Study().part == (0, 1)


@pytest.mark.parametrize("shard", ["5/4", "0/4", "1", "-1/4", "1/0", "a/b", "1/2/3", ""])
def test_shard_that_is_none_is_refused(no_start, shard):
    with pytest.raises(UserError, match=r"--shard is i/n with i from 1 to n"):
        cli.parse_study(["--preset", "smoke", f"--shard={shard}"], "card", out="runs/x")


def test_preset_fits_the_backend(no_start):
    options, run = cli.parse_study([], "card", out="runs/x")
    assert options.preset == "cpu" and run == config.PRESETS["cpu"]


def test_placements_json_is_the_table(command):
    code, out, _ = command(cli.dispatch, "placements", "--json")
    assert code == 0
    assert [row["placement"] for row in json.loads(out)] == list(PLACEMENTS)


def test_placements_at_a_depth_say_its_numbers_and_what_was_measured_there(command, tmp_path):
    rates = tmp_path / "max_lr.csv"
    rates.write_text(
        "placement,layers,seed,max_stable_lr,kind\npost,96,0,0.0123,failed\n"
        "pre,96,0,1.0,survived\npost,12,0,0.5,failed\nkeel,96,0,,never trained\n",
        encoding="utf-8",
    )
    argv = ("placements", "--json", "--layers", 96, "--max-lr", rates)
    _, out, _ = command(cli.dispatch, *argv)
    rows = {row["placement"]: row for row in json.loads(out)}
    found = {
        name: rows[name]["max stable LR at L = 96"] for name in ("post", "pre", "keel", "peri")
    }
    assert found == {"post": "0.012", "pre": ">1", "keel": "none", "peri": "-"}
    assert rows["deepnorm"]["c at L = 96"] == "alpha 3.722"
    assert rows["deepnorm"]["init and Adam at L = 96"] == "v o up down x 0.19"
    found = command(cli.dispatch, "placements", "--max-lr", tmp_path / "none.csv")
    assert_one_message(found, "none.csv cannot be read")


def test_placements_prints_the_equations(command):
    code, out, _ = command(cli.dispatch, "placements")
    assert code == 0
    for place in PLACEMENTS.values():
        assert place.text in out


def test_study_json_is_the_summary(drawn_study, capsys):
    out, rows = drawn_study
    cli.show(rows, cli.Study(out=out, json=True))
    printed = capsys.readouterr().out
    assert json.loads(printed) == json.loads((out / "summary.json").read_text())


def test_study_prints_the_closing_table(drawn_study, capsys):
    out, rows = drawn_study
    cli.show(rows, cli.Study(out=out))
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 4 and lines[0].startswith("arm") and lines[2].startswith("post/blows-up")
    assert str(out / "report.html") in printed.err
    assert "% of the time of all attempts went into steps that count" in printed.err
