"""Sums of random jumps: closed forms, quadrature, Monte Carlo, Edgeworth, and the graded law."""

import functools
import math

import numpy as np
import pytest
from from_below import positive_part_from_below
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from nights import by_night
from shufl.accounting.numerics.graded_law import law_of_sum
from shufl.accounting.numerics.jump_counts import PoissonCount, TermsCount
from shufl.accounting.numerics.jump_sum import positive_part
from shufl.accounting.numerics.summand import Summand
from shufl.accounting.numerics.worst_pairs import AGAINST_ZERO, OPPOSITE, ZERO_AGAINST

pytestmark = pytest.mark.slow

PAIRS = [OPPOSITE, AGAINST_ZERO, ZERO_AGAINST]


def both(pair, width, alpha, count):
    jumps = pair.jumps(width, alpha)
    return positive_part_from_below(jumps, count), positive_part(jumps, count)


def value(pair, width, alpha, t):
    """The jump at t, written again."""
    rising, falling = (np.exp(s * width * t - 0.5 * width**2) for s in (1.0, -1.0))
    return {
        OPPOSITE: rising - alpha * falling,
        AGAINST_ZERO: rising - alpha,
        ZERO_AGAINST: 1.0 - alpha * falling,
    }[pair]


def place(pair, width, alpha, x):
    """t at which the jump is x; infinite outside its range."""
    x, half = np.asarray(x, dtype=float), 0.5 * width**2
    with np.errstate(divide="ignore"):
        if pair is AGAINST_ZERO:
            return (np.log(np.maximum(x + alpha, 0.0)) + half) / width
        if pair is ZERO_AGAINST:
            return (math.log(alpha) - np.log(np.maximum(1.0 - x, 0.0)) - half) / width
    # u - α/u = x e^{half} for u = e^{wt}, without cancellation.
    y = 0.5 * np.abs(x) * math.exp(half)
    logs = np.log(y + np.hypot(y, math.sqrt(alpha)))
    return np.where(x >= 0.0, logs, math.log(alpha) - logs) / width


def call(pair, width, alpha, strike):
    """E[(X - strike)_+] in closed form, as Black and Scholes."""
    t = place(pair, width, alpha, strike)
    plain, up, down = special.ndtr(-t), special.ndtr(width - t), special.ndtr(-width - t)
    return {
        OPPOSITE: up - alpha * down - strike * plain,
        AGAINST_ZERO: up - (alpha + strike) * plain,
        ZERO_AGAINST: (1.0 - strike) * plain - alpha * down,
    }[pair]


def few_jumps(pair, width, alpha, rate, shift):
    """Bounds of `E[(shift + S)_+]`: up to three jumps by quadrature, the rest at its worst.

    The last jump is a closed form, the others' t a trapezoidal rule, which is all but exact for
    what is as smooth as this.
    """
    t = np.linspace(-9.0, 9.0 + 2 * width, 121 if width <= 1.0 else 401)
    weight = stats.norm.pdf(t) * (t[1] - t[0])
    x = value(pair, width, alpha, t)
    one = float(call(pair, width, alpha, -shift))
    two = float(weight @ call(pair, width, alpha, -shift - x))
    three = float(weight @ call(pair, width, alpha, -shift - x[:, None] - x) @ weight)
    chance = stats.poisson.pmf([1, 2, 3], rate)
    low = float(chance @ [one, two, three])
    # (b + Σ X)_+ <= Σ X_+, and E[K; K > 3] = rate P[K > 2].
    return low, low + rate * stats.poisson.sf(2, rate) * float(call(pair, width, alpha, 0.0))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_few_jumps_by_quadrature(pair, rate):
    for width in (0.01, 0.5, 2.0, 5.0):
        for alpha in (1.0, 1.05, 3.0):
            for shift in (0.0, -0.05):
                least, most = few_jumps(pair, width, alpha, rate, shift)
                low, high = both(pair, width, alpha, PoissonCount(rate, shift))
                assert low <= most * (1 + 1e-9) + 1e-15
                assert high >= least * (1 - 1e-9) - 1e-15
                if rate >= 0.1 and width <= 1.0 and shift == 0.0 and least > 0.01 * rate * width:
                    assert high <= 1.005 * most and low >= 0.98 * least


def simulated(pair, width, alpha, counts, steps, rng):
    """Mean and five standard errors of (steps + Σ X)_+, so many jumps in each draw."""
    total = np.concatenate(
        [[0.0], np.cumsum(value(pair, width, alpha, rng.standard_normal(int(counts.sum()))))]
    )
    ends = np.cumsum(counts)
    sums = np.maximum(total[ends] - total[ends - counts] + steps, 0.0)
    return float(sums.mean()), 5 * float(sums.std()) / math.sqrt(sums.size)


