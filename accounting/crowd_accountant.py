"""`crowd`: the noise that the other users add anyway hides a user's own report.

Every other user's report is, up to a defect in total variation, with probability β a blanket, noise
alone. `docs/theory-blanket.md` proves: if all but the blankets is handed to the adversary, a
round's hockey-stick divergence between records x and x' of user 1 is at most

    H_α = (1/nβ) E[(V_1 + ... + V_n)_+] + (α - 1 + 2γ) η,      η = (n-1) γ β δ_G(log 1/β),
    V = X = E - αE'      with probability γβ       (E the density ratio of a report to a blanket)
        -β(α - 1)                      1-γ         (who did not check in)
        0                              otherwise

(with m of n users in a round, n - m terms -β(α - 1) and m terms without them, m/n for γ), and the
part is largest for the pairs of `accounting.worst_pairs`. η is searched.
"""

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np

from accounting.defect_accountant import DefectAccountant, without_far_tail
from accounting.events import (
    FixedSizeShuffledGaussianDpEvent,
    ShuffledCheckInGaussianDpEvent,
)
from accounting.gaussian import least_loss
from accounting.jump_counts import TermsCount
from accounting.jump_sum import positive_part
from accounting.loss_pmf import FloatArray
from accounting.worst_pairs import Pair, note_on, upper_profile

# Coarseness of the profiles, and of the mesh of their composition, by which η is searched.
_PROBE, _PROBE_MESH = 3.0, 8.0


class CrowdAccountant(DefectAccountant):
    """Every pair of neighbouring datasets, in any dimension, counting on the n users' noise.

    Source: docs/theory-blanket.md, section 4.
    """

    name = "crowd"
    holds_for = "every pair"
    covers = (
        "every pair of neighbouring datasets, in any dimension; assumes that all n users flip "
        "their coins and add their noise every round, and that the server gets nothing of the "
        "round but the shuffled reports"
    )

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        private = filter(self._is_private, self._counts)
        notes = filter(None, (note_on(event.noise_multiplier) for event in private))
        return next(notes, None) or super().note(delta)

    def _probe(self, v: int) -> Hashable:
        return (v,)

    def _mesh_factor(self, variant: Hashable) -> float:
        return _PROBE_MESH if isinstance(variant, tuple) else 1.0

    def _profile_of(self, event: Any, variant: Hashable) -> tuple[FloatArray, FloatArray]:
        probing = isinstance(variant, tuple)
        v = variant[0] if isinstance(variant, tuple) else variant
        assert isinstance(v, int)
        crowd = _crowd_of(event)
        if crowd.rate == 0.0:
            return np.zeros(1), np.zeros(1)
        defect = math.ldexp(1.0, -v)
        noise = event.noise_multiplier
        target = math.log(defect) - math.log(max(crowd.others, 1e-300))
        share = math.exp(-least_loss(1.0 / noise, min(target, 0.0)))

        def divergence(alpha: float, pair: Pair, lower: bool) -> float:
            count = crowd.sum_of(share, alpha)
            hidden = positive_part(pair(1.0 / noise, alpha), count, lower)
            return hidden / (crowd.users * share) + (alpha - 1.0 + 2.0 * crowd.rate) * defect

        profile = upper_profile(
            divergence, crowd.rate, noise, self.neighboring_relation, _PROBE if probing else 1.0
        )
        return without_far_tail(*profile, 8.0 * crowd.rate * defect)


class _Crowd(NamedTuple):
    """Who may be in a round: of n users with their coins, or of m reports.

    Attributes:
        users: n.
        rate: The chance that user 1 is in the round.
        terms: n, or m.
        coins: γ, or 1.
        absent: 0, or n - m: terms that are steps down for certain.
        others: How many other reports there are, on average, or at most.
    """

    users: int
    rate: float
    terms: int
    coins: float
    absent: int
    others: float

    def sum_of(self, share: float, alpha: float) -> TermsCount:
        """The sum of V, from β and α."""
        step = share * (alpha - 1.0)
        return TermsCount(
            self.terms, self.coins * share, 1.0 - self.coins, step, -step * self.absent
        )


def _crowd_of(event: Any) -> _Crowd:
    n = event.users
    if isinstance(event, FixedSizeShuffledGaussianDpEvent):
        m = event.reports
        return _Crowd(n, m / n, m, 1.0, n - m, float(m))
    rate = event.check_in_rate if isinstance(event, ShuffledCheckInGaussianDpEvent) else 1.0
    return _Crowd(n, rate, n, rate, 0, (n - 1) * rate)
