"""Which randomised response a target ε allows: how true its reports, and how many blankets."""

import bisect
import functools
from collections.abc import Callable

import numpy as np

from shufl.accounting.calibration import CalibrationError, least_blankets
from shufl.accounting.mechanisms import RandomisedResponse

_ALONE = (1.0, 0.99, 0.95)  # of the target: what a report may cost that nothing hides
_HARDLY_A_BLANKET = 0.1
_NEAR_BEST = 0.02  # of the error
_LEAST_LOCAL = 1e-6


def largest_local_epsilon(epsilon_at: Callable[[float], float], target_epsilon: float) -> float:
    """Returns the largest ε₀ in [1e-6, 20] (to 0.1 %) with ε(ε₀) <= target.

    `epsilon_at` gives ε(ε₀), increasing.

    Raises:
        CalibrationError: Not even ε₀ = 1e-6 is little enough.
    """
    tried = np.geomspace(_LEAST_LOCAL, RandomisedResponse.most_epsilon, 2**14).tolist()
    enough = bisect.bisect_left(tried, True, key=lambda it: not epsilon_at(it) <= target_epsilon)
    if enough == 0:
        raise CalibrationError(f"no local epsilon reaches epsilon {target_epsilon:g}")
    return float(tried[enough - 1])


def least_error_response(
    epsilon_at: Callable[[float, float], float],
    target_epsilon: float,
    reports: float,
    categories: int,
) -> tuple[float, float]:
    """Returns ε₀ and blankets λ of randomised response that about minimise its error.

    The squared error of its estimate is, but for a factor, `(m + λ)/s² - m` with m users' reports.
    Blankets hide a report that is nearly always true with least error: to answer at random costs
    `1/s²` and saves blankets like s². Of all ε₀ that make the error of the best with so many
    blankets at most 2 % larger it is the least, because it holds whoever cheats. A smaller ε₀ is
    post-processing, so it needs no more blankets. If an ε₀ just below the target, with hardly a
    blanket, errs less, it is that.

    `epsilon_at` gives ε(ε₀, λ), `reports` is nγ, and `categories` is k.

    Raises:
        CalibrationError: Not even 10^7 blankets are enough.
    """

    def error(local_epsilon: float, blankets: float) -> float:
        mechanism = RandomisedResponse(categories=categories, local_epsilon=local_epsilon)
        return (reports + blankets) / mechanism.truth**2 - reports

    most = RandomisedResponse.most_epsilon
    tried = (min(share * target_epsilon, most) for share in _ALONE)
    enough = (it for it in tried if epsilon_at(it, _HARDLY_A_BLANKET) <= target_epsilon)
    alone = next(enough, None)
    try:
        blankets = least_blankets(functools.partial(epsilon_at, most), target_epsilon)
    except CalibrationError:
        if alone is not None:
            return alone, _HARDLY_A_BLANKET
        raise
    if alone is not None and error(alone, _HARDLY_A_BLANKET) <= error(most, blankets):
        return alone, _HARDLY_A_BLANKET
    allowed = (1.0 + _NEAR_BEST) ** 2 * error(most, blankets)
    rising = np.geomspace(min(target_epsilon, 1.0), most, 500).tolist()
    local_epsilon = next(each for each in rising if error(each, blankets) <= allowed)
    guess = functools.partial(epsilon_at, local_epsilon)
    return local_epsilon, least_blankets(guess, target_epsilon, blankets)
