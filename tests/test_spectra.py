"""Largest and all singular values against NumPy's, on matrices and on tiny stacks of every row."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from normstudy import inspection, operations, probes, spectra
from normstudy.placements import PLACEMENTS

# jax.nn.dot_product_attention takes its softmax in float32 even in float64: a product with J and
# one with its transpose agree to that, and a residual falls no further
SOFTMAX = 1e-6

CFG = tiny.model_config(width=4, heads=2, ff=8, context=3, vocab=5)
B, T, D, L = 2, 3, 4, 2


@jax.jit
def largest(matrix, key, tolerance):
    like = jnp.zeros(matrix.shape[1], matrix.dtype)
    return spectra.largest(lambda x: matrix @ x, like, key, tolerance)


def turns(seed: int, n: int) -> np.ndarray:
    """A random rotation of n dimensions."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(n, n)))[0]


def with_singular_values(values, seed: int = 0) -> np.ndarray:
    n = len(values)
    return turns(seed, n) * np.asarray(values, float) @ turns(seed + 100, n).T


def assert_honest(found: spectra.Singular, matrix: np.ndarray) -> None:
    """Some true value lies within the residual, and none of them below the one found is larger."""
    true = np.linalg.svd(np.asarray(matrix, float), compute_uv=False)
    # rounding of a product of N terms, of the size of the largest value
    rounding = matrix.shape[0] * np.finfo(matrix.dtype).eps * true[0]
    value, residual = float(found.value), float(found.residual)
    assert abs(true - value).min() <= residual + rounding
    assert value <= true[0] + rounding


# --------------------------------------------------------------------------------- matrices


@pytest.mark.parametrize("shape", [(24, 24), (24, 40), (40, 24), (3, 5)])
def test_residual_is_honest_and_value_never_above_the_true_one(x64, shape):
    for seed in range(5):
        matrix = np.random.default_rng(seed).normal(size=shape)
        for tolerance in (1.0, 0.1, 1e-2, 1e-8):  # the first two stop early
            found = largest(jnp.asarray(matrix), jax.random.key(seed), tolerance)
            assert float(found.residual) <= tolerance * float(found.value)
            assert_honest(found, matrix)


@pytest.mark.parametrize("tolerance", [1e-2, 1e-6])
def test_largest_singular_value_is_within_the_tolerance(x64, tolerance):
    """Whatever lies close below it."""
    for below in (0.5, 0.9, 0.99):
        values = np.concatenate([[3.0], 3 * below * np.linspace(1, 0.1, 23)])
        for seed in range(3):
            matrix = with_singular_values(values, seed)
            found = largest(jnp.asarray(matrix), jax.random.key(seed), tolerance)
            assert 3 * (1 - tolerance) <= float(found.value) <= 3 * (1 + 1e-14)


def test_looser_tolerance_takes_fewer_products(x64):
    matrix = jnp.asarray(with_singular_values(np.linspace(1, 0.1, 24)))
    taken = [int(largest(matrix, jax.random.key(0), tol).products) for tol in (0.1, 1e-4, 1e-10)]
    assert taken[0] < taken[1] < taken[2]
    # one product finds the unit; a round takes two for each dimension and two for its residual
    assert all((n - 1) % (2 * (spectra.DEPTH + 1)) == 0 for n in taken)


def test_search_that_does_not_converge_ends_and_says_so(x64):
    """Tolerance 0 is never met by rounded numbers."""
    matrix = np.random.default_rng(0).normal(size=(24, 24))
    found = largest(jnp.asarray(matrix), jax.random.key(0), 0.0)
    assert int(found.products) == 1 + 2 * (spectra.DEPTH + 1) * spectra.RESTARTS
    assert_honest(found, matrix)


ONE_ROUND = 1 + 2 * (spectra.DEPTH + 1)
RANK_ONE = np.outer(np.arange(1, 25), np.linspace(-1, 2, 24))


