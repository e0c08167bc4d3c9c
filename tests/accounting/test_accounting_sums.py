"""`sum-distributed` and `sum-central`: the subsampled Gaussian of a sum, by several other ways."""

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nights import by_night
from shufl.accounting import (
    LocalAccountant,
    PldAccountant,
    SumCentralAccountant,
    SumDistributedAccountant,
)
from shufl.accounting.numerics.gaussian_divergence import gaussian_epsilon, subsampled_profile
from shufl.protocol import Allocation, CheckIn, GaussianMechanism, LdpSgd, Summed

REPLACE, ZERO_OUT = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL
RELATIONS = pytest.mark.parametrize("relation", [REPLACE, ZERO_OUT], ids=lambda it: it.name)


def summed(rate, central=0.0, own=0.0, users=1):
    mechanism = GaussianMechanism(noise_multiplier=own)
    return Summed(users, CheckIn(rate), mechanism, central_noise=central)


def epsilon_of(relation, rate, noise, rounds, delta):
    return SumCentralAccountant(relation).compose(summed(rate, noise), rounds).get_epsilon(delta)


@pytest.mark.slow
@pytest.mark.parametrize("relation", [ZERO_OUT, *by_night(REPLACE)])
def test_dp_accounting_says_the_same(relation):
    """Its ADD_OR_REMOVE_ONE is the larger of both directions of `zero-out`."""
    theirs = NeighboringRelation.ADD_OR_REMOVE_ONE if relation is ZERO_OUT else relation
    for rate, noise, rounds in ((0.1, 2.0, 300), (1.0, 15.0, 50), (0.01, 0.5, 5000)):
        gaussian = dp_accounting.GaussianDpEvent(noise)
        one = dp_accounting.PoissonSampledDpEvent(rate, gaussian)
        peer = PLDAccountant(theirs).compose(one, rounds).get_epsilon(1e-6)
        ours = epsilon_of(relation, rate, noise, rounds, 1e-6)
        assert ours == pytest.approx(peer, rel=5e-4)


@pytest.mark.parametrize(("noise", "expected"), [(0.25, 65.32), (0.2, 91.82), (0.15, 144.90)])
def test_little_noise_has_a_finite_price(noise, expected):
    """One round of everybody: the plain Gaussian, two clip norms apart."""
    plain = gaussian_epsilon(2.0 / noise, 1e-5)
    assert plain == pytest.approx(expected, rel=1e-4)
    assert epsilon_of(REPLACE, 1.0, noise, 1, 1e-5) == pytest.approx(plain, rel=1e-3)


@RELATIONS
@pytest.mark.parametrize("noise", [1e-300, 1e-3, 0.03, 1e9])
@pytest.mark.filterwarnings("error")
def test_any_noise_is_priced(relation, noise):
    for rate in (1e-12, 0.5, 1.0):
        found = epsilon_of(relation, rate, noise, 1, 1e-5)
        assert found >= 0.0
        assert (found == 0.0) == (noise > 1.0 or rate < 1e-5)


@settings(deadline=None, max_examples=40)
@given(
    st.floats(1e-6, 1.0), st.floats(-0.7, 6.0), st.sampled_from([REPLACE, ZERO_OUT]),
    st.integers(0, 2**32),
)  # fmt: skip
def test_no_digit_is_lost_and_every_bound_is_from_above(rate, log_noise, relation, seed):
    """The closed forms before their terms are joined, in 80 digits."""
    noise = 10.0**log_noise
    epsilons, deltas = subsampled_profile(rate, noise, relation, 1e-22)
    deltas = np.atleast_2d(deltas)
    with mpmath.workdps(80):
        g, w = mpmath.mpf(rate), 1 / mpmath.mpf(noise)
        for place in np.random.default_rng(seed).integers(len(epsilons), size=6):
            a = mpmath.e ** mpmath.mpf(float(epsilons[place]))
            rest, far = 1 - a * (1 - g), lambda x: mpmath.erfc(x / mpmath.sqrt(2)) / 2
            if relation is REPLACE:
                b = (1 - g) * (a - 1) * mpmath.e ** (w**2 / 2) / g
                t = mpmath.log((b + mpmath.sqrt(b**2 + 4 * a)) / 2) / w
                exact = [(1 - g) * (1 - a) * far(t) + g * (far(t - w) - a * far(t + w))]
            else:
                t = mpmath.log((a - 1 + g) / g) / w + w / 2
                exact = [g * far(t - w) - (a - 1 + g) * far(t), mpmath.mpf(0)]
                if rest > 0:
                    t = -mpmath.log(rest / (a * g)) / w - w / 2
                    exact[1] = rest * far(t) - a * g * far(t + w)
            for found, true in zip(deltas[:, place], map(float, exact), strict=True):
                assert found >= true * (1.0 - 1e-12)
                if true > 1e-8:
                    assert found == pytest.approx(true, rel=1e-5)


