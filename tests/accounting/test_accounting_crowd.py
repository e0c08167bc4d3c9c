"""`crowd`: the formula, the defect, and rounds with the other users anywhere."""

import math

import numpy as np
import pytest
from accounting_oracles import density, measured_among_many, measured_deltas, placements
from dp_accounting import NeighboringRelation
from from_below import PldFromBelow

from nights import by_night
from rounds import check_in, everyone, fixed_size
from shufl import accounting, protocol
from shufl.accounting.accountants.crowd import CrowdAccountant, crowd_of
from shufl.accounting.accountants.local import AmplifiedAccountant
from shufl.accounting.numerics.worst_pairs import pairs_of

pytestmark = pytest.mark.slow

REPLACE, ZERO_OUT = NeighboringRelation.REPLACE_ONE, NeighboringRelation.REPLACE_SPECIAL


@pytest.mark.parametrize(("noise", "v"), [(0.7, 7), (5.0, 17), *by_night((0.7, 17), (5.0, 7))])
def test_the_defect_covers_every_record_of_the_ball(noise, v):
    """β of the others' reports as noise alone: the total variation it costs, by quadrature."""
    axis = np.linspace(-1 - 9 * noise, 1 + 9 * noise, 701)
    points = np.stack(np.meshgrid(axis, axis), -1)
    cell = (axis[1] - axis[0]) ** 2
    blanket = density(points, np.zeros(2), noise)
    rng = np.random.default_rng(0)
    for event, others in (
        (check_in(41, 0.25, noise), 10),
        (everyone(11, noise), 10),
        (fixed_size(41, 10, noise), 10),
    ):
        share = crowd_of(event).share(2.0**-v)
        assert 0 < share < 1
        allowed, largest = 2.0**-v / others, 0.0
        for other in [(1, 0), (-1, 0), (0, 1), (0, 0), *rng.normal(size=(4, 2))]:
            place = np.array(other) / max(1, np.linalg.norm(other))
            report = density(points, place, noise)
            missing = np.maximum(share * blanket - report, 0).sum() * cell
            assert missing <= allowed * (1 + 1e-3) + 1e-12
            largest = max(largest, missing)
            # The mixture of a blanket and what is left of the report.
            rest = np.maximum(report - share * blanket, 0)
            mixture = share * blanket + (1 - share) * rest / (rest.sum() * cell)
            apart = np.abs(mixture - report).sum() / 2 * cell
            assert apart == pytest.approx(missing, abs=1e-9)
        assert largest >= 0.98 * allowed  # and no more is given up than need be


