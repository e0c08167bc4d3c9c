"""Clipping bounds every input; a report is the clipped update plus noise of the stated size."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from rounds import words
from shufl.protocol.mechanisms import GaussianMechanism, clip, to_normals

any_vector = hnp.arrays(
    np.float64,
    st.integers(1, 30),
    elements=st.floats(width=64, allow_nan=True, allow_infinity=True),
)


@given(any_vector, st.floats(1e-18, 1e15))
@example(np.array([1.7e308]), 1.35e-15)  # their ratio has few digits in float64
def test_norm_is_at_most_the_clip_norm_whatever_the_input(update, clip_norm):
    assert np.linalg.norm(clip(update, clip_norm)) <= clip_norm * (1 + 1e-12)


@pytest.mark.parametrize(
    ("update", "clipped"),
    [
        ([0.0, 0.0], [0, 0]),
        ([0.3, 0.4], [0.3, 0.4]),
        ([30.0, 40.0], [0.6, 0.8]),
        *(([1.0, bad], [0, 0]) for bad in (np.nan, np.inf, -np.inf)),
    ],
)
def test_short_updates_stay_long_ones_keep_their_direction_the_rest_is_zero(update, clipped):
    np.testing.assert_allclose(clip(np.array(update), 1.0), clipped)


@pytest.mark.parametrize("update", [np.ones(40), np.full(40, np.nan), np.full(40, 1e300)])
def test_a_report_is_the_clipped_update_and_the_noise_in_steps_of_the_unit(update):
    noise = words(update.size)
    mechanism = GaussianMechanism(clip_norm=0.5, noise_multiplier=3.0)
    report = mechanism.report(update, noise)
    assert report.dtype == np.int16
    assert mechanism.unit(1) == pytest.approx(0.5 * 37 / 32767)
    error = report * mechanism.unit(1) - (clip(update, 0.5) + 1.5 * to_normals(noise))
    assert np.abs(error).max() <= mechanism.unit(1) / 2 * (1 + 1e-9)


@pytest.mark.parametrize("noise_multiplier", [0.2, 1.0, 30.0])
def test_a_report_saturates_beyond_twelve_deviations_and_never_wraps(noise_multiplier):
    noise = np.array([11.9, 13.0, 40.0, -11.9, -13.0, -1e30])
    mechanism = GaussianMechanism(clip_norm=2.0, noise_multiplier=noise_multiplier)
    report = mechanism.report(np.zeros(6), noise)
    scale = 2.0 * noise_multiplier / mechanism.unit(1)
    assert report[[0, 3]].tolist() == [round(11.9 * scale), round(-11.9 * scale)]
    assert mechanism.report(np.zeros(2), np.array([1e9, -1e9])).tolist() == [32767, -32767]
    assert (np.sign(report) == np.sign(noise)).all()


def test_honest_reports_pass_the_norm_limit():
    mechanism = GaussianMechanism(clip_norm=0.5, noise_multiplier=2.0)
    update = np.zeros(40)
    update[0] = 1.0
    noise = np.random.default_rng(1).standard_normal((20_000, 40))
    norms = [np.linalg.norm(mechanism.report(update, row).astype(float)) for row in noise]
    limit = mechanism.largest_honest_norm(40)
    assert max(norms) < limit < 3 * max(norms)


def test_the_clip_norm_only_sets_the_unit():
    """A report's integers say nothing of C: the plan does."""
    update, noise = np.array([0.3, -0.2, 0.1]), np.array([0.5, -1.5, 0.2])
    small = GaussianMechanism(clip_norm=1e-6, noise_multiplier=1.5).report(1e-6 * update, noise)
    assert (small == GaussianMechanism(noise_multiplier=1.5).report(update, noise)).all()


def test_another_source_of_draws_gives_the_same_law_of_bits():
    """A blanket is a report of the zero update: all values of the low bits are as frequent."""
    mechanism = GaussianMechanism(noise_multiplier=1.0)
    draws = words(20, 5000)
    blanket = np.stack([mechanism.report(np.zeros(5000), row) for row in draws[:10]])
    users = np.stack([mechanism.report(np.full(5000, 1e-3), row) for row in draws[10:]])
    for reports in (blanket, users):
        counts = np.bincount((reports & 15).ravel(), minlength=16)
        assert stats.chisquare(counts).pvalue > 1e-6
