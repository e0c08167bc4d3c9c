"""The local Gaussian mechanism: clip to C, add N(0, (zC)^2 I), round to a fixed grid of 16 bits.

A device makes its user's report with it. The shuffler makes blankets with it, which are reports of
the zero update. Both use the same arithmetic, so nothing in a report tells which of the two it is.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy import linalg

from shufl.protocol.mechanisms.report_draws import AT_ONCE, Normal, to_normals
from shufl.protocol.validation import Checked, ClipNorm, NotNegative

_LARGEST = 2**15 - 1
_NOISE_RANGE = 12.0  # standard deviations that the grid holds; beyond lie 4e-33 of the law
# Where floats do not decide an entry: docs/theory/gaussian.md, section 7.
_NEAR, _RARE = 2.0**-26, 2**37
_LOG_FALSE_REJECT = math.log(1e12)  # an honest report is rejected with probability below 1e-12


class GaussianMechanism(Checked):
    """Makes a report of an update: clips it to norm C, and adds noise `N(0, (zC)² I)`.

    Attributes:
        clip_norm: C, the largest Euclidean norm of an update before noise, in [1e-18, 1e15]. No ε
            depends on it.
        noise_multiplier: z, the noise's standard deviation in units of C, in [0, 1e15]. 0 is not
            private.

    Guarantee:
        The reports of any two updates of a user are rounded normal vectors with standard deviation
        zC in each entry, and their means are at most 2C apart.
    """

    least_noise: ClassVar[float] = 0.2
    """The least z that a search recommends, whatever ε says: ε is 0 even without noise where few
    rounds at a small γ leave a user's probability to take part at all below δ."""
    by_entry: ClassVar[bool] = True
    """Whether a report of zeros can be made piece by piece, each from its own draws."""

    name: Literal["gaussian"] = "gaussian"
    clip_norm: ClipNorm = 1.0
    noise_multiplier: Annotated[NotNegative, Field(le=1e15, description="a number in [0, 1e15]")]

    @property
    def is_private(self) -> bool:
        """Whether there is any noise."""
        return self.noise_multiplier > 0.0

    @staticmethod
    def ratio_variance(noise_multiplier: np.ndarray) -> np.ndarray:
        """Returns an upper bound of the variance of a report's density over a blanket's.

        Args:
            noise_multiplier: z > 0, any shape.

        Returns:
            e^{1/z²} - 1, of the same shape.
        """
        return np.asarray(np.expm1(noise_multiplier**-2.0))

    @staticmethod
    def draws(dimension: int) -> int:
        """Returns how many N(0, 1) draws a report takes: one for each entry.

        Args:
            dimension: d, the number of entries.
        """
        return dimension

    def noise_deviation(self, dimension: int) -> float:
        """Returns the standard deviation of the noise in one entry of a report: zC.

        Args:
            dimension: d, the number of entries, on which it does not depend.
        """
        return self.noise_multiplier * self.clip_norm

    def unit(self, dimension: int) -> float:
        """Returns what one step of a report's integers stands for: (C + 12 zC) / 32 767.

        Args:
            dimension: d, the number of entries, on which it does not depend.
        """
        return self.clip_norm * (1 + _NOISE_RANGE * self.noise_multiplier) / _LARGEST

    def report(self, update: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Returns one report: clip(update, C) + zC * draws, in units, rounded and saturated.

        The sum is formed in float64. Draws of 64 random bits still give exactly the integers of
        real arithmetic: the few entries that float64 does not decide are decided by more digits.
        (The time that this takes tells how the noise fell, and nothing of the update.) Rounding and
        saturating come after the noise, so they are post-processing.

        Args:
            update: Shape (d,), any float type.
            draws: Of a `Randomness`, shape (d,).

        Returns:
            The report in steps of `unit(d)`: int16 of shape (d,).
        """
        deviation = Fraction(self.noise_multiplier) * Fraction(self.clip_norm)
        clipped = clip(update, self.clip_norm)
        noisy = rounded(clipped, draws, deviation, self.unit(draws.size), _LARGEST)
        return np.clip(noisy, -_LARGEST, _LARGEST, out=noisy).astype(np.int16)

    def largest_honest_norm(self, dimension: int) -> float:
        """Returns a norm that an honest report exceeds with probability below 1e-12.

        It is C + zC (sqrt(d) + sqrt(2 log 1e12)), and sqrt(d)/2 for rounding: the norm of N(0, I_d)
        is 1-Lipschitz, so it exceeds its mean (at most sqrt(d)) by t with probability at most
        exp(-t^2/2).

        Args:
            dimension: d, the number of entries.

        Returns:
            The norm, in steps of `unit(d)`.
        """
        noise_norm = math.sqrt(dimension) + math.sqrt(2 * _LOG_FALSE_REJECT)
        norm = self.clip_norm * (1 + self.noise_multiplier * noise_norm)
        return norm / self.unit(dimension) + math.sqrt(dimension) / 2


def rounded(
    values: np.ndarray, draws: np.ndarray, deviation: Fraction, unit: float, most: int
) -> np.ndarray:
    """Returns (values + deviation * draws) / unit, rounded to whole numbers.

    Draws of 64 random bits (uint64) give exactly the whole numbers of real arithmetic, as far as
    these lie in -most to most. Numbers beyond stay beyond, on the same side.

    Args:
        values: Shape (d,).
        draws: Of a `Randomness`, shape (d,).
        deviation: The noise's standard deviation.
        unit: What one step stands for.
        most: The largest whole number that must be exact.

    Returns:
        Whole numbers as float64 of shape (d,).
    """
    noisy: np.ndarray = np.multiply(to_normals(draws), float(deviation), dtype=np.float64)
    noisy += values
    noisy /= unit
    undecided: list[int] = []
    if draws.dtype == np.uint64 and deviation > 0:
        undecided = _undecided(noisy, draws, _NEAR * max(1.0, float(deviation) / unit / 2731))
    np.rint(noisy, out=noisy)
    for place in undecided:
        start, normal = Fraction(float(values[place])), Normal(int(draws[place]))
        noisy[place] = _decide(start, normal, deviation, Fraction(unit), most)
    return noisy


def _decide(start: Fraction, normal: Normal, deviation: Fraction, unit: Fraction, most: int) -> int:
    """The whole number of one entry; draws more bits of its noise until the rounding is decided."""

    def is_enough(integer: int) -> bool:
        bound = (integer + Fraction(1, 2)) * unit
        return not normal.exceeds((bound - start) / deviation)

    return bisect.bisect_left(range(-most, most), True, key=is_enough) - most


def _undecided(noisy: np.ndarray, words: np.ndarray, near_by: float) -> list[int]:
    """The places of the entries that float64 may round to the wrong integer.

    These lie within `near_by` of the middle between two integers, or far out in the noise's tail.
    `noisy` holds the entries in units.
    """
    places: list[int] = []
    for start in range(0, words.size, AT_ONCE):
        part = noisy[start : start + AT_ONCE]
        near = np.abs(part - np.rint(part)) > 0.5 - near_by
        near |= words[start : start + AT_ONCE] < _RARE
        places.extend((start + np.flatnonzero(near)).tolist())
    return places


def clip(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Scales an update down to L2 norm at most `clip_norm`; shorter ones stay as they are.

    The norm of the returned floats is at most `clip_norm` in exact arithmetic too: the computed
    norm is enlarged by more than it can err, by a billionth of itself for d = 10^6.

    A zero vector stays zero. An update with a NaN or infinite entry has no direction to keep and
    becomes the zero vector, so that the sensitivity bound holds for every input. All inputs take
    equally long: the moments of a device's reports must not tell whose update was clipped.

    Args:
        update: Shape (d,), any float type.
        clip_norm: C, above 0.

    Returns:
        Float64 of shape (d,).
    """
    wide = np.asarray(update, dtype=np.float64)
    if not np.isfinite(wide).all():
        wide = np.zeros_like(wide)
    norm = float(linalg.norm(wide, check_finite=False))  # BLAS nrm2: no overflow on the way
    # The computed sum of d squares errs by less than 8 (d + 2) 2^-53 of it, in any order and scale.
    excess = norm * (1.0 + (wide.size + 8) * 2.0**-50) / clip_norm
    return wide / max(excess, 1.0)
