"""Coins and noise: reproducible in simulation, from the system outside it, with the stated laws."""

import numpy as np
import pytest
from scipy import stats

from clients import SeededRandomness, SystemRandomness, make_randomness

USERS = np.arange(20_000)


@pytest.fixture(params=["seeded", "system"])
def randomness(request):
    return SeededRandomness(11) if request.param == "seeded" else SystemRandomness()


def test_check_ins_are_bernoulli_with_the_rate(randomness):
    checked_in = sum(int(randomness.check_ins(r, USERS, 0.3).sum()) for r in range(1, 6))
    assert stats.binomtest(checked_in, 5 * len(USERS), 0.3).pvalue > 1e-7


def test_rate_one_checks_everybody_in(randomness):
    assert randomness.check_ins(1, USERS, 1.0).all()


def test_nobody_asked_nobody_in(randomness):
    assert randomness.check_ins(1, np.arange(0), 0.5).shape == (0,)


def test_noise_is_standard_normal(randomness):
    draws = np.concatenate([randomness.standard_normal(1, user, 1000) for user in range(200)])
    assert stats.kstest(draws, "norm").pvalue > 1e-7
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 6 / np.sqrt(len(draws))


def test_a_users_coin_does_not_depend_on_who_else_is_asked():
    randomness = SeededRandomness(3)
    together = randomness.check_ins(5, USERS, 0.5)
    apart = np.concatenate([randomness.check_ins(5, part, 0.5) for part in np.split(USERS, 8)])
    assert (together == apart).all()
    strided = USERS[7::13]
    assert (randomness.check_ins(5, strided, 0.5) == together[strided]).all()


@pytest.mark.parametrize("other", [(4, 1, 0), (3, 2, 0), (3, 1, 1)])
def test_noise_differs_by_seed_round_and_user(other):
    seed, round, user = other
    base = SeededRandomness(3).standard_normal(1, 0, 1000)
    assert (base == SeededRandomness(3).standard_normal(1, 0, 1000)).all()
    different = SeededRandomness(seed).standard_normal(round, user, 1000)
    assert not np.isin(base, different).any()


def test_coins_are_not_the_noise_stream_and_rounds_are_independent():
    randomness = SeededRandomness(3)
    first, second = (randomness.check_ins(r, USERS, 0.5) for r in (1, 2))
    agreement = int((first == second).sum())
    assert stats.binomtest(agreement, len(USERS), 0.5).pvalue > 1e-7


@pytest.mark.parametrize("probability", [0.0, 0.3, 0.9])
def test_blankets_are_bernoulli_with_the_probability(randomness, probability):
    drawn = [randomness.blanket(2, user, probability) for user in range(5000)]
    assert set(drawn) <= {False, True}
    assert stats.binomtest(sum(drawn), len(drawn), probability).pvalue > 1e-7


def test_a_seeded_blanket_is_the_first_uniform_of_its_own_philox_stream():
    for round, user in ((1, 0), (1, 7), (9, 7), (2, 59_999)):
        stream = np.random.Philox(key=[3, (4 << 32) | round], counter=[0, 0, 0, user])
        uniform = np.random.Generator(stream).random()
        assert not SeededRandomness(3).blanket(round, user, uniform)
        assert SeededRandomness(3).blanket(round, user, np.nextafter(uniform, 1))


def test_blankets_are_independent_of_check_ins_and_of_the_round_before():
    randomness, users = SeededRandomness(3), USERS[:5000]
    blankets, before = (
        np.array([randomness.blanket(r, user, 0.5) for user in users]) for r in (2, 1)
    )
    for other in (randomness.check_ins(2, users, 0.5), before):
        agreement = int((blankets == other).sum())
        assert stats.binomtest(agreement, len(users), 0.5).pvalue > 1e-7


def test_system_draws_never_repeat():
    randomness = make_randomness(None)
    assert isinstance(randomness, SystemRandomness)
    assert not np.isin(
        randomness.standard_normal(1, 0, 1000), randomness.standard_normal(1, 0, 1000)
    ).any()


def test_a_seed_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"seed must lie in \[0, 2\^63\), got -1"):
        make_randomness(-1)


def test_who_is_checked_in_is_who_the_coins_say():
    """Over several blocks, the last one short."""
    users, rate = 600_001, 0.01
    coins = SeededRandomness(3).check_ins(7, np.arange(users), rate)
    assert np.array_equal(SeededRandomness(3).checked_in(7, users, rate), np.flatnonzero(coins))
    by_system = SystemRandomness().checked_in(7, users, rate)
    assert (np.diff(by_system) > 0).all() and by_system[-1] < users
    assert abs(len(by_system) - users * rate) < 7 * (users * rate) ** 0.5
