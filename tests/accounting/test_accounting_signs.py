"""Accountants of LDP-SGD and randomised response against rounds that are enumerated."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from accounting_oracles import weak_adversary
from dp_accounting import UnsupportedEventError
from scipy import stats

from nights import by_night
from shufl.accounting import (
    BlanketAccountant,
    CrowdAccountant,
    LocalAccountant,
    PldAccountant,
    adjacency,
)
from shufl.accounting.numerics.sign_pairs import Response, among_blankets, sign_profile
from shufl.accounting.peers.signs import clones_delta
from shufl.protocol import CheckIn, FixedSize, LdpSgd, RandomisedResponse, Shuffled

RELATIONS = list(adjacency.ADJACENCIES.values())


def noise_of(local_epsilon):
    return math.sqrt(math.pi / 2) / math.tanh(local_epsilon / 2)


def law_of_user(right, rate, ends):
    """P[no report, minus, plus] of a user whose report is plus with this chance."""
    law = np.zeros((ends, ends))
    law[0, 0], law[1, 0], law[0, 1] = 1 - rate, rate * (1 - right), rate * right
    return law


def convolved(one, other):
    ends = one.shape[0]
    total = np.zeros_like(one)
    for minus, plus in itertools.product(range(ends), repeat=2):
        if one[minus, plus]:
            total[minus:, plus:] += one[minus, plus] * other[: ends - minus, : ends - plus]
    return total


def divergence(first, second, epsilon):
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum())


def both_ways(first, second, epsilon):
    return max(divergence(first, second, epsilon), divergence(second, first, epsilon))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    ("rate", "blankets", "local"), [(1.0, 6.0, 1.0), (0.3, 12.0, 2.5), (0.05, 3.0, 4.0)]
)
def test_a_round_of_blankets_costs_what_enumeration_finds(relation, rate, blankets, local):
    """In one dimension a report is a sign, and the counts of both are all that there is to see."""
    ends = 60
    counts = stats.poisson(blankets / 2).pmf(np.arange(ends))
    hidden = np.outer(counts, counts)
    right = math.exp(local) / (1 + math.exp(local))
    replaced = 0.5 if relation is adjacency.relation_of("zero-out") else 1 - right
    first, second = (
        convolved(hidden, law_of_user(chance, rate, ends)) for chance in (right, replaced)
    )
    mechanism = LdpSgd(noise_multiplier=noise_of(local))
    accountant = BlanketAccountant(relation)
    accountant.compose(Shuffled(1, CheckIn(rate), mechanism, blankets))
    for epsilon in (0.0, 0.05, 0.3, 0.8, 1.5):
        truth = both_ways(first, second, epsilon)
        # Chords of the profile, and the mesh of the composition.
        assert truth * (1 - 1e-6) <= accountant.get_delta(epsilon) <= truth * 1.05 + 1e-6


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("participation", [CheckIn(1.0), CheckIn(0.6), FixedSize(4)])
def test_the_crowd_bounds_every_dataset_of_few_users(relation, participation):
    users, local = 6, 1.2
    mechanism = LdpSgd(noise_multiplier=noise_of(local))
    accountant = CrowdAccountant(relation)
    accountant.compose(Shuffled(users, participation, mechanism))
    right = math.exp(local) / (1 + math.exp(local))
    ends = users + 1
    zero_out = relation is adjacency.relation_of("zero-out")
    chances = [right, 1 - right, 0.5]
    largest = dict.fromkeys((0.0, 0.1, 0.4, 0.9), 0.0)
    for others in itertools.combinations_with_replacement(chances, users - 1):
        laws = [law_of_dataset([own, *others], participation, ends) for own in chances]
        pairs = [(0, 2), (1, 2)] if zero_out else itertools.combinations(range(3), 2)
        for one, other in pairs:
            for epsilon in largest:
                found = both_ways(laws[one], laws[other], epsilon)
                largest[epsilon] = max(largest[epsilon], found)
    for epsilon, truth in largest.items():
        assert truth * (1 - 1e-6) <= accountant.get_delta(epsilon) <= max(4 * truth, 0.02)


def law_of_dataset(chances, participation, ends):
    if isinstance(participation, FixedSize):
        groups = list(itertools.combinations(chances, participation.reports))
        laws = [law_of_dataset(group, CheckIn(1.0), ends) for group in groups]
        return sum(laws) / len(groups)
    law = np.zeros((ends, ends))
    law[0, 0] = 1.0
    for chance in chances:
        law = convolved(law, law_of_user(chance, participation.rate, ends))
    return law


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("rounds", [1, 7, pytest.param(400, marks=pytest.mark.slow)])
def test_local_is_the_composition_of_randomised_responses(rounds, rate):
    local = 0.9
    right = math.exp(local) / (1 + math.exp(local))
    accountant = LocalAccountant()
    mechanism = LdpSgd(noise_multiplier=noise_of(local))
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


def test_crowd_without_coins_is_the_weak_adversary_of_the_literature():
    """Balle et al. 2019 for two categories, where every other user's report is handed over too."""
    users, local = 500, 1.5
    accountant = CrowdAccountant()
    accountant.compose(Shuffled(users, CheckIn(1.0), LdpSgd(noise_multiplier=noise_of(local))))
    epsilons = np.array([0.0, 0.1, 0.2, 0.4])
    ours = np.array([accountant.get_delta(epsilon) for epsilon in epsilons])
    theirs = weak_adversary(users, 2, local, epsilons)
    np.testing.assert_allclose(ours, theirs, rtol=0.01, atol=2e-7)
    assert (ours < clones_delta(users, local, epsilons)).all()


