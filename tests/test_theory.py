"""Closed forms against numbers worked out by hand or printed in the papers."""

import math

import numpy as np
import pytest

from normstudy import theory


@pytest.mark.parametrize("layers, alpha, beta", [(48, 3.13017, 0.225901), (12, 2.21336, 0.319472)])
def test_deepnorm_constants_are_those_of_the_decoder_formula(layers, alpha, beta):
    constants = theory.deepnorm_decoder(layers)
    # six printed digits: half a unit in the last one
    assert constants.alpha == pytest.approx(alpha, abs=5e-6)
    assert constants.beta == pytest.approx(beta, abs=5e-7)


def test_deepnorm_alpha_is_not_that_of_another_layer_count():
    """Sublayers (2M), encoder layers or M + 1 put in for M: traps found in public code."""
    right = theory.deepnorm_decoder(48).alpha
    for wrong in (24, 47, 49, 96):
        assert abs(theory.deepnorm_decoder(wrong).alpha - right) > 0.01


def test_plain_placements_have_no_constants():
    assert set(theory.no_constants(48)) == {1.0}


def test_xavier_std_is_sqrt_2_over_the_sum_of_fans():
    assert theory.xavier_std(64, 64) == pytest.approx(0.125, rel=1e-15)
    assert theory.xavier_std(32, 128) == pytest.approx(math.sqrt(1 / 80), rel=1e-15)
    assert theory.xavier_std(32, 128) == theory.xavier_std(128, 32)


def test_kaiming_std_is_sqrt_2_over_fan_in():
    assert theory.kaiming_std(8) == 0.5
    assert theory.kaiming_std(50) == pytest.approx(0.2, rel=1e-15)


def test_depth_scale_counts_two_sublayers_a_layer():
    assert theory.depth_scale(48) == pytest.approx(0.1020620726, abs=1e-10)
    assert theory.depth_scale(2) == 0.5


def test_skip_path_gain_of_48_halving_blocks_is_2_to_the_minus_48():
    gain = theory.skip_path_gain(np.full((48, 2), 2**-0.5), alpha=1.0)
    assert gain.shape == (48,)
    # 96 logarithms are added: rounding of about 96 * 1e-16 * 33
    assert gain[0] == pytest.approx(2.0**-48, rel=1e-12)
    assert gain[0] == pytest.approx(3.55e-15, rel=2e-3)  # the printed number
    assert gain[-1] == pytest.approx(0.5, rel=1e-12)
    assert gain[24] == pytest.approx(2.0**-24, rel=1e-12)


def test_skip_path_gain_takes_alpha_twice_a_block():
    factors = np.array([[0.5, 0.25], [0.1, 0.2], [2.0, 3.0]])
    by_hand = [0.5 * 0.25 * 0.1 * 0.2 * 6 * 3.0**6, 0.1 * 0.2 * 6 * 3.0**4, 6 * 3.0**2]
    # three blocks of logarithms and one exponential: a few ulp
    np.testing.assert_allclose(theory.skip_path_gain(factors, 3.0), by_hand, rtol=1e-13)


def test_skip_path_gain_without_norms_on_the_path_is_exactly_1():
    np.testing.assert_array_equal(theory.skip_path_gain(np.ones((5, 0)), 1.0), np.ones(5))


def test_deepnorm_skip_path_product_at_48_layers_is_0_987():
    """field.md, section 3 D: residual-path product alpha / sqrt(alpha^2 + 2 beta^2 ...) printed."""
    alpha = theory.deepnorm_decoder(48).alpha
    beta = theory.deepnorm_decoder(48).beta
    # a branch of variance v^2 w^2 = beta^4 beside a skip path of variance alpha^2
    factor = 1 / math.sqrt(alpha**2 + beta**4)
    gain = theory.skip_path_gain(np.full((48, 2), factor), alpha)[0]
    assert gain == pytest.approx(0.987, abs=1e-3)


DEEPNORM = theory.deepnorm_decoder(48)
SUBLAYERS = 96.0

