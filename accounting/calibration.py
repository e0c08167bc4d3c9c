"""The noise, the rounds, the check-in rate or the blankets that a target ε allows.

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

from shufl.accounting.mechanisms import GaussianMechanism, LdpSgd, least_delta
from shufl.accounting.plan import LEAST_RATE, MOST_BLANKETS
from shufl.accounting.validation import ConfigError

_PRECISION = 1e-3  # relative, of continuous answers
_MOST_STEPS = 30
_NEAR = 0.2  # of log ε: from there on the secant says where the target is
_LARGEST_NOISE = 1e6
_FIRST_STEP = 1.25  # of noise, squared from step to step, to 4
MOST_ROUNDS = 10**6
"""As many rounds `most_rounds` finds at most."""
LEAST_BLANKETS, _MOST_BLANKETS = 0.1, MOST_BLANKETS
_MOST_NOISE_OF_BLANKETS = 64.0
_FINE = 0.05  # how near to the best noise the search ends, relative
_BETTER = 0.995  # of the squared error: what is worth another step


class CalibrationError(ConfigError):
    """No value within range reaches the target ε."""


def participation_note(check_in_rate: float, rounds: int, delta: float) -> str | None:
    """Returns one line where δ is not far below a user's chance Tγ to take part; otherwise None.

    There (ε, δ) promises little: to publish one user's update as it is, in one round out of many,
    costs no ε once δ is Tγ.
    """
    chance = min(check_in_rate * rounds, 1.0)
    if delta < 0.1 * chance:
        return None
    return (
        f"delta should be far below the chance that a user takes part at all, {chance:.3g}, "
        f"got {delta:.3g}"
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

    `epsilon_at` gives ε(z). z is at least `least`, which is the least that is recommended.

    Raises:
        CalibrationError: Not even z = 10^6 is enough.
    """
    epsilon_at = functools.cache(epsilon_at)
    high, step = max(1.0, 1.1 * least), _FIRST_STEP
    while not epsilon_at(high) <= target_epsilon:
        high, step = high * step, min(step * step, 4.0)
        if high > _LARGEST_NOISE:
            raise CalibrationError(
                f"no noise multiplier up to {_LARGEST_NOISE:g} reaches epsilon {target_epsilon:g}"
            )
    low = max(high / step, least)
    while low > least and epsilon_at(low) <= target_epsilon:
        step = min(step * step, 4.0)
        high, low = low, max(low / step, least)
    if epsilon_at(low) <= target_epsilon:
        return low
    return _close_in(epsilon_at, target_epsilon, high, low)


def largest_rate(epsilon_at: Callable[[float], float], target_epsilon: float, users: int) -> float:
    """Returns the largest check-in rate γ (to 0.1 %) with ε(γ) <= target.

    Raises:
        CalibrationError: Not even γ = 1/(10 n) is enough.
    """
    epsilon_at = functools.cache(epsilon_at)
    if epsilon_at(1.0) <= target_epsilon:
        return 1.0
    low = max(0.1 / users, LEAST_RATE)
    if not epsilon_at(low) <= target_epsilon:
        raise CalibrationError(f"no check-in rate reaches epsilon {target_epsilon:g}")
    return _close_in(epsilon_at, target_epsilon, low, 1.0)


def most_rounds(epsilon_after: Callable[[int], float], target_epsilon: float) -> int:
    """Returns the most rounds T <= 10^6 with ε(T) <= target; 0 if not one is.

    `epsilon_after` gives ε(T), increasing.
    """
    return bisect.bisect_left(
        range(1, MOST_ROUNDS + 1),
        True,
        key=lambda rounds: not epsilon_after(rounds) <= target_epsilon,
    )


def least_blankets(
    epsilon_at: Callable[[float], float], target_epsilon: float, guess: float = 1e3
) -> float:
    """Returns the least expected blankets λ in [0.1, 10^7] with ε(λ) <= target.

    `epsilon_at` gives ε(λ); the search starts at λ = `guess`.

    Raises:
        CalibrationError: Not even λ = 10^7 is enough.
    """
    epsilon_at = functools.cache(epsilon_at)
    enough, few = math.inf, 0.0
    blankets = min(max(guess, LEAST_BLANKETS), _MOST_BLANKETS)
    while enough == math.inf or few == 0.0:
        epsilon = epsilon_at(blankets)
        if epsilon <= target_epsilon:
            enough = blankets
            if blankets <= LEAST_BLANKETS:
                return blankets
        else:
            few = blankets
            if blankets >= _MOST_BLANKETS:
                raise CalibrationError(
                    f"no blankets up to {_MOST_BLANKETS:g} a round reach epsilon {target_epsilon:g}"
                )
        # ε falls about like λ^{-1/2}; a few percent more, so that the other side is reached.
        step = min(max((epsilon / target_epsilon) ** 2, 1e-2), 1e2)
        step = step * 1.04 if epsilon > target_epsilon else step / 1.04
        blankets = min(max(blankets * step, LEAST_BLANKETS), _MOST_BLANKETS)
    return _close_in(epsilon_at, target_epsilon, enough, few)


