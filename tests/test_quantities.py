"""Every number that is logged has a line that says what it is."""

import pytest

from normstudy import quantities, record
from normstudy.quantities import QUANTITIES


@pytest.mark.parametrize(
    "name, parts",
    [
        ("rms", ("rms", "")),
        ("jacobian_to_end_se", ("jacobian_to_end", "se")),
        ("jacobian_of_sublayer/attn", ("jacobian_of_sublayer", "attn")),
        ("jacobian_of_sublayer_se/mlp", ("jacobian_of_sublayer", "se/mlp")),
        ("norm_factor_post/attn", ("norm_factor", "post/attn")),
        ("norm_factor_pre_q/attn", ("norm_factor", "pre_q/attn")),
        ("gradient/attn.post.scale", ("gradient", "attn.post.scale")),
        ("skip_gain_se", ("skip_gain", "se")),
        ("skip_gain_cut/attn", ("skip_gain_cut", "attn")),  # not a part of skip_gain
        ("sharpness_adam_residual", ("sharpness_adam", "residual")),
        ("loss_change_predicted", ("loss_change_predicted", "")),
        ("sigma_max_of_norm_pre/mlp", ("sigma_max_of_norm", "pre/mlp")),
    ],
)
def test_name_in_the_logs_is_a_quantity_and_a_part(name, parts):
    assert quantities.split(name) == parts
    assert quantities.of(name) is QUANTITIES[parts[0]]


@pytest.mark.parametrize("name", ["", "se", "rmsx", "norm", "attn/rms", "gradients/attn.q"])
def test_name_without_a_line_is_refused(name):
    with pytest.raises(KeyError, match=r"no line in quantities\.py"):
        quantities.of(name)


def test_every_number_of_a_probe_row_has_a_line(finished):
    for row in record.read_rows(finished[1] / record.PROBES):
        names = set(row) - {"step"}
        groups = {quantities.of(name).group for name in names}
        assert groups == {"stream", "gradient", "jacobian", "update"}


def test_lines_are_whole_and_of_the_kinds_that_the_tables_know():
    for name, quantity in QUANTITIES.items():
        assert quantity.kind in ("exact", "sampled", "lower bound"), name
        assert quantity.unit in ("1", "nats"), name
        assert quantity.text and "\n" not in quantity.text, name
        assert "the same" not in quantity.text, f"{name}: a line is read alone"
    texts = [quantity.text for quantity in QUANTITIES.values()]
    assert len(set(texts)) == len(texts)


def test_groups_are_those_of_the_lines_and_the_two_checks():
    assert set(quantities.GROUPS) == {q.group for q in QUANTITIES.values()} | {"wiring", "finite"}
    assert len(set(quantities.GROUPS)) == len(quantities.GROUPS)
