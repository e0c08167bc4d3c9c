"""Accountants whose bound gives up some total variation, the defect, and search for the best.

A round's reports are replaced by ones that are easier to price, η away in total variation. That
adds about 2γη to the profile, γ the chance that a user reports, and more is hidden the larger η is.
Every η = 2^{-v} gives a bound; the least is taken.
"""

import abc
import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from accounting.composition import Target, count_block
from accounting.events import FixedSizeShuffledGaussianDpEvent, ShuffledCheckInGaussianDpEvent
from accounting.loss_pmf import FloatArray, Profile
from accounting.profiles import Counts, Lru, ProfileShuffleAccountant

_MOST_STEPS = 40
_COARSE = 6
_COARSE_DOWN = 3
_FALLING = 1.0 - 1e-4
_VARIANTS = Lru(1024)


class DefectAccountant(ProfileShuffleAccountant):
    """Base of accountants that search a defect; a subclass prices one in `_profile_of`."""

    def _profile(self, event: Any) -> tuple[FloatArray, FloatArray]:
        """One round's profile with a defect of 2^{-43}; `_search` tries the others."""
        return self._profile_of(event, 43)

    @abc.abstractmethod
    def _profile_of(self, event: Any, variant: Hashable) -> tuple[FloatArray, FloatArray]:
        """The profile for v, the variant, or for `_probe(v)`."""

    def _probe(self, v: int) -> Hashable:
        """The variant to look for the best v with: one that may be coarser and faster."""
        return v

    def _search(self, counts: Counts, target: Target, read: Callable[[Hashable], float]) -> float:
        """The least answer over the ladder of defects η = 2^{-v}."""
        if target.delta is not None:
            events = tuple(event for event, _ in counts)
            blocks = tuple(count_block(count)[1] for _, count in counts)
            key = (self._cache_key(), events, blocks, target)
            return min(map(read, _VARIANTS.find(key, lambda: self._variants(counts, target))))
        # In v, δ falls steeply (the defect), with kinks, and rises gently: look coarsely first.
        values: dict[int, float] = {}

        def probed(v: int) -> float:
            if v not in values:
                values[v] = read(self._probe(v))
            return values[v]

        best, start = 1, _first(counts, 1.0)
        for v in range(1, start + _MOST_STEPS * _COARSE, _COARSE):
            if probed(v) <= values[best]:
                best = v
            if v >= max(best, start) + 3 * _COARSE:
                break
        _descend(lambda v: probed(best - v), 1, min(_COARSE, best) - 1)
        _descend(probed, best + 1, _COARSE - 1)
        return read(min(values, key=lambda v: (values[v], v)))

    def _variants(self, counts: Counts, target: Target) -> tuple[int, ...]:
        """The best v at the last counts of the block, and the one below: that of lesser counts.

        One choice for a whole block: a guard's later questions need no search, and the answer is
        the same function of the counts whoever asks.
        """
        first = tuple((event, count_block(count)[0]) for event, count in counts)
        last = tuple((event, count_block(count)[1]) for event, count in counts)
        delta = target.delta or 0.0
        found: dict[int, float] = {}

        def lost(v: int, times: Counts) -> bool:
            ends = [
                (self._envelope(event, self._probe(v))[0].deltas[-1], count)
                for event, count in times
            ]
            finite = sum(count * math.log1p(-min(end, 0.5)) for end, count in ends)
            return bool(-math.expm1(finite) >= delta)

        def epsilon(v: int) -> float:
            if v not in found:
                found[v] = math.inf
                if not lost(v, last):
                    composed = self._composed(last, self._probe(v), target)
                    found[v] = composed[0].epsilon(composed[1], delta) if composed else 0.0
            return found[v]

        start = _first(last, delta)
        _descend(epsilon, start)
        # Where the Gaussian alone bounds the tail before the defect does, a larger
        # defect that hides more may do better: far below, as a rule.
        if all(
            self._envelope(event, self._probe(start))[0].deltas[-1] < 1e-6 * 2.0**-start
            for event, _ in last
        ):
            for v in range((start - 1) // _COARSE_DOWN * _COARSE_DOWN, 0, -_COARSE_DOWN):
                if not epsilon(v) <= 1.05 * min(found.values()):
                    break
        best = min(found, key=lambda v: (found[v], v))
        for step in (-1, 1):
            v = best
            while v + step >= 1 and epsilon(v + step) < found[v] * _FALLING:
                v += step
        best = min(found, key=lambda v: (found[v], v))
        return (best,) if best == 1 or lost(best - 1, first) else (best - 1, best)


def _first(counts: Counts, delta: float) -> int:
    """The v from which on 2 q η in every round is at most δ."""
    weight = math.fsum(2.0 * count * _participation(event) for event, count in counts)
    return math.ceil(max(math.log2(weight / max(delta, 1e-300)), 1.0))


def _participation(event: Any) -> float:
    if isinstance(event, ShuffledCheckInGaussianDpEvent):
        return float(event.check_in_rate)
    if isinstance(event, FixedSizeShuffledGaussianDpEvent):
        return float(event.reports / event.users)
    return 1.0


def _descend(read: Callable[[int], float], start: int, most: int = _MOST_STEPS) -> float:
    """The least of `read(start)`, `read(start + 1)`, … while they fall; `most` of them at most."""
    best = math.inf
    for v in range(start, start + most):
        value, before = read(v), best
        best = min(best, value)
        if before < math.inf and value >= before * _FALLING:
            break
    return best


def without_far_tail(
    epsilons: FloatArray, deltas: FloatArray, level: float
) -> tuple[FloatArray, FloatArray]:
    """Ends the profile where others hide nothing more and the Gaussian alone does far later.

    A δ of about the defect is left. As an infinite loss it costs little more than as a loss many
    times all others, and composes in far shorter windows.
    """
    hull = Profile.enveloping(epsilons, deltas)
    jumps = (hull.epsilons[1:] > 4.0 * hull.epsilons[:-1]) & (hull.epsilons[:-1] > 0.0)
    ends = np.flatnonzero(jumps & (hull.deltas[:-1] <= level))
    last = int(ends[0]) + 1 if ends.size else hull.epsilons.size
    return hull.epsilons[:last], hull.deltas[:last]
