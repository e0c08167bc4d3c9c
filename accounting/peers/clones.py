"""Hiding among the clones (Feldman, McMillan, Talwar 2021), numerically.

Every other user's ε₀-LDP report is, with probability p = e^{-ε₀}, a clone of the differing user's;
what is left to see is how many of m = C + 1 coins fell heads, C ~ Bin(k-1, p), all fair but one of
odds e^{ε₀} (Koskela et al. 2021). Its profile, with W_m the mean of m signs:

    δ(α) = (1 + α) t E[(W_m - c)_+],   t = tanh(ε₀/2),   c = (α - 1) / ((α + 1) t).
"""

import math

import numpy as np
import numpy.typing as npt
from scipy import special

from accounting import validation
from accounting.numerics import FloatArray

_Index = npt.NDArray[np.int64]
# Special functions at up to 10⁹ trials err by less (relative; checked in 60 digits).
_ROUND_UP = 1e-9
_NEGLIGIBLE = 1e-32
_MOST_DEVIATIONS = 13.0
_POINTS_PER_DEVIATION = 40
# Up to so many signs, and so many counts above half, tails are summed count by count.
_MOST_SIGNS_SUMMED = 1e5
_MOST_STEPS_SUMMED = 2200.0
# Beyond this ε, 1 - c has few digits left; the profile may stay constant instead.
_MOST_EPSILON = 20.0
_FAR = np.array([6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 12.0, 15.0, 19.0, 25.0, 38.0])


def check_reports(reports: int, local_epsilon: float) -> None:
    """Refuses what no analysis of shuffled ε₀-LDP reports is made for.

    Raises:
        ValueError: Fewer than one report, or an ε₀ that is not a positive number.
    """
    validation.integer("number of reports", reports, 1)
    validation.real("local epsilon", local_epsilon, "(0, inf)")


def clones_delta(reports: int, local_epsilon: float, epsilons: npt.ArrayLike) -> FloatArray:
    """Returns δ(ε) of k shuffled reports of any ε₀-LDP randomiser, both directions, rounded up.

    Args:
        reports: k >= 1.
        local_epsilon: ε₀ > 0 of one report.
        epsilons: ε >= 0, shape (K,); δ is constant from ε = 20 on, and 0 from ε₀ on.

    Raises:
        ValueError: A value outside its range.
    """
    check_reports(reports, local_epsilon)
    levels, calls = _mean_calls(reports, math.exp(-local_epsilon))
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
    likely &= np.append(0.0, below[:-1]) < 1.0 - _ROUND_UP
    signs, below = signs[np.append(True, likely)], below[likely]
    levels = _levels(_MOST_DEVIATIONS / math.sqrt(max(mean - 6.0 * deviation, 1.0)))
    table = sign_mean_calls(signs, levels)
    steps = np.maximum(table[:-1] - table[1:], 0.0)
    # Not `@`: where cores are busy, the threads of a BLAS make this a hundred times slower.
    calls: FloatArray = table[-1] + np.einsum("i,ij->j", below, steps)
    return levels, calls


def _log_fair_pmf(a: FloatArray, m: FloatArray) -> FloatArray:
    """log P[Bin(m, 1/2) = a] for 0 <= a <= m: Loader's saddle point form, no large cancellation."""
    b = m - a
    with np.errstate(divide="ignore", invalid="ignore"):
        v = (a - b) / np.maximum(m, 1.0)
        entropy = 0.5 * m * (np.log1p(-v * v) + 2.0 * v * np.arctanh(v))
        inside = 0.5 * np.log(m / (2.0 * np.pi * a * b)) - entropy
        inside += _stirling(m) - _stirling(a) - _stirling(b)
    return np.where((a <= 0.0) | (b <= 0.0), -m * math.log(2.0), inside)


def _stirling(n: FloatArray) -> FloatArray:
    """`log n! - log(sqrt(2πn) (n/e)^n)`."""
    with np.errstate(divide="ignore", invalid="ignore"):
        series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / n**2) / n**2) / n**2) / n
        exact = special.gammaln(n + 1.0) - (n + 0.5) * np.log(n) + n - 0.5 * math.log(2 * math.pi)
    return np.where(n > 15.0, series, exact)


