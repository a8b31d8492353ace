"""Logs -> the tables of the paper: each number against the same number made by hand."""

import math
from pathlib import Path

import claims_tables as made
import numpy as np
import pytest

from normstudy import config, evidence, outcome
from normstudy.errors import UserError
from normstudy.frames import Logs
from normstudy.roles import BRANCH_MATRICES

LAYERS = 3
RUN = config.override(
    config.PRESETS["cpu"], layers=LAYERS, lr=0.001, warmup=0, steps=60, placement="post"
)

# two sublayers of three layers each: geometric mean 2, as 2^(1+1+1+0+2+1) = 2^6
FACTORS = {"norm_factor_post/attn": [2.0, 2.0, 2.0], "norm_factor_post/mlp": [1.0, 4.0, 2.0]}


def probe(step=0, **changes):
    """A row of probes.jsonl: every name that a scalar asks for, in numbers easy on the hand."""
    matrices = [f"{'attn' if kind in 'qkvo' else 'mlp'}.{kind}" for kind in BRANCH_MATRICES]
    found = {
        "step": step,
        "stream_gradient": [6.0, 5.0, 3.0, 1.0],
        "jacobian_to_end": [8.0, 4.0, 2.0],
        "jacobian_to_end_se": [0.8, 0.4, 0.2],
        "jacobian_minus_identity": [9.0, 3.0, 4.0],
        "jacobian_minus_identity_se": [0.9, 0.3, 0.4],
        "skip_gain": [0.125, 0.25, 0.5],
        "similarity": [0.1, 0.2, 0.3, 0.4],
        "cosine_to_next": [0.9, 0.7, 0.8],
        "cosine_to_start": [1.0, 0.8, 0.6, -0.5],
        **FACTORS,
        "branch_share/attn": [1.0, 10.0, 100.0],
        "branch_share/mlp": [10.0, 10.0, 10.0],
        "sigma_update_post/attn": [0.1, 0.1, 0.1],
        "sigma_update_post/mlp": [0.1, 0.4, 0.025],
        "function_update": [0.0, 0.1, 0.2, 0.3],
        "logits_update": 0.07,
        "loss_change": -0.1,
        "loss_change_predicted": -0.25,
        "unigram_kl": 0.02,
        **{f"gradient/{kind}": [2.0, 1.0, 1.0] for kind in matrices},
        **{f"update/{kind}": [0.01, 0.01, 0.01] for kind in matrices},
        **{f"weight/{kind}": [1.0, 2.0, 4.0] for kind in matrices},
        # no branch matrices: no scalar may count them
        "gradient/readout": [1e6],
        "update/embed": [1e6],
        "weight/embed": [1.0],
    }
    return found | changes


def logs(name="post lr 0.001", seed=0, probes=(), losses=(3.0,) * 60, word="stalled", **fields):
    run = config.override(RUN, seed=seed, **fields)
    metrics = [{"step": s, "loss": loss, "seconds": 3.0} for s, loss in enumerate(losses)]
    ended = {"word": word, "step": 50, "best_loss": 2.5, "last_loss": 2.75} if word else {}
    return Logs(name, run, 3.25, 1.0, ("post",), metrics, list(probes), ended)


def tables(*runs, folder="here", **kept):
    return evidence.of(list(runs), Path(folder), **kept)


# ------------------------------------------------------------------------------------ scalars

BY_HAND = {
    "gradient_ratio": 6 / 3,  # x_0 over x_{L-1}, the input of the top block
    "query_gradient_ratio": 2 / 1,
    "down_gradient_ratio": 2 / 1,
    "top_gradient": 1.0,
    "query_share": math.sqrt(2 / 6),  # two of the six branch matrices, all alike
    "jacobian_bottom": 8.0,
    "skip_gain": 0.125,
    "similarity": 0.4,
    "norm_factor": 2.0,
    "branch_share": 10.0,
    "sigma_update": 0.4,
    "sigma_update_mean": 0.1,
    "function_update": 0.3,
    "logits_update": 0.07,
    "update_ratio": 0.01 / 1.0,  # where the weights are smallest
    "loss_change": -0.1,
    "loss_change_predicted": -0.25,
    "edge_ratio": None,  # probed with curvature alone
    "cosine_to_next": 0.7,
    "cosine_to_start": -0.5,
    "minus_identity": math.sqrt((9 + 16) / 2),  # the first block is left out
    "unigram_kl": 0.02,
}


