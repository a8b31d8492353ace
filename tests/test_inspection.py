"""normstudy probe: every group, steps, layers, checkpoints side by side; what is wrong is named."""

import csv
import hashlib
import io
import json
import sys

import jax
import numpy as np
import pytest
import tiny

from normstudy import (
    checkpoint,
    cli,
    inspection,
    measured,
    memory,
    quantities,
    record,
    train,
)
from normstudy.errors import OutOfMemory, UserError
from normstudy.inspection import Options


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory):
    """A second run of the same shape, under pre-norm and another seed."""
    folder = tmp_path_factory.mktemp("other") / "run"
    train.train(tiny.run(placement="pre", seed=1, steps=3), folder, "other")
    return folder


@pytest.fixture(scope="module")
def everything(finished):
    """All groups of the finished run at steps 0, 3 and 8, and its files before and after."""
    _, folder, _ = finished
    before = digests(folder)
    options = Options(what=("all",), steps="0,3,8", vectors=2)
    return list(inspection.inspect([folder], options)), before, digests(folder)


@pytest.fixture
def probe(monkeypatch, capsys, no_start):
    """The command: (exit code, stdout, stderr)."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["normstudy", "probe", *map(str, argv)])
        code = 0
        try:
            cli.guarded(cli.dispatch)
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def digests(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_probing_changes_no_file_of_the_run(everything):
    _, before, after = everything
    assert before == after


def test_every_group_is_measured_and_every_name_has_a_line(everything):
    for own in everything[0]:
        groups = {quantities.of(name).group for name in own.values} | own.findings.keys()
        assert groups == set(quantities.GROUPS)
        assert all(np.isfinite(values).all() for values in own.values.values())


def test_every_sampled_number_has_an_error_and_every_bound_a_residual(everything):
    for own in everything[0]:
        for name in own.values:
            kind = quantities.of(name).kind
            assert (name in own.errors) == (kind == "sampled"), name
            assert (name in own.residuals) == (kind == "lower bound"), name


def test_step_0_is_made_again_as_the_run_itself_saw_it(everything, finished):
    run, folder, _ = finished
    first, logged = everything[0][0], record.read_rows(folder / record.PROBES)[0]
    assert first.step == logged["step"] == 0 and "made again" in first.facts["checkpoint"]
    assert run.probe.vectors == 2  # as in the options above: the same vectors
    names = [name for name in first.values if name in logged and not name.startswith("gradient/")]
    assert len(names) > 20
    for name in names:
        # one device against eight, float32
        np.testing.assert_allclose(first.values[name], logged[name], rtol=1e-4, atol=1e-6)


def test_checkpoint_gives_what_the_run_logged_at_its_step(everything, finished):
    _, folder, _ = finished
    at_3 = everything[0][1]
    (logged,) = [row for row in record.read_rows(folder / record.PROBES) if row["step"] == 3]
    for name in ("jacobian_to_end", "jacobian_to_end", "skip_gain", "function_update", "rms"):
        np.testing.assert_allclose(at_3.values[name], logged[name], rtol=1e-4, atol=1e-6)


def test_update_of_the_next_step_is_the_update_that_the_run_made(everything, finished):
    """Step 3 of the run went on from the checkpoint of step 3."""
    _, folder, _ = finished
    (logged,) = [row for row in record.read_rows(folder / record.PROBES) if row["step"] == 3]
    found = everything[0][1].values
    for name in (name for name in logged if name.startswith(("update/", "moved/"))):
        np.testing.assert_allclose(found[name], logged[name], rtol=1e-3, err_msg=name)


def test_largest_singular_value_lies_between_its_frobenius_bounds(everything):
    """|J|_F / sqrt(rank) <= sigma_max <= |J|_F, from two independent estimators."""
    for own in everything[0]:
        T, D = own.run.model.context, own.run.model.width
        norm = own.values["jacobian_of_block"]  # |J|_F^2 = T D norm^2, averaged over sequences
        sigma = own.values["sigma_max_of_block"]
        assert (sigma > norm / 2).all() and (sigma < norm * (T * D) ** 0.5 * 2).all()
        whole = own.values["singular_value/max"]  # of the first sequence alone
        assert (sigma >= whole * (1 - 1e-2)).all()


def test_wiring_agrees_and_all_is_finite(everything):
    for own in everything[0]:
        assert "wired as declared" in own.findings["wiring"].sentences[0]
        assert "finite" in own.findings["finite"].sentences[0]
        assert own.findings["finite"].rows == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [("all", (0, 1, 2, 3, 4)), ("0,1,mid,-2,-1", (0, 1, 2, 3, 4)), ("-1,0, -1", (0, 4))],
)
def test_layers_are_named_from_both_ends(text, expected):
    assert inspection.layers_of(text, 5) == expected


@pytest.mark.parametrize(("text", "says"), [("5", "layers 0 to 4"), ("-6", "0 to 4"), ("x", "'x'")])
def test_layer_that_is_not_there_is_named(text, says):
    with pytest.raises(UserError, match=says):
        inspection.layers_of(text, 5)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"what": ("jacobians",)}, "Did you mean 'jacobian'"),
        ({"vectors": 1}, "at least 2"),
        ({"batches": 0}, "batches must be positive"),
        ({"tolerance": -1.0}, "tolerance must be positive"),
    ],
)
def test_bad_options_are_named(change, says):
    with pytest.raises(UserError, match=says):
        Options(**change)


def test_all_paths_are_looked_at_before_the_first_is_measured(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection._Instruments, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match="holds no checkpoint"):
        list(inspection.inspect([finished[1], tmp_path], Options()))


def test_several_batches_give_every_number_an_error_over_the_text(finished):
    (own,) = inspection.inspect([finished[1]], Options(batches=3, sequences=4, vectors=2))
    assert own.errors.keys() == own.values.keys()
    assert float(own.errors["probe_loss"]) > 0
    assert (own.errors["weight/attn.q"] == 0).all()  # the weights do not depend on the text


def test_text_that_changed_since_the_run_is_refused_but_another_can_be_asked_for(
    finished, tmp_path
):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 200, "utf-8")
    folder = tmp_path / "run"
    train.train(tiny.run(corpus=str(text), steps=1), folder, "moved")
    text.write_text("jumps over the lazy dog " * 200, "utf-8")
    with pytest.raises(UserError, match=r"trained on another text.*--corpus"):
        list(inspection.inspect([folder], Options()))
    (own,) = inspection.inspect([folder], Options(what=("stream",), corpus=str(text)))
    assert own.facts["text"] == str(text)


def test_config_of_another_width_names_the_first_path_and_both_shapes(finished, tmp_path):
    _, folder, _ = finished
    run = record.read_json(folder / record.CONFIG)
    run["config"]["model"]["ff"] = 32
    copy = tmp_path / "run"
    copy.mkdir()
    (copy / "ckpt").symlink_to(folder / "ckpt")
    record.write_json(copy / record.CONFIG, run)
    with pytest.raises(UserError, match=r"mlp/(up|down).*\(2, .*32.*\).*\(2, .*16.*\)"):
        list(inspection.inspect([copy], Options()))


def test_config_of_a_newer_version_is_said_to_be_one(finished, tmp_path):
    tree = record.read_json(finished[1] / record.CONFIG)
    tree["config"]["model"]["rotary"] = True
    tree["versions"]["normstudy"] = "99.0"
    record.write_json(tmp_path / record.CONFIG, tree)
    with pytest.raises(UserError, match=r"rotary.*normstudy 99\.0 wrote it"):
        record.load_config(tmp_path)


def test_what_does_not_fit_says_what_lowers_it(finished, monkeypatch):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(OutOfMemory, match=r"GiB are free; lower --sequences \(now 8\)"):
        list(inspection.inspect([finished[1]], Options()))


def test_error_of_the_backend_becomes_the_same_message():
    with (
        pytest.raises(OutOfMemory, match=r"RESOURCE_EXHAUSTED: 3 GiB.*buy more"),
        memory.told("buy more"),
    ):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB\nat line 3")
    with pytest.raises(jax.errors.JaxRuntimeError), memory.told("buy more"):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_damaged_checkpoint_is_one_message(finished, tmp_path, probe):
    _, folder, _ = finished
    copy = tmp_path / "run"
    (copy / "ckpt").mkdir(parents=True)
    (copy / record.CONFIG).write_bytes((folder / record.CONFIG).read_bytes())
    for path in (folder / "ckpt" / "3").rglob("*"):
        target = copy / "ckpt" / "3" / path.relative_to(folder / "ckpt" / "3")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes() if path.suffix else path.read_bytes()[:10])
    assert checkpoint.steps(copy) == [3]
    code, out, err = probe(copy)
    assert code == 2 and out == ""
    assert err.startswith("error: checkpoint 3 of") and "Traceback" not in err


def test_json_has_units_kinds_layers_and_errors(finished, probe):
    code, out, _ = probe(finished[1], "--layers", "-1", "--vectors", "2", "--format", "json")
    (found,) = json.loads(out)
    assert code == 0
    jacobian = found["quantities"]["jacobian_to_end"]
    assert jacobian["layers"] == [1] and jacobian["kind"] == "sampled"
    assert len(jacobian["values"]) == len(jacobian["errors"]) == 1
    assert found["quantities"]["probe_loss"]["unit"] == "nats"
    assert found["quantities"]["probe_loss"]["errors"] is None


def test_csv_has_one_row_a_number(finished, probe):
    code, out, _ = probe(finished[1], "--what", "stream,jacobian", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    (row,) = [r for r in rows if r["quantity"] == "skip_gain" and r["layer"] == "1"]
    assert float(row["value"]) > 0 and float(row["error"]) >= 0 and row["kind"] == "sampled"
    assert {r["layer"] for r in rows if r["quantity"] == "rms"} == {"0", "1", "2"}  # x_L too


def test_table_explains_every_column_and_marks_bounds(finished, probe):
    code, out, _ = probe(finished[1], "--what", "stream,spectrum,curvature", "--step", "3")
    assert code == 0
    for name in ("rms", "similarity", "sigma_max_of_block"):
        assert quantities.QUANTITIES[name].text in out
    assert "[lower bound]" in out and ">= " in out and "step 3 of tiny" in out


def test_two_runs_side_by_side_have_the_ratio_of_the_second_over_the_first(
    finished, other_seed, probe
):
    code, out, _ = probe(finished[1], "--against", other_seed, "--what", "stream")
    assert code == 0 and "tiny step 8 against other seed 1 step 3" in out
    a, b = inspection.inspect([finished[1], other_seed], Options(what=("stream",)))
    _, tables = measured.against(a, b)
    rows = dict(tables)["rms"]
    expected = [b.values["rms"][i] / a.values["rms"][i] for i in range(3)]
    assert [float(row["ratio"]) for row in rows] == pytest.approx(expected, rel=1e-3)


def test_checkpoints_of_different_depth_do_not_stand_side_by_side(finished, tmp_path, probe):
    train.train(tiny.run(layers=3, steps=1), tmp_path / "run", "deeper")
    code, _, err = probe(finished[1], "--against", tmp_path / "run", "--what", "stream")
    assert code == 2 and "has 2 layers" in err and "has 3" in err


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_picture_comes_with_the_numbers_that_it_draws(
    finished, other_seed, tmp_path, suffix, probe
):
    path = tmp_path / f"probe{suffix}"
    code, _, err = probe(finished[1], other_seed, "--what", "stream,gradient", "--figure", path)
    assert code == 0 and str(path) in err and path.stat().st_size > 5000
    rows = list(csv.DictReader(io.StringIO(path.with_suffix(".csv").read_text("utf-8"))))
    assert {row["checkpoint"] for row in rows} == {"tiny step 8", "other seed 1 step 3"}


@pytest.mark.parametrize("layers", ["all", "0,-1"])
def test_whole_run_is_drawn_over_its_steps(finished, tmp_path, layers, probe):
    path = tmp_path / "run.png"
    code, _, _ = probe(
        finished[1], "--step", "all", "--layers", layers, "--what", "stream", "--figure", path
    )
    assert code == 0
    rows = csv.DictReader(io.StringIO(path.with_suffix(".csv").read_text("utf-8")))
    assert {row["step"] for row in rows} == {"0", "3", "6", "8"}


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--figure", "probe.gif"], "ends in .png, .pdf, .svg"),
        (["--figure", "nowhere/probe.png"], "folder nowhere does not exist"),
        (["--what", "everything"], "unknown quantity group"),
        (["--step", "soon"], "newest, all, or numbers"),
        (["--step", "5"], "no checkpoint at step 5; it has [3, 6, 8]"),
        (["--layers", "0,2"], "layers 0 to 1"),
    ],
)
def test_bad_input_is_said_before_anything_is_measured(finished, argv, says, monkeypatch, probe):
    monkeypatch.setattr(inspection._Instruments, "measure", lambda *_: pytest.fail("measured"))
    code, out, err = probe(finished[1], *argv)
    assert code == 2 and out == "" and says in err and "Traceback" not in err


def test_curvature_of_a_run_by_gradient_descent_has_no_adam_in_it(tmp_path):
    train.train(tiny.run(optimizer="sgd", clip=1.0, steps=1), tmp_path / "run", "sgd")
    (own,) = inspection.inspect([tmp_path / "run"], Options(what=("curvature",)))
    assert own.values.keys() == {"sharpness", "edge_ratio"}
