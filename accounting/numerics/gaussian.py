"""Two Gaussians of variance 1 and different means: the profile of a report without a shuffler."""

import functools
import math

import numpy as np
import numpy.typing as npt
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.loss_pmf import MAX_LOSS

# Special functions err by less; ε and δ are raised (relative).
_ROUND_UP = 1e-9
# Closer means are priced as if they were this far apart: δ rises with the distance.
_LEAST_SHIFT = 1e-12
_ROOT_TWO = math.sqrt(2.0)


def log_gaussian_delta(shift: float, epsilons: npt.ArrayLike) -> FloatArray:
    """Returns log δ(ε) of Gaussians of variance 1 whose means differ by `shift` (Balle, Wang 2018).

    Raised by what floating point may have taken: 1e-9, more for means closer than 1e-5.

    `shift` > 0; ε >= 0 has any shape.
    """
    shift = max(shift, _LEAST_SHIFT)
    x = np.asarray(epsilons, dtype=np.float64) / shift - shift / 2.0
    near = special.log_ndtr(-x)
    # e^ε Φ(-x-μ)/Φ(-x) is a quotient of two Mills ratios: no cancellation of large exponents.
    scaled = special.erfcx((x + shift) / _ROOT_TWO) / special.erfcx(
        np.maximum(x, -35.0) / _ROOT_TWO
    )
    result: FloatArray = near + np.log1p(-np.minimum(scaled, 1.0 - 1e-16))
    return result + _ROUND_UP + _quotient_error(shift)


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Returns ε at `delta` of two Gaussians of variance 1, `shift` apart, raised by 1e-9.

    `δ = Φ(-x) - e^ε Φ(-x-μ)`, `ε = μ (x + μ/2)` (Balle and Wang 2018). log δ is a concave function
    of x (it convolves log-concave ones), so Newton's steps from `Φ(-x) = δ` downwards never pass
    the root: wherever they end, ε is large enough.

    `shift` is μ > 0; δ lies in (0, 1).
    """
    if delta >= 1.0:
        return 0.0
    shift = max(shift, _LEAST_SHIFT)
    wanted = math.log(delta) - 1e-12 - _quotient_error(shift)
    x = -float(special.ndtri(delta))
    for _ in range(100):
        if x <= -shift / 2.0:
            return 0.0
        # e^ε Φ(-x-μ)/Φ(-x), a quotient of two Mills ratios
        here = float(special.erfcx(max(x, -35.0) / _ROOT_TWO))
        ratio = min(float(special.erfcx((x + shift) / _ROOT_TWO)) / here, 1.0 - 1e-16)
        excess = float(special.log_ndtr(-x)) + math.log1p(-ratio) - wanted
        step = excess * (1.0 - ratio) / (shift * ratio) if ratio > 0.0 else 0.0
        x += step
        if step > -1e-13 * max(abs(x), 1.0):
            break
    epsilon = shift * (x + shift / 2.0)
    return max(epsilon * (1.0 + _ROUND_UP), 0.0)


def _quotient_error(shift: float) -> float:
    """erfcx errs by some 1e-15, which the quotient's distance from 1, about μ, magnifies."""
    return 1e-14 / min(shift, 1.0)


def gaussian_losses(shift: float, least: float) -> FloatArray:
    """Returns ε at which to read the profile of Gaussians whose means differ by `shift`.

    δ is far below `least` at the last.
    """
    reach = reach_of(least * 1e-15)
    losses = shift * shift / 2.0 + shift * np.linspace(-reach, reach, 2000)
    near = np.geomspace(1e-6, 1.0, 200) * min(shift, 1.0)
    return np.unique(np.clip(np.concatenate([[0.0], near, losses]), 0.0, MAX_LOSS))


def reach_of(chance: float) -> float:
    """Returns how many standard deviations a normal variable exceeds with this probability."""
    return -float(special.ndtri(chance))


@functools.lru_cache(maxsize=4096)
def least_loss(shift: float, log_target: float) -> float:
    """Returns the least ε >= 0 (to 1e-9, above) at which `δ(ε) e^{-ε}` is at most a target.

    δ is that of two Gaussians of variance 1 whose means are `shift` > 0 apart.
    """

    def defect(epsilon: float) -> float:
        return float(log_gaussian_delta(shift, epsilon)) - epsilon

    if defect(0.0) <= log_target:
        return 0.0
    low, high = 0.0, 1.0
    while defect(high) > log_target:
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if defect(middle) > log_target else (low, middle)
    return high
