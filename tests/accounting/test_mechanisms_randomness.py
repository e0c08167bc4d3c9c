"""Coins and noise: reproducible in simulation, from the system outside it, with the stated laws."""

import itertools

import mpmath
import numpy as np
import pytest
from scipy import stats

from shufl.learning import record_orders
from shufl.protocol.mechanisms import (
    SeededRandomness,
    SystemRandomness,
    make_randomness,
    most_blankets,
    seed_of_shuffler,
    split_mix,
    to_normals,
)
from shufl.protocol.mechanisms.randomness import _make_normals, _poisson_steps

USERS = np.arange(20_000)


@pytest.fixture(params=["seeded", "system"])
def randomness(request):
    return SeededRandomness(11) if request.param == "seeded" else SystemRandomness()


def test_check_ins_are_bernoulli_with_the_rate(randomness):
    checked_in = sum(int(randomness.check_ins(r, USERS, 0.3).sum()) for r in range(1, 6))
    assert stats.binomtest(checked_in, 5 * len(USERS), 0.3).pvalue > 1e-7


def test_nobody_asked_nobody_in_and_at_rate_one_everybody(randomness):
    nobody = randomness.check_ins(1, np.arange(0), 0.5)
    assert (nobody.shape, nobody.dtype) == ((0,), bool)
    assert randomness.standard_normal(1, np.arange(0), 5).shape == (0, 5)
    assert randomness.training_seeds(1, np.arange(0)).shape == (0,)
    assert randomness.check_ins(1, USERS, 1.0).all()


def test_noise_is_standard_normal_far_into_both_tails(randomness):
    drawn = randomness.standard_normal(1, USERS[:100], 26_010)
    draws = to_normals(drawn).astype(float)
    assert stats.kstest(draws[:10].ravel(), "norm").pvalue > 1e-7
    for bound in (0, 1, 2, 3, 4, 5):
        for beyond in (draws > bound, draws < -bound):
            count = int(beyond.sum())
            assert stats.binomtest(count, draws.size, stats.norm.sf(bound)).pvalue > 1e-7
    neighbours = draws.ravel()[:-1], draws.ravel()[1:]
    halves = [half.ravel() for half in np.split(draws, 2, axis=1)]  # seeded: of the same words
    for one, other in (neighbours, halves):
        powers = [part**power for part in (one, other) for power in (1, 2, 3)]
        assert (np.abs(np.corrcoef(powers)[:3, 3:]) < 6 / np.sqrt(one.size)).all()


