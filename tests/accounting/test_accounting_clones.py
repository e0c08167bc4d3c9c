"""`clones`: the pair, the decomposition, and real mechanisms with other users anywhere."""

import math

import attrs
import mpmath as mp
import numpy as np
import pytest
from accounting_oracles import density, measured_deltas, placements
from dp_accounting import NeighboringRelation
from scipy import stats

import accounting
from accounting.peers import clones, clones_accountant, comparisons
from accounting.peers.clones_accountant import ClonesAccountant, reports_of

REPLACE, ZERO_OUT = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
CHECK_IN = accounting.ShuffledCheckInGaussianDpEvent
EVERYONE = accounting.ShuffledGaussianDpEvent
FIXED = accounting.FixedSizeShuffledGaussianDpEvent


def enumerated_pair(k, p, odds, epsilon):
    """H_{e^ε} of (A+B, C-A+1-B) against (A+1-B, C-A+B), outcome by outcome."""
    b = math.exp(odds) / (math.exp(odds) + 1)
    left, right = {}, {}
    for c in range(k):
        for a in range(c + 1):
            weight = stats.binom.pmf(c, k - 1, p) * stats.binom.pmf(a, c, 0.5)
            for coin, chance in ((1, b), (0, 1 - b)):
                one, two = (a + coin, c - a + 1 - coin), (a + 1 - coin, c - a + coin)
                left[one] = left.get(one, 0.0) + weight * chance
                right[two] = right.get(two, 0.0) + weight * chance
    keys = set(left) | set(right)
    return sum(max(left.get(o, 0) - math.exp(epsilon) * right.get(o, 0), 0) for o in keys)


@pytest.mark.parametrize("k", [1, 2, 5, 17])
@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("odds", [0.05, 1.0, 6.0])
def test_the_one_dimensional_formula_is_the_pair(k, p, odds):
    profile = clones.CloneProfile(np.array([k]), clones.CloneParameters(p, odds, 0.0, 0.0))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        truth = enumerated_pair(k, p, odds, share * odds)
        got = float(profile.deltas(0, np.array([share * odds]))[0])
        assert truth * (1 - 1e-12) <= got <= truth * 1.01 + 1e-12


def test_many_clones_in_blocks_stay_above_the_sum_over_all_counts():
    k, p, odds = 3000, 0.2, 1.5
    profile = clones.CloneProfile(np.array([k]), clones.CloneParameters(p, odds, 0.0, 0.0))
    counts = np.arange(450, 760)
    chance = stats.binom.pmf(counts - 1, k - 1, p)
    for epsilon in (0.0, 0.05, 0.2, 0.4):
        t = math.tanh(odds / 2)
        level = math.tanh(epsilon / 2) / t
        calls = [
            np.sum(stats.binom.pmf(a, m, 0.5) * np.maximum(2 * a / m - 1 - level, 0))
            for m in counts
            for a in [np.arange(m + 1)]
        ]
        truth = (1 + math.exp(epsilon)) * t * float(chance @ np.array(calls))
        got = float(profile.deltas(0, np.array([epsilon]))[0])
        assert truth * (1 - 1e-9) <= got <= truth * (1.05 if epsilon < 0.3 else 1.2)


def test_each_number_of_reports_is_bounded_whatever_the_weights():
    reports, p, odds = np.array([1, 2, 5, 17]), 0.4, 1.0
    parameters = clones.CloneParameters(p, odds, 0.0, 0.0)
    for weights in (None, np.array([1.0, 0, 0, 0]), np.array([0, 0, 0, 1.0]), np.full(4, 1e-40)):
        profile = clones.CloneProfile(reports, parameters, weights)
        for row, k in enumerate(reports):
            for epsilon in (0.0, 0.3, 0.9):
                got = float(profile.deltas(row, np.array([epsilon]))[0])
                assert got >= enumerated_pair(k, p, odds, epsilon) * (1 - 1e-12)


def test_far_numbers_of_reports_do_not_blur_the_usual_one():
    parameters = clones.CloneParameters(0.2, 1.5, 0.0, 0.0)
    reports = np.array([10, 2900, 3000, 3100, 60_000])
    epsilons = np.linspace(0.0, 0.3, 7)
    alone = clones.CloneProfile(np.array([3000]), parameters).deltas(0, epsilons)
    weights = np.array([1e-25, 0.2, 0.6, 0.2, 1e-25])
    among = clones.CloneProfile(reports, parameters, weights).deltas(2, epsilons)
    np.testing.assert_allclose(among, alone, rtol=0.02)


