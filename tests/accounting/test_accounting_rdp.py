"""Rényi moments: Theorem 1, exact check-in, fixed size, Theorems 2 and 3."""

import math

import mpmath as mp
import numpy as np
import pytest
from accounting_oracles import (
    moment,
    partitions,
    quadrature,
    series_moments,
    theorem2,
    theorem3,
)
from dp_accounting.rdp import compute_epsilon
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

import accounting_speed
from rounds import check_in, everyone, fixed_size, with_noise
from shufl.accounting import CheckInRdpAccountant, Theorem3Accountant
from shufl.accounting.numerics import moments
from shufl.accounting.numerics import renyi_divergence as rdp_bounds
from shufl.accounting.numerics import theorem3 as t3
from shufl.accounting.numerics.reverse_moments import _MeanRatio, larger_direction

CASES = [
    (1, 1.0, 2.0),
    (2, 1.0, 0.5),
    (3, 0.4, 1.0),
    (7, 0.9, 0.3),
    (50, 0.02, 3.0),
    (10**4, 0.1, 10.0),
    (10**8, 1e-3, 100.0),
    (10**8, 1.0, 0.7),
]


def never_below(got, truth, slack=2e-10):
    """The truth is bounded from above, and missed by at most `slack` of itself."""
    assert truth <= mp.mpf(float(got)) <= truth * (1 + mp.mpf(slack))


@pytest.mark.parametrize(("users", "rate", "sigma"), CASES)
def test_moments_equal_the_partition_sum_in_50_digits(users, rate, sigma):
    got = rdp_bounds.forward_moments(users, users, rate, sigma, 12)
    for order in range(2, 13):
        never_below(got[order], mp.log(moment(users, sigma, order, rate)))


@pytest.mark.slow
def test_the_published_algorithm_of_the_benchmark_is_enumerated_fully():
    assert [tuple(parts) for parts in accounting_speed.partitions(9)] == list(partitions(9))
    assert sum(1 for _ in accounting_speed.partitions(40)) == 37338
    for order in (2, 7, 12):
        found = accounting_speed.enumerated_log_moment(50, 2.0, order)
        assert found == pytest.approx(float(mp.log(moment(50, 2.0, order))), rel=1e-9)


@pytest.mark.parametrize(
    ("users", "rate", "sigma"),
    [(60_000, 0.1, 5.0), (60_000, 1.0, 9.48), (10**6, 0.01, 1.2), (30, 0.3, 1.0), (4, 1.0, 2.0)],
)
def test_high_orders_equal_the_series_in_high_precision(users, rate, sigma):
    with mp.workdps(400 if users < 100 else 60):
        truth = series_moments(users, sigma, 150, rate)
        got = rdp_bounds.forward_moments(users, users, rate, sigma, 150)
        for order in range(2, 151, 7):
            never_below(got[order], mp.log(truth[order]))


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0, 1e4])
def test_one_user_who_always_reports_is_the_gaussian_mechanism(sigma):
    rdp = rdp_bounds.rdp_from_log_moments(rdp_bounds.forward_moments(1, 1, 1.0, sigma, 300))
    np.testing.assert_allclose(rdp, np.arange(2, 301) / (2 * sigma**2), rtol=3e-10)


def reverse(users, draws, rate, sigma, max_order):
    """The reverse direction alone: the larger one of it and next to nothing."""
    return larger_direction(np.full(max_order + 1, 1e-30), users, draws, rate, sigma)


