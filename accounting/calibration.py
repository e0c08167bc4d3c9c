"""The noise, the rounds, the check-in rate or the blankets that a target ε allows.

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
_LEAST_BLANKETS, _MOST_BLANKETS = 1e-3, 0.999
_LOGIT_STEP = 1.5  # of the first β tried: three steps to each side of 1/2, 0.011 to 0.989
_FINEST_LOGIT = 0.09


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


def least_blankets(epsilon_at: Callable[[float], float], target_epsilon: float) -> float:
    """Returns the least blanket probability β in [0.001, 0.999] (to 0.1 %) with ε(β) <= target.

    At a given noise it is the one of least `mean_update_error`, which rises with β.

    Raises:
        CalibrationError: Not even β = 0.999 is enough.
    """
    epsilon_at = functools.cache(epsilon_at)
    if epsilon_at(_LEAST_BLANKETS) <= target_epsilon:
        return _LEAST_BLANKETS
    if not epsilon_at(_MOST_BLANKETS) <= target_epsilon:
        raise CalibrationError(
            f"no blanket probability up to {_MOST_BLANKETS:g} reaches epsilon {target_epsilon:g}"
        )
    return _close_in(epsilon_at, target_epsilon, _MOST_BLANKETS, _LEAST_BLANKETS)


def mean_update_error(
    users: int,
    check_in_rate: float,
    noise_multiplier: float,
    blanket_probability: float = 0.0,
    dimension: float = math.inf,
) -> float:
    """Returns the root mean squared error of a round's mean update, per coordinate, over C.

    `√(E‖estimate - mean‖² / (C² d))` where every clipped update x has norm C, the worst case. A
    user's part in the sum of reports is `a x + c N`: c is 1 if it reports (probability γ), a is 1
    if that report has its update (γ(1-β)), N is its noise. The server divides the sum by nγ(1-β).
    So the estimate is unbiased, and

        E‖estimate - mean‖² = C² (d z² + (1-β)(1 - γ(1-β))) / (nγ (1-β)²).

    Args:
        users: n.
        check_in_rate: γ in (0, 1].
        noise_multiplier: z >= 0.
        blanket_probability: β in [0, 1); 0 without blankets.
        dimension: d >= 1; infinite for a model so large that only the noise counts.
    """
    kept = 1.0 - blanket_probability
    variance = noise_multiplier**2 + _sampling(check_in_rate, kept) / dimension
    return math.sqrt(variance / (users * check_in_rate)) / kept


def _sampling(check_in_rate: float, kept: float) -> float:
    """The variance of which updates are in the sum, of norm C, over nγC²."""
    return kept * (1.0 - check_in_rate * kept)


def least_error_blankets(
    epsilon_at: Callable[[float, float], float],
    target_epsilon: float,
    check_in_rate: float,
    dimension: float = math.inf,
) -> tuple[float, float]:
    """Returns the noise z and blankets β of least `mean_update_error` with ε(z, β) <= target.

    Every β has its least z. β is searched on a grid of log(β/(1-β)) that ends at steps of 0.1
    around the best; there the error is flat. A β is given up after one ε, that of the noise with
    which it would be no better than the best so far: where that is not private, all that is better
    has less noise and is not private either. About 80 evaluations in all.

    Args:
        epsilon_at: ε as a function of z and β, falling in z.
        target_epsilon: The budget.
        check_in_rate: γ in (0, 1].
        dimension: d >= 1 of the update; infinite if only the noise counts.

    Raises:
        CalibrationError: No z up to 10^6 is enough at β = 1/2.
    """

    def least(beta: float, guess: float) -> float:
        return least_noise(lambda z: epsilon_at(z, beta), target_epsilon, guess)

    best, noise = 0.0, least(0.5, 1.0)

    def try_at(logit: float) -> bool:
        nonlocal best, noise
        error = mean_update_error(1, check_in_rate, noise, _from_logit(best), dimension)
        beta = _from_logit(logit)
        kept = 1.0 - beta
        square = (error * kept) ** 2 * check_in_rate - _sampling(check_in_rate, kept) / dimension
        if not square > 0.0 or not epsilon_at(math.sqrt(square), beta) <= target_epsilon:
            return False
        best, noise = logit, least(beta, math.sqrt(square))
        return True

    step = _LOGIT_STEP
    for multiple in (-1, 1, -2, 2, -3, 3):
        try_at(multiple * step)
    while (step := step / 2.0) >= _FINEST_LOGIT:
        center = best
        for logit in (center - step, center + step):
            try_at(logit)
    return noise, _from_logit(best)


def _from_logit(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit))


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