@pytest.mark.parametrize(
    "matrix, value",
    [
        (np.eye(24), 1),
        (-2 * np.eye(24), 2),
        (turns(3, 24), 1),
        (np.zeros((24, 24)), 0),
        (RANK_ONE, np.linalg.norm(RANK_ONE)),
        (np.ones((24, 24)), 24),  # what follows the breakdown grows beyond all that came before
        (with_singular_values([5.0] * 4 + [1.0] * 20), 5),  # the top one four times
        (with_singular_values([5.0] * 2 + [0.0] * 22), 5),
        (np.diag([*np.ones(23), 1e-9]), 1),
        (np.eye(24, k=1), 1),  # nilpotent: a Krylov space of J alone would end in 0
    ],
    ids=["identity", "-2I", "rotation", "zero", "rank one", "ones", "repeated", "rank two",
         "nearly I", "nilpotent"],
)  # fmt: skip
def test_krylov_space_that_becomes_invariant_is_no_trouble(x64, matrix, value):
    """The recursion then divides rounding errors by their length; one round is enough."""
    for seed in range(3):
        found = largest(jnp.asarray(matrix), jax.random.key(seed), 0.01)
        # three ulp a product of 24 terms
        np.testing.assert_allclose(found.value, value, rtol=1e-12)
        np.testing.assert_allclose(found.residual, 0, atol=1e-9 * max(value, 1))
        assert int(found.products) == ONE_ROUND


def test_one_dimension_is_enough(x64):
    found = largest(jnp.asarray([[-3.0]]), jax.random.key(0), 0.01)
    # a product, a quotient and a difference in float64: one rounding each
    assert abs(float(found.value) - 3) < 1e-15 and float(found.residual) < 1e-15


@pytest.mark.parametrize("scale", [1e-33, 1e-25, 1e25])
def test_scale_whose_square_float32_does_not_hold_changes_nothing(scale):
    values = np.linspace(1, 0.1, 24)
    matrix = jnp.asarray(with_singular_values(values), jnp.float32)
    plain = largest(matrix, jax.random.key(0), 0.01)
    found = largest(matrix * jnp.float32(scale), jax.random.key(0), 0.01)
    # a float32 matrix: entries rounded once more by the factor
    np.testing.assert_allclose(found.value / jnp.float32(scale), plain.value, rtol=1e-5)
    assert 0.99 <= float(plain.value) <= 1 + 1e-5
    assert float(found.residual) <= 0.01 * float(found.value)


# ------------------------------------------------------------------------- stacks of layers


def test_linear_stack_with_known_singular_values_is_within_the_tolerance(x64):
    """Layers that share their singular vectors: to the end, values multiply.

    A backward product |J^T v| / |v| and the Frobenius norm are never above the largest one.
    """
    basis, values = turns(1, D), np.array([[3, 1, 0.5, 0.2], [0.5, 1, 1, 1], [2, 1.5, 1, 4]])
    layers = jnp.asarray([basis * row @ basis.T for row in values])

    def stack(nudge):
        x = nudge[0]
        for i in range(3):
            x = x @ layers[i] + nudge[i + 1]
        return x

    known = np.array([3, 4, 4])  # 3 * 0.5 * 2, 1 * 1 * 4 on the last axis, 4
    nudge = jnp.zeros((4, B, T, D))
    to_end = jax.jit(functools.partial(spectra.to_end, stack, nudge, tolerance=0.01))
    found = to_end(wanted=jnp.arange(3), key=jax.random.key(0))
    np.testing.assert_allclose(found.value, known, rtol=0.01)
    assert (np.asarray(found.value) <= known * (1 + 1e-14)).all()
    keys = jax.random.split(jax.random.key(1), 64)
    backward = jax.jit(jax.vmap(lambda key: probes.jacobian_to_end(stack, nudge, key, 2).norm))
    assert (np.asarray(backward(keys)) <= known).all()

    of_blocks = jax.jit(functools.partial(spectra.of_blocks, lambda w, x: x @ w, tolerance=0.01))
    found = of_blocks(layers, jnp.zeros((3, B, T, D)), key=jax.random.key(0))
    assert found.value.shape == found.residual.shape == found.products.shape == (3, B)
    known = np.broadcast_to(values.max(1)[:, None], (3, B))
    np.testing.assert_allclose(found.value, known, rtol=0.01)


@jax.jit
def of_stack(model, x0, key):
    """(of each block and sequence, to the end from each layer)."""
    nudge = jnp.zeros((L + 1, *x0.shape), x0.dtype)
    streams = model.stack(x0)[1]
    block = lambda block, x: block(x)[0]
    return (
        spectra.of_blocks(block, model.stacked, streams[:-1], key, 10 * SOFTMAX),
        spectra.to_end(lambda n: model.stack(x0, n)[0], nudge, jnp.arange(L), key, 10 * SOFTMAX),
    )


