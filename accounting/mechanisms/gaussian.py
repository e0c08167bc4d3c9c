"""The local Gaussian mechanism: clip to C, add N(0, (zC)^2 I), round to a fixed grid of 16 bits.

A device uses it for its user's update, and the shuffler for its blankets, which are reports of the
zero update: by the same arithmetic, so that nothing in a report tells which of the two it is.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy import linalg

from accounting.validation import Checked, ClipNorm, NotNegative

_LARGEST = 2**15 - 1
_NOISE_RANGE = 12.0  # standard deviations that the grid holds; beyond lie 4e-33 of the law
_LOG_FALSE_REJECT = math.log(1e12)  # an honest report is rejected with probability below 1e-12


class GaussianMechanism(Checked):
    """Every report is an update clipped to norm C, plus `N(0, (zC)² I)`.

    Attributes:
        name: Its word in plans.
        clip_norm: C, the largest Euclidean norm of an update before noise, in [1e-18, 1e15]. No ε
            depends on it.
        noise_multiplier: z, the noise's standard deviation in units of C, in [0, 1e15]. 0 is not
            private.

    Raises:
        ValueError: A value outside its range.
    """

    least_noise: ClassVar[float] = 0.2
    """Less is never recommended, whatever ε says: where few rounds at a small γ leave a user's
    chance to take part at all below δ, ε is 0 for reports without noise."""

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

    def report(self, update: np.ndarray, standard_normal: np.ndarray) -> np.ndarray:
        """One report: clip(update, C) + zC * standard_normal, in units, rounded and saturated.

        The sum is formed in float64. Rounding and saturating come after the noise, so they are
        post-processing; docs/theory.md says how far float64 is from real numbers here.

        Args:
            update: shape (d,), any float type.
            standard_normal: independent N(0, 1) draws, shape (d,).

        Returns:
            int16 of shape (d,).
        """
        deviation = self.noise_multiplier * self.clip_norm
        noisy: np.ndarray = np.multiply(standard_normal, deviation, dtype=np.float64)
        noisy += clip(update, self.clip_norm)
        noisy /= self.unit(noisy.size)
        np.rint(noisy, out=noisy)
        return np.clip(noisy, -_LARGEST, _LARGEST, out=noisy).astype(np.int16)

    def largest_honest_norm(self, dimension: int) -> float:
        """A norm, in units, that an honest report exceeds with probability below 1e-12.

        C + zC (sqrt(d) + sqrt(2 log 1e12)), and sqrt(d)/2 for rounding: the norm of N(0, I_d) is
        1-Lipschitz, so it exceeds its mean (at most sqrt(d)) by t with probability at most
        exp(-t^2/2).

        Args:
            dimension: d, the number of entries of a report.
        """
        noise_norm = math.sqrt(dimension) + math.sqrt(2 * _LOG_FALSE_REJECT)
        norm = self.clip_norm * (1 + self.noise_multiplier * noise_norm)
        return norm / self.unit(dimension) + math.sqrt(dimension) / 2


def clip(update: np.ndarray, clip_norm: float) -> np.ndarray:
    """Scales an update down to L2 norm at most `clip_norm`; shorter ones stay as they are.

    A zero vector stays zero. An update with a NaN or infinite entry has no direction to keep and
    becomes the zero vector, so that the sensitivity bound holds for every input.

    Args:
        update: shape (d,), any float type.
        clip_norm: C.

    Returns:
        float64 of shape (d,).
    """
    wide = np.asarray(update, dtype=np.float64)
    if not np.isfinite(wide).all():
        return np.zeros_like(wide)
    norm = float(linalg.norm(wide, check_finite=False))  # BLAS nrm2: no overflow on the way
    return wide if norm <= clip_norm else wide / (norm / clip_norm)
