"""normstudy probe: every group, steps, layers, checkpoints side by side; what is wrong is named."""

import csv
import io
import json
import shutil
import sys

import jax
import numpy as np
import pytest

from normstudy import (
    checkpoint,
    cli,
    config,
    data,
    inspection,
    measured,
    memory,
    mesh,
    programs,
    quantities,
    record,
)
from normstudy.errors import OutOfMemory, UserError
from normstudy.inspection import Options
from normstudy.quantities import QUANTITIES

OF_SOME_ROWS = {"skip_factor"}  # post-norm's alpha is 1 and neither learned nor another by layer


def contents(folder) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module", autouse=True)
def alone(finished):
    """One device, as the command takes; the run was on eight."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        yield


@pytest.fixture(scope="module")
def untouched(finished):
    """(files of the run before, {step: all that can be measured}, files after)."""
    _, folder, _ = finished
    before = contents(folder)
    options = Options(what=("all",), steps="0,3", vectors=2)
    found = {own.step: own for own in inspection.inspect([folder], options)}
    return before, found, contents(folder)


@pytest.fixture(scope="module")
def everything(untouched):
    return untouched[1]


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run, to be damaged."""
    return shutil.copytree(finished[1], tmp_path / "run")


@pytest.fixture
def probe(monkeypatch, capsys, no_start):
    """The command with two vectors: (exit code, stdout, stderr)."""

    def call(*argv):
        monkeypatch.setattr(sys, "argv", ["normstudy", "probe", "--vectors", "2", *map(str, argv)])
        code = 0
        try:
            cli.guarded(cli.dispatch)
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def cheap(**changes) -> Options:
    """What needs no program that other tests do not need, too."""
    return Options(**({"what": ("stream",), "vectors": 2} | changes))


def edit(folder, change) -> None:
    """Change config.json in place."""
    tree = json.loads((folder / record.CONFIG).read_text())
    change(tree)
    (folder / record.CONFIG).write_text(json.dumps(tree))


def untrained(finished, folder, name: str, **changes):
    """A run folder that holds a config and nothing else: step 0 is made again from it."""
    run = config.override(finished[0], **changes)
    tree = record.read_json(finished[1] / record.CONFIG)
    folder.mkdir()
    own = json.loads(config.to_json(run))
    record.write_json(folder / record.CONFIG, tree | {"config": own, "name": name})
    return folder


# ------------------------------------------------------------------------- what is measured


def test_probing_leaves_every_file_of_the_run_as_it_was(untouched):
    before, _, after = untouched
    assert any("ckpt" in name for name in before)
    assert after == before


def test_every_group_measures_all_of_its_quantities(everything):
    assert list(everything) == [0, 3]
    for own in everything.values():
        assert {quantities.split(name)[0] for name in own.values} == set(QUANTITIES) - OF_SOME_ROWS
        groups = {quantities.of(name).group for name in own.values} | own.findings.keys()
        assert groups == set(quantities.GROUPS)
        for name, value in own.values.items():
            assert np.isfinite(value).all(), name


def test_every_sampled_number_has_an_error_and_every_bound_a_residual(everything):
    for own in everything.values():
        kinds = {name: quantities.of(name).kind for name in own.values}
        assert set(own.errors) == {name for name in kinds if kinds[name] == "sampled"}
        assert set(own.residuals) == {name for name in kinds if kinds[name] == "lower bound"}
        for name, error in (own.errors | own.residuals).items():
            assert np.shape(error) == np.shape(own.values[name]), name
            assert (error >= 0).all(), name
        for name, residual in own.residuals.items():
            # the tolerance that was asked for
            assert (residual <= 0.01 * own.values[name]).all(), name


@pytest.mark.parametrize("step", [0, 3])
def test_probe_of_a_checkpoint_equals_the_probe_of_the_run(finished, everything, step):
    """The same model, sequences and vectors; and the update that followed. Gradients by matrix are
    of other sequences: the run's are those of its training batch."""
    run, folder, _ = finished
    assert run.probe.vectors == 2  # as in the options above
    (row,) = [r for r in record.read_rows(folder / record.PROBES) if r["step"] == step]
    own, compared = everything[step], set()
    for name, logged in row.items():
        base, _, part = name.partition("/")
        if name == "step" or base == "gradient":
            continue
        found = own.values.get(name)
        if base.endswith("_se"):
            found = own.errors[base.removesuffix("_se") + ("/" + part if part else "")]
        # float32, another program, one device against eight
        np.testing.assert_allclose(found, logged, rtol=1e-4, atol=1e-6, err_msg=name)
        compared.add(quantities.of(name).group)
    assert compared == {"stream", "gradient", "jacobian", "update"}


