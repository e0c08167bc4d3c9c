"""The noise, the rounds or the check-in rate that a target ε allows.

Every search returns a value whose ε it has computed and found within the target: where ε is not
quite monotone, or the bracket is coarse, it can only err on the private side.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

from accounting.registry import make_accountant

_PRECISION = 1e-3  # relative, of continuous answers
_LARGEST_NOISE = 1e6
_FIRST_STEP = 1.25  # of noise, squared from step to step, to 4
_LEAST_NOISE = 1e-2
_MOST_ROUNDS = 10**6


class CalibrationError(ValueError):
    """No value within range reaches the target ε."""


def epsilon_of(accountant: str, adjacency: str, event: Any, rounds: int, delta: float) -> float:
    """Returns ε at `delta` after `rounds` times `event`."""
    pricing = make_accountant(accountant, adjacency)
    return float(pricing.epsilon_after(event, delta, rounds)) if rounds else 0.0


def least_noise(
    epsilon_at: Callable[[float], float], target_epsilon: float, guess: float = 1.0
) -> float:
    """Returns the least noise multiplier z (to 0.1 %) with ε(z) <= target.

    Args:
        epsilon_at: ε as a function of z.
        target_epsilon: The budget.
        guess: z to start from.

    Raises:
        CalibrationError: Not even z = 10^6 is enough.
    """
    epsilon_at = functools.cache(epsilon_at)
    high, step = guess, _FIRST_STEP
    while not epsilon_at(high) <= target_epsilon:
        high, step = high * step, min(step * step, 4.0)
        if high > _LARGEST_NOISE:
            raise CalibrationError(
                f"no noise multiplier up to {_LARGEST_NOISE:g} reaches epsilon {target_epsilon:g}"
            )
    low = high / step
    while low > _LEAST_NOISE and epsilon_at(low) <= target_epsilon:
        high, low, step = low, low / step, min(step * step, 4.0)
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
    low = 0.1 / users
    if not epsilon_at(low) <= target_epsilon:
        raise CalibrationError(f"no check-in rate reaches epsilon {target_epsilon:g}")
    return _close_in(epsilon_at, target_epsilon, low, 1.0)


def most_rounds(epsilon_after: Callable[[int], float], target_epsilon: float) -> int:
    """Returns the most rounds T <= 10^6 with ε(T) <= target; 0 if not one is.

    Args:
        epsilon_after: ε as a function of T, increasing.
        target_epsilon: The budget.
    """
    within, beyond = 0, _MOST_ROUNDS + 1
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if epsilon_after(middle) <= target_epsilon:
            within = middle
        else:
            beyond = middle
    return within


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

    Args:
        users: n.
        check_in_rate: γ in (0, 1].
        noise_multiplier: z >= 0.
        shuffler_blankets: λ >= 0; 0 without blankets.
        dimension: d >= 1; infinite for a model so large that only the noise counts.
    """
    reports = users * check_in_rate
    noise = noise_multiplier**2 * (1.0 + shuffler_blankets / reports)
    return math.sqrt((noise + (1.0 - check_in_rate) / dimension) / reports)


def _close_in(
    epsilon_at: Callable[[float], float], target_epsilon: float, inside: float, outside: float
) -> float:
    """A point with ε <= target, within a relative `_PRECISION` of one with more.

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
