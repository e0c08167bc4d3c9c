"""The local Gaussian mechanism: clip to C, add N(0, (zC)^2 I), round to a fixed grid of 16 bits.

A device uses it for its user's update, and the shuffler for its blankets, which are reports of the
zero update: by the same arithmetic, so that nothing in a report tells which of the two it is.
"""

from __future__ import annotations

import bisect
import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy import linalg

from shufl.protocol.mechanisms.draws import AT_ONCE, Normal, to_normals
from shufl.protocol.validation import Checked, ClipNorm, NotNegative

_LARGEST = 2**15 - 1
_NOISE_RANGE = 12.0  # standard deviations that the grid holds; beyond lie 4e-33 of the law
# Where floats do not decide an entry: docs/theory/gaussian.md, section 7.
_NEAR, _RARE = 2.0**-26, 2**37
_LOG_FALSE_REJECT = math.log(1e12)  # an honest report is rejected with probability below 1e-12


class GaussianMechanism(Checked):
    """Every report is an update clipped to norm C, plus `N(0, (zC)² I)`.

    Attributes:
        clip_norm: C, the largest Euclidean norm of an update before noise, in [1e-18, 1e15]. No ε
            depends on it.
        noise_multiplier: z, the noise's standard deviation in units of C, in [0, 1e15]. 0 is not
            private.

    Guarantee:
        Two updates of a user, whatever they are, give reports of normal law with standard deviation
        zC in each entry, rounded, whose means are at most 2C apart.
    """

    least_noise: ClassVar[float] = 0.2
    """Less is never recommended, whatever ε says: where few rounds at a small γ leave a user's
    chance to take part at all below δ, ε is 0 for reports without noise."""
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
        """The variance of a report's density over a blanket's, at most: e^{1/z²} - 1."""
        return np.asarray(np.expm1(noise_multiplier**-2.0))

    @staticmethod
    def draws(dimension: int) -> int:
        """How many N(0, 1) draws a report of d entries takes."""
        return dimension

    def noise_deviation(self, dimension: int) -> float:
        """The standard deviation of the noise in one entry of a report: zC."""
        return self.noise_multiplier * self.clip_norm

    def unit(self, dimension: int) -> float:
        """What one step of a report's integers stands for: (C + 12 zC) / 32 767."""
        return self.clip_norm * (1 + _NOISE_RANGE * self.noise_multiplier) / _LARGEST

    def report(self, update: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """One report: clip(update, C) + zC * draws, in units, rounded and saturated.

        The sum is formed in float64. From words every integer is that of real numbers all the same:
        the few entries that float64 does not decide are decided by more digits. (The time that
        takes tells how the noise fell, not the update.) Rounding and saturating come after the
        noise, so they are post-processing.

        `update` has shape (d,) and any float type, `draws` of a `Randomness` shape (d,). Returns
        int16 of shape (d,).
        """
        deviation = Fraction(self.noise_multiplier) * Fraction(self.clip_norm)
        clipped = clip(update, self.clip_norm)
        noisy = rounded(clipped, draws, deviation, self.unit(draws.size), _LARGEST)
        return np.clip(noisy, -_LARGEST, _LARGEST, out=noisy).astype(np.int16)

    def largest_honest_norm(self, dimension: int) -> float:
        """A norm, in units, that an honest report exceeds with probability below 1e-12.

        C + zC (sqrt(d) + sqrt(2 log 1e12)), and sqrt(d)/2 for rounding: the norm of N(0, I_d) is
        1-Lipschitz, so it exceeds its mean (at most sqrt(d)) by t with probability at most
        exp(-t^2/2).
        """
        noise_norm = math.sqrt(dimension) + math.sqrt(2 * _LOG_FALSE_REJECT)
        norm = self.clip_norm * (1 + self.noise_multiplier * noise_norm)
        return norm / self.unit(dimension) + math.sqrt(dimension) / 2


def rounded(
    values: np.ndarray, draws: np.ndarray, deviation: Fraction, unit: float, most: int
) -> np.ndarray:
    """(values + deviation * draws) / unit, rounded to whole numbers: float64 of shape (d,).

    From words every whole number from -most to most is that of real numbers. An entry that is
    farther from 0 stays so.
    """
    noisy: np.ndarray = np.multiply(to_normals(draws), float(deviation), dtype=np.float64)
    noisy += values
    noisy /= unit
    undecided: list[int] = []
    if draws.dtype == np.uint64 and deviation > 0:
        undecided = _undecided(noisy, draws, _NEAR * max(1.0, float(deviation) / unit / 2731))
    np.rint(noisy, out=noisy)
    for place in undecided:
        about = Fraction(float(values[place])), Normal(int(draws[place]))
        noisy[place] = _decide(*about, deviation, Fraction(unit), most)
    return noisy


def _decide(start: Fraction, normal: Normal, deviation: Fraction, unit: Fraction, most: int) -> int:
    """The whole number of one entry, as exact as its draw is long."""

    def is_enough(integer: int) -> bool:
        bound = (integer + Fraction(1, 2)) * unit
        return not normal.exceeds((bound - start) / deviation)

    return bisect.bisect_left(range(-most, most), True, key=is_enough) - most


def _undecided(noisy: np.ndarray, words: np.ndarray, near_by: float) -> list[int]:
    """The places of entries, in units, that float64 may round to the wrong integer.

    Those within `near_by` of the middle between two integers, and those far out.
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

    The norm of the floats that are returned is at most `clip_norm` in exact arithmetic too: the
    computed one counts as longer by more than it can err, a billionth of itself for d = 10^6.

    A zero vector stays zero. An update with a NaN or infinite entry has no direction to keep and
    becomes the zero vector, so that the sensitivity bound holds for every input. All take as long:
    the moments of a device's reports must not tell whose update was clipped.

    The update has shape (d,) and any float type; float64 of shape (d,) is returned.
    """
    wide = np.asarray(update, dtype=np.float64)
    if not np.isfinite(wide).all():
        wide = np.zeros_like(wide)
    norm = float(linalg.norm(wide, check_finite=False))  # BLAS nrm2: no overflow on the way
    # In whatever order and scale they are summed, d squares err by less than 8 (d + 2) 2^-53.
    excess = norm * (1.0 + (wide.size + 8) * 2.0**-50) / clip_norm
    return wide / max(excess, 1.0)
