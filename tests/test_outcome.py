"""The six words, on loss curves whose fate is plain to see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normstudy import outcome

H1 = 3.0


def flat(level: float, n: int) -> np.ndarray:
    return np.full(n, float(level))


def ramp(a: float, b: float, n: int) -> np.ndarray:
    return np.linspace(a, b, n)


def classify(*parts: np.ndarray, warmup: int = 0) -> outcome.Outcome:
    return outcome.classify(np.concatenate(parts), H1, warmup)


def test_run_that_falls_below_h1_and_stays_is_trained():
    found = classify(ramp(6, 2, 100), flat(2, 100))
    assert found.word == "trained"
    # the ramp passes 2.95 at step 75.5; the trailing mean over 20 follows 9.5 steps later
    assert found.step == pytest.approx(85, abs=1)


def test_run_that_never_leaves_h1_is_stalled():
    found = classify(ramp(6, 3, 50), flat(3, 200))
    assert found.word == "stalled"
    assert found.step == pytest.approx(60, abs=12)


def test_stalled_dates_from_no_earlier_than_the_end_of_warmup():
    assert classify(ramp(6, 3, 50), flat(3, 200), warmup=150).step == 150


def test_plateau_just_below_h1_is_no_training():
    """Within the margin of 0.05: letter frequencies and nothing else."""
    assert classify(ramp(6, 2.97, 50), flat(2.97, 200)).word == "stalled"
    assert classify(ramp(6, 2.93, 50), flat(2.93, 200)).word == "trained"


def test_run_that_falls_back_to_h1_and_stays_is_collapsed():
    found = classify(ramp(6, 2, 100), flat(2, 50), flat(3.1, 100))
    assert found.word == "collapsed"
    # the mean over 20 is above 2.95 once 18 of its losses are 3.1 (2 + 1.1 k / 20)
    assert found.step == pytest.approx(167, abs=1)


def test_run_back_above_h1_for_less_than_a_plateau_is_undecided():
    found = classify(ramp(6, 2, 100), flat(2, 50), flat(3.1, 40))
    assert (found.word, found.step) == ("undecided", pytest.approx(167, abs=1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_loss_is_diverged_at_its_step(bad):
    losses = ramp(6, 2, 100)
    losses[37] = bad
    losses[80] = np.nan
    found = classify(losses)
    assert (found.word, found.step) == ("diverged", 37)
    assert str(bad) in found.why


def test_non_finite_first_loss_is_diverged_at_step_0():
    found = outcome.classify(np.array([np.nan]), H1, 0)
    assert (found.word, found.step) == ("diverged", 0)


def test_run_above_its_start_that_does_not_come_back_is_diverged():
    found = classify(ramp(6, 4, 50), ramp(4, 12, 50), flat(12, 100))
    assert found.word == "diverged"
    # the rising ramp is back at 6 at step 62; the trailing mean follows 9.5 steps later
    assert found.step == pytest.approx(72, abs=2)


def test_run_that_rises_and_comes_back_is_spiked():
    found = classify(ramp(6, 2, 100), flat(2, 50), flat(2.8, 25), flat(2, 100))
    assert found.word == "spiked"
    assert found.step == pytest.approx(172, abs=3)


def test_one_high_loss_is_no_spike():
    losses = np.concatenate([ramp(6, 2, 100), flat(2, 100)])
    losses[150] = 6  # 4 nats for one update: 0.2 in the mean over 20
    assert outcome.classify(losses, H1, 0).word == "trained"


def test_run_still_falling_above_h1_is_undecided():
    found = classify(ramp(6, 3.5, 200))
    assert (found.word, found.step) == ("undecided", 200)
    assert "falling" in found.why


def test_run_still_falling_below_h1_is_trained_once_it_has_stayed_there():
    assert classify(ramp(6, 2, 300)).word == "trained"  # below H1 for its last 60 updates
    assert classify(ramp(6, 2, 200)).word == "undecided"  # for its last 30


def test_flat_far_above_h1_is_not_called_stalled():
    found = classify(ramp(6, 4.5, 50), flat(4.5, 200))
    assert found.word == "undecided" and "far above" in found.why


def test_fall_back_far_above_h1_is_not_called_collapsed():
    found = classify(ramp(6, 2, 100), flat(5, 200))
    assert found.word == "undecided" and "fell back above" in found.why


def test_overshoot_before_anything_was_learned_is_no_spike():
    assert classify(flat(5, 10), flat(9, 10), ramp(5, 2, 50), flat(2, 200)).word == "trained"


def test_run_in_the_middle_of_a_rise_is_undecided():
    found = classify(ramp(6, 2, 100), flat(2, 50), flat(2.6, 20))
    assert found.word == "undecided"


def test_run_shorter_than_its_warmup_or_a_plateau_is_undecided():
    assert classify(ramp(6, 2, 100), warmup=101).word == "undecided"
    assert classify(ramp(6, 2, 49)).word == "undecided"
    assert outcome.classify(np.array([]), H1, 0).word == "undecided"


def test_smooth_is_the_trailing_mean():
    losses = np.random.default_rng(0).normal(size=50)
    by_hand = [losses[max(0, i - 19) : i + 1].mean() for i in range(50)]
    np.testing.assert_allclose(outcome.smooth(losses), by_hand, rtol=1e-12)


def test_one_huge_loss_leaves_the_mean_once_its_window_has_passed():
    """A difference of running totals would keep its rounding error for ever."""
    losses = flat(2, 100)
    losses[30] = 1e20
    # a mean of twenty twos, whatever came before
    np.testing.assert_allclose(outcome.smooth(losses)[50:], 2, rtol=1e-12)


def test_sealed_counts_updates_since_the_outcome_of_a_dead_run():
    dead = np.concatenate([ramp(6, 2, 100), flat(2, 50), flat(3.1, 100)])
    found = outcome.classify(dead, H1, 0)
    assert outcome.sealed_for(dead, H1, 0) == 250 - found.step
    assert outcome.sealed_for(dead, H1, 200) == 50  # from the end of warmup, if that is later


def test_sealed_counts_a_run_that_fell_back_to_anywhere_once_a_plateau_would():
    """On a ramp of the learning rate the dead do not settle on H1."""
    lost = np.concatenate([ramp(6, 2, 100), flat(2, 50), flat(5, 80)])
    found = outcome.classify(lost, H1, 0)
    assert "fell back above" in found.why
    assert outcome.sealed_for(lost, H1, 0) == 230 - found.step
    assert outcome.sealed_for(lost[: found.step + outcome.RULE.stay], H1, 0) == outcome.RULE.stay
    assert outcome.sealed_for(lost[: found.step + outcome.RULE.stay - 1], H1, 0) == 0


def test_sealed_counts_a_run_above_its_start():
    lost = np.concatenate([ramp(6, 4, 50), ramp(4, 12, 50), flat(12, 100)])
    assert outcome.sealed_for(lost, H1, 0) == 200 - outcome.classify(lost, H1, 0).step > 50


def test_sealed_is_0_while_a_run_lives_or_is_undecided():
    assert outcome.sealed_for(np.concatenate([ramp(6, 2, 100), flat(2, 100)]), H1, 0) == 0
    assert outcome.sealed_for(ramp(6, 3.5, 200), H1, 0) == 0
    assert outcome.sealed_for(np.array([]), H1, 0) == 0


@settings(max_examples=300, deadline=None)
@given(
    # float32 losses: what training can log
    losses=st.lists(st.floats(width=32) | st.floats(0, 6), max_size=130),
    h1=st.floats(0.1, 12),
    warmup=st.integers(0, 200),
)
def test_every_curve_gets_one_of_the_words_and_a_step_inside_it(losses, h1, warmup):
    with np.errstate(all="raise", under="ignore"):
        found = outcome.classify(np.array(losses), h1, warmup)
    assert found.word in outcome.WORDS
    assert 0 <= found.step <= max(len(losses), warmup)
    assert found.why
    assert outcome.sealed_for(np.array(losses), h1, warmup) >= 0


@settings(max_examples=100, deadline=None)
@given(st.floats(0.5, 8), st.floats(-1.5, 1.5), st.integers(60, 200), st.integers(0, 2**32 - 1))
def test_a_shift_of_losses_and_h1_together_changes_no_word(start, slope, n, seed):
    losses = start + np.cumsum(np.random.default_rng(seed).normal(slope / 100, 0.1, n))
    a = outcome.classify(losses, 3.0, 10)
    # a power of two, so that the shift itself rounds nothing that a margin could turn on
    b = outcome.classify(losses + 4, 7.0, 10)
    assert a.word == b.word
