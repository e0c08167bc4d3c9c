"""From a bound of one round's privacy profile to composed ε: what accountants share."""

import abc
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from dp_accounting import NeighboringRelation
from dp_accounting.pld import privacy_loss_distribution

from shufl.accounting.accountants.base import ShuffleAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.composition import Composition, Target, count_block, fitted_tilt
from shufl.accounting.numerics.loss_pmf import (
    MAX_LOSS,
    USUAL_LEAST,
    LossPmf,
    Profile,
    dyadic_interval,
)
from shufl.accounting.numerics.lower_profile import LowerProfile
from shufl.protocol.events import Shuffled
from shufl.protocol.mechanisms import GaussianMechanism

# The mesh is at least this share (times 1/48) of the whole sum's standard deviation: memory.
_WIDEST = 1e-3
# Where a mesh half as coarse changes ε by less than this share, it costs a third of that itself.
_AGREED = 2e-3

# Losses so rare that those of all rounds come to this share of δ count as infinite: they would
# make windows long.
_RARE = 1e-7

# How far down a profile is computed for a δ of which `_RARE` is less than usual: by such steps.
_DEEPER, _LEAST = 1e-11, 1e-109

# Fourier transforms of dp_accounting were seen to err by 1e-15 a round in δ; they bound nothing.
_FFT_ERROR = 1e-14


class ProfileShuffleAccountant(ShuffleAccountant):
    """Base of the accountants that bound one round's privacy profile and compose that.

    A subclass prices one round in `_profile`. ε and δ are functions of how often each event took
    place, not of the order or of how it was asked, so the guard and `rounds_within_budget` agree.
    The first question about an event costs its profile; later ones about 0.2 ms.
    """

    @abc.abstractmethod
    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        """Returns one round's epsilons (increasing, from 0, shape (K,)) and bounds of its δ.

        The deltas bound the hockey-stick divergence of every pair the accountant covers: of shape
        (K,) in both directions, whichever is larger in which round; of shape (2, K) in each, for a
        pair that has the same direction in all rounds. Smaller ones than `least` need not be told
        apart. The noise multiplier is above 0. The answer may depend on nothing else but the
        neighbouring relation: it is kept for all accountants of the class.
        """

    def _lower_profile(self, event: Shuffled) -> LowerProfile | None:
        """Returns a lower bound of one round's profile for the accountant's worst pair, if known.

        It is one direction's, P against Q.
        """
        return None

    def _is_private(self, event: Shuffled) -> bool:
        """Whether a round has any noise that this accountant counts on."""
        return event.mechanism.is_private

    def _are_private(self, events: Iterable[Shuffled]) -> bool:
        return all(map(self._is_private, events))

    @property
    def _prices(self) -> "_Prices":
        return _Prices(type(self), self.neighboring_relation)

    def _noises(self) -> list[float]:
        """The noise multipliers above 0 of what was composed with Gaussian noise."""
        return [
            event.mechanism.noise_multiplier
            for event in self._counts
            if isinstance(event.mechanism, GaussianMechanism) and event.mechanism.is_private
        ]

    def _answer(self, counts: dict[Shuffled, int], target: Target, delta: float) -> float:
        """ε or δ, whichever the target leaves open; 0 if nothing is lost.

        Losses that are rare beside `delta` count as infinite.
        """
        ordered = tuple(sorted(counts.items(), key=lambda item: repr(item[0])))
        profiles = {event: self._prices.envelope(event, USUAL_LEAST)[0] for event, _ in ordered}
        lossy = [each for each in ordered if not profiles[each[0]].is_trivial]
        if not lossy:
            return 0.0
        # ε grows with the count and the tilt must follow; δ fixes the tilt for a whole block.
        share = target.delta is not None
        blocks = tuple(count_block(count) if share else (count, count) for _, count in lossy)
        events, times = tuple(event for event, _ in lossy), tuple(count for _, count in lossy)
        # A pair with one direction in all rounds: each direction for itself, and the larger ε.
        one_sided = any(profiles[event].other is not None for event in events)
        answers = []
        for reverse in (False, True) if one_sided else (False,):
            composed = self._prices.composed(events, blocks, target, delta, reverse)
            answers.append(composed.answer(times, target))
        return max(answers)

    def _variation(self, counts: dict[Shuffled, int]) -> float:
        """An upper bound of the total variation of all rounds: δ at ε = 0."""
        each = [(c, self._prices.envelope(e, USUAL_LEAST)[0].deltas[0]) for e, c in counts.items()]
        return min(math.fsum(c * float(delta) for c, delta in each) * (1.0 + 1e-12), 1.0)

    def _most(self, counts: dict[Shuffled, int]) -> float:
        """The largest loss there can be: ε at δ = 0."""
        if any(isinstance(event.mechanism, GaussianMechanism) for event in counts):
            return math.inf  # a δ may be 0 in floating point, but is not
        return sum(c * self._prices.envelope(e, USUAL_LEAST)[0].most for e, c in counts.items())

    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        if not self._are_private(counts):
            return math.inf
        if delta >= self._variation(counts):
            return 0.0
        most = self._most(counts)
        return most if delta == 0.0 else min(self._answer(counts, Target(delta=delta), delta), most)

    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        if not self._are_private(counts):
            return 1.0
        if not counts or epsilon >= self._most(counts):
            return 0.0
        about, found = math.inf, self._variation(counts)
        while 1e-100 < found < 0.5 * about:  # what is rare depends on the answer
            about = found
            found = min(found, self._answer(counts, Target(epsilon=epsilon), about))
        return found

    def epsilon_lower_bound(self, target_delta: float) -> float | None:
        """Returns a lower bound of the worst pair's ε; None if no such bound is known.

        No accountant of the same pair, and none that holds for every pair on the same assumptions,
        can be below. It takes one direction, where `get_epsilon` takes the larger of both. 0 where
        δ is too small for the Fourier transform it is computed with, below about 1e-14 for each
        round.
        """
        if not self._counts or not self._are_private(self._counts):
            return 0.0  # without noise δ may still be small: by the coins
        at = target_delta + _FFT_ERROR * (1.0 + sum(self._counts.values()))
        if (distribution := self._lower_distribution()) is None:
            return None
        if at >= 1.0:
            return 0.0
        if distribution.get_delta_for_epsilon(MAX_LOSS) >= at:
            return MAX_LOSS  # e^ε overflows beyond
        return float(max(distribution.get_epsilon_for_delta(at), 0.0))

    def _lower_distribution(self) -> privacy_loss_distribution.PrivacyLossDistribution | None:
        """The composition of all rounds' lower profiles, or None if one of them has none."""
        kinds = self._counts.items()
        total = sum(c * self._prices.envelope(e, USUAL_LEAST)[1] ** 2 for e, c in kinds)
        interval = _mesh(total, sum(self._counts.values()))
        composed = None
        for event, count in self._counts.items():
            profile = self._prices.lower_profile(event)
            if profile is None:
                return None
            one = profile.distribution(interval).self_compose(count)
            composed = one if composed is None else composed.compose(one)
        return composed

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if self.get_epsilon(delta) < math.inf:
            return None
        if not self._are_private(self._counts):
            return "some round has no noise"
        if delta == 0.0:
            return "no finite epsilon is known at delta 0"
        return "the rounds' infinite loss alone exceeds delta"


