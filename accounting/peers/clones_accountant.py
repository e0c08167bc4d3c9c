"""The accountant of `accounting.peers.clones`: check-in, fixed-size and full rounds, composed."""

import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation
from scipy import stats

from accounting.accountants.profile import Counts, Lru, ProfileShuffleAccountant
from accounting.events import FixedSizeShuffledGaussianDpEvent, ShuffledCheckInGaussianDpEvent
from accounting.numerics.composition import Target, count_block
from accounting.numerics.gaussian import log_gaussian_delta
from accounting.numerics.loss_pmf import MAX_LOSS, FloatArray, Profile
from accounting.peers import clones

_BALL = 2.0  # distance of two records at most, in clip norms
_LADDER = math.log(2.0)
_MOST_STEPS = 40
_LARGE_DEFECT = 2.0**-12
_COARSE = 6
_COARSE_DOWN = 3
_FALLING = 1.0 - 1e-4
_MOST_DEVIATIONS = 13.0
_NEGLIGIBLE = 1e-32
_MOST_EXCESS = math.expm1(clones.MOST_EPSILON)


_VARIANTS = Lru(1024)


class _Reports(NamedTuple):
    """Blocks of counts k: first, last, an upper bound of the probability; n users."""

    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    chance: FloatArray
    users: int


@functools.lru_cache(maxsize=256)
def reports_of(event: Any) -> _Reports:
    """Returns how many report in a round of `event`; k = 0 loses nothing and is left out."""
    n = event.users
    if not isinstance(event, ShuffledCheckInGaussianDpEvent) or event.check_in_rate == 1.0:
        k = event.reports if isinstance(event, FixedSizeShuffledGaussianDpEvent) else n
        one = np.array([k], dtype=np.int64)
        return _Reports(one, one, np.ones(1), n)
    rate = event.check_in_rate
    mean, deviation = n * rate, math.sqrt(n * rate * (1.0 - rate))
    first = clones.block_starts(mean, deviation, 1, n)
    # Joining blocks is safe (the first count's clones, the last one's sampling rate): do so where
    # hardly any mass is.
    up_to, beyond = stats.binom.cdf(first[1:] - 1, n, rate), stats.binom.sf(first[:-1] - 1, n, rate)
    likely = (np.append(up_to, 1.0)[1:] > _NEGLIGIBLE) & (beyond > _NEGLIGIBLE)
    first = first[np.append(True, likely)]
    last = np.append(first[1:] - 1, n)
    below, above = stats.binom.cdf(last, n, rate), stats.binom.sf(first - 1, n, rate)
    lower = below - stats.binom.cdf(first - 1, n, rate)
    upper = above - stats.binom.sf(last, n, rate)
    # The smaller of two tails keeps its digits; rounding errs relative to the tail.
    chance = np.where(last < mean, lower + 1e-9 * below, upper + 1e-9 * above)
    return _Reports(first, last, np.clip(chance * (1.0 + 1e-9), 0.0, 1.0), n)