@pytest.mark.parametrize("relation", [REPLACE, ZERO_OUT])
@pytest.mark.parametrize(
    "event", [check_in(50, 0.3, 1.5), fixed_size(40, 15, 1.5), everyone(20, 2.0)]
)
def test_one_rounds_profile_is_the_formula(event, relation):
    """Section 4 by simulation: n terms, of which blankets are some; the defect's price on top."""
    v, draws, n = 9, 200_000, event.users
    crowd = crowd_of(event)
    share = crowd.share(2.0**-v)
    rng, noise = np.random.default_rng(2), event.mechanism.noise_multiplier
    if isinstance(event.participation, protocol.FixedSize):
        absent = np.full(draws, n - event.participation.reports)
        rate = event.participation.reports / n
    else:
        rate = event.chance
        absent = rng.binomial(n, 1 - rate, draws)
    blankets = rng.binomial(n - absent, share)
    record = rng.normal(size=(draws, blankets.max())) / noise
    used = np.arange(blankets.max()) < blankets[:, None]
    one, two = np.exp(record - 0.5 / noise**2), np.exp(-record - 0.5 / noise**2)
    if relation is ZERO_OUT:
        two = np.ones_like(two)
    for alpha in (1.0, 1.05, 1.1):
        price = (alpha - 1 + 2 * rate) * 2.0**-v
        pairs = ((one, two, pairs_of(relation)[0]), (two, one, pairs_of(relation)[-1]))
        for here, there, pair in pairs:
            jumps = (used * (here - alpha * there)).sum(1) / share
            part = np.maximum(jumps - (alpha - 1) * absent, 0) / n
            mean, error = part.mean() + price, part.std() / math.sqrt(draws)
            assert error < 0.02 * mean
            found = crowd.by_blankets(alpha, pair, price / alpha)
            assert found == pytest.approx(mean, abs=5 * error)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (check_in(3, 0.6, 0.7), REPLACE),
        (fixed_size(4, 2, 2.0), ZERO_OUT),
        (everyone(2, 1.0), REPLACE),
        (check_in(5, 0.6, 1.0), ZERO_OUT),
        *by_night((fixed_size(4, 2, 2.0), REPLACE), (everyone(6, 1.0), REPLACE)),
    ],
)
def test_no_placement_of_the_others_exceeds_the_bound(relation, event):
    epsilons, noise = np.array([0.0, 0.1, 0.5, 1.5]), event.mechanism.noise_multiplier
    accountant = CrowdAccountant(relation).compose(event)
    bound = np.array([accountant.get_delta(e) for e in epsilons])
    rng = np.random.default_rng(4)
    for dimension in (1, 3):
        x = np.eye(dimension)[0]
        other = np.zeros(dimension) if relation is ZERO_OUT else -x
        count = event.users - 1
        cases = [(name, x, other, place) for name, place in placements(dimension, count)]
        anywhere = rng.normal(size=(count + 2, dimension))
        anywhere /= np.maximum(1, np.linalg.norm(anywhere, axis=1, keepdims=True))
        second = other if relation is ZERO_OUT else anywhere[1]
        cases.append(("random others", x, other, anywhere[2:]))
        cases.append(("all random", anywhere[0], second, anywhere[2:]))
        for name, first, second, others in cases:
            about = first, second, others, noise, epsilons
            reports = getattr(event.participation, "reports", None)
            low = measured_deltas(*about, reports, event.chance, 3000)
            assert np.all(low <= bound), (name, dimension)


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        (everyone(10, 2.0), ZERO_OUT),  # others at -x: the homogeneous pair is far below
        *by_night((everyone(100, 2.0), ZERO_OUT), (check_in(200, 0.3, 2.0), REPLACE)),
    ],
)
def test_many_others_at_one_place(relation, event):
    epsilons = np.array([0.0, 0.1, 0.3])
    accountant = CrowdAccountant(relation).compose(event)
    bound = np.array([accountant.get_delta(e) for e in epsilons])
    rng, most = np.random.default_rng(6), np.zeros(3)
    for dimension in (1, 3):
        x = np.eye(dimension)[0]
        other = np.zeros(dimension) if relation is ZERO_OUT else -x
        anywhere = rng.normal(size=dimension)
        anywhere /= np.linalg.norm(anywhere)
        for at in (-x, x, 0 * x, anywhere):
            n, rate = event.users, event.chance
            low = measured_among_many(
                x, other, at, n, rate, event.mechanism.noise_multiplier, epsilons, 3000
            )
            assert np.all(low <= bound)
            most = np.maximum(most, low)
    assert 0.4 * bound[0] < most[0]  # the bound is of the size of what happens


PAPER = check_in(60_000, 0.1, 5.0)


@pytest.mark.parametrize(
    ("event", "relation", "rounds", "delta", "most"),
    [
        (PAPER, REPLACE, 5540, 1 / 60_000, 0.249),
        (PAPER, ZERO_OUT, 5540, 1 / 60_000, 0.118),
        (fixed_size(100, 30, 3.0), REPLACE, 20, 1e-5, 1.5),
        *by_night((check_in(60_000, 0.1, 1.0), REPLACE, 100, 1e-6, 3.65)),
    ],
)
def test_reference_values_above_the_homogeneous_pair(event, relation, rounds, delta, most):
    epsilon = CrowdAccountant(relation).epsilon_after(event, delta, rounds)
    pair = PldFromBelow(relation).compose(event, rounds).epsilon_lower_bound(delta)
    assert 0 < pair < epsilon <= most * 1.01


