"""What every row of the placements table must keep. A new row is tested by standing there."""

import inspect
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from normstudy import placements, programs, tables, wiring
from normstudy.errors import UserError
from normstudy.placements import PLACEMENTS, Placement
from normstudy.theory import no_constants

every_row = pytest.mark.parametrize("name", list(PLACEMENTS))


@pytest.fixture(scope="module", params=list(PLACEMENTS))
def stepped(request):
    """(config, times traced, gradients, model before) of two jitted updates of a row, by SGD."""
    cfg = tiny.model_config(placement=request.param)
    transform = optax.identity()
    traced = []

    @jax.jit
    def step(state, batch, lr):
        traced.append(1)
        new, _, (gradients, _) = programs.update(state, batch, lr, transform=transform)
        return new, gradients

    model = tiny.model(cfg)
    state = programs.State(jnp.int32(0), jnp.bool(True), model, transform.init(model))
    for seed in (1, 2):
        state, gradients = step(state, tiny.tokens(cfg, 4, seed), jnp.float32(0.1))
    return cfg, len(traced), gradients, model


def physical_lines(name: str) -> list[str]:
    source = inspect.getsource(placements)
    return [line for line in source.splitlines() if line.strip().startswith(f'"{name}":')]


@every_row
def test_row_s_equation_is_one_physical_line(name):
    """And the MLP's one more, where it has one of its own."""
    lines = physical_lines(name)
    assert len(lines) == 1
    first, *own = PLACEMENTS[name].text.split("; MLP: ")
    assert f"lambda x, f, n, c: {first}, " in lines[0]
    for text in own:
        assert inspect.getsource(placements).count(f"mlp=lambda x, f, n, c: {text})") == 1


@every_row
def test_equation_text_is_the_equation(name):
    place = PLACEMENTS[name]
    norms = SimpleNamespace(
        **{n: lambda h, on=1.0, k=k: on * (k + 2) * h**3 for k, n in enumerate(place.norms)}
    )
    numbers = place.constants(48).at(3, 1)._asdict() | dict.fromkeys(place.gains, 0.7)
    c = SimpleNamespace(**numbers)

    def f(h, mid=1.0, heads=()):
        y = mid(h + 5) if callable(mid) else mid * (h + 5)
        return y + sum(norm(h) for norm in heads)

    for text, sublayer in zip(place.text.split("; MLP: ") * 2, placements.SUBLAYERS, strict=False):
        again = eval(f"lambda x, f, n, c: {text}")
        for x in (-0.7, 0.3, 1.9):
            assert again(x, f, norms, c) == place.of(sublayer)(x, f, norms, c)


@every_row
def test_row_has_a_source_with_a_year(name):
    assert re.search(r"\b(19|20)\d\d\b", PLACEMENTS[name].source)


@every_row
def test_readme_has_the_row(name):
    """Word for word; test_readme.py holds the whole table to the code."""
    readme = (tiny.ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.split("<!-- placements -->")[1].split("<!-- /placements -->")[0]
    (row,) = [row for row in placements.as_rows() if row["placement"] == name]
    assert tables.markdown([row]).splitlines()[-1] in table.splitlines()


@every_row
def test_shape_and_dtype_are_kept(name):
    cfg = tiny.model_config(placement=name)
    model = tiny.model(cfg)
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, cfg.width)), dtype)
        y, streams, _ = jax.eval_shape(model.stack, x)
        assert y.shape == x.shape and y.dtype == dtype
        assert streams.shape == (cfg.layers + 1, *x.shape) and streams.dtype == dtype


@every_row
def test_rms_norm_can_stand_in_every_place(name):
    """And has no shift then; a row made of another norm keeps its own."""
    cfg = tiny.model_config(placement=name, norm="rms")
    model = tiny.model(cfg)
    assert jax.eval_shape(model, tiny.tokens(cfg, 2)[:, :-1]).shape == (2, cfg.context, cfg.vocab)
    shifts = [path for path in tiny.leaves(model) if path.endswith("bias")]
    assert bool(shifts) == (PLACEMENTS[name].kind == "tanh")


@pytest.mark.parametrize(
    "name, norm", [*((name, "layer") for name in PLACEMENTS), ("post", "rms"), ("keel", "rms")]
)
def test_wiring_check_agrees_with_the_declaration(name, norm):
    cfg = tiny.model_config(placement=name, norm=norm)
    report = wiring.check_model(tiny.model(cfg), cfg)
    assert report.agrees, report.sentences()
    assert len(report.readings) == 2 * cfg.layers
    told = None if PLACEMENTS[name].kind == "tanh" else PLACEMENTS[name].final_norm
    assert report.final_norm == told


