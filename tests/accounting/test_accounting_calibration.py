"""Searches for blankets: the formula of the error against draws, the least one against a grid."""

import math

import numpy as np
import pytest
from scipy import optimize

from accounting import (
    CalibrationError,
    least_blankets,
    least_error_blankets,
    least_noise,
    mean_update_error,
)


@pytest.mark.parametrize(
    ("users", "rate", "noise", "beta", "dimension"),
    [
        (40, 0.5, 0.7, 0.4, 3),
        (25, 1.0, 0.1, 0.8, 1),
        (60, 0.1, 2.0, 0.0, 5),
        (30, 0.9, 0.0, 0.2, 2),
    ],
)
def test_the_error_is_that_of_the_servers_estimate(users, rate, noise, beta, dimension):
    """The sum of reports over nγ(1-β), drawn 20 000 times; updates of norm C in all directions."""
    rng, draws = np.random.default_rng(1), 20_000
    updates = rng.normal(size=(users, dimension))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    reports = rng.random((draws, users)) < rate
    with_update = reports & (rng.random((draws, users)) >= beta)
    # The noises of k reports add up to √k times one.
    total = noise * np.sqrt(reports.sum(axis=1))[:, None] * rng.normal(size=(draws, dimension))
    estimate = (with_update @ updates + total) / (users * rate * (1 - beta))
    squares = np.sum((estimate - updates.mean(axis=0)) ** 2, axis=1) / dimension
    expected = mean_update_error(users, rate, noise, beta, dimension) ** 2
    assert abs(squares.mean() - expected) < 5 * squares.std() / math.sqrt(draws)


def test_of_many_coordinates_only_the_noise_counts():
    assert mean_update_error(100, 0.5, 2.0, 0.5) == pytest.approx(2.0 / 0.5 / math.sqrt(50))
    assert mean_update_error(100, 0.5, 2.0, 0.5, 10**9) == pytest.approx(
        mean_update_error(100, 0.5, 2.0, 0.5)
    )


def toy(scale):
    """An ε of the shape of many small losses among blankets, and the noise it asks for."""

    def epsilon(noise, beta):
        return scale * (1 - beta) / math.sqrt(beta) * math.sqrt(math.expm1(min(noise**-2, 700)))

    def noise_at(beta, target):
        return math.log1p((target / scale) ** 2 * beta / (1 - beta) ** 2) ** -0.5

    return epsilon, noise_at


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("dimension", [1, 1000, math.inf])
def test_the_search_finds_the_least_error_in_few_steps(scale, dimension):
    target, rate = 0.7, 0.3
    epsilon, noise_at = toy(scale)
    asked = []

    def counted(noise, beta):
        asked.append((noise, beta))
        return epsilon(noise, beta)

    noise, beta = least_error_blankets(counted, target, rate, dimension)
    assert epsilon(noise, beta) <= target
    assert len(asked) <= 120

    def error(logit):
        at = 1 / (1 + math.exp(-logit))
        return mean_update_error(1, rate, noise_at(at, target), at, dimension)

    grid = np.linspace(-7, 7, 1401)
    start = min(grid, key=error)
    least = optimize.minimize_scalar(error, (start - 0.01, start, start + 0.01)).fun
    assert mean_update_error(1, rate, noise, beta, dimension) <= 1.003 * least


def test_blankets_at_a_given_noise_are_the_least_that_reach_the_target():
    epsilon, _ = toy(1.0)
    beta = least_blankets(lambda b: epsilon(1.0, b), 0.7)
    assert epsilon(1.0, beta) <= 0.7 < epsilon(1.0, beta * 0.998)
    assert least_blankets(lambda b: 0.1, 0.7) == 0.001
    with pytest.raises(CalibrationError, match=r"no blanket probability up to 0.999 reaches"):
        least_blankets(lambda b: 0.8, 0.7)


def test_what_no_noise_reaches_is_said():
    with pytest.raises(CalibrationError, match="no noise multiplier"):
        least_error_blankets(lambda z, b: 0.8, 0.7, 0.1)


@pytest.mark.parametrize("guess", [1e-3, 1.0, 5e4])
def test_the_least_noise_does_not_depend_on_where_the_search_starts(guess):
    assert least_noise(lambda z: 3.0 / z, 0.5, guess) == pytest.approx(6.0, rel=1.1e-3)


def test_noise_that_never_costs_too_much_is_the_least_there_is():
    assert 0 < least_noise(lambda z: 0.1, 0.7) < 0.01
