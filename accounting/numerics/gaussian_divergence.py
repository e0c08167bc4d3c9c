"""Two Gaussians of different means: a report without a shuffler, and a vector in a noisy sum."""

import functools
import math

import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.loss_pmf import MAX_LOSS

# Special functions err by less; ε and δ are raised (relative).
_ROUND_UP = 1e-9
# Closer means are priced as if they were this far apart: δ rises with the distance.
_LEAST_SHIFT = 1e-12
_ROOT_TWO = math.sqrt(2.0)
ROOT_TAU = math.sqrt(2.0 * math.pi)
_SUBSAMPLED_POINTS = 2500
_WIDEST = 1e6  # δ is γ there up to the largest loss


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
    log_delta = near + np.log1p(-np.minimum(scaled, 1.0 - 1e-16))
    return np.asarray(log_delta + _ROUND_UP + _quotient_error(shift))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Returns ε at `delta` of two Gaussians of variance 1, `shift` apart, raised by 1e-9 at most.

    `shift` is μ > 0; δ lies in (0, 1).
    """
    return least_loss(shift, math.log(delta), 0.0) if delta < 1.0 else 0.0


@functools.lru_cache(maxsize=4096)
def least_loss(shift: float, log_target: float, tilt: float) -> float:
    """Returns the least ε >= 0 (to 1e-9, above) at which `δ(ε) e^{-tilt ε}` is at most a target.

    δ is that of two Gaussians of variance 1 whose means are `shift` > 0 apart.
    """

    def is_enough(epsilon: float) -> bool:
        return float(log_gaussian_delta(shift, epsilon)) - tilt * epsilon <= log_target

    if is_enough(0.0):
        return 0.0
    low, high = 0.0, max(shift, _LEAST_SHIFT)
    while high < math.inf and not is_enough(high):
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


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


def quadrature(
    edges: FloatArray, rule: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Returns nodes t and their weights under the normal density, between increasing edges.

    `rule` has the nodes and the weights of each panel, on [-1, 1].
    """
    half = 0.5 * np.diff(edges)
    t = ((edges[:-1] + half)[:, None] + half[:, None] * rule[0]).ravel()
    weights = (half[:, None] * rule[1]).ravel()
    return t, weights * np.exp(-0.5 * t * t) / ROOT_TAU


def panels(low: float, high: float, widest: float) -> FloatArray:
    """Returns the edges of panels from `low` to `high`, each at most so wide."""
    return np.linspace(low, high, max(math.ceil((high - low) / widest), 1) + 1)


def subsampled_profile(
    rate: float, noise: float, relation: NeighboringRelation, least: float
) -> tuple[FloatArray, FloatArray]:
    """Returns the profile of the pair that differs in whether a record is in a sum at all.

    With the chance γ a user's vector is added to noise N(0, s²). Section 10 of
    docs/theory/blanket.md says why these pairs are the worst, with w = 1/s and δ_G the profile of
    two unit Gaussians w apart:

        zero-out:  γ δ_G(log(1 + (α-1)/γ)),  and  αγE δ_G(-log E),  E = (1 - α(1-γ))/αγ > 0,
        replace:   γ (δ_G(log E) + αE' δ_G(-log E')),
                   where (1-γ)(1-α) + γ(E - αE') = 0, EE' = e^{-w²}.

    Returns epsilons from 0, shape (K,), and δ of both directions, (K,) or (2, K).

    Args:
        rate: γ in (0, 1].
        noise: s > 0, the deviation of the sum's noise in clip norms.
        relation: REPLACE_ONE, or REPLACE_SPECIAL for zero-out.
        least: δ is far below it at the last ε.
    """
    width = min(1.0 / noise, _WIDEST)
    ratios = np.linspace(0.0, reach_of(least * 1e-15) + width, _SUBSAMPLED_POINTS) * width  # wt
    up, down = (_loss(rate, at - width**2 / 2.0) for at in (ratios, -ratios))
    if relation is NeighboringRelation.REPLACE_ONE:
        epsilons = _sorted(up - down)
        return epsilons, _opposite(rate, width, epsilons)
    epsilons = _sorted(np.concatenate([up, -down]))
    excess = np.expm1(epsilons)
    first = rate * np.exp(log_gaussian_delta(width, np.log1p(excess / rate)))
    # 1 - α(1-γ), raised by what rounding may have taken: δ rises with it.
    lost = (1.0 - rate) * excess
    share = rate - lost + 1e-15 * (rate + lost)
    ratio = np.maximum(share, 0.0) / (rate * np.exp(epsilons))
    with np.errstate(divide="ignore"):
        second = share * np.exp(log_gaussian_delta(width, np.minimum(-np.log(ratio), 1e6)))
    return epsilons, np.stack([first, np.maximum(second, 0.0)])


def _opposite(rate: float, width: float, epsilons: FloatArray) -> FloatArray:
    """δ of two opposite vectors: both directions are equal."""
    # E = u e^{-w²/2}, u² - 2bu - α = 0, so u = √α e^{arcsinh(b/√α)}.
    with np.errstate(divide="ignore"):
        log_b = np.log(0.5 * (1.0 - rate) / rate) + np.log(np.expm1(epsilons)) + 0.5 * width**2
    log_b -= 0.5 * epsilons
    log_u = 0.5 * epsilons + np.logaddexp(log_b, 0.5 * np.logaddexp(2.0 * log_b, 0.0))
    log_first, log_second = log_u - width**2 / 2.0, -log_u - width**2 / 2.0
    first = log_gaussian_delta(width, log_first)
    second = log_gaussian_delta(width, -log_second) + epsilons + log_second
    return np.asarray(rate * (np.exp(first) + np.exp(second)))


def _loss(rate: float, exponents: FloatArray) -> FloatArray:
    """log(1 - γ + γe^x)."""
    if rate == 1.0:
        return exponents
    with np.errstate(over="ignore"):
        return np.asarray(np.log1p(rate * np.expm1(exponents)))


def _sorted(losses: FloatArray) -> FloatArray:
    return np.unique(np.append(0.0, losses[(losses > 0.0) & (losses <= MAX_LOSS)]))
