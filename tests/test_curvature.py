"""Largest eigenvalues against NumPy's: of matrices, and of dense Hessians of tiny models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.flatten_util import ravel_pytree

from normstudy import config, curvature, optim, programs, theory

# jax.nn.dot_product_attention takes its softmax in float32 even in float64: two programs of the
# same derivative agree to that, and a residual falls no further
SOFTMAX = 1e-6

CFG = tiny.model_config(width=4, heads=2, ff=8, context=3, vocab=5)
EDGE = ("edge_ratio", "edge_ratio_residual")


@jax.jit
def largest(matrix, start, tolerance):
    return curvature.largest(lambda v: matrix @ v, start, tolerance)


def start(seed: int, n: int = 40):
    return jnp.asarray(np.random.default_rng(seed).normal(size=n))


def with_eigenvalues(values, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed + 100).normal(size=(len(values), len(values)))
    basis = np.linalg.qr(random)[0]
    return basis * np.asarray(values, float) @ basis.T


# --------------------------------------------------------------------------------- matrices


def test_residual_is_honest_and_value_never_above_the_true_one(x64):
    for seed in range(5):
        random = np.random.default_rng(seed).normal(size=(40, 40))
        matrix = random + random.T
        true = np.linalg.eigvalsh(matrix)
        for tolerance in (1.0, 0.1, 1e-2, 1e-8):  # the first two stop early
            found = largest(jnp.asarray(matrix), start(seed), tolerance)
            assert float(found.residual) <= tolerance * abs(float(found.value))
            # rounding of a product of 40 terms
            assert abs(true - float(found.value)).min() <= float(found.residual) + 1e-13
            assert float(found.value) <= true[-1] + 1e-13
            vector = np.asarray(found.vector)
            assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-14)
            image = matrix @ vector - float(found.value) * vector
            assert np.linalg.norm(image) == pytest.approx(float(found.residual), abs=1e-12)


@pytest.mark.parametrize(
    "values",
    [
        np.linspace(1, 3, 40),
        [*np.linspace(-100, -1, 39), 2.0],
        [-1000.0, *np.linspace(-1, 1, 38), 1.5],
        np.linspace(-9, -3, 40),
    ],
    ids=["positive", "mostly negative", "one far below", "negative"],
)
def test_largest_is_the_algebraic_one_not_the_one_of_largest_magnitude(x64, values):
    for seed in range(3):
        found = largest(jnp.asarray(with_eigenvalues(values, seed)), start(seed), 1e-8)
        # the error of a Rayleigh quotient is the square of its vector's
        np.testing.assert_allclose(found.value, max(values), rtol=1e-8)


@pytest.mark.parametrize(
    "matrix, value",
    [
        (3 * np.eye(40), 3),
        (-3 * np.eye(40), -3),
        (np.zeros((40, 40)), 0),
        (np.ones((40, 40)), 40),
        (-np.ones((40, 40)), 0),
        (with_eigenvalues([5.0] * 3 + [1.0] * 37), 5),
        (with_eigenvalues([-1.0] * 20 + [2.0] * 20), 2),
        (np.kron(np.eye(20), [[0, 1], [1, 0]]), 1),
    ],
    ids=["3I", "-3I", "zero", "rank one", "negative rank one", "repeated", "two values", "swap"],
)
def test_krylov_space_that_becomes_invariant_is_no_trouble(x64, matrix, value):
    """The recursion then divides rounding errors by their length; one round is enough."""
    for seed in range(3):
        found = largest(jnp.asarray(matrix), start(seed), 0.01)
        # ten ulp of products of 40 terms
        np.testing.assert_allclose(found.value, value, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.residual, 0, atol=1e-9)
        if value:  # a residual is never small beside an eigenvalue of 0
            assert int(found.products) == curvature.DEPTH + 1


def test_converged_vector_is_a_start_that_takes_no_more_products(x64):
    matrix = jnp.asarray(with_eigenvalues(np.linspace(-1, 1, 40)))
    cold = largest(matrix, start(0), 1e-6)
    assert int(cold.products) > curvature.DEPTH + 1
    warm = largest(matrix, cold.vector, 1e-6)
    assert int(warm.products) == curvature.DEPTH + 1  # one round: the fewest there are
    np.testing.assert_allclose(warm.value, cold.value, rtol=1e-6)
    assert float(warm.value) >= float(cold.value) - 1e-14
    nearby = matrix + 1e-3 * with_eigenvalues(np.linspace(-1, 1, 40), seed=1)
    assert int(largest(nearby, cold.vector, 1e-6).products) < int(cold.products)


def test_search_that_does_not_converge_ends_and_says_so(x64):
    matrix = jnp.asarray(with_eigenvalues(np.linspace(-1, 1, 40)))
    found = largest(matrix, start(0), 0.0)
    assert int(found.products) == (curvature.DEPTH + 1) * curvature.RESTARTS
    assert abs(float(found.value) - 1) <= float(found.residual) + 1e-14


# ----------------------------------------------------------------------------------- models


@jax.jit
def exact_hessian(model, batch):
    flat, unravel = ravel_pytree(model)
    return jax.hessian(lambda flat: programs.token_loss(unravel(flat), batch))(flat)


@jax.jit
def sharpness(model, batch, start, preconditioner):
    loss = lambda model: programs.token_loss(model, batch)
    return curvature.sharpness(loss, model, start, 10 * SOFTMAX, preconditioner)


def whitened(hessian, preconditioner) -> np.ndarray:
    """P^-1/2 H P^-1/2."""
    scale = np.asarray(ravel_pytree(preconditioner)[0]) ** -0.5
    return scale[:, None] * np.asarray(hessian) * scale


@pytest.mark.parametrize("placement", ["pre", "post", "deepnorm"])
def test_sharpness_is_that_of_the_dense_hessian(x64, placement):
    """Plain, which is P = 1, and with a preconditioner that spans four decades."""
    cfg = dataclasses.replace(CFG, placement=placement)
    random = np.random.default_rng(0)
    for seed in (1, 2, 3):
        model, batch = tiny.model(cfg, seed, np.float64), tiny.tokens(cfg, 2, seed)
        hessian = exact_hessian(model, batch)
        assert hessian.shape == (sum(leaf.size for leaf in jax.tree.leaves(model)),) * 2
        first = curvature.start_vector(model, jax.random.key(seed))
        for decades in (0, 4):
            spread = lambda leaf: jnp.asarray(10 ** random.uniform(-decades, 0, leaf.shape))  # noqa: B023
            preconditioner = jax.tree.map(spread, model)
            found = sharpness(model, batch, first, preconditioner)
            true = np.linalg.eigvalsh(whitened(hessian, preconditioner))
            np.testing.assert_allclose(found.value, true[-1], rtol=10 * SOFTMAX)
            assert (
                abs(true - float(found.value)).min() <= float(found.residual) + SOFTMAX * true[-1]
            )


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_sharpness_of_a_run_is_that_of_the_update_which_follows(x64, monkeypatch, optimizer):
    """At update 3: Adam's moments after the gradient of this very batch, as optax keeps them."""
    searched = []

    def found(loss, model, start, tolerance, preconditioner=None):
        searched.append((start, preconditioner))
        scale = 1.0 if preconditioner is None else 10.0
        return curvature.Eigenvalue(jnp.float64(7) * scale, jnp.float64(0.07), jnp.int32(13), start)

    monkeypatch.setattr(curvature, "sharpness", found)
    own = config.Optim(optimizer=optimizer, b1=0.8, b2=0.95, eps=1e-4)
    model, batch, lr = tiny.model(CFG, 1, np.float64), tiny.tokens(CFG, 2, 1), jnp.float64(0.01)
    transform = optim.direction(own)
    opt_state, gradient = transform.init(model), jax.jit(jax.grad(programs.token_loss))
    for seed in (5, 6) if optimizer == "adam" else ():
        _, opt_state = transform.update(gradient(model, tiny.tokens(CFG, 2, seed)), opt_state)
    state = programs.State(jnp.int32(2), jnp.bool(True), model, opt_state)

    @jax.jit
    def search(state, batch, starts):
        searched.clear()
        probe, vectors = programs.sharpness(state, batch, lr, starts, optimizer=own)
        return probe, vectors, searched[-1][1]

    starts = (jnp.zeros(3), jnp.ones(3))
    probe, vectors, preconditioner = search(state, batch, starts)
    assert [v[0] for v in vectors] == ([0, 1] if optimizer == "adam" else [0, 0])
    assert probe["sharpness"] == 7 and probe["sharpness_residual"] == 0.07
    if optimizer == "sgd":
        assert set(probe) == {*EDGE, "sharpness", "sharpness_residual"} and preconditioner is None
        # the threshold of plain descent is 2
        np.testing.assert_allclose([probe[n] for n in EDGE], [7 * 0.005, 0.07 * 0.005], rtol=1e-14)
        return
    # (2 + 2 * 0.8) / (1 - 0.8) = 18
    np.testing.assert_allclose([probe[n] for n in EDGE], [0.7 / 18, 0.0007 / 18], rtol=1e-14)
    assert probe["sharpness_adam"] == 70 and probe["sharpness_adam_residual"] == 0.07
    _, after = transform.update(gradient(model, batch), opt_state)
    nu = tiny.leaves(optax.tree.get(after, "nu"))
    for path, found in tiny.leaves(preconditioner).items():
        by_hand = (1 - 0.8**3) * (np.sqrt(nu[path] / (1 - 0.95**3)) + 1e-4)
        np.testing.assert_allclose(found, by_hand, rtol=1e-10, err_msg=path)