@pytest.mark.parametrize("m", [1, 2, 9, 400, 20001, 150_000])
def test_calls_on_the_mean_of_signs_in_fifty_digits(m):
    levels = [0.0, 0.4 / math.sqrt(m), 2 / math.sqrt(m), 7 / math.sqrt(m), 0.97]
    levels = [c for c in levels if c < 1]
    got = clones.sign_mean_calls([m], levels)[0]
    for level, value in zip(levels, got, strict=True):
        first = int(mp.floor(m * (1 + mp.mpf(level)) / 2)) + 1
        term, total = mp.binomial(m, first) * mp.mpf(2) ** -m, mp.mpf(0)
        for a in range(first, m + 1):
            total += term * (mp.mpf(2 * a) / m - 1 - mp.mpf(level))
            term *= mp.mpf(m - a) / (a + 1)
            if term < total * mp.mpf(10) ** -30:
                break
        assert total - mp.mpf("1e-300") <= value <= total * (1 + mp.mpf("1e-7"))


@pytest.mark.parametrize("noise", [0.7, 1.5, 5.0])
def test_the_defect_covers_every_record_of_the_ball(noise):
    axis = np.linspace(-1 - 9 * noise, 1 + 9 * noise, 701)
    points = np.stack(np.meshgrid(axis, axis), -1)
    cell = (axis[1] - axis[0]) ** 2
    rng = np.random.default_rng(0)
    for distances, apart, ends in (
        ((2.0, 2.0), 2.0, ((1, 0), (-1, 0))),
        ((2.0, 1.0), 1.0, ((1, 0), (0, 0))),
    ):
        for defect in (1e-2, 1e-5):
            found = clones.clone_parameters(noise, distances, apart, 1, defect)
            assert found.clone_defect + found.user_defect <= defect * (1 + 1e-6)
            f0, f1 = (density(points, np.array(end), noise) for end in ends)
            half = found.clone_probability / 2
            others = [(1, 0), (-1, 0), (0, 1), (0, 0), *rng.normal(size=(4, 2))]
            for other in others:
                place = np.array(other) / max(1, np.linalg.norm(other))
                missing = np.maximum(half * (f0 + f1) - density(points, place, noise), 0).sum()
                assert missing * cell <= found.clone_defect * (1 + 1e-3) + 1e-12
            # The differing user's two Gaussians, clamped to odds e^{ε1}, their sum unchanged.
            odds = math.exp(found.log_odds)
            clamped = np.clip(f0, (f0 + f1) / (1 + odds), (f0 + f1) * odds / (1 + odds))
            assert clamped.sum() * cell == pytest.approx(1, abs=1e-6)
            moved = np.maximum(f0 - clamped, 0).sum() * cell
            assert moved <= found.user_defect * (1 + 1e-3) + 1e-12


@pytest.mark.parametrize("relation", [REPLACE, ZERO_OUT])
@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("dimension", [1, 3])
def test_no_placement_of_the_others_exceeds_the_bound(relation, noise, dimension):
    epsilons = np.array([0.0, 0.05, 0.3, 1.0, 2.0])
    x = np.zeros(dimension)
    x[0] = 1
    for users, reports in ((3, None), (4, 2), (4, 3)):
        event = EVERYONE(users, noise) if reports is None else FIXED(users, reports, noise)
        accountant = ClonesAccountant(relation).compose(event)
        bound = np.array([accountant.get_delta(e) for e in epsilons])
        for name, others in placements(dimension, users - 1):
            other = np.zeros(dimension) if relation is ZERO_OUT else -x
            low = measured_deltas(x, other, others, noise, epsilons, reports, draws=15_000)
            assert np.all(low <= bound), (name, users, reports)


def test_many_others_opposite_to_the_user_under_zero_out():
    # The counterexample to the homogeneous pair: others at -x, δ(0.3) about 0.0172, not 0.0030.
    rng, n, noise, draws = np.random.default_rng(3), 10, 2.0, 400_000
    reports = noise * rng.normal(size=(draws, n)) - 1
    reports[:, 0] += 2
    one = np.mean(np.exp(2 * reports / noise**2), axis=1)
    two = np.mean(np.exp((reports + 0.5) / noise**2), axis=1)
    gain = np.maximum(1 - math.exp(0.3) * two / one, 0)
    low = gain.mean() - 4.5 * gain.std() / math.sqrt(draws)
    assert 0.016 < low < gain.mean() < 0.0185
    accountant = ClonesAccountant(ZERO_OUT).compose(EVERYONE(n, noise))
    assert accountant.get_delta(0.3) >= gain.mean()


def test_zero_out_lies_between_replace_and_its_own_half_distance():
    # The others stay 2C apart: zero-out costs more than replace at twice the noise.
    for event, rounds in ((CHECK_IN(60_000, 0.1, 5.0), 5540), (EVERYONE(1000, 4.0), 3)):
        doubled = attrs.evolve(event, noise_multiplier=2 * event.noise_multiplier)
        zero_out = ClonesAccountant(ZERO_OUT).compose(event, rounds).get_epsilon(1e-5)
        replace = ClonesAccountant(REPLACE).compose(event, rounds).get_epsilon(1e-5)
        halved = ClonesAccountant(REPLACE).compose(doubled, rounds).get_epsilon(1e-5)
        assert halved < zero_out < replace


