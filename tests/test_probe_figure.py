"""The picture of a probe draws what was measured, and the numbers lie beside it."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from test_measured import probed

from normstudy import frames, probe_figure
from normstudy.errors import UserError
from normstudy.measured import long_table

STEPS = (0, 1, 5, 20)


def along(depth: int) -> list:
    """One run at four steps."""
    return [probed(f"run step {n}", scale=n + 1.0, depth=depth, step=n) for n in STEPS]


@pytest.fixture
def axes():
    canvas, axes = plt.subplots()
    yield axes
    plt.close(canvas)


@pytest.mark.parametrize("kind", probe_figure.KINDS)
def test_picture_is_written_with_the_numbers_that_it_draws_beside_it(tmp_path, kind):
    path = tmp_path / f"probe{kind}"
    probe_figure.check(path)
    found = [probed("a step 4"), probed("b step 4", scale=3.0)]
    probe_figure.draw(found, path)
    start = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}[kind]
    assert path.read_bytes().startswith(start)
    assert (tmp_path / "probe.csv").read_text("utf-8") == frames.to_csv(long_table(found))
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "probe.csv"}
    assert plt.get_fignums() == []  # nothing is left open


@pytest.mark.parametrize("depth", [1, 3, 12], ids=["one layer", "lines", "heat map"])
def test_every_way_of_drawing_gives_a_picture_that_is_not_blank(tmp_path, depth):
    for i, found in enumerate(([along(depth)[0]], along(depth)[:2], along(depth))):
        path = tmp_path / f"{i}.png"
        probe_figure.draw(found, path)
        image = plt.imread(path)[..., :3]
        assert 0.005 < (image < 0.9).any(-1).mean() < 0.7


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
@pytest.mark.parametrize("depth", [3, 12])
def test_dead_run_is_drawn_too(tmp_path, value, depth):
    """Zeros, and what is not finite or not positive: no logarithm is taken of them."""
    dead = {"rms": np.full(depth + 1, value), "jacobian_to_end": np.full(depth, value)}
    found = [probed(f"run step {n}", depth=depth, values=dead, where={}) for n in STEPS]
    probe_figure.draw(found, tmp_path / "dead.png")
    probe_figure.draw(found[:1], tmp_path / "one.png")


def test_layer_has_the_same_colour_and_mark_in_every_panel(axes):
    """Though x_L is drawn in some of them alone."""
    found = along(3)
    marks = {}
    for name in ("rms", "jacobian_to_end", "sigma_max_to_end"):
        axes.clear()
        probe_figure._against_step(axes, found, [name])
        for line in axes.get_lines():
            mark = (line.get_color(), line.get_marker())
            assert marks.setdefault(line.get_label(), mark) == mark
            layer = int(line.get_label().split()[1])
            at = dict(found[0].by_layer(name))[layer]
            np.testing.assert_array_equal(line.get_xdata(), STEPS)
            np.testing.assert_array_equal(line.get_ydata(), [own.values[name][at] for own in found])
    assert list(marks) == ["layer 0", "layer 1", "layer 2", "layer 3"]
    assert len(set(marks.values())) == 4


def test_rows_of_a_heat_map_are_named_by_their_layers(axes):
    found = along(12)
    for name, labels in (("sigma_max_to_end", ["0", "11"]), ("rms", ["0", "3", "6", "9", "12"])):
        axes.clear()
        probe_figure._layer_by_step(axes.figure, axes, found, [name])
        assert [text.get_text() for text in axes.get_yticklabels()] == labels
        assert [text.get_text() for text in axes.get_xticklabels()] == [str(n) for n in STEPS]
        (image,) = axes.images
        np.testing.assert_array_equal(image.get_array()[0], [own.values[name][0] for own in found])


def test_curves_against_the_layer_are_the_values_and_two_standard_errors(axes):
    probe_figure._against_layer(axes, [probed()], "jacobian_to_end")
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2])
    np.testing.assert_array_equal(line.get_ydata(), [2.0, 1.5, 1.0])
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices
    assert heights[:, 1].max() == 2.5 and heights[:, 1].min() == 0.5
    axes.figure.canvas.draw()
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_checkpoints_of_two_depths_share_a_panel(axes):
    probe_figure._against_layer(axes, [probed(), probed("deep step 4", depth=5)], "rms")
    assert [len(line.get_xdata()) for line in axes.get_lines()] == [4, 6]


@pytest.mark.parametrize(
    "name, says",
    [
        ("probe.gif", r"ends in \.png, \.pdf, \.svg"),
        ("probe", r"ends in \.png, \.pdf, \.svg"),
        ("nowhere/probe.png", "nowhere does not exist"),
    ],
)
def test_file_that_could_not_be_drawn_is_refused_beforehand(tmp_path, name, says):
    with pytest.raises(UserError, match=says):
        probe_figure.check(tmp_path / name)


def test_measurements_without_layers_have_no_picture(tmp_path):
    scalars = {"sharpness": np.array(3.0)}
    with pytest.raises(UserError, match="ask for more by --what"):
        probe_figure.draw([probed(values=scalars)], tmp_path / "probe.png")
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_written_is_a_message(tmp_path):
    (tmp_path / "probe.png").mkdir()
    with pytest.raises(UserError, match=r"probe\.png cannot be written"):
        probe_figure.draw([probed()], tmp_path / "probe.png")
    assert plt.get_fignums() == []
