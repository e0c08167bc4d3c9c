"""What a target ε allows: the noise, the rounds, the check-in rate, ε₀ or the blankets.

Every search returns a value whose ε it has computed and found within the target: where ε is not
quite monotone, or the bracket is coarse, it can only err on the private side. `epsilon_at` is ε of
what is searched for.

`dp_accounting.calibrate_dp_mechanism` is not used: its tolerance is absolute, it promises rounds
within one only, and over ranges as wide as these it takes up to three times as many ε.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy  # scipy.optimize is imported when it is first used: it takes half a second

from shufl.accounting.privacy_plan import MOST_ROUNDS
from shufl.protocol.mechanisms import (
    MECHANISMS,
    GaussianMechanism,
    LdpSgd,
    RandomisedResponse,
    least_delta,
)
from shufl.protocol.plan import Plan
from shufl.protocol.plan_fields import LEAST_RATE, MOST_BLANKETS
from shufl.protocol.validation import ConfigError

_LEAST_OF_SUMS = 1e-6  # noise of all users' noises, which hide a user together
_PRECISION, _ROUGHLY = 1e-3, 1e-2  # relative, of what is found, and of what is compared
_FIRST_STEP, _LONGEST_STEP = 1.25, 10.0  # from place to place, each the square of the one before
_MOST_NOISE_OF_BLANKETS = 64.0
_NEAR = 1.0  # of log ε: from there on one ε says how many blankets it takes
_FINE = 0.05  # how near to the best noise the search ends, relative: the error is flat there
_ALONE = (1.0, 0.99, 0.95)  # of the target: what a report may cost that nothing hides
_NEAR_BEST = 0.02  # of the error


class CalibrationError(ConfigError):
    """No value within range reaches the target ε."""


class Range(NamedTuple):
    """Where a value is searched for.

    Attributes:
        costly: The end with the largest ε. If that is within the target, it is what is found.
        private: The end with the least ε. If not even that is within the target, nothing is.
        start: Where the search begins.
        failure: Begins the sentence that says so.
    """

    costly: float
    private: float
    start: float
    failure: str


BLANKETS = Range(0.1, MOST_BLANKETS, 1e3, f"no blankets up to {MOST_BLANKETS:g} a round reach")


def range_of(name: str, plan: Plan) -> Range:
    """Returns where an open value of a plan is searched for."""
    most_epsilon, most_noise = RandomisedResponse.most_epsilon, 1e6
    match name:
        case "shuffler_blankets":
            return BLANKETS
        case "local_epsilon":
            return Range(most_epsilon, 1e-6, most_epsilon, "no local epsilon reaches")
        case "check_in_rate":
            least = max(0.1 / plan.least_present, LEAST_RATE)
            return Range(1.0, least, 1.0, "no check-in rate reaches")
        case "rounds":
            return Range(MOST_ROUNDS, 1, 1, "not one round is within")
    least = _LEAST_OF_SUMS if plan.mixing == "sum" else MECHANISMS[plan.mechanism.name].least_noise
    failure = f"no noise multiplier up to {most_noise:g} reaches"
    return Range(least, most_noise, max(1.0, 1.1 * least), failure)


def participation_note(check_in_rate: float, rounds: int, delta: float) -> str | None:
    """Returns one line where δ is not far below a user's chance Tγ to take part; otherwise None.

    There (ε, δ) promises little: to publish all updates as they are with probability δ/(Tγ) costs
    no ε, because a user then shows with probability δ.
    """
    chance = min(check_in_rate * rounds, 1.0)
    if chance == 0.0 or delta < 0.1 * chance:
        return None
    return (
        f"delta = {delta:.3g} promises little: a run that publishes all updates without noise with "
        f"probability {min(delta / chance, 1.0):.3g} satisfies it at any epsilon; choose a smaller "
        "delta"
    )


def ideal_note(rounds: int, delta: float) -> str | None:
    """Returns one line where δ is less than the implementation supports; otherwise None."""
    if delta >= (least := least_delta(rounds)):
        return None
    return (
        f"delta = {delta:.3g} is smaller than rounding allows: {rounds} rounds support {least:g} "
        "or more; the epsilon shown is that of exact arithmetic"
    )


def nearest(
    epsilon_at: Callable[[float], float],
    target_epsilon: float,
    within: Range,
    precision: float = _PRECISION,
) -> float:
    """Returns the value nearest to the costly end of a range whose ε is at most a target.

    Steps that grow lead from the start to a value on either side of the target. Between them
    Brent's method asks log ε at the logarithms of values, since ε is nearly a power of noise, rate
    and blankets.

    Raises:
        CalibrationError: Not even the private end is within the target.
    """
    epsilon_at = functools.cache(epsilon_at)
    low, high = sorted((within.costly, within.private))
    place, step = min(max(within.start, low), high), _FIRST_STEP
    inside = outside = 0.0
    while True:
        if epsilon_at(place) <= target_epsilon:
            inside, towards = place, within.costly
        else:
            outside, towards = place, within.private
        if inside and outside:
            break
        if place == towards:
            if inside:
                return place
            raise CalibrationError(f"{within.failure} epsilon {target_epsilon:g}")
        place = min(max(place * step if towards == high else place / step, low), high)
        step = min(step * step, _LONGEST_STEP)
    ends = {math.log(inside): inside, math.log(outside): outside}
    found = [inside]

    def excess(log_place: float) -> float:
        place = ends.get(log_place, math.exp(log_place))
        if (epsilon := epsilon_at(place)) <= target_epsilon:
            found.append(place)
        return min(max(math.log(max(epsilon, 1e-300) / target_epsilon), -50.0), 50.0)

    if len(ends) == 2:
        scipy.optimize.brentq(excess, *ends, xtol=precision)
    return min(found, key=lambda place: abs(math.log(place / outside)))


def least_error_blankets(
    epsilon_at: Callable[[float, float], float],
    target_epsilon: float,
    reports: float,
    mechanism: type[GaussianMechanism] | type[LdpSgd] = GaussianMechanism,
) -> tuple[float, float]:
    """Returns noise z and blankets λ that about minimise the error of the mean update.

    Its square is, but for a factor and a term that does not depend on them, `z² (1 + λ/(nγ))`.
    Each z has a least λ. With many blankets ε depends on λ divided by the variance of a blanket's
    density ratio, `Mechanism.ratio_variance`, which says where to begin to look for it.

    `epsilon_at` gives ε(z, λ), falling in both; z is at most 64. `reports` is nγ.

    Raises:
        CalibrationError: No z reaches the target with up to 10^7 blankets.
    """
    variance = mechanism.ratio_variance
    fewest: dict[float, float] = {}  # λ of some z, about
    power = 0.0  # of λ, as which ε falls; 0 until it is known

    def near(noise: float) -> Range:
        """Blankets, from where the nearest z that is known says."""
        if not fewest:
            return BLANKETS
        known = min(fewest, key=lambda other: abs(math.log(other / noise)))
        here, there = variance(np.array([noise, known])).tolist()
        start = min(max(fewest[known] * here / there, BLANKETS.costly), BLANKETS.private)
        return BLANKETS._replace(start=start)

    def log_error(log_noise: float) -> float:
        nonlocal power
        noise = math.exp(log_noise)
        at = functools.cache(functools.partial(epsilon_at, noise))
        within = near(noise)
        excess = math.log(max(at(within.start), 1e-300) / target_epsilon)
        about = within.start * math.exp(excess / power) if power and abs(excess) < _NEAR else 0.0
        if BLANKETS.costly < about < BLANKETS.private:
            fewest[noise] = about
        else:
            try:
                fewest[noise] = nearest(at, target_epsilon, within, _ROUGHLY)
            except CalibrationError:
                return 1e3 - log_noise  # there is none: more noise is nearer to one
            fall = max(at(fewest[noise]), 1e-300) / max(at(2.0 * fewest[noise]), 1e-300)
            power = min(max(math.log2(fall), 0.2), 2.0)
        return log_noise + 0.5 * math.log1p(fewest[noise] / reports)

    ends = math.log(mechanism.least_noise), math.log(_MOST_NOISE_OF_BLANKETS)
    best = scipy.optimize.minimize_scalar(log_error, bounds=ends, options={"xatol": _FINE})
    noise = math.exp(best.x)
    if best.x < ends[0] + _FINE and log_error(ends[0]) <= best.fun:
        noise = mechanism.least_noise
    return noise, nearest(functools.partial(epsilon_at, noise), target_epsilon, near(noise))


def least_error_response(
    epsilon_at: Callable[[float, float], float],
    target_epsilon: float,
    reports: float,
    categories: int,
) -> tuple[float, float]:
    """Returns ε₀ and blankets λ of randomised response that about minimise its error.

    The squared error of its estimate is, but for a factor, `(m + λ)/s² - m` with m users' reports.
    It is least if reports are nearly always true and blankets hide them: random answers cost `1/s²`
    and save blankets like s². Of all ε₀ with an error at most 2 % above that, for as many blankets,
    the smallest is returned, because it holds whoever cheats. A smaller ε₀ is post-processing, so
    it needs no more blankets. If an ε₀ just below the target, with hardly a blanket, has less
    error, that is returned.

    `epsilon_at` gives ε(ε₀, λ), `reports` is nγ, and `categories` is k.

    Raises:
        CalibrationError: Not even 10^7 blankets are enough.
    """

    def error(local_epsilon: float, blankets: float) -> float:
        mechanism = RandomisedResponse(categories=categories, local_epsilon=local_epsilon)
        return (reports + blankets) / mechanism.truth**2 - reports

    few, most = BLANKETS.costly, RandomisedResponse.most_epsilon
    tried = (min(share * target_epsilon, most) for share in _ALONE)
    alone = next((each for each in tried if epsilon_at(each, few) <= target_epsilon), None)
    try:
        blankets = nearest(functools.partial(epsilon_at, most), target_epsilon, BLANKETS)
    except CalibrationError:
        if alone is None:
            raise
        return alone, few
    if alone is not None and error(alone, few) <= error(most, blankets):
        return alone, few
    allowed = (1.0 + _NEAR_BEST) ** 2 * error(most, blankets)
    truth = math.sqrt((reports + blankets) / (reports + allowed))
    least = math.log1p(categories * truth / (1.0 - truth))
    local_epsilon = min(max(least, min(target_epsilon, 1.0)), most)
    at = functools.partial(epsilon_at, local_epsilon)
    return local_epsilon, nearest(at, target_epsilon, BLANKETS._replace(start=blankets))


def mean_update_error(plan: Plan, dimension: float = math.inf) -> float:
    """Returns the root mean squared error of a round's mean update, per coordinate, over C.

    `√(E‖estimate - mean‖² / (C² d))` where every clipped update has norm C, the worst case. The sum
    holds each user's report with probability γ, and M ~ Poisson(λ) blankets: the noise of nγ + λ
    reports in expectation. The server divides it by nγ. So the estimate is unbiased, and

        E‖estimate - mean‖² = C² (d z² (1 + λ/(nγ)) + (1-γ)) / (nγ).

    A plan with sums has the noise nz² + 2σ² in the place of z² (nγ + λ). The dimension d is
    infinite for a model so large that only the noise counts.
    """
    rate, reports = plan.check_in_rate, plan.users * plan.check_in_rate
    if plan.mixing == "sum":
        variance = plan.noise_of_sum(plan.users) ** 2
    else:
        variance = plan.mechanism.noise_multiplier**2 * (reports + plan.shuffler_blankets)
    return math.sqrt((variance / reports + (1.0 - rate) / dimension) / reports)