def sign_mean_calls(m: npt.ArrayLike, c: npt.ArrayLike) -> FloatArray:
    """Returns upper bounds of E[(W_m - c)_+], W_m the mean of m independent fair signs.

    `½ P[Bin(m-1, ½) = a0 - 1] - c P[Bin(m, ½) >= a0]`, a0 the least count above m(1+c)/2.

    Args:
        m: Numbers of signs >= 1, shape (M,).
        c: Levels >= 0, shape (J,) for all m, or (M, J).

    Returns:
        Shape (M, J).
    """
    signs = np.asarray(m, dtype=np.float64)[:, None]
    level: FloatArray = np.atleast_2d(np.asarray(c, dtype=np.float64))
    first = np.minimum(np.floor(signs * (1.0 + level) / 2.0) + 1.0, signs)
    atom, tail = np.empty_like(first), np.empty_like(first)
    steps = first - _next_to_half(signs)
    few = signs[:, 0] <= _MOST_SIGNS_SUMMED
    summed = few[:, None] & (steps <= _MOST_STEPS_SUMMED)
    if np.any(few):
        width = int(np.max(steps, where=summed, initial=0.0))
        pmf, sums = _fair_tails(signs[few, 0], width)
        places: npt.NDArray[np.intp] = np.minimum(steps[few], width).astype(np.intp)
        # ½ P[Bin(m-1, ½) = a - 1] = (a/m) P[Bin(m, ½) = a]
        atom[few] = first[few] / signs[few] * np.take_along_axis(pmf, places, axis=1)
        tail[few] = np.take_along_axis(sums, places, axis=1)
    rest, trials = first[~summed], np.broadcast_to(signs, first.shape)[~summed]
    atom[~summed] = 0.5 * np.exp(_log_fair_pmf(rest - 1.0, trials - 1.0))
    tail[~summed] = special.betainc(rest, trials - rest + 1.0, 0.5)
    calls = atom * (1.0 + 1e-11) - level * tail * (1.0 - 1e-10)
    result: FloatArray = np.where(level < 1.0, np.maximum(calls, 0.0), 0.0) * (1.0 + _ROUND_UP)
    return result


def _next_to_half(signs: FloatArray) -> FloatArray:
    """The least count of heads above half."""
    return np.asarray(np.floor(signs / 2.0) + 1.0)


def _fair_tails(signs: FloatArray, width: int) -> tuple[FloatArray, FloatArray]:
    """P[Bin(m, ½) = a] and P[Bin(m, ½) >= a] for the first width + 1 counts a above half.

    Products and sums of positive terms: they err by less than 1e-12 (relative).
    """
    start = _next_to_half(signs)
    counts: FloatArray = np.add.outer(start, np.arange(width + 1.0))
    ratios: FloatArray = np.empty(counts.shape)
    ratios[:, 0] = np.exp(_log_fair_pmf(start, signs))
    ratios[:, 1:] = np.maximum(signs[:, None] - counts[:, :-1], 0.0) / counts[:, 1:]
    pmf: FloatArray = np.cumprod(ratios, axis=1, dtype=np.float64)
    beyond: FloatArray = counts[:, -1] + 1.0
    inside = beyond <= signs
    sums = pmf.copy()
    sums[inside, -1] += special.betainc(beyond[inside], signs[inside] - beyond[inside] + 1.0, 0.5)
    return pmf, np.cumsum(sums[:, ::-1], axis=1)[:, ::-1]


def _binomial_below(k: FloatArray, n: FloatArray, p: float) -> FloatArray:
    """P[Bin(n, p) <= k], raised by 1e-9 (relative); 1 far above the mean, 0 for k < 0."""
    k, n = np.broadcast_arrays(k, n)
    result = np.where(k < 0.0, 0.0, 1.0)
    far = n * p + 5.5 * np.sqrt(n * p * (1.0 - p)) + 5.0
    inside = (k >= 0.0) & (k < np.minimum(n, far))
    tails = special.betainc(n[inside] - k[inside], k[inside] + 1.0, 1.0 - p)
    result[inside] = np.minimum(tails * (1.0 + _ROUND_UP), 1.0)
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
