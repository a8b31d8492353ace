"""Estimators against exact derivatives, exact identities and another library."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from matfree import stochtrace

from normstudy import config, mesh, probes, programs, roles
from normstudy.norms import layer_norm
from normstudy.probes import BRANCHES

# jax.nn.dot_product_attention takes its softmax in float32 even in float64: two programs of the
# same derivative agree to that
SOFTMAX = 1e-6

CFG = tiny.model_config(width=4, heads=2, ff=8, context=3, vocab=5)
B, T, D, L = 2, 3, 4, 2


def start(seed: int, placement: str = "post"):
    """(model, x_0) in float64."""
    model = tiny.model(dataclasses.replace(CFG, placement=placement), seed, np.float64)
    return model, model.start(tiny.tokens(CFG, B, seed)[:, :-1])


@pytest.fixture
def double(x64):
    """{seed: (model, x_0)} of post-norm in float64."""
    return {seed: start(seed) for seed in (1, 2, 3)}


def nudges(model, x0) -> jax.Array:
    return jnp.zeros((model.cfg.layers + 1, *x0.shape), x0.dtype)


def top(model, x0, nudge, cut=()):
    return model.stack(x0, nudge, cut=cut)[0]


@functools.partial(jax.jit, static_argnames="cut")
def exact_to_end(model, x0, cut=()):
    """sqrt(||d x_L / d x_l||^2 / (B T D)) for each l, from the whole Jacobian."""
    jacobian = jax.jacrev(lambda n: top(model, x0, n, cut))(nudges(model, x0))
    return jnp.sqrt(jnp.sum(jacobian**2, (0, 1, 2, 4, 5, 6)) / x0.size)[:-1]


def exact_norms(model, x0) -> dict[str, np.ndarray]:
    """{part: sqrt(||J||^2 / (B T D)) in each layer}, from the whole Jacobians."""
    whole = tiny.jacobians(model, x0)
    whole["away"] = whole["block"] - np.eye(whole["block"].shape[-1])
    return {part: np.sqrt((own**2).sum((1, 2, 3)) / x0.size) for part, own in whole.items()}


@jax.jit
def repeated_to_end(model, x0, keys):
    """One estimate from 8 vectors for each key."""
    stack = lambda n: top(model, x0, n)
    return jax.vmap(lambda key: probes.jacobian_to_end(stack, nudges(model, x0), key, 8))(keys)


SUBLAYERS = {
    name: lambda block, x, cut, name=name: getattr(block, name)(x, cut=cut)[0] for name in BRANCHES
}


@jax.jit
def repeated_of_parts(model, x0, keys):
    streams = model.stack(x0)[1]
    one = lambda key: (
        probes.descend(SUBLAYERS, model.stacked, streams[:-1], streams[-1], key, 8).of_parts
    )
    return jax.vmap(one)(keys)


def assert_estimates_hold(found: probes.Estimate, exact: np.ndarray) -> None:
    """Mean square within 3 standard errors of the exact one, and the errors are what they say."""
    norms, errors = np.asarray(found.norm), np.asarray(found.se)
    n = len(norms)
    squares, of_squares = norms**2, 2 * norms * errors  # unbiased, unlike the norms themselves
    standard_error = np.sqrt((of_squares**2).sum(0)) / n
    assert (standard_error > 0).all() and (standard_error < 0.05 * exact**2).all()
    assert (abs(squares.mean(0) - exact**2) <= 3 * standard_error).all()
    # the spread of 256 estimates is known to 1 / sqrt(512): 1.25 is five times that, and less than
    # the sqrt(2) by which an error that forgot one of the two sequences would be wrong
    ratio = norms.std(0, ddof=1) / np.sqrt((errors**2).mean(0))
    assert (ratio > 1 / 1.25).all() and (ratio < 1.25).all(), ratio


every_placement_and_seed = lambda test: pytest.mark.parametrize("placement", tiny.KINDS)(
    pytest.mark.parametrize("seed", [1, 2, 3])(test)
)


@every_placement_and_seed
def test_jacobian_to_end_is_the_exact_frobenius_norm(x64, placement, seed):
    model, x0 = start(seed, placement)
    keys = jax.random.split(jax.random.key(seed), 256)
    assert_estimates_hold(repeated_to_end(model, x0, keys), exact_norms(model, x0)["to_end"])


@every_placement_and_seed
def test_jacobian_of_sublayers_and_blocks_is_the_exact_frobenius_norm(x64, placement, seed):
    model, x0 = start(seed, placement)
    keys = jax.random.split(jax.random.key(seed), 256)
    found, exact = repeated_of_parts(model, x0, keys), exact_norms(model, x0)
    assert found.keys() == {"attn", "mlp", "block", "away"}
    for part in found:
        assert_estimates_hold(found[part], exact[part])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_chain_rule_from_the_sublayers_gives_the_jacobian_of_the_whole_stack(double, seed):
    """What the tests call exact, put together by hand, is what jax.jacrev makes of the stack."""
    model, x0 = double[seed]
    exact = exact_norms(model, x0)
    np.testing.assert_allclose(exact["to_end"], exact_to_end(model, x0), rtol=SOFTMAX)
    np.testing.assert_allclose(exact["block"][-1], exact["to_end"][-1], rtol=1e-14)


def test_more_vectors_give_a_smaller_standard_error(x64):
    matrix = jnp.asarray(np.random.default_rng(0).normal(size=(D, D)))
    few, many = (
        probes.jacobian_to_end(
            lambda n: n[0] @ matrix + n[1], jnp.zeros((2, B, T, D)), jax.random.key(0), vectors
        ).se
        for vectors in (16, 1024)
    )
    # sqrt(64) = 8; the error of 16 vectors is itself known to about 1 / sqrt(2 * 15)
    assert 4 < few[0] / many[0] < 16


class FromStream:
    """The model from a given x_0 on: what it measures, and not the tokens, decides."""

    def __init__(self, model, x0):
        self.stack, self.read, self.stacked = model.stack, model.read, model.stacked
        self.start = lambda tokens: x0


@jax.jit
def stream_gradients_both_ways(model, x0, targets):
    """(from the nudge, from the stack cut by hand at each layer)."""

    def loss(x):
        logits = model.read(x)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    def above(x, start):
        for index in range(start, L):
            x = tiny.layer(model, index)(x)[0]
        return loss(x)

    streams = model.stack(x0)[1]
    by_hand = [
        jnp.linalg.norm(jax.grad(above)(streams[start], start).ravel()) for start in range(L + 1)
    ]
    batch = jnp.concatenate([targets[:, :1], targets], 1)
    found = probes.measure(FromStream(model, x0), batch, jnp.ones(5) / 5, jax.random.key(0), 2)
    return found["stream_gradient"], jnp.stack(by_hand)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stream_gradients_are_those_of_the_stack_cut_at_each_layer(double, seed):
    targets = tiny.tokens(CFG, B, seed)[:, 1:]
    found, by_hand = stream_gradients_both_ways(*double[seed], targets)
    assert (by_hand > 0).all()
    np.testing.assert_allclose(found, by_hand, rtol=SOFTMAX)


@pytest.mark.parametrize("placement", tiny.KINDS)
def test_descent_finds_what_the_derivatives_of_the_whole_stack_find(x64, placement):
    """The same vectors, pulled back layer by layer or through the whole at once."""
    model, x0 = start(1, placement)
    batch, key = tiny.tokens(CFG, B, 1), jax.random.key(3)
    found = jax.jit(lambda m, x: probes.measure(FromStream(m, x), batch, jnp.ones(5) / 5, key, 3))(
        model, x0
    )
    for name, cut in (("jacobian_to_end", ()), ("skip_gain", BRANCHES)):
        whole = jax.jit(lambda m, x, cut=cut: probes.skip_gain(m, x, nudges(m, x), key, 3, cut))
        norm, error = whole(model, x0)
        np.testing.assert_allclose(found[name], norm, rtol=SOFTMAX)
        np.testing.assert_allclose(found[f"{name}_se"], error, rtol=1e-4, atol=1e-9)


def of_blocks(block, layers, inputs, vectors) -> probes.Estimate:
    """Jacobian norms of layers that have one part."""
    parts = {"whole": lambda layer, x, cut: block(layer, x)}
    found = probes.descend(parts, layers, inputs, inputs[0], jax.random.key(0), vectors)
    return found.of_parts["block"]


def test_identity_has_norm_exactly_1_and_no_error(x64):
    nudge = jnp.zeros((5, B, T, D))
    found = probes.jacobian_to_end(lambda n: n.sum(0), nudge, jax.random.key(0), 3)
    np.testing.assert_array_equal(found.norm, np.ones(4))
    np.testing.assert_array_equal(found.se, np.zeros(4))
    inputs = jnp.ones((4, B, T, D))
    block = lambda scale, x: scale * x
    found = of_blocks(block, jnp.ones(4), inputs, 3)
    np.testing.assert_array_equal(found.norm, np.ones(4))
    np.testing.assert_array_equal(found.se, np.zeros(4))


def test_signs_on_the_diagonal_are_exact_for_every_vector(x64):
    """Rademacher vectors, unlike Gaussian ones, measure a diagonal without any error."""
    random = np.random.default_rng(0)
    scales = jnp.asarray(random.choice([-1.0, 1.0], (4, D)) * np.array([[1], [2], [4], [0.5]]))
    inputs = jnp.zeros((4, B, T, D))
    block = lambda scale, x: x * scale[None, None]
    found = of_blocks(block, scales, inputs, 3)
    np.testing.assert_array_equal(found.norm, [1, 2, 4, 0.5])
    np.testing.assert_array_equal(found.se, np.zeros(4))


def test_orthogonal_stack_is_exact_for_every_vector(x64):
    random = np.random.default_rng(0)
    turns = jnp.asarray([np.linalg.qr(random.normal(size=(D, D)))[0] for _ in range(4)])

    def stack(nudge):
        x = nudge[0]
        for i in range(4):
            x = x @ turns[i] + nudge[i + 1]
        return x

    to_end = probes.jacobian_to_end(stack, jnp.zeros((5, B, T, D)), jax.random.key(0), 3)
    each = of_blocks(lambda turn, x: x @ turn, turns, jnp.zeros((4, B, T, D)), 3)
    for found in (to_end, each):
        # float64 products of four rotations; the error is the root of a variance of rounding
        np.testing.assert_allclose(found.norm, np.ones(4), rtol=0, atol=1e-14)
        np.testing.assert_allclose(found.se, np.zeros(4), atol=1e-14)


def test_linear_stack_has_the_frobenius_norm_of_its_product(x64):
    """Gains 3 and 1/2: the norm to the end multiplies what lies above."""
    nudge = jnp.zeros((3, B, T, D))
    stack = lambda n: (3.0 * n[0] + n[1]) * 0.5 + n[2]
    found = probes.jacobian_to_end(stack, nudge, jax.random.key(0), 2)
    # the scale is taken out and put back: a rounding or two in float64
    np.testing.assert_allclose(found.norm, [1.5, 0.5], rtol=1e-15)


def test_norms_far_below_the_root_of_the_smallest_float32_are_not_lost():
    """1e-30 squared is 0 in float32: the norm must not go through its square."""
    nudge = jnp.zeros((2, B, T, D))
    stack = lambda n: n[0] * jnp.float32(1e-30) + n[1]
    found = probes.jacobian_to_end(stack, nudge, jax.random.key(0), 2)
    np.testing.assert_allclose(found.norm, [1e-30], rtol=1e-6)
    entries = jnp.full((B, T, D), 1e-30)
    np.testing.assert_allclose(
        probes.frobenius(entries, (0, 1, 2)), 1e-30 * (B * T * D) ** 0.5, rtol=1e-6
    )


def test_squares_of_bfloat16_are_summed_in_float32():
    """1.25^2 * 60 = 93.75 has nine binary digits: one more than bfloat16 holds."""
    nudge = jnp.zeros((2, B, 12, 5), jnp.bfloat16)
    stack = lambda n: n[0] * jnp.bfloat16(1.25) + n[1]
    found = probes.jacobian_to_end(stack, nudge, jax.random.key(0), 2)
    assert found.norm.dtype == jnp.float32
    np.testing.assert_array_equal(found.norm, [1.25])


def test_matfree_finds_the_same_norm(double):
    """An oracle from outside: matfree's Monte-Carlo Frobenius norm on the same Jacobian."""
    model, x0 = double[2]
    stack = lambda x: top(model, x, None)
    transposed = lambda v: jax.vjp(stack, x0)[1](v)[0]
    sampler = stochtrace.sampler_signs(x0, num=2000)
    estimate = stochtrace.estimator_monte_carlo_mean_and_sem(
        stochtrace.monte_carlo_frobeniusnorm_squared(), sampler
    )
    square, error = jax.jit(lambda key: estimate(transposed, key))(jax.random.key(5))
    ours = probes.jacobian_to_end(
        jax.jit(lambda n: top(model, x0, n)), nudges(model, x0), jax.random.key(6), 2000
    )
    theirs, theirs_error = np.sqrt(square / x0.size), error / x0.size / (2 * ours.norm[0])
    both = np.hypot(theirs_error, ours.se[0])
    assert abs(theirs - ours.norm[0]) <= 4 * both
    # the same number of vectors of the same law: the same standard error, to its own noise
    assert 1 / 1.5 < theirs_error / ours.se[0] < 1.5


