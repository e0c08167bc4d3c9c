"""The error of the mean update against draws; the least noise and blankets; their best pair."""

import bisect
import itertools
import math

import numpy as np
import pytest

from shufl.accounting import (
    CalibrationError,
    OpenPlan,
    calibrate,
    mean_update_error,
    participation_note,
)
from shufl.accounting.calibration import BLANKETS, Range, least_error_blankets, nearest
from shufl.protocol.mechanisms import GaussianMechanism
from shufl.protocol.plan import Plan


def plan_of(users: int, rate: float, noise: float, blankets: float = 0.0) -> Plan:
    mechanism = GaussianMechanism(noise_multiplier=noise)
    about = {"users": users, "check_in_rate": rate, "shuffler_blankets": blankets}
    return Plan.model_construct(**about, mechanism=mechanism, mixing="shuffle")


NOISE = Range(0.2, 1e6, 1.0, "no noise multiplier up to 1e+06 reaches")


@pytest.mark.parametrize(
    ("users", "rate", "noise", "blankets", "dimension"),
    [
        (40, 0.5, 0.7, 9.0, 3),
        (25, 1.0, 0.1, 80.0, 1),
        (60, 0.1, 2.0, 0.0, 5),
        (30, 0.9, 0.0, 3.0, 2),
    ],
)
def test_the_error_is_that_of_the_servers_estimate(users, rate, noise, blankets, dimension):
    """The sum of reports over nγ, drawn 20 000 times; updates of norm C in all directions."""
    rng, draws = np.random.default_rng(1), 20_000
    updates = rng.normal(size=(users, dimension))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    reports = rng.random((draws, users)) < rate
    # The noises of k reports add up to √k times one.
    noises = reports.sum(axis=1) + rng.poisson(blankets, draws)
    total = noise * np.sqrt(noises)[:, None] * rng.normal(size=(draws, dimension))
    estimate = (reports @ updates + total) / (users * rate)
    squares = np.sum((estimate - updates.mean(axis=0)) ** 2, axis=1) / dimension
    expected = mean_update_error(plan_of(users, rate, noise, blankets), dimension) ** 2
    assert abs(squares.mean() - expected) < 5 * squares.std() / math.sqrt(draws)


def test_of_many_coordinates_only_the_noise_counts():
    assert mean_update_error(plan_of(100, 0.5, 2.0)) == pytest.approx(2.0 / math.sqrt(50))
    many = plan_of(100, 0.5, 2.0, 150.0)
    assert mean_update_error(many) == pytest.approx(2.0 * 2.0 / math.sqrt(50))
    assert mean_update_error(many, 10**9) == pytest.approx(mean_update_error(many))


def test_the_error_of_sums_has_the_noise_of_everybody_present():
    summed = plan_of(100, 0.5, 0.3).model_copy(update={"mixing": "sum", "central_noise": 4.0})
    assert mean_update_error(summed) == pytest.approx(math.sqrt(100 * 0.09 + 2 * 16) / 50)


@pytest.mark.parametrize("guess", [1e-9, 1.0, 1e3, 1e12])
@pytest.mark.parametrize("truth", [0.37, 41.0, 8.8e6])
def test_the_least_blankets_do_not_depend_on_where_the_search_starts(truth, guess):
    for power in (0.5, 1.0, 0.2):
        epsilon_at = lambda b, power=power: (truth / b) ** power  # noqa: E731
        found = nearest(epsilon_at, 1.0, BLANKETS._replace(start=guess))
        assert epsilon_at(found) <= 1.0 and found <= truth * 1.0011


@pytest.mark.parametrize(
    ("epsilon_at", "within", "found"),
    [
        *((lambda z: 3.0 / z, NOISE._replace(costly=least), 6.0) for least in (0.2, 1.254, 5.9)),
        *((lambda z: 0.1, NOISE._replace(costly=least), least) for least in (0.2, 1.254, 7.0)),
        (lambda b: 1e-4 / b, BLANKETS, 0.1),
        (lambda b: 0.0, BLANKETS, 0.1),
        (lambda b: 2.0 if b < 512 else 0.01, BLANKETS, 512),  # help in one jump
    ],
)
def test_what_is_found_is_just_within_the_target(epsilon_at, within, found):
    asked = nearest(epsilon_at, 0.5, within)
    assert epsilon_at(asked) <= 0.5 and found <= asked <= found * 1.0011


@pytest.mark.parametrize(
    ("epsilon_at", "within", "message"),
    [
        (lambda z: 0.8, NOISE, r"no noise multiplier up to .* reaches epsilon 0\.5"),
        (lambda b: 1.01e7 / b / 2, BLANKETS, "no blankets up to 1e"),
        (lambda b: math.inf, BLANKETS, r"reach epsilon 0\.5"),
    ],
)
def test_what_no_value_reaches_is_said(epsilon_at, within, message):
    with pytest.raises(CalibrationError, match=message):
        nearest(epsilon_at, 0.5, within)


def toy(scale, power):
    """ε falls as the variance of a blanket's density ratio, to a power, over the blankets."""
    return lambda z, b: scale * math.sqrt(math.expm1(min(z**-power, 600.0)) / b)


