"""The forward pass: causality, the scan, attention, the nudge, the variants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from normstudy import probes, programs


def attention_by_einsum(attention, x_BTD):
    """Attention written out, to compare with the library's."""
    B, T, D = x_BTD.shape
    heads = (B, T, attention.heads, D // attention.heads)
    q, k, v = ((x_BTD @ w[...]).reshape(heads) for w in (attention.q, attention.k, attention.v))
    logits_BHTS = jnp.einsum("bthk,bshk->bhts", q, k) / jnp.sqrt(jnp.array(heads[-1], q.dtype))
    causal_TS = jnp.tril(jnp.ones((T, T), bool))
    weights_BHTS = jax.nn.softmax(jnp.where(causal_TS, logits_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshk->bthk", weights_BHTS, v).reshape(B, T, D) @ attention.o[...]


def test_token_loss_has_no_gradient_from_later_positions(x64):
    cfg = tiny.model_config(placement="post", layers=3)
    model = tiny.model(cfg, dtype=np.float64)
    batch = tiny.tokens(cfg, 2)
    x0 = model.start(batch[:, :-1])
    nudge = jnp.zeros((cfg.layers + 1, *x0.shape))
    t = 4

    def loss(nudge):
        logits = model.read(model.stack(x0, nudge)[0])[:, t]
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(logits, batch[:, t + 1])
        return losses.sum()

    gradient = np.abs(np.asarray(jax.jit(jax.grad(loss))(nudge)))
    assert (gradient[:, :, t + 1 :] == 0).all()  # exactly: masked, not small
    assert (gradient[:-1, :, : t + 1].max((0, 1, 3)) > 0).all()
    assert (gradient[-1, :, :t] == 0).all()  # above the last block positions no longer mix


@pytest.mark.parametrize("name", tiny.KINDS)
def test_scan_equals_a_python_loop_over_the_layers(name, x64):
    cfg = tiny.model_config(placement=name, layers=3)
    model = tiny.model(cfg, dtype=np.float64)
    x = model.start(tiny.tokens(cfg, 2)[:, :-1])
    top, streams, taps = model.stack(x)
    by_hand, all_taps = [x], []
    for index in range(cfg.layers):
        x, own = tiny.layer(model, index)(x)
        by_hand.append(x)
        all_taps.append(own)
    # the same operations in another program: rounding alone, that of float32, since attention takes
    # its softmax there whatever the dtype (5e-7 seen with jax 0.12); a wrong layer differs by 1
    np.testing.assert_allclose(streams, jnp.stack(by_hand), rtol=0, atol=1e-5)
    np.testing.assert_allclose(top, by_hand[-1], rtol=0, atol=1e-5)
    for sublayer in ("attn", "mlp"):
        for tap in all_taps[0][sublayer]:
            expected = [own[sublayer][tap] for own in all_taps]
            np.testing.assert_allclose(taps[sublayer][tap], expected, rtol=1e-5)


def test_taps_are_variances_and_sigmas_of_every_position(x64):
    cfg = tiny.model_config(placement="deepnorm")
    sublayer = tiny.layer(tiny.model(cfg, dtype=np.float64), 0).mlp
    x = np.random.default_rng(0).normal(size=(2, 3, cfg.width))
    _, taps = sublayer(jnp.asarray(x))
    branch, alpha = np.asarray(sublayer.f(jnp.asarray(x))), (2 * cfg.layers) ** 0.25
    sigma = np.sqrt((alpha * x + branch).var(-1) + cfg.norm_eps)
    gain = np.sqrt((np.asarray(sublayer.sublayer.post.scale[...]) ** 2).mean())
    expected = {
        "branch_variance": branch.var(-1), "skip_variance": (alpha * x).var(-1),
        "inverse_sigma_post": 1 / sigma, "gain_post": gain,
    }  # fmt: skip
    assert taps.keys() == expected.keys()
    for name in taps:
        np.testing.assert_allclose(taps[name], expected[name], rtol=1e-12, err_msg=name)
    found = probes.of_taps({"mlp": jax.tree.map(lambda tap: tap[None], taps)})
    share = branch.var(-1).mean() / (alpha * x).var(-1).mean()
    np.testing.assert_allclose(found["branch_share/mlp"], [share], rtol=1e-12)
    factor = (gain / sigma).mean()
    np.testing.assert_allclose(found["norm_factor_post/mlp"], [factor], rtol=1e-12)


def test_attention_equals_attention_written_out(x64):
    cfg = tiny.model_config(width=12, heads=3)  # K = 4, T = 5, H = 3: no two sizes alike
    attention = tiny.layer(tiny.model(cfg, dtype=np.float64), 0).attn.f
    x = jnp.asarray(3 * np.random.default_rng(0).normal(size=(2, 5, 12)))
    # jax.nn.dot_product_attention takes its softmax in float32 whatever the input: 2^-24 times
    # values of about 10
    np.testing.assert_allclose(attention(x), attention_by_einsum(attention, x), rtol=0, atol=5e-6)


def test_first_position_attends_to_itself_alone(x64):
    cfg = tiny.model_config()
    attention = tiny.layer(tiny.model(cfg, dtype=np.float64), 0).attn.f
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, cfg.width)))
    expected = x[:, :1] @ attention.v[...] @ attention.o[...]
    np.testing.assert_allclose(attention(x)[:, :1], expected, rtol=0, atol=1e-14)


