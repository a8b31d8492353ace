"""Runs kept on an object store: file:/// stands for one, another folder that is only copied to."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import tiny
from etils import epath

from normstudy import checkpoint, cli, manifest, record, remote, study, train
from normstudy.errors import Interrupted, UserError


@pytest.fixture
def store(tmp_path, monkeypatch):
    """(URL, the folder behind it), with no copy yet."""
    monkeypatch.setattr(remote, "_stores", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"file://{tmp_path}/bucket/mine", tmp_path / "bucket" / "mine"


def names(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in remote.files(folder, without="ckpt")}


def test_folder_here_is_worked_on_where_it_is(store, tmp_path):
    assert remote.local(tmp_path) == tmp_path == remote.home(tmp_path)
    (tmp_path / "kept").touch()
    remote.pull(tmp_path)
    remote.push(tmp_path)
    assert (tmp_path / "kept").exists()


@pytest.mark.parametrize("url", ["gs://bucket/a/b", "gs:/bucket/a/b"])  # pathlib takes a slash away
def test_url_of_a_bucket_has_a_copy_whose_checkpoints_are_in_the_bucket(store, tmp_path, url):
    copy = remote.local(Path(url))
    assert copy == tmp_path / "cache" / "normstudy" / "remote" / "gs" / "bucket" / "a" / "b"
    arm = remote.home(copy / "arms" / "pre")
    assert isinstance(arm, epath.Path) and str(arm) == "gs://bucket/a/b/arms/pre"


def test_url_without_a_name_is_a_message(store):
    with pytest.raises(UserError, match="names no folder"):
        remote.local(Path("gs://"))


def test_store_decides_what_the_copy_is(store):
    url, kept = store
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("theirs")
    copy = remote.local(Path(url))
    copy.mkdir(parents=True)
    (copy / "config.json").write_text("older")
    (copy / "left over").touch()
    remote.pull(copy)
    assert names(copy) == {"config.json"} and (copy / "config.json").read_text() == "theirs"


def test_run_in_a_store_goes_on_from_another_machine(store, finished, monkeypatch):
    """What is there is all that is needed: the local copy is lost in between."""
    run, whole, result = finished
    url, kept = store
    copy = remote.local(Path(url))
    write, rows = train.RunLog.write, []

    def stop_after_four(self, step, lr, values):
        write(self, step, lr, values)
        rows.append(step)
        if step == 4:
            raise Interrupted("here")

    monkeypatch.setattr(train.RunLog, "write", stop_after_four)
    with pytest.raises(Interrupted):
        train.train(run, copy, "tiny")
    monkeypatch.setattr(train.RunLog, "write", write)
    assert checkpoint.steps(copy) == [3] and not (copy / "ckpt").exists()
    assert not manifest.look(kept / "ckpt" / "3").problem
    assert len(record.read_rows(kept / record.METRICS)) >= 3  # all that led to the checkpoint

    shutil.rmtree(copy)
    remote.pull(copy)
    assert train.train(run, copy, "tiny") == result
    assert names(kept) >= {"config.json", "metrics.jsonl", "probes.jsonl", "outcome.json"}
    without_clock = [
        [{k: v for k, v in row.items() if k != "seconds"} for row in record.read_rows(own)]
        for own in (kept / record.METRICS, whole / record.METRICS)
    ]
    assert without_clock[0] == without_clock[1]
    assert checkpoint.steps(copy) == [3, 6, 8]


def test_study_in_a_store_that_ended_early_is_known_again_there(store, monkeypatch):
    copy = remote.local(Path(store[0]))

    def ends(*_):
        raise Interrupted("here")

    monkeypatch.setattr(train, "together", ends)
    for _ in range(2):
        with pytest.raises(Interrupted):
            study.run_arms(tiny.run(), tiny.ARMS, ["post"], 1, copy, "test")
        assert names(store[1]) == {"config.json"}
        (store[1] / "arms").mkdir(exist_ok=True)  # as a run leaves it
        shutil.rmtree(copy)


def test_store_out_of_reach_at_the_end_hides_no_other_error_and_is_one_itself(store, monkeypatch):
    def refused(folder):
        raise PermissionError("not yours")

    monkeypatch.setattr(remote, "push", refused)
    folder = remote.local(Path(store[0]))
    with pytest.raises(Interrupted), remote.kept(folder):
        raise Interrupted("here")
    with pytest.raises(PermissionError), remote.kept(folder):
        pass


@pytest.mark.parametrize("below", ["", "/ckpt", "/ckpt/8"])
def test_checkpoint_in_a_store_can_be_named_as_one_here_can(store, finished, below):
    url, kept = store
    shutil.copytree(finished[1], kept)
    path = cli._pulled(Path(url + below))
    folder, step = checkpoint.locate(path, None)
    assert (folder, step) == (remote.local(Path(url)), 8)
    assert record.load_config(folder) == dataclasses.replace(finished[0])
