"""How far `blanket` and `pld` may be above the truth: lower bounds of the same pair, of sums and ε.

Proofs: docs/theory/blanket.md, section 6, and docs/theory/gaussian.md, section 5.
"""

import functools
import math
from unittest import mock

import numpy as np
from lower_profile import LowerProfile, epsilon_from_below

from shufl.accounting import BlanketAccountant, PldAccountant
from shufl.accounting.accountants.blanket import divergence_of
from shufl.accounting.accountants.pld import _report
from shufl.accounting.numerics import jump_sum
from shufl.accounting.numerics.graded_law import law_of_sum
from shufl.accounting.numerics.jump_counts import PoissonCount
from shufl.accounting.numerics.loss_pmf import MAX_LOSS, USUAL_LEAST
from shufl.accounting.numerics.worst_pairs import _next_loss, pairs_of
from shufl.protocol import FixedSize

LEAST_SURE = 1e-16


def positive_part_from_below(jumps, count):
    """A lower bound of `E[(b + S)_+]`: what the sum over frequencies may add is taken off.

    The upper bound adds a Gaussian to some sums; this one does not.
    """
    law = jump_sum._Law(jumps, count)
    if law.jump.at_end:
        law = jump_sum._Law(jumps, count, jump_sum.FARTHEST)
    with mock.patch.object(jump_sum, "_SMOOTH", 0.0):
        line = jump_sum._line(law, count)
    if line is None:
        return 0.0
    found = line.read(np.zeros(1))[0] - line.slack - aliases(law, line)
    alone = law.one_jump() if line.few_out else 0.0
    return max(math.exp(line.level) * float(found), 0.0) + alone + sure_excess(law, count)


def aliases(law, line):
    """What the trapezoidal rule adds at most, in units of `e^level`."""
    c, level, period = line.c, line.level, line.period
    most = math.exp(level) / (math.e * c)  # of E[(b + S)_+]
    near = math.exp(-c * period - level) * (period + most) * 1.01
    others = law._steeper(c)
    exponents = law.cumulants(others)[0] - level - (others - c) * period
    ratios = -np.expm1(-(others - c) * period)
    far = np.exp(np.minimum(exponents, 50.0)) / (math.e * others * ratios)
    return near + float(np.min(far, initial=math.inf))


def sure_excess(law, count):
    """What the caps certainly took off: where b + S is positive with one jump at its cap."""
    # It is not if a jump goes down far, or if the others come to less than -cap: Chernoff.
    jump, least = law.jump, math.inf
    for share in (0.1, 0.2, 0.4, 0.8):
        near = jump.x > -share * jump.cap
        x = np.where(near, jump.x, 0.0)
        far = count.jumps * float(np.sum(jump.weights[~near]))
        for c in np.geomspace(2.0, 40.0, 12) / jump.cap:
            others = 1.0 - 1.0 / count.terms  # all but the one with the jump
            shift = c * count.shift
            level = count.cumulants(-c, law.tilt(-c, x))[0] + shift
            least = min(least, far + math.exp(min(others * level - shift - c * jump.cap, 0.0)))
    return count.jumps * jump.excess * max(1.0 - least, 0.0)


def divergence_from_below(event, alpha, pair):
    """A lower bound of what `divergence_of` bounds from above."""
    rate, blankets = event.chance, event.blankets
    count = PoissonCount(blankets, -blankets / rate * (1.0 - rate) * (alpha - 1.0))
    jumps = pair.jumps(1.0 / event.mechanism.noise_multiplier, alpha)
    return rate / blankets * positive_part_from_below(jumps, count)


class BlanketFromBelow(BlanketAccountant):
    """`blanket` of Gaussian reports with z >= 0.2, which also has a lower bound."""

    def epsilon_lower_bound(self, target_delta):
        events, counts = tuple(self._counts), tuple(self._counts.values())
        profiles = [lower_profile(event, self.neighboring_relation) for event in events]
        mesh = self._prices.mesh(events, counts, USUAL_LEAST)
        return epsilon_from_below(profiles, counts, mesh, target_delta)


class PldFromBelow(PldAccountant):
    """`pld` of noisy rounds without blankets, which also has a lower bound, by one direction."""

    def epsilon_lower_bound(self, target_delta):
        events, counts = tuple(self._counts), tuple(self._counts.values())
        profiles = [profile_of_the_pair(event, self._sigma(event)) for event in events]
        mesh = self._prices.mesh(events, counts, USUAL_LEAST)
        return epsilon_from_below(profiles, counts, mesh, target_delta)


@functools.cache
def profile_of_the_pair(event, sigma):
    """A lower bound of the homogeneous pair's profile, P against Q, by the graded law."""
    rate, terms = event.chance, event.users
    if isinstance(event.participation, FixedSize):
        rate, terms = 1.0, event.participation.reports
    law = law_of_sum(_report(rate, sigma), terms, 100, lower=True)
    ratios = 1.0 + law.places / event.users
    ratios = ratios[ratios > math.exp(-MAX_LOSS)]
    return LowerProfile(np.log(ratios), law.call(event.users * (ratios - 1.0)) / event.users)


def lower_profile(event, relation):
    """A lower bound of the profile of the worst pair, first direction against second."""
    first, *rest = (both_bounds(event, pair) for pair in pairs_of(relation))
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
    with np.errstate(divide="ignore"):  # a line that is parallel to 1 - α does not meet it
        near = (1.0 - bottom[1] + back_out * x[1]) / (1.0 + back_out)
    if 0.0 < near < x[1]:
        places, values = np.append(places, near), np.append(values, 1.0 - near)
    if on_out < 0.0:
        places = np.append(places, x[-2] - bottom[-2] / on_out)
        values = np.append(values, 0.0)
    order = np.argsort(places)
    return LowerProfile(np.log(places[order]), values[order])


def both_bounds(event, pair):
    """α from 1, upper and lower bounds of H_α."""
    losses, tops = [0.0], [divergence_of(event, 1.0, pair)]
    bottoms = [divergence_from_below(event, 1.0, pair)]
    while (loss := _next_loss(losses, tops, event.mechanism.noise_multiplier)) < MAX_LOSS:
        losses.append(loss)
        tops.append(divergence_of(event, math.exp(loss), pair))
        bottoms.append(divergence_from_below(event, math.exp(loss), pair))
        if bottoms[-1] < LEAST_SURE:
            break
    return np.exp(losses), np.array(tops), np.array(bottoms)
