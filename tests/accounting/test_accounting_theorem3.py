"""Theorem 3, as it is printed."""

import math

import mpmath as mp
import numpy as np
import pytest
from accounting_oracles import moment, theorem3
from dp_accounting.rdp import compute_epsilon
from hypothesis import assume, given
from hypothesis import strategies as st

from shufl.accounting.numerics import moments
from shufl.accounting.numerics import renyi as rdp_bounds
from shufl.accounting.numerics import theorem3 as t3

PARAMETERS = {
    "users": st.integers(1, 200_000),
    "rate": st.floats(1e-4, 1.0),
    "sigma": st.floats(0.15, 30.0),
}


def test_reference_value_of_the_published_setting():
    log_moments = t3.shuffled_check_in_gaussian(60_000, 0.1, 5.0, 256)
    rdp = rdp_bounds.rdp_from_log_moments(log_moments)
    epsilon, order = compute_epsilon(np.arange(2, 257), 5540 * rdp, 1 / 60_000)
    assert epsilon == pytest.approx(9.617, abs=0.001)
    assert order == 2


@pytest.mark.parametrize(
    ("users", "rate", "sigma"), [(30, 0.5, 2.0), (12, 0.9, 0.3), (40, 0.2, 0.8), (9, 0.05, 1.0)]
)
def test_equals_the_printed_formula_at_every_split_in_50_digits(users, rate, sigma):
    got = t3.shuffled_check_in_gaussian(users, rate, sigma, 8)
    for order in range(2, 9):
        truth = theorem3(users, rate, sigma, order)
        assert truth <= mp.mpf(float(got[order])) <= truth * (1 + mp.mpf(2e-10))


def every_split(users, rate, sigma, max_order):
    """Brute force over all m, with the moments of each m from the direct recurrence."""
    mean = users * rate
    m = np.arange(1, min(math.floor(mean) + 1, users) + 1)
    bound = np.array(
        [rdp_bounds.subsampled_shuffled_gaussian(rate, k, sigma, max_order) for k in m.tolist()]
    ).T
    with np.errstate(divide="ignore"):
        second = moments.log_expm1(bound / (1 + moments.ROUND_UP))
    first = np.logaddexp(0.0, second[:, 0])
    tail = -0.5 * mean * np.maximum(1 - (m - 1) / mean, 0) ** 2
    return np.logaddexp(0.0, np.min(np.logaddexp(first[:, None] + tail, second), axis=1))


@given(users=st.integers(1, 400), rate=st.floats(1e-3, 1.0), sigma=st.floats(0.2, 30.0))
def test_the_split_found_is_the_best_of_all(users, rate, sigma):
    got = t3.shuffled_check_in_gaussian(users, rate, sigma, 40)[2:]
    brute = every_split(users, rate, sigma, 40)[2:]
    assert np.all(got >= brute * (1 - 1e-12))
    assert np.all(got <= brute * (1 + 3e-10))


@given(**PARAMETERS)
def test_as_printed_is_never_below_the_exact_value_if_a_report_is_expected(users, rate, sigma):
    assume(users * rate >= 1.0)
    exact = rdp_bounds.forward_moments(users, users, rate, sigma, 60)
    printed = t3.shuffled_check_in_gaussian(users, rate, sigma, 60)
    assert np.all(printed * (1 + 1e-9) >= exact)


def test_as_printed_falls_below_the_true_divergence_if_hardly_anyone_checks_in():
    """57 users at rate 0.00036: why the accountant floors the printed theorem."""
    printed = theorem3(57, 0.00036, 1.7233, 12)
    exact = mp.log(moment(57, 1.7233, 12, 0.00036))
    assert printed > exact  # low orders are fine,
    printed = t3.shuffled_check_in_gaussian(57, 0.00036, 1.7233, 48)[48]
    exact = rdp_bounds.forward_moments(57, 57, 0.00036, 1.7233, 48)[48]
    assert printed < 0.1 * exact  # high ones are not


def test_a_hundred_million_expected_reports_are_no_harder():
    result = t3.shuffled_check_in_gaussian(10**9, 0.1, 1.0, 256)
    assert np.all(np.isfinite(result))