def test_adam_preconditioner_is_what_optax_divides_the_first_moment_by(x64):
    b1, b2, eps = 0.8, 0.95, 1e-3
    transform = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)
    random = np.random.default_rng(0)
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(2)}
    state = transform.init(params)
    for update in range(1, 6):
        gradients = jax.tree.map(lambda p: jnp.asarray(random.normal(size=p.shape)), params)
        direction, state = transform.update(gradients, state)
        assert int(state.count) == update
        found = curvature.adam_preconditioner(state.nu, state.count, b1, b2, eps)
        divided = jax.tree.map(lambda m, p: m / p, state.mu, found)
        for name in params:  # a division more: a few ulp
            np.testing.assert_allclose(divided[name], direction[name], rtol=1e-13)


# ------------------------------------------------------------------------ what the edge means


def descend(x, hessian: np.ndarray, divisor: np.ndarray, lr: float, b1: float | None) -> np.ndarray:
    """Distances from the minimum of x H x / 2 along descent with a frozen divisor.

    b1 None: plain; else with Adam's first moment, an exponential mean of the gradients.
    """
    moment, distances = np.zeros_like(x), []
    for _ in range(400):
        gradient = hessian @ x
        moment = gradient if b1 is None else b1 * moment + (1 - b1) * gradient
        x = x - lr * moment / divisor
        distances.append(np.linalg.norm(x))
    return np.array(distances)


