"""What one update does, against the same numbers worked out on two models by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny

from normstudy import anatomy, programs

CFG = tiny.model_config(placement="pre", width=4, heads=2, ff=8, context=3, vocab=5)
L = CFG.layers


@jax.jit
def of_step(model, direction, batch, scale):
    """(model after, updates, all that is found of them) for scale * direction."""
    updates = jax.tree.map(lambda d: scale * d, direction)
    after = optax.apply_updates(model, updates)
    gradients = jax.grad(programs.token_loss)(model, batch)
    found = anatomy.of_update(gradients, updates) | anatomy.effect(model, after, batch)
    half = anatomy.half_curvature(programs.token_loss, model, updates, batch)
    return after, updates, found | {"half": half}


forward = jax.jit(anatomy.forward)


@pytest.fixture
def model(x64):
    return tiny.model(CFG, 1, np.float64)


@pytest.fixture
def batch(x64):
    return tiny.tokens(CFG, 2, 1)


@pytest.fixture
def direction(x64):
    """Random, with entries of about 0.1."""
    return jax.tree.map(lambda leaf: 0.1 * leaf, tiny.model(CFG, 4, np.float64))


def cross_entropy(logits: np.ndarray, batch) -> float:
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, np.asarray(batch)[:, 1:, None], -1).mean()


def sigmas(streams: np.ndarray) -> np.ndarray:
    """Of the norm before attention, whose input is the stream: (L, B, T)."""
    return np.sqrt(streams[:-1].var(-1) + CFG.norm_eps)


def test_effects_of_an_update_are_those_worked_out_on_both_models(model, direction, batch):
    after, updates, found = of_step(model, direction, batch, 1.0)
    a, b = (jax.tree.map(np.asarray, forward(own, batch[:, :-1])) for own in (model, after))

    # float64 twice, the softmax of attention in float32: 1e-7 over changes of about 0.1
    def assert_close(name, by_hand):
        assert np.shape(found[name]) == np.shape(by_hand)
        np.testing.assert_allclose(found[name], by_hand, rtol=1e-5, err_msg=name)

    by_hand = [
        np.linalg.norm(y - x) / np.linalg.norm(x) for x, y in zip(*(a[1], b[1]), strict=True)
    ]
    assert len(by_hand) == L + 1 and min(by_hand) > 0.01
    assert_close("function_update", by_hand)
    assert_close("logits_update", np.linalg.norm(b.logits - a.logits) / np.linalg.norm(a.logits))
    ratio = sigmas(b.streams) / sigmas(a.streams)
    assert ratio.min() < 1 < ratio.max()  # the absolute value matters
    assert_close("sigma_update_pre/attn", abs(ratio - 1).mean((1, 2)))
    ratio = a.taps["mlp"]["inverse_sigma_pre"] / b.taps["mlp"]["inverse_sigma_pre"]
    assert_close("sigma_update_pre/mlp", abs(ratio - 1).mean((1, 2)))
    assert_close("loss_change", cross_entropy(b.logits, batch) - cross_entropy(a.logits, batch))
    gradients = jax.jit(jax.grad(programs.token_loss))(model, batch)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(updates), strict=True)
    assert_close("loss_change_predicted", sum(float((g * u).sum()) for g, u in pairs))
    moved = {name for name in found if name.startswith("moved/")}
    assert moved >= {"moved/attn.q", "moved/mlp.down", "moved/attn.pre.scale", "moved/embed"}
    assert len(moved) == len(jax.tree.leaves(model))
    for name in moved:
        assert_close(name, np.ones(found[name].shape))
        assert found[name].shape == ((L,) if "." in name else ()) or name.startswith("moved/final")


def test_what_the_prediction_leaves_out_is_of_second_order_and_then_of_third(
    model, direction, batch
):
    """Halving the step quarters the gap to the first-order prediction, and divides the gap to the
    second-order one by eight: the derivatives are those of the loss itself."""
    steps = [of_step(model, direction, batch, 2.0**-k)[2] for k in (4, 5, 6)]
    first = np.array([s["loss_change"] - s["loss_change_predicted"] for s in steps])
    second = np.array([s["loss_change"] - s["loss_change_predicted"] - s["half"] for s in steps])
    assert (abs(first) > 5 * abs(second)).all()
    # the next order is still seen, at a sixteenth of the step and below: 4% and 3%
    np.testing.assert_allclose(first[:-1] / first[1:], 4, rtol=0.08)
    np.testing.assert_allclose(second[:-1] / second[1:], 8, rtol=0.08)


def test_update_of_zero_changes_nothing(model, direction, batch):
    _, _, found = of_step(model, direction, batch, 0.0)
    for name, value in found.items():
        if not name.startswith(("gradient/", "weight/")):
            np.testing.assert_array_equal(value, 0, err_msg=name)


def moved(params, updates) -> list[float]:
    after = optax.apply_updates(params, updates)
    return [
        float(leaf.mean()) for leaf in jax.tree.leaves(jax.tree.map(anatomy.moved, params, after))
    ]


def test_updates_below_half_a_unit_in_the_last_place_are_lost_in_bfloat16():
    """Parameters near 1 and a rate of 1e-4: bfloat16 has steps of 1/256 there, float32 of 6e-8."""
    random = np.random.default_rng(0)
    ones = 1 + 0.25 * random.uniform(-1, 1, (32, 32))
    signs = 1e-4 * random.choice([-1.0, 1.0], (32, 32))  # Adam's first update
    for dtype, share in ((jnp.bfloat16, 0), (jnp.float32, 1)):
        params, updates = ({"w": jnp.asarray(own, dtype)} for own in (ones, signs))
        assert moved(params, updates) == [share]


def test_share_that_moved_counts_entries():
    params = {"w": jnp.asarray([1.0, 1.0, 1.0, 1e-3]), "b": jnp.zeros(3)}
    updates = {"w": jnp.asarray([1e-9, 0.0, 1e-3, 1e-9]), "b": jnp.full(3, 1e-30)}
    # 1e-9 is lost beside 1, and not beside 1e-3
    assert moved(params, updates) == [1, 0.5]  # b, w


def test_loss_is_taken_in_float32_from_bfloat16_logits():
    """The change by one update lies far below the 2^-8 that bfloat16 tells apart."""
    model = tiny.model(CFG, 1, jnp.bfloat16)
    logits = jax.eval_shape(anatomy.forward, model, tiny.tokens(CFG, 2)[:, :-1]).logits
    assert logits.dtype == jnp.float32
