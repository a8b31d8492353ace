"""Runs that train as one program: as alone, each for itself, each in its own folder."""

import signal

import jax
import numpy as np
import pytest
import tiny

from normstudy import checkpoint, config, model, programs, record, study, train
from normstudy.errors import Interrupted, UserError

DIFFERENT = (  # seed, initial scales and schedule
    {"seed": 0},
    {"seed": 1, "lr": 0.003, "schedule": "cosine", "warmup": 3},
    {"seed": 2, "gain": 0.5, "depth_scaled": True, "init": "kaiming"},
)


def members(folder, count: int, **changes) -> list[train.Member]:
    """Runs of which three are different, the others are these with other seeds."""
    return [
        train.Member(
            tiny.run(**(DIFFERENT[i % 3] | {"seed": i} | changes)), folder / f"run{i}", f"run {i}"
        )
        for i in range(count)
    ]


def rows(folder, without=("seconds",)) -> list[dict]:
    found = record.read_rows(folder / record.METRICS)
    return [{k: v for k, v in row.items() if k not in without} for row in found]


def final_state(member):
    compiled, _ = programs.of(member.run)
    folder = member.folder
    return checkpoint.restore(folder, checkpoint.latest(folder), compiled.abstract)


def assert_close(found: dict, expected: dict, where: str) -> None:
    """Rows of a log: the same names, values to float32 rounding of another order of sums."""
    assert found.keys() == expected.keys(), where
    for name, value in expected.items():
        # eight updates of Adam, which divides gradients by their own size. Some of what is probed
        # is a small difference of large numbers: relative to the largest layer
        np.testing.assert_allclose(
            found[name], value, rtol=2e-3, atol=2e-3 * np.max(np.abs(value)), err_msg=name
        )


@pytest.fixture(scope="module", params=[8, 3], ids=["one on each device", "three over all devices"])
def trained(request, tmp_path_factory):
    """(members, outcomes): as many as devices, or a number that does not divide them."""
    jobs = members(tmp_path_factory.mktemp("together"), request.param)
    return jobs, train.together(jobs)


def test_each_member_has_the_numbers_of_the_run_alone(trained, tmp_path):
    jobs, outcomes = trained
    for i in range(3):
        alone = tmp_path / f"alone{i}"
        expected = train.train(jobs[i].run, alone, jobs[i].name)
        for key in ("word", "step", "steps_done", "stopped_because", "name", "h1"):
            assert outcomes[i][key] == expected[key]
        np.testing.assert_allclose(outcomes[i]["val_loss"], expected["val_loss"], rtol=1e-4)
        for log in (record.METRICS, record.PROBES):
            own, other = (record.read_rows(f / log) for f in (jobs[i].folder, alone))
            assert [row["step"] for row in own] == [row["step"] for row in other]
            for mine, row in zip(own, other, strict=True):
                for one in (mine, row):
                    one.pop("seconds", None)
                assert_close(mine, row, f"{jobs[i].name}, step {row['step']}")


def test_each_member_has_the_folder_of_a_run_alone(trained, finished):
    jobs, outcomes = trained
    names = {path.name for path in finished[1].iterdir()}
    for job, outcome in zip(jobs, outcomes, strict=True):
        assert {path.name for path in job.folder.iterdir()} == names
        assert checkpoint.steps(job.folder) == checkpoint.steps(finished[1])
        assert record.load_config(job.folder) == job.run
        assert record.read_json(job.folder / record.OUTCOME) == outcome


def test_members_start_from_the_parameters_of_the_run_alone_to_the_bit(trained):
    """What differs between them enters the common program as data."""
    jobs, _ = trained
    for job in jobs:
        compiled, _ = programs.of(job.run)
        state = jax.device_get(programs.initial_state(job.run, compiled))
        probe = record.read_rows(job.folder / record.PROBES)[0]
        by_hand = np.sqrt((np.asarray(state.model.layers.attn.f.q[...], float) ** 2).sum((1, 2)))
        np.testing.assert_allclose(probe["weight/attn.q"], by_hand, rtol=1e-6)
    losses = {rows(job.folder)[0]["loss"] for job in jobs}
    assert len(losses) == len(jobs)


def test_finished_members_are_skipped(trained, monkeypatch):
    jobs, outcomes = trained
    monkeypatch.setattr(train, "_loop", lambda *args: pytest.fail("trained again"))
    assert train.together(jobs) == outcomes


