"""The mean field against quadrature, random matrices, and wide random networks in plain NumPy."""

import math
from types import SimpleNamespace
from typing import get_args, get_type_hints

import jax
import numpy as np
import pytest

from normstudy import config, inits, kernels, meanfield, theory
from normstudy.errors import UserError
from normstudy.kernels import KERNELS
from normstudy.meanfield import STEPS, Form, Matrix, Tangent
from normstudy.placements import PLACEMENTS, Placement
from normstudy.residual import Parts
from normstudy.theory import Constants, no_constants


def covariance(size: int, seed: int = 0) -> np.ndarray:
    """A full covariance matrix with unequal variances around 1."""
    roots = np.random.default_rng(seed).normal(size=(size, 2 * size))
    return roots @ roots.T / (2 * size)


def normal(rng: np.random.Generator, C: np.ndarray, channels: int) -> np.ndarray:
    """(N, channels) with covariance C over the rows."""
    return np.linalg.cholesky(C) @ rng.normal(size=(len(C), channels))


# ------------------------------------------------------------------------------------- kernels


def test_relu_passes_half_of_the_second_moment():
    """Xiong et al. 2020, lemma 1: E relu(x)^2 = sigma^2 / 2."""
    C = covariance(5)
    # arccos near 1 has half the digits; they come back in the products, to about 1e-8
    np.testing.assert_allclose(np.diag(KERNELS["relu"].values(C)), np.diag(C) / 2, rtol=1e-7)
    np.testing.assert_allclose(np.diag(KERNELS["relu"].slopes(C)), 0.5, rtol=1e-7)


def test_relu_of_independent_and_of_opposite_inputs():
    C = np.array([[4.0, 0.0], [0.0, 1.0]])
    # E relu(u) E relu(v) = (2 / sqrt(2 pi)) (1 / sqrt(2 pi)); both slopes are 1 in a quarter
    assert KERNELS["relu"].values(C)[0, 1] == pytest.approx(1 / math.pi, rel=1e-12)
    assert KERNELS["relu"].slopes(C)[0, 1] == pytest.approx(0.25, rel=1e-12)
    opposite = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert KERNELS["relu"].values(opposite)[0, 1] == pytest.approx(0, abs=1e-12)
    assert KERNELS["relu"].slopes(opposite)[0, 1] == pytest.approx(0, abs=1e-12)


def test_gelu_is_the_one_that_the_model_computes(x64):
    x = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(kernels.gelu(x), jax.nn.gelu(x), rtol=0, atol=1e-14)


# the accuracy that kernels.py states; the derivative by differences is good to 1e-9
@pytest.mark.parametrize("variance, of_values, of_slopes", [(1, 1e-9, 1e-8), (4, 1e-5, 5e-4)])
@pytest.mark.parametrize("rho", [-0.9, 0.0, 0.5, 0.99])
def test_gelu_kernels_are_the_integrals_over_both_inputs(rho, variance, of_values, of_slopes):
    nodes, weights = np.polynomial.hermite_e.hermegauss(100)
    weights = np.outer(weights, weights) / weights.sum() ** 2
    stds = np.sqrt([variance, variance / 2])
    u = stds[0] * np.broadcast_to(nodes[:, None], weights.shape)
    v = stds[1] * (rho * nodes[:, None] + math.sqrt(1 - rho**2) * nodes)
    C = np.outer(stds, stds) * [[1, rho], [rho, 1]]

    def slope(x, h=1e-5):
        return (kernels.gelu(x + h) - kernels.gelu(x - h)) / (2 * h)

    values = np.sum(weights * kernels.gelu(u) * kernels.gelu(v))
    slopes = np.sum(weights * slope(u) * slope(v))
    assert KERNELS["gelu"].values(C)[0, 1] == pytest.approx(values, abs=of_values)
    assert KERNELS["gelu"].slopes(C)[0, 1] == pytest.approx(slopes, abs=of_slopes)


