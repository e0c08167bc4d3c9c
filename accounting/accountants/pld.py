"""`pld`: the tight (ε, δ) of the homogeneous pair, from above.

Under the homogeneous pair the likelihood ratio of a round's shuffled reports is distributed as

    W̄ = 1 + (1/n) Σ_{i ≤ n} Z_i,      Z_i = Y_i - 1 with probability γ, otherwise 0

(`docs/theory/gaussian.md`, section 2), so both hockey-stick divergences are expectations of convex
functions of one sum, `δ(ε) = E[(W̄ - e^ε)_+]` and, reversed, `E[(1 - e^ε W̄)_+]`.
`numerics.graded_law` bounds them from above.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

from shufl.accounting.accountants.local import AmplifiedAccountant
from shufl.accounting.accountants.renyi import CheckInRdpAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian_divergence import gaussian_losses, log_gaussian_delta
from shufl.accounting.numerics.graded_law import BoundedLaw, law_of_sum
from shufl.accounting.numerics.loss_pmf import MAX_LOSS, USUAL_LEAST
from shufl.accounting.numerics.summand import Summand
from shufl.protocol.events import CheckIn, FixedSize, Shuffled

# With less noise e^{t/σ} overflows in the tails; a user's own report is all that is accounted.
LEAST_SIGMA = 0.08
# Mesh points in the scale of the sum: the bounds are 1e-4 of ε apart where tails are light.
_POINTS = 100


class PldAccountant(AmplifiedAccountant):
    """Numerically tight (ε, δ) of the homogeneous pair, and how far below it could still be.

    Source: sections 2 and 5 of docs/theory/gaussian.md. Its ε is never above that of `rdp`.

    Guarantee:
        ε holds for the homogeneous pair only (all other users hold the differing user's record),
        numerically tight; the same assumptions as theorem3.
    """

    name = "pld"
    covers = (
        "the homogeneous pair only (all other users hold the differing user's record), "
        "numerically tight; the same assumptions as theorem3"
    )
    holds_for = "homogeneous pair"

    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        epsilons, forward, reverse = round_profile(event, self._sigma(event), least)
        return epsilons, np.stack([forward, reverse])

    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        return min(super()._epsilon(counts, delta), self._moments()._epsilon(counts, delta))

    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        return min(super()._delta(counts, epsilon), self._moments()._delta(counts, epsilon))

    def _moments(self) -> CheckInRdpAccountant:
        """A bound for the same pair: smaller where rounds are so many that the grid is coarse."""
        return CheckInRdpAccountant(self.neighboring_relation)

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if any(0.0 < self._sigma(event) < LEAST_SIGMA for event in self._counts):
            return f"noise below {LEAST_SIGMA:g} of the sensitivity is priced as if unshuffled"
        return super().note(delta)


def _law_of(event: Shuffled, sigma: float, lower: bool, least: float = USUAL_LEAST) -> BoundedLaw:
    """The law of Σ Z."""
    if isinstance(event.participation, FixedSize):
        summand, terms = _report(1.0, sigma, least), event.participation.reports
    else:
        summand, terms = _report(event.chance, sigma, least), event.users
    return law_of_sum(summand, terms, _POINTS, lower)


def round_profile(
    event: Shuffled, sigma: float, least: float = USUAL_LEAST
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns a profile of one round from above: P against Q, and the reverse.

    The event's reports are Gaussian, at least one if their number is fixed; σ > 0 is the noise in
    units of a report's sensitivity. δ below `least` are not told apart. Returns epsilons from 0 and
    both deltas, of the same shape.
    """
    # More summands, more privacy (section 1): one alone bounds both. Its exact values serve where
    # the grid is too coarse for a ratio near 0, which only few reports can have.
    coins = isinstance(event.participation, CheckIn)
    one = _Single(event.chance, 1.0, sigma) if coins else _Single(1.0, event.chance, sigma)
    if sigma < LEAST_SIGMA:
        epsilons = gaussian_losses(1.0 / sigma, least)
        return epsilons, one.forward(epsilons), one.reverse(epsilons)
    law = _law_of(event, sigma, lower=False, least=least)
    epsilons = _losses(law, event.users)
    forward = law.call(event.users * np.expm1(epsilons)) / event.users
    reverse = np.exp(epsilons) * law.put(event.users * np.expm1(-epsilons)) / event.users
    forward = np.minimum(forward, one.forward(epsilons))
    reverse = np.minimum(reverse, one.reverse(epsilons))
    return epsilons, forward, np.minimum(reverse, _all_low(event, sigma, epsilons))


def _losses(law: BoundedLaw, users: int) -> FloatArray:
    """ε >= 0 at which the profile bends: the logarithms of the ratios, of either sign."""
    shares = law.places / users
    losses = np.concatenate(
        [[0.0], np.log1p(shares[shares > 0.0]), -np.log1p(shares[(shares < 0.0) & (shares > -1.0)])]
    )
    return np.unique(losses[losses <= MAX_LOSS])


def _report(rate: float, sigma: float, least: float = USUAL_LEAST) -> Summand:
    """Z: `e^{t/σ - 1/2σ²} - 1` with probability `rate`, otherwise 0."""
    step = 1.0 / sigma
    half = 0.5 * step * step

    def inverse(z: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            logs: FloatArray = np.log1p(np.maximum(z, -1.0))
        return (logs + half) / step

    return Summand(
        atoms=((0.0, 1.0 - rate),),
        rate=rate,
        value=lambda t: np.expm1(step * t - half),
        inverse=inverse,
        tail=step,
        jump=2.0 * math.erf(step / math.sqrt(8.0)),
        least=least,
    )


def _all_low(event: Shuffled, sigma: float, epsilons: FloatArray) -> FloatArray:
    """`P[W̄ < e^{-ε}]` at most: that of each summand being below n e^{-ε}, as none is negative."""
    absent, terms = 0.0, event.users
    if isinstance(event.participation, FixedSize):
        terms = event.participation.reports
        absent = float(event.users - terms)
    below = event.users * (np.exp(-epsilons) + 1e-15) - absent  # rounding errs by less
    rate = event.chance if isinstance(event.participation, CheckIn) else 1.0
    with np.errstate(divide="ignore"):
        places = sigma * np.log(np.maximum(below, 0.0)) + 0.5 / sigma
    chances = rate * special.ndtr(places) + (1.0 - rate) * (below > 1.0)
    return np.asarray(np.minimum(chances, 1.0) ** terms * (1.0 + 1e-13 * terms))


class _Single(NamedTuple):
    """`1 + share Z` for a single Z, which is Y - 1 with this chance."""

    chance: float
    share: float
    sigma: float

    def forward(self, epsilons: FloatArray) -> FloatArray:
        """`E[(1 + share Z - e^ε)_+]`."""
        strike = np.log1p(np.minimum(np.expm1(epsilons) / self.share, 1e300))
        call = np.exp(log_gaussian_delta(1.0 / self.sigma, strike))
        return np.asarray(self.chance * self.share * call)

    def reverse(self, epsilons: FloatArray) -> FloatArray:
        """`E[(1 - e^ε (1 + share Z))_+]`."""
        strike = 1.0 + np.expm1(-epsilons) / self.share
        reached = strike > 0.0
        # E[(k - Y)_+] = k E[(Y - 1/k)_+]: Y and its reciprocal are each other's image.
        loss = -np.log(np.where(reached, strike, 1.0))
        put = strike * np.exp(log_gaussian_delta(1.0 / self.sigma, loss))
        return np.asarray(np.exp(epsilons) * self.chance * self.share * np.where(reached, put, 0.0))
