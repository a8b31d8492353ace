"""Operations: the fused forms are the plain ones, and attention is what the papers say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from normstudy import operations, programs

SHAPE = (2, 5, 3, 4)  # B T H K


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def queries_keys_values(dtype=jnp.float64, scale=1.0) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(scale * drawn(*SHAPE, seed=seed), dtype) for seed in range(3))


def by_numpy(q, k, v) -> np.ndarray:
    """Softmax attention, one sequence, head and position after the other."""
    y = np.zeros(SHAPE)
    for b, t, h in np.ndindex(*SHAPE[:3]):
        scores = k[b, : t + 1, h] @ q[b, t, h] / np.sqrt(SHAPE[3])
        weights = np.exp(scores - scores.max())
        y[b, t, h] = weights / weights.sum() @ v[b, : t + 1, h]
    return y


def test_attention_is_softmax_over_the_positions_so_far(x64):
    q, k, v = queries_keys_values()
    found = operations.attend(q, k, v)
    np.testing.assert_allclose(found, by_numpy(*map(np.asarray, (q, k, v))), rtol=1e-12)


def test_attention_and_its_gradient_are_those_of_jax():
    """jax.nn.dot_product_attention divides by the softmax's sum before the product with v."""
    qkv = queries_keys_values(jnp.float32)
    cotangent = jnp.asarray(drawn(*SHAPE, seed=9), jnp.float32)
    theirs = lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    for found, expected in zip(
        pulled_back(operations.attend, qkv, cotangent),
        pulled_back(theirs, qkv, cotangent),
        strict=True,
    ):
        # float32: sums of 20 terms of size 1
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def pulled_back(function, arguments, cotangent):
    value, pull = jax.vjp(function, *arguments)
    return [value, *pull(cotangent)]


def test_attention_of_huge_scores_is_finite_with_its_gradient():
    """exp of 1e4 overflows: the largest score of each position is taken off first."""
    qkv = queries_keys_values(jnp.float32, scale=1e2)
    for found in pulled_back(operations.attend, qkv, jnp.ones(SHAPE)):
        assert np.isfinite(found).all()


def test_attention_in_bfloat16_takes_its_softmax_in_float32():
    """Its only rounding is that of what goes in and out, and of the weights: 8 bits each."""
    qkv = queries_keys_values(jnp.bfloat16)
    exact = operations.attend(*(a.astype(jnp.float32) for a in qkv))
    found = operations.attend(*qkv)
    assert found.dtype == jnp.bfloat16
    # q K^-1/2 is exact for K = 4; two roundings of at most 2^-9 beside values of size 1
    np.testing.assert_allclose(found.astype(np.float32), exact, atol=2**-7)


def test_fused_matmul_has_the_values_and_gradients_of_the_plain_one(x64):
    x, w = jnp.asarray(drawn(2, 3, 4)), jnp.asarray(drawn(4, 5, seed=1))
    cotangent = jnp.asarray(drawn(2, 3, 5, seed=2))
    plain = pulled_back(operations.matmul, (x, w), cotangent)
    fused = pulled_back(operations.matmul_fused, (x, w), cotangent)
    for found, expected in zip(fused, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_fused_matmul_gives_float32_weights_a_gradient_that_bfloat16_did_not_round():
    x = jnp.asarray(drawn(64, 8), jnp.bfloat16)
    w = jnp.asarray(drawn(8, 8, seed=1), jnp.float32)
    g = jnp.asarray(drawn(64, 8, seed=2), jnp.bfloat16)
    exact = np.asarray(x, np.float64).T @ np.asarray(g, np.float64)
    worst = {}
    for name, matmul in (("plain", operations.matmul), ("fused", operations.matmul_fused)):
        gradient = pulled_back(matmul, (x, w), g)[2]
        assert gradient.dtype == jnp.float32
        worst[name] = np.abs(np.asarray(gradient) - exact).max()
    # products of two bfloat16 are exact in float32; sums of 64 of them round at 2^-24 of about 30
    assert worst["fused"] < 1e-5 < 1e-3 < worst["plain"]


@pytest.mark.parametrize("placement", tiny.KINDS)
def test_training_step_has_the_gradient_that_probes_take(x64, placement):
    model = tiny.model(tiny.model_config(placement=placement), dtype=np.float64)
    batch = tiny.tokens(model.cfg, 2)

    def gradient(ops):
        def loss(model):
            x = model.stack(model.start(batch[:, :-1]), ops=ops)[0]
            return jnp.sum(model.read(x) ** 2)

        return tiny.leaves(jax.jit(jax.grad(loss))(model))

    plain, fused = gradient(operations.PLAIN), gradient(operations.FUSED)
    for path, expected in plain.items():
        np.testing.assert_allclose(fused[path], expected, rtol=1e-9, atol=1e-12, err_msg=path)


def test_plain_operations_have_forward_mode_derivatives_and_the_fused_matmul_says_it_has_none():
    x, w = jnp.ones((2, 3)), jnp.ones((3, 4))
    _, along = jax.jvp(operations.PLAIN.matmul, (x, w), (x, w))
    np.testing.assert_array_equal(along, 6 * np.ones((2, 4)))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(operations.FUSED.matmul, (x, w), (x, w))


def test_training_in_bfloat16_keeps_parameters_and_loss_in_float32():
    cfg = tiny.model_config(dtype="bfloat16")
    model, batch = tiny.model(cfg), tiny.tokens(cfg, 2)
    loss, gradients = jax.jit(jax.value_and_grad(programs.token_loss))(model, batch)
    wide = programs.token_loss(tiny.model(tiny.model_config()), batch)
    assert loss.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(jnp.float32)}
    assert model.stack(model.start(batch[:, :-1]))[0].dtype == jnp.bfloat16
    # 8 bits in every product: 2^-9 of a loss of log(16), by two blocks
    np.testing.assert_allclose(loss, wide, rtol=1e-2)
    assert loss != wide
