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
    assert theory.no_constants(48) == (1.0, 1.0)


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