class ClonesAccountant(ProfileShuffleAccountant):
    """Every pair of neighbouring datasets, in any dimension.

    Under zero-out the differing user's two records are C apart, but another user's can be 2C from
    one of them, and a user left out by the coins puts another in its place: both are priced so.
    """

    name = "clones"
    holds_for = "every pair"
    covers = (
        "every pair of neighbouring datasets, in any dimension; "
        "assumes the shuffler does not collude with the server"
    )

    def _profile(self, event: Any) -> tuple[FloatArray, FloatArray]:
        """One round's profile with a defect of e^{-30}; `_search` tries the others."""
        return self._profile_of(event, round(30.0 / _LADDER))

    def _profile_of(self, event: Any, variant: Hashable) -> tuple[FloatArray, FloatArray]:
        assert isinstance(variant, int)
        zero_out = self.neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
        return round_profile(event, math.exp(-variant * _LADDER), zero_out)

    def _search(self, counts: Counts, target: Target, read: Callable[[Hashable], float]) -> float:
        """The least answer over the ladder of defects η = 2^{-v}."""
        if target.delta is not None:
            events = tuple(event for event, _ in counts)
            blocks = tuple(count_block(count)[1] for _, count in counts)
            key = (self._cache_key(), events, blocks, target)
            return min(map(read, _VARIANTS.find(key, lambda: self._variants(counts, target))))
        # In v, δ falls steeply (the defect), with kinks, and rises gently: look coarsely first.
        values: dict[int, float] = {}
        best, start = 1, _first(counts, 1.0)
        for v in range(1, start + _MOST_STEPS * _COARSE, _COARSE):
            values[v] = read(v)
            if values[v] <= values[best]:
                best = v
            if v >= max(best, start) + 3 * _COARSE:
                break
        lower = _descend(lambda v: read(best - v), 1, min(_COARSE, best) - 1)
        return min(values[best], lower, _descend(read, best + 1, _COARSE - 1))

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
            ends = [(self._envelope(event, v)[0].deltas[-1], count) for event, count in times]
            finite = sum(count * math.log1p(-min(end, 0.5)) for end, count in ends)
            return bool(-math.expm1(finite) >= delta)

        def epsilon(v: int) -> float:
            if v not in found:
                found[v] = math.inf
                if not lost(v, last):
                    composed = self._composed(last, v, target)
                    found[v] = composed[0].epsilon(composed[1], delta) if composed else 0.0
            return found[v]

        start = _first(last, delta)
        _descend(epsilon, start)
        # Where the Gaussian alone bounds the tail before the clones' defect does, less clones with
        # less noise of their own may do better: far below, as a rule.
        if all(
            self._envelope(event, start)[0].deltas[-1] < 1e-6 * 2.0**-start for event, _ in last
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
    return math.ceil(max(math.log(weight / max(delta, 1e-300)) / _LADDER, 1.0))


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


def round_profile(event: Any, defect: float, zero_out: bool) -> tuple[FloatArray, FloatArray]:
    """Returns a certified profile of one round, for every pair of neighbouring datasets.

    Args:
        event: An event of `accounting.events` with noise multiplier z > 0.
        defect: η in (0, 1), the total variation given up at a typical number of reports.
        zero_out: Whether one of the two records is zero (else both are anywhere in the ball).

    Returns:
        epsilons from 0 and deltas, both directions' maximum, same shape.
    """
    reports = reports_of(event)
    if reports.last[-1] == 0:
        return np.zeros(1), np.zeros(1)
    replace = _Part(event.noise_multiplier, reports, defect, (_BALL, _BALL), _BALL)
    typical = float(np.sum(reports.chance * reports.last)) / reports.users
    part = replace
    if zero_out:
        part = _Part(event.noise_multiplier, reports, defect, (_BALL, 1.0), 1.0)
    grid = np.concatenate([part.grid(), replace.grid(4)]) if zero_out else part.grid()
    rates = [min(typical, 1.0), *_rare_rates(reports, typical)]
    steps = [1] + [6] * (len(rates) - 1)
    sampled = [np.log1p(q * np.expm1(grid[::step])) for q, step in zip(rates, steps, strict=True)]
    epsilons = np.unique(np.concatenate([[0.0], *sampled]))
    excess = np.expm1(epsilons)
    deltas = np.zeros_like(epsilons)
    for row, (first, last, chance) in enumerate(zip(*reports[:3], strict=True)):
        q = last / reports.users
        inner = np.minimum(excess / q, 1e304)
        if zero_out and q < 1.0:
            value = _zero_out(part, replace, row, inner, excess, first / reports.users, q)
        else:
            value = q * part.deltas(row, inner)
        deltas += chance * np.minimum(value, 1.0)
    if defect > _LARGE_DEFECT:
        return epsilons, deltas
    return _without_far_tail(epsilons, deltas, 8.0 * defect)


def _rare_rates(reports: _Reports, typical: float) -> list[float]:
    """Sampling rates well above the mean one that some number of reports may still bring."""
    rates = reports.last[reports.chance > 10.0 * _NEGLIGIBLE] / reports.users
    top = float(np.max(rates, initial=0.0))
    return np.geomspace(typical, top, 9)[1:].tolist() if top > 1.2 * typical else []


def _without_far_tail(
    epsilons: FloatArray, deltas: FloatArray, level: float
) -> tuple[FloatArray, FloatArray]:
    """Ends the profile where clones hide nothing more and the Gaussian alone does far later.

    A δ of about the defect is left. As an infinite loss it costs little more than as a loss many
    times all others, and composes in far shorter windows.
    """
    hull = Profile.enveloping(epsilons, deltas)
    jumps = (hull.epsilons[1:] > 4.0 * hull.epsilons[:-1]) & (hull.epsilons[:-1] > 0.0)
    ends = np.flatnonzero(jumps & (hull.deltas[:-1] <= level))
    last = int(ends[0]) + 1 if ends.size else hull.epsilons.size
    return hull.epsilons[:last], hull.deltas[:last]


def _zero_out(
    part: "_Part",
    replace: "_Part",
    row: int,
    inner: FloatArray,
    v: FloatArray,
    low: float,
    q: float,
) -> FloatArray:
    """q ((1-β) δ_replace + β δ_zero-out) for the worst sampling rate in low..q; α' = 1 + v."""
    zero_weight = (1.0 + v) * q * q / (q + v)
    # (1-β) q = q v (1-q)/(q+v) has one maximum in q, where q² + 2vq = v: q = 1/(√(1+1/v) + 1).
    with np.errstate(divide="ignore"):
        top = np.clip(1.0 / (np.sqrt(1.0 + 1.0 / v) + 1.0), low, q)
    replace_weight = top * v * (1.0 - top) / np.maximum(top + v, 1e-300)
    other = replace.deltas(row, inner)
    both = zero_weight * part.deltas(row, inner) + replace_weight * other
    result: FloatArray = np.minimum(both, q * other)
    return result


class _Part:
    """δ(α) given k, for one kind of pair: clones with their defects, or the Gaussian unshuffled."""

    def __init__(
        self,
        noise_multiplier: float,
        reports: _Reports,
        defect: float,
        distances: tuple[float, float],
        apart: float,
    ) -> None:
        usual = reports.last[
            min(int(np.searchsorted(np.cumsum(reports.chance), 1.0 - 1e-6)), reports.last.size - 1)
        ]
        parameters = clones.clone_parameters(
            noise_multiplier, distances, apart, int(usual) - 1, defect
        )
        self._clones = clones.CloneProfile(reports.first, parameters, reports.chance)
        self._defects = (reports.last - 1) * parameters.clone_defect + parameters.user_defect
        self._shift = apart / noise_multiplier
        # δ of the Gaussian alone, a convex function of α: chords are above.
        levels = np.linspace(-_MOST_DEVIATIONS, _MOST_DEVIATIONS, 4001)
        epsilons = self._shift * (levels + self._shift / 2.0)
        epsilons = np.append(0.0, epsilons[(epsilons > 0.0) & (epsilons < MAX_LOSS)])
        self._places = np.expm1(epsilons)
        self._alone = np.exp(log_gaussian_delta(self._shift, epsilons)) * (1.0 + 1e-12)

    def grid(self, step: int = 1) -> FloatArray:
        """ε before sampling, from 0, where the profile should be read; every `step`-th of many."""
        alone = self._shift * self._shift / 2.0 + self._shift * np.linspace(
            0.0, _MOST_DEVIATIONS, 300
        )
        joined: FloatArray = np.concatenate([self._clones.epsilons()[::step], alone])
        return np.minimum(joined, np.float64(MAX_LOSS))

    def deltas(self, row: int, excess: FloatArray) -> FloatArray:
        """Certified δ(1 + v) for increasing v >= 0."""
        growth = np.minimum(excess, _MOST_EXCESS) + 2.0
        hidden = self._clones.deltas_above_one(row, excess) + growth * float(self._defects[row])
        alone = np.interp(excess, self._places, self._alone)
        result: FloatArray = np.minimum(np.minimum(hidden, alone), 1.0)
        return result