@pytest.mark.parametrize("name", KERNELS)
def test_slope_kernel_is_the_derivative_by_the_covariance(name):
    """Price 1958; for every pair at once, the variances held fixed."""
    C, h = covariance(4), 1e-6
    apart = h * (1 - np.eye(4))
    values = KERNELS[name].values
    difference = (values(C + apart) - values(C - apart)) / (2 * h)
    others = ~np.eye(4, dtype=bool)
    # rounding 1e-16 / 1e-6
    np.testing.assert_allclose(difference[others], KERNELS[name].slopes(C)[others], atol=1e-8)


def test_every_activation_of_the_config_has_kernels():
    assert set(KERNELS) == set(get_args(get_type_hints(config.Model)["activation"]))


# ------------------------------------------------------------------------------------- forms


def test_forms_add_and_scale_as_the_streams_that_they_stand_for():
    x, f = Form(np.ones(2), np.zeros(2)), Form(np.zeros(2), np.ones(2))
    y = np.float64(2) * (x - f / 4) + x * np.array([1.0, 3.0])
    np.testing.assert_array_equal(y.x, [3, 5])
    np.testing.assert_array_equal(y.f, [-0.5, -0.5])


# fmt: off
ROWS = {
    **{name: place for name, place in PLACEMENTS.items() if meanfield.has_mean_field(place)},
    "three": Placement(lambda x, f, n, c: n.post(2 * x + n.mid(f(n.pre(x)))), ("pre", "mid", "post"), False, no_constants, "2026"),  # noqa: E501
    "inner": Placement(lambda x, f, n, c: n.post(c.alpha * n.pre(x) - f(x) / 2), ("pre", "post"), False, no_constants, "none"),  # noqa: E501
}
TWICE = Placement(lambda x, f, n, c: x + f(f(n.pre(x))), ("pre",), True, no_constants, "none")
# fmt: on


def stds_of(model: config.Model) -> inits.Stds:
    place, layers = ROWS[model.placement], model.layers
    beta = place.constants(layers).beta
    return inits.standard_deviations(model, config.Init(), beta, place.init(layers))


def numbers(place: Placement, layers: int, layer: int, sublayer: int) -> SimpleNamespace:
    """All that the equation multiplies by, at step 0."""
    return SimpleNamespace(
        **place.constants(layers).at(layer, sublayer)._asdict() | place.starts(layers)
    )


@pytest.mark.parametrize("name", ["sub-ln", "hybridnorm", "scalenorm", "dyt", "admin-profiled"])
def test_row_without_a_mean_field_is_refused(name):
    model = config.Model(placement=name, layers=2, width=16, context=4)
    with pytest.raises(UserError, match="no mean field"):
        meanfield.predict(model, {}, batch_of(model))


def test_sublayer_applied_twice_is_refused():
    model = config.Model(placement="pre", context=2)
    branch = meanfield.branches(model, stds_of(model), 1)["mlp"]
    with pytest.raises(ValueError, match="once"):
        meanfield.solve(TWICE, Constants(), np.eye(2), branch, 1e-5)


# ------------------------------------------------------------------- against wide networks