def test_skip_path_of_post_norm_is_the_product_of_its_layer_norm_jacobians(double):
    model, x0 = double[3]
    found = exact_to_end(model, x0, cut=probes.BRANCHES)

    def layer_norm_jacobian(norm, h):
        """(B, T, D, D) at each position: gamma / sigma (I - 11^T / d - y y^T / d)."""
        centred = h - h.mean(-1, keepdims=True)
        sigma = np.sqrt((centred**2).mean(-1, keepdims=True) + CFG.norm_eps)
        y = centred / sigma
        inner = np.eye(D) - 1 / D - y[..., :, None] * y[..., None, :] / D
        return np.asarray(norm.scale[...])[:, None] / sigma[..., None] * inner

    x, factors = x0, []
    for index in range(L):
        block = tiny.layer(model, index)
        for sublayer in (block.attn, block.mlp):
            norm = sublayer.sublayer.post
            factors.append(layer_norm_jacobian(norm, np.asarray(x + sublayer.f(x))))
            x = sublayer(x)[0]
    for index in range(L):
        product = functools.reduce(lambda below, above: above @ below, factors[2 * index :])
        by_hand = np.sqrt((product**2).sum() / (B * T * D))
        # the factors hold at any input, so only the softmax's float32 enters, through x
        np.testing.assert_allclose(found[index], by_hand, rtol=SOFTMAX)