@pytest.mark.parametrize(
    ("sigma", "max_order"), [(0.3, 8), (1.0, 30), (3.0, 200), (50.0, 1024), (1e3, 1024)]
)
@pytest.mark.parametrize("rate", [1.0, 0.3, 1e-3])
def test_the_reverse_direction_of_one_user_is_the_closed_form(sigma, max_order, rate):
    for order in (2, 3, max_order // 2, max_order):
        k = np.array([order - 1.0])
        growth = mp.expm1((k[0] ** 2 + k[0]) / (2 * mp.mpf(sigma) ** 2))
        truth = float(mp.log1p(mp.mpf(rate) * growth))
        got = _MeanRatio(1.0, 1.0, rate, sigma).reverse(k, np.array([truth]))[0]
        assert got == pytest.approx(truth, rel=1e-11)


@given(
    users=st.integers(1, 3),
    rate=st.floats(0.01, 1),
    sigma=st.floats(1.0, 8.0),
    order=st.integers(2, 8),
)
def test_the_reverse_direction_equals_quadrature_and_is_not_the_larger(users, rate, sigma, order):
    truth = math.log(quadrature(users, sigma, rate, lambda w: w ** (1.0 - order)))
    assert reverse(users, users, rate, sigma, order)[order] == pytest.approx(truth, rel=1e-7)
    forward = rdp_bounds.forward_moments(users, users, rate, sigma, order)
    assert truth <= forward[order] * (1 + 1e-9)


def test_the_reverse_direction_of_a_billion_users_keeps_its_digits():
    users, rate, sigma = 10**9, 0.1, 5.0
    q = math.expm1(1 / sigma**2)
    third = mp.exp(3 / mp.mpf(sigma) ** 2) - 3 * mp.exp(1 / mp.mpf(sigma) ** 2) + 2
    got = reverse(users, users, rate, sigma, 50)
    for k in (1, 5, 49):
        # 1 + C(k+1, 2) E[Z²] - C(k+2, 3) E[Z³] + ..., Z = W̄ - 1; then terms of order n^-2.
        second = math.comb(k + 1, 2) * rate * q / users
        truth = second - math.comb(k + 2, 3) * rate * float(third) / users**2
        assert got[k + 1] == pytest.approx(truth, rel=2e-9, abs=second**2 * 10)


def test_both_directions_are_taken_by_the_accountants(monkeypatch):
    event = check_in(7, 0.4, 2.0)
    tiny = np.full(21, 1e-30)
    monkeypatch.setattr(rdp_bounds, "forward_moments", lambda *_: tiny)
    got = CheckInRdpAccountant.log_moments(event, 2.0, 20)
    assert got[2] == pytest.approx(math.log(float(
        mp.fsum(mp.binomial(7, m) * mp.mpf(0.4) ** m * mp.mpf(0.6) ** (7 - m)
                * mp.exp(float(reverse(7, m, 1.0, 2.0, 2)[2])) for m in range(8))
    )), rel=1e-8)  # fmt: skip


def test_table_1_of_the_paper():
    orders = np.arange(2, 31)
    rdp = rdp_bounds.rdp_from_log_moments(rdp_bounds.forward_moments(60_000, 60_000, 1.0, 9.48, 30))
    for compositions in range(1, 8):
        epsilon = compute_epsilon(orders, compositions * rdp, 1 / 60_000)[0]
        assert 0.228200 <= epsilon <= 0.228225


@given(
    users=st.integers(1, 40),
    rate=st.floats(1e-3, 1),
    sigma=st.floats(0.3, 30),
    order=st.integers(2, 30),
)
def test_check_in_is_the_binomial_mixture_of_fixed_sizes(users, rate, sigma, order):
    chances = stats.binom.pmf(np.arange(users + 1), users, rate)
    mixture = 0.0
    for k, chance in enumerate(chances):
        part = rdp_bounds.forward_moments(users, k, 1.0, sigma, order)[order]
        mixture += chance * (mp.expm1(part))
    got = rdp_bounds.forward_moments(users, users, rate, sigma, order)[order]
    assert got == pytest.approx(float(mp.log1p(mixture)), rel=1e-8)


@given(
    users=st.integers(1, 10**6),
    rate=st.floats(1e-4, 0.9),
    sigma=st.floats(0.3, 30),
    factor=st.floats(1.01, 1.1),
)
def test_rdp_falls_in_users_and_noise_and_rises_in_the_rate(users, rate, sigma, factor):
    def rdp(n, g, s):
        return rdp_bounds.forward_moments(n, n, g, s, 30)

    here = rdp(users, rate, sigma)
    slack = 1 + 1e-9
    assert np.all(rdp(users + 1, rate, sigma) <= here * slack)
    assert np.all(rdp(users, rate, sigma * factor) <= here * slack)
    assert np.all(rdp(users, rate * factor, sigma) * slack >= here)


@pytest.mark.parametrize(("rate", "m", "sigma"), [(0.1, 1, 5.0), (0.3, 20, 0.4), (1.0, 500, 3.0)])
def test_theorem_2_is_the_printed_sum(rate, m, sigma):
    got = rdp_bounds.subsampled_shuffled_gaussian(rate, m, sigma, 10)
    for order in range(2, 11):
        never_below(got[order], mp.log(theorem2(rate, m, sigma, order)))


@given(data=st.data(), users=st.integers(1, 5000), sigma=st.floats(0.2, 30))
def test_theorem_2_is_never_below_the_exact_fixed_size_moment(data, users, sigma):
    m = data.draw(st.integers(1, users))
    bound = rdp_bounds.subsampled_shuffled_gaussian(m / users, m, sigma, 40)
    exact = rdp_bounds.forward_moments(users, m, 1.0, sigma, 40)
    assert np.all(bound * (1 + 1e-9) >= exact)


def test_no_reports_cost_nothing_even_without_noise():
    assert not rdp_bounds.forward_moments(10, 0, 1.0, 0.0, 5).any()
    assert not rdp_bounds.subsampled_shuffled_gaussian(0.5, 0, 0.0, 5).any()


@pytest.mark.parametrize("noise", [0.0, 1e-160, 1e-200])
@pytest.mark.parametrize("event", [everyone(5, 1.0), check_in(5, 0.5, 1.0), fixed_size(5, 2, 1.0)])
def test_a_moment_that_cannot_be_represented_is_infinite(event, noise):
    for kind in (CheckInRdpAccountant, Theorem3Accountant):
        assert np.all(kind(max_order=4).compose(with_noise(event, noise)).rdp > 1e300)


def test_very_large_noise_keeps_its_digits():
    got = rdp_bounds.forward_moments(10, 10, 1.0, 1e100, 2)[2]
    assert got == pytest.approx(1e-201, rel=1e-8)  # log(1 + (e^s - 1)/10), s = 1e-200
    assert np.all(rdp_bounds.forward_moments(10**6, 10**6, 0.01, 1e170, 10)[2:] > 0)


def test_a_nan_becomes_infinite_not_small():
    assert moments.round_up(np.array([np.nan]))[0] == np.inf


@pytest.mark.parametrize(
    ("users", "rate", "sigma"), [(30, 0.5, 2.0), (12, 0.9, 0.3), (40, 0.2, 0.8), (9, 0.05, 1.0)]
)
def test_theorem_3_is_the_printed_formula_at_every_split_in_50_digits(users, rate, sigma):
    got = t3.shuffled_check_in_gaussian(users, rate, sigma, 8)
    for order in range(2, 9):
        never_below(got[order], theorem3(users, rate, sigma, order))


@given(users=st.integers(1, 200_000), rate=st.floats(1e-4, 1.0), sigma=st.floats(0.15, 30.0))
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
