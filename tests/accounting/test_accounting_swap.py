"""The swap bound: its worst law, the sums it reads, and the bound against exact likelihoods."""

import math

import numpy as np
import pytest
from accounting_oracles import lower_bounds
from scipy import special

from nights import by_night
from rounds import check_in
from shufl import accounting
from shufl.accounting.numerics.jump_counts import TermsCount
from shufl.accounting.numerics.jump_sum import positive_parts
from shufl.accounting.numerics.swap_bound import SwapBound, worst_law
from shufl.accounting.numerics.worst_pairs import AGAINST_ZERO, OPPOSITE, ZERO_AGAINST

pytestmark = pytest.mark.slow

# User 1's two records on a line, in the unit ball.
PAIRS = {OPPOSITE: (1.0, -1.0), AGAINST_ZERO: (1.0, 0.0), ZERO_AGAINST: (0.0, 1.0)}


def stop_loss_on_the_line(first, second, other, width, alpha, s):
    """∫(f_first - α f_second - s f_other)_+ by the trapezoidal rule, in units of z."""
    y = np.linspace(-14.0, 14.0, 56001)
    f, g, h = (np.exp(-0.5 * (y - width * m) ** 2) for m in (first, second, other))
    scale = (y[1] - y[0]) / math.sqrt(2.0 * math.pi)
    return np.array([np.sum(np.maximum(f - alpha * g - each * h, 0.0)) for each in s]) * scale


def stop_loss_of_the_law(pair, width, alpha, s):
    """E(V* - s)_+ from V* as a function of t."""
    t = np.linspace(-14.0, 14.0, 56001)
    weight = np.exp(-0.5 * t * t) * (t[1] - t[0]) / math.sqrt(2.0 * math.pi)
    v = worst_law(pair, width, alpha, 1.0).value(t)
    return np.array([np.sum(weight * np.maximum(v - each, 0.0)) for each in s])


def strikes(width, alpha):
    near = np.geomspace(0.02, 6.0, 9) * max(width, 1.0)
    return np.concatenate([-near[::-1], [1.0 - alpha, 0.0], near])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("alpha", [1.0, 1.3, 4.0])