def test_skip_path_of_pre_norm_is_exactly_1(x64):
    cfg = tiny.model_config(placement="pre", layers=3)
    model = tiny.model(cfg, dtype=np.float64)
    x0 = model.start(tiny.tokens(cfg, B)[:, :-1])
    stack = lambda n: top(model, x0, n, cut=probes.BRANCHES)
    found = probes.jacobian_to_end(stack, nudges(model, x0), jax.random.key(0), 3)
    np.testing.assert_array_equal(found.norm, np.ones(3))
    np.testing.assert_array_equal(found.se, np.zeros(3))


def test_cutting_branches_changes_no_value(double):
    model, x0 = double[1]
    np.testing.assert_array_equal(top(model, x0, None), top(model, x0, None, cut=probes.BRANCHES))


def test_token_similarity_of_equal_vectors_is_1_and_of_orthogonal_ones_0(x64):
    same = jnp.broadcast_to(jnp.asarray([3.0, -1, 2, 0.5]), (1, B, T, D))
    scaled = same * jnp.asarray([1.0, 5, 0.1])[None, None, :, None]
    orthogonal = jnp.broadcast_to(7 * jnp.eye(D)[:T], (1, B, T, D))
    opposite = jnp.broadcast_to(jnp.asarray([1.0, -1])[:, None] * jnp.ones((2, D)), (1, B, 2, D))
    streams = jnp.concatenate([same, scaled, orthogonal])
    np.testing.assert_allclose(probes.token_similarity(streams), [1, 1, 0], rtol=0, atol=1e-14)
    np.testing.assert_allclose(probes.token_similarity(opposite), [-1], rtol=0, atol=1e-14)


