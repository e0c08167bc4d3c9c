"""Other systems' bounds, against enumeration, closed forms and each other."""

import collections
import itertools
import math

import mpmath as mp
import numpy as np
import pytest
from accounting_oracles import gaussian_delta, gaussian_deltas, weak_adversary
from scipy import optimize

import other_bounds
from other_bounds import (
    girgis_lower_rdp,
    girgis_simple_rdp,
)
from shufl.accounting import CrowdAccountant
from shufl.accounting.peers import comparisons
from shufl.accounting.peers.comparisons import (
    clones_delta,
    girgis_rdp,
    girgis_subsampled_rdp,
    randomised_response_delta,
)
from shufl.protocol import CheckIn, GaussianMechanism, LdpSgd, Shuffled


def enumerated_response(n, k, local, epsilon, adversary):
    """H_{e^ε} of the view, report by report: who sent a uniform value, and the histogram."""
    share = k / (math.exp(local) + k - 1)
    views = []
    for value in (0, 1):
        view = collections.Counter()
        for coins in itertools.product((0, 1), repeat=n - 1):
            uniform = sum(coins)
            weight = share**uniform * (1 - share) ** (n - 1 - uniform)
            own = [(value, 1.0)]
            if adversary == "weak":
                own = [(v, share / k + (1 - share) * (v == value)) for v in range(k)]
            for sent, chance in own:
                for others in itertools.product(range(k), repeat=uniform):
                    histogram = tuple(sorted((sent, *others)))
                    view[uniform, histogram] += weight * chance / k**uniform
        views.append(view)
    keys = set(views[0]) | set(views[1])
    return sum(max(views[0][key] - math.exp(epsilon) * views[1][key], 0) for key in keys)


@pytest.mark.parametrize("adversary", ["strong", "weak"])
@pytest.mark.parametrize(("n", "k"), [(1, 2), (2, 3), (5, 2), (5, 3), (4, 5)])
@pytest.mark.parametrize("local", [0.4, 2.0])
def test_randomised_response_is_its_enumeration(n, k, local, adversary):
    epsilons = local * np.array([0.0, 0.1, 0.4, 0.8, 1.0, 1.5])
    got = randomised_response_delta(n, k, local, epsilons, adversary)
    for epsilon, value in zip(epsilons, got, strict=True):
        truth = enumerated_response(n, k, local, epsilon, adversary)
        assert truth - 1e-14 <= value <= truth * (1 + 1e-6) + 1e-14


@pytest.mark.nightly
def test_large_groups_are_the_sum_over_who_sent_a_uniform_value():
    epsilons = np.array([0.0, 0.05, 0.15])
    got = randomised_response_delta(2000, 4, 2.0, epsilons, "weak")
    truth = weak_adversary(2000, 4, 2.0, epsilons)
    assert np.all(truth * (1 - 1e-9) <= got)
    assert np.all(got <= truth * 1.03)


@pytest.mark.parametrize(("rounds", "rate"), [(1, 1.0), (40, 1.0), (1, 0.05)])
def test_composition_and_sampling_of_a_known_profile(rounds, rate):
    shift, delta = 0.3, 1e-6
    grid = np.linspace(0.0, 5.0, 2000)
    epsilon = comparisons.composed_epsilon(gaussian_deltas(shift), grid, rounds, delta, rate)

    def truth(e):
        if rate < 1:
            return rate * gaussian_delta(shift, mp.log(1 + mp.expm1(e) / rate))
        return gaussian_delta(shift * mp.sqrt(rounds), e)

    assert truth(epsilon) <= delta * (1 + 1e-9)
    assert truth(epsilon * (1 - 1e-3)) > delta


def test_the_trusted_server_in_one_round_is_the_closed_form():
    rate, noise, delta = 0.1, 1.5, 1e-5
    epsilon = comparisons.central_subsampled_gaussian(rate, noise, 1, delta)
    # H(P‖Q) for P = (1-q) N0 + q N1: q times the Gaussian's at 1 + (α-1)/q.
    at = lambda e: rate * gaussian_delta(1 / noise, mp.log(1 + mp.expm1(e) / rate))  # noqa: E731
    assert at(epsilon) <= delta * (1 + 1e-6) and at(epsilon * 0.99) > delta


def test_peers_keep_their_order_and_say_what_they_are():
    rounds = [1, 10, 100]
    mechanism = GaussianMechanism(noise_multiplier=5.0)
    found = {p.name: p for p in comparisons.peers(60_000, 0.1, mechanism, rounds, 1 / 60_000)}
    for peer in found.values():
        assert list(peer.epsilons) == sorted(peer.epsilons) and peer.covers
    for less, more in itertools.pairwise(["central", "rr-weak", "clones-2022", "clones-2021"]):
        assert np.all(np.array(found[less].epsilons) < found[more].epsilons)
    assert np.all(np.array(found["clones-2021"].epsilons) < found["girgis"].epsilons)
    assert np.all(np.array(found["rr-strong"].epsilons) < found["clones-2021"].epsilons)