def test_every_declared_norm_gets_gradient_in_every_layer(stepped):
    cfg, _, gradients, _ = stepped
    place = PLACEMENTS[cfg.placement]
    switched = place.constants(cfg.layers)
    for i, (part, sublayer) in enumerate(
        zip(placements.SUBLAYERS, (gradients.layers.attn, gradients.layers.mlp), strict=True)
    ):
        for name in place.norms_of(part):
            on = np.broadcast_to(
                {"pre": switched.before, "post": switched.after}.get(name, 1.0), (cfg.layers, 2)
            )
            for leaf in jax.tree.leaves(getattr(sublayer, name)):
                of_layer = np.linalg.norm(np.asarray(leaf).reshape(cfg.layers, -1), axis=1)
                # a key's shift adds the same to all scores of a query: softmax does not see it
                if name != "k_norm" or leaf.shape != (cfg.layers, cfg.width // cfg.heads):
                    assert ((of_layer > 0) == (on[:, i] > 0)).all(), (part, name)
        for name in place.gains_of(part):
            own = getattr(sublayer, "gain", None) or gradients.layers.gain
            assert (np.abs(np.asarray(getattr(own, name)[...])) > 0).all(), (part, name)
    assert hasattr(gradients, "final") == PLACEMENTS[cfg.placement].final_norm
    if PLACEMENTS[cfg.placement].final_norm:
        assert np.linalg.norm(np.asarray(gradients.final.scale[...])) > 0


def test_second_call_of_the_step_does_not_retrace(stepped):
    assert stepped[1] == 1


def test_only_the_declared_norms_are_there(stepped):
    cfg, _, _, model = stepped
    for part in placements.SUBLAYERS:
        paths = [path.split("/") for path in tiny.leaves(getattr(model.layers, part))]
        assert {path[0] for path in paths if path[-1] == "scale"} == set(
            PLACEMENTS[cfg.placement].norms_of(part)
        )


@pytest.mark.parametrize("name", ["pre", "post", "deepnorm"])
def test_zero_branch_leaves_the_skip_path_of_the_equation(name, x64):
    cfg = tiny.model_config(placement=name)
    place = PLACEMENTS[name]
    model = tiny.model(cfg, dtype=np.float64, jitter=0.0)
    block = tiny.layer(model, 0)
    x = np.random.default_rng(0).normal(size=(2, 3, cfg.width)) * 2 + 1

    def layer_norm(h):
        return (h - h.mean(-1, keepdims=True)) / np.sqrt(h.var(-1, keepdims=True) + cfg.norm_eps)

    norms = SimpleNamespace(**dict.fromkeys(place.norms, layer_norm))
    for sublayer in (block.attn, block.mlp):
        sublayer.f = lambda h, *_: jnp.zeros_like(h)
        found, taps = sublayer(jnp.asarray(x))
        expected = place.equation(x, np.zeros_like, norms, place.constants(cfg.layers))
        # float64, one norm: a few ulp of numbers near 1
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
        np.testing.assert_array_equal(taps["branch_variance"], 0)
    if name == "pre":
        np.testing.assert_array_equal(found, x)
    if name == "post":
        np.testing.assert_allclose(found, layer_norm(x), rtol=0, atol=1e-13)


def test_pre_and_post_differ_in_no_parameter_but_norms():
    shapes = [
        {path: leaf.shape for path, leaf in tiny.leaves(tiny.model(cfg)).items()}
        for cfg in (tiny.model_config(placement="pre"), tiny.model_config(placement="post"))
    ]
    pre, post = (
        {
            path: shape
            for path, shape in found.items()
            if path.split("/")[-1] not in ("scale", "bias")
        }
        for found in shapes
    )
    assert pre == post
    assert len(pre) == 9  # embed, positions, readout, q, k, v, o, up, down
    renamed = {
        path.replace("/pre/", "/post/"): s for path, s in shapes[0].items() if "final" not in path
    }
    assert renamed == shapes[1]


def test_undeclared_norm_is_refused():
    with pytest.raises(ValueError, match="does not declare"):
        Placement(
            lambda x, f, n, c: x + n.post(f(n.pre(x))), ("pre",), True, no_constants, "a source"
        )


def test_declared_but_unused_norm_is_refused():
    with pytest.raises(ValueError, match="declares"):
        Placement(
            lambda x, f, n, c: x + f(n.pre(x)), ("pre", "post"), True, no_constants, "a source"
        )


def test_empty_source_is_refused():
    with pytest.raises(ValueError, match="source"):
        Placement(lambda x, f, n, c: x + f(n.pre(x)), ("pre",), True, no_constants, "")


# fmt: off
PERI = Placement(lambda x, f, n, c: x + n.post(f(n.pre(x))), ("pre", "post"), True, no_constants, "2025")  # noqa: E501
SANDWICH = Placement(lambda x, f, n, c: n.post(x + n.mid(f(n.pre(x)))), ("pre", "mid", "post"), False, no_constants, "2021")  # noqa: E501
TWICE = Placement(lambda x, f, n, c: n.post(c.alpha * n.pre(x) + f(x)), ("pre", "post"), False, no_constants, "none")  # noqa: E501
# fmt: on


@pytest.mark.parametrize(
    "place, crossed",
    [
        (PLACEMENTS["pre"], ()),
        (PLACEMENTS["post"], ("post",)),
        (PLACEMENTS["deepnorm"], ("post",)),
        (PERI, ()),
        (SANDWICH, ("post",)),
        (TWICE, ("pre", "post")),
    ],
)
def test_skip_norms_are_those_that_the_skip_path_crosses(place, crossed):
    assert place.skip_norms == crossed


def test_deepnorm_row_uses_alpha_of_its_depth(x64):
    """The one number by which deepnorm and post differ in the forward pass."""
    cfg = tiny.model_config(placement="deepnorm", layers=3)
    model = tiny.model(cfg, dtype=np.float64, jitter=0.0)
    sublayer = tiny.layer(model, 0).mlp
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, cfg.width)))
    h = 6**0.25 * x + sublayer.f(x)  # alpha = (2 * 3)^(1/4)
    expected = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + cfg.norm_eps)
    np.testing.assert_allclose(sublayer(x)[0], expected, rtol=0, atol=1e-13)


def test_unknown_placement_lists_the_rows():
    with pytest.raises(UserError, match=", ".join(PLACEMENTS)):
        placements.row("club-sandwich")