def test_every_scalar_is_computed_by_hand_here():
    assert BY_HAND.keys() == evidence.SCALARS.keys()
    assert made.probe("post").keys() == {"recipe", "lr", "seed", "step", *BY_HAND}


@pytest.mark.parametrize("name", BY_HAND)
def test_scalar_is_the_number_made_by_hand(name):
    found = evidence.SCALARS[name](probe())
    # six or fewer float64 operations each
    assert found is BY_HAND[name] is None or found == pytest.approx(BY_HAND[name], rel=1e-12)
    assert found is None or type(found) is float


def test_standard_errors_are_no_part_of_a_mean():
    changed = probe(**{"norm_factor_post_se/attn": [1e9], "branch_share_se/attn": [1e9]})
    for name in ("norm_factor", "branch_share"):
        assert evidence.SCALARS[name](changed) == pytest.approx(BY_HAND[name], rel=1e-12)


def test_scalar_of_what_was_not_probed_is_none():
    bare = {"step": 0, "cosine_to_next": [1.0], "jacobian_minus_identity": [0.0, 0.0]}
    found = {name: scalar(bare) for name, scalar in evidence.SCALARS.items()}
    known = {"cosine_to_next", "minus_identity"}
    assert {name for name, value in found.items() if value is not None} == known


def test_ratio_over_a_top_gradient_of_0_is_infinite():
    gone = probe(stream_gradient=[1.0, 0.0, 0.0, 0.0])
    assert evidence.SCALARS["gradient_ratio"](gone) == math.inf


def test_geometric_mean_of_a_factor_of_0_is_0():
    gone = probe(**{"branch_share/attn": [0.0, 1.0, 1.0]})
    assert evidence.SCALARS["branch_share"](gone) == 0


def test_mean_of_what_is_no_number_is_no_number():
    """0 would say that nothing moved, of a run in which all of it broke."""
    broken = probe(**{"sigma_update_post/attn": [math.nan, 0.1, 0.1]})
    assert math.isnan(evidence.SCALARS["sigma_update_mean"](broken))


# ------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "name, recipe",
    [
        ("post lr 0.001", "post"),
        ("post+1/sqrt(2L)+warmup lr 0.032", "post+1/sqrt(2L)+warmup"),
        ("post, SGD 0.1 lr 0.1", "post, SGD 0.1"),
        ("a lr b lr 3.2e-4", "a lr b"),
        ("post", "post"),
    ],
)
def test_recipe_is_the_arm_without_its_rate(name, recipe):
    assert evidence.recipe(logs(name)) == recipe


def test_row_of_a_run_says_what_it_was_and_what_became_of_it():
    (row,) = tables(logs(seed=4, optimizer="sgd", warmup=7, schedule="cosine", width=64))["runs"]
    assert row == {
        "recipe": "post", "lr": 0.001, "seed": 4, "placement": "post", "layers": 3, "width": 64,
        "optimizer": "sgd", "schedule": "cosine", "warmup": 7, "steps": 60, "outcome": "stalled",
        "at_step": 50, "best_loss": 2.5, "last_loss": 2.75, "h1": 3.25,
        "minutes": 3.0,  # 60 steps of 3 seconds
    }  # fmt: skip
    assert list(row) == list(made.run("post"))


def test_runs_that_go_on_have_no_row_and_where_none_is_finished_the_folder_is_named():
    going = logs(word="", probes=[probe()])
    found = tables(going, logs(seed=1))
    assert [row["seed"] for row in found["runs"]] == [1]
    assert found["probes"] == []
    with pytest.raises(UserError, match="no run of somewhere"):
        tables(going, folder="somewhere")


def test_every_probe_is_a_row_with_the_key_of_its_run():
    found = tables(logs(probes=[probe(0), probe(10)]), logs("pre lr 0.1", 2, [probe(0)], lr=0.1))
    keys = [(r["recipe"], r["lr"], r["seed"], r["step"]) for r in found["probes"]]
    assert keys == [("post", 0.001, 0, 0), ("post", 0.001, 0, 10), ("pre", 0.1, 2, 0)]


