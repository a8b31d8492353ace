"""The first operation that is not finite: which it is, where it stands, and what is no news."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from normstudy import jaxprs, origin, programs, record

WIDTH, LAYERS = 4, 5


def found(function, *arguments):
    """What find says, as (kind, layer, where, operation, direction)."""
    return [
        (o.kind, o.layer, o.where, o.operation, o.direction)
        for o in origin.find(function, *arguments)
    ]


def stack(layer):
    """(loss of `layer(x, weights, index)` scanned with jax.checkpoint, its arguments)."""

    def body(x, xs):
        return layer(x, *xs), None

    def loss(weights, x):
        layers = (weights, jnp.arange(LAYERS))
        return jax.lax.scan(jax.checkpoint(body, prevent_cse=False), x, layers)[0].sum()

    random = np.random.default_rng(0)
    weights = random.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)
    return loss, (weights, np.ones((2, WIDTH), np.float32))


def plain(x, w, index):
    with jax.named_scope("mlp"):
        return jnp.tanh(x @ w)


# --------------------------------------------------------------------------- in a model


def scaled_to_overflow(cfg, layer):
    """A float16 model and batch in which one mlp/down reaches 7e4."""
    model, batch = tiny.model(cfg, dtype=np.float16), tiny.tokens(cfg, 2)

    @jax.jit
    def largest(model):
        wide = jax.tree.map(lambda w: w.astype(jnp.float32), model)
        x = wide.stack(wide.start(batch[:, :-1]))[1][layer]
        block = tiny.layer(wide, layer)
        return jnp.abs(block.mlp.f(block.attn(x)[0])).max()  # post-norm: no norm before the MLP

    down = model.layers.mlp.f.down
    down[...] = down[...].at[layer].multiply(np.float16(7e4 / largest(model)))
    return model, batch


def test_overflow_in_float16_is_named_and_not_the_nan_that_a_norm_makes_of_it():
    """A T5's feed-forward output of 66246: huggingface/transformers issue 5651."""
    model, batch = scaled_to_overflow(tiny.model_config(placement="post", layers=3), layer=1)
    origins = origin.find(programs.token_loss, model, batch)
    (first,) = origins
    assert (first.kind, first.layer, first.where) == ("inf", 1, "mlp/down")
    assert (first.operation, first.direction, first.dtype) == ("matmul", "forward", "float16")
    assert first.limit == 65504
    # activations in float16, off by up to 2^-11 at each of a dozen roundings
    assert first.magnitude == pytest.approx(7e4, rel=1e-2)
    assert first.then == "layer 1 mlp/norm_post, subtract"
    assert origin.sentence(origins) == (
        "first inf: layer 1 mlp/down, matmul, 7.0e4 above float16's 65504, forward; "
        "NaN appears later in layer 1 mlp/norm_post, subtract"
    )


def test_every_matmul_of_a_model_has_its_place():
    cfg = tiny.model_config(placement="pre")
    program = jax.make_jaxpr(programs.token_loss)(tiny.model(cfg), tiny.tokens(cfg, 2))
    places = []

    def walk(program, place):
        for equation in program.eqns:
            here = place.inside(equation)
            if equation.primitive.name == "dot_general":
                places.append(here.where)
            for held in jaxprs.programs(equation):
                walk(held, here)

    walk(program, jaxprs.Place())
    assert places == [
        "attn/q", "attn/k", "attn/v", "attn/attention", "attn/attention", "attn/o",
        "mlp/up", "mlp/down", "readout",
    ]  # fmt: skip


def test_finite_model_has_no_origin():
    cfg = tiny.model_config()
    assert origin.find(programs.token_loss, tiny.model(cfg), tiny.tokens(cfg, 2)) == []
    assert origin.sentence([]) == "all is finite"


# ------------------------------------------------------------------- forward and backward


def multiplied(sick, g):
    return g * jnp.where(sick, jnp.nan, 1.0), None


def filled(sick, g):
    return jnp.where(sick, jnp.full_like(g, jnp.nan), g), None


def branched(sick, g):
    return jax.lax.cond(sick, lambda g: jnp.full_like(g, jnp.nan), lambda g: g, g), None


@pytest.mark.parametrize("backward", [multiplied, filled, branched])
def test_nan_of_one_layer_s_backward_pass_is_named_and_a_masked_one_is_not(backward):
    """jax-ml/jax issue 475: the layer, and no hit on a NaN that does not reach the output."""

    @jax.custom_vjp
    def poison(x, sick):
        return x

    poison.defvjp(lambda x, sick: (x, sick), backward)

    def layer(x, w, index):
        harmless = jnp.where(index == 1, jnp.nan, 0.0) + jnp.zeros_like(x)
        x = jnp.where(jnp.isnan(harmless), x, x + harmless)
        with jax.named_scope("mlp"):
            return poison(plain(x, w, index), index == 3)

    loss, arguments = stack(layer)
    (first,) = origin.find(jax.grad(loss), *arguments)
    assert (first.kind, first.layer, first.direction) == ("nan", 3, "backward")
    assert origin.find(loss, *arguments) == []