def _mesh(variance: float, rounds: int) -> float:
    """One mesh for all rounds: that of the mean variance of a loss, unless the sum reaches far."""
    return max(
        dyadic_interval(math.sqrt(variance / rounds)),
        dyadic_interval(math.sqrt(variance) * _WIDEST),
    )


class _Prices(NamedTuple):
    """What all accountants of a class share, by event: a profile is costly, and an event recurs."""

    accountant: type[ProfileShuffleAccountant]
    relation: NeighboringRelation

    @functools.lru_cache(maxsize=512)  # noqa: B019 - of the class: equal prices are one entry
    def envelope(self, event: Shuffled, least: float) -> tuple[Profile, float]:
        """The profile of a round, and how far its loss is spread."""
        profile = Profile.enveloping(*self.accountant(self.relation)._profile(event, least))
        return profile, profile.spread()

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def lower_profile(self, event: Shuffled) -> LowerProfile | None:
        """A lower bound of the worst pair's profile."""
        return self.accountant(self.relation)._lower_profile(event)

    @functools.lru_cache(maxsize=128)  # noqa: B019
    def pmf(
        self, event: Shuffled, interval: float, rare: float, least: float, reverse: bool
    ) -> LossPmf:
        """The loss of a round on a mesh, which may be coarser than asked for."""
        profile = self.envelope(event, least)[0]
        return (profile.swapped if reverse else profile).discretised(interval, rare)

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def composed(
        self,
        events: tuple[Shuffled, ...],
        blocks: tuple[tuple[int, int], ...],
        target: Target,
        delta: float,
        reverse: bool,
    ) -> Composition:
        """The composition of rounds that lose something, for all counts in some blocks.

        Losses that are rare beside `delta` count as infinite.
        """
        most = [block[1] for block in blocks]
        rare, least = _RARE * delta / sum(most), USUAL_LEAST
        while rare < least > _LEAST:
            least *= _DEEPER
        spreads = [self.envelope(event, least)[1] for event in events]
        total = sum(c * spread**2 for c, spread in zip(most, spreads, strict=True))
        interval = _mesh(total, sum(most))
        for event in events:  # coarser still where one loss reaches far
            interval = self.pmf(event, interval, rare, least, reverse).interval
        pmfs = [self.pmf(event, interval, rare, least, reverse) for event in events]
        # ... and where rare losses make the window long.
        tilt, interval, first = fitted_tilt(pmfs, blocks, target)

        def on(mesh: float) -> Composition:
            meshed = [self.pmf(event, mesh, rare, least, reverse) for event in events]
            return Composition(meshed, blocks, target, tilt)

        if first == interval:
            return on(interval)
        # All are upper bounds, and what a mesh costs is as its square: where one half as coarse
        # answers the same at both ends of the blocks, a finer one would not answer otherwise.
        coarse, fine = on(first), on(0.5 * first)
        ends = [tuple(block[end] for block in blocks) for end in (0, 1)]
        answers = [(coarse.answer(end, target), fine.answer(end, target)) for end in ends]
        cost = max(rough / max(exact, 1e-300) for rough, exact in answers) - 1.0
        if not _AGREED < cost < math.inf:  # or one of them is too coarse to answer at all
            return fine
        halvings = math.ceil(0.5 * math.log2(cost / _AGREED))
        return on(max(interval, 0.5 * first * math.exp2(-halvings)))
