"""Hiding among the clones (Feldman, McMillan, Talwar 2021 and 2022), numerically.

Every other user's ε₀-LDP report is, with probability p = e^{-ε₀}, a clone of the differing user's;
what is left to see is how many of m = C + 1 coins fell heads, C ~ Bin(k-1, p), all fair but one of
odds e^{ε₀} (Koskela et al. 2021). In the analysis of 2022 ("Stronger privacy amplification by
shuffling") p is larger, 2/(e^{ε₀}+1). Its profile, with W_m the mean of m signs:

    δ(α) = (1 + α) t E[(W_m - c)_+],   t = tanh(ε₀/2),   c = (α - 1) / ((α + 1) t).
"""

import math
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.sign_sum import ROUND_UP, sign_mean_calls

_Index = npt.NDArray[np.int64]
_NEGLIGIBLE = 1e-32
_MOST_DEVIATIONS = 13.0
_POINTS_PER_DEVIATION = 40
# Beyond this ε, 1 - c has few digits left; the profile may stay constant instead.
_MOST_EPSILON = 20.0
_FAR = np.array([6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 12.0, 15.0, 19.0, 25.0, 38.0])


def clones_delta(
    reports: int,
    local_epsilon: float,
    epsilons: npt.ArrayLike,
    year: Literal[2021, 2022] = 2021,
) -> FloatArray:
    """Returns δ(ε) of k shuffled reports of an ε₀-LDP randomiser, both directions, rounded up.

    k >= 1, ε₀ > 0, and ε >= 0 of shape (K,); δ is constant from ε = 20 on, and 0 from ε₀ on. The
    analysis of 2022 is, by its erratum, for some randomisers only.
    """
    share = math.exp(-local_epsilon)
    if year == 2022:
        share = 2.0 * share / (1.0 + share)
    levels, calls = _mean_calls(reports, share)
    asked = np.asarray(epsilons, dtype=np.float64)
    t = math.tanh(min(local_epsilon, 700.0) / 2.0)
    v = np.expm1(np.minimum(asked, _MOST_EPSILON))
    # (α - 1)/(α + 1) = tanh(ε/2). Calls are convex in c: chords are above.
    level = v / ((v + 2.0) * t) - 1e-15
    found = (v + 2.0) * (t * (1.0 + 1e-12)) * np.interp(level, levels, calls)
    # What a coin of odds e^{ε₀} can lose at most.
    result: FloatArray = np.where(asked >= local_epsilon, 0.0, found)
    return result


def _mean_calls(reports: int, p: float) -> tuple[FloatArray, FloatArray]:
    """Levels c, and upper bounds of the mean of `E[(W_m - c)_+]` over the number of clones."""
    others = np.array([reports - 1.0])
    mean = (reports - 1.0) * p
    deviation = math.sqrt(mean * (1.0 - p))
    signs = _block_starts(mean + 1.0, deviation, 1, reports)
    # E[f(m)] for falling f, constant on blocks: f_last + Σ (f_i - f_{i+1}) P[m < start_{i+1}].
    below = _binomial_below(signs[1:].astype(np.float64) - 2.0, others, p)
    # Joining blocks is safe, so those that hardly anything falls into need no row of the table.
    likely = np.append(below, 1.0)[1:] > _NEGLIGIBLE
    likely &= np.append(0.0, below[:-1]) < 1.0 - ROUND_UP
    signs, below = signs[np.append(True, likely)], below[likely]
    levels = _levels(_MOST_DEVIATIONS / math.sqrt(max(mean - 6.0 * deviation, 1.0)))
    table = sign_mean_calls(signs, levels)
    steps = np.maximum(table[:-1] - table[1:], 0.0)
    # Not `@`: where cores are busy, the threads of a BLAS make this a hundred times slower.
    calls: FloatArray = table[-1] + np.einsum("i,ij->j", below, steps)
    return levels, calls


def _binomial_below(k: FloatArray, n: FloatArray, p: float) -> FloatArray:
    """P[Bin(n, p) <= k], raised by 1e-9 (relative); 1 far above the mean, 0 for k < 0."""
    k, n = np.broadcast_arrays(k, n)
    result = np.where(k < 0.0, 0.0, 1.0)
    far = n * p + 5.5 * np.sqrt(n * p * (1.0 - p)) + 5.0
    inside = (k >= 0.0) & (k < np.minimum(n, far))
    tails = special.betainc(n[inside] - k[inside], k[inside] + 1.0, 1.0 - p)
    result[inside] = np.minimum(tails * (1.0 + ROUND_UP), 1.0)
    return result


def _block_starts(mean: float, deviation: float, low: int, high: int) -> _Index:
    """Returns the first counts of blocks that cover low..high, fine where most of the mass is."""
    if high - low < 64:
        return np.arange(low, high + 1, dtype=np.int64)
    # Half a block is an error of step/2 deviations; it need not be below 2e-4 of the mean.
    step = min(max(4e-4 * mean / max(deviation, 1.0), 0.25), 2.0)
    near = np.arange(0.0, 6.0, step)
    z = np.concatenate([-_FAR, -near, near, _FAR])
    points = np.clip(np.round(mean + z * deviation), low, high).astype(np.int64)
    return np.unique(np.append(points, low))


def _levels(reach: float) -> FloatArray:
    """Levels c in [0, 1]: dense up to `reach`, then geometric."""
    count = round(_MOST_DEVIATIONS * _POINTS_PER_DEVIATION)
    dense = np.linspace(0.0, min(reach, 1.0), count + 1)
    if reach >= 1.0:
        return dense
    return np.concatenate([dense, np.geomspace(reach, 1.0, 60)[1:]])
