"""The worst pairs of one user's records among blankets, and how their profile is read.

Section 3 of docs/theory/blanket.md: of all pairs of records in the ball of radius C, two opposite
ones on its surface are the worst whatever blankets hide them; under zero-out one of the two is
zero. Against a blanket a report at `τ = wt`, `w = 1/z`, then has the density ratio
`E = e^{τ - w²/2}` for the one record and `E' = e^{-τ - w²/2}` for the other, or 1 if that is zero.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from dp_accounting import NeighboringRelation

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.capped_jump import Jumps
from shufl.accounting.numerics.gaussian_divergence import gaussian_losses, log_gaussian_delta
from shufl.accounting.numerics.loss_pmf import MAX_LOSS

# Divergences are computed at α - 1 in these steps, in units of the scale of the mean, and joined by
# chords.
_STEP, _EVEN_UNTIL = 0.125, 5.0
_GROWTH = 1.1
_FAR, _FAR_GROWTH = 30.0, 1.25
_FLAT_GROWTH = 1.25
_FALL = math.log(1.5)  # of the logarithm of a divergence, from one α to the next
_AS_ALONE = 0.995
# With less noise the ratios reach over too many orders of magnitude; others hide little then, and
# nothing is counted on but the report's own noise and its coin.
LEAST_NOISE = 0.2


class Pair(NamedTuple):
    """Two records on a line through zero, in units of C, of which the first is the larger.

    Against noise around zero a report of the record m has the density ratio
    `E_m = e^{mwt - (mw)²/2}` at t ~ N(0, 1).
    """

    first: float
    second: float

    def jumps(self, width: float, alpha: float) -> Jumps:
        """Returns E - αE' of the first record against the second, at w and α."""
        one, two = self.first * width, self.second * width

        def value(t: FloatArray) -> FloatArray:
            less_one = np.expm1(one * t - 0.5 * one * one)
            less_two = np.expm1(two * t - 0.5 * two * two)
            return np.asarray(less_one - less_two - (alpha - 1.0) * (1.0 + less_two))

        def slope(t: FloatArray) -> FloatArray:
            first = one * np.exp(one * t - 0.5 * one * one)
            return np.asarray(first - alpha * two * np.exp(two * t - 0.5 * two * two))

        return Jumps(value, slope, 1.0 - alpha, max(abs(one), abs(two)))

    def seen_from(self, place: float) -> "Pair":
        """Returns the pair against noise around another record of the line."""
        return Pair(self.first - place, self.second - place)


OPPOSITE = Pair(1.0, -1.0)
AGAINST_ZERO, ZERO_AGAINST = Pair(1.0, 0.0), Pair(0.0, -1.0)

Divergence = Callable[[float, Pair], float]
"""An upper bound of H_α for one direction of a pair."""


def pairs_of(relation: NeighboringRelation) -> tuple[Pair, ...]:
    """Returns the worst pair in both directions; one if they are mirror images."""
    if relation is NeighboringRelation.REPLACE_SPECIAL:
        return AGAINST_ZERO, ZERO_AGAINST
    return (OPPOSITE,)


def upper_profile(
    divergence: Divergence,
    rate: float,
    noise_multiplier: float,
    relation: NeighboringRelation,
    least: float,
    coarseness: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Returns a profile of one round: the smaller of `divergence` and the report's own bound.

    Seen alone, and sent with probability γ, a report has `H_α = γ δ_G(α)`. Others only hide it.

    Args:
        divergence: Upper bounds of the round's H_α.
        rate: γ in (0, 1].
        noise_multiplier: z > 0.
        relation: REPLACE_ONE, or REPLACE_SPECIAL for zero-out.
        least: Deltas below it are not told apart.
        coarseness: Factor of the steps of α; larger steps save time and cost some ε.

    Returns:
        Epsilons from 0, of shape (K,), and deltas: of shape (K,) if the directions are mirror
        images, otherwise (2, K).
    """
    pairs = pairs_of(relation)
    shift = (pairs[0].first - pairs[0].second) / noise_multiplier

    def alone(losses: FloatArray) -> FloatArray:
        return np.asarray(rate * np.exp(log_gaussian_delta(shift, losses)))

    if noise_multiplier < LEAST_NOISE:
        epsilons = gaussian_losses(shift, least)
        return epsilons, alone(epsilons)

    losses, deltas = [0.0], [divergence(1.0, pairs[0])]
    while (loss := _next_loss(losses, deltas, noise_multiplier, coarseness)) < MAX_LOSS:
        losses.append(loss)
        deltas.append(divergence(math.exp(loss), pairs[0]))
        if deltas[-1] < least:
            break
        # From here on nothing hides the report. (Next to α = 1 that would say nothing yet.)
        seen = float(alone(np.array(loss)))
        if deltas[-1] >= _AS_ALONE * seen and seen < 0.5 * float(alone(np.zeros(()))):
            beyond = gaussian_losses(shift, least)
            losses.extend(beyond[beyond > loss].tolist())
            break
    epsilons = np.array(losses)
    alphas = np.exp(losses[: len(deltas)]).tolist()
    computed = [deltas, *([divergence(alpha, pair) for alpha in alphas] for pair in pairs[1:])]
    beyond = np.ones((len(pairs), epsilons.size - len(deltas)))
    found = np.minimum(np.concatenate([computed, beyond], axis=1), alone(epsilons))
    return epsilons, found if len(pairs) > 1 else found[0]


def _next_loss(
    losses: list[float], deltas: list[float], noise_multiplier: float, coarseness: float = 1.0
) -> float:
    """The next log α, chosen from the divergence at those before it; the first is α = 1."""
    unit, excess = 2.5 * deltas[0], math.expm1(losses[-1])
    place = excess / unit
    if place < _EVEN_UNTIL:
        onward = excess + unit * _STEP * coarseness
        flat = deltas[-1] > 0.5 * deltas[0]  # few are enough
        return math.log1p(max(onward, _FLAT_GROWTH * excess) if flat else onward)
    far = max(_FAR_GROWTH, math.exp(0.2 / noise_multiplier))
    growth = coarseness * math.log(_GROWTH if place < _FAR else far)
    if (fall := math.log(deltas[-2] / deltas[-1])) > 0.0:
        growth = min(growth, _FALL / fall * math.log(excess / math.expm1(losses[-2])))
    return math.log1p(excess * math.exp(growth))
