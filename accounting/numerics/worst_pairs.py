"""The worst pairs of one user's records among blankets, and how their profile is read.

Section 3 of docs/theory/blanket.md: of all pairs of records in the ball of radius C, two opposite
ones on its surface are the worst whatever blankets hide them; under zero-out one of the two is
zero. Against a blanket a report at `τ = wt`, `w = 1/z`, then has the density ratio
`E = e^{τ - w²/2}` for the one record and `E' = e^{-τ - w²/2}` for the other, or 1 if that is zero.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
from dp_accounting import NeighboringRelation

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.capped_jump import Jumps
from shufl.accounting.numerics.gaussian import gaussian_losses, log_gaussian_delta
from shufl.accounting.numerics.loss_pmf import MAX_LOSS
from shufl.accounting.numerics.lower_profile import LowerProfile

# α - 1 at which a divergence is computed, in units of the scale of the mean: chords between.
_STEP, _EVEN_UNTIL = 0.125, 5.0
_GROWTH = 1.1
_FAR, _FAR_GROWTH = 30.0, 1.25
_FLAT_GROWTH = 1.25
_FALL = math.log(1.5)  # of the logarithm of a divergence, from one α to the next
_AS_ALONE = 0.995
_LEAST_SURE = 1e-16
# With less noise the ratios reach over too many orders of magnitude; others hide little then, and
# nothing is counted on but the report's own noise and its coin.
LEAST_NOISE = 0.2

Pair = Callable[[float, float], Jumps]
"""E - αE' as a jump, from w and α."""

# An upper or (True) a lower bound of H_α for one direction of a pair.
Divergence = Callable[[float, Pair, bool], float]


def opposite(width: float, alpha: float) -> Jumps:
    """Records x and -x: `e^{τ - w²/2} - α e^{-τ - w²/2}`."""
    scale = math.exp(-0.5 * width * width)
    return Jumps(
        lambda t: scale * (2.0 * np.sinh(width * t) - (alpha - 1.0) * np.exp(-width * t)),
        lambda t: scale * width * (np.exp(width * t) + alpha * np.exp(-width * t)),
        1.0 - alpha,
        width,
    )


def against_zero(width: float, alpha: float) -> Jumps:
    """Record x against zero: E - α."""
    half = 0.5 * width * width
    return Jumps(
        lambda t: np.expm1(width * t - half) - (alpha - 1.0),
        lambda t: width * np.exp(width * t - half),
        1.0 - alpha,
        width,
    )


def zero_against(width: float, alpha: float) -> Jumps:
    """Zero against record x: 1 - αE, with t = -τ/w."""
    half = 0.5 * width * width
    return Jumps(
        lambda t: -np.expm1(-width * t - half) - (alpha - 1.0) * np.exp(-width * t - half),
        lambda t: alpha * width * np.exp(-width * t - half),
        1.0 - alpha,
        width,
    )


def pairs_of(relation: NeighboringRelation) -> tuple[Pair, ...]:
    """Returns the worst pair in both directions; one if they are mirror images."""
    if relation is NeighboringRelation.REPLACE_SPECIAL:
        return against_zero, zero_against
    return (opposite,)


def apart(relation: NeighboringRelation, noise_multiplier: float) -> float:
    """Returns how far apart the two records are, in standard deviations of the noise."""
    records = 1.0 if relation is NeighboringRelation.REPLACE_SPECIAL else 2.0
    return records / noise_multiplier


def note_on(noise_multipliers: Iterable[float]) -> str | None:
    """Returns one line where `upper_profile` counts on no others; otherwise None."""
    if all(noise >= LEAST_NOISE for noise in noise_multipliers):
        return None
    return f"with noise multipliers below {LEAST_NOISE:g} no other report is counted on"