class Wide:
    """The same network with random matrices, in NumPy, its derivative by a complex step."""

    def __init__(self, model: config.Model, seed: int):
        self.model, self.place = model, ROWS[model.placement]
        self.rng, self.stds = np.random.default_rng(seed), stds_of(model)
        self.mean = (
            np.tril(np.ones((model.context,) * 2)) / np.arange(1, model.context + 1)[:, None]
        )

    def matrix(self, role: str, layer: int, *shape: int) -> np.ndarray:
        std = np.broadcast_to(self.stds[role], self.model.layers)[layer]
        return std * self.rng.normal(size=shape)

    def run(self, x: np.ndarray, skip_only: bool = False) -> tuple[np.ndarray, list[dict]]:
        D, F, taps = self.model.width, self.model.ff, []
        for layer in range(self.model.layers):
            attn, mlp = (numbers(self.place, self.model.layers, layer, i) for i in (0, 1))
            v, o = self.matrix("v", layer, D, D), self.matrix("o", layer, D, D)
            up, down = self.matrix("up", layer, D, F), self.matrix("down", layer, F, D)
            x = self.sublayer(x, lambda h, v=v, o=o: self.mean @ h @ v @ o, attn, taps, skip_only)
            x = self.sublayer(x, lambda h, u=up, d=down: self.phi(h @ u) @ d, mlp, taps, skip_only)
        return x, taps

    def phi(self, u: np.ndarray) -> np.ndarray:
        return kernels.gelu(u) if self.model.activation == "gelu" else u * (u.real > 0)

    def sublayer(self, x, f, c, taps, skip_only):
        own = {}

        def norm(name):
            def apply(h):
                h = h - h.mean(-1, keepdims=True)
                sigma = np.sqrt((h * h).mean(-1, keepdims=True) + self.model.norm_eps)
                own[f"norm_factor_{name}"] = np.mean(1 / sigma.real)
                return h / sigma

            def call(h, on=1.0):
                if on:
                    return h.normed(apply)
                own[f"norm_factor_{name}"] = 1.0
                return h

            return call

        def branch(h):
            y = f(h.whole())
            return Parts(None, y.real if skip_only else y, seen)

        def seen(skip, branch):
            own["branch_share"] = np.var(branch.real, -1).mean() / np.var(skip.real, -1).mean()

        taps.append(own)
        norms = SimpleNamespace(**{name: norm(name) for name in self.place.norms})
        return self.place.equation(Parts(x, None, seen), branch, norms, c).whole()


@pytest.mark.parametrize("name, activation", [*((name, "gelu") for name in ROWS), ("post", "relu")])
def test_wide_random_network_does_what_the_mean_field_says(name, activation, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, name, ROWS[name])
    T, seeds, step = 5, 8, 1e-30
    model = config.Model(placement=name, layers=2, width=256, ff=512, context=T,
                         activation=activation)  # fmt: skip
    C0 = covariance(T)
    found = {"C": [], "jacobian": [], "skip": [], "taps": []}
    for seed in range(seeds):
        rng = np.random.default_rng(100 + seed)
        x = normal(rng, C0, model.width)
        signs = rng.choice([-1.0, 1.0], x.shape)
        y, taps = Wide(model, seed).run(x + 1j * step * signs)
        skip, _ = Wide(model, seed).run(x + 1j * step * signs, skip_only=True)
        found["C"].append(y.real @ y.real.T / model.width)
        found["jacobian"].append(np.mean((y.imag / step) ** 2))
        found["skip"].append(np.mean((skip.imag / step) ** 2))
        found["taps"].append([value for own in taps for value in own.values()])
    mean = {key: np.mean(values, 0) for key, values in found.items()}

    stds = stds_of(model)
    C, sublayers = C0, []
    for layer in range(model.layers):
        here = {role: np.broadcast_to(std, model.layers)[layer] for role, std in stds.items()}
        for i, branch in enumerate(meanfield.branches(model, here, 1).values()):
            c = numbers(ROWS[name], model.layers, layer, i)
            sublayers.append(meanfield.solve(ROWS[name], c, C, branch, model.norm_eps))
            C = sublayers[-1].up()
    G, skip = np.eye(T), np.ones(T)
    for sublayer in sublayers[::-1]:
        G, skip = sublayer.down(G), skip * sublayer.skip**2

    # 256 channels and 8 seeds: a mean square scatters by sqrt(2 / 2048) = 3%, the largest of many
    # by three times that; a product over four norms by more, and it is off by O(1 / 256) of each
    scale = np.sqrt(np.outer(np.diag(C), np.diag(C)))
    np.testing.assert_allclose(mean["C"] / scale, C / scale, rtol=0, atol=0.12)
    assert mean["jacobian"] == pytest.approx(np.trace(G) / T, rel=0.15)
    assert mean["skip"] == pytest.approx(np.mean(skip), rel=0.15)
    expected = [value for s in sublayers for value in s.taps.values()]
    np.testing.assert_allclose(mean["taps"], expected, rtol=0.12)


# ----------------------------------------------------------------------------- the first step