@pytest.mark.parametrize("placement", tiny.KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_spectra_of_blocks_and_to_the_end_are_those_of_the_exact_jacobian(x64, placement, seed):
    model = tiny.model(dataclasses.replace(CFG, placement=placement), seed, np.float64)
    x0 = model.start(tiny.tokens(CFG, B, seed)[:, :-1])
    exact = {
        part: np.linalg.svd(own, compute_uv=False)
        for part, own in tiny.jacobians(model, x0).items()
    }
    blocks, ends = of_stack(model, x0, jax.random.key(seed))
    np.testing.assert_allclose(blocks.value, exact["block"][..., 0], rtol=10 * SOFTMAX)
    # sequences do not see each other: the largest of all together is the largest of one
    np.testing.assert_allclose(ends.value, exact["to_end"][..., 0].max(1), rtol=10 * SOFTMAX)
    for found in (blocks, ends):
        assert (found.residual <= 10 * SOFTMAX * found.value).all()


@pytest.mark.parametrize("chunk", [1, 5, 12, 1000])
def test_whole_spectrum_is_that_of_the_jacobian_whatever_the_chunk(x64, chunk):
    random = np.random.default_rng(0)
    matrix, x = jnp.asarray(random.normal(size=(T * D, T * D))), random.normal(size=(T, D))
    function = lambda x: jnp.tanh(matrix @ x.ravel()).reshape(T, D)
    found = jax.jit(lambda x: spectra.whole(function, x, chunk))(jnp.asarray(x))
    jacobian = (1 - np.tanh(np.asarray(matrix) @ x.ravel()) ** 2)[:, None] * np.asarray(matrix)
    np.testing.assert_allclose(found, np.linalg.svd(jacobian, compute_uv=False), rtol=1e-10)
    assert (np.diff(found) <= 0).all()


@pytest.mark.parametrize("placement", tiny.KINDS)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_sigma_max_of_norm_is_the_largest_of_its_jacobians(x64, placement, kind):
    """At what the norm is given in the forward pass, the largest over eight positions."""
    cfg = tiny.model_config(width=4, ff=8, context=12, vocab=5, placement=placement, norm=kind)
    model = tiny.model(cfg, dtype=np.float64)
    block, x = tiny.layer(model, 1), model.start(tiny.tokens(cfg, 1)[:, :-1])
    place = PLACEMENTS[placement]
    found = inspection._sigma_of_norms(block, x)
    assert set(found) == {  # of the norms on the stream
        f"sigma_max_of_norm_{n}/{s}"
        for s in probes.BRANCHES
        for n in place.norms_of(s)
        if n != "mid"
    }
    inputs = seen_by_norms(block, x, place)
    for name, value in found.items():
        own, sublayer = name.removeprefix("sigma_max_of_norm_").split("/")
        norm = getattr(getattr(block, sublayer).sublayer, own)
        jacobians = np.asarray(jax.vmap(jax.jacrev(norm))(inputs[own, sublayer][0]))
        each = np.linalg.svd(jacobians, compute_uv=False)[:, 0]
        # 8 of 12 positions, evenly: linspace(0, 11, 8) without its fractions
        expected = each[[0, 1, 3, 4, 6, 7, 9, 11]].max()
        np.testing.assert_allclose(value, expected, rtol=10 * SOFTMAX, err_msg=name)


def seen_by_norms(block, x, place) -> dict:
    """{(norm, sublayer): what it is given}, from the row's equation."""
    found = {}
    for name in probes.BRANCHES:
        placed = getattr(block, name)

        def listening(own, name=name, sublayer=placed.sublayer):
            def norm(h, on=1.0):
                found[own, name] = h
                y = getattr(sublayer, own)(h)
                return y if isinstance(on, float) else jnp.where(on > 0, y, h)

            return norm

        def f(h, *mid, f=placed.f):
            mid = (m if callable(m) else lambda y, m=m: m * y for m in mid)
            return f(h, operations.PLAIN, *mid)

        norms = SimpleNamespace(**{own: listening(own) for own in place.norms_of(name)})
        c = placed.sublayer._numbers(placed.numbers, x)
        x = place.of(name)(x, f, norms, c)
    return found
