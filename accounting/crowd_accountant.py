"""`crowd`: the noise that the other users add anyway hides a user's own report.

Two bounds, each for every pair of neighbours in any dimension; where one is clearly the smaller the
other is asked only now and then.

*Swaps* (`accounting.swap_bound`): user 1's report is taken to have changed places with another's.

*Implicit blankets*, for few users and rounds of a fixed size: every other user's report is, up to a
defect in total variation, with probability β a blanket, noise alone. `docs/theory-blanket.md`
proves: if all but the blankets is handed to the adversary, a round's hockey-stick divergence
between records x and x' of user 1 is at most

    H_α = (1/nβ) E[(V_1 + ... + V_n)_+] + (α - 1 + 2γ) η,      η = (n-1) γ β δ_G(log 1/β),
    V = X = E - αE'      with probability γβ       (E the density ratio of a report to a blanket)
        -β(α - 1)                      1-γ         (who did not check in)
        0                              otherwise

(with m of n users in a round, n - m terms -β(α - 1) and m terms without them, m/n for γ), and the
first part is largest for the pairs of `accounting.worst_pairs`.

Both give up some total variation, and hide the more the more they give up. Every choice is a bound
at every α: a ladder of choices is gone down as α rises.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from accounting.events import FixedSizeShuffledGaussianDpEvent, ShuffledCheckInGaussianDpEvent
from accounting.gaussian import least_loss, log_gaussian_delta
from accounting.jump_counts import TermsCount
from accounting.jump_sum import positive_part
from accounting.loss_pmf import FloatArray
from accounting.profiles import ProfileShuffleAccountant
from accounting.swap_bound import SwapBound
from accounting.worst_pairs import Pair, apart, note_on, upper_profile

# What is given up falls from step to step of the ladder, and at the end is nothing.
_LADDER_STEP, _LADDER_END = 0.25, 1e-26
_FIRST_STEP, _FIRST_STEPS = 0.1, 7
_SMALL = 0.005  # what is given up, beside the bound, that is worth no further step
_STALLED, _OTHERS_EACH = 0.9, 4
_LEAST_RATE = 1e-25  # with less the report's own coin is all that is counted on
_COARSENESS = 1.5  # of the steps of α: chords cost 0.4 % of ε


class CrowdAccountant(ProfileShuffleAccountant):
    """Every pair of neighbouring datasets, in any dimension, counting on the n users' noise.

    Source: docs/theory-swap.md, and section 4 of docs/theory-blanket.md.
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

    def _profile(self, event: Any) -> tuple[FloatArray, FloatArray]:
        crowd = crowd_of(event)
        if crowd.rate < _LEAST_RATE:
            shift = apart(self.neighboring_relation, crowd.noise)
            return np.zeros(1), crowd.rate * np.exp(log_gaussian_delta(shift, np.zeros(1)))
        searches: dict[Pair, _Search] = {}

        def divergence(alpha: float, pair: Pair, lower: bool) -> float:
            if pair not in searches:
                searches[pair] = _Search(crowd, pair)
            return searches[pair].divergence(alpha)

        return upper_profile(
            divergence, crowd.rate, crowd.noise, self.neighboring_relation, _COARSENESS
        )


class Crowd(NamedTuple):
    """Who may be in a round: of n users with their coins, or of m reports.

    Attributes:
        users: n.
        rate: The chance that user 1 is in the round.
        noise: z.
        terms: n, or m.
        coins: γ, or 1.
        absent: 0, or n - m: terms that are steps down for certain.
        others: How many other reports there are, on average, or at most.
    """

    users: int
    rate: float
    noise: float
    terms: int
    coins: float
    absent: int
    others: float

    @property
    def has_coins(self) -> bool:
        """Whether users report independently of each other."""
        return self.terms == self.users

    def by_swaps(self, alpha: float, pair: Pair, lost: float) -> float:
        """Upper bound of H_α that gives up about `lost`; 1 where there are too few others."""
        swap = SwapBound(self.users, self.rate, self.noise, lost)
        return swap.divergence(alpha, pair) if swap.holds else 1.0

    def share(self, defect: float) -> float:
        """β at which the others' reports are blankets up to η in total variation."""
        target = math.log(defect) - math.log(max(self.others, 1e-300))
        return math.exp(-least_loss(1.0 / self.noise, min(target, 0.0)))

    def by_blankets(self, alpha: float, pair: Pair, lost: float) -> float:
        """Upper bound of H_α that gives up about `lost`: 2γη at α = 1."""
        defect = 0.5 * lost / self.rate
        share = self.share(defect)
        step = share * (alpha - 1.0)
        count = TermsCount(
            self.terms, self.coins * share, 1.0 - self.coins, step, -step * self.absent
        )
        hidden = positive_part(pair(1.0 / self.noise, alpha), count) / (self.users * share)
        return hidden + (alpha - 1.0 + 2.0 * self.rate) * defect


def crowd_of(event: Any) -> Crowd:
    """Returns who may be in a round of `event`."""
    n, noise = event.users, event.noise_multiplier
    if isinstance(event, FixedSizeShuffledGaussianDpEvent):
        m = event.reports
        return Crowd(n, m / n, noise, m, 1.0, n - m, float(m))
    rate = event.check_in_rate if isinstance(event, ShuffledCheckInGaussianDpEvent) else 1.0
    return Crowd(n, rate, noise, n, rate, 0, (n - 1) * rate)


class _Search:
    """The least bound at increasing α: less and less is given up."""

    def __init__(self, crowd: Crowd, pair: Pair) -> None:
        self._pair = pair
        self._bounds: list[Callable[[float, Pair, float], float]] = [crowd.by_blankets]
        if crowd.has_coins:
            self._bounds.insert(0, crowd.by_swaps)
        self._lost = [crowd.rate / 8.0] * len(self._bounds)
        self._last: float = math.inf
        self._first, self._asked = 0, 0

    def divergence(self, alpha: float) -> float:
        """Returns an upper bound of H_α, a good one if α rises from call to call, from 1."""
        bounds = range(len(self._bounds))
        if alpha == 1.0:
            starts = self._lost[0] * _FIRST_STEP ** np.arange(_FIRST_STEPS)
            for which in bounds:
                found = [self._bounds[which](alpha, self._pair, lost) for lost in starts.tolist()]
                self._lost[which] = float(starts[int(np.argmin(found))])
                if min(found) < self._last:
                    self._first, self._last = which, min(found)
            return self._last
        value = self._least(self._first, alpha)
        self._asked += 1
        # Far out the other bound may become the smaller.
        if value > _STALLED * self._last or self._asked % _OTHERS_EACH == 0:
            values = [self._least(which, alpha) for which in bounds]
            self._first, value = int(np.argmin(values)), min(values)
        self._last = value
        return value

    def _least(self, which: int, alpha: float) -> float:
        lost = self._lost[which]
        value = self._bounds[which](alpha, self._pair, lost)
        while lost > max(_LADDER_END, _SMALL * value / alpha):
            lower = self._bounds[which](alpha, self._pair, lost * _LADDER_STEP)
            if lower >= value:
                break
            value, lost = lower, lost * _LADDER_STEP
        self._lost[which] = lost
        return value
