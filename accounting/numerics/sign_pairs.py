"""The worst pairs of reports that are a user's own place or, by a coin, a uniform one of k.

Seen against a blanket, which is uniform, such a report has density ratio `β + sk` at its own place
and β elsewhere, β = 1 - s. Of the blankets only those at the two records' places count: which of
the two is a fair sign. Section 8 of docs/theory/blanket.md.

For k = 2 the ratios are 1 + s and 1 - s. X = E - αE' for the ratios E and E' of two records has
mean 1 - α. Of all laws within [1 - s, 1 + s] the one with two values only, each with probability
1/2, is the largest in the convex order: so this is the worst pair of every report whose ratios lie
there, and likewise with a record of ratio 1, a blanket, under `zero-out`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from dp_accounting import NeighboringRelation

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.jump_counts import Count, PoissonCount, TermsCount
from shufl.accounting.numerics.loss_pmf import MAX_LOSS, USUAL_LEAST
from shufl.accounting.numerics.sign_sum import positive_parts
from shufl.protocol.mechanisms import LdpSgd, RandomisedResponse

# α - 1 at which a divergence is computed, in units of the scale of the mean: chords between.
_PLACES = np.concatenate([np.arange(0.125, 5.0, 0.125), 5.0 * np.geomspace(1.0, 1e12, 290)])
_AT_ONCE = 16
_LOG_ROUND_UP = 1.0 + 4e-16  # a quotient and a logarithm err by less


@dataclasses.dataclass(frozen=True)
class Response:
    """A report: the user's own place, or a uniform one.

    Attributes:
        truth: s in (0, 1), the chance that the own place is sent for certain.
        places: k, how many places there are.
    """

    truth: float
    places: int

    @classmethod
    def of(cls, mechanism: LdpSgd | RandomisedResponse) -> Response:
        """Returns the reports of a mechanism, or others that are as bad for any two records."""
        if isinstance(mechanism, LdpSgd):
            return cls(mechanism.bias, 2)
        return cls(mechanism.truth, mechanism.categories)

    @property
    def share(self) -> float:
        """β, the chance that the report is a uniform place, as a blanket is."""
        return 1.0 - self.truth

    @property
    def near(self) -> float:
        """The chance that a blanket is at one of the two records' places."""
        return 2.0 / self.places

    def hides_zero(self, relation: NeighboringRelation) -> bool:
        """Whether the pair is a record and a blanket.

        For k > 2 the bound is that of two records, which is no less: a blanket is the mean of them
        all, and the divergence is convex.
        """
        return relation is NeighboringRelation.REPLACE_SPECIAL and self.places == 2


@dataclasses.dataclass(frozen=True)
class Hiding:
    """Where a user's report hides: `H_α = scale E[((α-1)(b - uD) + X_1 + ... + X_K)_+]`.

    Attributes:
        count: K, how many blankets are at the two records' places, and D given K.
        shift: b <= 0.
        step: u >= 0.
    """

    scale: float
    count: Count
    shift: float
    step: float


def among_blankets(response: Response, rate: float, blankets: float) -> Hiding:
    """A user who checks in with chance γ, among Poisson(λ) blankets of the shuffler."""
    elsewhere = blankets * (1.0 - response.near)
    count = PoissonCount(blankets * response.near, elsewhere=elsewhere)
    shift = -blankets / rate * (1.0 - rate)
    return Hiding(rate / blankets, count, shift, response.share)


def among_reports(response: Response, terms: int, rate: float, users: int, absent: int) -> Hiding:
    """A user among m of n users' reports, or n who check in with chance γ."""
    share, near = response.share, response.near
    elsewhere = (1.0 - rate) + rate * share * (1.0 - near)
    count = TermsCount(terms, rate * share * near, elsewhere)
    return Hiding(1.0 / (users * share), count, -share * absent, share)


def sign_profile(
    response: Response,
    chance: float,
    relation: NeighboringRelation,
    hiding: Hiding | None,
    least: float = USUAL_LEAST,
) -> tuple[FloatArray, FloatArray]:
    """Returns a profile: the user's report among others, or without any.

    The report is sent at all with probability `chance`, and seen alone where `hiding` is None. δ
    below `least` are not told apart. Returns epsilons from 0, the last so large that the loss never
    exceeds it, of shape (K,), and deltas of the same shape; of each direction, of shape (2, K),
    where the pair is a record and a blanket.
    """
    zero_out = response.hides_zero(relation)
    swing = 0.5 * response.truth * response.places
    excess = response.truth if zero_out else 2.0 * swing  # of the largest ratio over β
    last = min(math.log1p(excess / response.share) * _LOG_ROUND_UP, MAX_LOSS)

    # How one report's divergence, seen by itself, falls with α - 1.
    slopes = np.array([[1.0], [response.share]] if zero_out else [[response.share]])

    def alone(falls: FloatArray) -> FloatArray:
        seen = np.maximum(excess - falls * slopes, 0.0)
        return np.asarray(chance / response.places * seen)

    def shaped(rows: FloatArray) -> FloatArray:
        return rows if zero_out else rows[0]

    if hiding is None:
        ends = [math.log1p(excess) * _LOG_ROUND_UP, last] if zero_out else [last]
        epsilons = np.unique([0.0, *ends])  # nearly pure noise makes the ends equal
        return epsilons, shaped(alone(np.expm1(epsilons)))

    def bound(falls: FloatArray) -> FloatArray:
        swings = (swing, (1.0 + falls) * swing) if zero_out else (swing * (2.0 + falls),)
        drift = -falls if zero_out else -falls * (response.share + swing)
        found = [
            positive_parts(
                drift, np.broadcast_to(swing, falls.shape), hiding.shift * falls,
                hiding.step * falls, hiding.count,
            )
            for swing in swings
        ]  # fmt: skip
        return np.asarray(np.minimum(hiding.scale * np.stack(found), alone(falls)))

    first = bound(np.zeros(1))
    losses = np.log1p(2.5 * float(np.max(first)) * _PLACES)
    losses = losses[losses < last]
    deltas = [first]
    for start in range(0, losses.size, _AT_ONCE):
        deltas.append(bound(np.expm1(losses[start : start + _AT_ONCE])))
        if np.max(deltas[-1][:, -1]) < least:
            break
    computed = np.concatenate(deltas, axis=1)
    end = np.array([last])
    epsilons = np.concatenate([[0.0], losses[: computed.shape[1] - 1], end])
    ended = np.minimum(computed[:, -1:], alone(np.expm1(end)))
    return epsilons, shaped(np.concatenate([computed, ended], axis=1))
