"""Accountants of LDP-SGD and randomised response against rounds that are enumerated."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from accounting_oracles import weak_adversary
from scipy import stats

from nights import by_night
from shufl.accounting import (
    ADJACENCIES,
    BlanketAccountant,
    CrowdAccountant,
    LocalAccountant,
)
from shufl.accounting.numerics.sign_pairs import Response, among_blankets, sign_profile
from shufl.protocol import CheckIn, FixedSize, LdpSgd, RandomisedResponse, Shuffled

RELATIONS = list(ADJACENCIES.values())


def sgd(local_epsilon):
    """LDP-SGD with this ε₀: in one dimension a report is a sign, which is one of two categories."""
    return LdpSgd(noise_multiplier=math.sqrt(math.pi / 2) / math.tanh(local_epsilon / 2))


def response(categories, local_epsilon):
    return RandomisedResponse(categories=categories, local_epsilon=local_epsilon)


def chances_of(own, mechanism):
    """The law of a report of a category; of None a uniform one, a blanket."""
    categories = getattr(mechanism, "categories", 2)
    odds = np.ones(categories)
    if own is not None:
        odds[own] = math.exp(mechanism.local_epsilon)
    return odds / odds.sum()


def divergence(first, second, epsilon):
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum())


def both_ways(first, second, epsilon):
    return max(divergence(first, second, epsilon), divergence(second, first, epsilon))


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("rounds", [1, 7, pytest.param(400, marks=pytest.mark.slow)])
def test_local_is_the_composition_of_randomised_responses(rounds, rate):
    local = 0.9
    right = math.exp(local) / (1 + math.exp(local))
    accountant = LocalAccountant()
    mechanism = sgd(local)
    accountant.compose(Shuffled(1, CheckIn(rate), mechanism), rounds)
    for epsilon in (0.0, 0.5, 2.0, 0.05 * rounds):
        truth = 0.0
        for count, chance in enumerate(stats.binom(rounds, rate).pmf(np.arange(rounds + 1))):
            if chance < 1e-15:
                continue
            heads = np.arange(count + 1)
            log_p, log_q = (stats.binom(count, p).logpmf(heads) for p in (right, 1 - right))
            above = log_p > log_q + epsilon
            part = np.sum(np.exp(log_p[above]) - np.exp(epsilon + log_q[above]))
            truth += float(chance * part)
        assert truth * (1 - 1e-9) <= accountant.get_delta(epsilon) <= truth * 1.01 + 1e-9


def test_more_blankets_and_more_noise_cost_less():
    def epsilon(noise, blankets, rate=0.1):
        event = Shuffled(10**4, CheckIn(rate), LdpSgd(noise_multiplier=noise), blankets)
        return BlanketAccountant().epsilon_after(event, 1e-6, 100)

    assert epsilon(2.0, 100) > epsilon(2.0, 1000) > epsilon(2.0, 1e6) > epsilon(2.0, 1e11) > 0
    assert epsilon(1.2534, 1000) > epsilon(1.5, 1000) > epsilon(10.0, 1000) > 0
    assert epsilon(2.0, 1000, 0.2) > epsilon(2.0, 1000, 0.1) > epsilon(2.0, 1000, 1e-4)
    assert epsilon(2.0, 1e-7) == pytest.approx(epsilon(2.0, 1e-9))


@pytest.mark.parametrize(
    ("mechanism", "rate", "blankets"),
    [
        *((sgd(1.0), 1.0, 6.0), (sgd(2.5), 0.3, 12.0), (sgd(4.0), 0.05, 3.0)),
        *((response(3, 1.0), 1.0, 6.0), (response(5, 2.5), 0.3, 12.0)),
        *((response(4, 4.0), 0.05, 20.0), (response(3, 18.0), 1.0, 30.0)),
    ],
)
@pytest.mark.parametrize("relation", RELATIONS)
def test_a_round_among_blankets_costs_what_enumeration_finds(relation, mechanism, rate, blankets):
    """The counts at two places and elsewhere are all that tells the two records apart."""
    ends, categories = 60, chances_of(None, mechanism).size
    near = stats.poisson(blankets / categories).pmf(np.arange(ends))
    far = stats.poisson(blankets * (1 - 2 / categories)).pmf(np.arange(ends))
    hidden = near[:, None, None] * near[:, None] * far

    def law(own):
        chances = chances_of(own, mechanism)
        total = (1 - rate) * hidden
        total[1:] += rate * chances[0] * hidden[:-1]
        total[:, 1:] += rate * chances[1] * hidden[:, :-1]
        total[:, :, 1:] += rate * sum(chances[2:]) * hidden[:, :, :-1]
        return total

    zero_out = relation is ADJACENCIES["zero-out"]
    accountant = BlanketAccountant(relation)
    accountant.compose(Shuffled(1, CheckIn(rate), mechanism, blankets))
    for epsilon in (0.0, 0.05, 0.3, 0.8, 1.5):
        truth = both_ways(law(0), law(None if zero_out else 1), epsilon)
        found = accountant.get_delta(epsilon)
        assert found >= truth * (1 - 1e-6)
        if not zero_out or categories == 2:  # of more categories both adjacencies cost the same
            assert found <= truth * 1.05 + 1e-6


@pytest.mark.parametrize(
    ("mechanism", "users", "relation"),
    [*((sgd(1.2), 6, relation) for relation in RELATIONS), (response(3, 1.2), 5, RELATIONS[0])],
)
@pytest.mark.parametrize("participation", [CheckIn(1.0), CheckIn(0.6), FixedSize(3)])
def test_the_crowd_bounds_every_dataset_of_few_users(mechanism, users, relation, participation):
    categories = chances_of(None, mechanism).size
    records = [*range(categories), None] if categories == 2 else range(categories)
    accountant = CrowdAccountant(relation)
    accountant.compose(Shuffled(users, participation, mechanism))

    def law(dataset):
        """Of the counts of every category."""
        if isinstance(participation, FixedSize):
            groups = list(itertools.combinations(dataset, participation.reports))
            return sum(law_of(group, 1.0) for group in groups) / len(groups)
        return law_of(dataset, participation.rate)

    def law_of(dataset, rate):
        total = np.zeros((users + 1,) * categories)
        total[(0,) * categories] = 1.0
        for own in dataset:
            after = (1 - rate) * total
            for place, chance in enumerate(chances_of(own, mechanism)):
                after += rate * chance * np.roll(total, 1, axis=place)
            total = after
        return total

    largest = dict.fromkeys((0.0, 0.1, 0.4, 0.9), 0.0)
    for others in itertools.combinations_with_replacement(records, users - 1):
        laws = {own: law([own, *others]) for own in records}
        for one, other in itertools.combinations(records, 2):
            if relation is ADJACENCIES["zero-out"] and other is not None:
                continue
            for epsilon in largest:
                found = both_ways(laws[one], laws[other], epsilon)
                largest[epsilon] = max(largest[epsilon], found)
    for epsilon, truth in largest.items():
        assert truth * (1 - 1e-6) <= accountant.get_delta(epsilon) <= max(4 * truth, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "mechanism"),
    [(500, sgd(1.5)), (1000, response(4, 2.565)), *by_night((2000, response(20, 3.0)))],
)
def test_crowd_without_coins_is_the_weak_adversary_of_the_literature(users, mechanism):
    """Also for n = 1000, γ = 0.25, k = 4, which Koskela et al. show."""
    accountant = CrowdAccountant().compose(Shuffled(users, CheckIn(1.0), mechanism))
    epsilons = np.array([0.0, 0.05, 0.1, 0.2])
    ours = np.array([accountant.get_delta(epsilon) for epsilon in epsilons])
    categories = chances_of(None, mechanism).size
    theirs = weak_adversary(users, categories, mechanism.local_epsilon, epsilons)
    np.testing.assert_allclose(ours, theirs, rtol=0.025, atol=2e-7)


@pytest.mark.parametrize(
    ("blankets", "accountant"), [(50.0, BlanketAccountant()), (0.0, CrowdAccountant())]
)
def test_two_categories_are_one_sign(blankets, accountant):
    one, other = (
        accountant.epsilon_after(Shuffled(300, CheckIn(0.4), each, blankets), 1e-6, 20)
        for each in (sgd(1.3), response(2, 1.3))
    )
    assert one == pytest.approx(other, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("categories", [2, 7, 1000, 2**15])
@pytest.mark.parametrize("local", [1e-6, 0.5, 20.0])
@pytest.mark.parametrize("blankets", [1e-7, 1.0, *by_night(1e6)])
def test_randomised_response_at_the_edges_costs_no_more_than_alone(categories, local, blankets):
    mechanism = RandomisedResponse(categories=categories, local_epsilon=local)
    alone = Shuffled(1, CheckIn(1.0), mechanism)
    most = LocalAccountant().epsilon_after(alone, 1e-6, 1)
    accountant, event = BlanketAccountant(), Shuffled(1, CheckIn(1.0), mechanism, blankets)
    found = accountant.epsilon_after(event, 1e-6, 1)
    assert 0.0 <= found <= most * 1.05 + 1e-6 <= local * 1.2 + 1e-5


@pytest.mark.parametrize("mechanism", [
    *(RandomisedResponse(categories=k, local_epsilon=e) for k in (2, 3, 1000) for e in (1e-9, 20)),
    LdpSgd(noise_multiplier=1.2533141386), LdpSgd(noise_multiplier=1e6),
])  # fmt: skip
@pytest.mark.parametrize("relation", RELATIONS)
def test_no_loss_exceeds_the_last_of_a_profile(mechanism, relation):
    response = Response.of(mechanism)
    with mpmath.workdps(60):
        truth = mpmath.mpf(response.truth)
        zero_out = response.hides_zero(relation)
        most = mpmath.mpf(1) if zero_out else 1 - truth + truth * response.places
        exact = mpmath.log(most / (1 - truth))
        for hiding in (None, among_blankets(response, 0.5, 100.0)):
            epsilons, _ = sign_profile(response, 0.5, relation, hiding)
            assert exact <= mpmath.mpf(epsilons[-1]) <= exact * (1 + 1e-14)


def test_only_gaussian_noise_is_too_little_to_count_on_others():
    """Of a thousand categories an entry of a blanket has a deviation of 0.03."""
    mechanism = RandomisedResponse(categories=1000, local_epsilon=8.0)
    assert mechanism.noise_multiplier < 0.2
    for accountant, blankets in ((BlanketAccountant(), 1e4), (CrowdAccountant(), 0.0)):
        event = Shuffled(10_000, CheckIn(0.5), mechanism, blankets)
        assert accountant.epsilon_after(event, 1e-6) < 8.0
        assert accountant.compose(event).note(1e-6) is None
