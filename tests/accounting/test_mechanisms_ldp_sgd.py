"""The reports of LDP-SGD: unit vectors on the update's side, or on the other by a coin."""

import math

import numpy as np
import pytest
from scipy import stats

from nights import by_night
from shufl.protocol.mechanisms import LdpSgd, SeededRandomness, SystemRandomness


def reports_of(mechanism, update, count, randomness, round=1):
    draws = randomness.standard_normal(round, np.arange(count), mechanism.draws(update.size))
    return np.stack([mechanism.report(update, each) for each in draws]) * mechanism.unit(
        update.size
    )


@pytest.mark.parametrize("randomness", [SeededRandomness(5), SystemRandomness()])
@pytest.mark.parametrize("share", [0.4, 0.0, *by_night(1.0)])
@pytest.mark.parametrize("dimension", [1, 7, *by_night(2, 300)])
@pytest.mark.slow
def test_reports_are_unbiased_and_of_one_length(dimension, share, randomness):
    mechanism, count = LdpSgd(clip_norm=0.5, noise_multiplier=2.0), 4000
    update = np.random.default_rng(dimension).standard_normal(dimension)
    update *= share * 0.5 / np.linalg.norm(update)
    reports = reports_of(mechanism, update, count, randomness)
    lengths = np.linalg.norm(reports, axis=1)
    rounding = mechanism.unit(dimension) * math.sqrt(dimension) / 2
    np.testing.assert_allclose(lengths, mechanism.norm(dimension), atol=rounding)
    assert lengths.max() <= mechanism.largest_honest_norm(dimension) * mechanism.unit(dimension)
    deviation = mechanism.noise_deviation(dimension)
    error = (reports.mean(0) - update) * math.sqrt(count) / deviation
    assert np.abs(error).max() < 5.5
    assert stats.chi2(dimension).sf(np.sum(error**2)) > 1e-6
    assert deviation == pytest.approx(2.0 * 0.5, rel=0.6 / dimension)


def test_longer_updates_are_clipped_and_one_that_is_not_finite_is_a_blanket():
    mechanism, draws = LdpSgd(noise_multiplier=1.5), np.random.default_rng(1).normal(size=11)
    update = np.linspace(-1.0, 1.0, 10)
    ones = [mechanism.report(update * scale, draws) for scale in (1.0, 7.0, 1e200)]
    assert (ones[0] == ones[1]).all() and (ones[0] == ones[2]).all()
    blanket = mechanism.report(np.zeros(10), draws)
    for wrong in (math.nan, math.inf):
        assert (mechanism.report(np.full(10, wrong), draws) == blanket).all()


@pytest.mark.parametrize("share", [0.3, *by_night(1.0)])
@pytest.mark.slow
def test_the_chance_of_the_updates_side_is_that_of_local_epsilon(share):
    """All that an update changes is which of v and -v is sent; its odds are e^{ε₀} at most."""
    mechanism, count = LdpSgd(noise_multiplier=1.6), 40000
    odds = math.exp(mechanism.local_epsilon)
    assert (odds - 1) / (odds + 1) == pytest.approx(mechanism.bias)
    update = np.array([0.6, -0.8]) * share
    reports = reports_of(mechanism, update, count, SeededRandomness(3))
    right = int((reports @ update > 0).sum())
    chance = 0.5 * (1 + share * mechanism.bias)
    assert stats.binomtest(right, count, chance).pvalue > 1e-4
    if share == 1.0:
        assert chance == pytest.approx(odds / (1 + odds))
    # On either side every direction is as likely as any other.
    half = reports[reports @ update > 0] / mechanism.norm(2)
    angles = np.arctan2(half @ np.array([0.8, 0.6]), half @ np.array([0.6, -0.8]))
    assert stats.kstest(angles / math.pi + 0.5, "uniform").pvalue > 1e-3


def test_no_draw_makes_a_report_that_only_one_update_can_have():
    """The same draws, for two updates: the same vector or its opposite, to the bit."""
    mechanism, random = LdpSgd(noise_multiplier=1.3), np.random.default_rng(8)
    for _ in range(200):
        draws = random.normal(size=6)
        one, other = (mechanism.report(random.normal(size=5), draws) for _ in range(2))
        assert (one == other).all() or (one == -other).all()


def test_the_length_along_a_direction_has_the_law_of_a_uniform_vector():
    mechanism, random = LdpSgd(noise_multiplier=2.0), np.random.default_rng(4)
    for dimension in (1, 2, 5, 400):
        drawn = mechanism.lengths_along(random.normal(size=4000), dimension)
        vectors = random.normal(size=(4000, dimension))
        along = np.abs(vectors[:, 0]) / np.linalg.norm(vectors, axis=1)
        if dimension == 1:
            np.testing.assert_allclose(drawn, mechanism.norm(1))
        else:
            other = along * mechanism.norm(dimension)
            assert stats.ks_2samp(drawn, other).pvalue > 1e-3


def test_a_draw_of_zeros_is_a_report_all_the_same():
    mechanism = LdpSgd(noise_multiplier=2.0)
    for dimension in (1, 3):
        report = mechanism.report(np.zeros(dimension), np.zeros(dimension + 1)).astype(float)
        length = np.linalg.norm(report) * mechanism.unit(dimension)
        assert length == pytest.approx(mechanism.norm(dimension), rel=1e-4)


@pytest.mark.parametrize("noise", [0.0, 1.2533, 1.25331413740, math.inf, math.nan])
def test_noise_below_that_of_no_privacy_is_refused(noise):
    with pytest.raises(ValueError, match=r"above sqrt\(pi/2\) = 1.2533 .* with mechanism ldp-sgd"):
        LdpSgd(noise_multiplier=noise)
