"""The error of the mean update against draws; the least noise."""

import math

import numpy as np
import pytest

from accounting import CalibrationError, least_noise, mean_update_error


@pytest.mark.parametrize(
    ("users", "rate", "noise", "blankets", "dimension"),
    [
        (40, 0.5, 0.7, 9.0, 3),
        (25, 1.0, 0.1, 80.0, 1),
        (60, 0.1, 2.0, 0.0, 5),
        (30, 0.9, 0.0, 3.0, 2),
    ],
)
def test_the_error_is_that_of_the_servers_estimate(users, rate, noise, blankets, dimension):
    """The sum of reports over nγ, drawn 20 000 times; updates of norm C in all directions."""
    rng, draws = np.random.default_rng(1), 20_000
    updates = rng.normal(size=(users, dimension))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    reports = rng.random((draws, users)) < rate
    # The noises of k reports add up to √k times one.
    noises = reports.sum(axis=1) + rng.poisson(blankets, draws)
    total = noise * np.sqrt(noises)[:, None] * rng.normal(size=(draws, dimension))
    estimate = (reports @ updates + total) / (users * rate)
    squares = np.sum((estimate - updates.mean(axis=0)) ** 2, axis=1) / dimension
    expected = mean_update_error(users, rate, noise, blankets, dimension) ** 2
    assert abs(squares.mean() - expected) < 5 * squares.std() / math.sqrt(draws)


def test_of_many_coordinates_only_the_noise_counts():
    assert mean_update_error(100, 0.5, 2.0) == pytest.approx(2.0 / math.sqrt(50))
    assert mean_update_error(100, 0.5, 2.0, 150.0) == pytest.approx(2.0 * 2.0 / math.sqrt(50))
    assert mean_update_error(100, 0.5, 2.0, 150.0, 10**9) == pytest.approx(
        mean_update_error(100, 0.5, 2.0, 150.0)
    )


def test_what_no_noise_reaches_is_said():
    with pytest.raises(CalibrationError, match="no noise multiplier"):
        least_noise(lambda z: 0.8, 0.7)


@pytest.mark.parametrize("guess", [1e-3, 1.0, 5e4])
def test_the_least_noise_does_not_depend_on_where_the_search_starts(guess):
    assert least_noise(lambda z: 3.0 / z, 0.5, guess) == pytest.approx(6.0, rel=1.1e-3)


def test_noise_that_never_costs_too_much_is_the_least_there_is():
    assert 0 < least_noise(lambda z: 0.1, 0.7) < 0.01