# Jumps against zero have rare huge values with little noise; of zero against it, none above 1.
@pytest.mark.parametrize(
    ("pair", "count", "width", "alpha", "draws"),
    [
        (ZERO_AGAINST, PoissonCount(0.1, -0.1), 5.0, 3.0, 400_000),
        (ZERO_AGAINST, PoissonCount(3.0, -0.5), 1.0, 1.5, 200_000),
        (OPPOSITE, PoissonCount(3.0, -2.0), 1.0, 2.0, 200_000),
        (OPPOSITE, PoissonCount(10.0, -0.1), 0.2, 1.02, 200_000),
        (ZERO_AGAINST, PoissonCount(10.0), 5.0, 1.0, 200_000),
        (OPPOSITE, PoissonCount(300.0, -10.0), 1.0, 1.1, 10_000),
        (AGAINST_ZERO, PoissonCount(300.0, -1.0), 0.2, 1.0, 10_000),
        (ZERO_AGAINST, PoissonCount(1000.0), 2.0, 1.0, 10_000),
        (ZERO_AGAINST, TermsCount(1, 0.95, 0.04, 0.7), 1.0, 1.2, 200_000),
        (OPPOSITE, TermsCount(3, 0.5, 0.4, 0.5), 0.5, 1.5, 200_000),
        (AGAINST_ZERO, TermsCount(30, 0.1, 0.6, 0.02), 0.5, 1.02, 200_000),
        (OPPOSITE, TermsCount(100, 0.01, 0.98, 0.01), 0.3, 1.01, 200_000),
        (OPPOSITE, TermsCount(1000, 0.2), 1.0, 1.05, 10_000),
        (ZERO_AGAINST, TermsCount(10_000, 0.02, 0.9, 5e-4), 0.5, 1.0005, 10_000),
    ],
)
def test_sums_by_monte_carlo(pair, count, width, alpha, draws):
    rng = np.random.default_rng(7)
    if isinstance(count, PoissonCount):
        numbers, rest = rng.poisson(count.jumps, draws), count.shift
    else:  # of the terms that are no jumps, so many go down
        numbers = rng.binomial(count.terms, count.chance, draws)
        falls = rng.binomial(count.terms - numbers, count.down / (1.0 - count.chance))
        rest = -count.step * falls
    truth, error = simulated(pair, width, alpha, numbers, rest, rng)
    low, high = both(pair, width, alpha, count)
    assert low <= truth + error and truth - error <= high
    if isinstance(count, PoissonCount):
        assert high <= (1.02 if width <= 2.0 else 1.1) * low


def edgeworth(pair, width, alpha, rate, shift):
    """`E[(shift + S)_+]` of very many jumps: normal, with the corrections of order 1/rate."""
    t = np.linspace(-12.0, 12.0 + 4 * width, 8001)
    x = value(pair, width, alpha, t)
    weight = stats.norm.pdf(t) * (t[1] - t[0])
    mean, square, cube, fourth = (rate * float(weight @ x**k) for k in (1, 2, 3, 4))
    scale = math.sqrt(square)
    d = -(shift + mean) / scale
    skew, kurtosis = cube / scale**3, fourth / scale**4
    waves = skew / 6 * d + kurtosis / 24 * (d**2 - 1) + skew**2 / 72 * (d**4 - 6 * d**2 + 3)
    return scale * (stats.norm.pdf(d) * (1 + waves) - d * stats.norm.sf(d))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("width", [0.01, 0.2, 0.7])
@pytest.mark.parametrize(("rate", "tolerance"), [(1e4, 1e-2), (1e5, 2e-3), (1e7, 1e-3)])
def test_very_many_jumps_are_nearly_normal(pair, width, rate, tolerance):
    deviation = math.sqrt(rate) * width
    for fall in (0.0, 0.5, 2.0):
        for shift in (0.0, -0.5 * deviation):
            alpha = 1.0 + fall * deviation / rate
            low, high = both(pair, width, alpha, PoissonCount(rate, shift))
            truth = edgeworth(pair, width, alpha, rate, shift)
            assert low <= high <= 1.002 * low
            assert truth == pytest.approx(high, rel=tolerance)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("chance", [0.01, 1.0, *by_night(1e-6, 0.9)])
def test_one_term_is_one_jump(pair, chance):
    for width in (0.01, 0.7, 5.0):
        for alpha in (1.0, 1.3, 20.0):
            truth = chance * float(call(pair, width, alpha, 0.0))
            if truth < 1e-12 * chance:
                continue  # what cancels in the closed form
            low, high = both(pair, width, alpha, TermsCount(1.0, chance))
            error = 1e-15 * chance
            assert low - error <= truth * (1 + 1e-8) and truth * (1 - 1e-8) <= high + error
            fallen = both(pair, width, alpha, TermsCount(1.0, chance, 1.0 - chance, 0.3))
            assert fallen[0] - error <= truth * (1 + 1e-8)
            assert truth * (1 - 1e-8) <= fallen[1] + error
            if chance == 0.01 and width <= 1.0 and alpha <= 1.0 + width:
                assert high <= 1.02 * truth and low >= 0.98 * truth


