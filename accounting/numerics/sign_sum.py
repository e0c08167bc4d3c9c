"""Sums of many fair signs: what shuffled binary reports come down to.

A report of two possible density ratios against a blanket, 1 - t and 1 + t, is a sign. Then the
hockey-stick divergence of a round is `E[(b + Σ_{i<=K} (a + w s_i))_+]`, with K reports in which
the user's own hides, fair signs s_i, a drift a <= 0 and a swing w >= 0.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.jump_counts import Count, PoissonCount, TermsCount

# Special functions at up to 10⁹ trials err by less (relative; checked in 60 digits). Only Poisson
# upper tails, beyond 4.5 deviations of a mean of 10⁷ or more, are too small, by up to nine tenths:
# differences of tails then hold that mass at 4.5 deviations, which changes sums by below 2e-11.
ROUND_UP = 1e-9
# Tails are summed count by count up to this many signs, and this many counts above half.
_MOST_SIGNS_SUMMED = 1e5
_MOST_STEPS_SUMMED = 2200.0
_REACH = 12.0  # deviations, within which values of K and of the steps down are told apart
_BLOCKS = 16  # of K for each deviation
_DOWN_BLOCKS = 2


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

    m >= 1 has shape (M,), and c >= 0 shape (J,) for all m, or (M, J). Returns shape (M, J).
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
    margin = 1e-10 + 1e-15 * np.sqrt(signs)  # a count above 2**53 is not held to the last unit
    calls = atom * (1.0 + 0.1 * margin) - level * tail * (1.0 - margin)
    return np.where(level < 1.0, np.maximum(calls, 0.0), 0.0) * (1.0 + ROUND_UP)


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


def positive_parts(
    drift: FloatArray, swing: FloatArray, shift: FloatArray, step: FloatArray, count: Count
) -> FloatArray:
    """Returns upper bounds of `E[(b - uD + Σ_{i<=K} (a + w s_i))_+]`, for several a, w, b, u.

    K is in blocks. With the drift of a block's fewest reports and the signs of its most, the sum of
    every K in it becomes larger in the convex order: less goes down, and more spreads. D, the
    number of steps down, is in blocks of its own that count as their least.

    a <= 0, w > 0, b <= 0, u >= 0 and the result have shape (J,). `count` is that of K, and of D
    given K; its own shift and step are not used.
    """
    first, last, chances = _blocks(count)
    downs, weights = _steps_down(count)
    fall = np.multiply.outer(downs, step) - shift - np.multiply.outer(first, drift)
    levels = fall / np.multiply.outer(last, swing)
    # Rows are K, so that all levels of one K share its tails.
    rows = np.moveaxis(levels, 0, 1).reshape(last.size, -1)
    calls = sign_mean_calls(last, rows).reshape(last.size, *levels[:, 0].shape)
    total = np.einsum("dk,k,kdj->j", weights, chances * last, calls) * swing
    # Beyond the blocks every sign may be +1.
    beyond = count.jumps * _law(count, 1.0).sf(float(last[-1]) - 1.0)
    return np.asarray(total * (1.0 + ROUND_UP) + swing * beyond)


def _law(count: Count, left_out: float = 0.0) -> Any:
    """The law of K, of a binomial one without so many of its terms."""
    if isinstance(count, TermsCount):
        return stats.binom(max(count.terms - left_out, 0.0), count.chance)
    return stats.poisson(count.jumps)


@functools.lru_cache(maxsize=8)  # a profile asks in chunks, each time for the same
def _blocks(count: Count) -> tuple[FloatArray, FloatArray, FloatArray]:
    """The first and the last K >= 1 of each block, as floats, and its probability, rounded up."""
    law = _law(count)
    mean, deviation = law.mean(), law.std()
    low, high = mean - _REACH * deviation, mean + (_REACH + 3.0) * deviation + 60.0
    high = min(high, count.terms)
    width = max(deviation / _BLOCKS, 1.0)
    starts = np.unique(np.floor(np.append(1.0, np.arange(max(low, 1.0), high + 1.0, width))))
    first, last = starts, np.append(starts[1:] - 1.0, max(math.ceil(high), starts[-1]))
    # The smaller of two tails keeps its digits.
    chances = np.where(
        last < mean,
        law.cdf(last) - law.cdf(first - 1.0),
        law.sf(first - 1.0) - law.sf(last),
    )
    return first, last, np.maximum(chances, 0.0) * (1.0 + ROUND_UP) + 1e-300


@functools.lru_cache(maxsize=8)
def _steps_down(count: Count) -> tuple[FloatArray, FloatArray]:
    """The fewest steps down in each block of D, and its probability, for each block of K.

    Both of shape (blocks of D, blocks of K).
    """
    reports = _blocks(count)[1]
    law = _law_of_steps(count, reports)
    if law is None:
        return np.zeros((1, reports.size)), np.ones((1, reports.size))
    places = np.arange(-_REACH, _REACH + 1.0 / _DOWN_BLOCKS, 1.0 / _DOWN_BLOCKS)[:, None]
    ends = np.maximum(np.floor(law.mean() + places * law.std()), 0.0)
    through = law.cdf(ends - 1.0) * (1.0 + ROUND_UP)
    starts = np.concatenate([np.zeros((1, reports.size)), ends])
    below = np.concatenate([np.zeros((1, reports.size)), np.maximum.accumulate(through)])
    weights = np.diff(below, axis=0)
    rest = np.maximum(1.0 - below[-1], 0.0) + ROUND_UP * law.sf(starts[-1] - 1.0)
    return starts, np.concatenate([weights, rest[None]])


def _law_of_steps(count: Count, reports: FloatArray) -> Any:
    """The law of D given that K is so many; None if D is 0."""
    if isinstance(count, TermsCount) and count.down > 0.0:
        return stats.binom(count.terms - reports, count.down / (1.0 - count.chance))
    if isinstance(count, PoissonCount) and count.elsewhere > 0.0:
        return stats.poisson(np.full(reports.shape, count.elsewhere))
    return None