@RELATIONS
def test_by_the_definition_no_pair_of_vectors_in_the_plane_is_worse(relation):
    """Densities on a grid, of the worst pair and of random ones in the disc."""
    rate, noise, random = 0.4, 1.0, np.random.default_rng(2)
    axis = np.linspace(-7.0, 7.0, 281)
    x, y = np.meshgrid(axis, axis)
    cell = (axis[1] - axis[0]) ** 2

    def density(vector):
        normal = stats.norm(scale=noise).pdf
        moved = normal(x - vector[0]) * normal(y - vector[1])
        return (1.0 - rate) * normal(x) * normal(y) + rate * moved

    epsilons, deltas = subsampled_profile(rate, noise, relation, 1e-22)
    largest = np.max(np.atleast_2d(deltas), axis=0)
    worst = [((1.0, 0.0), (-1.0, 0.0))] if relation is REPLACE else [((1.0, 0.0), (0.0, 0.0))]
    pairs, ratios = [*worst, *random.normal(size=(40, 2, 2))], []
    for number, pair in enumerate(pairs):
        if number > 0:
            pair = pair * np.minimum(1.0, 1.0 / np.linalg.norm(pair, axis=1))[:, None]
            if relation is ZERO_OUT:
                pair[random.integers(2)] = 0.0
        for epsilon in (0.0, 0.1, 0.3):
            first, second = map(density, pair)
            delta = cell * np.maximum(first - math.exp(epsilon) * second, 0.0).sum()
            ratios.append(delta / np.interp(epsilon, epsilons, largest))
    assert min(ratios[:3]) > 0.999 and max(ratios) <= 1.001


def test_whose_noise_counts():
    """Of n users √n z, of the shuffler or the server σ, and both together by their variances."""
    both = summed(0.1, central=3.0, own=0.04, users=10_000)
    distributed = SumDistributedAccountant(REPLACE).compose(both, 100).get_epsilon(1e-5)
    central = SumCentralAccountant(REPLACE).compose(both, 100).get_epsilon(1e-5)
    local = LocalAccountant(REPLACE).compose(both, 100).get_epsilon(1e-5)
    assert distributed == pytest.approx(epsilon_of(REPLACE, 0.1, 5.0, 100, 1e-5), rel=1e-9)
    assert central == epsilon_of(REPLACE, 0.1, 3.0, 100, 1e-5)
    assert distributed < central < local


def test_noise_that_is_not_there_protects_nobody():
    for accountant, event in (
        (SumCentralAccountant(), summed(0.1, own=1.0, users=100)),
        (SumDistributedAccountant(), summed(0.1, users=100)),
        (LocalAccountant(), summed(0.1, central=5.0)),
    ):
        assert accountant.compose(event).get_epsilon(1e-5) == math.inf
        assert accountant.note(1e-5) == "some round has no noise"


def test_if_shuffler_and_server_collude_a_device_has_its_own_noise_and_its_coin():
    """It sends in every round, so not even they see the coin: less than reports cost."""
    event = summed(0.1, central=5.0, own=2.0, users=100)
    found = LocalAccountant(REPLACE).compose(event, 50).get_epsilon(1e-5)
    assert found == pytest.approx(epsilon_of(REPLACE, 0.1, 2.0, 50, 1e-5), rel=1e-9)


def test_what_is_no_sum_of_gaussian_vectors_is_refused():
    accountant, gaussian = SumCentralAccountant(), GaussianMechanism(noise_multiplier=1.0)
    for event in (
        Summed(5, Allocation(2), gaussian, central_noise=1.0),
        Summed(5, CheckIn(1.0), LdpSgd(noise_multiplier=2.0), central_noise=1.0),
    ):
        assert not accountant.supports(event)
    assert not PldAccountant().supports(summed(1.0, 1.0))
    with pytest.raises(ValueError, match=r"shuffler blankets of a summed round must be 0, got 3"):
        Summed(5, CheckIn(1.0), gaussian, 3.0)
    with pytest.raises(ValueError, match=r"central noise must lie in \[0, inf\)"):
        Summed(5, CheckIn(1.0), gaussian, central_noise=-1.0)


@RELATIONS
def test_monotone(relation):
    """More noise, fewer rounds, a smaller rate and a larger δ never cost more."""
    noises, rates, deltas = (0.5, 1.0, 1.01, 30.0), (0.01, 0.5, 0.51, 1.0), (1e-12, 1e-5)
    found = {
        each: epsilon_of(relation, each[0], each[1], each[2], each[3])
        for each in itertools.product(rates, noises, (1, 10, 1000), deltas)
    }
    for (rate, noise, rounds, delta), epsilon in found.items():
        for (other, more, fewer, larger), least in found.items():
            if other <= rate and more >= noise and fewer <= rounds and larger >= delta:
                assert least <= epsilon * (1.0 + 1e-3)
