"""From a profile to composed ε: domination, closed forms, independence of the path."""

import math

import mpmath as mp
import numpy as np
import pytest
from accounting_oracles import gaussian_delta, gaussian_deltas
from dp_accounting import NeighboringRelation
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from nights import by_night
from rounds import check_in, everyone, fixed_size
from shufl.accounting.accountants import privacy_profile as profiles
from shufl.accounting.numerics import composition, loss_pmf
from shufl.accounting.numerics.gaussian_divergence import gaussian_epsilon, log_gaussian_delta

pytestmark = pytest.mark.slow

ZERO_OUT = NeighboringRelation.REPLACE_SPECIAL


def gaussian_profile(shift, points=1500, reach=12.5):
    eps = np.linspace(0.0, shift * shift / 2 + reach * shift, points)
    return eps, gaussian_deltas(shift)(eps)


class ToyAccountant(profiles.ProfileShuffleAccountant):
    """Prices any event as the Gaussian mechanism that the local randomiser is."""

    name = "toy"
    covers = "a test"
    holds_for = "every pair"

    def _profile(self, event, least):
        return gaussian_profile(1.0 / self._sigma(event))


def event(noise, users=10):
    return everyone(users, noise)


def toy():
    return ToyAccountant(ZERO_OUT)


def pld_of(eps, deltas):
    profile = loss_pmf.Profile.enveloping(eps, deltas)
    pmf = profile.discretised(loss_pmf.dyadic_interval(profile.spread()))
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(pmf.interval, -pmf.half_width, pmf.probs, pmf.infinity, True)
    )


@pytest.mark.parametrize("shift", [1e-4, 0.03, 1.0, 8.0])
@pytest.mark.parametrize("every", [10, *by_night(1)])
def test_the_discrete_loss_dominates_the_profile_everywhere(shift, every):
    eps, deltas = gaussian_profile(shift)
    pld = pld_of(eps, deltas)
    asked = np.sort(np.concatenate([eps, np.linspace(0, eps[-1], 4001)]))[::every]
    truth = np.array([float(gaussian_delta(shift, e)) for e in asked])
    got = np.array(pld.get_delta_for_epsilon(asked))
    assert np.all(got >= truth * (1 - 1e-12))
    middle = truth > 1e-9
    assert np.all(got[middle] <= truth[middle] * 1.01 + 1e-12)
    # The other direction is the continuation to ε < 0.
    for e in np.linspace(0.0, 2 * shift, 7):
        below = pld.get_delta_for_epsilon(float(-e))
        assert below >= 1 - math.exp(-e) + math.exp(-e) * float(gaussian_delta(shift, e)) - 1e-12
    assert pld._pmf_remove._probs.sum() + pld._pmf_remove._infinity_mass == pytest.approx(1, 1e-12)


def test_the_envelope_is_the_hull_and_caps_total_variation():
    eps = np.array([0.0, 0.1, 0.2, 0.3, 5.0])
    profile = loss_pmf.Profile.enveloping(eps, [0.9, 0.05, 0.2, 0.01, 0.02])
    assert list(profile.epsilons) == [0.0, 0.1, 0.3, 5.0]
    # (ε, δ)-DP in both directions caps the total variation.
    cap = (2 * 0.01 + math.expm1(0.3)) / (math.exp(0.3) + 1)
    assert profile.deltas[0] == pytest.approx(
        min(cap, (2 * 0.05 + math.expm1(0.1)) / (math.exp(0.1) + 1)), rel=1e-9
    )
    assert np.all(np.diff(profile.deltas) <= 0)