def upper_profile(
    divergence: Divergence,
    rate: float,
    noise_multiplier: float,
    relation: NeighboringRelation,
    least: float,
    coarseness: float = 1.0,
) -> tuple[FloatArray, FloatArray]:
    """Returns a profile: upper bounds of each direction, or of the report without any others.

    Seen alone, with the chance γ that it is sent at all, a report has `H_α = γ δ_G(α)`; others
    only hide it.

    `divergence` is that of one round, `rate` is γ and z > 0. δ below `least` are not told apart.
    The steps of α are `coarseness` times as long as they should be. Returns epsilons from 0 of
    shape (K,) and deltas, of the same shape if the directions are mirror images, otherwise of shape
    (2, K).
    """
    shift, pairs = apart(relation, noise_multiplier), pairs_of(relation)

    def alone(losses: FloatArray) -> FloatArray:
        return np.asarray(rate * np.exp(log_gaussian_delta(shift, losses)))

    if noise_multiplier < LEAST_NOISE:
        epsilons = gaussian_losses(shift, least)
        return epsilons, alone(epsilons)

    losses, deltas = [0.0], [divergence(1.0, pairs[0], False)]
    while (loss := _next_loss(losses, deltas, noise_multiplier, coarseness)) < MAX_LOSS:
        losses.append(loss)
        deltas.append(divergence(math.exp(loss), pairs[0], False))
        if deltas[-1] < least:
            break
        # Where nothing is hidden any more, once that is no matter of α's being next to 1.
        seen = float(alone(np.array(loss)))
        if deltas[-1] >= _AS_ALONE * seen and seen < 0.5 * float(alone(np.zeros(()))):
            beyond = gaussian_losses(shift, least)
            losses.extend(beyond[beyond > loss].tolist())
            break
    epsilons = np.array(losses)
    computed = [np.append(deltas, np.ones(epsilons.size - len(deltas)))]
    for pair in pairs[1:]:
        values = [divergence(math.exp(loss), pair, False) for loss in losses[: len(deltas)]]
        computed.append(np.append(values, np.ones(epsilons.size - len(deltas))))
    found = np.minimum(computed, alone(epsilons))
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


def lower_profile(
    divergence: Divergence, noise_multiplier: float, relation: NeighboringRelation
) -> LowerProfile:
    """Returns a lower bound of the profile of the worst pair, first direction against second.

    `divergence` is that of one round, and z > 0.
    """
    first, *rest = (_both_bounds(divergence, pair, noise_multiplier) for pair in pairs_of(relation))
    x, top, bottom = first
    mirrored, tops, bottoms = (each[:0:-1] for each in (rest[0] if rest else first))
    # H_{1/α}(P‖Q) = 1 - 1/α + H_α(Q‖P)/α.
    x = np.concatenate([1.0 / mirrored, x])
    top = np.concatenate([1.0 + (tops - 1.0) / mirrored, top])
    bottom = np.concatenate([1.0 + (bottoms - 1.0) / mirrored, bottom])
    # The divergence is convex: a chord's upper start and lower end, drawn on, lie below it.
    width = np.diff(x)
    onward = (bottom[1:-2] - top[:-3]) / width[:-2]
    back = (top[3:] - bottom[2:-1]) / width[2:]
    start, end = x[1:-2], x[2:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        at = bottom[1:-2] - bottom[2:-1] - onward * start + back * end
        at = at / (back - onward)
        inside = (back > onward) & (at > start) & (at < end)
    places = np.concatenate([x[1:-1], at[inside]])
    values = np.concatenate([bottom[1:-1], (bottom[1:-2] + onward * (at - start))[inside]])
    # The outermost lines end where they meet 1 - α, and 0.
    back_out, on_out = (top[2] - bottom[1]) / width[1], (bottom[-2] - top[-3]) / width[-2]
    near = (1.0 - bottom[1] + back_out * x[1]) / (1.0 + back_out)
    if 0.0 < near < x[1]:
        places, values = np.append(places, near), np.append(values, 1.0 - near)
    if on_out < 0.0:
        places = np.append(places, x[-2] - bottom[-2] / on_out)
        values = np.append(values, 0.0)
    order = np.argsort(places)
    return LowerProfile(np.log(places[order]), values[order])


def _both_bounds(
    divergence: Divergence, pair: Pair, noise_multiplier: float
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """α from 1, upper and lower bounds of H_α."""
    losses, tops = [0.0], [divergence(1.0, pair, False)]
    bottoms = [divergence(1.0, pair, True)]
    while (loss := _next_loss(losses, tops, noise_multiplier)) < MAX_LOSS:
        losses.append(loss)
        tops.append(divergence(math.exp(loss), pair, False))
        bottoms.append(divergence(math.exp(loss), pair, True))
        if bottoms[-1] < _LEAST_SURE:
            break
    return np.exp(losses), np.array(tops), np.array(bottoms)
