"""δ(ε) of many composed losses: one tilted Fourier sum, with its rounding error bounded.

With P[loss = x] replaced by `P[x] e^{θx} / M(θ)`, δ(ε) of the sum S of all losses is

    P[S = ∞] + Π M_i(θ)^{c_i} e^{-θε} Σ_{y>0} (1 - e^{-y}) e^{-θy} P_θ[S = ε + y],

a sum of moderate terms if θ fits, however small δ is: rounding then costs a fraction of δ, not an
absolute 1e-16 a round. The lattice sum is taken in Fourier space, over a window: mass outside it
folds back into it and can only be added; what lies beyond its upper end weighs at most e^{-45}.
After many rounds few frequencies carry anything, so asking again after one more round is cheap.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy import fft

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.loss_pmf import LossPmf

# A bound of the error of one Fourier coefficient of a distribution (FFT of up to 2²² terms) and,
# in relative terms, of one logarithm of M. The observed errors are about fifty times less.
_UNIT = 2e-14
_PHASE_UNIT = 1e-15  # of ω j, in units of ω j
_WINDOW_ABOVE = 45.0  # in units of 1/θ
_WINDOW_BELOW = 9.0  # in standard deviations of the tilted sum
_DROPPED = 1e-12
_RARE = 1e-12  # tilted probability
_LEAST_TOTAL = 1e-300  # more than terms that underflow can add up to
_MAX_WINDOW = 2**22
_LONG_WINDOW = 2**18
_COARSENED = 5e-5  # of ε, what the mesh of a long window may cost
_EVEN = 12.0  # θ times the deviation of the tilted sum; 8 for a Gaussian at δ = 1e-15
_FEW_FREQUENCIES = 512
# A rare large loss can call for a tilt far below that of a Gaussian of the same deviation.
_TILT_OCTAVES = 64.0
_TILT_HALVINGS = 11
_LEAST_RATE = 2.0

Counts = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Target:
    """What will be asked of a composition: ε at `delta`, or δ at `epsilon` (the other is None)."""

    delta: float | None = None
    epsilon: float | None = None


def count_block(count: int) -> tuple[int, int]:
    """Returns the first and last count that share a tilt and a window with `count`.

    Blocks are octaves: at their lower end the tilted sum has its mean some two standard deviations
    off the answer, which costs a few digits of fourteen.
    """
    first = 1 << max(count.bit_length() - 1, 0)
    return first, 2 * first - 1


# Sums of products are written out where they may be long: on cores that others keep busy, the
# threads that a BLAS starts for a product of 10⁴ numbers can take a hundred times its time.


class _Tilted:
    """One loss distribution under exponential tilts."""

    def __init__(self, pmf: LossPmf) -> None:
        kept = pmf.probs > 0.0
        self._losses, self._probs = pmf.losses[kept], pmf.probs[kept]
        self._log_probs = np.log(self._probs)
        self.log_finite = math.log1p(-pmf.infinity) if pmf.infinity < 1.0 else -math.inf

    def cumulants(self, theta: float) -> tuple[float, float, float]:
        """log M(θ), and the mean and variance under the tilt."""
        log_m, mean, weights = self._weighed(theta)
        return log_m, mean, float(np.sum(weights * (self._losses - mean) ** 2))

    def _weighed(self, theta: float) -> tuple[float, float, FloatArray]:
        if not self._losses.size:
            return -math.inf, 0.0, self._losses
        exponents = self._log_probs + theta * self._losses
        top = float(np.max(exponents))
        weights = np.exp(exponents - top)
        total = float(np.sum(weights))
        weights /= total
        return top + math.log(total), float(np.sum(weights * self._losses)), weights

    def reach(self, theta: float, chance: float) -> float:
        """The largest loss that is not rarer than `chance` under the tilt."""
        if not self._losses.size:
            return 0.0
        above = np.cumsum(self._weighed(theta)[2][::-1])[::-1]
        return float(self._losses[np.flatnonzero(above > chance)[-1]])


class Composition:
    """How much is lost after c_i rounds of kind i, for all counts in one block.

    ε and δ it returns are upper bounds, up to the model of rounding errors at the top of the file.
    """

    def __init__(
        self,
        pmfs: Sequence[LossPmf],
        blocks: Sequence[tuple[int, int]],
        target: Target,
        tilt: float | None = None,
    ) -> None:
        """Tilts, and transforms each distribution once; their sum is exact near `target`.

        Args:
            pmfs: One round's loss of each kind, all of one mesh.
            blocks: The counts to be asked for, per kind (see `count_block`).
            tilt: That of `fitted_tilt`, if it is known; every tilt gives upper bounds.
        """
        if len({pmf.interval for pmf in pmfs}) != 1:
            raise ValueError("losses to be composed must share one mesh")
        self._h = pmfs[0].interval
        tilted = [_Tilted(pmf) for pmf in pmfs]
        self._infinity = np.array([part.log_finite for part in tilted])
        self._reach = sum(
            pmf.half_width * block[1] for pmf, block in zip(pmfs, blocks, strict=True)
        )
        # Nothing between no loss and an infinite one: δ is the infinite mass.
        self._all_or_nothing = bool(np.any(np.isneginf(self._infinity))) or not any(
            np.any(pmf.probs[pmf.half_width + 1 :] > 0.0) for pmf in pmfs
        )
        if self._all_or_nothing:
            return
        most = [block[1] for block in blocks]
        self._theta = _tilt(tilted, most, target) if tilt is None else tilt
        cumulants = [part.cumulants(self._theta) for part in tilted]
        self._log_m = np.array([each[0] for each in cumulants])
        above, below = _window(self._theta, cumulants, most, self._h)
        self._beyond = math.exp(-self._theta * self._h * above)
        # A rare loss above all that counts would fold onto it: make room for one of each kind.
        far = max(part.reach(self._theta, _RARE / c) for part, c in zip(tilted, most, strict=True))
        room = max(above, min(math.ceil(far / self._h) + below, _MAX_WINDOW))
        self._size = fft.next_fast_len(min(room + below, 2 * self._reach + above + 2), real=True)
        self._transform(pmfs, [block[0] for block in blocks], above)

    def _transform(self, pmfs: Sequence[LossPmf], least: list[int], above: int) -> None:
        """Keeps the frequencies that carry something at the least counts of the block."""
        size, theta, h = self._size, self._theta, self._h
        y = np.arange(1, min(above, size) + 1) * h
        test = np.zeros(size)
        test[np.arange(1, y.size + 1) % size] = -np.expm1(-y) * np.exp(-theta * y)
        weights = np.conj(fft.rfft(test)) * (2.0 / size)
        weights[0] *= 0.5
        if size % 2 == 0:
            weights[-1] *= 0.5
        logs = np.empty((len(pmfs), weights.size), dtype=np.complex128)
        for i, pmf in enumerate(pmfs):
            logs[i] = self._log_coefficients(pmf, float(self._log_m[i]))
        fewest = np.array(least, dtype=np.float64)
        magnitude = np.abs(weights) * np.exp(_combined(fewest, logs.real))
        order = np.sort(magnitude)
        droppable = np.cumsum(order)
        floor = _DROPPED * float(np.max(magnitude))
        dropped = int(np.searchsorted(droppable, floor))
        threshold = order[min(dropped, order.size - 1)]
        kept = magnitude >= threshold
        self._dropped = float(droppable[dropped - 1]) if dropped else 0.0
        self._kept = np.flatnonzero(kept)
        self._frequencies = self._kept * (2.0 * math.pi / size)
        self._weights = weights[kept]
        self._magnitudes = np.abs(self._weights)
        self._log_sizes, self._angles = logs.real[:, kept], logs.imag[:, kept]
        self._largest = float(np.max(np.abs(weights)))
        self._sensitivity = _UNIT * np.exp(-self._log_sizes)

    def _log_coefficients(self, pmf: LossPmf, log_m: float) -> npt.NDArray[np.complex128]:
        """log of the Fourier coefficients of one tilted loss, folded into the window."""
        with np.errstate(divide="ignore"):
            tilted = np.exp(np.log(pmf.probs) + self._theta * pmf.losses - log_m)
        place = np.arange(-pmf.half_width, pmf.half_width + 1) % self._size
        folded = np.bincount(place, weights=tilted, minlength=self._size)
        coefficients = fft.rfft(folded)
        size = np.clip(np.abs(coefficients), _UNIT, 1.0)
        result: npt.NDArray[np.complex128] = np.log(size) + 1j * np.angle(coefficients)
        result[0] = 0.0
        return result

    def _finite_part(self, counts: FloatArray) -> "_Spectrum":
        bare = np.exp(_combined(counts, self._log_sizes))
        angles = _combined(counts, self._angles)
        terms = np.empty(bare.size, dtype=np.complex128)
        np.multiply(bare, np.cos(angles), out=terms.real)
        np.multiply(bare, np.sin(angles), out=terms.imag)
        sizes = self._magnitudes * bare
        slack = float(np.sum(sizes * _combined(counts, self._sensitivity)))
        slack += _UNIT * self._largest * float(np.sum(bare)) + self._dropped + self._beyond
        return _Spectrum(
            self._frequencies,
            self._weights * terms,
            slack,
            _PHASE_UNIT * float(np.sum(sizes * self._frequencies)),
            float(counts @ self._log_m) + _UNIT * float(np.sum(counts)),
            self._theta * self._h,
            self._table(self._weights * terms) if terms.size > _FEW_FREQUENCIES else None,
        )

    def _table(self, terms: npt.NDArray[np.complex128]) -> FloatArray:
        """The sum at every point of the window at once."""
        spectrum = np.zeros(self._size // 2 + 1, dtype=np.complex128)
        spectrum[self._kept] = terms * (0.5 * self._size)
        spectrum[0] *= 2.0
        if self._size % 2 == 0:
            spectrum[-1] *= 2.0
        return np.asarray(fft.irfft(spectrum, self._size))

    def _infinite_mass(self, counts: FloatArray) -> float:
        return abs(math.expm1(float(counts @ self._infinity))) * (1.0 + 1e-12)

    def epsilon(self, counts: Counts, delta: float) -> float:
        """Returns the least ε >= 0 with δ(ε) <= `delta`; inf if the infinite loss exceeds it."""
        times = np.array(counts, dtype=np.float64)
        left = delta - self._infinite_mass(times)
        if left <= 0.0:
            return math.inf
        if self._all_or_nothing:
            return 0.0
        finite = self._finite_part(times)
        low, high = finite.bracket(left, self._reach)
        if high == 0:
            return 0.0
        here, there = finite.at(low), finite.at(high)
        share = min((here - left) / (here - there), 1.0) if here > there else 1.0
        # δ is linear in e^ε between two points of the grid.
        epsilon = low * self._h + math.log1p(math.expm1(self._h * (high - low)) * share)
        return epsilon * (1.0 + 1e-14)

    def answer(self, counts: Counts, target: Target) -> float:
        """Returns ε or δ, whichever the target leaves open."""
        if target.delta is not None:
            return self.epsilon(counts, target.delta)
        assert target.epsilon is not None
        return self.delta(counts, target.epsilon)

    def delta(self, counts: Counts, epsilon: float) -> float:
        """Returns an upper bound of δ at `epsilon` >= 0."""
        times = np.array(counts, dtype=np.float64)
        infinite = self._infinite_mass(times)
        if self._all_or_nothing or epsilon >= self._reach * self._h:
            return min(infinite, 1.0)
        finite = self._finite_part(times)
        low = math.floor(epsilon / self._h)
        share = math.expm1(epsilon - low * self._h) / math.expm1(self._h)
        value = (1.0 - share) * finite.at(low) + share * finite.at(low + 1)
        return min(infinite + value, 1.0)


@dataclasses.dataclass(frozen=True, eq=False)
class _Spectrum:
    """`δ(jh) = e^{log_scale - j θh} (Re Σ_k terms_k e^{i ω_k j} + slacks)`, finite losses only."""

    frequencies: FloatArray
    terms: npt.NDArray[np.complex128]
    slack: float
    slack_per_point: float
    log_scale: float
    decay: float
    table: FloatArray | None

    def at(self, j: int) -> float:
        """An upper bound of δ at the grid's point j."""
        if self.table is not None:
            total = max(float(self.table[j % self.table.size]), 0.0)
        else:
            phases = np.exp(1j * (self.frequencies * j))
            total = max(float(np.real(self.terms @ phases)), 0.0)
        total = max(total + self.slack + self.slack_per_point * j, _LEAST_TOTAL)
        return math.exp(min(self.log_scale - self.decay * j + math.log(total), 0.0))

    def bracket(self, delta: float, reach: int) -> tuple[int, int]:
        """Neighbours low, high with δ(low) > delta >= δ(high); (0, 0) if δ(0) <= delta."""
        # Σ_y (1 - e^{-y}) e^{-θy} P_θ <= 1 bounds δ(jh) by e^{log_scale - j θh}.
        chernoff = math.ceil((self.log_scale - math.log(delta)) / self.decay)
        low, high = -1, min(max(chernoff, 0), reach)
        if not self.at(high) <= delta:  # past the last loss, or by the slack alone
            high = reach
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.at(middle) <= delta else (middle, high)
        return max(low, 0), high


