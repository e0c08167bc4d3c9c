"""The worst pairs of reports whose density ratio to a blanket lies in [1 - t, 1 + t].

X = E - αE' for the ratios E and E' of two records has mean 1 - α, and lies within (1 + α)t of it.
Of all such laws the one with two values only, each with probability 1/2, is the largest in the
convex order; two opposite updates of norm C have it. So they are the worst pair under `replace`
whatever hides them, and likewise an update against zero, whose ratio is 1, under `zero-out`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from dp_accounting import NeighboringRelation

from accounting.numerics import FloatArray
from accounting.numerics.jump_counts import Count, PoissonCount, TermsCount
from accounting.numerics.loss_pmf import MAX_LOSS
from accounting.numerics.sign_sum import positive_parts

# α - 1 at which a divergence is computed, in units of the scale of the mean: chords between.
_PLACES = np.concatenate([np.arange(0.125, 5.0, 0.125), 5.0 * np.geomspace(1.0, 1e12, 290)])


@dataclasses.dataclass(frozen=True)
class Hiding:
    """Where a user's report hides: `H_α = scale E[((α-1)(b - uD) + X_1 + ... + X_K)_+]`.

    Attributes:
        scale: The factor.
        count: K, and D given K.
        shift: b <= 0.
        step: u >= 0.
    """

    scale: float
    count: Count
    shift: float
    step: float = 0.0


def among_blankets(rate: float, blankets: float) -> Hiding:
    """A user who checks in with chance γ, among Poisson(λ) blankets of the shuffler."""
    shift = -blankets / rate * (1.0 - rate)
    return Hiding(rate / blankets, PoissonCount(blankets), shift)


def among_reports(terms: int, rate: float, bias: float, users: int, absent: int) -> Hiding:
    """A user among m of n users' reports, or n who check in with chance γ.

    A report is uniform, a blanket, with probability 1 - t, whatever it is of.
    """
    share = 1.0 - bias
    count = TermsCount(terms, rate * share, 1.0 - rate)
    return Hiding(1.0 / (users * share), count, -share * absent, share)


def sign_profile(
    bias: float, chance: float, relation: NeighboringRelation, hiding: Hiding | None
) -> tuple[FloatArray, FloatArray]:
    """Returns a profile, both directions: the user's report among others, or without any.

    Args:
        bias: t in (0, 1).
        chance: That the report is sent at all.
        relation: Which records are neighbours.
        hiding: Among what; None: it is seen alone.

    Returns:
        epsilons from 0, the last so large that the loss never exceeds it, and deltas; same shape.
    """
    zero_out = relation is NeighboringRelation.REPLACE_SPECIAL
    largest = (1.0 if zero_out else 1.0 + bias) / (1.0 - bias)
    last = min(math.log(largest), MAX_LOSS)
    if hiding is None:
        alphas = np.array([1.0, math.exp(last)])
        return np.array([0.0, last]), chance * _alone(alphas, bias, zero_out)

    def bound(alphas: FloatArray) -> FloatArray:
        swings = (bias, alphas * bias) if zero_out else (bias * (1.0 + alphas),)
        fall = alphas - 1.0
        found = [
            positive_parts(
                -fall, np.broadcast_to(swing, fall.shape), hiding.shift * fall,
                hiding.step * fall, hiding.count,
            )
            for swing in swings
        ]  # fmt: skip
        hidden = hiding.scale * np.maximum.reduce(found)
        return np.asarray(np.minimum(hidden, chance * _alone(alphas, bias, zero_out)))

    first = bound(np.ones(1))
    losses = np.log1p(2.5 * float(first[0]) * _PLACES)
    losses = np.append(losses[losses < last], last)
    return np.append(0.0, losses), np.append(first, bound(np.exp(losses)))


def _alone(alphas: FloatArray, bias: float, zero_out: bool) -> FloatArray:
    """The larger direction's divergence of one report seen by itself."""
    most = 1.0 if zero_out else 1.0 + bias
    return np.asarray(0.5 * np.maximum(most - alphas * (1.0 - bias), 0.0))