def test_token_similarity_is_the_mean_cosine_over_pairs(x64):
    streams = np.random.default_rng(0).normal(size=(2, B, T, D)) + 1
    unit = streams / np.linalg.norm(streams, axis=-1, keepdims=True)
    cosines = np.einsum("sbtd,sbud->sbtu", unit, unit)
    pairs = cosines[:, :, ~np.eye(T, dtype=bool)]
    found = probes.token_similarity(jnp.asarray(streams))
    np.testing.assert_allclose(found, pairs.mean((1, 2)), rtol=1e-13)


def test_a_norm_alone_on_the_skip_path_is_as_far_from_the_identity_as_its_two_lost_directions(x64):
    """J = P / sigma with P a projector of rank D - 2: at sigma 1 |P - 1| is sqrt(2 / D)."""
    x = jax.random.normal(jax.random.key(0), (1, B, T, D))
    x = (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)
    part = {"norm": lambda own, x, cut: own * layer_norm(x, 0.0)[0]}
    found = probes.descend(part, jnp.ones(1), x, x[0], jax.random.key(1), 64).of_parts["away"]
    assert abs(found.norm[0] ** 2 - 2 / D) < 3 * 2 * found.norm[0] * found.se[0]


def test_cosine_of_streams_is_the_mean_over_positions(x64):
    a, b = np.random.default_rng(0).normal(size=(2, 3, B, T, D))
    expected = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    found = probes.cosine(jnp.asarray(a), jnp.asarray(b))
    np.testing.assert_allclose(found, expected.mean((1, 2)), rtol=1e-13)
    of_first = probes.cosine(jnp.asarray(a[:1]), jnp.asarray(a))
    np.testing.assert_allclose(of_first[0], 1, rtol=1e-13)


