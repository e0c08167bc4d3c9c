"""Random allocation: what a block of rounds costs whatever a server shows, and the draws."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from rounds import make_plan
from shufl.accounting import (
    CalibrationError,
    OpenPlan,
    PrivacyBudget,
    accountants_for,
    calibrate,
    make_accountant,
    rounds_within_budget,
)
from shufl.protocol import (
    Allocation,
    CheckIn,
    GaussianMechanism,
    LdpSgd,
    RandomisedResponse,
    Shuffled,
)
from shufl.protocol.mechanisms import (
    all_allocated,
    allocated,
    new_allocation_key,
    simulated_allocation_key,
)

KEY = bytes(range(32))
GAUSSIAN = GaussianMechanism(noise_multiplier=0.8)


def plan_of(**changes):
    values = {
        "users": 1000, "check_in_rate": 0.1, "noise_multiplier": 2.0, "rounds": 50,
        "delta": 1e-5, "target_epsilon": 100.0, "minimum_batch": 1, "shuffler_blankets": 1000.0,
        "accountant": "blanket", "participation": "allocation",
    }  # fmt: skip
    return make_plan(**(values | changes))


def block_of(every, blankets, adjacency="replace"):
    """`blanket` after one block."""
    event = Shuffled(1, Allocation(every), GAUSSIAN, blankets)
    return make_accountant("blanket", adjacency).compose(event, every)


def losses(world, records, every, blankets, draws, seed):
    """Privacy losses of blocks by simulation, of what the release shows a server.

    Before each round the server names two records in [-1, 1] by all reports so far. User 1 holds
    the first in world 0, and the second in world 1.
    """
    random, found = np.random.default_rng(seed), np.empty(draws)
    for number in range(draws):
        own, ratios, shown = random.integers(every), np.zeros(2), np.zeros(0)
        for round in range(every):
            pair = np.array(records(round, shown))
            reports = GAUSSIAN.noise_multiplier * random.normal(size=random.poisson(blankets))
            if round == own:
                report = pair[world] + GAUSSIAN.noise_multiplier * random.normal()
                reports = np.append(reports, report)
            variance = GAUSSIAN.noise_multiplier**2
            exponents = (reports[:, None] * pair - 0.5 * pair**2) / variance
            ratios += np.exp(exponents).sum(0)
            shown = np.append(shown, reports)
        found[number] = np.log(ratios[0] / ratios[1]) if ratios[1] else 0.0
    return found


def constant(round, shown):
    return 1.0, -1.0


def turned(round, shown):
    """Turns with the sum of what was shown, and asks for less after a large report."""
    sign = 1.0 if shown.sum() >= 0 else -1.0
    size = 0.5 if np.abs(shown).max(initial=0.0) > 2.0 else 1.0
    return sign * size, -sign


def delta_of(first, second, epsilon):
    return np.mean(first > epsilon) - np.exp(epsilon) * np.mean(second > epsilon)


@pytest.mark.slow
def test_a_block_costs_what_the_whole_mechanism_gives_away():
    """Simulated without Mecke's formula; and no server that chooses by what it saw gains by it."""
    every, blankets, draws = 4, 1.0, 4_000
    claims = block_of(every, blankets)
    fixed, chosen = (
        [losses(world, records, every, blankets, draws, world) for world in (0, 1)]
        for records in (constant, turned)
    )
    for epsilon in (0.0, 0.5, 1.0):
        claimed = claims.get_delta(epsilon)
        error = 4 * (1 + np.exp(epsilon)) * np.sqrt(0.25 / draws)
        assert delta_of(*fixed, epsilon) == pytest.approx(claimed, abs=error)
        assert delta_of(*chosen, epsilon) <= claimed + error


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(
    "mechanism",
    [GAUSSIAN, LdpSgd(noise_multiplier=2.0), RandomisedResponse(categories=4, local_epsilon=1.0)],
    ids=lambda it: it.name,
)
def test_blocks_are_rounds_of_everybody_among_the_blankets_of_all(mechanism, adjacency):
    drawn = Shuffled(1, Allocation(10), mechanism, 30.0)
    merged = Shuffled(1, CheckIn(1.0), mechanism, 300.0)
    for name in ("blanket", "local"):
        for rounds, blocks in ((1, 1), (10, 1), (11, 2), (40, 4)):
            found, expected = (
                make_accountant(name, adjacency).compose(event, count).get_epsilon(1e-5)
                for event, count in ((drawn, rounds), (merged, blocks))
            )
            assert found == expected > 0.0


def test_a_shuffler_that_colludes_sees_so_many_reports_and_no_more():
    """`local` counts a device's reports, where coins that say yes too often cost more."""
    drawn, coins = plan_of(), plan_of(participation="check-in")
    always = make_accountant("local").compose(Shuffled(1, CheckIn(1.0), drawn.mechanism), 5)
    assert drawn.epsilon("local") == always.get_epsilon(1e-5) < coins.epsilon("local")
    assert drawn.epsilon("blanket") == pytest.approx(coins.epsilon("blanket"), rel=0.01)


