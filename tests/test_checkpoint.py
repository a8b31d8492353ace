"""Checkpoints: the same bits back, on any mesh; what is wrong is named."""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny
from orbax.checkpoint import v1 as ocp

from normstudy import checkpoint, config, manifest, programs, remote
from normstudy.errors import UserError


@pytest.fixture(scope="module")
def saved(wide, tmp_path_factory):
    """(run folder, state) with steps 3 and 7; saved from the mesh data 2, fsdp 2, tensor 2."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    state = programs.initial_state(wide["mixed"], programs.of(wide["mixed"])[0])
    later = state._replace(step=state.step + 7)
    checkpoint.save(folder, 3, state._replace(step=state.step + 3))
    checkpoint.save(folder, 7, later)
    return folder, later


def test_saved_state_comes_back_bit_for_bit(saved, wide):
    folder, state = saved
    found = checkpoint.restore(folder, 7, programs.of(wide["mixed"])[0].abstract)
    assert isinstance(found, programs.State) and int(found.step) == 7
    tiny.assert_bit_equal(found, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)


@pytest.mark.parametrize("name", ["data", "fsdp"])
def test_saved_state_comes_back_bit_for_bit_on_another_mesh(saved, wide, name):
    folder, state = saved
    like = programs.of(wide[name])[0].abstract
    found = checkpoint.restore(folder, 7, like)
    tiny.assert_bit_equal(found, state)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(like), strict=True):
        assert leaf.sharding == wanted.sharding


def test_saved_state_comes_back_bit_for_bit_on_one_device(saved, wide, one_device):
    folder, state = saved
    run = config.override(wide["mixed"], data=1, fsdp=1, tensor=1)
    found = checkpoint.restore(folder, 7, programs.of(run)[0].abstract)
    tiny.assert_bit_equal(found, state)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(found)} == {1}


def test_shape_mismatch_names_the_first_path_and_both_shapes(saved, wide):
    run = config.override(wide["data"], ff=128)
    with pytest.raises(UserError) as error:
        checkpoint.restore(saved[0], 7, programs.of(run)[0].abstract)
    message = str(error.value)
    assert "layers/mlp/down" in message or "layers/mlp/up" in message
    assert ("(2, 32, 128)" in message and "(2, 32, 64)" in message) or (
        "(2, 128, 32)" in message and "(2, 64, 32)" in message
    )
    assert "attn" not in message


def test_missing_parameter_is_named(saved, wide):
    run = config.override(wide["data"], placement="pre")
    with pytest.raises(UserError, match=r"has no model/.*(pre|final)"):
        checkpoint.restore(saved[0], 7, programs.of(run)[0].abstract)


def test_steps_are_listed_in_order(saved):
    assert checkpoint.steps(saved[0]) == [3, 7]
    assert checkpoint.latest(saved[0]) == 7


def test_saving_a_step_again_keeps_the_first(saved, wide):
    folder, state = saved
    checkpoint.save(folder, 7, jax.tree.map(lambda leaf: leaf * 0, state))
    found = checkpoint.restore(folder, 7, programs.of(wide["mixed"])[0].abstract)
    tiny.assert_bit_equal(found, state)


def saved_one_after_the_other(folder, steps, **options):
    """The steps that are there after each save."""
    found = []
    with checkpoint.Saver(folder, {}, **options) as saver:
        for step in steps:
            saver.save(step, {"w": jnp.full(3, step)})
            saver.settle()
            found.append(checkpoint.steps(folder))
    return found


def problems(folder):
    return [row["problem"] for row in manifest.look_at_all(remote.home(folder))]


def test_newest_checkpoints_stay_and_older_ones_go_once_the_next_is_sealed(tmp_path):
    found = saved_one_after_the_other(tmp_path, (1, 2, 3, 4), keep=2)
    assert found == [[1], [1, 2], [2, 3], [3, 4]]
    assert problems(tmp_path) == ["", ""] and not (tmp_path / "ckpt" / "deleted").exists()
    assert saved_one_after_the_other(tmp_path, (5, 6)) == [[3, 4, 5], [3, 4, 5, 6]]


def test_half_deleted_checkpoint_is_out_of_sight_and_gone_after_the_next_start(
    tmp_path, monkeypatch
):
    with monkeypatch.context() as killed:
        killed.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        assert saved_one_after_the_other(tmp_path, (1, 2), keep=1) == [[1], [2]]
    assert (tmp_path / "ckpt" / "deleted" / "1").exists() and problems(tmp_path) == [""]
    saved_one_after_the_other(tmp_path, (), keep=1)
    assert not (tmp_path / "ckpt" / "deleted").exists() and checkpoint.steps(tmp_path) == [2]


def test_checkpoint_is_saved_though_an_older_one_cannot_be_deleted(tmp_path, monkeypatch, capsys):
    def refused(folder):
        raise PermissionError("not yours")

    monkeypatch.setattr(checkpoint, "_delete", refused)
    assert saved_one_after_the_other(tmp_path, (1, 2), keep=1) == [[1], [1, 2]]
    assert (
        problems(tmp_path) == ["", ""]
        and "could not be deleted: not yours" in capsys.readouterr().err
    )


def test_older_checkpoints_in_a_store_go_too_and_half_deleted_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_stores", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, kept = remote.local(Path(f"file://{tmp_path}/bucket")), tmp_path / "bucket" / "ckpt"
    folder.mkdir(parents=True)
    assert saved_one_after_the_other(folder, (1, 2, 3), keep=2) == [[1], [1, 2], [2, 3]]
    (kept / "2" / manifest.NAME).unlink()  # as a kill leaves it
    assert saved_one_after_the_other(folder, (4,), keep=1) == [[4]]
    assert [own.name for own in kept.iterdir()] == ["4"] and problems(folder) == [""]


def test_saving_an_older_step_is_never_skipped_in_silence(tmp_path):
    """orbax refuses steps below the newest, and only its return value says so."""
    checkpoint.save(tmp_path, 7, {"w": jnp.ones(2)})
    try:
        checkpoint.save(tmp_path, 3, {"w": jnp.ones(2)})
    except Exception as error:
        assert "3" in str(error)
    else:
        assert checkpoint.steps(tmp_path) == [3, 7]


@pytest.mark.parametrize("below", ["", "ckpt", "ckpt/3", "ckpt/7"])
def test_locate_accepts_run_folder_ckpt_folder_and_one_checkpoint(saved, below):
    folder, _ = saved
    step = int(below[-1]) if below[-1:].isdigit() else 7  # the newest where none is named
    assert checkpoint.locate(folder / below, None) == (folder.resolve(), step)


def test_locate_takes_the_step_that_is_asked_for(saved):
    assert checkpoint.locate(saved[0], 3)[1] == 3


def test_missing_step_lists_those_there_are(saved):
    with pytest.raises(UserError, match=r"no checkpoint at step 5; it has \[3, 7\]"):
        checkpoint.locate(saved[0], 5)


def test_folder_without_checkpoint_says_where_it_looked(tmp_path):
    with pytest.raises(UserError, match=r"holds no checkpoint .*ckpt"):
        checkpoint.locate(tmp_path, None)
    assert checkpoint.steps(tmp_path) == [] and checkpoint.latest(tmp_path) is None
    assert list(tmp_path.iterdir()) == []  # looking leaves no folder behind


def test_checkpoint_whose_files_are_gone_is_a_message(saved, wide, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(saved[0], copy)
    for path in (copy / "ckpt" / "7").rglob("*"):
        if path.is_file() and path.name != "_CHECKPOINT_METADATA":
            path.unlink()
    with pytest.raises(UserError, match=r"checkpoint 7 of .*run"):
        checkpoint.restore(copy, 7, programs.of(wide["data"])[0].abstract)


def test_array_that_cannot_be_read_is_named_in_one_line(saved, wide, monkeypatch):
    """What orbax raises for a shortened file: pages about its handlers, from one useful line."""

    def load(*args):
        try:
            raise ValueError('OUT_OF_RANGE: Error reading "opt_state.1.nu.readout"\nin a database')
        except ValueError as error:
            raise KeyError("Failed to load checkpointable: state\n" * 100) from error

    monkeypatch.setattr(ocp.training.Checkpointer, "load", load)
    with pytest.raises(UserError) as error:
        checkpoint.restore(saved[0], 7, programs.of(wide["data"])[0].abstract)
    message = str(error.value)
    assert "\n" not in message and message.endswith('Error reading "opt_state.1.nu.readout"')
    assert f"checkpoint 7 of {saved[0]} is damaged" in message


def test_parameters_are_stored_under_plain_names(saved):
    tree = ocp.metadata(saved[0] / "ckpt" / "7").metadata
    assert tree["model"]["layers"]["attn"]["q"].shape == (2, 32, 32)
    assert tree["step"].shape == ()