def moved_by(step: str, gradient: np.ndarray) -> np.ndarray:
    return gradient if step == "sgd" else np.sign(gradient)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("positions", [1, 6])
def test_matrix_moved_by_one_step_moves_its_output_as_predicted(step, positions):
    width, seeds = 256, 16
    C, G = covariance(positions, 1), covariance(positions, 2)
    op = Matrix("v", width, width, std=0.0)  # nothing comes through from below
    nothing = Tangent(np.zeros_like(C), np.zeros_like(C))
    tangent = op.tangent(nothing, C, G, STEPS[step])
    squares, answers = [], []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        x, g = normal(rng, C, width), normal(rng, G, width)
        moved = x @ moved_by(step, x.T @ g)
        squares.append(moved @ moved.T / width)
        answers.append(moved @ g.T / width)
    expected = tangent.covariance(G)
    # means over 256 channels and 16 seeds scatter by 2% to 3% of the diagonal. One correlation for
    # all positions is an approximation: right for their sum, by up to 20% off for one of them
    found, of_one = np.mean(squares, 0), {"sgd": 0.12, "sign": 0.25}[step]
    assert np.trace(found) == pytest.approx(np.trace(expected), rel=0.08)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    np.testing.assert_allclose(found / scale, expected / scale, rtol=0, atol=of_one)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(G)))
    np.testing.assert_allclose(
        np.mean(answers, 0) / scale, tangent.K @ G / scale, rtol=0, atol=of_one
    )


def test_sign_of_one_position_s_gradient_is_correlated_by_sqrt_2_over_pi():
    one = np.ones((1, 1))
    # E|g| / sqrt(E g^2) of a normal law; the entries of x g^T are products, the factor is for x
    assert meanfield.sign_step(one, one)[1] == pytest.approx(math.sqrt(2 / math.pi), rel=1e-12)
    many = np.eye(200)  # 1 - 1 / (4 n)
    assert meanfield.sign_step(many, many)[1] == pytest.approx(1 - 1 / 800, abs=1e-5)
    assert meanfield.sign_step(one, 0 * one) == (0.0, 1.0)


@pytest.mark.parametrize("step", STEPS)
def test_change_of_a_sublayer_s_output_is_that_of_random_matrices(step):
    """All terms at once: what comes from below by both paths, and what both matrices add."""
    T, width, seeds = 3, 256, 8
    model = config.Model(placement="post", layers=1, width=width, context=T)
    branch = meanfield.branches(model, stds_of(model), 1)["attn"]
    C, G, R = covariance(T, 1), covariance(T, 2), 0.5 * covariance(T, 3)
    K = np.random.default_rng(9).normal(size=(T, T))
    own = 1 / width  # the step's size: both matrices add about as much as comes from below
    sublayer = meanfield.solve(PLACEMENTS["post"], Constants(), C, branch, 1e-5)

    def scaled_step(C, G):
        factor, correlation = STEPS[step](C, G)
        return own * factor, correlation

    expected = sublayer.tangent(Tangent(K, R), G, scaled_step).covariance(G)
    A, a, b = branch[1].A, sublayer.skip[:, None], sublayer.out[:, None]
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        x, g, noise = (normal(rng, M, width) for M in (C, G, R))
        v, o = rng.normal(size=(2, width, width)) * width**-0.5  # x v o, mixed by A in between
        g_o = b * g
        g_v = A.T @ (g_o @ o.T)
        g_x = a * g + g_v @ v.T
        dx = K @ g_x + noise
        dv, do = (own * moved_by(step, M) for M in (x.T @ g_v, (A @ x @ v).T @ g_o))
        dy = a * dx + b * (A @ (dx @ v + x @ dv) @ o + A @ x @ v @ do)
        found.append(dy @ dy.T / width)
    scale = np.sqrt(np.outer(np.diag(expected), np.diag(expected)))
    # 256 channels, 8 seeds: 3%; sums of a few correlated terms, the largest of 9 entries
    np.testing.assert_allclose(np.mean(found, 0) / scale, expected / scale, rtol=0, atol=0.12)