def test_gradients_are_of_the_held_out_batch(finished, everything):
    """Not of the training batch: together they are the norm of the gradient of the probe's loss."""
    run, folder, _ = finished
    compiled, devices = programs.of(run)
    state = checkpoint.restore(folder, 3, compiled.abstract)
    batch = mesh.put_batch(devices, data.feed(run).probe_batch)
    gradients = jax.jit(jax.grad(programs.token_loss))(state.model, batch)
    total = np.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(gradients)))
    parts = [np.ravel(v) for n, v in everything[3].values.items() if n.startswith("gradient/")]
    np.testing.assert_allclose(np.linalg.norm(np.concatenate(parts)), total, rtol=1e-5)


def test_spectra_agree_with_one_another_and_with_the_norms(everything):
    for own in everything.values():
        values = own.values
        of_block, to_end = values["sigma_max_of_block"], values["sigma_max_to_end"]
        # one sequence of several, and to the tolerance of a bound
        assert (values["singular_value/max"] <= of_block * 1.01).all()
        np.testing.assert_allclose(to_end[-1], of_block[-1], rtol=0.01)
        assert to_end[0] <= 1.02 * np.prod(of_block)
        assert (values["jacobian_of_block"] <= of_block).all()
        assert (values["jacobian_to_end"] <= to_end).all()
        order = [f"singular_value/{part}" for part in ("max", "q90", "median", "q10", "min")]
        assert [name for name in values if name.startswith("singular_value")] == order
        assert (np.diff([values[name] for name in order], axis=0) <= 0).all()
        size = own.run.model.context * own.run.model.width
        assert (values["stable_rank"] >= 1).all() and (values["stable_rank"] <= size).all()
        # |J|_F^2 = T D norm^2, of all sequences; the largest is a part of it
        assert (of_block <= values["jacobian_of_block"] * (8 * size) ** 0.5 * 1.5).all()


def test_loss_falls_as_first_and_second_order_predict(everything):
    """At step 3; at step 0 Adam's first update, a sign for every entry, is too long for either."""
    for own in everything.values():
        assert own.values["loss_change"] < 0 and own.values["loss_change_predicted"] < 0
    actual, first, second = (
        float(everything[3].values["loss_change" + kind]) for kind in ("", "_predicted", "_second")
    )
    assert abs(second - actual) < abs(first - actual) < 0.1 * abs(actual)


def test_float32_loses_no_update_of_a_matrix(everything):
    moved = {n: v for n, v in everything[0].values.items() if n.startswith("moved/")}
    rows = set(moved) - {"moved/embed"}  # of the letters that do not occur
    assert len(rows) > 10
    assert all((moved[name] == 1).all() for name in rows)
    assert 0 < float(moved["moved/embed"]) < 1


def test_checks_find_nothing_wrong_with_the_run(everything):
    for own in everything.values():
        assert own.findings["wiring"].sentences[0].startswith("4 of 4 sublayers wired as declared")
        assert own.findings["finite"].sentences[0].endswith("is finite")
        assert own.findings["finite"].rows == []


def test_facts_say_what_was_opened_and_how(everything):
    assert everything[0].facts["checkpoint"] == "step 0 of tiny (made again from config and seed)"
    assert everything[3].facts["checkpoint"] == "step 3 of tiny"
    assert everything[3].label == "tiny step 3"
    assert everything[3].facts["batches x sequences"] == "1 x 8, held out"


def test_tables_of_everything_define_each_quantity_and_mark_bounds(everything):
    text = measured.text([everything[3]])
    for name, quantity in QUANTITIES.items():
        assert (quantity.text in text) == (name not in OF_SOME_ROWS), name
    bounds = [n for n in everything[3].values if quantities.of(n).kind == "lower bound"]
    cells = sum(np.size(everything[3].values[name]) for name in bounds)
    assert text.count(">= ") == text.count("(residual ") == cells > 5
    assert "[lower bound]" in text


def test_some_layers_are_those_of_the_whole(finished, everything):
    options = cheap(what=("stream", "jacobian"), layers="-1", steps="3")
    (own,) = inspection.inspect([finished[1]], options)
    whole = {(r["quantity"], r["layer"]): r["value"] for r in measured.long_table([everything[3]])}
    table = measured.long_table([own])
    assert {row["layer"] for row in table} == {None, 1}
    for row in table:
        assert row["value"] == whole[row["quantity"], row["layer"]]


