"""`pld`: reference values, oracles, and what must hold whatever the parameters."""

import math

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution
from from_below import PldFromBelow
from hypothesis import given, settings
from hypothesis import strategies as st

from nights import by_night
from rounds import check_in, everyone, fixed_size
from shufl import accounting
from shufl.accounting.accountants.pld import PldAccountant
from shufl.accounting.accountants.renyi import CheckInRdpAccountant
from shufl.accounting.numerics.gaussian_divergence import log_gaussian_delta
from shufl.protocol import CheckIn, GaussianMechanism

pytestmark = pytest.mark.slow

REPLACE, ZERO_OUT = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL


def spent(event, rounds=1):
    return PldFromBelow(ZERO_OUT).compose(event, rounds)


@pytest.mark.parametrize(
    ("event", "rounds", "delta", "epsilon"),
    [
        (check_in(60_000, 0.1, 5.0), 5540, 1 / 60_000, 0.0539),
        (check_in(60_000, 0.1, 2.5), 5540, 1 / 60_000, 0.1198),
        (everyone(60_000, 9.48), 1, 1 / 60_000, 0.000595),
        (everyone(60_000, 9.48), 7, 1 / 60_000, 0.00205),
        (check_in(10**6, 0.01, 1.2), 2000, 1e-7, 0.01675),
    ],
)
def test_reference_values(event, rounds, delta, epsilon):
    accountant = spent(event, rounds)
    assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=5e-3)
    lower = accountant.epsilon_lower_bound(delta)
    assert 0.985 * epsilon <= lower <= accountant.get_epsilon(delta)


@pytest.mark.parametrize(
    ("event", "rounds", "epsilon"),
    [
        (check_in(60_000, 0.1, 0.8), 1000, 6.072),
        (check_in(40, 1.0, 0.6), 30, 137.70),
        *by_night((check_in(60_000, 0.01, 0.6), 10**4, 37.586)),
    ],
)
def test_a_replaced_record_costs_what_one_of_half_the_noise_costs(event, rounds, epsilon):
    """The homogeneous pair has one direction in all rounds, under `replace` too."""
    halved = attrs.evolve(
        event, mechanism=GaussianMechanism(noise_multiplier=event.mechanism.noise_multiplier / 2)
    )
    accountant = PldFromBelow(REPLACE).compose(event, rounds)
    found = accountant.get_epsilon(1e-5)
    assert found == spent(halved, rounds).get_epsilon(1e-5) == pytest.approx(epsilon, rel=1e-4)
    assert found / 1.0002 <= accountant.epsilon_lower_bound(1e-5) <= found


@pytest.mark.parametrize("relation", [REPLACE, ZERO_OUT])
@pytest.mark.parametrize(
    ("event", "rounds", "delta"),
    [
        (check_in(1000, 1e-3, 100.0), 10**10, 1e-5),
        (check_in(1000, 0.1, 2.0), 10, 1e-300),
        *by_night(*((check_in(1000, 1e-3, 100.0), 10**t, 1e-5) for t in (9, 11, 12))),
    ],
)
def test_it_states_no_more_than_the_moments_of_the_same_pair(relation, event, rounds, delta):
    moments = CheckInRdpAccountant(relation).compose(event, rounds).get_epsilon(delta)
    accountant = PldAccountant(relation).compose(event, rounds)
    assert accountant.get_epsilon(delta) <= moments
    assert accountant.get_delta(moments) <= max(delta, 1e-290) * (1 + 1e-6)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.07919), (0.1, 0.0413), (0.5, 5.94e-4)])
def test_reference_deltas_of_seven_users(epsilon, delta):
    assert spent(everyone(7, 2.0)).get_delta(epsilon) == pytest.approx(delta, rel=3e-3)


def hockey_stick(event, sigma, alpha, rng, draws=400_000):
    """One round's hockey-stick divergences, both directions, by Monte Carlo: mean and error."""
    n, reports = event.users, getattr(event.participation, "reports", event.users)
    y = np.exp((2 * rng.normal(0, sigma, (draws, reports)) - 1) / (2 * sigma**2))
    if isinstance(event.participation, CheckIn):
        y = np.where(rng.random(y.shape) < event.chance, y, 1.0)
    w = 1.0 - reports / n + y.sum(axis=1) / n
    samples = np.maximum(w - alpha, 0), np.maximum(1 - alpha * w, 0)
    return [(s.mean(), 5 * s.std() / math.sqrt(draws)) for s in samples]


