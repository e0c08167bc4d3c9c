"""Shuffled k-ary randomised response (Balle et al. 2019, Koskela et al. 2021)."""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import stats

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.sign_sum import sign_mean_calls

Adversary = Literal["strong", "weak"]


def blanket_share(categories: int, local_epsilon: float) -> float:
    """Returns γ of k-ary randomised response: `e^{ε₀} = (1-γ+γ/k)/(γ/k)`."""
    return categories / (math.expm1(min(local_epsilon, 700.0)) + categories)


def randomised_response_delta(
    reports: int,
    categories: int,
    local_epsilon: float,
    epsilons: npt.ArrayLike,
    adversary: Adversary = "weak",
) -> FloatArray:
    """Returns δ(ε) of shuffled k-ary randomised response (Balle et al. 2019, Koskela et al. 2021).

    A user sends its value, or with probability γ (see `blanket_share`) a uniform one. Both
    adversaries know all other users' values and which of them sent a uniform one; the strong one
    also knows that the differing user did not. Among m = B + 1 reports, `B ~ Bin(n-1, γ)`, that
    are left, n1 and n2 hold the two candidate values; against uniform reports the density is
    `w + (1-w) k n1/m`, w = γ (weak) or 0 (strong), so with `d = n1 - n2` a sum of s = n1 + n2 signs

        δ(α) = E[(w (1-α) + (1-w) k (s (1-α) + d (1+α))/(2m))_+].

    This is the hockey-stick divergence itself, both directions, in blocks of m valued at their
    first (it falls in m): an upper bound. The published analyses of the strong adversary take
    P[loss >= ε], which is larger.

    n >= 1, k >= 2, ε₀ > 0 of one report, and ε >= 0 of shape (K,).
    """
    share = blanket_share(categories, local_epsilon)
    own = share if adversary == "weak" else 0.0
    alphas = np.exp(np.asarray(epsilons, dtype=np.float64))
    mean, deviation = (reports - 1) * share, math.sqrt((reports - 1) * share * (1.0 - share))
    # Up to an eighth of a deviation wide; single counts where there are few.
    near = np.arange(mean - 12.0 * deviation, mean + 12.0 * deviation + 2.0, max(deviation / 8, 1))
    first = np.unique(np.append(1, np.clip(np.floor(near), 1, reports)).astype(np.int64))
    last = np.append(first[1:] - 1, reports)
    # m = B + 1. The smaller of two tails keeps its digits.
    below = stats.binom.cdf(last - 1, reports - 1, share)
    above = stats.binom.sf(first - 2, reports - 1, share)
    chance = np.where(
        last - 1 < mean,
        below - stats.binom.cdf(first - 2, reports - 1, share),
        above - stats.binom.sf(last - 1, reports - 1, share),
    )
    result = np.zeros_like(alphas)
    for m, weight in zip(first.tolist(), chance.tolist(), strict=True):
        if weight > 1e-25:
            result += weight * _among(m, categories, own, alphas)
        else:
            result += weight
    if adversary == "weak":  # who sees no more than the reports themselves, each ε₀-LDP
        result[np.asarray(epsilons, dtype=np.float64) >= local_epsilon] = 0.0
    bound: FloatArray = np.minimum(result * (1.0 + 1e-9), 1.0)
    return bound


def _among(m: int, categories: int, own: float, alphas: FloatArray) -> FloatArray:
    """`E[(w (1-α) + (1-w) k (s (1-α) + d (1+α))/(2m))_+]` for one m."""
    center, deviation = 2.0 * m / categories, math.sqrt(m * 2.0 / categories)
    low = max(1, math.floor(center - 9.0 * deviation - 9.0)) if categories > 2 else m
    high = min(m, math.ceil(center + 9.0 * deviation + 9.0))
    signs = np.arange(low, high + 1, dtype=np.float64)
    chance = stats.binom.pmf(signs, m, 2.0 / categories)
    beyond = stats.binom.cdf(low - 1, m, 2.0 / categories) if low > 1 else 0.0
    beyond += stats.binom.sf(high, m, 2.0 / categories)
    offset = own * m / ((1.0 - own) * categories)
    level = np.outer(1.0 + 2.0 * offset / signs, (alphas - 1.0) / (alphas + 1.0))
    calls = sign_mean_calls(signs, level)
    mean = np.einsum("s,sj->j", chance * signs, calls)
    result: FloatArray = (1.0 - own) * categories * (alphas + 1.0) / (2.0 * m) * mean
    result += categories * float(beyond)
    return result