def test_nudge_of_zeros_changes_nothing(x64):
    cfg = tiny.model_config()
    model = tiny.model(cfg, dtype=np.float64)
    inputs = tiny.tokens(cfg, 2)[:, :-1]
    nudge = jnp.zeros((cfg.layers + 1, 2, cfg.context, cfg.width))
    np.testing.assert_array_equal(model(inputs), model(inputs, nudge))


def test_nudge_is_added_to_the_stream_of_its_own_layer(x64):
    cfg = tiny.model_config(layers=3)
    model = tiny.model(cfg, dtype=np.float64)
    x0 = model.start(tiny.tokens(cfg, 2)[:, :-1])
    stack = jax.jit(lambda nudge: model.stack(x0, nudge)[1])
    plain = stack(jnp.zeros((cfg.layers + 1, *x0.shape)))
    push = np.random.default_rng(0).normal(size=x0.shape)
    for at in range(cfg.layers + 1):
        nudge = np.zeros((cfg.layers + 1, *x0.shape))
        nudge[at] = push
        streams = stack(jnp.asarray(nudge))
        np.testing.assert_allclose(streams[:at], plain[:at], rtol=0, atol=1e-13)
        np.testing.assert_allclose(streams[at], plain[at] + push, rtol=0, atol=1e-13)


def test_start_is_the_embedding_times_sqrt_width_plus_position(x64):
    cfg = tiny.model_config()
    model = tiny.model(cfg, dtype=np.float64)
    inputs = tiny.tokens(cfg, 2)[:, :5]
    embed, positions = np.asarray(model.embed[...]), np.asarray(model.positions[...])
    expected = 8**0.5 * embed[inputs] + positions[None, :5]
    np.testing.assert_allclose(model.start(inputs), expected, rtol=0, atol=1e-14)
    other = tiny.model(tiny.model_config(embed_multiplier=2.0), dtype=np.float64)
    expected = 2 * embed[inputs] + positions[None, :5]
    np.testing.assert_allclose(other.start(inputs), expected, rtol=0, atol=1e-14)


def test_tied_readout_is_the_embedding_and_has_no_parameter_of_its_own(x64):
    cfg = tiny.model_config(tied=True)
    model = tiny.model(cfg, dtype=np.float64)
    assert "readout" not in tiny.leaves(model)
    assert "readout" in tiny.leaves(tiny.model(tiny.model_config()))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, cfg.width)))
    np.testing.assert_allclose(model.read(x), x @ model.embed[...].T, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "placement, asked, normed",
    [("pre", None, True), ("post", None, False), ("pre", False, False), ("post", True, True)],
)
def test_final_norm_stands_before_the_readout_as_the_row_says_or_the_config(
    placement, asked, normed, x64
):
    x = jnp.asarray(7 * np.random.default_rng(0).normal(size=(2, 3, 8)))
    cfg = tiny.model_config(placement=placement, final_norm=asked)
    model = tiny.model(cfg, dtype=np.float64)
    assert hasattr(model, "final") == normed
    read = model.final(x) if normed else x
    np.testing.assert_allclose(model.read(x), read @ model.readout[...], rtol=0, atol=1e-13)


def test_relu_and_gelu_are_what_they_say(x64):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 8)))
    for name, by_hand in (
        ("relu", lambda h: np.maximum(h, 0)),
        ("gelu", lambda h: h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))),
    ):
        model = tiny.model(tiny.model_config(activation=name), dtype=np.float64)
        mlp = tiny.layer(model, 0).mlp.f
        expected = by_hand(np.asarray(x @ mlp.up[...])) @ np.asarray(mlp.down[...])
        np.testing.assert_allclose(mlp(x), expected, rtol=0, atol=1e-13)


def test_nothing_is_promoted_silently_in_float32(strict):
    cfg = tiny.model_config()
    model = tiny.model(cfg)
    batch = jnp.asarray(tiny.tokens(cfg, 2))
    unigram = jnp.full(cfg.vocab, 1 / cfg.vocab, jnp.float32)
    measured = jax.eval_shape(
        lambda m, b, u, k: probes.measure(m, b, u, k, 2), model, batch, unigram, jax.random.key(0)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(measured)} == {jnp.dtype("float32")}
    loss, gradients = jax.eval_shape(jax.value_and_grad(programs.token_loss), model, batch)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}


def test_every_parameter_is_float32():
    assert {leaf.dtype for leaf in tiny.leaves(tiny.model(tiny.model_config())).values()} == {
        np.dtype("float32")
    }