def test_the_guard_counts_blocks_and_leaves_no_round_of_one_out():
    """Rounds that are far apart would lie in more blocks than are counted."""
    plan = plan_of(target_epsilon=plan_of().epsilon(rounds=20) * 1.0001)
    assert rounds_within_budget(plan) == 20
    budget = PrivacyBudget(plan)
    for number in range(1, 21):
        budget.spend(number)
        assert budget.epsilon == plan.epsilon(rounds=number)
        with pytest.raises(RuntimeError, match=r"next one of its block, got 31|exceed the plan's"):
            budget.spend(31)
    assert budget.would_exceed()


def test_only_accountants_that_count_on_nobody_else_price_it():
    assert accountants_for(plan_of().event()) == ("blanket", "local")
    message = "accountant of gaussian rounds by allocation with shuffler blankets must be 'blanket'"
    with pytest.raises(ValueError, match=message):
        plan_of(accountant="theorem3")
    with pytest.raises(ValueError, match="by allocation without shuffler blankets must be 'local'"):
        plan_of(shuffler_blankets=0.0)


@pytest.mark.parametrize("rate", [0.3, 0.0999, 1e-10])
def test_a_rate_that_is_not_one_in_a_whole_number_is_refused(rate):
    with pytest.raises(ValueError, match="must be one in a whole number up to"):
        plan_of(check_in_rate=rate)
    assert plan_of(check_in_rate=0.333333).event().participation == Allocation(3)


def test_what_is_open_is_found_and_the_rate_cannot_be():
    values = dict(plan_of()) | {"mechanism": "gaussian", "noise_multiplier": 2.0}
    known = {name: values[name] for name in OpenPlan.model_fields if name in values}
    asked = OpenPlan(**known | {"target_epsilon": 0.1, "shuffler_blankets": "least-error"})
    found = calibrate(asked)
    assert found.participation == "allocation"
    assert 0.09 < found.epsilon() <= 0.1
    with pytest.raises(CalibrationError):
        calibrate(asked.replace(target_epsilon=1e-9))
    with pytest.raises(ValueError, match="check_in_rate must be given with participation"):
        OpenPlan(**known | {"check_in_rate": None})


@given(
    st.integers(1, 50), st.integers(0, 10**12), st.lists(st.integers(0, 500), max_size=20),
    st.binary(min_size=32, max_size=32),
)  # fmt: skip
@settings(deadline=None)
def test_each_user_reports_once_in_every_block_whoever_is_asked(every, block, users, key):
    asked = np.array(users, dtype=np.int64)
    rounds = [block * every + place for place in range(1, every + 1)]
    together = np.array([allocated(key, round, asked, every) for round in rounds])
    assert (together.sum(0) == 1).all()
    alone = [allocated(key, rounds[0], np.array([user]), every)[0] for user in users]
    assert together[0].tolist() == alone


@pytest.mark.parametrize("users", [1, 65_536, 200_000])
def test_all_who_report_are_those_who_say_so_one_by_one(users):
    found = all_allocated(KEY, 8, users, 3)
    assert found.tolist() == np.flatnonzero(allocated(KEY, 8, np.arange(users), 3)).tolist()
    last = np.array([users - 1, 0])
    assert allocated(KEY, 8, last, 3).tolist() == np.isin(last, found).tolist()


@pytest.mark.parametrize("every", [2, 3, 10, 1000])
def test_all_rounds_of_a_block_are_equally_likely(every):
    users = np.arange(20_000)
    sizes = [allocated(KEY, round, users, every).sum() for round in range(1, every + 1)]
    assert sum(sizes) == len(users)
    assert stats.chisquare(sizes).pvalue > 1e-6


def test_draws_of_blocks_users_and_keys_are_independent():
    users, every = np.arange(20_000), 2
    one = allocated(KEY, 1, users, every)
    for other in (
        allocated(KEY, 3, users, every),
        allocated(KEY, 1, users + 1, every),
        allocated(simulated_allocation_key(0), 1, users, every),
        allocated(new_allocation_key(), 1, users, every),
    ):
        assert stats.binomtest(int((one == other).sum()), len(users), 0.5).pvalue > 1e-7


def test_a_draw_is_the_whole_part_of_b_times_a_number_of_128_bits():
    """Of the key stream, read by hand."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    every, block, users = 10**9 - 7, 12, 6
    nonce = bytes(8) + block.to_bytes(8, "little")
    stream = Cipher(algorithms.ChaCha20(KEY, nonce), mode=None).encryptor()
    for user in range(users):
        number = int.from_bytes(stream.update(bytes(16)), "little")
        place = number * every >> 128
        for at, expected in ((place, True), (place + 1, False), (place - 1, False)):
            found = allocated(KEY, block * every + 1 + at, np.array([user]), every)
            assert found.tolist() == [expected]


def test_keys_are_fresh_and_nobody_reports_where_nobody_is_asked():
    assert len({new_allocation_key() for _ in range(100)}) == 100
    assert allocated(KEY, 1, np.arange(0), 5).tolist() == []
    assert allocated(KEY, 7, np.arange(3), 1).all()
