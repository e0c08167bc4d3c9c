"""The noise, the rounds, the check-in rate, ε₀ or the blankets that a target ε allows.

Every search returns a value whose ε it has computed and found within the target: where ε is not
quite monotone, or the bracket is coarse, it can only err on the private side. `epsilon_at` is ε of
what is searched for, and `target_epsilon` the budget.

`dp_accounting.calibrate_dp_mechanism` is not used: its tolerance is absolute, it promises rounds
within one only, and over ranges as wide as these it takes up to three times as many ε.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy  # scipy.optimize is imported when it is first used: it takes half a second

from shufl.protocol.mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse, least_delta
from shufl.protocol.plan import LEAST_RATE, MOST_BLANKETS, Plan
from shufl.protocol.validation import ConfigError

_PRECISION = 1e-3  # relative, of continuous answers
_MOST_STEPS = 30
_NEAR = 0.2  # of log ε: from there on the secant says where the target is
_LARGEST_NOISE = 1e6
_FIRST_STEP, _LONGEST_STEP = 1.25, 10.0  # from place to place, each the square of the one before
MOST_ROUNDS = 10**6
"""Upper limit of the search in `most_rounds`."""
LEAST_BLANKETS = 0.1
_TOO_FEW = f"no blankets up to {MOST_BLANKETS:g} a round reach"
_MOST_NOISE_OF_BLANKETS = 64.0
_LEAST_LOCAL = 1e-6
_ALONE = (1.0, 0.99, 0.95)  # of the target: what a report may cost that nothing hides
_NEAR_BEST = 0.02  # of the error
_FINE = 0.05  # how near to the best noise the search ends, relative
_BETTER = 0.995  # of the squared error: what is worth another step


class CalibrationError(ConfigError):
    """No value within range reaches the target ε."""


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
        f"so small a delta is of the ideal mechanism only: a plan of {rounds} rounds supports "
        f"{least:g} or more, got {delta:.3g}"
    )


def least_noise(
    epsilon_at: Callable[[float], float],
    target_epsilon: float,
    least: float = GaussianMechanism.least_noise,
) -> float:
    """Returns the least noise multiplier z (to 0.1 %) with ε(z) <= target.

    z is at least `least`, which is the least that is recommended.

    Raises:
        CalibrationError: Not even z = 10^6 is enough.
    """
    failure = f"no noise multiplier up to {_LARGEST_NOISE:g} reaches"
    start = max(1.0, 1.1 * least)
    return _least(epsilon_at, target_epsilon, start, least, _LARGEST_NOISE, failure)


def least_blankets(
    epsilon_at: Callable[[float], float], target_epsilon: float, guess: float = 1e3
) -> float:
    """Returns the least expected blankets λ in [0.1, 10^7] (to 0.1 %) with ε(λ) <= target.

    The search starts at λ = `guess`.

    Raises:
        CalibrationError: Not even λ = 10^7 is enough.
    """
    return _least(epsilon_at, target_epsilon, guess, LEAST_BLANKETS, MOST_BLANKETS, _TOO_FEW)


def largest_rate(epsilon_at: Callable[[float], float], target_epsilon: float, users: int) -> float:
    """Returns the largest check-in rate γ (to 0.1 %) with ε(γ) <= target.

    Raises:
        CalibrationError: Not even γ = 1/(10 n) is enough.
    """
    least = max(0.1 / users, LEAST_RATE)
    return _largest(epsilon_at, target_epsilon, least, 1.0, "no check-in rate reaches")


def largest_local_epsilon(epsilon_at: Callable[[float], float], target_epsilon: float) -> float:
    """Returns the largest ε₀ in [1e-6, 20] (to 0.1 %) with ε(ε₀) <= target.

    Raises:
        CalibrationError: Not even ε₀ = 1e-6 is little enough.
    """
    most = RandomisedResponse.most_epsilon
    return _largest(epsilon_at, target_epsilon, _LEAST_LOCAL, most, "no local epsilon reaches")


def most_rounds(
    epsilon_after: Callable[[int], float], target_epsilon: float, most: int = MOST_ROUNDS
) -> int:
    """Returns the most rounds T <= `most` with ε(T) <= target; 0 if not one is.

    ε(T) increases.
    """
    return bisect.bisect_left(
        range(1, most + 1),
        True,
        key=lambda rounds: not epsilon_after(rounds) <= target_epsilon,  # also of no number
    )


def least_error_blankets(
    epsilon_at: Callable[[float, float], float],
    target_epsilon: float,
    users: int,
    check_in_rate: float,
    mechanism: type[GaussianMechanism] | type[LdpSgd] = GaussianMechanism,
) -> tuple[float, float]:
    """Returns the noise z and blankets λ of least `mean_update_error` with ε(z, λ) <= target.

    Each z has a least λ. With many blankets ε depends on λ divided by the variance of a blanket's
    density ratio, `Mechanism.ratio_variance`, which says which z to try next. The search ends when
    a z 5 % larger or smaller is no better; the error is flat there.

    `epsilon_at` gives ε(z, λ), falling in both; z is at most 64.

    Raises:
        CalibrationError: Not even z = 64 reaches the target with 10^7 blankets.
    """
    pairs = _Pairs(epsilon_at, target_epsilon, users * check_in_rate, mechanism)
    noise = max(1.0, 1.1 * mechanism.least_noise)
    while True:
        try:
            blankets = pairs.about(noise, 1e3)
            break
        except CalibrationError:
            noise *= 2.0
            if noise > _MOST_NOISE_OF_BLANKETS:
                raise
    noise, blankets = pairs.refined(*pairs.nearby(noise, blankets))
    return noise, least_blankets(functools.partial(epsilon_at, noise), target_epsilon, blankets)


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

    most = RandomisedResponse.most_epsilon
    tried = (min(share * target_epsilon, most) for share in _ALONE)
    enough = (it for it in tried if epsilon_at(it, LEAST_BLANKETS) <= target_epsilon)
    alone = next(enough, None)
    try:
        blankets = least_blankets(functools.partial(epsilon_at, most), target_epsilon)
    except CalibrationError:
        if alone is not None:
            return alone, LEAST_BLANKETS
        raise
    if alone is not None and error(alone, LEAST_BLANKETS) <= error(most, blankets):
        return alone, LEAST_BLANKETS
    allowed = (1.0 + _NEAR_BEST) ** 2 * error(most, blankets)
    rising = np.geomspace(min(target_epsilon, 1.0), most, 500).tolist()
    local_epsilon = next(each for each in rising if error(each, blankets) <= allowed)
    guess = functools.partial(epsilon_at, local_epsilon)
    return local_epsilon, least_blankets(guess, target_epsilon, blankets)


@dataclasses.dataclass
class _Pairs:
    """Pairs of noise and blankets that about reach the target, to compare their errors.

    Attributes:
        reports: How many users report in expectation.
        mechanism: Which one's noise it is.
        slope: Of log ε in log λ; nearly the same at every z. None until two places are known.
    """

    epsilon_at: Callable[[float, float], float]
    target_epsilon: float
    reports: float
    mechanism: type[GaussianMechanism] | type[LdpSgd]
    slope: float | None = None

    def about(self, noise: float, guess: float) -> float:
        """The least blankets with this noise, to a percent or so, by the secant of log ε.

        Where the secant leads out of the bracket, as it does where ε is 0, the bracket's geometric
        mean is asked next.
        """
        before: tuple[float, float] | None = None
        few, enough = 0.0, math.inf
        place = min(max(guess, LEAST_BLANKETS), MOST_BLANKETS)
        for _ in range(_MOST_STEPS):
            epsilon = max(self.epsilon_at(noise, place), 1e-300)
            excess = min(max(math.log(epsilon / self.target_epsilon), -50.0), 50.0)
            if excess > 0.0 and place == MOST_BLANKETS:
                raise CalibrationError(f"{_TOO_FEW} epsilon {self.target_epsilon:g}")
            if excess == 0.0 or (excess < 0.0 and place == LEAST_BLANKETS):
                return place
            few, enough = (place, enough) if excess > 0.0 else (few, place)
            if enough <= 1.01 * few:
                return enough
            if before is not None and before[0] != place and before[1] != excess:
                slope = (excess - before[1]) / math.log(place / before[0])
                self.slope = min(max(slope, -2.0), -0.2)
            root = place * math.exp(min(max(-excess / (self.slope or -0.5), -9.0), 9.0))
            root = min(max(root, LEAST_BLANKETS), MOST_BLANKETS)
            if self.slope is not None and abs(excess) < _NEAR:
                return root
            before = place, excess
            between = math.sqrt(max(few, LEAST_BLANKETS) * min(enough, MOST_BLANKETS))
            place = root if few < root < enough else between
        return place

    def error(self, noise: Any, blankets: Any) -> Any:
        """The squared error of the mean, but for a factor and what is fixed."""
        return noise * noise * (1.0 + blankets / self.reports)

    def nearby(self, noise: float, blankets: float) -> tuple[float, float]:
        """A pair near the best one, by what λ should be at other z."""
        tried = np.geomspace(self.mechanism.least_noise, _MOST_NOISE_OF_BLANKETS, 2000)
        spread = self.mechanism.ratio_variance
        for _ in range(4):
            supposed = blankets / spread(np.array(noise)) * spread(tried)
            best = int(np.argmin(self.error(tried, supposed)))
            if abs(math.log(tried[best] / noise)) < _FINE or supposed[best] > MOST_BLANKETS:
                break
            other = float(tried[best])
            try:
                most = self.about(other, float(supposed[best]))
            except CalibrationError:  # the rule of thumb promised too much
                break
            if self.error(other, most) >= self.error(noise, blankets):
                break
            noise, blankets = other, most
        return noise, blankets

    def refined(self, noise: float, blankets: float) -> tuple[float, float]:
        """A pair that a little more or less noise does not improve."""
        for _ in range(_MOST_STEPS):
            for other in (noise * (1.0 + _FINE), noise / (1.0 + _FINE)):
                # With so many it would be hardly better: where that is not private, fewer are not.
                allowed = _BETTER * self.error(noise, blankets) / other**2
                most = min((allowed - 1.0) * self.reports, MOST_BLANKETS)
                if other < self.mechanism.least_noise or most < LEAST_BLANKETS:
                    continue
                if self.epsilon_at(other, most) <= self.target_epsilon:
                    noise, blankets = other, min(self.about(other, most), most)
                    break
            else:
                break
        return noise, blankets


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


def _least(
    epsilon_at: Callable[[float], float],
    target: float,
    start: float,
    low: float,
    high: float,
    failure: str,
) -> float:
    """The least place in [low, high] with ε <= target, searched from `start`."""
    epsilon_at = functools.cache(epsilon_at)
    place, step = min(max(start, low), high), _FIRST_STEP
    inside = outside = None
    while inside is None or outside is None:
        if epsilon_at(place) <= target:
            inside = place
            if place == low:
                return low
            place = max(place / step, low)
        else:
            outside = place
            if place == high:
                raise CalibrationError(f"{failure} epsilon {target:g}")
            place = min(place * step, high)
        step = min(step * step, _LONGEST_STEP)
    return _close_in(epsilon_at, target, inside, outside)


def _largest(
    epsilon_at: Callable[[float], float], target: float, low: float, high: float, failure: str
) -> float:
    """The largest place in [low, high] with ε <= target."""
    epsilon_at = functools.cache(epsilon_at)
    if epsilon_at(high) <= target:
        return high
    if not epsilon_at(low) <= target:
        raise CalibrationError(f"{failure} epsilon {target:g}")
    return _close_in(epsilon_at, target, low, high)


def _close_in(
    epsilon_at: Callable[[float], float], target: float, inside: float, outside: float
) -> float:
    """A place with ε <= target, within a relative precision of one with more.

    By Brent's method, which brackets, on log ε against the logarithm of the place: ε takes its
    time, and is nearly a power of noise, rate and blankets.
    """
    log_inside, log_outside = math.log(inside), math.log(outside)
    good = [inside]

    def excess(log_place: float) -> float:
        place = math.exp(log_place)
        if log_place in (log_inside, log_outside):  # exactly, which exp is not
            place = inside if log_place == log_inside else outside
        epsilon = epsilon_at(place)
        if epsilon <= target:
            good.append(place)
        return max(min(math.log(max(epsilon, 1e-300) / target), 50.0), -50.0)

    if log_inside != log_outside:
        scipy.optimize.brentq(excess, log_inside, log_outside, xtol=_PRECISION)
    return min(good, key=lambda place: abs(math.log(place / outside)))