def test_nan_that_the_forward_pass_masks_is_silent():
    def layer(x, w, index):
        root = jax.lax.stop_gradient(jnp.sqrt(x - 100))  # NaN everywhere
        return jnp.where(x > 1e9, root, plain(x, w, index))

    loss, arguments = stack(layer)
    assert origin.find(jax.value_and_grad(loss), *arguments) == []


def test_layer_is_the_position_among_the_layers_in_either_direction():
    loss, (weights, x) = stack(lambda x, w, index: plain(x, w, index) + jnp.log(w[0, 0]))
    weights[:, 0, 0] = 1
    weights[2, 0, 0] = 0
    forward = ("inf", 2, "", "log", "forward")
    assert found(loss, weights, x) == [forward]
    backward = ("inf", 2, "", "divide", "backward")  # of log at 0, whatever the forward pass did
    assert found(jax.grad(loss), weights, x) == [forward, backward]

    def reverse(weights, x):
        body = lambda x, w: (x / w[0, 0], None)
        return jax.lax.scan(body, x, weights, reverse=True)[0].sum()

    assert found(reverse, weights, x) == [("inf", 2, "", "divide", "forward")]


def test_backward_pass_alone_may_overflow():
    """sqrt at 0: the loss is 0, its derivative 1/0."""
    loss, (weights, x) = stack(lambda x, w, index: x + jnp.sqrt(w[0, 0]))
    weights[:, 0, 0] = 1
    weights[4, 0, 0] = 0
    assert found(loss, weights, x) == []
    assert found(jax.grad(loss), weights, x) == [("inf", 4, "", "divide", "backward")]


def test_factor_of_a_derivative_is_no_part_of_the_forward_pass():
    """Without jax.checkpoint jax computes 1 / (2 sqrt(x)) next to sqrt(x)."""

    def norm(x):
        return jnp.sqrt((x * x).sum())

    x = np.zeros(3, np.float32)
    assert found(jax.value_and_grad(norm), x) == [("inf", None, "", "divide", "backward")]

    def scanned(x):
        return jax.lax.scan(lambda c, x: (c + jnp.sqrt(x), None), 0.0, x)[0]

    assert found(jax.grad(scanned), np.array([1, 0, 1], np.float32)) == [
        ("inf", 1, "", "divide", "backward")
    ]


def test_forward_pass_met_again_is_reported_as_such_only_where_it_had_been_fine():
    """A sigmoid written out: 1 / (1 + inf) is 0, its derivative is 0 times inf."""
    loss, (weights, x) = stack(lambda x, w, index: x + 1 / (1 + jnp.exp(w[0, 0])))
    weights[:, 0, 0] = 1
    weights[1, 0, 0] = 1000
    assert found(loss, weights, x) == []
    assert found(jax.grad(loss), weights, x) == [("inf", 1, "", "exp", "recomputed")]


# ------------------------------------------------------------------------- single operations


def test_function_without_layers_is_named_by_its_line_of_code():
    (first,) = origin.find(lambda x: (x / x).sum(), np.zeros(3, np.float32))
    assert (first.kind, first.layer, first.where) == ("nan", None, "")
    assert (first.operation, first.magnitude) == ("divide", 0)
    assert re.fullmatch(r"test_origin\.py:\d+:\d+ \(.*\)", first.source)
    assert first.text() == (f"nan: {first.source}, divide, from float32 inputs up to 0, forward")


def test_log_of_0_that_reaches_the_loss_is_named():
    def loss(p):
        with jax.named_scope("loss"):
            return -jnp.log(p).sum()

    (first,) = origin.find(loss, np.array([0.5, 0, 0.25], np.float32))
    assert (first.kind, first.where, first.operation) == ("inf", "loss", "log")
    assert first.magnitude == 0.5 and first.then is None  # log is inf in any precision


def test_softmax_without_its_maximum_is_named_at_the_exp():
    def softmax(x):
        with jax.named_scope("softmax"):
            e = jnp.exp(x)
            return e / e.sum()

    (first,) = origin.find(softmax, np.array([1, 200], np.float32))
    assert (first.kind, first.operation, first.then) == ("inf", "exp", "softmax, divide")
    assert first.magnitude == pytest.approx(np.exp(200.0))
    assert origin.find(jax.nn.softmax, np.array([1, 200], np.float32)) == []


@pytest.mark.parametrize("dtype, limit", [(np.float32, "3.40282e38"), (jnp.bfloat16, "3.38953e38")])
def test_overflow_tells_what_the_number_would_have_been(dtype, limit):
    w = np.full((WIDTH, WIDTH), 1e30, dtype)
    (first,) = origin.find(lambda w: (w @ w).sum(), w)
    expected = WIDTH * float(w[0, 0]) ** 2
    assert first.magnitude == pytest.approx(expected, rel=1e-12)
    assert f"4.0e60 above {first.dtype}'s {limit}" in first.text()