def test_offset_is_the_mean_over_the_channels_over_their_deviation():
    draw = np.random.default_rng(0).normal(size=(3, 2, 4, 64)).astype(np.float32)
    streams = draw * np.array([1.0, 2.0, 0.5], np.float32).reshape(3, 1, 1, 1) + 6
    mean, deviation = streams.mean(-1), streams.std(-1)
    expected = np.sqrt((mean**2).mean((1, 2)) / (deviation**2).mean((1, 2)))
    # a mean of 6 is 12 deviations here: float32 keeps five digits of them
    np.testing.assert_allclose(probes.offset(jnp.asarray(streams)), expected, rtol=1e-5)
    assert float(probes.offset(jnp.zeros((1, 1, 2, 4)))[0]) == 0.0
    rounded = jnp.asarray(streams, jnp.bfloat16)
    wide = np.asarray(rounded, np.float64)  # what is left of them, and not what rounding adds
    expected = np.sqrt((wide.mean(-1) ** 2).mean((1, 2)) / (wide.std(-1) ** 2).mean((1, 2)))
    np.testing.assert_allclose(probes.offset(rounded), expected, rtol=1e-5)


def test_activation_rms_is_the_root_mean_square():
    streams = np.random.default_rng(0).normal(size=(3, B, T, D)).astype(np.float32) * 5
    expected = np.sqrt((streams.astype(float) ** 2).mean((1, 2, 3)))
    np.testing.assert_allclose(probes.activation_rms(jnp.asarray(streams)), expected, rtol=1e-6)


@pytest.mark.parametrize("mistaken", [0.0, 1.0])
def test_unigram_kl_is_from_the_letter_frequencies_to_the_prediction(x64, mistaken):
    """0 for a model that knows the frequencies and nothing else; else by hand."""
    model = tiny.model(CFG, dtype=np.float64)
    unigram = np.array([0.4, 0.3, 0.0, 0.2, 0.1])  # one byte that the text does not hold
    log_p = np.log([0.4, 0.3, 1e-300, 0.2, 0.1]) + mistaken * np.array([1.0, -1, 2, 0, 0])
    log_p -= np.log(np.exp(log_p).sum())

    class Letters:
        """The tiny model with a head that does not listen."""

        start, stack, stacked = model.start, model.stack, model.stacked

        @staticmethod
        def read(x):
            return jnp.broadcast_to(jnp.asarray(log_p) + 3, (*x.shape[:-1], CFG.vocab))

    batch = tiny.tokens(CFG, 2)

    @jax.jit
    def measured():  # jit drops what is not asked for
        found = probes.measure(Letters, batch, jnp.asarray(unigram), jax.random.key(0), 2)
        return found["unigram_kl"], found["probe_loss"]

    kl, loss = measured()
    seen = unigram > 0
    by_hand = (unigram[seen] * (np.log(unigram[seen]) - log_p[seen])).sum()
    assert (by_hand > 0.1) == bool(mistaken)
    np.testing.assert_allclose(kl, by_hand, rtol=0, atol=1e-12)
    np.testing.assert_allclose(loss, -log_p[np.asarray(batch)[:, 1:]].mean(), rtol=1e-12)


