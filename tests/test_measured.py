"""Tables of a probe: every number once, with its layer, unit and error, and what it means."""

import csv
import io
import json

import numpy as np
import pytest
import tiny

from normstudy import cli, frames, measured, quantities
from normstudy.errors import UserError
from normstudy.measured import Findings, Measured

L = 3


def probed(label="run step 4", scale=1.0, depth=L, layers=None, **changes) -> Measured:
    """A probe of three layers with one quantity of each shape and kind; scale multiplies values."""
    values = {
        "probe_loss": np.array(2.5),
        "rms": np.arange(1.0, depth + 2),
        "jacobian_to_end": np.linspace(2, 1, depth),
        "norm_factor_post/attn": np.full(depth, 0.5),
        "weight/attn.q": np.arange(depth) + 3.0,
        "weight/embed": np.array(7.0),
        "sigma_max_to_end": np.array([9.0, 8.0]),
        "sharpness": np.array(30.0),
    }
    plain = {
        "label": label,
        "step": 4,
        "run": tiny.run(layers=depth),
        "layers": tuple(range(depth)) if layers is None else layers,
        "facts": {"text": "kjv", "vectors": 4},
        "values": {name: np.asarray(scale * value) for name, value in values.items()},
        "errors": {"jacobian_to_end": np.full(depth, 0.25)},
        "residuals": {"sigma_max_to_end": np.array([0.05, 0.5]), "sharpness": np.array(0.125)},
        "where": {"sigma_max_to_end": np.array([0, depth - 1])},
        "findings": {},
    }
    return Measured(**(plain | changes))


def numbers(table) -> dict:
    return {(row["quantity"], row["layer"]): (row["value"], row["error"]) for row in table}


def test_long_table_has_every_number_once_with_its_error():
    table = measured.long_table([probed()])
    found = numbers(table)
    assert len(found) == len(table) == 2 + 1 + (L + 1) + 3 * L + 2
    assert found["probe_loss", None] == (2.5, None)
    assert found["rms", 3] == (4.0, None)  # the stream x_L
    assert found["jacobian_to_end", 1] == (1.5, 0.25)
    assert found["weight/embed", None] == (7.0, None)
    assert found["sigma_max_to_end", 0] == (9.0, 0.05)  # a residual, at its own layers
    assert found["sigma_max_to_end", 2] == (8.0, 0.5)
    assert found["sharpness", None] == (30.0, 0.125)
    kinds = {row["quantity"]: (row["kind"], row["unit"]) for row in table}
    assert kinds["jacobian_to_end"] == ("sampled", "1")
    assert kinds["sharpness"] == ("lower bound", "nats")


def test_layers_that_were_not_asked_for_are_left_out():
    found = numbers(measured.long_table([probed(layers=(0, 2))]))
    assert {layer for name, layer in found if name == "rms"} == {0, 2}  # nor x_L
    assert {layer for name, layer in found if name == "weight/attn.q"} == {0, 2}
    assert found["weight/attn.q", 2] == (5.0, None)


def test_csv_is_tidy_and_gives_every_float32_back():
    own = probed(
        values={"rms": np.array([1 / 3, 1e-30, 3e38, 0.1], np.float32)}, errors={}, where={}
    )
    text = frames.to_csv(measured.long_table([own, probed("other step 4")]))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert list(rows[0]) == [
        "checkpoint", "step", "quantity", "layer", "value", "error", "kind", "unit"
    ]  # fmt: skip
    assert {row["checkpoint"] for row in rows} == {"run step 4", "other step 4"}
    assert all(None not in row and None not in row.values() for row in rows)  # no ragged line
    found = [np.float32(row["value"]) for row in rows[:4]]
    np.testing.assert_array_equal(found, own.values["rms"])
    assert rows[0]["error"] == ""


def test_json_has_units_kinds_layers_and_errors():
    found = json.loads(cli.as_json(measured.as_dict(probed())))
    assert (found["checkpoint"], found["step"], found["findings"]) == ("run step 4", 4, {})
    assert found["facts"] == {"text": "kjv", "vectors": 4}
    jacobian = found["quantities"]["jacobian_to_end"]
    assert jacobian == {
        "group": "jacobian", "unit": "1", "kind": "sampled",
        "text": quantities.of("jacobian_to_end").text,
        "layers": [0, 1, 2], "values": [2.0, 1.5, 1.0], "errors": [0.25] * 3,
    }  # fmt: skip
    assert found["quantities"]["sigma_max_to_end"]["layers"] == [0, 2]
    assert found["quantities"]["sigma_max_to_end"]["errors"] == [0.05, 0.5]
    loss = found["quantities"]["probe_loss"]
    assert (loss["layers"], loss["values"], loss["errors"]) == ([None], [2.5], None)