@pytest.mark.parametrize(("seed", "round", "size"), [(3, 9, 7), (3, 2, 8), (2**63 - 1, 9, 1000)])
def test_a_users_noise_is_that_of_its_own_stream_whoever_else_is_asked(seed, round, size):
    """Box and Muller in float64, from the words of Philox at the user's counter."""
    users = USERS[5:5000:997]
    together = SeededRandomness(seed).standard_normal(round, users, size)
    assert together.dtype == np.float32
    for user, noise in zip(users, together, strict=True):
        (alone,) = SeededRandomness(seed).standard_normal(round, np.array([user]), size)
        assert np.array_equal(noise, alone)
        stream = np.random.Philox(key=[seed, (2 << 32) | round], counter=[0, 0, 0, user])
        radius, angle = np.split(stream.random_raw((size + 1) // 2).view(np.uint32), 2)
        pair = np.sqrt(-2 * np.log((radius + 0.5) / 2**32)) * np.exp(2j * np.pi * angle / 2**32)
        by_hand = np.concatenate([pair.real, pair.imag])[:size]
        np.testing.assert_allclose(noise, by_hand, rtol=1e-4, atol=1e-5)


def test_the_outermost_words_give_finite_normals():
    words = np.array([[0, 2**32 - 1, 2**64 - 2**32, 2**64 - 1]], dtype=np.uint64)
    normals = np.empty((1, 8), dtype=np.float32)
    _make_normals(words, normals)
    assert np.isfinite(normals).all()
    assert 6.7 < np.abs(normals).max() < 6.8


@pytest.mark.parametrize("users", [[0], [7], [59_999], [4, 5], [9, 3, 59_998, 3]])
def test_a_seeded_coin_is_the_users_uniform_in_the_rounds_own_philox_stream(users):
    for round in (1, 9):
        stream = np.random.Philox(key=[3, (1 << 32) | round])
        uniforms = np.random.Generator(stream).random(60_000)[users]
        for uniform in uniforms:
            for rate in (uniform, np.nextafter(uniform, 1)):
                drawn = SeededRandomness(3).check_ins(round, np.array(users), rate)
                assert drawn.tolist() == (uniforms < rate).tolist()


@pytest.mark.parametrize("expected", [0.1, 3.0, 50.0, 6600.0])
def test_the_number_of_blankets_is_poisson_and_within_the_most(randomness, expected):
    drawn = [randomness.number_of_blankets(round, expected) for round in range(3000)]
    assert max(drawn) <= most_blankets(expected)
    law = stats.poisson(expected)
    bounds = np.unique(law.ppf(np.linspace(0, 1, 12)[1:-1]))
    cells = np.searchsorted(bounds, drawn)
    chances = np.diff([0, *law.cdf(bounds), 1])
    counts = np.bincount(cells, minlength=len(chances))
    assert stats.chisquare(counts, chances * len(drawn)).pvalue > 1e-6


def test_no_blankets_are_expected_none_are_drawn(randomness):
    assert randomness.number_of_blankets(1, 0.0) == most_blankets(0.0) == 0


@pytest.mark.parametrize("expected", [1e-3, 0.1, 1.0, 50.0, 6600.0, 1e6, 1e7])
def test_the_most_blankets_are_reached_never_and_not_many_too_many(expected):
    most = most_blankets(expected)
    assert stats.poisson.sf(most - 1, expected) < 2.0**-128 <= stats.poisson.sf(most - 2, expected)


@pytest.mark.parametrize("expected", [0.1, 50.0, 6600.0])
def test_every_number_of_blankets_has_the_probability_of_real_numbers(expected):
    """But for 2^-255, and for what lies so far out that 2^-128 of the law is left at an end."""
    first, steps = _poisson_steps(expected)
    assert first + len(steps) == most_blankets(expected)
    assert first == 0 or stats.poisson.cdf(first, expected) < 2.0**-128
    with mpmath.workdps(120):
        masses = [
            mpmath.exp(n * mpmath.log(expected) - expected) / mpmath.factorial(n)
            for n in range(first, first + len(steps))
        ]
        for step, before, mass in zip(steps, [0, *steps], masses, strict=False):
            assert abs(step - before - mass * mpmath.mpf(2) ** 256) < 2


def test_seeded_blankets_are_reproducible_and_of_no_other_stream():
    def drawn(seed, round, blanket):
        return SeededRandomness(seed).blanket_noise(round, np.array([blanket]), 500)

    base = drawn(3, 1, 0)
    assert (base == drawn(3, 1, 0)).all()
    users = SeededRandomness(3).standard_normal(1, np.array([0]), 500)
    for other in (drawn(4, 1, 0), drawn(3, 2, 0), drawn(3, 1, 1), users):
        assert not np.isin(other, base).any()
    first, second = (SeededRandomness(3).number_of_blankets(round, 1e6) for round in (1, 2))
    assert first != second


def test_the_pieces_of_a_blanket_are_all_of_its_draws_in_order(randomness):
    size = 2**19 + 7
    places, draws = zip(*randomness.blanket_pieces(1, 4, size), strict=True)
    assert np.array_equal(np.concatenate([np.arange(size)[each] for each in places]), range(size))
    (whole,) = randomness.blanket_noise(1, np.array([4]), size)
    together = np.concatenate(draws)
    assert (together.shape, together.dtype) == (whole.shape, whole.dtype)
    if isinstance(randomness, SeededRandomness):
        assert np.array_equal(together, whole)
    else:
        assert len(np.unique(together)) == size


def test_shufflers_of_one_simulation_have_seeds_of_their_own():
    seeds = [seed_of_shuffler(seed, shuffler) for seed in (0, 7, 2**63 - 1) for shuffler in (0, 1)]
    assert len(set(seeds)) == 6
    assert all(SeededRandomness(seed) for seed in seeds)


def test_system_draws_never_repeat():
    randomness = make_randomness(None)
    assert isinstance(randomness, SystemRandomness)
    assert not np.isin(
        *(randomness.standard_normal(1, np.array([0, 0]), 500) for _ in range(2))
    ).any()
    assert len(set(randomness.training_seeds(1, np.array([0, 0])))) == 2


def test_split_mix_gives_the_published_draws():
    """The first five of SplitMix64 for the seed 1234567."""
    published = [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip
    seeds = np.array([1234567], dtype=np.uint64)
    assert split_mix(seeds, np.arange(5)).tolist() == published


def test_training_seeds_differ_by_seed_round_and_user():
    base = SeededRandomness(3).training_seeds(1, USERS)
    assert len(set(base)) == len(USERS)
    assert np.array_equal(base[7::13], SeededRandomness(3).training_seeds(1, USERS[7::13]))
    for other in (
        SeededRandomness(4).training_seeds(1, USERS),
        SeededRandomness(3).training_seeds(2, USERS),
    ):
        assert not np.isin(base, other).any()


def test_all_orders_of_records_are_equally_likely_and_epochs_independent(randomness):
    seeds = randomness.training_seeds(1, USERS)
    first, second = record_orders(seeds, 2, 3).numpy() @ [9, 3, 1]
    orders = [np.dot(order, [9, 3, 1]) for order in itertools.permutations(range(3))]
    together = [((first == one) & (second == other)).sum() for one in orders for other in orders]
    assert sum(together) == len(USERS)
    assert stats.chisquare(together).pvalue > 1e-7
    assert record_orders(seeds[:4], 2, 1).tolist() == [[[0]] * 4] * 2


def test_who_is_checked_in_is_who_the_coins_say():
    """Over several blocks, the last one short."""
    users, rate = 600_001, 0.01
    coins = SeededRandomness(3).check_ins(7, np.arange(users), rate)
    assert np.array_equal(SeededRandomness(3).checked_in(7, users, rate), np.flatnonzero(coins))
    by_system = SystemRandomness().checked_in(7, users, rate)
    assert (np.diff(by_system) > 0).all() and by_system[-1] < users
    assert abs(len(by_system) - users * rate) < 7 * (users * rate) ** 0.5