def test_the_number_of_reports_is_covered_by_blocks():
    for users, rate in ((5, 0.3), (60_000, 0.1), (10**6, 1e-7), (10**9, 0.5)):
        found = reports_of(CHECK_IN(users, rate, 1.0))
        assert found.first[0] == 1 and found.last[-1] == users
        assert np.all(found.first[1:] == found.last[:-1] + 1)
        exact = stats.binom.cdf(found.last, users, rate) - stats.binom.cdf(
            found.first - 1, users, rate
        )
        assert np.all(found.chance >= exact - 1e-12)
        total = float(np.sum(found.chance)) + stats.binom.pmf(0, users, rate)
        assert 1 - 1e-9 <= total <= 1 + 1e-6


def test_reference_values():
    def epsilon(relation, event, rounds):
        return ClonesAccountant(relation).epsilon_after(event, 1 / 60_000, rounds)

    # The design's: 1.05 (zero-out, with the others' distance taken as C), 3.86 and 0.0087.
    assert epsilon(ZERO_OUT, CHECK_IN(60_000, 0.1, 5.0), 5540) == pytest.approx(1.10, abs=0.01)
    assert epsilon(REPLACE, CHECK_IN(60_000, 0.1, 5.0), 5540) < 3.86
    assert epsilon(ZERO_OUT, EVERYONE(60_000, 9.48), 1) < 0.0087
    assert epsilon(REPLACE, CHECK_IN(10**9, 0.01, 2.0), 10**6) < math.inf


def test_the_published_forms_for_comparison():
    orders = [2, 5, 20]
    values = comparisons.girgis_rdp(10**6, 0.5, orders)
    sampled = comparisons.girgis_subsampled_rdp(0.1, 10**6, 0.5, orders)
    for order, value, less in zip(orders, values, sampled, strict=True):
        e0, n = mp.mpf("0.5"), 10**6
        bar = int(mp.floor((n - 1) / (2 * mp.e**e0))) + 1
        grow = mp.e**e0 - 1, mp.e ** (2 * e0) - 1
        total = 1 + mp.binomial(order, 2) * grow[0] ** 2 / (bar * mp.e**e0)
        total += mp.e ** (e0 * order - (n - 1) / (8 * mp.e**e0))
        below = 1 + 4 * mp.binomial(order, 2) * mp.mpf("0.01") * grow[0] ** 2 / (bar * mp.e**e0)
        step = mp.mpf("0.1") * grow[1] / (2 * mp.e**e0)
        below += ((1 + step) ** order - 1 - order * step) * mp.e ** (-(n - 1) / (8 * mp.e**e0))
        for i in range(3, order + 1):
            ratio = grow[1] ** 2 / (2 * mp.e ** (2 * e0) * bar)
            total += mp.binomial(order, i) * i * mp.gamma(i / mp.mpf(2)) * ratio ** (i / mp.mpf(2))
            below += (
                mp.binomial(order, i) * mp.mpf("0.1") ** i * i * mp.gamma(i / mp.mpf(2))
                * (4 * ratio) ** (i / mp.mpf(2))
            )  # fmt: skip
        assert value == pytest.approx(float(mp.log(total) / (order - 1)), rel=1e-9)
        assert less == pytest.approx(float(mp.log(below) / (order - 1)), rel=1e-9)
    for epsilon in (0.0, 0.3):
        found = float(comparisons.stronger_clones_delta(6, 1.0, [epsilon])[0])
        assert found == pytest.approx(enumerated_pair(6, 2 / (math.e + 1), 1.0, epsilon), rel=1e-2)
    assert "clones-2022" not in accounting.ACCOUNTANTS
    with pytest.raises(ValueError, match="orders must be integers"):
        comparisons.girgis_rdp(10, 1.0, [1.5])


def test_the_worst_sampling_rate_is_that_of_every_loss():
    # (1-β) q = q v (1-q)/(q+v) over q in 0.1..0.9, by brute force; at v = 1e300 its top is ½.
    class Constant:
        def __init__(self, value):
            self.value = value

        def deltas(self, row, excess):
            return np.full_like(excess, self.value)

    v = np.array([0.0, 1e-9, 0.01, 1.0, 1e9, 1e160, 1e300])
    got = clones_accountant._zero_out(Constant(0.0), Constant(1e-3), 0, v, v, 0.1, 0.9)
    q = np.linspace(0.1, 0.9, 801)[:, None]
    truth = np.max(q * (1 - q) * (1 / (1 + q / np.maximum(v, 1e-300))), axis=0) * 1e-3
    np.testing.assert_allclose(got, truth, rtol=1e-4, atol=1e-300)