def test_two_independent_origins_are_both_named_the_earlier_first():
    def loss(x):
        with jax.named_scope("first"):
            a = jnp.log(x)
        with jax.named_scope("second"):
            b = jnp.exp(x + 1e3)
        with jax.named_scope("harmless"):
            c = jnp.exp(-1 / x)
        return a.sum() + b.sum() + c.sum()

    origins = origin.find(loss, np.zeros(2, np.float32))
    assert [o.where for o in origins] == ["first", "second"]
    assert origin.sentence(origins) == f"first {origins[0].text()} (and 1 more)"


def test_blame_follows_entries_not_arrays():
    """NaN at one position that the loss masks; an overflow in the same array at another."""

    def loss(x, mask):
        with jax.named_scope("masked"):
            x = jnp.sqrt(x)
        with jax.named_scope("real"):
            x = x * 1e30
        x = x @ jnp.eye(2) + 1
        return jnp.where(mask, x, 0).sum()

    x = np.array([[-1, 1], [1e20, 1]], np.float32)
    mask = np.array([[False] * 2, [True] * 2])
    assert [o.where for o in origin.find(loss, x, mask)] == ["real"]
    assert [o.where for o in origin.find(loss, x, ~mask)] == ["masked"]
    assert [o.where for o in origin.find(loss, x, mask | True)] == ["masked", "real"]


def test_blame_is_kept_apart_through_the_layers_above():
    """NaN from layer 1 on in sequence 0, inf from layer 3 on in sequence 1."""

    def layer(x, w, index):
        with jax.named_scope("left"):
            left = jnp.where(index == 1, jnp.sqrt(x[0] - 100), jnp.tanh(x[0] @ w))
        with jax.named_scope("right"):
            right = jnp.tanh(x[1] @ w) * jnp.exp(jnp.where(index == 3, 100.0, 0.0))
        return jnp.stack([left, right])

    loss, (weights, x) = stack(layer)

    def masked(keep, weights, x):
        body = lambda x, xs: (layer(x, *xs), None)
        top = jax.lax.scan(body, x, (weights, jnp.arange(LAYERS)))[0]
        return jnp.where(keep[:, None], top, 0).sum()

    left = ("nan", 1, "left", "sqrt", "forward")
    right = ("inf", 3, "right", "exp", "forward")
    keep = np.array([[False, True], [True, False]])
    assert found(masked, keep[0], weights, x) == [right]
    assert found(masked, keep[1], weights, x) == [left]
    assert found(loss, weights, x) == [left, right]


def test_inf_of_an_attention_mask_is_no_origin_unless_a_whole_row_is_masked():
    def attention(logits, mask):
        with jax.named_scope("attention"):
            return jax.nn.softmax(jnp.where(mask, logits, -jnp.inf))

    logits, mask = np.ones((2, 2), np.float32), np.tril(np.ones((2, 2), bool))
    assert origin.find(attention, logits, mask) == []
    (first,) = origin.find(attention, logits, mask & [[False], [True]])
    assert (first.where, first.operation) == ("attention", "select")
    assert first.then == "attention, subtract"


def test_argument_that_is_not_finite_is_its_own_origin_in_its_layer():
    loss, (weights, x) = stack(plain)
    weights[2, 0, 0] = np.nan
    (first,) = origin.find(lambda tree, x: loss(tree["w"], x), {"w": weights}, x)
    assert (first.kind, first.layer, first.where) == ("nan", 2, "w")
    assert first.text() == "nan: layer 2 w, argument"
    assert origin.find(lambda w, x: loss(jnp.nan_to_num(w), x), weights, x) == []


def test_loops_and_branches_are_looked_into():
    def loss(x):
        with jax.named_scope("loop"):
            x = jax.lax.while_loop(lambda x: x < 1e38, lambda x: x * x, x)
        with jax.named_scope("branch"):
            return jax.lax.cond(x > 2e38, jnp.sqrt, lambda x: 1 / (x - x), x)

    assert found(loss, np.float32(2)) == [("inf", None, "loop", "multiply", "forward")]  # 2^128
    assert found(loss, np.float32(1.5e38)) == [("inf", None, "branch", "divide", "forward")]
    assert found(loss, np.float32(1.6e19)) == []  # 2.6e38


def test_operation_with_programs_of_its_own_stays_one_operation():
    solve = lambda x: jnp.linalg.solve(x * 0, jnp.ones(2))
    (first,) = origin.find(solve, np.eye(2, dtype=np.float32))
    assert first.kind == "nan" or first.magnitude <= 1  # 0/0 or 1/0, as the library has it


def test_inputs_on_many_devices_are_copied_and_left_as_they_are():
    devices = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spread = NamedSharding(devices, PartitionSpec("data"))
    x = jax.device_put(np.arange(16.0, dtype=np.float32), spread)
    before = np.array(x)
    assert [o.operation for o in origin.find(lambda x: jnp.log(x).sum(), x)] == ["log"]
    np.testing.assert_array_equal(x, before)
    assert len(x.sharding.device_set) == 8


def test_origins_survive_the_json_of_a_run_folder(tmp_path):
    (first,) = origin.find(lambda x: jnp.log(x), np.float32(0))
    record.write_json(tmp_path / "outcome.json", first.as_dict())
    assert record.read_json(tmp_path / "outcome.json") == first.as_dict()
    assert first.as_dict()["kind"] == "infinite"
