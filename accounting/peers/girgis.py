"""Rényi bounds of shuffled ε₀-LDP reports (Girgis et al. 2021)."""

import math

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from shufl.accounting import validation
from shufl.accounting.numerics import FloatArray
from shufl.accounting.peers.clones import check_reports


def _checked(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    check_reports(reports, local_epsilon)
    checked: FloatArray = np.asarray(orders, dtype=np.float64)
    if checked.ndim != 1 or np.any(checked < 2) or np.any(checked != np.floor(checked)):
        raise ValueError("Rényi orders must be integers from 2")
    return checked


def _log_binomial(order: float, k: FloatArray) -> FloatArray:
    result: FloatArray = (
        special.gammaln(order + 1.0) - special.gammaln(k + 1.0) - special.gammaln(order - k + 1.0)
    )
    return result


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _effective(reports: int, local_epsilon: float) -> int:
    """n̄ = ⌊(n - 1)/(2 e^{ε₀})⌋ + 1."""
    return math.floor((reports - 1) / 2.0 * math.exp(-local_epsilon)) + 1


def girgis_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) of n shuffled ε₀-LDP reports (Girgis et al. 2021, the upper bound).

    With `n̄ = ⌊(n-1)/(2e^{ε₀})⌋ + 1`: `1/(λ-1) log(1 + C(λ,2) (e^{ε₀}-1)²/(n̄ e^{ε₀})
    + Σ_{i>=3} C(λ,i) i Γ(i/2) ((e^{2ε₀}-1)²/(2 e^{2ε₀} n̄))^{i/2} + e^{ε₀λ - (n-1)/(8e^{ε₀})})`.

    n >= 1, ε₀ > 0 of one report, and integers λ >= 2 of shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    checked = _checked(reports, local_epsilon, orders)
    log_n = math.log(_effective(reports, local_epsilon))
    one, two = _log_expm1(local_epsilon), _log_expm1(2.0 * local_epsilon)
    ratio = 2.0 * two - 2.0 * local_epsilon - math.log(2.0) - log_n
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        i = np.arange(3.0, order + 1.0)
        pair = _log_binomial(order, np.array([2.0])) + 2.0 * one - local_epsilon - log_n
        higher = _log_binomial(order, i) + np.log(i) + special.gammaln(i / 2.0) + i / 2.0 * ratio
        rare = local_epsilon * order - (reports - 1) / 8.0 * math.exp(-local_epsilon)
        excess = special.logsumexp(np.concatenate([pair, higher, [rare]]))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result


def girgis_subsampled_rdp(
    rate: float, reports: int, local_epsilon: float, orders: npt.ArrayLike
) -> FloatArray:
    """Returns ε(λ) of k shuffled ε₀-LDP reports, users sampled at rate γ (Girgis et al. 2021).

    With `k̄ = ⌊(k-1)/(2e^{ε₀})⌋ + 1`: `1/(λ-1) log(1 + 4 C(λ,2) γ² (e^{ε₀}-1)²/(k̄ e^{ε₀})
    + Σ_{j>=3} C(λ,j) γ^j j Γ(j/2) (2 (e^{2ε₀}-1)²/(k̄ e^{2ε₀}))^{j/2} + Υ)`,
    `Υ = ((1+γu)^λ - 1 - λγu) e^{-(k-1)/(8e^{ε₀})}`, `u = e^{ε₀} - e^{-ε₀}`, the most
    by which a density ratio is off 1. (Published code has u/2, which nothing justifies.)

    γ in (0, 1], k >= 1, ε₀ > 0 of one report, and integers λ >= 2 of shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    checked = _checked(reports, local_epsilon, orders)
    log_rate = math.log(validation.real("sampling rate", rate, "(0, 1]"))
    log_k = math.log(_effective(reports, local_epsilon))
    one, two = _log_expm1(local_epsilon), _log_expm1(2.0 * local_epsilon)
    ratio = math.log(2.0) + 2.0 * two - 2.0 * local_epsilon - log_k
    log_u = two - local_epsilon + log_rate
    damping = (reports - 1) / 8.0 * math.exp(-local_epsilon)
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        j = np.arange(3.0, order + 1.0)
        pair = _log_binomial(order, np.array([2.0])) + math.log(4.0) + 2.0 * (log_rate + one)
        pair = pair - local_epsilon - log_k
        higher = _log_binomial(order, j) + np.log(j) + special.gammaln(j / 2.0)
        higher = higher + j * log_rate + j / 2.0 * ratio
        # (1+x)^λ - 1 - λx = Σ_{j>=2} C(λ, j) x^j
        powers = np.arange(2.0, order + 1.0)
        rare = special.logsumexp(_log_binomial(order, powers) + powers * log_u) - damping
        excess = special.logsumexp(np.concatenate([pair, higher, np.atleast_1d(rare)]))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result


def girgis_simple_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) of n shuffled ε₀-LDP reports (Girgis et al. 2021, the second upper bound).

    `1/(λ-1) log(e^{λ² (e^{ε₀}-1)²/n̄} + e^{ε₀λ - (n-1)/(8e^{ε₀})})`, n̄ as in `girgis_rdp`: larger.

    The arguments are those of `girgis_rdp`.

    Raises:
        ValueError: A value outside its range.
    """
    checked = _checked(reports, local_epsilon, orders)
    often = np.exp(2.0 * _log_expm1(local_epsilon) - math.log(_effective(reports, local_epsilon)))
    rare = local_epsilon * checked - (reports - 1) / 8.0 * math.exp(-local_epsilon)
    result: FloatArray = np.logaddexp(checked**2 * often, rare) / (checked - 1.0)
    return result


