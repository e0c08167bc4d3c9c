"""`blanket`: the blanket-mixed Gaussian, for every pair of neighbouring datasets.

`docs/theory-blanket.md` proves: if the others' data is handed to the adversary, a round's
hockey-stick divergence between two records of user 1 is *exactly* one sum of n independent terms,

    H_α = (1/n) E[(V_1 + ... + V_n)_+],
    V = 0                                    with probability γ(1-β)   (a user who sent data)
        -(α - 1)                                            1-γ        (who did not check in)
        (1-β)/β (E(τ) - α E'(τ)) - (α - 1)                  γβ         (who sent a blanket)

and it is largest for two opposite records of norm C: `E = e^{τ - w²/2}`, `E' = e^{-τ - w²/2}`,
τ ~ N(0, w²), w = 1/z; under `zero-out` one of the two is 1. `accounting.graded_law` bounds the
expectation for one α after the other; the rounds compose by their profile.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation

from accounting.events import ShuffledCheckInBlanketGaussianDpEvent
from accounting.gaussian import gaussian_losses, log_gaussian_delta
from accounting.graded_law import Summand, law_of_sum
from accounting.loss_pmf import MAX_LOSS, FloatArray
from accounting.profiles import ProfileShuffleAccountant

# Mesh points in the scale of the sum: they cost 0.1 % of ε.
_POINTS = 12
# α - 1 at which the divergence is computed, in units of the scale of the mean: chords between.
_STEP = 0.2
_EVEN_UNTIL = 6.0
_GROWTH = 1.15
_FAR, _FAR_GROWTH = 100.0, 1.25
_NEGLIGIBLE = 1e-22
# With less noise the tails reach over too many orders of magnitude; blankets hide little then.
LEAST_NOISE = 0.2

# Two records at w = 1/z and α: E - αE' as a function of t ~ N(0, 1), increasing; its inverse; and
# how far apart the records are, in standard deviations of the noise.
Pair = tuple[Callable[[FloatArray], FloatArray], Callable[[FloatArray], FloatArray], float]
MakePair = Callable[[float, float], Pair]


class BlanketAccountant(ProfileShuffleAccountant):
    """(ε, δ) of the blanket-mixed Gaussian: tight up to handing over the others' data.

    Source: docs/theory-blanket.md.
    """

    name = "blanket"
    holds_for = "every pair"
    covers = (
        "every pair of neighbouring datasets, in any dimension; assumes that all n users flip "
        "their coins every round and send blankets and noise as agreed, and that the server gets "
        "nothing of the round but the shuffled reports"
    )
    events = (ShuffledCheckInBlanketGaussianDpEvent,)

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if any(self._is_private(e) and e.noise_multiplier < LEAST_NOISE for e in self._counts):
            return f"with noise multipliers below {LEAST_NOISE:g} blankets are not counted on"
        return super().note(delta)

    def _profile(self, event: Any) -> tuple[FloatArray, FloatArray]:
        zero_out = self.neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
        return round_profile(event, zero_out)


def round_profile(event: Any, zero_out: bool) -> tuple[FloatArray, FloatArray]:
    """Returns a certified profile of one round, for every pair of neighbouring datasets.

    Below z = 0.2 the blankets are not counted on: the report of user 1 is bounded as if alone.

    Args:
        event: A ShuffledCheckInBlanketGaussianDpEvent with z > 0.
        zero_out: Whether one of the two records is zero (else both are anywhere in the ball).

    Returns:
        epsilons from 0 and deltas, both directions' maximum, same shape.
    """
    shift = (1.0 if zero_out else 2.0) / event.noise_multiplier
    # Blankets aside: user 1's report alone, seen with probability γ, has its update with 1 - β.
    chance = event.check_in_rate * (1.0 - event.blanket_probability)

    def alone(losses: npt.ArrayLike) -> FloatArray:
        values: FloatArray = chance * np.exp(log_gaussian_delta(shift, losses))
        return values

    if event.noise_multiplier < LEAST_NOISE:
        losses = gaussian_losses(shift)
        return losses, alone(losses)
    pairs = (_against_zero, _zero_against) if zero_out else (_opposite,)
    first = _summand(event, 1.0, pairs[0])
    unit = min(
        math.expm1(shift), first.jump * math.sqrt(max(1.0, event.users * first.rate)) / event.users
    )
    epsilons: list[float] = []
    deltas: list[float] = []
    place = 0.0
    while not deltas or deltas[-1] > _NEGLIGIBLE:
        alpha = 1.0 + unit * place
        if alpha > math.exp(MAX_LOSS):
            break
        epsilons.append(math.log1p(alpha - 1.0))
        deltas.append(max(divergence(event, alpha, pair) for pair in pairs))
        growth = _GROWTH if place < _FAR else _FAR_GROWTH
        place = place + _STEP if place < _EVEN_UNTIL else place * growth
        while 1.0 + unit * place == alpha:  # n so large that δ is a rounding error
            place *= 2.0
    return np.array(epsilons), np.minimum(deltas, alone(epsilons))


def divergence(event: Any, alpha: float, pair: MakePair) -> float:
    """Returns an upper bound of H_α, α >= 1, for one direction of one pair."""
    law = law_of_sum(_summand(event, alpha, pair), event.users, _POINTS)
    return float(law.call(np.zeros(1))[0]) / int(event.users)


def _summand(event: Any, alpha: float, pair: MakePair) -> Summand:
    """V."""
    rate, beta = event.check_in_rate, event.blanket_probability
    weight = (1.0 - beta) / beta
    excess = alpha - 1.0
    width = 1.0 / event.noise_multiplier
    ratio, inverse, distance = pair(width, alpha)
    return Summand(
        atoms=((0.0, rate * (1.0 - beta)), (-excess, 1.0 - rate)),
        rate=rate * beta,
        value=lambda t: weight * ratio(t) - excess,
        inverse=lambda v: inverse((v + excess) / weight),
        tail=width,
        # The first is the scale of V for α near 1, the second for α far from it.
        jump=max(2.0 * weight * math.erf(distance / math.sqrt(8.0)), excess),
        aligned=excess if rate < 1.0 else 0.0,
    )


def _opposite(width: float, alpha: float) -> Pair:
    """Records x and -x: e^{τ - w²/2} - αe^{-τ - w²/2}, τ = wt."""
    scale = math.exp(-0.5 * width * width)

    def ratio(t: FloatArray) -> FloatArray:
        tau = width * t
        return scale * (2.0 * np.sinh(tau) - (alpha - 1.0) * np.exp(-tau))

    def inverse(value: FloatArray) -> FloatArray:
        # e^τ solves u - α/u = value/scale.
        half = 0.5 * np.abs(value) / scale
        larger = half + np.hypot(half, math.sqrt(alpha))
        logs = np.where(value >= 0.0, np.log(larger), math.log(alpha) - np.log(larger))
        return logs / width

    return ratio, inverse, 2.0 * width


def _against_zero(width: float, alpha: float) -> Pair:
    """Record x against zero: E - α."""
    half = 0.5 * width * width

    def inverse(value: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            logs: FloatArray = np.log(np.maximum(value + alpha, 0.0))
        return (logs + half) / width

    return lambda t: np.expm1(width * t - half) - (alpha - 1.0), inverse, width


def _zero_against(width: float, alpha: float) -> Pair:
    """Zero against record x: 1 - αE, with t = -τ/w."""
    half = 0.5 * width * width

    def inverse(value: FloatArray) -> FloatArray:
        with np.errstate(divide="ignore"):
            logs: FloatArray = np.log(np.maximum((1.0 - value) / alpha, 0.0))
        return -(logs + half) / width

    return lambda t: 1.0 - alpha * np.exp(-width * t - half), inverse, width