def test_several_batches_give_standard_errors_over_them_for_everything(finished):
    """The mean over batches, and the spread of that mean: also of what is exact on one."""
    run, folder, _ = finished
    options = Options(batches=3, sequences=4, vectors=2)
    (own,) = inspection.inspect([folder], options)
    assert own.facts["standard errors over"] == "batches"
    assert own.facts["batches x sequences"] == "3 x 4, held out"
    assert set(own.errors) == set(own.values)
    assert (own.errors["weight/attn.q"] == 0).all()  # the weights do not depend on the text
    compiled, _ = programs.of(run)
    state = checkpoint.restore(folder, 8, compiled.abstract)
    held_out = data.feed(config.override(run, batch=4)).held_out
    losses = [float(compiled.loss(state.model, held_out[i])) for i in range(3)]
    assert len(set(losses)) == 3
    np.testing.assert_allclose(own.values["probe_loss"], np.mean(losses), rtol=1e-5)
    error = np.std(losses, ddof=1) / 3**0.5
    np.testing.assert_allclose(own.errors["probe_loss"], error, rtol=1e-3)


def test_another_text_is_measured_when_it_is_named(finished, everything):
    (own,) = inspection.inspect([finished[1]], cheap(corpus="synthetic", steps="3"))
    assert own.facts["text"] == "synthetic"
    assert own.values["probe_loss"] != everything[3].values["probe_loss"]


def test_checkpoints_of_several_runs_are_told_apart(finished, copy):
    """By name and seed; where these agree, by path."""
    _, folder, _ = finished
    alike = [own.label for own in inspection.inspect([folder, copy], cheap())]
    assert alike == [f"{folder} step 8", f"{copy} step 8"]
    edit(copy, lambda tree: tree.update(name="other"))
    labels = [own.label for own in inspection.inspect([folder, copy], cheap())]
    assert labels == ["tiny step 8", "other step 8"]


def test_singular_values_of_large_blocks_are_left_out_and_said_so(finished, monkeypatch, capsys):
    monkeypatch.setattr(inspection, "WHOLE", 63)
    (own,) = inspection.inspect([finished[1]], cheap(what=("singular-values",)))
    assert own.values == {}
    assert "left out, T x D = 64 is above 63" in capsys.readouterr().err


# --------------------------------------------------------------------------- what is opened


@pytest.mark.parametrize(
    ("below", "asked", "steps"),
    [
        ("", "newest", [8]),
        ("", "all", [0, 3, 6, 8]),
        ("", "6", [6]),
        ("", "8, 0,3,3", [0, 3, 8]),
        ("ckpt", "newest", [8]),
        ("ckpt/3", "newest", [3]),
        ("ckpt/3", "all", [0, 3, 6, 8]),
        ("ckpt/3", "0,6", [0, 6]),
    ],
)
def test_steps_that_are_opened(finished, below, asked, steps):
    folder = finished[1]
    assert inspection._steps(folder / below, asked) == (folder.resolve(), steps)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("5", r"no checkpoint at step 5; it has \[3, 6, 8\]"),
        ("3,5", "no checkpoint at step 5"),
        ("-1", "no checkpoint at step -1"),
        ("last", "--step takes newest, all, or numbers with commas between them, not 'last'"),
        ("3;6", "not '3;6'"),
        ("", "not ''"),
    ],
)
def test_steps_that_are_not_there_are_refused(finished, asked, says):
    with pytest.raises(UserError, match=says):
        inspection._steps(finished[1], asked)


def test_step_0_needs_no_checkpoint(finished, tmp_path):
    folder = untrained(finished, tmp_path / "new", "new")
    assert inspection._steps(folder, "0") == (folder.resolve(), [0])
    with pytest.raises(UserError, match="holds no checkpoint"):
        inspection._steps(folder, "newest")


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("all", (0, 1, 2, 3, 4, 5, 6)),
        ("0,1,mid,-2,-1", (0, 1, 3, 5, 6)),
        ("-1, 6,6", (6,)),
        ("-7", (0,)),
    ],
)
def test_layers_are_named_from_both_ends(text, layers):
    assert inspection.layers_of(text, 7) == layers


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("7", "--layers 7: the model has layers 0 to 6"),
        ("0,-8", "--layers -8: the model has layers 0 to 6"),
        ("top", "takes all, or numbers and mid with commas between them, not 'top'"),
        ("0,,1", "not ''"),
        ("1.5", "not '1.5'"),
    ],
)
def test_layer_that_is_not_there_is_named(text, says):
    with pytest.raises(UserError, match=says):
        inspection.layers_of(text, 7)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"what": ("stream", "spectra")}, "'spectra'. Did you mean 'spectrum'"),
        ({"what": ("",)}, ", ".join(quantities.GROUPS)),
        ({"vectors": 1}, "vectors must be at least 2"),
        ({"batches": 0}, "batches must be positive, not 0"),
        ({"sequences": -2}, "sequences must be positive, not -2"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
    ],
)
def test_options_that_cannot_be_are_refused(option, says):
    with pytest.raises(UserError, match=says):
        Options(**option)