def test_with_hardly_any_noise_nobody_is_counted_on():
    little = everyone(1000, 0.19)
    accountant = CrowdAccountant(REPLACE).compose(little)
    local = accounting.LocalAccountant(REPLACE).compose(little).get_epsilon(1e-5)
    assert accountant.get_epsilon(1e-5) == pytest.approx(local, rel=2e-3)
    assert "below 0.2 no other report is counted on" in accountant.note(1e-5)
    assert CrowdAccountant(REPLACE).compose(everyone(1000, 0.2)).note(1e-5) is None


@pytest.fixture
def composition_alone(monkeypatch):
    """What an accountant's own profiles compose to, without the bound that `local` is."""
    for name in ("_epsilon", "_delta"):
        monkeypatch.delattr(AmplifiedAccountant, name)


@pytest.mark.usefixtures("composition_alone")
@pytest.mark.parametrize("kind", [CrowdAccountant, accounting.PldAccountant])
@pytest.mark.parametrize("relation", [REPLACE, ZERO_OUT])
@pytest.mark.parametrize("noise", [0.1, 0.5, 3.0, 1000.0])
def test_one_user_alone_is_the_gaussian_mechanism(kind, relation, noise):
    mine = kind(relation).compose(everyone(1, noise))
    exact = accounting.LocalAccountant(relation).compose(everyone(1, noise))
    for delta in (1e-2, 1e-6, 1e-12):
        truth = exact.get_epsilon(delta)
        assert truth * (1 - 1e-8) <= mine.get_epsilon(delta) <= truth * 1.002 + 1e-3 / noise


# (event, adjacency, rounds, δ); found by random sweeps over the whole range of parameters.
ODD_CASES = [
    (check_in(2537636, 0.015316000692238289, 2.033593816708898), REPLACE, 261, 1.94169343e-10),
    (check_in(1, 6.136134764504605e-05, 0.20213974177335556), ZERO_OUT, 4955, 3.1477864e-08),
    (check_in(3000, 0.1, 2.0), REPLACE, 700, 1e-5),
    (check_in(228, 0.834, 0.119), ZERO_OUT, 12, 6.5e-11),
    (fixed_size(100, 30, 3.0), REPLACE, 20, 1e-6),
    (everyone(73, 8.471828699169485), REPLACE, 195314, 5.9e-10),
    (everyone(95251, 0.6058922915458906), REPLACE, 3301, 1.49e-06),
]


@pytest.mark.parametrize(
    ("event", "relation", "rounds", "delta"), [*ODD_CASES[::2], *by_night(*ODD_CASES[1::2])]
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_delta_at_an_epsilon_is_the_delta_it_came_from(event, relation, rounds, delta):
    accountant = CrowdAccountant(relation).compose(event, rounds)
    epsilon = accountant.get_epsilon(delta)
    assert 0 < epsilon < math.inf
    # For δ the defect, a power of two, is searched by coarser profiles, and may be another one.
    assert accountant.get_delta(epsilon * 1.02) <= delta * (1 + 1e-6)


def test_few_users_are_not_priced_by_a_defect_below_delta():
    # The Gaussian alone bounds the tail, so the defect may be large.
    def epsilon(event, relation, rounds):
        return CrowdAccountant(relation).epsilon_after(event, 1e-5, rounds)

    assert epsilon(everyone(4, 10.0), ZERO_OUT, 100) < 2.5  # 2.60 with 2qTη <= δ
    assert epsilon(everyone(10, 3.0), REPLACE, 10) < 6.5  # 6.93


@pytest.mark.parametrize("adjacency", [REPLACE, ZERO_OUT])
@pytest.mark.parametrize("rate", [1e-320, 1e-300])
def test_hardly_anybody_ever_checks_in(adjacency, rate):
    """No number of reports but zero is likely; δ is at least what one report alone gives."""
    shift = 1.0 if adjacency is ZERO_OUT else 2.0
    for users in (1, 100, 10**9):
        accountant = CrowdAccountant(adjacency)
        accountant.compose(check_in(users, rate, 1.0), 10)
        alone = rate * math.erf(shift / math.sqrt(8))
        assert alone / users <= accountant.get_delta(0.0) <= 11 * alone
        assert accountant.get_epsilon(1e-5) == 0.0
