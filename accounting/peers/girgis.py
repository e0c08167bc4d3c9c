"""Rényi bounds of shuffled ε₀-LDP reports (Girgis et al. 2021)."""

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from shufl.accounting.numerics import FloatArray


def log_binomial(order: float, k: FloatArray) -> FloatArray:
    """Returns log C(λ, k)."""
    result: FloatArray = (
        special.gammaln(order + 1.0) - special.gammaln(k + 1.0) - special.gammaln(order - k + 1.0)
    )
    return result


def log_expm1(x: float) -> float:
    """Returns log(e^x - 1) without overflow."""
    return x + math.log(-math.expm1(-x))


def over_clones(reports: int, local_epsilon: float) -> int:
    """Returns n̄ = ⌊(n - 1)/(2 e^{ε₀})⌋ + 1."""
    return math.floor((reports - 1) / 2.0 * math.exp(-local_epsilon)) + 1


def girgis_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) of n shuffled ε₀-LDP reports (Girgis et al. 2021, the upper bound).

    With n̄ of `over_clones`: `1/(λ-1) log(1 + C(λ,2) (e^{ε₀}-1)²/(n̄ e^{ε₀})
    + Σ_{i>=3} C(λ,i) i Γ(i/2) ((e^{2ε₀}-1)²/(2 e^{2ε₀} n̄))^{i/2} + e^{ε₀λ - (n-1)/(8e^{ε₀})})`.

    n >= 1, ε₀ > 0 of one report, and integers λ >= 2 of shape (K,).
    """
    checked: FloatArray = np.asarray(orders, dtype=np.float64)
    log_n = math.log(over_clones(reports, local_epsilon))
    one, two = log_expm1(local_epsilon), log_expm1(2.0 * local_epsilon)
    ratio = 2.0 * two - 2.0 * local_epsilon - math.log(2.0) - log_n
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        i = np.arange(3.0, order + 1.0)
        pair = log_binomial(order, np.array([2.0])) + 2.0 * one - local_epsilon - log_n
        higher = log_binomial(order, i) + np.log(i) + special.gammaln(i / 2.0) + i / 2.0 * ratio
        rare = local_epsilon * order - (reports - 1) / 8.0 * math.exp(-local_epsilon)
        excess = special.logsumexp(np.concatenate([pair, higher, [rare]]))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result


def girgis_subsampled_rdp(
    rate: float, reports: int, local_epsilon: float, orders: npt.ArrayLike
) -> FloatArray:
    """Returns ε(λ) of k shuffled ε₀-LDP reports, users sampled at rate γ (Girgis et al. 2021).

    With k̄ of `over_clones`: `1/(λ-1) log(1 + 4 C(λ,2) γ² (e^{ε₀}-1)²/(k̄ e^{ε₀})
    + Σ_{j>=3} C(λ,j) γ^j j Γ(j/2) (2 (e^{2ε₀}-1)²/(k̄ e^{2ε₀}))^{j/2} + Υ)`,
    `Υ = ((1+γu)^λ - 1 - λγu) e^{-(k-1)/(8e^{ε₀})}`, `u = e^{ε₀} - e^{-ε₀}`, the most
    by which a density ratio is off 1. (Published code has u/2, which nothing justifies.)

    γ in (0, 1], k >= 1, ε₀ > 0 of one report, and integers λ >= 2 of shape (K,).
    """
    checked: FloatArray = np.asarray(orders, dtype=np.float64)
    log_rate = math.log(rate)
    log_k = math.log(over_clones(reports, local_epsilon))
    one, two = log_expm1(local_epsilon), log_expm1(2.0 * local_epsilon)
    ratio = math.log(2.0) + 2.0 * two - 2.0 * local_epsilon - log_k
    log_u = two - local_epsilon + log_rate
    damping = (reports - 1) / 8.0 * math.exp(-local_epsilon)
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        j = np.arange(3.0, order + 1.0)
        pair = log_binomial(order, np.array([2.0])) + math.log(4.0) + 2.0 * (log_rate + one)
        pair = pair - local_epsilon - log_k
        higher = log_binomial(order, j) + np.log(j) + special.gammaln(j / 2.0)
        higher = higher + j * log_rate + j / 2.0 * ratio
        # (1+x)^λ - 1 - λx = Σ_{j>=2} C(λ, j) x^j
        powers = np.arange(2.0, order + 1.0)
        rare = special.logsumexp(log_binomial(order, powers) + powers * log_u) - damping
        excess = special.logsumexp(np.concatenate([pair, higher, np.atleast_1d(rare)]))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result
