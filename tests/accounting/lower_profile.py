"""From a lower bound of a profile to a discrete privacy loss that the true one dominates."""

import functools
import math

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from shufl.accounting.numerics.loss_pmf import MAX_LOSS, lower_hull

_MAX_POINTS = 2**18
_NEGLIGIBLE = 1e-30
# Fourier transforms of dp_accounting were seen to err by 1e-15 a round in δ; they bound nothing.
_FFT_ERROR = 1e-14


class LowerProfile:
    """A convex lower bound of `H_α(P‖Q)`, one direction, for all α > 0.

    A pair with this profile can be made from (P, Q) (Blackwell 1953), and so can a pair with any
    convex profile below it that keeps H_0 = 1; what is made from a pair composes to no more than
    the pair.
    """

    def __init__(self, losses, values):
        """Takes the corners: the bound is linear in α between them.

        `losses` are log α, increasing, and `values` the bound at them, both of shape (K,). Where
        `max(1 - α, 0)` is more, it is used.
        """
        self._ratios = np.exp(losses)
        self._values = np.maximum(values, np.maximum(-np.expm1(losses), 0.0))
        reach = losses[self._values > np.maximum(-np.expm1(losses), 0.0) + _NEGLIGIBLE]
        self._reach = float(np.max(np.abs(reach))) if reach.size else 0.0

    def distribution(self, interval):
        """Returns the loss of a pair whose profile lies below, on a grid of this mesh."""
        half = min(math.ceil(self._reach / interval) + 1, _MAX_POINTS)
        ratios = np.exp(np.arange(-half, half + 1) * interval)
        # The bound exceeds 1 - α, or 0, by `above`: that floor is linear in every cell, α = 1 being
        # a point of the grid. Where a chord of `above` exceeds it inside a cell, both ends are
        # scaled down until no chord does.
        floor = np.maximum(1.0 - ratios, 0.0)
        inner = np.interp(ratios, self._ratios, self._values, right=0.0)
        read = np.where(ratios < self._ratios[0], 1.0 - ratios, inner)
        above = np.maximum(read - floor, 0.0)
        cell = np.searchsorted(ratios, self._ratios, side="right") - 1
        inside = (cell >= 0) & (cell < ratios.size - 1)
        places = self._ratios[inside]
        room = np.maximum(self._values[inside] - np.maximum(1.0 - places, 0.0), 0.0)
        chord = np.interp(places, ratios, above)
        share = np.divide(room, chord, out=np.ones_like(room), where=chord > room)
        scale = np.ones(ratios.size + 1)
        np.minimum.at(scale, cell[inside] + 1, share)
        lowered = floor + above * np.minimum(scale[:-1], scale[1:])
        lowered[0], lowered[-1] = floor[0], 0.0
        corners = lower_hull(ratios, lowered)
        slopes = np.diff(lowered[corners]) / np.diff(ratios[corners])
        masses = np.zeros(ratios.size)
        masses[corners] = np.diff(np.concatenate([[-1.0], slopes, [0.0]])) * ratios[corners]
        return privacy_loss_distribution.PrivacyLossDistribution(
            pld_pmf.DensePLDPmf(interval, -half, np.maximum(masses, 0.0), 0.0, False)
        )


def epsilon_from_below(profiles, counts, interval, delta):
    """Returns a lower bound of ε at `delta` of c_i rounds of kind i, composed on a grid.

    It is at most 700, since e^ε overflows beyond.
    """
    at = delta + _FFT_ERROR * (1.0 + sum(counts))
    if at >= 1.0:
        return 0.0
    kinds = zip(profiles, counts, strict=True)
    each = [profile.distribution(interval).self_compose(count) for profile, count in kinds]
    composed = functools.reduce(type(each[0]).compose, each)
    if composed.get_delta_for_epsilon(MAX_LOSS) >= at:
        return MAX_LOSS
    return float(max(composed.get_epsilon_for_delta(at), 0.0))