def fitted_tilt(
    pmfs: Sequence[LossPmf], blocks: Sequence[tuple[int, int]], target: Target
) -> tuple[float, float]:
    """Returns the tilt of a `Composition`, and the mesh it should have: the given or a coarser one.

    Every mesh gives upper bounds. Chords of length h add at most h²/12 to a loss's mean and twice
    that to its variance, hence to ε about a share `h² (1 + θ)/12` of the tilted mean at most.
    """
    tilted = [_Tilted(pmf) for pmf in pmfs]
    most = [block[1] for block in blocks]
    theta = _tilt(tilted, most, target)
    cumulants = [part.cumulants(theta) for part in tilted]
    interval = pmfs[0].interval
    points = sum(_window(theta, cumulants, most, interval))
    mean, variance = (
        math.fsum(c * each[i] for c, each in zip(most, cumulants, strict=True)) for i in (1, 2)
    )
    # A sum that is wider has rare large losses in it, and the answer may lie in its narrow bulk.
    even = theta * math.sqrt(variance) < _EVEN
    widest = math.sqrt(12.0 * _COARSENED * max(mean, 0.0) / sum(most) / (1.0 + theta))
    while points > _MAX_WINDOW or (even and points > _LONG_WINDOW and 2.0 * interval <= widest):
        interval, points = 2.0 * interval, points // 2
    return theta, interval