def least_error_blankets(
    epsilon_at: Callable[[float, float], float],
    target_epsilon: float,
    users: int,
    check_in_rate: float,
    mechanism: type[GaussianMechanism] | type[LdpSgd] = GaussianMechanism,
) -> tuple[float, float]:
    """Returns the noise z and blankets λ of least `mean_update_error` with ε(z, λ) <= target.

    Every z has its λ. For many blankets ε depends on λ over the variance of a blanket's density
    ratio, `Mechanism.ratio_variance`: that says which z to try next. In the end a z that is 5 % off
    on either side is no better; the error is flat there.

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
        """The least blankets with this noise, to a percent or so, by the secant of log ε."""
        before: tuple[float, float] | None = None
        place = min(max(guess, LEAST_BLANKETS), _MOST_BLANKETS)
        for _ in range(_MOST_STEPS):
            epsilon = max(self.epsilon_at(noise, place), 1e-300)
            excess = min(max(math.log(epsilon / self.target_epsilon), -50.0), 50.0)
            if excess > 0.0 and place == _MOST_BLANKETS:
                raise CalibrationError(
                    f"no blankets up to {_MOST_BLANKETS:g} a round reach epsilon "
                    f"{self.target_epsilon:g}"
                )
            if excess <= 0.0 and place == LEAST_BLANKETS:
                return place
            if before is not None and before[0] != place and before[1] != excess:
                slope = (excess - before[1]) / math.log(place / before[0])
                self.slope = min(max(slope, -2.0), -0.2)
            root = place * math.exp(min(max(-excess / (self.slope or -0.5), -9.0), 9.0))
            root = min(max(root, LEAST_BLANKETS), _MOST_BLANKETS)
            if self.slope is not None and abs(excess) < _NEAR:
                return root
            before, place = (place, excess), root
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
            if abs(math.log(tried[best] / noise)) < _FINE or supposed[best] > _MOST_BLANKETS:
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
        """A pair to which none with a little more or less noise is better."""
        better = True
        while better:
            better = False
            for other in (noise * (1.0 + _FINE), noise / (1.0 + _FINE)):
                # With so many it would be hardly better: where that is not private, fewer are not.
                allowed = _BETTER * self.error(noise, blankets) / other**2
                most = min((allowed - 1.0) * self.reports, _MOST_BLANKETS)
                if other < self.mechanism.least_noise or most < LEAST_BLANKETS:
                    continue
                if self.epsilon_at(other, most) <= self.target_epsilon:
                    noise, blankets, better = other, self.about(other, most), True
                    break
        return noise, blankets


def mean_update_error(
    users: int,
    check_in_rate: float,
    noise_multiplier: float,
    shuffler_blankets: float = 0.0,
    dimension: float = math.inf,
) -> float:
    """Returns the root mean squared error of a round's mean update, per coordinate, over C.

    `√(E‖estimate - mean‖² / (C² d))` where every clipped update has norm C, the worst case. The sum
    holds each user's report with probability γ, and M ~ Poisson(λ) blankets: the noise of nγ + λ
    reports in expectation. The server divides it by nγ. So the estimate is unbiased, and

        E‖estimate - mean‖² = C² (d z² (1 + λ/(nγ)) + (1-γ)) / (nγ).

    The dimension d is infinite for a model so large that only the noise counts.
    """
    reports = users * check_in_rate
    noise = noise_multiplier**2 * (1.0 + shuffler_blankets / reports)
    return math.sqrt((noise + (1.0 - check_in_rate) / dimension) / reports)


def _close_in(
    epsilon_at: Callable[[float], float],
    target_epsilon: float,
    inside: float,
    outside: float,
) -> float:
    """A point with ε <= target, within a relative precision of one with more.

    By the secant of log ε in the logarithm of the place: ε takes its time, and is nearly a power of
    noise and rate. Each step aims a little past the secant's root, towards the farther end, so that
    both ends close in; a step that does not halve the bracket is followed by a bisection.
    """

    def excess(place: float) -> float:
        epsilon = epsilon_at(place)
        return max(min(math.log(max(epsilon, 1e-300) / target_epsilon), 50.0), -50.0)

    below, above = excess(inside), excess(outside)
    good, bad = math.log(inside), math.log(outside)
    halve = False
    while abs(bad - good) > _PRECISION:
        width = bad - good
        share = 0.5 if halve else below / (below - above)
        share += math.copysign(0.4 * _PRECISION / abs(width), 0.5 - share)
        middle = good + width * min(max(share, 0.0), 1.0)
        value = excess(math.exp(middle))
        if value <= 0.0:
            good, below = middle, value
        else:
            bad, above = middle, value
        halve = abs(bad - good) > 0.5 * abs(width)
    # `exp` and `log` may have moved the point given by a rounding: never return an untried one.
    return inside if good == math.log(inside) else math.exp(good)
