"""Shuffled ε₀-LDP reports as sums of fair signs: clones, and k-ary randomised response.

A user's own report hides among B ~ Bin(n-1, p) others, so that m = B + 1 are seen. For every f,
`E[f(m)] = E[K f(K)]/(np)` with K ~ Bin(n, p). So each δ here, which averages a mean of m signs over
m, is a sum of K signs, and `numerics.sign_sum` bounds that from above. It holds in both directions.
"""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.jump_counts import TermsCount
from shufl.accounting.numerics.sign_sum import positive_parts

# Beyond this ε, 1 - c has few digits left; the profile may stay constant instead.
_MOST_EPSILON = 20.0

Adversary = Literal["strong", "weak"]


def clones_delta(
    reports: int,
    local_epsilon: float,
    epsilons: npt.ArrayLike,
    year: Literal[2021, 2022] = 2021,
) -> FloatArray:
    """Returns δ(ε) of k shuffled reports of an ε₀-LDP randomiser (Feldman, McMillan, Talwar).

    Every other user's report is, with probability p = e^{-ε₀}, a clone of the differing user's;
    what is left to see is how many of m = C + 1 coins fell heads, C ~ Bin(k-1, p), all fair but one
    of odds e^{ε₀} (Koskela et al. 2021). In the analysis of 2022 ("Stronger privacy amplification
    by shuffling"), which is by its erratum for some randomisers only, p is 2/(e^{ε₀}+1). With W_m
    the mean of m signs

        δ(α) = (1 + α) t E[(W_m - c)_+],   t = tanh(ε₀/2),   c = (α - 1) / ((α + 1) t).

    k >= 1, ε₀ > 0, and ε >= 0 of shape (K,); δ is constant from ε = 20 on, and 0 from ε₀ on.
    """
    share = math.exp(-local_epsilon)
    if year == 2022:
        share = 2.0 * share / (1.0 + share)
    asked = np.asarray(epsilons, dtype=np.float64)
    t = math.tanh(min(local_epsilon, 700.0) / 2.0)
    v = np.expm1(np.minimum(asked, _MOST_EPSILON))
    level = np.maximum(v / ((v + 2.0) * t) - 1e-15, 0.0)
    none = np.zeros_like(v)
    calls = positive_parts(-level, np.ones_like(v), none, none, TermsCount(reports, share))
    found = (v + 2.0) * (t * (1.0 + 1e-12)) * calls / (reports * share)
    return np.where(asked >= local_epsilon, 0.0, np.minimum(found, 1.0))


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

    This is the hockey-stick divergence itself. The published analyses of the strong adversary take
    P[loss >= ε], which is larger.

    n >= 1, k >= 2, ε₀ > 0 of one report, and ε >= 0 of shape (K,).
    """
    share, near = blanket_share(categories, local_epsilon), 2.0 / categories
    own = share if adversary == "weak" else 0.0
    asked = np.asarray(epsilons, dtype=np.float64)
    falls, swing = np.expm1(asked), (1.0 - own) / near
    count = TermsCount(reports, share * near, share * (1.0 - near))
    found = positive_parts(
        -falls * (own + swing), swing * (2.0 + falls), np.zeros_like(falls), own * falls, count
    )
    result = np.minimum(found / (reports * share), 1.0)
    if adversary == "weak":  # who sees no more than the reports themselves, each ε₀-LDP
        result[asked >= local_epsilon] = 0.0
    return result