# --------------------------------------------------------------------------------- the model


def batch_of(model: config.Model, sequences: int = 2) -> np.ndarray:
    shape = (sequences, model.context + 1)
    return np.random.default_rng(0).integers(0, model.vocab, shape, np.int32)


@pytest.mark.parametrize("name", ROWS)
def test_every_row_is_predicted_without_code_of_its_own(name, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, name, ROWS[name])
    model = config.Model(placement=name, layers=3, width=16, context=4)
    found = meanfield.predict(model, stds_of(model), batch_of(model))
    for norm in ROWS[name].norms:
        assert found.pop(f"norm_factor_{norm}/attn").shape == (3,)
        assert found.pop(f"norm_factor_{norm}/mlp").shape == (3,)
    matrices = ("attn.v", "attn.o", "mlp.up", "mlp.down")
    steps = [f"{what}/{step}" for what in ("function_update", "logit_update") for step in STEPS]
    assert {key: np.shape(value) for key, value in found.items()} == {
        **dict.fromkeys(("rms", "similarity", "stream_gradient"), (4,)),
        **dict.fromkeys(("jacobian_to_end", "skip_gain"), (3,)),
        **dict.fromkeys(("branch_share/attn", "branch_share/mlp"), (3,)),
        **dict.fromkeys((f"gradient/{name}" for name in matrices), (3,)),
        **dict.fromkeys(steps, ()),
    }
    assert all(np.isfinite(value).all() and np.min(value) > -1 for value in found.values())


@pytest.mark.parametrize("name", [name for name in ROWS if name in PLACEMENTS])
def test_skip_gain_is_the_product_of_norm_factors_and_alphas(name):
    """Where all positions are alike, so that a mean over them is each of them."""
    model = config.Model(placement=name, layers=5, width=16, context=4)
    stds = stds_of(model) | {"positions": 0.0}
    found = meanfield.predict(model, stds, np.ones((2, 5), np.int32))
    place = PLACEMENTS[name]
    factors = [found[f"norm_factor_{n}/{s}"] for n in place.skip_norms for s in ("attn", "mlp")]
    stacked = np.array(factors).T if factors else np.ones((5, 0))
    stacked = np.where(np.isnan(stacked), 1.0, stacked)  # where it has no norm
    expected = theory.skip_path_gain(stacked, place.constants(5).alpha)
    np.testing.assert_allclose(found["skip_gain"], expected, rtol=1e-10)


def test_post_norm_under_xavier_loses_a_quarter_a_block_on_the_skip_path():
    """Collapsed positions, ReLU: shares 1 and 0.32, so (1 / sqrt 2)(1 / sqrt 1.32) a block."""
    model = config.Model(placement="post", layers=8, width=64, ff=256, context=4, activation="relu")
    stds = stds_of(model) | {"positions": 0.0}
    found = meanfield.predict(model, stds, np.ones((1, 5), np.int32))
    # D s_up^2 F s_down^2 / 2 = 0.4 * 1.6 / 2; the norms' eps is 1e-5
    np.testing.assert_allclose(found["branch_share/attn"][1:], 1, rtol=1e-4)
    np.testing.assert_allclose(found["branch_share/mlp"], 0.32, rtol=1e-4)
    ratio = found["skip_gain"][1:-1] / found["skip_gain"][2:]
    np.testing.assert_allclose(ratio, (2 * 1.32) ** -0.5, rtol=1e-4)


def test_tied_readout_takes_the_scale_of_the_embedding():
    model = config.Model(placement="post", layers=1, width=16, context=4, tied=True)
    stds = stds_of(model)
    batch = batch_of(model)
    twice = meanfield.predict(model, stds | {"embed": 2 * stds["embed"]}, batch)
    untied = meanfield.predict(
        config.Model(placement="post", layers=1, width=16, context=4),
        stds | {"embed": 2 * stds["embed"], "readout": 2 * stds["embed"]}, batch,
    )  # fmt: skip
    np.testing.assert_allclose(twice["stream_gradient"], untied["stream_gradient"], rtol=1e-12)
