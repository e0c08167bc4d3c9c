"""`blanket`: its identity, its worst pairs, the whole mechanism, composed values, its limits."""

import math

import dp_accounting
import numpy as np
import pytest
from from_below import BlanketFromBelow, divergence_from_below
from scipy import special, stats

from nights import by_night
from rounds import check_in
from shufl import accounting
from shufl.accounting.accountants.blanket import divergence_of
from shufl.accounting.numerics.worst_pairs import AGAINST_ZERO, OPPOSITE, ZERO_AGAINST

pytestmark = pytest.mark.slow

PAIRS = {OPPOSITE: (1.0, -1.0), AGAINST_ZERO: (1.0, 0.0), ZERO_AGAINST: (0.0, 1.0)}


def event_of(rate, noise, blankets, users=1):
    return check_in(users, rate, noise, blankets)


def bounds(rate, noise, blankets, alpha, pair):
    event = event_of(rate, noise, blankets)
    return divergence_from_below(event, alpha, pair), divergence_of(event, alpha, pair)


def counts_law(shares, blankets, most):
    """The law of how many blankets fall into each bin: independent Poisson numbers."""
    law = np.ones(1)
    for share in shares:
        law = np.multiply.outer(law, stats.poisson.pmf(np.arange(most + 1), blankets * share))
    return law[0]


def released_law(without, rate, chances):
    """With user 1's report in a bin drawn by `chances`, or none: all cases, added up."""
    law = (1.0 - rate) * without
    for axis, chance in enumerate(chances):
        moved = np.roll(without, 1, axis=axis)
        np.moveaxis(moved, axis, 0)[0] = 0.0
        law = law + rate * chance * moved
    return law


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("rate", "blankets"), [(1.0, 1.0), (0.5, 0.6)])
def test_reports_put_into_bins_tell_hardly_less(pair, rate, blankets):
    """Exactly, without a sample: binning is post-processing, and six bins lose little."""
    x, other = PAIRS[pair]
    edges = np.array([-math.inf, -1.3, -0.6, 0.0, 0.6, 1.3, math.inf])
    shares, first, second = (np.diff(special.ndtr(edges - mean)) for mean in (0.0, x, other))
    without = counts_law(shares, blankets, 8)
    laws = [released_law(without, rate, chances) for chances in (first, second)]
    for alpha in (1.0, 1.3):
        binned = float(np.sum(np.maximum(laws[0] - alpha * laws[1], 0.0)))
        low, high = bounds(rate, 1.0, blankets, alpha, pair)
        assert binned <= high
        assert binned >= 0.85 * low


def estimated(rate, noise, blankets, alpha, x, other, draws, rng):
    """H_α(x‖other) of the mechanism with everyone else's report known: mean, five errors.

    Rounds are simulated under x. The densities of the released points, in random order, are those
    of the cases: all are blankets, or one of them, each with equal chance, is user 1's.
    """
    x, other = np.asarray(x, dtype=float), np.asarray(other, dtype=float)
    number = rng.poisson(blankets, draws)
    sent = rng.random(draws) < rate
    total = number + sent
    y = noise * rng.standard_normal((draws, max(int(total.max()), 1), x.size))
    y[sent, 0] += x
    there = np.arange(y.shape[1]) < total[:, None]
    alone = stats.poisson.pmf(total, blankets)
    joined = np.where(total > 0, stats.poisson.pmf(total - 1, blankets), 0.0)

    def density(record):
        # Of the points, over that of as many blankets.
        squares = np.sum(y * y, axis=2) - np.sum((y - record) ** 2, axis=2)
        ratio = np.where(there, np.exp(0.5 * squares / noise**2), 0.0).sum(axis=1)
        return (1.0 - rate) * alone + rate * joined * ratio / np.maximum(total, 1)

    sample = np.maximum(1.0 - alpha * density(other) / density(x), 0.0)
    return float(sample.mean()), 5 * float(sample.std()) / math.sqrt(draws)


@pytest.mark.parametrize(
    ("rate", "noise", "blankets", "alpha", "value"),
    [
        (0.5, 1.0, 5.0, 1.2, 0.1051),
        (1.0, 1.0, 20.0, 1.3, 0.0954),
        (0.3, 0.7, 50.0, 1.1, 0.0251),
        *by_night((0.8, 0.4, 0.5, 2.0, None), (1.0, 3.0, 100.0, 1.02, None)),
    ],
)
@pytest.mark.parametrize("pair", PAIRS)
def test_the_identity_by_simulation_of_the_mechanism(rate, noise, blankets, alpha, value, pair):
    rng = np.random.default_rng(3)
    draws = 100_000 if blankets <= 5.0 else 40_000
    x, other = ([each] for each in PAIRS[pair])
    truth, error = estimated(rate, noise, blankets, alpha, x, other, draws, rng)
    low, high = bounds(rate, noise, blankets, alpha, pair)
    assert low <= truth + error and truth - error <= high
    assert high <= (1.02 if noise > 0.5 else 1.05) * low
    if value and pair is OPPOSITE:
        assert high == pytest.approx(value, rel=5e-3)


