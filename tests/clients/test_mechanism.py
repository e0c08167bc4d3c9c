"""Clipping bounds every input; a report is the clipped update plus noise of the stated size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from clients import SystemRandomness, clip, privatise

any_vector = hnp.arrays(
    np.float64,
    st.integers(1, 30),
    elements=st.floats(width=64, allow_nan=True, allow_infinity=True),
)


@given(any_vector, st.floats(1e-3, 1e3))
def test_norm_is_at_most_the_clip_norm_whatever_the_input(update, clip_norm):
    assert np.linalg.norm(clip(update, clip_norm)) <= clip_norm * (1 + 1e-12)


@given(any_vector, st.floats(1e-3, 1e3))
def test_clipping_twice_is_clipping_once(update, clip_norm):
    once = clip(update, clip_norm)
    np.testing.assert_allclose(clip(once, clip_norm), once, rtol=1e-12)


def test_short_and_zero_updates_stay_as_they_are():
    assert (clip(np.zeros(5), 1.0) == 0).all()
    assert (clip(np.array([0.3, 0.4]), 1.0) == [0.3, 0.4]).all()


def test_direction_is_kept():
    np.testing.assert_allclose(clip(np.array([30.0, 40.0]), 1.0), [0.6, 0.8])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_becomes_zero(bad):
    assert (clip(np.array([1.0, bad]), 1.0) == 0).all()


@pytest.mark.parametrize("update", [np.ones(40), np.full(40, np.nan), np.full(40, 1e300)])
def test_a_report_is_the_clipped_update_and_the_noise(update):
    (noise,) = SystemRandomness().standard_normal(1, np.array([0]), update.size)
    report = privatise(update, 0.5, 3.0, noise)
    assert (report == (clip(update, 0.5) + 1.5 * noise).astype(np.float32)).all()


def test_noise_has_standard_deviation_z_times_c():
    update = np.zeros(50_000)
    update[0] = 1e9
    (noise,) = SystemRandomness().standard_normal(1, np.array([0]), update.size)
    report = privatise(update, clip_norm=0.5, noise_multiplier=3.0, standard_normal=noise)
    assert report.dtype == np.float32
    report = report.astype(float)
    report[0] -= 0.5
    assert stats.kstest(report / 1.5, "norm").pvalue > 1e-7
