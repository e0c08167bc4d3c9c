"""From Rényi to (ε, δ): Lemma 2, vectorised over the orders.

The formulas, and the shortcut through the Kullback-Leibler divergence, are those of
`dp_accounting.rdp.compute_epsilon` and `compute_delta` (Canonne, Kamath, Steinke 2020, Prop. 12),
which loop over the orders in Python: too slow to ask before every round. Tests compare the two.
"""

import math

import numpy as np

from shufl.accounting.numerics import FloatArray


def _checked(rdp: FloatArray) -> FloatArray:
    if np.any(np.isnan(rdp)) or np.any(rdp < 0.0):
        raise ValueError("Rényi divergences must be non-negative numbers")
    return rdp


def epsilon_from_rdp(orders: FloatArray, rdp: FloatArray, delta: float) -> tuple[float, int]:
    """Returns the least ε over the orders, and the index of the order that gives it.

    Orders λ > 1.01 and their ε(λ) >= 0, which may be inf, have shape (K,); δ lies in [0, 1].

    Raises:
        ValueError: δ outside [0, 1], or a negative or undefined divergence.
    """
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta must lie in [0, 1], got {delta}")
    _checked(rdp)
    if delta == 0.0:
        return (0.0, 0) if np.all(rdp == 0.0) else (math.inf, 0)
    epsilons = rdp + np.log1p(-1.0 / orders) - np.log(delta * orders) / (orders - 1.0)
    # δ <= sqrt(1 - e^{-KL}) (Bretagnolle-Huber), and KL is at most any Rényi divergence.
    epsilons = np.where(delta**2 + np.expm1(-rdp) > 0.0, 0.0, epsilons)
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), best


def delta_from_rdp(orders: FloatArray, rdp: FloatArray, epsilon: float) -> tuple[float, int]:
    """Returns the least δ over the orders, and the index of the order that gives it.

    Orders λ > 1.01 and their ε(λ) >= 0, which may be inf, have shape (K,); ε >= 0 may be inf.

    Raises:
        ValueError: Negative or undefined ε, or a negative or undefined divergence.
    """
    if not epsilon >= 0.0:
        raise ValueError(f"epsilon must be at least 0, got {epsilon}")
    _checked(rdp)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_kl = 0.5 * np.log(-np.expm1(-rdp))
        by_order = (orders - 1.0) * (rdp - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
    log_deltas = np.fmin(by_kl, by_order)  # inf - inf is no bound: fmin drops it
    best = int(np.argmin(log_deltas))
    return min(1.0, math.exp(min(0.0, float(log_deltas[best])))), best