def graded(pair, width, alpha, terms, chance, down, step, points=60):
    """The same sum by direct convolution on a grid, from below and above."""
    summand = Summand(
        atoms=((0.0, 1.0 - chance - down), (-step, down)),
        rate=chance,
        value=functools.partial(value, pair, width, alpha),
        inverse=functools.partial(place, pair, width, alpha),
        tail=width,
        jump=2.0 * math.erf(width / math.sqrt(2.0)) + alpha - 1.0,
    )
    return [
        float(law_of_sum(summand, terms, points, lower).call(np.zeros(1))[0])
        for lower in (True, False)
    ]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(
    ("terms", "chance", "down", "width", "excess"),
    [
        (2, 0.999, 0.0, 1.0, 0.0),
        (40, 0.5, 0.5, 0.3, 0.05),
        (1, 0.3, 0.6, 0.5, 0.2),
        (10_000, 0.4, 0.0, 0.2, 0.001),
        *by_night((7, 0.05, 0.9, 1.0, 0.3), (1000, 0.6, 0.3, 2.0, 0.1)),
    ],
)
def test_sums_of_terms_by_the_graded_law(pair, terms, chance, down, width, excess):
    for alpha in (1.0 + excess, 1.0 + 6 * excess):
        step = alpha - 1.0
        least, most = graded(pair, width, alpha, terms, chance, down, step)
        low, high = both(pair, width, alpha, TermsCount(terms, chance, down, step))
        assert least <= high and low <= most
        if least > 0.995 * most and terms * chance >= 10.0 and width <= 0.5:
            assert high <= 1.01 * least and low >= 0.99 * most


@given(
    st.sampled_from(PAIRS),
    st.floats(2.0, 7.0),
    st.floats(0.0, 3.0),
    st.floats(0.3, 1.0),
    st.floats(0.0, 3.0),
)
def test_tight_for_ordinary_parameters(pair, log_rate, log_noise, check_in, deviations):
    """λ from 100 to 10⁷, z from 1 to 1000, γ >= 0.3, up to three deviations from the mean."""
    rate, width = 10.0**log_rate, 10.0**-log_noise
    excess = deviations * width / math.sqrt(rate)
    shift = -rate * (1.0 / check_in - 1.0) * excess
    low, high = both(pair, width, 1.0 + excess, PoissonCount(rate, shift))
    assert 0.0 < low <= high <= 1.002 * low


@given(
    st.sampled_from(PAIRS),
    st.floats(-1.0, 7.0),
    st.floats(math.log10(0.2), 3.0),
    st.floats(-6.0, 0.0),
    st.one_of(st.just(0.0), st.floats(-5.0, math.log10(30.0)).map(lambda x: 10.0**x)),
)
@pytest.mark.filterwarnings("error")
def test_any_poisson_sum_has_bounds(pair, log_rate, log_noise, log_check_in, loss):
    rate, width, check_in = 10.0**log_rate, 10.0**-log_noise, 10.0**log_check_in
    excess = math.expm1(loss)

    def divergence(factor):
        blankets = factor * rate
        shift = -blankets * (1.0 / check_in - 1.0) * excess
        bounds = both(pair, width, 1.0 + excess, PoissonCount(blankets, shift))
        return [bound * check_in / blankets for bound in bounds]

    low, high = divergence(1.0)
    assert 0.0 <= low <= high < math.inf
    # A lone report's divergence is at most its chance to be sent: (b + S)_+ <= Σ X_+.
    assert low <= check_in * (1 + 1e-9)
    # More blankets hide more.
    assert divergence(2.0)[0] <= high * (1 + 1e-9)


@given(
    st.sampled_from(PAIRS),
    st.integers(1, 10**6),
    st.floats(-6.0, -0.005),
    st.floats(0.0, 1.0),
    st.floats(math.log10(0.2), 3.0),
    st.one_of(st.just(0.0), st.floats(-5.0, math.log10(30.0)).map(lambda x: 10.0**x)),
    st.floats(0.01, 100.0),
)
@pytest.mark.filterwarnings("error")
def test_any_sum_of_terms_has_bounds(pair, terms, log_chance, share, log_noise, loss, depth):
    chance, excess = 10.0**log_chance, math.expm1(loss)
    down = share * (1.0 - chance)
    count = TermsCount(float(terms), chance, down, depth * excess)
    low, high = both(pair, 10.0**-log_noise, 1.0 + excess, count)
    assert 0.0 <= low <= high < math.inf
    most = terms * chance * float(call(pair, 10.0**-log_noise, 1.0 + excess, 0.0))
    assert low <= most * (1 + 1e-8) + 1e-13 * terms * chance


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("count", [PoissonCount(1e6), TermsCount(500.0, 0.5, 0.5, 1.0)])
def test_jumps_that_are_never_positive_sum_to_nearly_nothing(count):
    low, high = both(OPPOSITE, 1e-3, 2.0, count)
    assert low == 0.0
    assert 0.0 <= high < 1e-20 * count.jumps