@pytest.mark.parametrize("b1", [None, 0.0, 0.5, 0.9], ids=["sgd", "0", "0.5", "0.9"])
def test_descent_on_a_quadratic_grows_above_an_edge_ratio_of_1_and_shrinks_below(x64, b1):
    """With the sharpness that Lanczos finds and the threshold of theory.py."""
    random = np.random.default_rng(0)
    hessian = with_eigenvalues(np.linspace(0.5, 3, 20))
    divisor = np.ones(20) if b1 is None else random.uniform(0.1, 10, 20)
    loss = lambda x: x @ jnp.asarray(hessian) @ x / 2
    found = jax.jit(
        lambda x: curvature.sharpness(loss, x, start(0, 20), 1e-8, jnp.asarray(divisor))
    )(jnp.ones(20))
    edge = theory.stability_threshold(b1) / float(found.value)
    x = np.asarray(found.vector) / np.sqrt(divisor)
    for ratio in (0.99, 1.01):
        distances = descend(x, hessian, divisor, ratio * edge, b1)
        # after the moment has filled, and long after; plain descent, the slowest, changes by 2% a
        # step: 380 times in 300
        early, late = distances[99], distances[399]
        assert (late > 100 * early) if ratio > 1 else (late < early / 100), (ratio, early, late)