@pytest.mark.parametrize(
    ("event", "sigma"),
    [
        *((check_in(n, 1.0, 2.0), 2.0) for n in (1, 7)),
        *((check_in(n, 0.5, 1.0), 1.0) for n in (1, 7)),
        *((check_in(n, 0.2, 0.8), 0.8) for n in (1, 7)),
        (fixed_size(9, 4, 0.9), 0.9),
        *by_night(*((check_in(n, 0.5, 1.0), 1.0) for n in (2, 4))),
    ],
)
def test_up_to_nine_users_by_monte_carlo(event, sigma):
    rng = np.random.default_rng(20)
    accountant = spent(event)
    for epsilon in (0.0, 0.05, 0.4):
        (truth, error), (reverse, _) = hockey_stick(event, sigma, math.exp(epsilon), rng)
        assert accountant.get_delta(epsilon) >= max(truth, reverse) - error
        assert accountant.epsilon_lower_bound(truth + error) <= epsilon
        # The loss's mesh (48 points a deviation) costs a little more where δ is tiny.
        assert accountant.get_delta(epsilon) <= truth * 1.005 + error


@settings(max_examples=settings().max_examples // 4)
@given(
    st.integers(1, 10**9),
    st.floats(1e-4, 1),
    st.floats(0.3, 1000),
    st.integers(1, 10**6),
    st.floats(-9, -1),
)
def test_lower_upper_and_the_other_accountants(users, rate, sigma, rounds, log_delta):
    event, delta = check_in(users, rate, sigma), 10**log_delta
    accountant = spent(event, rounds)
    low, high = accountant.epsilon_lower_bound(delta), accountant.get_epsilon(delta)
    assert 0.0 <= low <= high
    for name in ("theorem3", "rdp", "local"):
        other = accounting.make_accountant(name, "zero-out").epsilon_after(event, delta, rounds)
        assert low <= other * (1 + 1e-9)


def test_everyone_is_a_check_in_rate_of_one_and_a_full_sample():
    events = everyone(400, 1.5), check_in(400, 1.0, 1.5), fixed_size(400, 400, 1.5)
    values = [spent(event, 30).get_epsilon(1e-6) for event in events]
    assert values[0] == values[1] == values[2] > 0.0


@pytest.mark.parametrize(("users", "rate", "rounds"), [(10**6, 0.1, 1), (10**7, 0.05, 3000)])
def test_many_users_are_the_central_subsampled_gaussian(users, rate, rounds):
    sigma, delta = 10.0, 1e-6
    central = privacy_loss_distribution.from_gaussian_mechanism(
        sigma * math.sqrt(rate * users),
        sampling_prob=rate,
        value_discretization_interval=1e-6 if rounds == 1 else 1e-7,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
    ).self_compose(rounds)
    ours = spent(check_in(users, rate, sigma), rounds).get_epsilon(delta)
    assert ours == pytest.approx(central.get_epsilon_for_delta(delta), rel=0.02)


def test_rounds_may_differ():
    accountant = PldFromBelow(ZERO_OUT)
    events = [check_in(5000, 0.1, 1.0), everyone(800, 3.0), fixed_size(4000, 300, 0.8)]
    for count, event in enumerate(events, start=2):
        accountant.compose(event, count)
    low, high = accountant.epsilon_lower_bound(1e-6), accountant.get_epsilon(1e-6)
    assert max(spent(e, 2).epsilon_lower_bound(1e-6) for e in events) < low <= high < 1.1 * low


def test_rounds_that_rarely_hold_a_report():
    """Losses far larger than their deviation: the tilt must not leave the window behind."""
    accountant = spent(check_in(1000, 1e-5, 1.0), 3)
    deltas = [accountant.get_delta(epsilon) for epsilon in (0.0, 1e-3, 1e-2, 0.1, 1.0)]
    assert deltas == sorted(deltas, reverse=True)
    assert deltas[0] < 3e-5 and deltas[-1] < 1e-15
    # By hand: one report in all (probability 3 % at most), from user 1 with probability 1/1000.
    call = math.exp(log_gaussian_delta(1.0, math.log(1 + 1e-3 * 1000)))
    assert deltas[1] == pytest.approx(3 * 1000 * 1e-5 * call / 1000, rel=0.05)


@pytest.mark.parametrize(
    ("relation", "event", "rounds"),
    [
        (REPLACE, everyone(100, 0.5), 1),
        (REPLACE, fixed_size(40, 35, 0.6), 1),
        (ZERO_OUT, check_in(30, 0.5, 0.3), 20),
        *by_night((ZERO_OUT, everyone(10, 0.4), 100)),
    ],
)
def test_the_bound_is_tight_with_few_users_and_little_noise(relation, event, rounds):
    accountant = PldFromBelow(relation).compose(event, rounds)
    lower = accountant.epsilon_lower_bound(1e-5)
    assert 0.0 < lower <= accountant.get_epsilon(1e-5) <= 1.002 * lower
