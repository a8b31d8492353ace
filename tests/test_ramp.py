"""What a run on a ramp survived, on curves whose fate is plain to see."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normstudy import outcome, ramp

H1 = 3.0
WINDOW = outcome.RULE.window


def flat(level: float, n: int) -> np.ndarray:
    return np.full(n, float(level))


LEARNS = np.concatenate([np.linspace(6, 2, 100), flat(2, 50)])  # healthy from about step 85 on


def survival(*parts: np.ndarray) -> ramp.Survival:
    """On a ramp whose rate at step s is s + 1, so that rates and steps are told apart by one."""
    losses = np.concatenate(parts)
    return ramp.survival(losses, np.arange(1.0, len(losses) + 1), H1)


def test_run_healthy_to_the_end_has_a_lower_bound_the_peak():
    found = survival(LEARNS)
    assert (found.kind, found.max_stable_lr, found.failed_at) == ("survived", 150, None)


def test_run_that_falls_back_to_h1_failed_where_it_did():
    found = survival(LEARNS, flat(3.1, 100))
    assert found.kind == "failed"
    # the mean over 20 is above 2.95 once 18 of its losses are 3.1 (2 + 1.1 k / 20)
    assert found.failed_at == 167
    assert found.max_stable_lr == 167  # the rate of step 166


def test_run_that_rises_above_its_start_failed_where_it_left_h1():
    found = survival(LEARNS, flat(50, 100))
    assert (found.kind, found.failed_at, found.max_stable_lr) == ("failed", 150, 150)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_loss_that_is_not_finite_is_a_failure_at_its_step(bad):
    found = survival(LEARNS, flat(bad, 1))
    assert (found.kind, found.failed_at, found.max_stable_lr) == ("failed", 150, 150)
    assert "not finite at step 150" in found.why


def test_run_that_was_dead_before_it_stopped_being_finite_failed_when_it_died():
    found = survival(LEARNS, flat(3.1, 60), flat(np.nan, 5))
    assert (found.kind, found.failed_at) == ("failed", 167)


def test_nothing_after_a_loss_that_is_not_finite_counts():
    assert survival(LEARNS, flat(np.nan, 1), flat(2, 300)).max_stable_lr == 150


@pytest.mark.parametrize("height", [2.8, 6.0, 100.0])
def test_spike_that_comes_back_was_survived(height):
    found = survival(LEARNS, flat(height, 30), flat(2, 100))
    assert (found.kind, found.max_stable_lr) == ("survived", 280)


def test_failure_after_a_spike_that_came_back_is_the_one_that_counts():
    found = survival(LEARNS, flat(6, 30), flat(2, 100), flat(6, 60))
    assert found.kind == "failed"
    assert found.failed_at == pytest.approx(284, abs=1)


@pytest.mark.parametrize(
    "losses",
    [
        np.concatenate([np.linspace(6, 3.2, 100), flat(3.2, 100)]),
        flat(3.05, 200),  # a plateau on H1 from the beginning
        flat(2.97, 200),  # within the margin
        flat(6, 200),
        flat(np.nan, 3),
        np.concatenate([np.linspace(6, 4, 50), flat(np.inf, 1)]),
    ],
    ids=["never below", "plateau", "margin", "untouched", "never finite", "exploded early"],
)
def test_run_that_was_never_better_than_h1_has_no_max_stable_rate(losses):
    found = survival(losses)
    assert (found.kind, found.max_stable_lr, found.failed_at) == ("never trained", None, None)


def test_one_low_loss_is_no_training():
    """It pulls the mean below H1 for as long as the window, and no longer."""
    losses = np.concatenate([flat(3.1, 100), flat(-0.5, 1), flat(3.1, 100)])
    assert (outcome.smooth(losses) < H1 - outcome.RULE.margin).sum() == WINDOW
    assert survival(losses).kind == "never trained"


def test_one_high_loss_near_the_end_is_no_failure():
    assert survival(LEARNS, flat(100, 1), flat(2, WINDOW - 1)).kind == "survived"


def test_one_low_loss_does_not_revive():
    found = survival(LEARNS, flat(3.1, 100), flat(-0.5, 1), flat(3.1, 100))
    assert found.failed_at == 167


@pytest.mark.parametrize("after, kind", [(WINDOW, "survived"), (WINDOW + 1, "failed")])
def test_rise_at_the_very_end_counts_once_it_lasts_longer_than_the_window(after, kind):
    found = survival(LEARNS, flat(50, after))
    assert (found.kind, found.max_stable_lr) == (kind, 150)
    assert found.failed_at == (150 if kind == "failed" else None)


def test_rates_that_are_no_ramp_of_these_losses_are_refused():
    for losses, rates in ((flat(2, 3), flat(1, 4)), (flat(2, 0), flat(1, 0))):
        with pytest.raises(ValueError, match="are not one ramp"):
            ramp.survival(losses, rates, H1)


def test_run_refused_an_update_has_failed_though_all_its_losses_are_fine():
    losses, rates = flat(2.0, 200), np.geomspace(1e-4, 1, 200)
    assert ramp.survival(losses, rates, H1).kind == "survived"
    found = ramp.survival(losses, rates, H1, refused=True)
    assert (found.kind, found.max_stable_lr, found.failed_at) == ("failed", 1.0, 200)


@settings(max_examples=200, deadline=None)
@given(
    losses=st.lists(st.floats(width=32) | st.floats(0, 6), min_size=1, max_size=130),
    h1=st.floats(0.1, 12),
)
def test_every_curve_gets_a_kind_and_a_rate_of_the_ramp(losses, h1):
    rates = np.geomspace(1e-4, 1, len(losses))
    with np.errstate(all="raise", under="ignore"):  # the mean of 0 and 5e-324 is 0
        found = ramp.survival(np.array(losses), rates, h1)
    assert found.kind in ramp.KINDS and found.why
    assert (found.max_stable_lr is None) == (found.kind == "never trained")
    assert (found.failed_at is None) == (found.kind != "failed")
    if found.max_stable_lr is not None:
        assert found.max_stable_lr in rates
    if found.failed_at is not None:
        assert found.max_stable_lr == rates[found.failed_at - 1]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_a_run_that_goes_on_dead_says_the_same_of_itself(longer, seed):
    """How long the dead are watched, that is --stop-after, changes no number."""
    noise = np.random.default_rng(seed).normal(0, 0.08, 230 + longer)
    losses = np.concatenate([LEARNS, flat(3.15, 80 + longer)]) + noise
    rates = np.geomspace(1e-4, 1, 430)[: len(losses)]
    whole = ramp.survival(losses, rates, H1)
    cut = ramp.survival(losses[:230], rates[:230], H1)
    assert whole.kind == cut.kind == "failed"
    assert (whole.max_stable_lr, whole.failed_at) == (cut.max_stable_lr, cut.failed_at)