@pytest.mark.parametrize("dimension", [1, 3, *by_night(2, 5)])
def test_no_pair_in_the_ball_exceeds_the_worst(dimension):
    rng = np.random.default_rng(dimension)
    for rate, noise, blankets, alpha in [(0.5, 1.0, 5.0, 1.2), (1.0, 0.6, 3.0, 2.0)]:
        worst = {pair: bounds(rate, noise, blankets, alpha, pair)[1] for pair in PAIRS}
        for _ in range(5):
            records = rng.standard_normal((2, dimension))
            records *= rng.random((2, 1)) ** (1 / 6) / np.linalg.norm(records, axis=1)[:, None]
            x, zero = records[0], np.zeros(dimension)
            for pair, first, second in [
                (OPPOSITE, *records),
                (AGAINST_ZERO, x, zero),
                (ZERO_AGAINST, zero, x),
            ]:
                shape = rate, noise, blankets, alpha, first, second
                truth, error = estimated(*shape, 10_000, rng)
                assert truth - error <= worst[pair]


def among_others(rate, noise, blankets, alpha, x, other, rest, draws, rng):
    """H_α when the server sees all reports in random order: mean, five errors.

    `rest` lists the other users: record, chance to report and own noise. A released sequence's
    density sums over who sent which point; the points nobody sent are blankets.
    """

    def density(y, everyone):
        """Over that of as many blankets; a sum over the subsets of users who sent some points."""
        k, found = y.shape[1], np.zeros((1 << len(everyone), len(y)))
        found[0] = 1.0
        for point in np.moveaxis(y, 1, 0):
            ratios = [
                (noise / own) ** len(where) * np.exp(0.5 * np.sum(
                    (point / noise) ** 2 - ((point - np.array(where)) / own) ** 2, axis=1
                ))
                for where, _, own in everyone
            ]  # fmt: skip
            for senders in reversed(range(len(found))):
                for i, ratio in enumerate(ratios):
                    if senders >> i & 1:
                        found[senders] += found[senders ^ 1 << i] * ratio
        for senders, part in enumerate(found):
            size = senders.bit_count()
            for i, (_, chance, _) in enumerate(everyone):
                part *= chance if senders >> i & 1 else 1.0 - chance
            # Of the k! orders, each assignment of senders leaves (k - size)! for the blankets.
            part *= stats.poisson.pmf(k - size, blankets) / (math.perm(k, size) or 1)
        return found.sum(axis=0)

    worlds = [[(record, rate, noise), *rest] for record in (x, other)]
    number = rng.poisson(blankets, draws)
    sent = rng.random((draws, len(worlds[0]))) < [chance for _, chance, _ in worlds[0]]
    rounds = {}
    for blank, senders in zip(number, sent, strict=True):
        points = [
            np.array(where) + own * rng.standard_normal(len(x))
            for (where, _, own), here in zip(worlds[0], senders, strict=True)
            if here
        ]
        points.extend(noise * rng.standard_normal((blank, len(x))))
        rounds.setdefault(len(points), []).append(points)
    sample = []
    for k, points in rounds.items():
        y = np.array(points).reshape(len(points), k, len(x))
        p, q = (density(y, everyone) for everyone in worlds)
        sample.append(np.maximum(1.0 - alpha * q / p, 0.0))
    sample = np.concatenate(sample)
    return float(sample.mean()), 5 * float(sample.std()) / math.sqrt(draws)


ABSENT = ((0.0, 1.0), 0.0, 1.0)
OTHERS = {
    "absent": [ABSENT, ABSENT],
    "at x": [((1.0, 0.0), 0.5, 1.0), ((1.0, 0.0), 1.0, 1.0)],
    "at the other": [((-1.0, 0.0), 1.0, 1.0), ((-1.0, 0.0), 0.5, 1.0)],
    "across": [((0.0, 1.0), 0.5, 1.0), ((0.0, -1.0), 0.5, 1.0)],
    "with next to no noise": [((1.0, 0.0), 0.5, 0.05), ((-1.0, 0.0), 0.5, 0.05)],
    "far outside": [((30.0, 0.0), 1.0, 1.0), ((0.5, 0.0), 0.5, 0.3)],
}


@pytest.mark.parametrize(
    "others",
    ["absent", "at x", "with next to no noise", *by_night("at the other", "across", "far outside")],
)
def test_the_real_mechanism_with_others_anywhere_stays_below(others):
    rate, noise, blankets, alpha = 0.6, 1.0, 1.5, 1.2
    rng = np.random.default_rng(11)
    records = {1.0: (1.0, 0.0), 0.0: (0.0, 0.0), -1.0: (-1.0, 0.0)}
    for pair, (first, second) in PAIRS.items():
        low, high = bounds(rate, noise, blankets, alpha, pair)
        for x, other in ((first, second), (-first, -second)):
            shape = rate, noise, blankets, alpha, records[x], records[other]
            truth, error = among_others(*shape, OTHERS[others], 3000, rng)
            assert truth - error <= high
            if others == "absent":
                assert truth + error >= low


