"""Randomised response: the law of its reports, and which ε₀ and blankets a budget allows."""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from nights import by_night
from shufl.accounting import OpenPlan, calibrate, make_accountant
from shufl.protocol import CheckIn, RandomisedResponse, Shuffled
from shufl.protocol.mechanisms import SeededRandomness, SystemRandomness

REPORTS = 40_000


def reports_of(mechanism, update, randomness):
    draws = randomness.standard_normal(1, np.arange(REPORTS), mechanism.draws(len(update)))
    return np.array([mechanism.report(update, each) for each in draws])


def update_of(shares):
    return (1 / len(shares) - np.array(shares)).astype(np.float32)


@pytest.mark.parametrize("randomness", [SeededRandomness(3), SystemRandomness()])
@pytest.mark.parametrize(
    ("shares", "local"),
    [
        ([0, 1, 0, 0], 1.0),
        ([0.5, 0, 0.5, 0, 0], 2.0),
        *by_night(([0, 0, 1], 20.0), ([0.25] * 4, 3.0)),
    ],
)
@pytest.mark.slow
def test_reports_have_the_law_and_the_mean_that_is_stated(shares, local, randomness):
    k = len(shares)
    mechanism = RandomisedResponse(categories=k, local_epsilon=local)
    grown = math.exp(local)
    right, wrong = grown / (grown + k - 1), 1 / (grown + k - 1)
    chances = np.array(shares) * right + (1 - np.array(shares)) * wrong
    reports = reports_of(mechanism, update_of(shares), randomness)
    assert reports.dtype == np.int16
    assert set(np.unique(reports)) <= {1 - k, 1}
    assert (reports.sum(axis=1) == 0).all()
    counts = (reports == 1 - k).sum(axis=0)
    possible = chances > 1e-6
    assert counts[~possible].sum() <= 2
    if possible.sum() > 1:
        expected = chances[possible] / chances[possible].sum() * counts[possible].sum()
        assert stats.chisquare(counts[possible], expected).pvalue > 1e-7
    mean = reports.mean(axis=0) * mechanism.unit(k)
    error = np.sqrt(chances * (1 - chances) / REPORTS) * k * mechanism.unit(k)
    np.testing.assert_array_less(np.abs(mean - update_of(shares)), 5.5 * error + 1e-3)


@pytest.mark.parametrize(
    "update",
    [
        np.full(3, np.nan),
        np.array([np.nan, -1e38, 0.0]),
        *by_night(np.full(3, np.inf), np.full(3, -np.inf), np.full(3, 1e30), np.zeros(3)),
    ],
)
@pytest.mark.slow
def test_an_update_that_is_no_share_still_makes_a_report(update):
    mechanism = RandomisedResponse(categories=3, local_epsilon=1.0)
    reports = reports_of(mechanism, update, SeededRandomness(1))
    counts = (reports == -2).sum(axis=0)
    assert counts.sum() == REPORTS
    least = REPORTS / (math.e + 2)
    assert (counts > least - 5 * math.sqrt(least)).all()
    longest = np.linalg.norm(reports.astype(float), axis=1).max()
    assert longest <= mechanism.largest_honest_norm(3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("categories", 1),
        ("categories", 2**15 + 1),
        ("categories", 2.5),
        ("local_epsilon", 0.0),
        ("local_epsilon", 20.1),
        ("local_epsilon", math.nan),
    ],
)
def test_values_out_of_range_are_refused(key, value):
    with pytest.raises(ValueError, match=f"{key} must be"):
        RandomisedResponse(**{"categories": 4, "local_epsilon": 1.0, key: value})


def epsilon_at(accountant, users, categories, local, blankets):
    mechanism = RandomisedResponse(categories=categories, local_epsilon=local)
    event = Shuffled(users, CheckIn(1.0), mechanism, blankets)
    return make_accountant(accountant).epsilon_after(event, 1e-6)


def fitted(users, categories, target, local, blankets):
    plan = OpenPlan(
        users=users,
        check_in_rate=1.0,
        mechanism="randomised-response",
        categories=categories,
        local_epsilon=local,
        rounds=1,
        delta=1e-6,
        shuffler_blankets=blankets,
        accountant="blanket",
    )
    found = calibrate(plan, epsilon=target)
    return found.mechanism.local_epsilon, found.shuffler_blankets


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "categories", "target"), [(10**5, 8, 0.5), *by_night((300, 3, 4.0))]
)
def test_what_is_fitted_is_within_the_budget_and_beats_its_neighbours(users, categories, target):
    at = functools.partial(epsilon_at, "blanket", users, categories)
    local, blankets = fitted(users, categories, target, None, "least-error")
    assert at(local, blankets) <= target

    def error(local, blankets):
        truth = RandomisedResponse(categories=categories, local_epsilon=local).truth
        return math.sqrt((users + blankets) / truth**2 - users)

    for other in (0.9 * target, target, 2.0, 4.0, 8.0, 20.0):
        least = fitted(users, categories, target, other, "least-error")[1]
        assert error(local, blankets) <= 1.03 * error(other, least)


@pytest.mark.slow
def test_what_is_given_stays_and_the_other_is_found():
    at = functools.partial(epsilon_at, "blanket", 10**4, 5)
    local, blankets = fitted(10**4, 5, 0.4, 3.0, "least-error")
    assert local == 3.0
    assert 0.396 < at(local, blankets) <= 0.4
    local, blankets = fitted(10**4, 5, 0.4, None, 500.0)
    assert blankets == 500.0
    assert at(local, blankets) <= 0.4 < at(local * 1.01, blankets)
    assert fitted(10**4, 5, 0.4, 3.0, 7.0) == (3.0, 7.0)
