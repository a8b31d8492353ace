"""Learning rates against numbers worked out by hand; the audit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normstudy import schedules
from normstudy.config import Optim
from normstudy.errors import UserError

# optax computes in float32
F32 = 1e-6


def table(total: int, width: int = 64, **fields) -> np.ndarray:
    return schedules.table(Optim(**fields), width, total)


def test_constant_is_constant():
    np.testing.assert_allclose(table(5, lr=0.3), np.full(5, 0.3), rtol=F32)


def test_warmup_is_lr_times_update_over_warmup_then_the_peak():
    expected = [0.1, 0.2, 0.3, 0.4, 0.4, 0.4]
    np.testing.assert_allclose(table(6, lr=0.4, warmup=4), expected, rtol=F32)


def test_warmup_of_one_update_is_no_warmup():
    np.testing.assert_allclose(table(3, lr=0.4, warmup=1), [0.4, 0.4, 0.4], rtol=F32)


def test_warmup_as_long_as_the_run_ends_at_the_peak():
    for name in ("constant", "linear", "cosine", "wsd", "inverse_sqrt"):
        found = table(4, lr=0.4, warmup=4, schedule=name)
        np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4], rtol=F32)


def test_linear_ends_at_the_end_fraction():
    expected = [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    found = table(6, lr=1.0, warmup=2, schedule="linear", end_fraction=0.25)
    np.testing.assert_allclose(found, expected, rtol=F32)


def test_cosine_ends_at_the_end_fraction():
    found = table(5, lr=2.0, schedule="cosine", end_fraction=0.1)
    by_hand = [2 * (0.1 + 0.9 * (1 + math.cos(math.pi * n / 4)) / 2) for n in range(5)]
    np.testing.assert_allclose(found, by_hand, rtol=F32)
    assert found[-1] == pytest.approx(0.2, rel=1e-5)


def test_wsd_decays_over_its_last_share():
    found = table(10, lr=1.0, warmup=2, schedule="wsd", decay_fraction=0.4, end_fraction=0.25)
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]  # the last four from 1 to 0.25
    np.testing.assert_allclose(found, expected, rtol=F32)


def test_2017_schedule_is_its_formula_counted_from_1():
    w, d = 4000, 512
    found = table(6000, width=d, schedule="inverse_sqrt_2017", warmup=w, schedule_scale=2.0)
    u = np.arange(1, 6001)
    by_hand = 2.0 * d**-0.5 * np.minimum(u**-0.5, u * w**-1.5)
    np.testing.assert_allclose(found, by_hand, rtol=1e-12)


def test_2017_schedule_starts_above_0_and_peaks_at_7e_4_at_update_4000():
    found = table(6000, width=512, schedule="inverse_sqrt_2017", warmup=4000)
    assert found[0] == pytest.approx(512**-0.5 * 4000**-1.5, rel=1e-12)
    assert np.argmax(found) + 1 == 4000
    assert found[3999] == pytest.approx(7.0e-4, rel=5e-3)


def test_2017_schedule_ignores_lr():
    a, b = (table(9, schedule="inverse_sqrt_2017", warmup=4, lr=lr) for lr in (1.0, 1e-4))
    np.testing.assert_array_equal(a, b)


def test_inverse_sqrt_is_the_2017_shape_with_its_peak_at_lr():
    found = table(30, lr=0.5, schedule="inverse_sqrt", warmup=10)
    assert np.argmax(found) + 1 == 10
    assert found[9] == pytest.approx(0.5, rel=1e-12)
    assert found[0] == pytest.approx(0.05, rel=1e-12)
    assert found[29] == pytest.approx(0.5 * math.sqrt(10 / 30), rel=1e-12)
    shape = table(30, schedule="inverse_sqrt_2017", warmup=10)
    np.testing.assert_allclose(found / found.max(), shape / shape.max(), rtol=1e-12)


def test_ramp_rises_by_the_same_step_at_every_update_up_to_the_peak():
    np.testing.assert_allclose(table(4, lr=0.8, schedule="ramp"), [0.2, 0.4, 0.6, 0.8], rtol=1e-12)


def test_keel_s_ramp_is_at_3e_4_at_update_30():
    """0 to 5e-2 over 5000 updates, where its Post-LN fails."""
    found = table(5000, lr=5e-2, schedule="ramp")
    assert found[29] == pytest.approx(3.0e-4, rel=1e-12)
    assert found[-1] == pytest.approx(5e-2, rel=1e-12)


def test_geometric_ramp_rises_by_the_same_factor_at_every_update_up_to_the_peak():
    found = table(5, lr=2.0, schedule="geometric_ramp", end_fraction=1e-4)
    np.testing.assert_allclose(found, [2e-4, 2e-3, 2e-2, 0.2, 2.0], rtol=1e-12)


def test_ramps_of_one_update_are_at_the_peak():
    for name in ("ramp", "geometric_ramp"):
        assert table(1, lr=0.5, schedule=name).tolist() == [0.5]


def test_ramps_ignore_warmup():
    for name in ("ramp", "geometric_ramp"):
        found = [table(8, schedule=name, warmup=warmup) for warmup in (0, 5)]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("fraction", [0.0, 1.0, 2.0])
def test_geometric_ramp_that_does_not_rise_is_refused(fraction):
    with pytest.raises(UserError, match="end_fraction between 0 and 1"):
        table(4, schedule="geometric_ramp", end_fraction=fraction)


def test_audit_shows_the_first_updates_the_end_of_warmup_and_the_last():
    found = schedules.audit(Optim(lr=0.4, warmup=8, schedule="linear"), 64, 20)
    assert found == pytest.approx({1: 0.05, 2: 0.1, 3: 0.15, 8: 0.4, 20: 0.04}, rel=1e-5)


def test_audit_of_a_run_of_two_updates_has_two_entries():
    assert list(schedules.audit(Optim(), 64, 2)) == [1, 2]


def test_audit_line_names_its_updates():
    line = schedules.audit_line(Optim(lr=0.4, warmup=8, schedule="linear"), 64, 20)
    assert line == (
        "linear: update 1 0.05, update 2 0.1, update 3 0.15, update 8 (end of warmup) 0.4, "
        "update 20 (last) 0.04"
    )


@pytest.mark.parametrize("name", ["linear", "cosine", "wsd"])
def test_rate_of_zero_is_refused_with_its_update(name):
    with pytest.raises(UserError, match=r"is 0 at update 12 of 12") as error:
        table(12, schedule=name, end_fraction=0.0, warmup=2)
    assert name in str(error.value)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(list(schedules.SCHEDULES)),
    lr=st.floats(1e-6, 10),
    total=st.integers(1, 24),
    share=st.floats(0, 1),
    end_fraction=st.floats(0.01, 0.99),  # at 1 a geometric ramp does not rise
    decay_fraction=st.floats(0.01, 1),
)
def test_every_schedule_is_positive_and_never_above_its_peak(
    name, lr, total, share, end_fraction, decay_fraction
):
    optim = Optim(
        lr=lr, schedule=name, warmup=round(share * total), end_fraction=end_fraction,
        decay_fraction=decay_fraction,
    )  # fmt: skip
    rates = schedules.table(optim, 64, total)
    assert rates.shape == (total,)
    assert np.isfinite(rates).all() and (rates > 0).all()
    if name != "inverse_sqrt_2017":
        assert rates.max() <= lr * (1 + F32)
    peak = int(np.argmax(rates))
    warmup = rates[: optim.warmup]
    assert (np.diff(warmup) > 0).all() and peak + 1 >= min(optim.warmup, total)
    # after its peak no schedule rises again; float32 may wobble in the last digit
    assert (np.diff(rates[peak:]) <= rates.max() * F32).all()
