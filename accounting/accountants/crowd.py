"""`crowd`: the noise that the other users add anyway hides a user's own report.

Two bounds, each for every pair of neighbours in any dimension. The one that is larger is computed
only now and then.

*Swaps* (`numerics.swap_bound`): user 1's report is taken to have changed places with another's.

*Implicit blankets*, for few users and rounds of a fixed size: every other user's report is, up to a
defect in total variation, with probability β a blanket, noise alone. `docs/theory/blanket.md`
proves: if all but the blankets is handed to the adversary, a round's hockey-stick divergence
between records x and x' of user 1 is at most

    H_α = (1/nβ) E[(V_1 + ... + V_n)_+] + (α - 1 + 2γ) η,      η = (n-1) γ β δ_G(log 1/β),
    V = X = E - αE'      with probability γβ       (E the density ratio of a report to a blanket)
        -β(α - 1)                      1-γ         (who did not check in)
        0                              otherwise

(with m of n users in a round, n - m terms -β(α - 1) and m terms without them, m/n for γ), and the
first part is largest for the pairs of `shufl.accounting.numerics.worst_pairs`.

Dropping each report with the same chance turns a round at a larger γ into one at a smaller γ: so
the swap bound at a larger γ is a bound, too.

All of them move a little probability mass into δ; moving more gives a smaller ε. Every choice is a
bound at every α, and smaller ones are tried as α rises. As H_α does not rise in α, a bound at a
smaller α holds too, and is used where a better one would not help.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shufl.accounting.accountants.local import AmplifiedAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian_divergence import least_loss, log_gaussian_delta
from shufl.accounting.numerics.jump_counts import TermsCount
from shufl.accounting.numerics.jump_sum import positive_part
from shufl.accounting.numerics.sign_pairs import Response, among_reports, sign_profile
from shufl.accounting.numerics.swap_bound import SwapBound
from shufl.accounting.numerics.worst_pairs import LEAST_NOISE, Pair, pairs_of, upper_profile
from shufl.protocol.events import FixedSize, Shuffled
from shufl.protocol.mechanisms import GaussianMechanism, LdpSgd, RandomisedResponse

# The mass moved into δ, as a share of the bound: at first, and at most.
_FIRST_SHARE, _MOST_SHARE = 0.125, 0.4
_FACTOR, _FAR = 0.45, 0.03  # from one share that is tried to the next; and where all bounds stall
_STALLED = 0.97  # of the last bound: all are asked, with shares far below
_GAIN = 0.998  # of the bound, by a share worth taking
_PATIENCE = 3  # the most α without a trial
_HOPELESS = 2.0  # times the other bound: not worth a trial
_NEGLIGIBLE, _END = 1e-2, 1e-4  # bounds, and masses, in units of the least δ that is of interest
_OTHERS_EACH = 2.0  # times α - 1: the other bounds are asked again
_LARGER = 1.25, 2.0  # times γ: check-in rates at which swaps are asked too
_AS_ALONE = 0.97  # of the bound of the report alone; above it, that bound is taken
_LEAST_RATE = 1e-25  # at smaller rates only the report's own coin is counted on
_COARSENESS = 1.5  # of the steps of α: chords cost 0.4 % of ε


class CrowdAccountant(AmplifiedAccountant):
    """Every pair of neighbouring datasets, in any dimension, counting on the n users' noise.

    Source: docs/theory/swap.md, and section 4 of docs/theory/blanket.md.

    Guarantee:
        ε holds for every pair of neighbouring datasets, in any dimension; assumes that all n users
        flip their coins and add their noise every round, and that the server gets nothing of the
        round but the shuffled reports.
    """

    name = "crowd"
    covers = (
        "every pair of neighbouring datasets, in any dimension; assumes that all n users flip "
        "their coins and add their noise every round, and that the server gets nothing of the "
        "round but the shuffled reports"
    )
    holds_for = "every pair"
    least_noise = LEAST_NOISE
    mechanisms = (GaussianMechanism, LdpSgd, RandomisedResponse)

    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        crowd = crowd_of(event)
        if isinstance(event.mechanism, LdpSgd | RandomisedResponse):
            response = Response.of(event.mechanism)
            hiding = among_reports(response, crowd.terms, crowd.coins, crowd.users, crowd.absent)
            return sign_profile(response, crowd.rate, self.neighboring_relation, hiding, least)
        shift = 1.0 / self._sigma(event)
        if crowd.rate < _LEAST_RATE:
            return np.zeros(1), crowd.rate * np.exp(log_gaussian_delta(shift, np.zeros(1)))
        pairs = pairs_of(self.neighboring_relation)
        searches = {pair: _Search(crowd, pair, least) for pair in pairs}

        def divergence(alpha: float, pair: Pair) -> float:
            value = searches[pair].divergence(alpha)
            alone = crowd.rate * math.exp(float(log_gaussian_delta(shift, math.log(alpha))))
            return alone if value > _AS_ALONE * alone else value

        return upper_profile(
            divergence, crowd.rate, crowd.noise, self.neighboring_relation, least, _COARSENESS
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

    def at(self, rate: float) -> "Crowd":
        """Returns the same users in a round with the check-in rate `rate`."""
        return self._replace(rate=rate, coins=rate, others=(self.users - 1) * rate)

    def by_swaps(self, alpha: float, pair: Pair, lost: float) -> float:
        """Upper bound of H_α that gives up about α `lost`; 1 where there are too few others."""
        swap = SwapBound(self.users, self.rate, self.noise, lost)
        return swap.divergence(alpha, pair) if swap.holds else 1.0

    def share(self, defect: float) -> float:
        """β at which the others' reports are blankets up to η in total variation."""
        target = math.log(defect) - math.log(max(self.others, 1e-300))
        return math.exp(-least_loss(1.0 / self.noise, min(target, 0.0), 1.0))

    def by_blankets(self, alpha: float, pair: Pair, lost: float) -> float:
        """Upper bound of H_α that gives up α `lost`."""
        defect = alpha * lost / (alpha - 1.0 + 2.0 * self.rate)
        share = self.share(defect)
        step = share * (alpha - 1.0)
        count = TermsCount(
            self.terms, self.coins * share, 1.0 - self.coins, step, -step * self.absent
        )
        hidden = positive_part(pair.jumps(1.0 / self.noise, alpha), count) / (self.users * share)
        return hidden + alpha * lost