def test_more_blankets_and_more_noise_cost_less():
    def epsilon(noise, blankets, rate=0.1):
        event = Shuffled(10**4, CheckIn(rate), LdpSgd(noise_multiplier=noise), blankets)
        return BlanketAccountant().epsilon_after(event, 1e-6, 100)

    assert epsilon(2.0, 100) > epsilon(2.0, 1000) > epsilon(2.0, 1e6) > epsilon(2.0, 1e11) > 0
    assert epsilon(1.2534, 1000) > epsilon(1.5, 1000) > epsilon(10.0, 1000) > 0
    assert epsilon(2.0, 1000, 0.2) > epsilon(2.0, 1000, 0.1) > epsilon(2.0, 1000, 1e-4)
    assert epsilon(2.0, 1e-7) == pytest.approx(epsilon(2.0, 1e-9))


def test_the_accountants_of_gaussian_noise_refuse_it():
    event = Shuffled(100, CheckIn(0.5), LdpSgd(noise_multiplier=2.0))
    with pytest.raises(UnsupportedEventError, match="pld prices Shuffled rounds of"):
        PldAccountant().epsilon_after(event, 1e-5)


def chances_of(own, truth, categories):
    """The law of a report of randomised response."""
    return [truth * (own == it) + (1 - truth) / categories for it in range(categories)]


@pytest.mark.parametrize(
    ("categories", "rate", "blankets", "local"),
    [(3, 1.0, 6.0, 1.0), (5, 0.3, 12.0, 2.5), (4, 0.05, 20.0, 4.0), (3, 1.0, 30.0, 18.0)],
)
@pytest.mark.parametrize("relation", RELATIONS)
def test_randomised_response_among_blankets_costs_what_enumeration_finds(
    relation, categories, rate, blankets, local
):
    """The counts at two places and elsewhere are all that tells the two records apart."""
    ends, elsewhere = 60, categories - 2
    mechanism = RandomisedResponse(categories=categories, local_epsilon=local)
    near = stats.poisson(blankets / categories).pmf(np.arange(ends))
    far = stats.poisson(blankets * elsewhere / categories).pmf(np.arange(ends))
    hidden = near[:, None, None] * near[:, None] * far

    def law(own):
        """Own place 0, 1, or None for a blanket."""
        chances = chances_of(own, mechanism.truth * (own is not None), categories)
        total = (1 - rate) * hidden
        total[1:] += rate * chances[0] * hidden[:-1]
        total[:, 1:] += rate * chances[1] * hidden[:, :-1]
        total[:, :, 1:] += rate * sum(chances[2:]) * hidden[:, :, :-1]
        return total

    zero_out = relation is adjacency.relation_of("zero-out")
    accountant = BlanketAccountant(relation)
    accountant.compose(Shuffled(1, CheckIn(rate), mechanism, blankets))
    for epsilon in (0.0, 0.05, 0.3, 0.8):
        truth = both_ways(law(0), law(None if zero_out else 1), epsilon)
        found = accountant.get_delta(epsilon)
        assert found >= truth * (1 - 1e-6)
        if not zero_out:
            assert found <= truth * 1.05 + 1e-6


@pytest.mark.parametrize("participation", [CheckIn(1.0), CheckIn(0.6), FixedSize(3)])
def test_the_crowd_bounds_randomised_response_of_few_users(participation):
    users, categories, local = 5, 3, 1.2
    mechanism = RandomisedResponse(categories=categories, local_epsilon=local)
    accountant = CrowdAccountant()
    accountant.compose(Shuffled(users, participation, mechanism))

    def law(dataset):
        """Of the counts of every category."""
        if isinstance(participation, FixedSize):
            groups = list(itertools.combinations(dataset, participation.reports))
            return sum(law_of(group, 1.0) for group in groups) / len(groups)
        return law_of(dataset, participation.rate)

    def law_of(dataset, rate):
        total = np.zeros((users + 1,) * categories)
        total[0, 0, 0] = 1.0
        for own in dataset:
            after = (1 - rate) * total
            for place, chance in enumerate(chances_of(own, mechanism.truth, categories)):
                after += rate * chance * np.roll(total, 1, axis=place)
            total = after
        return total

    largest = dict.fromkeys((0.0, 0.1, 0.4, 0.9), 0.0)
    for others in itertools.combinations_with_replacement(range(categories), users - 1):
        first, second = law([0, *others]), law([1, *others])
        for epsilon in largest:
            largest[epsilon] = max(largest[epsilon], both_ways(first, second, epsilon))
    for epsilon, truth in largest.items():
        assert truth * (1 - 1e-6) <= accountant.get_delta(epsilon) <= max(4 * truth, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("users", "categories", "local"), [(1000, 4, 2.565), *by_night((2000, 20, 3.0))]
)
def test_crowd_is_the_weak_adversary_of_more_categories(users, categories, local):
    """Also for n = 1000, γ = 0.25, k = 4, which Koskela et al. show."""
    accountant = CrowdAccountant()
    mechanism = RandomisedResponse(categories=categories, local_epsilon=local)
    accountant.compose(Shuffled(users, CheckIn(1.0), mechanism))
    epsilons = np.array([0.0, 0.05, 0.1, 0.2])
    ours = np.array([accountant.get_delta(epsilon) for epsilon in epsilons])
    theirs = weak_adversary(users, categories, local, epsilons)
    np.testing.assert_allclose(ours, theirs, rtol=0.025)


def test_two_categories_are_one_sign():
    noise = noise_of(1.3)
    for blankets, accountant in ((50.0, BlanketAccountant()), (0.0, CrowdAccountant())):
        one, other = (
            accountant.epsilon_after(Shuffled(300, CheckIn(0.4), mechanism, blankets), 1e-6, 20)
            for mechanism in (
                LdpSgd(noise_multiplier=noise),
                RandomisedResponse(categories=2, local_epsilon=1.3),
            )
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