def test_probe_over_eight_devices_equals_the_probe_on_one(wide, monkeypatch):
    run = wide["mixed"]
    batch = np.asarray(tiny.tokens(run.model, 8))
    unigram, key = jnp.full(256, 1 / 256), jax.random.key(3)

    def measured(run, params):
        compiled, devices = programs.of(run)
        placed = mesh.put_batch(devices, batch)
        return jax.device_get(compiled.measure(params, placed, unigram, key)), devices.size

    params = programs.initial_state(run, programs.of(run)[0]).model
    assert not params.layers.mlp.f.up[...].sharding.is_fully_replicated
    spread, devices = measured(run, params)
    assert devices == 8
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    alone, devices = measured(
        config.override(run, data=1, fsdp=1, tensor=1), jax.device_put(params, jax.devices()[0])
    )
    assert devices == 1
    assert spread.keys() == alone.keys()
    for name in alone:
        # float32, sums in another order: 1e-6 a sum, a hundred of them one behind the other
        np.testing.assert_allclose(spread[name], alone[name], rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", ["data", "mixed", "fsdp"])
def test_norms_by_layer_are_the_same_on_every_mesh_and_their_squares_add_up(wide, name):
    """Case: norms counted twice under tensor parallelism."""
    run = wide[name]
    devices = mesh.make(run.mesh, run.data.batch, run.probe.probe_batch)
    params = tiny.model(run.model)
    spread = jax.device_put(params, mesh.state_shardings(devices, params))
    up = spread.layers.mlp.f.up[...]
    assert up.sharding.is_fully_replicated == (name == "data")
    found = jax.device_get(jax.jit(lambda tree: probes.by_layer("weight", tree))(spread))
    squares = sum(np.sum(np.asarray(own, float) ** 2) for own in found.values())
    np.testing.assert_allclose(squares, float(optax.tree.norm(params)) ** 2, rtol=1e-5)
    for path, leaf in tiny.leaves(params).items():
        stacked = path.startswith("layers/")
        by_hand = np.sqrt((leaf.astype(float) ** 2).reshape(2 if stacked else 1, -1).sum(1))
        own = found["weight/" + path.removeprefix("layers/").replace("/", ".")]
        assert own.shape == ((2,) if stacked else ())
        np.testing.assert_allclose(own, by_hand if stacked else by_hand[0], rtol=1e-6)
    assert len(found) == len(jax.tree.leaves(params))


@pytest.mark.parametrize("placement", tiny.KINDS)
def test_norms_by_layer_of_scanned_layers_are_those_of_a_plain_list_of_layers(x64, placement):
    model = tiny.model(dataclasses.replace(CFG, placement=placement), dtype=np.float64)
    by_layer = jax.jit(lambda tree: probes.by_layer("weight", tree))
    scanned = by_layer(model)
    unrolled = [by_layer(tiny.layer(model, i).block) for i in range(L)]
    in_layers = {name for name in scanned if "." in name and not name.startswith("weight/final")}
    assert set(unrolled[0]) == set(unrolled[1]) == in_layers
    assert {name.rpartition(".")[2] for name in in_layers} >= set(roles.BRANCH_MATRICES)
    for name in in_layers:
        # float64, sums in another order
        found = np.array([own[name] for own in unrolled])
        np.testing.assert_allclose(scanned[name], found, rtol=1e-14, err_msg=name)
    squares = sum(np.sum(np.asarray(own) ** 2) for own in scanned.values())
    np.testing.assert_allclose(squares, float(optax.tree.norm(model)) ** 2, rtol=1e-13)
