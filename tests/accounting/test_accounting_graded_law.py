"""Sums of independent terms: bounds above and below the exact expectation, far into the tails."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, special, stats

from shufl.accounting.accountants.pld import _report
from shufl.accounting.numerics.graded_law import law_of_sum
from shufl.accounting.numerics.summand import Summand

pytestmark = pytest.mark.slow

POINTS = 60


def bounds(summand, count, threshold, points=POINTS, put=False):
    laws = [law_of_sum(summand, count, points, lower) for lower in (True, False)]
    at = np.array([threshold])
    return [float((law.put(at) if put else law.call(at))[0]) for law in laws]


def call_of_one(sigma, z):
    """E[(Y - 1 - z)_+], Black and Scholes."""
    if z <= -1.0:
        return -z
    d = (-math.log1p(z) + 0.5 / sigma**2) * sigma
    return float(special.ndtr(d) - (1.0 + z) * special.ndtr(d - 1.0 / sigma))


def call_of_two(sigma, rate, a):
    """E[(Z1 + Z2 - a)_+]: quadrature of a closed form, that of Z2 given Z1.

    Where Z1 alone comes up to `a` + 1, the form bends on a scale much smaller than Z1's.
    """

    def given_one(t):
        z = math.expm1(t / sigma - 0.5 / sigma**2)
        return call_of_one(sigma, a - z) * math.exp(-0.5 * t * t) / math.sqrt(2 * math.pi)

    first, last = -13.0, 13.0 + 2.0 / sigma
    bend = sigma * math.log(a + 2.0) + 0.5 / sigma if a > -2.0 else first
    inside = {min(max(bend - distance, first), last) for distance in (1.0, 0.1, 0.01, 0.0)}
    ends = sorted({first, *inside, last})
    both = sum(
        integrate.quad(given_one, *piece, epsabs=1e-13, epsrel=1e-12, limit=500)[0]
        for piece in itertools.pairwise(ends)
    )
    one = call_of_one(sigma, a)
    return (1 - rate) ** 2 * max(-a, 0.0) + 2 * rate * (1 - rate) * one + rate**2 * both


@given(st.floats(0.25, 100), st.floats(-0.9, 11))
def test_one_lognormal_far_into_its_tail(sigma, deviations):
    z = math.expm1(deviations / sigma - 0.5 / sigma**2)
    truth = call_of_one(sigma, z)
    low, high = bounds(_report(1.0, sigma), 1, z)
    assert low * (1 - 1e-9) - 1e-17 <= truth <= high * (1 + 1e-9) + 1e-17
    # What Black and Scholes loses to cancellation must not be taken for looseness.
    if truth > 1e-8:
        assert high - low <= 0.03 * truth


@given(st.floats(0.4, 20), st.floats(0.01, 1), st.floats(-1, 5))
def test_two_terms_against_quadrature(sigma, rate, place):
    a = place * math.sqrt(2 * rate * math.expm1(min(sigma**-2, 5)))
    truth = call_of_two(sigma, rate, a)
    low, high = bounds(_report(rate, sigma), 2, a)
    assert low <= truth + 1e-9 and truth <= high + 1e-9
    assert high - low <= 2e-3 * truth + 1e-8


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12, 100, 1000])
def test_a_sum_of_atoms_is_binomial(count):
    scale = math.sqrt(count * 3 / 16)
    cells = max(1, round(0.25 * POINTS / scale))  # of the mesh, between two atoms of the sum
    summand = Summand(
        atoms=((-0.25, 0.75), (0.75, 0.25)),
        rate=1e-300,  # the continuous part vanishes: what is left is the grid's own arithmetic
        value=lambda t: t,
        inverse=lambda x: x,
        tail=0.1,
        jump=0.25 * POINTS / cells,
    )
    k = np.arange(count + 1)
    for a in (-0.5, 0.1, 4 * math.sqrt(count * 3 / 16)):
        truth = float(stats.binom.pmf(k, count, 0.25) @ np.maximum(k - 0.25 * count - a, 0))
        low, high = bounds(summand, count, a)
        assert low <= truth * (1 + 1e-9) + 1e-30 and truth <= high * (1 + 1e-9)
        assert high - low <= 0.01 * truth + 1e-9


@pytest.mark.parametrize("count", [10**6, 10**7, 10**9])
def test_many_terms_approach_the_normal_law(count):
    sigma, rate = 3.0, 0.5
    deviation = math.sqrt(count * rate * math.expm1(1 / sigma**2))
    for place in (0.0, 2.0, 5.0):
        normal = deviation * (stats.norm.pdf(place) - place * stats.norm.sf(place))
        low, high = bounds(_report(rate, sigma), count, place * deviation)
        assert low <= high <= 1.1 * low
        skewed = 1.0 + 60.0 / math.sqrt(count)
        assert low / skewed <= normal * 1.01 and normal <= high * 1.01 * skewed


@given(
    st.integers(1, 10**6),
    st.floats(1e-5, 1),
    st.floats(0.15, 50),
    st.floats(-3, 30),
    st.booleans(),
)
def test_lower_never_exceeds_upper_and_more_terms_spread_less(count, rate, sigma, place, put):
    summand = _report(rate, sigma)
    scale = summand.jump * math.sqrt(max(1.0, count * rate)) / count

    def mean(n):
        low, high = bounds(summand, n, n * place * scale, points=24, put=put)
        return low / n, high / n

    low, high = mean(count)
    assert 0.0 <= low <= high
    later, _ = mean(count + 1)  # the reverse martingale: the mean of n + 1 spreads less
    assert later <= high


def test_put_and_call_differ_by_the_mean():
    law = law_of_sum(_report(0.4, 1.5), 23, 60)
    a = np.linspace(-8.0, 20.0, 57)
    assert np.allclose(law.call(a) - law.put(a), -a, rtol=0, atol=1e-9)


def test_a_heavy_tail_is_one_large_term():
    # P[Y > y] for y far beyond the sum's deviation: n tails of one.
    sigma, count = 0.4, 300
    a = 2e5
    low, high = bounds(_report(1.0, sigma), count, a)
    one = count * call_of_one(sigma, a)
    assert 0.95 * one <= low <= high <= 1.15 * one
