"""The profile of a step: every instruction falls to a part of the model and a pass."""

import pytest
import tiny

tiny.experiment("contenders")  # its neighbour, which a script finds beside it
profile_step = tiny.experiment("profile_step")

LAYER = "jit(plain)/shard_map/{}while/body/closed_call/checkpoint/{}"


@pytest.mark.parametrize(
    "scope, times, expected",
    [
        (LAYER.format("jvp()/", "mlp/up/dot_general"), 48, ("up, down", "forward")),
        (
            LAYER.format("transpose(jvp())/", "rematted_computation/attn/attention/exp"), 48,
            ("attention core", "again"),
        ),
        (LAYER.format("transpose(jvp())/", "attn/q/dot_general"), 48, ("q, k, v, o", "backward")),
        (LAYER.format("transpose(jvp())/", "mlp/norm_post/mul"), 48, ("norms", "backward")),
        (LAYER.format("jvp()/", "mlp/add"), 48, ("rest of the layer", "forward")),
        ("jit(plain)/jvp()/while/body/dynamic_update_slice", 48, ("scan itself", "forward")),
        ("jit(plain)/div", 1, ("optimizer and the rest", "once")),
        ("jit(plain)/shard_map/jvp(readout)/dot_general", 1, ("embedding, readout, loss", "once")),
    ],
)  # fmt: skip
def test_scope_names_part_and_pass(scope, times, expected):
    assert profile_step.place("fusion.1", scope, times) == expected


def test_meeting_of_devices_is_no_part_of_the_model():
    assert profile_step.place("all-reduce.3", "jit(plain)/psum", 1) == ("devices meet", "once")
    assert profile_step.place("all-reduce.3", "jit(plain)/psum", 48)[0] == "devices meet"


def test_shares_of_a_step_add_up_and_loops_are_not_counted_twice():
    scopes = {"a": LAYER.format("jvp()/", "mlp/up/dot_general"), "b": "jit(plain)/div"}
    rows = profile_step.table(
        scopes, {"a": 3.0, "b": 1.0, "while.2": 3.5}, {"a": 48, "b": 1, "while.2": 1}
    )
    assert [(row["part"], row["all (ms)"], row["share (per cent)"]) for row in rows] == [
        ("up, down", 3.0, 75.0), ("optimizer and the rest", 1.0, 25.0), ("a step", 4.0, 100.0)
    ]  # fmt: skip


def test_profile_of_a_tiny_step_finds_its_parts():
    """In a process of its own: the profiler sees all that a process does."""
    done = tiny.python(
        "experiments/profile_step.py", "--layers", "6", "--width", "16", "--context", "16"
    )
    assert done.returncode == 0, done.stderr
    for part in ("attention core", "q, k, v, o", "up, down", "norms", "activation", "a step"):
        assert part in done.stdout