def girgis_lower_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns a ε(λ) that n shuffled ε₀-LDP reports can cost (Girgis et al. 2021, lower bound).

    It is the divergence for binary randomised response where one of n users differs from all
    others, `E[(1 + (e^{2ε₀}-1)/(n e^{ε₀}) (K - n/(e^{ε₀}+1)))^λ]` with K ~ Bin(n, 1/(e^{ε₀}+1)).

    The arguments are those of `girgis_rdp`.

    Raises:
        ValueError: A value outside its range.
    """
    checked = _checked(reports, local_epsilon, orders)
    heads = stats.binom(reports, 1.0 / (math.exp(local_epsilon) + 1.0))
    mean, deviation = heads.mean(), heads.std()
    low, high = max(mean - 40.0 * deviation, 0.0), min(mean + 40.0 * deviation, float(reports))
    counts = np.arange(math.floor(low), math.ceil(high) + 1.0)
    step = 2.0 * math.sinh(local_epsilon) / reports
    logs = np.log1p(step * (counts - mean))
    chances = heads.pmf(counts)
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        # The mean of K is known, so that of the first power need not be summed.
        above = np.expm1(np.minimum(order * logs, 600.0)) - order * step * (counts - mean)
        large = special.logsumexp(heads.logpmf(counts) + order * logs)
        result[at] = large if large > 1.0 else math.log1p(max(float(np.sum(chances * above)), 0.0))
    return result / (checked - 1.0)


def poisson_sampled_rdp(rate: float, divergences: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) where users are sampled at rate γ, by the general bound of Zhu and Wang 2019.

    `1/(λ-1) log((1-γ)^{λ-1} (λγ-γ+1) + C(λ,2) γ² (1-γ)^{λ-2} e^{ε(2)}
    + 3 Σ_{j>=3} C(λ,j) (1-γ)^{λ-j} γ^j e^{(j-1)ε(j)})`.

    γ lies in (0, 1). `divergences` are ε(λ) without sampling at λ = 2, 3, ..., and the result is at
    the same orders, both of shape (K,).
    """
    base: FloatArray = np.asarray(divergences, dtype=np.float64)
    log_rate = math.log(validation.real("sampling rate", rate, "(0, 1)"))
    log_rest = math.log1p(-rate)
    result = np.empty_like(base)
    for at in range(base.size):
        order = at + 2.0
        j = np.arange(2.0, order + 1.0)
        terms = _log_binomial(order, j) + (order - j) * log_rest + j * log_rate
        terms += (j - 1.0) * base[: at + 1] + np.where(j > 2.0, math.log(3.0), 0.0)
        none = (order - 1.0) * log_rest + math.log1p((order - 1.0) * rate)
        result[at] = max(float(special.logsumexp(np.append(terms, none))), 0.0) / (order - 1.0)
    return result
