"""Run folders: numbers come back bit for bit, damage is named, foreign folders stay untouched."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normstudy import config, record
from normstudy.errors import UserError

IDENTITY = {"kind": "run", "config": {"model": {"layers": 2}, "seed": 0}}


def written(path, rows) -> None:
    with contextlib.closing(record.Journal(path)) as journal:
        for row in rows:
            journal.write(row)


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32))
def test_float32_survives_json_exactly(value):
    text = json.dumps(record.plain({"x": np.float32(value), "a": np.array([value], np.float32)}))
    row = {name: record._numbers(v) for name, v in json.loads(text).items()}
    for found in (row["x"], row["a"][0]):
        np.testing.assert_array_equal(np.float32(found), np.float32(value))


def test_rows_come_back_as_they_were_written(tmp_path):
    values = np.array([1 / 3, 1e-45, 3.4e38, -0.0, np.nan, np.inf, -np.inf], np.float32)
    rows = [
        {"step": i, "lr": 1e-3 / 3, "values": values, "loss": values[i], "n": np.int32(7)}
        for i in range(len(values))
    ]
    written(tmp_path / "rows.jsonl", rows)
    found = record.read_rows(tmp_path / "rows.jsonl")
    assert [row["step"] for row in found] == list(range(len(values)))
    for i, row in enumerate(found):
        assert row["lr"] == 1e-3 / 3 and row["n"] == 7
        np.testing.assert_array_equal(np.float32(row["loss"]), values[i])
        np.testing.assert_array_equal(np.array(row["values"], np.float32), values)


def test_log_is_strict_json(tmp_path):
    written(tmp_path / "rows.jsonl", [{"step": 0, "loss": np.float32(np.nan)}])

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    line = (tmp_path / "rows.jsonl").read_text().strip()
    assert json.loads(line, parse_constant=refuse) == {"step": 0, "loss": "nan"}


def test_each_row_is_on_disk_before_the_next(tmp_path):
    with contextlib.closing(record.Journal(tmp_path / "rows.jsonl")) as journal:
        journal.write({"step": 0})
        assert len(record.read_rows(tmp_path / "rows.jsonl")) == 1


@pytest.mark.parametrize(
    "damage", ['{"step": 1, "lo', "", "[1]", '{"loss": 3}', '{"step": 0}', "\0\0\0"]
)
def test_damaged_middle_line_names_file_and_line(tmp_path, damage):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n' + damage + '\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2 is damaged"):
        record.read_rows(path)


def test_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2, "loss": 3.')
    assert [row["step"] for row in record.read_rows(path)] == [0, 1]


def test_truncate_drops_the_step_and_after_and_a_torn_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    third = np.float32(1 / 3)
    written(path, [{"step": i, "loss": third} for i in range(5)])
    before = path.read_text().splitlines()
    path.write_text(path.read_text() + '{"step": 5, "lo')
    record.truncate(path, 3)
    assert path.read_text().splitlines() == before[:3]
    record.truncate(path, 0)
    assert path.read_text() == ""
    assert list(tmp_path.iterdir()) == [path]


def test_truncate_of_a_log_that_is_not_there_makes_none(tmp_path):
    record.truncate(tmp_path / "rows.jsonl", 3)
    assert not (tmp_path / "rows.jsonl").exists()


def test_missing_log_says_where_it_looked(tmp_path):
    with pytest.raises(UserError, match=r"rows\.jsonl does not exist"):
        record.read_rows(tmp_path / "rows.jsonl")


def test_new_folder_is_made_ours_and_then_known(tmp_path):
    folder = tmp_path / "a" / "b"
    assert record.open_folder(folder, IDENTITY, "run") is False
    assert record.open_folder(folder, IDENTITY, "run") is True
    assert record.read_json(folder / record.CONFIG) == IDENTITY


def test_field_that_an_older_version_lacked_stood_at_its_default_there(tmp_path):
    new = record.identity(dataclasses.asdict(config.Run()), "run")
    old = json.loads(json.dumps(new))
    del old["config"]["init"]["beta"]
    record.write_json(tmp_path / record.CONFIG, old)
    assert record.open_folder(tmp_path, new, "run") is True
    halved = dataclasses.asdict(config.override(config.Run(), beta=0.5))
    with pytest.raises(UserError, match=r"init.beta: 1.0 there, 0.5 now"):
        record.open_folder(tmp_path, record.identity(halved, "run"), "run")


def test_empty_folder_is_taken(tmp_path):
    assert record.open_folder(tmp_path, IDENTITY, "run") is False


def test_foreign_folder_is_refused_and_nothing_written(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="nothing was written"):
        record.open_folder(tmp_path, IDENTITY, "run")
    assert contents(tmp_path) == before


def test_folder_of_another_kind_is_refused_and_nothing_written(tmp_path):
    record.open_folder(tmp_path, IDENTITY | {"kind": "reproduction"}, "reproduction")
    before = contents(tmp_path)
    with pytest.raises(UserError, match="holds a reproduction, not a run"):
        record.open_folder(tmp_path, IDENTITY, "run")
    assert contents(tmp_path) == before


@pytest.mark.parametrize("text", ['{"model_type": "gpt2"}', "not json", "[]"])
def test_config_of_somebody_else_is_refused_and_nothing_written(tmp_path, text):
    (tmp_path / record.CONFIG).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(UserError):
        record.open_folder(tmp_path, IDENTITY, "run")
    assert contents(tmp_path) == before


def test_other_config_is_refused_naming_the_field_and_both_values(tmp_path):
    record.open_folder(tmp_path, IDENTITY, "run")
    before = contents(tmp_path)
    other = {"kind": "run", "config": {"model": {"layers": 3}, "seed": 0}}
    with pytest.raises(UserError, match=r"model\.layers: 2 there, 3 now") as error:
        record.open_folder(tmp_path, other, "run")
    assert "seed" not in str(error.value)
    assert contents(tmp_path) == before


def test_tuples_of_a_config_do_not_make_it_another_one(tmp_path):
    identity = {"kind": "run", "config": {"betas": (0.9, 0.999)}}
    record.open_folder(tmp_path, identity, "run")
    assert record.open_folder(tmp_path, identity, "run") is True


def test_folder_that_cannot_be_made_is_a_message(tmp_path):
    """Below a regular file: refused whoever asks (root passes permission bits)."""
    (tmp_path / "file").write_text("text")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="--out"):
            record.open_folder(folder, IDENTITY, "run")
    assert (tmp_path / "file").read_text() == "text"


def test_json_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "x.json"
    record.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        record.write_json(path, {"a": object()})
    assert record.read_json(path) == {"a": 1}


def test_config_of_a_run_comes_back(tmp_path):
    run = config.override(config.Run(), layers=3, lr=1 / 3)
    record.write_json(
        tmp_path / record.CONFIG, {"kind": "run", "config": json.loads(config.to_json(run))}
    )
    assert record.load_config(tmp_path) == run


def test_folder_without_a_run_s_config_is_no_run_folder(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        record.load_config(tmp_path)
    record.write_json(tmp_path / record.CONFIG, {"kind": "reproduction", "config": {}})
    with pytest.raises(UserError, match="belongs to a reproduction"):
        record.load_config(tmp_path)


@pytest.mark.parametrize("tree", [{"kind": "run"}, {"kind": "run", "config": 3}])
def test_damaged_config_of_a_run_names_its_file(tmp_path, tree):
    record.write_json(tmp_path / record.CONFIG, tree)
    with pytest.raises(UserError, match=r"config\.json"):
        record.load_config(tmp_path)


def test_identity_names_code_and_versions():
    found = record.identity({"a": 1}, "run", name="x")
    assert found["kind"] == "run" and found["config"] == {"a": 1} and found["name"] == "x"
    assert found["code"]
    assert {"python", "jax", "flax", "optax", "numpy"} <= set(found["versions"])
    json.dumps(found, allow_nan=False)


def test_another_text_under_the_same_name_is_refused(tmp_path):
    identity = {"kind": "run", "config": {"corpus": "my.txt"}}
    record.open_folder(tmp_path, identity | {"corpus": {"sha256": "aa"}}, "run")
    with pytest.raises(UserError, match=r"another text \(sha256 aa there, bb now\)"):
        record.open_folder(tmp_path, identity | {"corpus": {"sha256": "bb"}}, "run")


def test_folder_left_by_a_kill_at_its_first_write_is_taken(tmp_path):
    (tmp_path / "config.json.partial").write_text("{")
    assert record.open_folder(tmp_path, {"kind": "run", "config": {}}, "run") is False
