"""From a lower bound of a profile to a discrete privacy loss that the true one dominates."""

import math

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from accounting.loss_pmf import FloatArray, lower_hull

_MAX_POINTS = 2**18
_NEGLIGIBLE = 1e-30


class LowerProfile:
    """A convex lower bound of `H_α(P‖Q)`, one direction, for all α > 0.

    A pair with this profile can be made from (P, Q) (Blackwell 1953), and so can a pair with any
    convex profile below it that keeps H_0 = 1; what is made from a pair composes to no more than
    the pair.
    """

    def __init__(self, losses: FloatArray, values: FloatArray) -> None:
        """Takes the corners: the bound is linear in α between them.

        Args:
            losses: log α, increasing, shape (K,).
            values: The bound at them, shape (K,); `max(1 - α, 0)` is used where that is more.
        """
        self._ratios = np.exp(losses)
        self._values = np.maximum(values, np.maximum(-np.expm1(losses), 0.0))
        reach = losses[self._values > np.maximum(-np.expm1(losses), 0.0) + _NEGLIGIBLE]
        self._reach = float(np.max(np.abs(reach))) if reach.size else 0.0

    def distribution(self, interval: float) -> privacy_loss_distribution.PrivacyLossDistribution:
        """Returns the loss of a pair whose profile lies below, on a grid of this mesh."""
        half = min(math.ceil(self._reach / interval) + 1, _MAX_POINTS)
        ratios = np.exp(np.arange(-half, half + 1) * interval)
        at = self._read(ratios)
        # Chords exceed the bound between their ends: lower both ends by the larger excess.
        cell = np.searchsorted(ratios, self._ratios, side="right") - 1
        inside = (cell >= 0) & (cell < ratios.size - 1)
        above = np.zeros(ratios.size + 1)
        chord = np.interp(self._ratios[inside], ratios, at)
        np.maximum.at(above, cell[inside] + 1, chord - self._values[inside])
        lowered = at - np.maximum(above[:-1], above[1:])
        lowered = np.maximum(lowered, np.maximum(1.0 - ratios, 0.0))
        lowered[0], lowered[-1] = 1.0 - ratios[0], 0.0
        corners = lower_hull(ratios, lowered)
        slopes = np.diff(lowered[corners]) / np.diff(ratios[corners])
        masses = np.zeros(ratios.size)
        masses[corners] = np.diff(np.concatenate([[-1.0], slopes, [0.0]])) * ratios[corners]
        return privacy_loss_distribution.PrivacyLossDistribution(
            pld_pmf.DensePLDPmf(interval, -half, np.maximum(masses, 0.0), 0.0, False)
        )

    def _read(self, ratios: FloatArray) -> FloatArray:
        inner: FloatArray = np.interp(ratios, self._ratios, self._values, right=0.0)
        result: FloatArray = np.where(ratios < self._ratios[0], 1.0 - ratios, inner)
        return result