def _window(
    theta: float,
    cumulants: Sequence[tuple[float, float, float]],
    counts: Sequence[int],
    interval: float,
) -> tuple[int, int]:
    """Points of the window above and below the tilted sum."""
    deviation = math.sqrt(sum(c * each[2] for c, each in zip(counts, cumulants, strict=True)))
    above = min(math.ceil(_WINDOW_ABOVE / theta / interval) + 1, _MAX_WINDOW)
    below = min(math.ceil(_WINDOW_BELOW * deviation / interval) + 1, _MAX_WINDOW)
    return above, below


def _combined(counts: FloatArray, rows: FloatArray) -> FloatArray:
    """Σ_i counts_i rows_i, without the threads of a BLAS."""
    result: FloatArray = counts[0] * rows[0]
    for count, row in zip(counts[1:], rows[1:], strict=True):
        result += count * row
    return result


def _tilt(parts: Sequence[_Tilted], counts: Sequence[int], target: Target) -> float:
    """θ that makes Chernoff's bound of δ(ε) least, to within a few percent."""

    def totals(values: Iterable[tuple[float, ...]]) -> list[float]:
        return [
            math.fsum(count * value for count, value in zip(counts, column, strict=True))
            for column in zip(*values, strict=True)
        ]

    log_finite, mean, variance = totals(part.cumulants(0.0) for part in parts)
    deviation = math.sqrt(variance) or 1.0
    if target.delta is not None:
        level = 1.0 - math.log(max(target.delta, 1e-300))
    else:
        assert target.epsilon is not None
        level = _LEAST_RATE + 0.5 * max(target.epsilon - mean, 0.0) ** 2 / max(variance, 1e-300)
    high = 2.0 * math.sqrt(2.0 * level) / deviation
    low = high * math.exp2(-_TILT_OCTAVES)
    for _ in range(_TILT_HALVINGS):
        theta = math.sqrt(low * high)
        log_m, tilted_mean, _ = totals(part.cumulants(theta) for part in parts)
        rate = theta * tilted_mean - (log_m - log_finite)
        if target.delta is not None:
            beyond = rate > level
        else:
            # An ε below the mean of the loss needs no tilt, but the window does.
            beyond = tilted_mean > (target.epsilon or 0.0) and rate > _LEAST_RATE
        low, high = (low, theta) if beyond else (theta, high)
    # A tilt that is too small costs digits; one past a jump of the tilted mean loses the answer.
    return low