def test_all_paths_are_looked_at_before_the_first_is_measured(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(inspection._Instruments, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match="holds no checkpoint"):
        list(inspection.inspect([finished[1], tmp_path], cheap()))


# -------------------------------------------------------------------------- what is refused


def refusal(folder) -> str:
    with pytest.raises(UserError) as error:
        list(inspection.inspect([folder], cheap()))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_config_of_another_shape_names_the_first_path_and_both_shapes(copy):
    edit(copy, lambda tree: tree["config"]["model"].update(ff=24))
    message = refusal(copy)
    assert "layers/mlp/down" in message or "layers/mlp/up" in message
    assert "24" in message and "16" in message and "attn" not in message


def test_config_of_another_placement_names_what_the_checkpoint_lacks(copy):
    edit(copy, lambda tree: tree["config"]["model"].update(placement="pre"))
    assert "the checkpoint has no model/" in refusal(copy)


def test_field_of_a_newer_version_names_the_versions(copy):
    def newer(tree):
        tree["config"]["model"]["experts"] = 8
        tree["versions"]["normstudy"] = "99.0"

    edit(copy, newer)
    message = refusal(copy)
    assert "'experts'" in message and record.CONFIG in message
    assert "normstudy 99.0 wrote it" in message


def test_field_that_no_version_explains_is_an_unknown_field(copy):
    edit(copy, lambda tree: tree["config"]["model"].update(experts=8))
    message = refusal(copy)
    assert "'experts'" in message and "wrote it" not in message


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "run"}', '{"kind": "x", "config": {}}'])
def test_config_that_is_none_is_a_message(copy, text):
    (copy / record.CONFIG).write_text(text)
    assert record.CONFIG in refusal(copy)


