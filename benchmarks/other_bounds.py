"""Published bounds that only the page of `literature.py` compares: no command uses them."""

import math

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.moments import log_expm1
from shufl.accounting.numerics.sign_sum import ROUND_UP, sign_mean_calls
from shufl.accounting.peers.comparisons import log_binomial, over_clones

_DEVIATIONS = 13.0
_AT_ONCE = 2**21  # entries of a table


def strong_composition(epsilon: float, rounds: int, slack: float) -> float:
    """Returns ε after T rounds that are each (ε, δ)-DP, at `1 - (1-δ)^T (1-δ̃)`, for every δ.

    The closed form of Kairouz, Oh and Viswanath 2015, Theorem 3.4; δ̃ is `slack`, in (0, 1).
    """
    mean = rounds * epsilon * math.tanh(epsilon / 2.0)
    root = math.sqrt(rounds) * epsilon
    spread = epsilon * math.sqrt(2.0 * rounds * math.log(math.e + root / slack))
    wider = epsilon * math.sqrt(2.0 * rounds * -math.log(slack))
    return min(rounds * epsilon, mean + spread, mean + wider)


def girgis_simple_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) of n shuffled ε₀-LDP reports (Girgis et al. 2021, the second upper bound).

    `1/(λ-1) log(e^{λ² (e^{ε₀}-1)²/n̄} + e^{ε₀λ - (n-1)/(8e^{ε₀})})`, n̄ as in `girgis_rdp`: larger.

    The arguments are those of `girgis_rdp`.
    """
    checked = np.asarray(orders, dtype=np.float64)
    often = np.exp(2.0 * log_expm1(local_epsilon) - math.log(over_clones(reports, local_epsilon)))
    rare = local_epsilon * checked - (reports - 1) / 8.0 * math.exp(-local_epsilon)
    result: FloatArray = np.logaddexp(checked**2 * often, rare) / (checked - 1.0)
    return result


def girgis_lower_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns a ε(λ) that n shuffled ε₀-LDP reports can cost (Girgis et al. 2021, lower bound).

    It is the divergence for binary randomised response where one of n users differs from all
    others, `E[(1 + (e^{2ε₀}-1)/(n e^{ε₀}) (K - n/(e^{ε₀}+1)))^λ]` with K ~ Bin(n, 1/(e^{ε₀}+1)).

    The arguments are those of `girgis_rdp`.
    """
    checked = np.asarray(orders, dtype=np.float64)
    heads = stats.binom(reports, 1.0 / (math.exp(local_epsilon) + 1.0))
    mean, deviation = heads.mean(), heads.std()
    low, high = max(mean - 40.0 * deviation, 0.0), min(mean + 40.0 * deviation, float(reports))
    counts = np.arange(math.floor(low), math.ceil(high) + 1.0)
    step = 2.0 * math.sinh(local_epsilon) / reports
    logs = np.log1p(step * (counts - mean))
    chances = heads.pmf(counts)
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        # The mean of K is known, so the first power need not be summed.
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
    log_rate = math.log(rate)
    log_rest = math.log1p(-rate)
    result = np.empty_like(base)
    for at in range(base.size):
        order = at + 2.0
        j = np.arange(2.0, order + 1.0)
        terms = log_binomial(order, j) + (order - j) * log_rest + j * log_rate
        terms += (j - 1.0) * base[: at + 1] + np.where(j > 2.0, math.log(3.0), 0.0)
        none = (order - 1.0) * log_rest + math.log1p((order - 1.0) * rate)
        result[at] = max(float(special.logsumexp(np.append(terms, none))), 0.0) / (order - 1.0)
    return result


def variation_ratio_delta(
    reports: int,
    ratio: float,
    variation: float,
    ratio_to_others: float,
    epsilons: npt.ArrayLike,
) -> FloatArray:
    """Returns δ(ε) of the variation-ratio pair (Wang et al. 2024), summed exactly and rounded up.

    "Privacy amplification via shuffling: unified, simplified, and tightened". A randomiser is known
    by three numbers: p, the largest ratio of any two reports' probabilities; β, their largest total
    variation; q, the largest ratio to any other user's report. Of the differing user's report the
    pair sees one of two places, the right one with probability αp and the wrong one with α,
    `α = β/(p-1)`, otherwise nothing; every other user is at either with probability αp/q.

    Args:
        reports: n >= 1.
        ratio: p > 1; e^ε₀ for an ε₀-LDP randomiser.
        variation: β in (0, (p-1)/(p+1)].
        ratio_to_others: q >= 1.
        epsilons: ε >= 0, shape (K,).
    """
    wrong = variation / (ratio - 1.0)
    seen, t = min(wrong * (ratio + 1.0), 1.0), (ratio - 1.0) / (ratio + 1.0)
    chance = 2.0 * wrong * ratio / ratio_to_others
    alphas = np.exp(np.asarray(epsilons, dtype=np.float64))
    others = stats.binom(reports - 1, chance)
    reach = _DEVIATIONS * others.std() + 30.0
    first, last = max(others.mean() - reach, 0.0), min(others.mean() + reach, reports - 1.0)
    total = np.zeros(alphas.shape)
    step = max(_AT_ONCE // max(alphas.size, 1), 1)
    for start in np.arange(math.floor(first), math.ceil(last) + 1.0, step):
        among = np.arange(start, min(start + step, math.ceil(last) + 1.0))
        # With the user's own m = C + 1 signs are seen; as many without it, if it is not seen.
        odds = _next(among, reports - 1, chance)
        fall = (alphas - 1.0) * (1.0 + (1.0 - seen) / seen * odds[:, None])
        levels = fall / ((alphas + 1.0) * t)
        calls = sign_mean_calls(among + 1.0, levels)
        total += np.einsum("i,ij->j", others.pmf(among), calls)
    outside = others.cdf(first - 1.0) + others.sf(last)
    result = seen * (1.0 + alphas) * t * total + outside
    return np.asarray(np.where(alphas < ratio, result * (1.0 + ROUND_UP), 0.0))


def _next(count: FloatArray, trials: float, chance: float) -> FloatArray:
    """P[Bin = c + 1] / P[Bin = c]."""
    odds = chance / max(1.0 - chance, 1e-300)
    return np.asarray((trials - count) / (count + 1.0) * odds)


def of_response(categories: int, local_epsilon: float) -> tuple[float, float, float]:
    """Returns p, β and q of k-ary randomised response as Wang et al. state them.

    The pair is no bound for k >= 4: docs/results/literature.md.
    """
    ratio = math.exp(local_epsilon)
    return ratio, math.expm1(local_epsilon) / (ratio + categories - 1.0), ratio


def of_laplace(local_epsilon: float) -> tuple[float, float, float]:
    """Returns p, β and q of the Laplace mechanism on an interval."""
    ratio = math.exp(local_epsilon)
    return ratio, -math.expm1(-0.5 * local_epsilon), ratio


def of_any(local_epsilon: float) -> tuple[float, float, float]:
    """Returns p, β and q with the largest β that an ε₀-LDP randomiser can have.

    The pair is that of the clones of 2022, whose erratum restricts it to some randomisers.
    """
    ratio = math.exp(local_epsilon)
    return ratio, float(special.expit(local_epsilon) * -math.expm1(-local_epsilon)), ratio