# norm(alpha x + f(x)) at L = 48: alpha, gain of V and up, gain of O and down, and both criteria
CRITERIA = {
    "post-norm, Xavier": (1.0, 1.0, 1.0, 192, 135.8),
    "post-norm, output projections / sqrt(2L)": (1.0, 1.0, SUBLAYERS**-0.5, 97, 96.5),
    "Admin, alpha^2 = (n+1)/ln(n+1) - 1": (4.494833, 1.0, 1.0, 9.50, 30.2),
    "Admin, alpha^2 = n": (SUBLAYERS**0.5, 1.0, 1.0, 2.0, 13.9),
    "T-Fixup's weights, (9L)^(-1/4)": (1.0, 432**-0.25, 432**-0.25, 9.24, 29.8),
    "DeepNet": (DEEPNORM.alpha, DEEPNORM.beta, DEEPNORM.beta, 1.0, 9.80),
    "KEEL, alpha = 2L": (SUBLAYERS, 1.0, 1.0, 0.021, 1.41),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_update_criteria_at_48_layers(name):
    alpha, v, w, sgd, sign = CRITERIA[name]
    # printed with two to four digits: half a unit in the last one of the shortest
    assert theory.sgd_criterion(48, alpha, v, w) == pytest.approx(sgd, rel=0.01)
    assert theory.sign_criterion(48, alpha, v, w) == pytest.approx(sign, rel=0.004)


def exponent(law) -> float:
    depths = np.array([6, 12, 24, 48, 96, 192])
    return theory.log_slope(depths, np.array([law(int(layers)) for layers in depths]))[0]


def with_deepnorm(law):
    def at(layers: int) -> float:
        alpha, beta = theory.deepnorm_decoder(layers)[:2]
        return law(layers, alpha, beta, beta)

    return at


def test_deepnet_keeps_the_sgd_update_but_lets_the_sign_update_grow_as_the_root_of_the_depth():
    assert exponent(with_deepnorm(theory.sgd_criterion)) == pytest.approx(0, abs=1e-12)
    assert exponent(with_deepnorm(theory.sign_criterion)) == pytest.approx(0.5, abs=1e-12)


def test_alpha_of_twice_the_depth_keeps_the_sign_update():
    """KEEL's alpha, the other way round from DeepNet."""
    keel = lambda law: lambda layers: law(layers, 2.0 * layers, 1.0, 1.0)
    assert exponent(keel(theory.sgd_criterion)) == pytest.approx(-1, abs=1e-12)
    assert exponent(keel(theory.sign_criterion)) == pytest.approx(0, abs=1e-12)


def test_post_norm_s_updates_grow_with_the_depth_and_with_scaled_projections_too():
    xavier = lambda law: lambda layers: law(layers, 1.0, 1.0, 1.0)
    scaled = lambda law: lambda layers: law(layers, 1.0, 1.0, theory.depth_scale(layers))
    for law in (theory.sgd_criterion, theory.sign_criterion):
        assert exponent(xavier(law)) == pytest.approx(1, abs=1e-12)
        # 1 + 1/(2L) beside 1, 8% at the lowest depth
        assert exponent(scaled(law)) == pytest.approx(1, abs=0.03)


def test_top_gradient_is_free_of_the_depth_in_post_norm_and_falls_as_its_root_in_pre_norm():
    post = lambda layers: theory.top_gradient(layers, 1.0, 1.0, 1.0, on_skip_path=True)
    pre = lambda layers: theory.top_gradient(layers, 1.0, 1.0, 1.0, on_skip_path=False)
    assert post(6) == post(192) == pytest.approx(2**-0.5)
    assert pre(48) == pytest.approx(97**-0.5)
    # 1 beside 2L = 12 at the lowest depth: -1/2 but for 1/12
    assert exponent(pre) == pytest.approx(-0.5, abs=0.02)


def test_top_gradient_of_deepnet_falls_as_the_root_of_the_depth():
    """beta / alpha: what keeps the update constant."""
    law = with_deepnorm(lambda *at: theory.top_gradient(*at, on_skip_path=True))
    # the branch's share beta^4 / alpha^2 is 5e-4 at the lowest depth
    assert exponent(law) == pytest.approx(-0.5, abs=1e-3)


def test_top_gradient_of_pre_norm_with_scaled_projections_is_free_of_the_depth():
    law = lambda layers: theory.top_gradient(
        layers, 1.0, 1.0, theory.depth_scale(layers), on_skip_path=False
    )
    assert exponent(law) == pytest.approx(0, abs=1e-12)


def test_log_slope_of_a_power_is_its_exponent():
    depths = np.array([6, 12, 48])
    slope, error = theory.log_slope(depths, 3.0 * depths**-0.7)
    assert slope == pytest.approx(-0.7, abs=1e-12)
    assert error == 0


def test_log_slope_s_error_is_the_scatter_of_slopes():
    """Values off by a known relative error, many times over."""
    depths, errors = np.array([6.0, 12.0, 24.0, 96.0]), np.array([0.02, 0.01, 0.03, 0.02])
    rng, found = np.random.default_rng(0), []
    for _ in range(2000):
        found.append(theory.log_slope(depths, depths * (1 + errors * rng.normal(size=4)))[0])
    _, error = theory.log_slope(depths, depths, errors * depths)
    # the scatter of 2000 numbers is known to 1 / sqrt(4000) = 1.6%
    assert np.std(found) == pytest.approx(error, rel=0.06)
