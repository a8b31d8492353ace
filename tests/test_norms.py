"""What a norm computes, against its closed-form derivative and against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normstudy import norms

D = 7
TINY = 1e-30  # epsilon: far below the rounding of a variance near 1


def vector(seed: int = 0) -> jax.Array:
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=D) + 1)


def test_layer_norm_jacobian_is_its_closed_form(x64):
    x = vector()
    y, inverse = norms.layer_norm(x, TINY)
    found = jax.jacrev(lambda x: norms.layer_norm(x, TINY)[0])(x)
    expected = inverse * (jnp.eye(D) - jnp.ones((D, D)) / D - jnp.outer(y, y) / D)
    # float64, a dozen operations on numbers near 1
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)


def test_layer_norm_jacobian_has_two_zero_singular_values_and_the_rest_1_over_sigma(x64):
    x = vector()
    found = jax.jacrev(lambda x: norms.layer_norm(x, TINY)[0])(x)
    singular = np.linalg.svd(np.asarray(found), compute_uv=False)
    sigma = np.asarray(x).std()
    np.testing.assert_allclose(singular[: D - 2], 1 / sigma, rtol=1e-13)
    np.testing.assert_allclose(singular[D - 2 :], 0, atol=1e-14)


def test_layer_norm_epsilon_makes_the_second_zero_epsilon_sized(x64):
    """Along y the derivative is eps / sigma^3, not 0; along 1 it stays 0."""
    x, eps = vector(), 1e-3
    y, inverse = norms.layer_norm(x, eps)
    found = jax.jacrev(lambda x: norms.layer_norm(x, eps)[0])(x)
    np.testing.assert_allclose(found @ y, eps * inverse**3 * y, rtol=0, atol=1e-14)
    np.testing.assert_allclose(found @ jnp.ones(D), jnp.zeros(D), atol=1e-14)


def test_rms_norm_jacobian_has_one_zero_singular_value_and_the_rest_sqrt_d_over_norm(x64):
    x = vector()
    found = jax.jacrev(lambda x: norms.rms_norm(x, TINY)[0])(x)
    singular = np.linalg.svd(np.asarray(found), compute_uv=False)
    expected = np.sqrt(D) / np.linalg.norm(np.asarray(x))
    np.testing.assert_allclose(singular[: D - 1], expected, rtol=1e-13)
    np.testing.assert_allclose(singular[D - 1], 0, atol=1e-14)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_equals_numpy_with_gain_and_bias(x64, kind):
    x = np.random.default_rng(1).normal(size=(2, 3, D)) + 0.5
    norm = norms.Norm(kind, D, 1e-5)
    scale, bias = np.linspace(0.5, 2, D), np.linspace(-1, 1, D)
    norm.scale[...] = jnp.asarray(scale)
    if kind == "layer":
        norm.bias[...] = jnp.asarray(bias)
        centred = x - x.mean(-1, keepdims=True)
        expected = centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + bias
    else:
        expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-13, atol=1e-14)


def test_rms_norm_has_no_bias():
    assert not hasattr(norms.Norm("rms", D, 1e-5), "bias")


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norm_measures_its_inverse_sigma_and_its_gain(x64, kind):
    x = np.random.default_rng(2).normal(size=(2, 3, D)) * 4 + 1
    norm = norms.Norm(kind, D, 1e-5)
    scale = np.linspace(-1, 2, D)
    norm.scale[...] = jnp.asarray(scale)
    y, inverse = norm.measured(jnp.asarray(x))
    sigma = np.sqrt((x.var(-1) if kind == "layer" else (x**2).mean(-1)) + 1e-5)
    assert inverse.shape == (2, 3)
    np.testing.assert_allclose(inverse, 1 / sigma, rtol=1e-13)
    np.testing.assert_allclose(norm.gain(), np.sqrt((scale**2).mean()), rtol=1e-13)
    np.testing.assert_array_equal(y, norm(jnp.asarray(x)))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_statistics_of_bfloat16_are_taken_in_float32(kind):
    # 4096 squares near 1e4: summed in bfloat16 (8 bits) the total stops growing after 256 of them
    x = jnp.asarray(100 + np.random.default_rng(3).normal(size=(2, 4096)), jnp.bfloat16)
    y, inverse = norms.NORMS[kind](x, 1e-5)
    wide = np.asarray(x, np.float64)
    sigma = wide.std(-1) if kind == "layer" else np.sqrt((wide**2).mean(-1))
    assert y.dtype == jnp.bfloat16 and inverse.dtype == jnp.float32
    # float32 means of 4096 terms at 1e4 times their spread: a few 1e-5
    np.testing.assert_allclose(inverse, 1 / sigma, rtol=1e-4)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_jacobian_of_a_norm_is_exact_eps_included(x64, kind, eps):
    x = jnp.asarray(np.random.default_rng(4).normal(size=D) * 0.3 + 1)
    norm = norms.Norm(kind, D, eps)
    norm.scale[...] = jnp.linspace(-1, 2, D)
    np.testing.assert_allclose(norm.jacobian(x), jax.jacrev(norm)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "lost"), [("layer", 2), ("rms", 1)])
def test_spectrum_of_a_norm_is_1_over_sigma_but_for_the_directions_it_removes(x64, kind, lost):
    """LayerNorm: 1/sigma d - 2 times, 0 twice; RMSNorm: d - 1 times, 0 once; eps lifts one zero."""
    x = np.random.default_rng(5).normal(size=D) * 3 + 1
    eps = 1e-5
    variance = x.var() if kind == "layer" else (x**2).mean()
    found = np.linalg.svd(norms.Norm(kind, D, eps).jacobian(jnp.asarray(x)), compute_uv=False)
    sigma = np.sqrt(variance + eps)
    np.testing.assert_allclose(found[: D - lost], 1 / sigma, rtol=1e-13)
    # the radial direction: (1 - variance / sigma^2) / sigma = eps / sigma^3
    np.testing.assert_allclose(found[D - lost], eps / sigma**3, rtol=1e-8)
    np.testing.assert_allclose(found[D - lost + 1 :], 0, atol=1e-15)