def crowd_of(event: Shuffled) -> Crowd:
    """Returns who may be in a round of `event`."""
    n, noise = event.users, event.mechanism.noise_multiplier
    if isinstance(event.participation, FixedSize):
        m = event.participation.reports
        return Crowd(n, m / n, noise, m, 1.0, n - m, float(m))
    rate = event.chance
    return Crowd(n, rate, noise, n, rate, 0, (n - 1) * rate)


class _Search:
    """The least bound at increasing α, for one direction of the worst pair."""

    def __init__(self, crowd: Crowd, pair: Pair, least: float) -> None:
        bounds = [crowd.by_blankets]
        if crowd.terms == crowd.users:  # users report independently of each other
            rates = [each * crowd.rate for each in _LARGER if each * crowd.rate <= 1.0]
            bounds = [crowd.by_swaps, *bounds, *(crowd.at(rate).by_swaps for rate in rates)]
        self._trials = [_Trials(bound, pair, _END * least) for bound in bounds]
        self._negligible = _NEGLIGIBLE * least
        # H_α does not rise in α: what bounded it before still does.
        self._least = crowd.rate
        self._fell, self._stalled = 1.0, True
        self._asked = 0.0  # α - 1 at which the other bounds were asked last

    def divergence(self, alpha: float) -> float:
        """Returns an upper bound of H_α, a good one if α rises from call to call, from 1."""
        if self._least <= self._negligible:
            return self._least
        first, *others = self._trials
        before, guess = self._least, self._least * self._fell
        self._least = min(before, first.bound(alpha, guess, before, self._stalled))
        self._stalled = alpha == 1.0 or self._least > _STALLED * before
        if self._stalled or alpha - 1.0 >= _OTHERS_EACH * self._asked:
            self._asked = alpha - 1.0
            for other in others:
                value = other.bound(alpha, self._least, self._least, self._stalled)
                if value < self._least:
                    self._least = value
                    self._trials.remove(other)
                    self._trials.insert(0, other)
        self._fell = self._least / before if alpha > 1.0 else 1.0
        return self._least


class _Trials:
    """One bound at increasing α, and the share of it that is mass moved into δ."""

    def __init__(
        self, bound: Callable[[float, Pair, float], float], pair: Pair, end: float
    ) -> None:
        self._bound, self._pair, self._end = bound, pair, end
        self._share, self._factor = _FIRST_SHARE, _FACTOR
        self._wait = self._waited = 0

    def bound(self, alpha: float, guess: float, known: float, stalled: bool) -> float:
        """Returns an upper bound of H_α, about `guess`; a good one only if it is below `known`."""
        lost = min(self._share * guess, _MOST_SHARE * known) / alpha
        value = self._bound(alpha, self._pair, lost)
        self._waited += 1
        if stalled:
            value, lost = self._descended(alpha, value, lost, _FAR, math.inf)
        if stalled or self._waited > self._wait:
            self._waited = 0
            before = value
            value, lost = self._descended(alpha, value, lost, self._factor, _HOPELESS * known)
            if value == before:
                self._factor = 1.0 / self._factor
                value, lost = self._descended(alpha, value, lost, self._factor, _HOPELESS * known)
            self._wait = 0 if value < before else min(2 * self._wait + 1, _PATIENCE)
        self._share = alpha * lost / min(value, guess)
        return value

    def _descended(
        self, alpha: float, value: float, lost: float, factor: float, most: float
    ) -> tuple[float, float]:
        """Returns the bound and its mass after trials of masses changed by `factor`."""
        while (
            value - 2.0 * alpha * lost < most
            and self._end < factor * lost < _MOST_SHARE * value / alpha
        ):
            found = self._bound(alpha, self._pair, lost * factor)
            if found > _GAIN * value:
                break
            value, lost = found, lost * factor
        return value, lost
