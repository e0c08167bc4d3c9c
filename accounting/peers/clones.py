"""`clones`: a bound for every pair of neighbouring datasets, in any dimension.

Feldman, McMillan, Talwar 2021 ("Hiding among the clones"), made exact where the randomiser is
Gaussian. `docs/theory-clones.md` has the proof; the symbols are the same here.

Among k reports, one of them the differing user's (x0 or x1), every other user's Gaussian is, up to
a defect in total variation, a mixture that holds each of the two with weight a; and the two are,
up to another, mixtures of one pair with odds e^{ε1}. What is left to see is how many of m = C + 1
coins fell heads, C ~ Bin(k-1, 2a), all fair but one. Its profile, with W_m the mean of m signs:

    δ(α) = (1 + α) t E[(W_m - c)_+],   t = tanh(ε1/2),   c = (α - 1) / ((α + 1) t).
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from scipy import special

from accounting.numerics import gaussian
from accounting.numerics.loss_pmf import FloatArray

_Index = npt.NDArray[np.int64]
# Special functions at up to 10⁹ trials err by less (relative; checked in 60 digits).
_ROUND_UP = 1e-9
_NEGLIGIBLE = 1e-32
_MOST_DEVIATIONS = 13.0
_POINTS_PER_DEVIATION = 40
# Up to so many signs, and so many counts above half, tails are summed count by count.
_MOST_SIGNS_SUMMED = 1e5
_MOST_STEPS_SUMMED = 2200.0
# Beyond this ε, 1 - c has few digits left; a profile may stay constant instead.
MOST_EPSILON = 20.0
_MOST_EXCESS = math.expm1(MOST_EPSILON)
_FAR = np.array([6.5, 7.0, 7.5, 8.0, 9.0, 10.0, 12.0, 15.0, 19.0, 25.0, 38.0])


@dataclasses.dataclass(frozen=True)
class CloneParameters:
    """One decomposition of the reports.

    Attributes:
        clone_probability: p = 2a, the chance that another user's report is a clone.
        log_odds: ε1 of the differing user's coin; inf is allowed.
        clone_defect: Total variation of each other user.
        user_defect: Total variation of the differing user.
    """

    clone_probability: float
    log_odds: float
    clone_defect: float
    user_defect: float


def clone_parameters(
    noise_multiplier: float,
    distances: tuple[float, float],
    apart: float,
    others: int,
    defect: float,
) -> CloneParameters:
    """Returns the decomposition whose defect over all reports of a round is at most `defect`.

    Args:
        noise_multiplier: z, the noise over the clip norm, > 0.
        distances: Of another user's record to x0 and to x1, at most, in clip norms.
        apart: Distance of x0 and x1, at most, in clip norms.
        others: k - 1 >= 0.
        defect: η in (0, 1): half of it goes to the differing user, half to the others.
    """
    target = math.log(defect / 2.0)
    one = apart / noise_multiplier
    log_odds = gaussian.least_loss(one, target, True)
    user = math.exp(float(gaussian.log_gaussian_delta(one, log_odds)) - np.logaddexp(0.0, log_odds))
    shifts = [distance / noise_multiplier for distance in distances]
    levels = [
        gaussian.least_loss(shift, target - math.log(2.0 * max(others, 1)), False)
        for shift in shifts
    ]
    # a = 1/(e^{εa} + e^{εb}), and the defect is a (δ(εa) + δ(εb)).
    log_a = -float(np.logaddexp(levels[0], levels[1]))
    deltas = [float(gaussian.log_gaussian_delta(s, e)) for s, e in zip(shifts, levels, strict=True)]
    clone = sum(math.exp(log_a + each) for each in deltas)
    return CloneParameters(2.0 * math.exp(log_a), log_odds, clone, user)


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


def block_starts(mean: float, deviation: float, low: int, high: int) -> _Index:
    """Returns the first counts of blocks that cover low..high, fine where most of the mass is."""
    if high - low < 64:
        return np.arange(low, high + 1, dtype=np.int64)
    # Half a block is an error of step/2 deviations; it need not be below 2e-4 of the mean.
    step = min(max(4e-4 * mean / max(deviation, 1.0), 0.25), 2.0)
    near = np.arange(0.0, 6.0, step)
    z = np.concatenate([-_FAR, -near, near, _FAR])
    points = np.clip(np.round(mean + z * deviation), low, high).astype(np.int64)
    return np.unique(np.append(points, low))


class CloneProfile:
    """δ(α) of one replaced report among k, for several k at once; no sampling, no defect."""

    def __init__(
        self,
        reports: _Index,
        parameters: CloneParameters,
        weights: FloatArray | None = None,
    ) -> None:
        """Tabulates the mean of `E[(W_m - c)_+]` over the number of clones.

        Args:
            reports: k >= 1, increasing, shape (B,).
            parameters: The decomposition.
            weights: Where to be exact: how much each k matters, >= 0, shape (B,); all the same if
                None. Every row is an upper bound whatever the weights.
        """
        p = parameters.clone_probability
        others: FloatArray = reports.astype(np.float64) - 1.0
        shares = np.ones(others.size) if weights is None else weights + 1e-300
        center = float(np.average(others, weights=shares))
        mean = center * p
        variance = float(np.average((others - center) ** 2, weights=shares)) * p * p
        variance += mean * (1.0 - p)
        signs = block_starts(mean + 1.0, math.sqrt(variance), 1, int(reports[-1]))
        # E[f(m)] for falling f, constant on blocks: f_last + Σ (f_i - f_{i+1}) P[m < start_{i+1}].
        below = _binomial_below(signs[None, 1:].astype(np.float64) - 2.0, others[:, None], p)
        chances = np.sum((shares / np.sum(shares))[:, None] * below, axis=0)
        # Joining blocks is safe, so those that hardly anything falls into need no row of the table.
        likely = np.append(chances, 1.0)[1:] > _NEGLIGIBLE
        likely &= np.append(0.0, chances[:-1]) < 1.0 - _ROUND_UP
        signs, below = signs[np.append(True, likely)], below[:, likely]
        typical = math.sqrt(max(mean - 6.0 * math.sqrt(variance), 1.0))
        self.levels = _levels(_MOST_DEVIATIONS / typical)
        table = sign_mean_calls(signs, self.levels)
        steps = np.maximum(table[:-1] - table[1:], 0.0)
        # Not `@`: where cores are busy, the threads of a BLAS make this a hundred times slower.
        self._calls = table[-1] + np.einsum("bi,ij->bj", below, steps)
        self._t = math.tanh(min(parameters.log_odds, 700.0) / 2.0)
        self.log_odds = parameters.log_odds

    def epsilons(self) -> FloatArray:
        """ε at the table's levels; the last, c = 1, at ε1."""
        result: FloatArray = 2.0 * np.arctanh(np.minimum(self.levels * self._t, 1.0 - 1e-16))
        return np.minimum(result, self.log_odds)

    def deltas(self, row: int, epsilons: FloatArray) -> FloatArray:
        """δ(e^ε) for the k of that row, shape of `epsilons`; constant from ε = 20 on."""
        return self.deltas_above_one(row, np.expm1(np.minimum(epsilons, MOST_EPSILON)))

    def deltas_above_one(self, row: int, excess: FloatArray) -> FloatArray:
        """δ(1 + v) for the k of that row, shape of `excess`, v >= 0; constant from ε = 20 on."""
        v = np.minimum(excess, _MOST_EXCESS)
        if self._t == 0.0:
            return np.zeros_like(v)
        # (α - 1)/(α + 1) = tanh(ε/2)
        level = v / ((v + 2.0) * self._t) - 1e-15
        # Convex in c: chords are above.
        calls = np.interp(level, self.levels, self._calls[row])
        result: FloatArray = (v + 2.0) * (self._t * (1.0 + 1e-12)) * calls
        return result


def _levels(reach: float) -> FloatArray:
    """Levels c in [0, 1]: dense up to `reach`, then geometric."""
    count = round(_MOST_DEVIATIONS * _POINTS_PER_DEVIATION)
    dense = np.linspace(0.0, min(reach, 1.0), count + 1)
    if reach >= 1.0:
        return dense
    return np.concatenate([dense, np.geomspace(reach, 1.0, 60)[1:]])
