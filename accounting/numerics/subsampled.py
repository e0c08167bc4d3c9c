"""A Gaussian that hides whether a record is in a sum at all: the profile of the subsampled pair.

With the chance γ a user's vector is added to noise N(0, s²). Section 10 of docs/theory/blanket.md
says why these pairs are the worst, with w = 1/s and δ_G the profile of two unit Gaussians w apart:

    zero-out:  γ δ_G(log(1 + (α-1)/γ)),  and  αγE δ_G(-log E),  E = (1 - α(1-γ))/αγ > 0,
    replace:   γ (δ_G(log E) + αE' δ_G(-log E')),  where (1-γ)(1-α) + γ(E - αE') = 0, EE' = e^{-w²}.
"""

import math

import numpy as np
from dp_accounting import NeighboringRelation

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian import log_gaussian_delta, reach_of
from shufl.accounting.numerics.loss_pmf import MAX_LOSS

_POINTS = 2500
_ROUND_UP = 1e-15
_WIDEST = 1e6  # δ is γ there up to the largest loss
_LARGE = 300.0  # from here on arcsinh(e^x) is x + log 2


def subsampled_profile(
    rate: float, noise: float, relation: NeighboringRelation, least: float
) -> tuple[FloatArray, FloatArray]:
    """Returns epsilons from 0, shape (K,), and δ of both directions, (K,) or (2, K).

    Args:
        rate: γ in (0, 1].
        noise: s > 0, the deviation of the sum's noise in clip norms.
        relation: REPLACE_ONE, or REPLACE_SPECIAL for zero-out.
        least: δ is far below it at the last ε.
    """
    width = min(1.0 / noise, _WIDEST)
    ratios = np.linspace(0.0, reach_of(least * 1e-15) + width, _POINTS) * width  # wt
    up, down = (_loss(rate, at - width**2 / 2.0) for at in (ratios, -ratios))
    if relation is NeighboringRelation.REPLACE_ONE:
        epsilons = _sorted(up - down)
        return epsilons, _opposite(rate, width, epsilons)
    epsilons = _sorted(np.concatenate([up, -down]))
    excess = np.expm1(epsilons)
    first = rate * np.exp(log_gaussian_delta(width, np.log1p(excess / rate)))
    # 1 - α(1-γ), raised by what rounding may have taken: δ rises with it.
    lost = (1.0 - rate) * excess
    share = rate - lost + _ROUND_UP * (rate + lost)
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
    large = log_b > _LARGE
    log_u = 0.5 * epsilons + np.where(
        large, log_b + math.log(2.0), np.arcsinh(np.exp(np.minimum(log_b, _LARGE)))
    )
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
