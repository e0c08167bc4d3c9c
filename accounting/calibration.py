"""The noise, the rounds or the check-in rate that a target ε allows.

Every search returns a value whose ε it has computed and found within the target: where ε is not
quite monotone, or the bracket is coarse, it can only err on the private side.
"""

import math
from collections.abc import Callable
from typing import Any

from accounting.registry import make_accountant

_PRECISION = 1e-3  # relative, of continuous answers
_LARGEST_NOISE = 1e6
_LEAST_NOISE = 1e-2
_MOST_ROUNDS = 10**6


class CalibrationError(ValueError):
    """No value within range reaches the target ε."""


def epsilon_of(accountant: str, adjacency: str, event: Any, rounds: int, delta: float) -> float:
    """Returns ε at `delta` after `rounds` times `event`."""
    pricing = make_accountant(accountant, adjacency)
    return float(pricing.epsilon_after(event, delta, rounds)) if rounds else 0.0


def least_noise(epsilon_at: Callable[[float], float], target_epsilon: float) -> float:
    """Returns the least noise multiplier z (to 0.1 %) with ε(z) <= target.

    Args:
        epsilon_at: ε as a function of z.
        target_epsilon: The budget.

    Raises:
        CalibrationError: Not even z = 10^6 is enough.
    """
    high = 1.0
    while not epsilon_at(high) <= target_epsilon:
        high *= 4.0
        if high > _LARGEST_NOISE:
            raise CalibrationError(
                f"no noise multiplier up to {_LARGEST_NOISE:g} reaches epsilon {target_epsilon:g}"
            )
    low = high / 4.0
    while low > _LEAST_NOISE and epsilon_at(low) <= target_epsilon:
        high, low = low, low / 4.0
    return _bisect(lambda z: epsilon_at(z) <= target_epsilon, high, low)


def largest_rate(epsilon_at: Callable[[float], float], target_epsilon: float, users: int) -> float:
    """Returns the largest check-in rate γ (to 0.1 %) with ε(γ) <= target.

    Raises:
        CalibrationError: Not even γ = 1/(10 n) is enough.
    """
    if epsilon_at(1.0) <= target_epsilon:
        return 1.0
    low = 0.1 / users
    if not epsilon_at(low) <= target_epsilon:
        raise CalibrationError(f"no check-in rate reaches epsilon {target_epsilon:g}")
    return _bisect(lambda rate: epsilon_at(rate) <= target_epsilon, low, 1.0)


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


def _bisect(good: Callable[[float], bool], inside: float, outside: float) -> float:
    """A point that is good, within a relative `_PRECISION` of one that is not."""
    while abs(math.log(inside / outside)) > _PRECISION:
        middle = math.sqrt(inside * outside)
        if good(middle):
            inside = middle
        else:
            outside = middle
    return inside