def test_peers_of_ldp_sgd_are_at_its_own_epsilon_and_above_its_accountant():
    """Its reports are randomised response at worst, so analyses that know only ε₀ say more."""
    mechanism, rounds = LdpSgd(noise_multiplier=1.6), [1, 50]
    found = {p.name: p for p in comparisons.peers(20_000, 1.0, mechanism, rounds, 1e-6)}
    assert f"ε₀ = {mechanism.local_epsilon:.3g} LDP report (LDP-SGD's)" in found["girgis"].covers
    event = Shuffled(20_000, CheckIn(1.0), mechanism)
    ours = [CrowdAccountant().epsilon_after(event, 1e-6, count) for count in rounds]
    assert np.all(ours < np.array(found["clones-2021"].epsilons))
    np.testing.assert_allclose(ours, found["rr-weak"].epsilons, rtol=0.01)


WANG = [  # mechanism, k, n, ε₀, δ and ε: the pair summed in exact arithmetic
    ("response", 10, 10_000, 1.0, 1e-6, 0.02325167784317728),
    ("response", 3, 10_000, 1.0, 1e-6, 0.037998056157811384),
    ("response", 10, 100_000, 2.0, 1e-7, 0.02714475330820557),
    ("response", 10, 10_000, 3.0, 1e-6, 0.18975073450186636),
    ("laplace", None, 10_000, 1.0, 1e-6, 0.03961689259063766),
    ("laplace", None, 100_000, 2.0, 1e-7, 0.035080796491378845),
    ("laplace", None, 10_000, 3.0, 1e-6, 0.20798664483087076),
    ("any", None, 10_000, 3.0, 1e-6, 0.22607898030876505),
]


@pytest.mark.parametrize(("mechanism", "k", "n", "local", "delta", "exact"), WANG)
def test_the_variation_ratio_pair_is_summed_exactly(mechanism, k, n, local, delta, exact):
    make = getattr(other_bounds, f"of_{mechanism}")
    known = make(local) if k is None else make(k, local)
    found = epsilon_of_one_round(
        lambda e: other_bounds.variation_ratio_delta(n, *known, e), delta, local
    )
    assert exact < found < exact + 1e-9


def epsilon_of_one_round(profile, delta, local):
    return optimize.brentq(lambda e: profile(np.array([e]))[0] - delta, 0.0, local * 0.999)


@pytest.mark.parametrize(
    ("n", "local", "delta", "year", "exact"),
    [
        (1000, 0.5, 1e-5, 2021, 0.0582674787),
        (10**5, 4.0, 1e-6, 2021, 0.1697697473),
        (1000, 0.5, 1e-5, 2022, 0.0516317224),
        (10**5, 4.0, 1e-6, 2022, 0.1181530665),
        (10**6, 5.0, 1e-8, 2022, 0.0775152409),
    ],
)
def test_the_clones_of_both_years_are_the_exact_values_from_above(n, local, delta, year, exact):
    found = epsilon_of_one_round(lambda e: clones_delta(n, local, e, year), delta, local)
    assert exact <= found <= 1.003 * exact


@pytest.mark.parametrize(
    ("bound", "n", "local", "order", "published"),
    [
        (girgis_rdp, 1000, 0.1, 3, 3.360560330e-5),
        (girgis_rdp, 10**5, 2.0, 30, 6.810818603e-2),
        (girgis_simple_rdp, 1000, 0.1, 3, 1.101197988e-4),
        (girgis_simple_rdp, 10**5, 2.0, 30, 0.187206851),
        (girgis_lower_rdp, 1000, 0.1, 3, 1.5012328879e-5),
        (girgis_lower_rdp, 10**6, 0.5, 10, 1.2762577518e-6),
        (girgis_lower_rdp, 10**5, 2.0, 30, 8.277827809e-4),
    ],
)
def test_the_renyi_bounds_of_girgis_et_al(bound, n, local, order, published):
    assert bound(n, local, [order])[0] == pytest.approx(published, rel=1e-6)


@pytest.mark.parametrize(
    ("k", "local", "rate", "order", "derived"),
    [
        (10**4, 1.0, 0.001, 8, 9.454778678755307e-9),
        (1000, 3.0, 0.01, 20, 0.03523889379878022),
        (1000, 3.0, 0.01, 2, 0.00037017827944970863),
    ],
)
def test_the_sampled_renyi_bound_has_the_term_that_the_argument_gives(
    k, local, rate, order, derived
):
    """Published code halves u in Υ: 0.0336 and 0.00031 instead of the last two."""
    found = girgis_subsampled_rdp(rate, k, local, [order])[0]
    assert found == pytest.approx(derived, rel=1e-6)