def test_layers_are_kept_of_the_arms_asked_for_at_the_steps_nearest_to_0_and_50():
    steps = [probe(step, similarity=[step] * 4) for step in (0, 10, 40, 59)]
    found = tables(
        logs(probes=steps), logs("pre lr 0.001", probes=steps), layers=["post lr 0.001"]
    )["layers"]
    assert {row["recipe"] for row in found} == {"post"}
    assert [(row["step"], row["layer"]) for row in found] == [
        (step, layer) for step in (0, 59) for layer in range(LAYERS)
    ]
    assert all(row["similarity"] == row["step"] for row in found)
    assert [row["jacobian_to_end"] for row in found[:LAYERS]] == [8, 4, 2]
    assert [row["gradient/attn.q"] for row in found[:LAYERS]] == [2, 1, 1]


def test_curve_is_the_smoothed_loss_every_tenth_update_and_at_the_last():
    losses = tuple(np.random.default_rng(0).normal(3, 1, 58))
    found = tables(
        logs(losses=losses, probes=[probe(0), probe(1)]),  # twice: looked at closely
        logs(seed=1, losses=losses, probes=[probe(0)]),
        logs("other lr 0.001", losses=losses, probes=[probe(0), probe(1)]),
        curves=["post"],
    )["curves"]
    assert [(row["recipe"], row["seed"]) for row in found] == [("post", 0)] * 7
    assert [row["step"] for row in found] == [0, 10, 20, 30, 40, 50, 57]
    smoothed = outcome.smooth(np.array(losses))
    assert [row["loss"] for row in found] == [smoothed[row["step"]] for row in found]


# ------------------------------------------------------------------------------ to disk and back


def back(folder, rows):
    evidence.write(folder, {"made": rows})
    return evidence.read(folder, "made")


def test_numbers_and_what_is_none_come_back_from_the_file(tmp_path):
    rows = [
        {"seed": 1, "b": 2.0, "c": None, "d": math.inf, "e": "post, embedding 0.02"},
        {"seed": -3, "b": 1e-30, "c": 2.5, "d": -math.inf, "e": 'say "x" & more,\nx_L'},
    ]
    found = back(tmp_path / "new" / "folder", rows)
    assert found == rows
    assert [type(value) for value in found[0].values()] == [int, float, type(None), float, str]


def test_what_is_no_number_comes_back_as_such(tmp_path):
    (row,) = back(tmp_path, [{"a": math.nan, "b": 1}])
    assert math.isnan(row["a"]) and row["b"] == 1


def test_nine_digits_of_a_float_come_back(tmp_path):
    values = np.random.default_rng(0).lognormal(0, 20, 50)
    found = back(tmp_path, [{"x": float(value)} for value in values])
    assert [row["x"] for row in found] == pytest.approx(values, rel=5e-9)
    again = back(tmp_path, found)
    assert again == found  # a table that was read is written as it was


def test_table_without_rows_leaves_no_old_file_behind(tmp_path):
    evidence.write(tmp_path, {"made": [{"a": 1}], "other": [{"b": 2}]})
    evidence.write(tmp_path, {"made": []})
    assert not (tmp_path / "made.csv").exists()
    assert evidence.read(tmp_path, "other") == [{"b": 2}]


def test_file_that_is_missing_is_named_with_what_writes_it(tmp_path):
    with pytest.raises(UserError, match=r"runs\.csv does not exist: experiments/claims\.py"):
        evidence.read(tmp_path, "runs")


def test_tables_of_runs_come_back_as_they_were(tmp_path):
    own = tables(logs(probes=[probe(0), probe(10)]), curves=["post"], layers=["post lr 0.001"])
    evidence.write(tmp_path, own)
    for name, rows in own.items():
        found = evidence.read(tmp_path, name)
        assert [list(row) for row in found] == [list(row) for row in rows]
        for old, new in zip(rows, found, strict=True):
            # nine digits
            assert new == {
                k: pytest.approx(v, rel=5e-9) if isinstance(v, float) else v for k, v in old.items()
            }
