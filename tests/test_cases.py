"""Public bug reports made small (cases A01 ...), each with its verdict: make cases.

Each was tried here first: the test's name says whether the small version shows the symptom of the
report. Where it does not, the verdict is that it does not, and the name says so.
"""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.cases


def diagnose(tmp_path, *argv: str) -> dict:
    """What the command says, as JSON, in a process of its own."""
    command = [
        sys.executable, "-m", "normstudy.cli", "diagnose", "--json", "--out", str(tmp_path / "out"),
        *map(str, argv),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1, 3), done.stderr
    told = json.loads(done.stdout)
    assert told["exit_code"] == done.returncode
    return told


def causes(told: dict, sure: str = "tested") -> set[str]:
    return {f["verdict"] for f in told["findings"] if f["kind"] == "cause" and f["sure"] == sure}


def effects(told: dict) -> dict[str, str]:
    return {trial["name"]: trial["effect"] for trial in told["trials"]}


def test_a01_post_norm_of_24_blocks_stalls_and_its_placement_is_the_tested_cause(tmp_path):
    told = diagnose(
        tmp_path, "--placement", "post", "--layers", 24, "--lr", 1e-3, "--steps", 300,
        "--budget", "3m",
    )  # fmt: skip
    assert told["verdict"] == "stalled"
    assert "placement without warmup" in causes(told)
    assert effects(told)["pre-norm"] == "cures"


def test_a01_post_norm_of_6_blocks_is_healthy(tmp_path):
    told = diagnose(tmp_path, "--placement", "post", "--layers", 6, "--lr", 1e-3, "--steps", 300)
    assert (told["verdict"], told["exit_code"]) == ("healthy", 0)


def test_a08_pre_norm_without_a_final_norm_is_a_structure_though_it_trains_at_this_scale(tmp_path):
    told = diagnose(
        tmp_path, "--placement", "pre", "--layers", 24, "--lr", 1e-3, "--final-norm", False,
        "--steps", 300,
    )  # fmt: skip
    assert (told["verdict"], causes(told, "measured")) == ("structure", {"structure"})
    assert [trial["words"] for trial in told["trials"]] == [["trained"]]


def test_a20_gradient_descent_at_rate_20_with_a_clip_is_the_optimizer_and_no_norm(tmp_path):
    """The report's cause: a clip and a rate made for recurrent networks."""
    told = diagnose(
        tmp_path, "--placement", "post", "--layers", 2, "--optimizer", "sgd", "--lr", 20,
        "--clip", 0.25, "--steps", 300, "--budget", "3m",
    )  # fmt: skip
    assert told["exit_code"] in (1, 3)
    assert "optimizer" in causes(told)
    assert "placement without warmup" not in causes(told)


def test_a27_256_tokens_an_update_do_not_stall_at_this_scale_and_nothing_is_blamed(tmp_path):
    """256 tokens an update at 1e-3; the report had 3,000 for a large model."""
    told = diagnose(
        tmp_path, "--placement", "post", "--layers", 6, "--lr", 1e-3, "--warmup", 100,
        "--batch", 8, "--steps", 300,
    )  # fmt: skip
    assert told["verdict"] == "healthy" and not causes(told)


def test_a27_64_tokens_an_update_collapse_at_3e_3_and_eight_times_as_many_train(tmp_path):
    """And so do others: half the rate, warmup, smaller branches, another placement."""
    told = diagnose(
        tmp_path, "--placement", "post", "--layers", 6, "--lr", 3e-3, "--batch", 2, "--steps", 300
    )
    assert told["verdict"] == "collapsed"
    assert {"batch too small", "learning rate too high"} <= causes(told)
    assert any("no one of them is the only cause" in f["says"] for f in told["findings"])


def test_a32_epsilon_is_not_recommended_to_a_run_that_trains(tmp_path):
    told = diagnose(tmp_path, "--placement", "pre", "--layers", 12, "--lr", 1e-3, "--steps", 300)
    assert told["verdict"] == "healthy" and len(told["trials"]) == 1


def test_a07_half_the_rate_is_a_delay_of_t_fixup_s_divergence_at_40_blocks(tmp_path):
    """The report's symptom shows at 3e-2 here, and a quarter of the rate does cure it."""
    told = diagnose(
        tmp_path, "--placement", "t-fixup", "--layers", 40, "--lr", 3e-2, "--steps", 300
    )
    assert told["verdict"] == "diverged"
    assert effects(told)["lr / 2"] == "delays"
    assert causes(told) == {"learning rate too high"}


def test_a16_large_init_does_not_fail_at_this_scale_and_is_a_note(tmp_path):
    """16 blocks of width 64 at four times Xavier's std: suspected beforehand, and it trains."""
    told = diagnose(
        tmp_path, "--placement", "pre", "--layers", 16, "--width", 64, "--ff", 256, "--init",
        "normal", "--init-std", 0.5, "--lr", 3e-2, "--steps", 300,
    )  # fmt: skip
    assert told["verdict"] == "healthy" and not causes(told)
    assert any(f["says"].startswith("init scale?") for f in told["findings"])


def test_a05_mixed_stack_of_24_blocks_trains_with_a_hundredth_of_warmup_at_this_scale(tmp_path):
    told = diagnose(
        tmp_path, "--placement", "mix-ln", "--layers", 24, "--lr", 2e-3, "--warmup", 3,
        "--steps", 300,
    )  # fmt: skip
    assert told["verdict"] == "healthy"


def test_a35_post_norm_of_20_blocks_stalls_and_each_change_has_its_measured_effect(tmp_path):
    told = diagnose(
        tmp_path, "--placement", "post", "--layers", 20, "--lr", 1e-3, "--warmup", 30,
        "--steps", 300,
    )  # fmt: skip
    assert told["verdict"] == "stalled"
    assert {"warmup over half of the run", "lr / 2"} <= set(effects(told))