@pytest.mark.parametrize(
    ("epsilon_at", "users", "rate"),
    [
        (toy(40.0, 2.0), 60_000, 0.1),  # as in the rule by which the search takes its steps
        (toy(40.0, 1.5), 60_000, 0.1),
        (toy(3.0, 3.0), 200, 1.0),
        (toy(300.0, 2.0), 10**6, 0.01),
        (lambda z, b: 90.0 / (z * b**0.4), 5000, 0.2),
        (lambda z, b: (2.0 + z**-3) * 30.0 / b**0.5, 5000, 0.2),
    ],
)
def test_noise_and_blankets_of_least_error_against_a_grid(epsilon_at, users, rate):
    noise, blankets = least_error_blankets(epsilon_at, 1.0, users * rate)
    assert 0.2 <= noise <= 64.0 and epsilon_at(noise, blankets) <= 1.0
    counts, errors = np.geomspace(0.1, 1e7, 4000), []
    for z in np.geomspace(0.2, 64.0, 400):
        fewest = bisect.bisect_left(counts, True, key=lambda b, z=z: epsilon_at(z, b) <= 1.0)
        if fewest < len(counts):
            errors.append(z * math.sqrt(1 + counts[fewest] / (users * rate)))
    assert noise * math.sqrt(1 + blankets / (users * rate)) <= 1.01 * min(errors)


def test_little_noise_is_not_enough_at_first():
    # Below z = 3 no number of blankets helps: the search has to begin above, and to stay there.
    noise, _ = least_error_blankets(lambda z, b: 9.0 if z < 3 else 20 / b, 1.0, 500)
    assert 3.0 <= noise <= 3.0 * 1.051
    with pytest.raises(CalibrationError, match="no blankets up to"):
        least_error_blankets(lambda z, b: 5.0, 1.0, 100)


@pytest.mark.parametrize(
    "epsilon_at",
    [
        lambda z, b: max(0.0, 12 / z / (1 + math.sqrt(b)) - 1.0),
        lambda z, b: max(0.0, 12 / z / (1 + b) - 2.0),
        lambda z, b: 0.0 if b > 300 / z**2 else 9 / z / (1 + b) ** 0.3,
        lambda z, b: 0.0 if b > 100 / z**6 else 6.0,
    ],
)
def test_a_search_ends_where_epsilon_falls_to_0(epsilon_at):
    """As at a large δ: the logarithm of ε then says nothing of where the target is."""
    asked = itertools.count(1)

    def counted(noise, blankets):
        assert next(asked) <= 400
        return epsilon_at(noise, blankets)

    noise, blankets = least_error_blankets(counted, 1.0, 6000)
    assert epsilon_at(noise, blankets) <= 1.0


def test_where_delta_is_not_far_below_the_chance_to_take_part():
    assert participation_note(0.001, 5, 4.9e-4) is None
    for rate, rounds, delta, chance in (
        (0.001, 5, 5.1e-4, "0.102"),
        (0.001, 5, 0.3, "1"),
        (0.5, 10**6, 0.11, "0.11"),  # no chance to take part is above 1
    ):
        assert f" with probability {chance} satisfies" in participation_note(rate, rounds, delta)
    assert participation_note(0.5, 10**6, 0.09) is None


WHOLE = {
    "users": 1000, "check_in_rate": 0.3, "rounds": 20, "noise_multiplier": 3.0, "delta": 1e-5,
    "accountant": "rdp",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "target", "more_private"),
    [("noise_multiplier", 2.0, 1.003), ("rounds", 2.0, None), ("check_in_rate", 0.25, 1 / 1.003)],
)
@pytest.mark.slow
def test_what_a_plan_leaves_open_is_found_for_the_target_and_hardly_more_private(
    name, target, more_private
):
    asked = OpenPlan(**{key: value for key, value in WHOLE.items() if key != name})
    assert asked.open == (name,)
    plan = calibrate(asked, epsilon=target)
    assert (plan.target_epsilon, plan.minimum_batch) == (target, int(1000 * plan.check_in_rate / 2))
    assert plan.epsilon() <= target
    found = plan.mechanism.noise_multiplier if name == "noise_multiplier" else getattr(plan, name)
    less = found + 1 if more_private is None else found / more_private
    assert asked.closed(**{name: less}).epsilon() > target
    assert calibrate(OpenPlan(**WHOLE | {name: found}), epsilon=target) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rounds": None, "noise_multiplier": None}, "noise_multiplier and rounds cannot be found"),
        ({"shuffler_blankets": "least-error"}, "which does not count them"),
        ({"noise_multiplier": None, "delta": 1e-22}, "must be at least 2e-21"),
        ({"noise_multiplier": None, "minimum_batch": 1001}, "minimum_batch must be at most"),
        ({"noise_multiplier": 0.2, "rounds": None}, "not one round is within epsilon 1"),
        ({"mechanism": "ldp-sgd"}, "rounds without shuffler blankets must be"),
    ],
)
def test_what_cannot_be_found_or_accounted_for_is_refused_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        calibrate(OpenPlan(**WHOLE | change), epsilon=1.0)
    assert "\n" not in str(caught.value)