# The values are upper bounds that a coarser method gave.
@pytest.mark.parametrize(
    ("rate", "noise", "blankets", "rounds", "delta", "adjacency", "value"),
    [
        (0.1, 5.0, 600.0, 5540, 1 / 60_000, "zero-out", 0.1952),
        (0.5, 1.0, 50.0, 47, 1 / 1437, "replace", 3.418),
        (1.0, 1.0, 1000.0, 1, 1e-6, "replace", 0.2700),
        *by_night(
            (0.1, 5.0, 600.0, 5540, 1 / 60_000, "replace", 0.4072),
            (0.02, 1.5, 250.0, 3000, 1e-5, "replace", 0.3193),
        ),
    ],
)
def test_composed_values(rate, noise, blankets, rounds, delta, adjacency, value):
    accountant = BlanketFromBelow(accounting.ADJACENCIES[adjacency])
    epsilon = accountant.epsilon_after(event_of(rate, noise, blankets), delta, rounds)
    assert 0.98 * value <= epsilon <= value
    accountant.compose(event_of(rate, noise, blankets), rounds)
    assert accountant.get_epsilon(delta) == epsilon
    lower = accountant.epsilon_lower_bound(delta)
    assert lower <= epsilon <= 1.012 * lower


def epsilon_of(event, rounds, adjacency="replace", delta=1e-5, accountant="blanket"):
    return accounting.make_accountant(accountant, adjacency).epsilon_after(event, delta, rounds)


@pytest.mark.nightly
def test_a_tiny_delta_has_an_epsilon():
    """Where a coarse mesh answers nothing the finer one is taken."""
    event = event_of(0.1, 5.0, 10_000.0)
    rising = [epsilon_of(event, 10, delta=delta) for delta in (1e-10, 1e-50, 1e-250, 1e-300)]
    assert rising == sorted(rising)
    assert rising[-1] <= epsilon_of(event, 10, delta=1e-300, accountant="local") < 50.0


def test_it_does_not_depend_on_the_number_of_users():
    few, many = (event_of(0.3, 1.0, 80.0, users) for users in (1, 10**6))
    assert epsilon_of(few, 10) == epsilon_of(many, 10) > 0.0


def test_rounds_without_blankets_are_refused():
    accountant = accounting.make_accountant("blanket")
    assert accountant.supports(event_of(0.3, 1.0, 1e-3))
    for ask in (accountant.compose, lambda event: accountant.epsilon_after(event, 1e-5)):
        with pytest.raises(dp_accounting.UnsupportedEventError, match="with shuffler blankets onl"):
            ask(event_of(0.3, 1.0, 0.0))


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(
    ("rate", "noise", "blankets"),
    [
        *((1.0, 0.2, 0.1), (1e-4, 50.0, 1e3), (0.01, 1000.0, 1e7), (1.0, 1.0, 1e-6)),
        *((0.5, 1.0, blankets) for blankets in (5e-324, 1e-9, 1e15)),
    ],
)
def test_extreme_parameters_give_a_number(rate, noise, blankets, adjacency):
    event = event_of(rate, noise, blankets)
    epsilon = epsilon_of(event, 3, adjacency, 1e-10)
    assert 0.0 <= epsilon <= epsilon_of(event, 3, adjacency, 1e-10, "local")


@pytest.mark.parametrize(
    ("event", "rounds", "delta", "over"),
    [
        # Where the sum over frequencies ends early, what it lacks is most of a small profile.
        *by_night(
            (check_in(1, 1.0, 0.575, 251.0), 40, 1e-5, 1.02),
            (check_in(1, 0.1, 0.446, 1177.0), 1000, 1e-5, 1.05),
        ),
        # Next to α = 1 the report hides as badly as alone; that says nothing of larger α.
        (check_in(1, 1e-3, 1.0, 0.01), 100, 1e-3, 1.05),
    ],
)
def test_odd_rounds_cost_little_more_than_the_lower_bound(event, rounds, delta, over):
    accountant = BlanketFromBelow().compose(event, rounds)
    least = accountant.epsilon_lower_bound(delta)
    assert least <= accountant.get_epsilon(delta) < over * least


def test_tables_say_who_does_not_count_on_the_blankets():
    event = check_in(50, 0.5, 2.0, 20.0)
    for row in accounting.price(event, 3, "replace", 1e-3):
        ignored = "the shuffler's blankets are not counted on" in (row.warning or "")
        assert ignored == (row.name != "blanket")