@pytest.mark.parametrize("count", [8, 3])
def test_member_that_dies_ends_for_itself_and_touches_no_other(tmp_path, count):
    alive = members(tmp_path / "alive", count)
    one_dies = members(tmp_path / "dies", count)
    one_dies[1] = one_dies[1]._replace(run=config.override(one_dies[1].run, lr=1e30, warmup=0))
    train.together(alive)
    outcomes = train.together(one_dies)
    assert (outcomes[1]["word"], outcomes[1]["step"]) == ("diverged", 1)
    assert [row["step"] for row in rows(one_dies[1].folder)] == [0, 1]
    dead = final_state(one_dies[1])
    assert not dead.alive and int(dead.step) == 1
    for path, leaf in tiny.leaves(dead).items():
        assert np.isfinite(leaf).all(), path
    for i in {*range(count)} - {1}:
        assert rows(one_dies[i].folder) == rows(alive[i].folder)
        tiny.assert_bit_equal(final_state(one_dies[i]), final_state(alive[i]))


def test_interrupted_members_go_on_as_if_nothing_had_been(trained, tmp_path, monkeypatch):
    jobs, _ = trained
    again = members(tmp_path, len(jobs))
    write = train.RunLog.write

    def interrupting(self, step, lr, values):
        write(self, step, lr, values)
        if step == 4 and self is logs[0]:
            signal.raise_signal(signal.SIGINT)

    logs: list = []
    opened = train.RunLog.__enter__
    monkeypatch.setattr(train.RunLog, "__enter__", lambda log: logs.append(log) or opened(log))
    monkeypatch.setattr(train.RunLog, "write", interrupting)
    with pytest.raises(Interrupted, match="interrupted at step"):
        train.together(again)
    monkeypatch.undo()
    saved = {checkpoint.latest(job.folder) for job in again}
    assert len(saved) == 1 and not any((job.folder / record.OUTCOME).exists() for job in again)
    train.together(again)
    for job, whole in zip(again, jobs, strict=True):
        assert rows(job.folder) == rows(whole.folder)
        tiny.assert_bit_equal(final_state(job), final_state(whole))


def test_members_stop_early_each_at_its_own_time(tmp_path, monkeypatch):
    jobs = members(tmp_path, 3, steps=30, stop_after=5)
    sealed = lambda losses, h1, warmup: 5 if len(losses) >= (10 if warmup else 20) else 0
    monkeypatch.setattr(train.outcome, "sealed_for", sealed)
    outcomes = train.together(jobs)
    assert [found["steps_done"] for found in outcomes] == [30, 20, 30]
    assert all("sealed" in found["stopped_because"] for found in outcomes[1:2])


def test_one_program_is_traced_once_for_all_members(tmp_path, monkeypatch):
    traced = []
    layer = model.Layer.__call__
    monkeypatch.setattr(
        model.Layer, "__call__", lambda *args, **kw: traced.append(1) or layer(*args, **kw)
    )
    sizes = {"width": 16, "steps": 3}  # a shape that no other test has compiled
    train.together(members(tmp_path / "two", 2, **sizes))
    two = len(traced)
    train.together(members(tmp_path / "four", 4, **sizes))
    # a forward pass takes a trace or two; four members take no more of them than two
    assert 0 < len(traced) - two <= two


def test_runs_that_share_too_little_are_refused(tmp_path):
    jobs = members(tmp_path, 2)
    jobs[1] = jobs[1]._replace(run=config.override(jobs[1].run, placement="pre"))
    with pytest.raises(ValueError, match="differ in more than seed, init and schedule"):
        train.together(jobs)
    assert not list(tmp_path.iterdir())


def test_study_trains_together_what_shares_its_shapes(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        train, "together", lambda group, *_: seen.append([(m.name, m.run.seed) for m in group])
    )
    monkeypatch.setattr(study.frames, "load", lambda out, *_: [])  # nothing is trained here
    arms = {
        "a": lambda base: {},
        "b": lambda base: {"placement": "pre"},
        "c": lambda base: {"lr": 1.0},
    }
    study.run_arms(tiny.run(), arms, list(arms), 2, tmp_path / "out", "test", together=3)
    assert seen == [[("a", 0), ("a", 1), ("c", 0)], [("c", 1)], [("b", 0), ("b", 1)]]


def test_study_refuses_to_follow_the_curvature_of_several_runs(tmp_path):
    with pytest.raises(UserError, match="--curvature follows one run at a time"):
        study.run_arms(
            tiny.run(curvature=True), tiny.ARMS, ["pre"], 1, tmp_path / "out", "test", together=2
        )
    assert not (tmp_path / "out").exists()