def test_text_that_has_changed_since_the_run_is_refused_unless_it_is_named(finished, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("jumps over the lazy dog " * 200, "utf-8")
    folder = untrained(finished, tmp_path / "moved", "moved", corpus=str(text))
    with pytest.raises(UserError, match=r"trained on another text \(sha256 [0-9a-f]+\).*--corpus"):
        list(inspection.inspect([folder], cheap(steps="0")))
    (own,) = inspection.inspect([folder], cheap(steps="0", corpus=str(text)))
    assert own.facts["text"] == str(text)


@pytest.mark.parametrize("kept", [0, 10])
def test_damaged_checkpoint_is_one_message(copy, probe, kept):
    """Every file of it cut short."""
    for file in (copy / "ckpt" / "8").rglob("*"):
        if file.is_file() and file.name != "_CHECKPOINT_METADATA":
            file.write_bytes(file.read_bytes()[:kept])
    code, out, err = probe(copy, "--what", "stream")
    assert (code, out) == (4, "")
    assert err.startswith("error: checkpoint 8 of") and err.count("\n") == 1


def test_checkpoint_whose_files_are_gone_is_one_message(copy, probe):
    for file in (copy / "ckpt" / "8" / "state").rglob("*"):
        if file.is_file():
            file.unlink()
    code, out, err = probe(copy, "--what", "stream")
    assert (code, out) == (4, "")
    assert err.startswith("error: checkpoint 8 of") and err.count("\n") == 1


def test_what_does_not_fit_says_what_lowers_it_and_is_exit_code_3(finished, monkeypatch, probe):
    monkeypatch.setattr(memory, "available", lambda: 1000)
    code, out, err = probe(finished[1])
    assert (code, out) == (3, "")
    assert "GiB are free; lower --sequences (now 8), or ask for less by --what" in err
    monkeypatch.undo()

    def full(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB\nat line 3")

    monkeypatch.setattr(inspection._Instruments, "_spectrum", full)
    with pytest.raises(OutOfMemory, match=r"RESOURCE_EXHAUSTED: 3 GiB\); lower --sequences"):
        list(inspection.inspect([finished[1]], cheap(what=("spectrum",))))


# -------------------------------------------------------------------------------- the command


def test_json_parses_and_has_units_kinds_layers_and_errors(finished, probe):
    code, out, _ = probe(finished[1], "--layers", "-1", "--format", "json")
    (found,) = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    jacobian = found["quantities"]["jacobian_to_end"]
    assert jacobian["layers"] == [1] and jacobian["kind"] == "sampled"
    assert len(jacobian["values"]) == len(jacobian["errors"]) == 1
    assert found["quantities"]["probe_loss"]["unit"] == "nats"
    assert found["quantities"]["probe_loss"]["errors"] is None


def test_csv_is_tidy_with_one_row_a_number(finished, probe):
    code, out, _ = probe(finished[1], "--what", "stream,jacobian", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    places = [(row["quantity"], row["layer"]) for row in rows]
    assert len(set(places)) == len(places) > 20
    (row,) = [r for r in rows if r["quantity"] == "skip_gain" and r["layer"] == "1"]
    assert float(row["value"]) > 0 and float(row["error"]) >= 0 and row["kind"] == "sampled"
    assert {r["layer"] for r in rows if r["quantity"] == "rms"} == {"0", "1", "2"}  # x_L too


def test_csv_of_what_has_no_numbers_is_refused(finished, probe):
    code, out, err = probe(finished[1], "--what", "wiring", "--format", "csv")
    assert (code, out) == (2, "") and "nothing asked for has numbers" in err


def test_table_explains_what_it_shows(finished, probe):
    code, out, _ = probe(finished[1] / "ckpt" / "3", "--what", "stream,jacobian")
    assert code == 0 and "checkpoint: step 3 of tiny" in out
    for name, quantity in QUANTITIES.items():
        asked = quantity.group in ("stream", "jacobian") and name not in OF_SOME_ROWS
        assert (quantity.text in out) == asked
    assert "[sampled]" in out and "±" in out


def test_two_runs_side_by_side_have_the_ratio_of_the_second_over_the_first(
    finished, tmp_path, probe
):
    other = untrained(finished, tmp_path / "pre", "other", placement="pre", seed=1)
    code, out, _ = probe(finished[1], "--against", other, "--what", "stream", "--step", "0")
    assert code == 0 and "tiny step 0 against other seed 1 step 0" in out
    a, b = inspection.inspect([finished[1], other], cheap(steps="0"))
    _, tables = measured.against(a, b)
    expected = [f"{b.values['rms'][i] / a.values['rms'][i]:.4g}" for i in range(3)]
    assert [row["ratio"] for row in dict(tables)["rms"]] == expected
    shown = out.split("rms: ")[1].split("\n\n")[1].splitlines()
    assert [line.split()[-1] for line in shown] == ["ratio", *expected]


def test_checkpoint_beside_itself_has_ratio_1(finished, probe):
    code, out, _ = probe(finished[1], "--against", finished[1], "--what", "stream,jacobian")
    assert code == 0
    rows = [line for line in out.splitlines() if line[:1].isdigit()]
    assert len(rows) > 10 and {line.split()[-1] for line in rows} == {"1"}
    assert "tiny step 8 (1)" in out and "tiny step 8 (2)" in out


def test_checkpoints_of_different_depth_do_not_stand_side_by_side(finished, tmp_path, probe):
    deep = untrained(finished, tmp_path / "deep", "deeper", layers=3)
    code, out, err = probe(
        finished[1], "--against", deep, "--what", "wiring", "--step", "0"
    )  # fmt: skip
    assert (code, out) == (2, "")
    assert "tiny step 0 has 2 layers, deeper step 0 has 3" in err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "run", "--against", "run"], "give one PATH beside it"),
        (["run", "--against", "run", "--step", "0,3"], "compares one step with one step"),
    ],
)
def test_against_takes_two_checkpoints(finished, argv, says, probe):
    argv = [finished[1] if word == "run" else word for word in argv]
    code, out, err = probe(*argv, "--what", "wiring")
    assert (code, out) == (2, "") and says in err


def test_picture_comes_with_the_numbers_that_it_draws(finished, copy, tmp_path, probe):
    edit(copy, lambda tree: tree.update(name="other"))
    path = tmp_path / "probe.png"
    code, _, err = probe(finished[1], copy, "--what", "stream,jacobian", "--figure", path)
    assert code == 0 and f"figure: {path}" in err and path.stat().st_size > 5000
    rows = list(csv.DictReader(io.StringIO(path.with_suffix(".csv").read_text("utf-8"))))
    assert {row["checkpoint"] for row in rows} == {"tiny step 8", "other step 8"}


@pytest.mark.parametrize("layers", ["all", "0,-1"])
def test_whole_run_is_drawn_over_its_steps(finished, tmp_path, layers, probe):
    path = tmp_path / "run.pdf"
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