@given(
    steps=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=30),
    deltas=st.lists(st.floats(0, 1.5), min_size=31, max_size=31),
)
def test_any_points_give_a_distribution_below_all_of_them(steps, deltas):
    eps = np.concatenate([[0.0], np.cumsum(steps)])
    values = np.array(deltas[: eps.size])
    profile = loss_pmf.Profile.enveloping(eps, values)
    assert np.all(profile.delta_at(eps) <= np.minimum(values, 1) * (1 + 2e-11) + 1e-300)
    pmf = profile.discretised(loss_pmf.dyadic_interval(profile.spread()))
    assert np.all(pmf.probs >= 0) and pmf.infinity >= 0
    # Rounding may add mass, never take any.
    assert -1e-9 <= pmf.probs.sum() + pmf.infinity - 1.0 <= 1e-3
    for j in range(0, pmf.half_width, max(pmf.half_width // 20, 1)):
        e = j * pmf.interval
        kept = pmf.losses > e
        got = pmf.infinity + float(pmf.probs[kept] @ -np.expm1(e - pmf.losses[kept]))
        assert got >= float(profile.delta_at(e)) * (1 - 1e-9) - 1e-13


@pytest.mark.parametrize(
    ("eps", "deltas"),
    [
        ([0.0, 1.0], [0.1]),
        ([], []),
        ([0.1, 1.0], [0.1, 0.0]),
        ([0.0, 0.0], [0.1, 0.0]),
        ([0.0, 1.0], [0.1, math.nan]),
        ([0.0, 1.0], [0.1, -1e-9]),
    ],
)
def test_what_is_no_profile_is_refused(eps, deltas):
    with pytest.raises(ValueError, match="as many deltas"):
        loss_pmf.Profile.enveloping(eps, deltas)


@pytest.mark.parametrize("noise", [3e3, 50.0, 1.0, 0.1])
@pytest.mark.parametrize("rounds", [1, 2, 17, 5540, *by_night(10**6)])
@pytest.mark.parametrize("delta", [1e-15, 1e-5, 1e-2])
def test_composed_gaussians_are_one_gaussian_from_above(noise, rounds, delta):
    accountant = toy().compose(event(noise), rounds)
    epsilon = accountant.get_epsilon(delta)
    shift = mp.sqrt(rounds) / mp.mpf(noise)
    assert gaussian_delta(shift, epsilon) <= delta
    if epsilon > 0:
        assert gaussian_delta(shift, epsilon * (1 - 1e-4) - 2e-5 / mp.mpf(noise)) > delta
    assert accountant.get_delta(epsilon) <= delta * (1 + 1e-6)
    assert accountant.get_delta(epsilon) >= gaussian_delta(shift, epsilon)


@given(
    log_shift=st.floats(-9, 2),
    rounds=st.integers(1, 10**6),
    log_delta=st.floats(-34, -1),
)
def test_epsilon_is_never_too_small(log_shift, rounds, log_delta):
    noise, delta = math.exp(-log_shift), math.exp(log_delta)
    epsilon = toy().epsilon_after(event(noise), delta, rounds)
    assert gaussian_delta(mp.sqrt(rounds) / mp.mpf(noise), epsilon) <= delta


def test_rounds_of_different_noise_add_up_in_any_order_to_the_last_bit():
    mixed = toy()
    for noise, count in ((1.0, 1), (40.0, 3), (1.0, 2), (7.0, 5)):
        mixed.compose(event(noise), count)
    other = toy().compose(event(7.0), 5).compose(event(40.0), 3).compose(event(1.0), 2)
    ahead = other.epsilon_after(event(1.0), 1e-6)
    other.compose(event(1.0))
    assert mixed.get_epsilon(1e-6) == other.get_epsilon(1e-6) == ahead
    shift = mp.sqrt(3 + 3 / mp.mpf(1600) + 5 / mp.mpf(49))
    assert gaussian_delta(shift, ahead) <= 1e-6
    assert gaussian_delta(shift, ahead * (1 - 2e-4)) > 1e-6


def test_step_by_step_and_bisection_agree_at_every_count():
    stepped, previous = toy(), 0.0
    counts = [*range(1, 60), *range(250, 262), *range(1022, 1027)]
    for count in range(1, max(counts) + 1):
        here = stepped.epsilon_after(event(60.0), 1e-5)
        assert here >= previous
        stepped.compose(event(60.0))
        if count in counts:
            assert toy().epsilon_after(event(60.0), 1e-5, count) == here
            assert stepped.get_epsilon(1e-5) == here
        previous = here


def test_randomised_response_composes_like_dp_accountings():
    # P = (p, 1-p), Q = (1-p, p): δ(ε) = (p - e^ε (1-p))_+, exact between the two atoms.
    odds = 0.25
    p = math.exp(odds) / (1 + math.exp(odds))
    eps = np.linspace(0.0, odds, 9)
    deltas = np.maximum(p - np.exp(eps) * (1 - p), 0.0)
    pmf = loss_pmf.Profile.enveloping(eps, deltas).discretised(2.0**-6)
    for rounds in (1, 3, 40):
        found = composition.Composition(
            [pmf], [composition.count_block(rounds)], composition.Target(delta=1e-4)
        ).epsilon((rounds,), 1e-4)
        atoms = np.arange(rounds + 1)
        mass = special.comb(rounds, atoms) * p**atoms * (1 - p) ** (rounds - atoms)
        loss = (2 * atoms - rounds) * odds

        def truth(e, loss=loss, mass=mass):
            return float(mass[loss > e] @ -np.expm1(e - loss[loss > e]))

        assert truth(found) <= 1e-4
        assert found == 0 or truth(found * (1 - 1e-6) - 1e-9) > 1e-4


@pytest.mark.parametrize("rare", [1e-6, 1e-12, 1e-20])
@pytest.mark.parametrize("infinity", [0.0, 1e-13])
def test_a_rare_large_loss_does_not_lead_the_tilt_astray(rare, infinity):
    # Small losses, and one of 12 with probability `rare`: the tilted mean jumps.
    h, size = 2.0**-8, 12 * 2**8
    losses = np.arange(-size, size + 1) * h
    probs = np.zeros(losses.size)
    for at, chance in ((size + 8, 0.3), (2 * size, rare)):
        probs[at], probs[2 * size - at] = chance, chance * math.exp(-losses[at])
    probs[size] = 1.0 - probs.sum() - infinity
    pmf = loss_pmf.LossPmf(h, probs, infinity)
    rounds, kept = 40, [size - 8, size, size + 8]
    # The truth without large losses, and what they add: at most their chance.
    small = np.array([1.0])
    for _ in range(rounds):
        small = np.convolve(small, probs[kept])
    small_losses = (np.arange(small.size) - rounds) * 8 * h
    for epsilon in (0.0, 0.05, 0.3):
        above = small_losses > epsilon
        bulk = float(small[above] @ -np.expm1(epsilon - small_losses[above]))
        composed = composition.Composition(
            [pmf], [(rounds, rounds)], composition.Target(epsilon=epsilon)
        )
        got = composed.delta((rounds,), epsilon)
        assert bulk * (1 - 1e-9) <= got <= (bulk + rounds * (rare + infinity)) * (1 + 1e-6)
        back = composition.Composition(
            [pmf], [composition.count_block(rounds)], composition.Target(delta=got * (1 + 1e-6))
        )
        assert back.epsilon((rounds,), got * (1 + 1e-6)) <= epsilon * (1 + 1e-6) + 1e-12


def test_an_infinite_loss_cannot_be_bought_off():
    pmf = loss_pmf.Profile.enveloping([0.0, 1.0], [0.2, 1e-6]).discretised(0.125)
    composed = composition.Composition([pmf], [(10, 10)], composition.Target(delta=1e-5))
    assert composed.epsilon((10,), 9e-6) == math.inf
    assert composed.epsilon((10,), 1.1e-5) < math.inf
    assert composed.delta((10,), 100.0) == pytest.approx(1 - (1 - 1e-6) ** 10, rel=1e-6)


def test_nothing_spent_costs_nothing_and_no_noise_everything():
    accountant = toy()
    accountant.compose(fixed_size(10, 0, 1.0), 5)
    assert accountant.get_epsilon(1e-9) == 0
    assert accountant.get_delta(0.0) == 0
    accountant.compose(event(0.0))
    assert accountant.get_epsilon(0.5) == math.inf
    assert accountant.get_delta(5.0) == 1
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="delta must lie"):
            accountant.get_epsilon(wrong)
    with pytest.raises(ValueError, match="epsilon must be"):
        accountant.get_delta(-1.0)


@pytest.mark.parametrize("shift", [0.0, 1e-200, 1e-15])
def test_means_that_hardly_differ_cost_hardly_anything(shift):
    assert gaussian_epsilon(shift, 1e-9) == 0.0  # δ(0) = 2 Φ(μ/2) - 1 < μ < 1e-9
    total_variation = mp.erf(mp.mpf(shift) / (2 * mp.sqrt(2)))
    assert total_variation <= math.exp(float(log_gaussian_delta(shift, 0.0))) <= 1e-12


class OneSided(ToyAccountant):
    """The subsampled Gaussian with a trusted server: a user is in a round with chance q, or not."""

    def _profile(self, event, least):
        rate, shift = event.participation.rate, 1.0 / self._sigma(event)
        eps = np.concatenate([np.linspace(0.0, 1.0, 2000), np.linspace(1.01, 60.0, 4000)])
        # H_α of qN(1) + (1-q)N(0) against N(0) is q H of one Gaussian at 1 + (α-1)/q; and of N(0)
        # against the mixture, where α(1-q) < 1.
        with_user = rate * np.exp(log_gaussian_delta(shift, np.log1p(np.expm1(eps) / rate)))
        left = 1.0 - np.exp(eps) * (1.0 - rate)
        ratio = np.exp(eps) * rate / np.where(left > 0.0, left, 1.0)
        call = np.exp(log_gaussian_delta(shift, np.maximum(np.log(ratio), 0.0)))
        without = np.where(left > 0.0, left * call, 0.0)
        return eps, np.stack([with_user, without])


@pytest.mark.parametrize(("rate", "noise", "rounds"), [(0.1, 1.0, 100), (0.5, 0.7, 30)])
def test_directions_compose_each_for_itself(rate, noise, rounds):
    accountant = OneSided(ZERO_OUT)
    accountant.compose(check_in(1, rate, noise), rounds)
    pld = privacy_loss_distribution.from_gaussian_mechanism(
        noise, sampling_prob=rate, value_discretization_interval=1e-4
    )
    truth = pld.self_compose(rounds).get_epsilon_for_delta(1e-6)
    assert accountant.get_epsilon(1e-6) == pytest.approx(truth, rel=2e-4)


@pytest.mark.parametrize(("rate", "noise", "rounds"), [(0.1, 1.0, 100), (0.5, 0.7, 30)])
def test_a_profile_and_its_mirror_image_are_losses_of_one_pair(rate, noise, rounds):
    event = check_in(1, rate, noise)
    profile = loss_pmf.Profile.enveloping(*OneSided(ZERO_OUT)._profile(event, 1e-22))
    one, other = (each.discretised(2.0**-8) for each in (profile, profile.swapped))
    assert one.probs.sum() + one.infinity == pytest.approx(1.0, abs=1e-12)
    # Q[-x] = e^{-x} P[x].
    np.testing.assert_allclose(other.probs[::-1], one.probs * np.exp(-one.losses), atol=1e-9)
    assert profile.swapped.swapped.deltas is profile.deltas