def test_json_of_what_is_not_finite_parses():
    own = probed(values={"rms": np.array([np.nan, np.inf, 1, 2])})
    text = cli.as_json(measured.as_dict(own))
    found = json.loads(text, parse_constant=pytest.fail)
    assert found["quantities"]["rms"]["values"] == ["nan", "inf", 1, 2]


def test_text_tells_what_every_quantity_is_and_marks_bounds_and_errors():
    text = measured.text([probed()])
    for name in probed().values:
        assert quantities.of(name).text in text, name
    assert "text: kjv" in text and "vectors: 4" in text
    assert "1.500 ±0.2" in text
    assert ">= 9 (residual 0.05)" in text and ">= 30 (residual 0.1)" in text
    assert "[sampled]" in text and "[lower bound]" in text and "in nats" in text
    lines = text.splitlines()
    (head,) = [line for line in lines if line.startswith("layer") and "rms" in line]
    below = lines[lines.index(head) + 1 :][: L + 1]
    assert [line.split()[0] for line in below] == ["0", "1", "2", "3"]


def test_text_of_several_checkpoints_shows_scalars_side_by_side():
    text = measured.text([probed(), probed("run step 8", scale=2.0)])
    (loss,) = [line for line in text.splitlines() if line.startswith("probe_loss  ")]
    assert loss.split()[1:] == ["nats", "2.5", "5"]


def test_findings_are_told_in_text_and_json_and_beside_another():
    finding = Findings(["all is well"], [{"layer": "all 3", "wired as": "post"}], True)
    own = probed(findings={"wiring": finding})
    assert "wiring: all is well" in measured.text([own]) and "all 3" in measured.text([own])
    found = json.loads(cli.as_json(measured.as_dict(own)))["findings"]["wiring"]
    assert found == finding._asdict()
    assert measured.side_by_side(own, own).count("wiring: all is well") == 2


def test_against_has_the_ratio_of_the_second_over_the_first():
    a, b = probed("a step 4"), probed("b step 4", scale=2.5)
    scalars, layered = measured.against(a, b)
    assert {name for name, _ in layered} == set(a.layered())
    for name, rows in layered:
        assert [row["ratio"] for row in rows] == ["2.5"] * len(rows), name
        assert [int(row["layer"]) for row in rows] == [layer for layer, _ in a.by_layer(name)]
    (loss,) = [row for row in scalars if row["quantity"] == "probe_loss"]
    assert (loss["a step 4"], loss["b step 4"]) == ("2.5", "6.25")


def test_against_itself_has_two_columns_and_ratio_1():
    scalars, layered = measured.against(probed(), probed())
    for _, rows in layered:
        assert {row["ratio"] for row in rows} == {"1"}
        assert list(rows[0]) == ["layer", "run step 4 (1)", "run step 4 (2)", "ratio"]
    assert list(scalars[0]) == ["quantity", "unit", "run step 4 (1)", "run step 4 (2)"]


def test_ratio_to_zero_is_not_a_number():
    zero = probed(values={"rms": np.zeros(L + 1)})
    _, [(_, rows)] = measured.against(zero, probed("other"))
    assert {row["ratio"] for row in rows} == {"nan"}


def test_against_another_depth_names_both():
    with pytest.raises(UserError, match=r"run step 4 has 3 layers, deep step 4 has 5"):
        measured.against(probed(), probed("deep step 4", depth=5))


def test_norms_of_other_names_stand_in_no_common_row():
    """Pre-norm against post-norm: what only one of them has is left to its own table."""
    values = {"norm_factor_pre/attn": np.ones(L), "rms": np.ones(L + 1)}
    _, layered = measured.against(probed(), probed("pre step 4", values=values))
    assert [name for name, _ in layered] == ["rms"]


def test_layer_tables_split_what_would_be_too_wide():
    matrices = ("gradient/attn.q", "gradient/mlp.up", "weight/attn.q", "weight/mlp.up")
    values = {"stream_gradient": np.ones(L + 1), **{name: np.ones(L) for name in matrices}}
    own = probed(values=values, errors={}, where={})
    tables = {tuple(names): rows for names, rows in measured.layer_tables(own)}
    assert set(tables) == {
        ("stream_gradient", "gradient/attn.q", "gradient/mlp.up"),
        ("weight/attn.q", "weight/mlp.up"),
    }
    rows = tables["weight/attn.q", "weight/mlp.up"]
    assert list(rows[0]) == ["layer", "attn.q", "mlp.up"] and len(rows) == L
    rows = tables["stream_gradient", "gradient/attn.q", "gradient/mlp.up"]
    assert len(rows) == L + 1 and rows[-1]["attn.q"] == ""