@pytest.mark.parametrize("width", [0.2, 1.0, 2.0])
def test_the_worst_law_is_the_upper_envelope_of_two_placements(pair, alpha, width):
    first, second = PAIRS[pair]
    s = strikes(width, alpha)
    ends = [stop_loss_on_the_line(first, second, w, width, alpha, s) for w in (-1.0, 1.0)]
    found = stop_loss_of_the_law(pair, width, alpha, s)
    np.testing.assert_allclose(found, np.maximum(*ends), rtol=2e-6, atol=2e-7)
    # The proof names which end is the larger, by the sign of s.
    right = 0 if pair is not ZERO_AGAINST else 1
    far = stop_loss_on_the_line(first, second, (-1.0, 1.0)[right], width, alpha, s[s > 0.0])
    np.testing.assert_allclose(found[s > 0.0], far, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("raised", [1.0, 1.4])
def test_mean_slope_and_order_of_the_worst_law(pair, raised):
    for width, alpha in [(0.2, 1.0), (0.5, 1.3), (1.0, 4.0), (2.0, 1.3)]:
        law = worst_law(pair, width, alpha, raised)
        t = np.linspace(-13.0, 13.0, 26001)
        weight = np.exp(-0.5 * t * t) * (t[1] - t[0]) / math.sqrt(2.0 * math.pi)
        v = law.value(t)
        assert np.all(np.diff(v) >= 0.0)
        assert np.sum(weight * v) == pytest.approx(law.mean, rel=1e-5, abs=1e-6)
        below, above = law.flat
        np.testing.assert_allclose(v[(t > below) & (t < above)], 0.0, atol=1e-12)
        h = 1e-5
        smooth = (np.abs(t - below) > 2.0 * h) & (np.abs(t - above) > 2.0 * h)
        numeric = (law.value(t + h) - law.value(t - h))[smooth] / (2.0 * h)
        np.testing.assert_allclose(law.slope(t)[smooth], numeric, rtol=1e-6, atol=1e-6)
        bends = np.array([below, above])
        np.testing.assert_allclose(law.value(bends), 0.0, atol=1e-12)


def planar_stop_loss(first, second, other, width, alpha, s):
    """The same integral for records in the plane: a rule along one normal, a formula across.

    Against f_first the ratios of the two others are log-normal with unit mean. Given that of
    `second`, that of `other` is log-normal.
    """
    t = np.linspace(-10.0, 10.0, 801)
    weight = np.exp(-0.5 * t * t)
    weight /= weight.sum()
    u, v = width * (second - first), width * (other - first)
    deviation, square = math.sqrt(u @ u), float(v @ v)
    ratio = np.exp(deviation * t - 0.5 * deviation**2)
    along = float(u @ v) / deviation
    mean = np.exp(along * t - 0.5 * along**2)
    left = math.sqrt(max(square - along**2, 1e-18))
    result = []
    for each in s:
        room = 1.0 - alpha * ratio  # E(room - each R_w)_+ given t
        k = np.where(room * each > 0.0, room / (each * mean if each else 1.0), 1.0)
        d = (np.log(k) + 0.5 * left**2) / left
        put = room * special.ndtr(d) - each * mean * special.ndtr(d - left)
        call = room * special.ndtr(-d) - each * mean * special.ndtr(left - d)
        if each > 0.0:
            value = np.where(room > 0.0, put, 0.0)
        elif each == 0.0:
            value = np.maximum(room, 0.0)
        else:
            value = np.where(room < 0.0, call, room - each * mean)
        result.append(float(weight @ value))
    return np.array(result)


def test_the_planar_formula_on_the_line():
    s = strikes(1.0, 1.3)
    e = np.array([1.0, 0.0])
    for second, other in [(-1.0, 0.3), (0.0, -0.7), (-1.0, 1.0), (-1.0, -1.0)]:
        np.testing.assert_allclose(
            planar_stop_loss(e, second * e, other * e, 1.0, 1.3, s),
            stop_loss_on_the_line(1.0, second, other, 1.0, 1.3, s),
            rtol=2e-3,
            atol=2e-5,
        )


@pytest.mark.parametrize("pair", PAIRS)
def test_the_worst_law_dominates_every_placement_in_the_plane(pair):
    rng = np.random.default_rng(5)
    for width, alpha in [(0.2, 1.0), (1.0, 1.3), (2.0, 1.0), (1.0, 4.0)]:
        s = strikes(width, alpha)
        most = stop_loss_of_the_law(pair, width, alpha, s)
        for _ in range(25):
            angles = rng.uniform(0.0, 2.0 * math.pi, 3)
            points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
            points *= rng.choice([1.0, 1.0, 0.6], (3, 1))
            first, second, other = points
            if rng.random() < 0.5:  # close to the worst
                second = -first + 0.1 * rng.normal(size=2)
                other = rng.choice([-1.0, 1.0]) * first + 0.1 * rng.normal(size=2)
                second, other = (x / max(1.0, float(np.linalg.norm(x))) for x in (second, other))
            if pair is AGAINST_ZERO:
                second = np.zeros(2)
            if pair is ZERO_AGAINST:
                first, second = np.zeros(2), first
            here = planar_stop_loss(first, second, other, width, alpha, s)
            assert np.all(here <= most * (1.0 + 1e-3) + 2e-5)


def two_groups(rng, first, second, others, rate, noise, samples):
    """Likelihood ratios of second to first, of rounds drawn under first, all on a line.

    The others hold 1 or -1. Of k reports any k users may be the senders, in any order: a sum over
    how many of them hold 1 of elementary symmetric polynomials.
    """
    plus, minus = np.sum(others > 0), np.sum(others < 0)

    def ways(k, a):  # of a senders among those who hold 1, and k - a among those who hold -1
        left = np.array([plus - a, minus - k + a])
        logs = special.gammaln(plus + 1) + special.gammaln(minus + 1)
        return np.where(left >= 0, logs - special.gammaln(left + 1.0), -np.inf).sum(axis=0) - logs

    ratios = []
    for _ in range(samples):
        y = np.append(others, first) + noise * rng.standard_normal(len(others) + 1)
        y = y[rng.random(y.size) < rate]
        up, *own = (np.exp(((x + 1) * y - (x * x - 1) / 2) / noise**2) for x in (1, first, second))
        # Without user 1's report, and with it under first and under second.
        sums = np.zeros((3, plus + 1))
        sums[0, 0] = 1.0
        for j in range(y.size):
            raised = sums.copy()
            raised[:, 1:] += up[j] * sums[:, :-1]
            raised[1:] += np.array(own)[:, j, None] * sums[0]
            sums = raised / raised.max()
        a = np.arange(plus + 1)
        logs = np.array([ways(y.size, a), ways(y.size - 1, a)])
        weights = np.exp(logs - logs.max())
        away, one, two = sums[0] @ weights[0], sums[1] @ weights[1], sums[2] @ weights[1]
        ratios.append((away + two) / (away + one))
    return np.array(ratios)


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(
    ("users", "rate", "noise"), by_night((60, 1.0, 3.0), (150, 0.5, 3.0), (100, 1.0, 5.0))
)
def test_two_groups_of_others_by_exact_ratios(adjacency, users, rate, noise):
    rng, epsilons = np.random.default_rng(users), np.array([0.0, 0.1, 0.2, 0.4])
    spent = accounting.make_accountant("crowd", adjacency).compose(check_in(users, rate, noise))
    bound = np.array([spent.get_delta(epsilon) for epsilon in epsilons])
    second = -1.0 if adjacency == "replace" else 0.0
    place = np.arange(users - 1)
    for others in (np.where(place < users // 10, 1.0, -1.0), np.where(place % 2, 1.0, -1.0)):
        for ends in ((1.0, second), (second, 1.0)):
            ratios = two_groups(rng, *ends, others, rate, noise, 200)
            assert np.all(lower_bounds(ratios, epsilons) <= bound)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_swap_bound_itself_holds_and_is_close(pair):
    """All others at -x, whose likelihood ratio is a sum over the reports."""
    users, noise = 1000, 2.0
    first, second = PAIRS[pair]
    rng = np.random.default_rng(8)
    away = -1.0  # where all reports are but user 1's
    y = away + noise * rng.standard_normal((20_000, users))
    y[:, 0] += first - away

    def density(mine):
        return np.mean(np.exp((mine - away) * (y - 0.5 * (mine + away)) / noise**2), axis=1)

    ratios = density(second) / density(first)
    # δ is a factor too large, which grows as δ falls; ε is off by some 15 % at δ = 1e-5.
    for epsilon, factor in ((0.0, 1.6), (0.02, 2.0 if pair is OPPOSITE else 1.6), (0.05, 3.0)):
        alpha = math.exp(epsilon)
        kept = np.maximum(1.0 - alpha * ratios, 0.0)
        exact, error = float(np.mean(kept)), float(np.std(kept)) / math.sqrt(ratios.size)
        losses = np.geomspace(1e-4, 0.1, 13)
        swaps = [SwapBound(users, 1.0, noise, lost) for lost in losses]
        found = min(swap.divergence(alpha, pair) for swap in swaps if swap.holds)
        assert found >= exact - 5.0 * error
        assert found <= factor * exact


def test_too_few_others():
    assert not SwapBound(2, 1.0, 1.0, 1e-3).holds
    assert not SwapBound(1, 1.0, 1.0, 1e-3).holds
    assert SwapBound(1000, 1.0, 2.0, 1e-3).holds


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("terms", "rate", "alpha"), [(300, 0.2, 1.0), *by_night((300, 1.0, 1.02))])
def test_sums_at_several_shifts(pair, terms, rate, alpha):
    width, raised = 0.5, 1.1
    law = worst_law(pair, width, alpha, raised)
    count = TermsCount(terms, rate, 1.0 - rate, alpha - 1.0)
    rng = np.random.default_rng(11)
    jumps = law.value(rng.standard_normal((20_000, terms)))
    sums = np.sum(np.where(rng.random(jumps.shape) < rate, jumps, 1.0 - alpha), axis=1)
    spread = float(np.std(sums))
    shifts = np.array([-1.5, -0.5, 0.0, 0.5, 1.5, 3.0]) * spread
    found, tight = positive_parts(law, count, shifts), 0
    for shift, bound in zip(shifts, found, strict=True):
        kept = np.maximum(shift + sums, 0.0)
        mean, error = float(np.mean(kept)), float(np.std(kept)) / math.sqrt(kept.size)
        assert bound >= mean - 5.0 * error
        if mean > 0.02 * spread and abs(shift) <= 1.5 * spread:
            assert bound <= 1.01 * mean + 5.0 * error
            tight += 1
    assert tight >= 2
    # Far out it stays a bound, if a poor one.
    mean = terms * (rate * law.mean + (1.0 - rate) * (1.0 - alpha))
    far = np.array([-30.0, 30.0, 1e3, 1e6]) * spread
    assert np.all(positive_parts(law, count, far) >= np.maximum(far + mean, 0.0))
