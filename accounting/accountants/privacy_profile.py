"""From a bound of one round's privacy profile to composed ε: what accountants share."""

import abc
import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dp_accounting import NeighboringRelation

from shufl.accounting.accountants.base import ShuffleAccountant
from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.composition import Composition, Target, count_block, fitted_tilt
from shufl.accounting.numerics.loss_pmf import USUAL_LEAST, LossPmf, Profile, dyadic_interval
from shufl.protocol.events import Shuffled
from shufl.protocol.mechanisms import GaussianMechanism

# The mesh is at least 1/48 of this share of the whole sum's standard deviation, to save memory.
_WIDEST = 1e-3
# Rare losses count as infinite if their probability in all rounds together is below this share of
# δ. They would make windows long.
_RARE = 1e-7

# A profile is computed down to `USUAL_LEAST`. If `_RARE` of δ is less, that floor is lowered in
# steps of this factor, but not below `_LEAST`.
_DEEPER, _LEAST = 1e-11, 1e-109


class ProfileShuffleAccountant(ShuffleAccountant):
    """Base of the accountants that bound one round's privacy profile and compose that.

    A subclass prices one round in `_profile`. ε and δ are functions of how often each event took
    place, not of the order or of how it was asked, so the guard and `rounds_within_budget` agree.
    The first question about an event costs its profile; later ones about 0.2 ms.
    """

    @abc.abstractmethod
    def _profile(self, event: Shuffled, least: float) -> tuple[FloatArray, FloatArray]:
        """Returns bounds of the hockey-stick divergence of every pair that the accountant covers.

        The answer is kept for all accountants of the class, so it may depend on nothing but the
        arguments and the neighbouring relation.

        Args:
            event: The round; its noise multiplier is above 0.
            least: Deltas below it need not be told apart.

        Returns:
            Epsilons, increasing from 0, of shape (K,), and deltas: of shape (K,) if they bound both
            directions, of which another may be the larger in each round; of shape (2, K) if they
            bound each direction of pairs that keep their direction in all rounds.
        """

    def _is_private(self, event: Shuffled) -> bool:
        """Whether a round has any noise that this accountant counts on."""
        return event.mechanism.is_private

    def _are_private(self, events: Iterable[Shuffled]) -> bool:
        return all(map(self._is_private, events))

    @property
    def _prices(self) -> "_Prices":
        return _Prices(type(self), self.neighboring_relation)

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

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if self.get_epsilon(delta) < math.inf:
            return None
        if not self._are_private(self._counts):
            return "some round has no noise"
        if delta == 0.0:
            return "no finite epsilon is known at delta 0"
        return "the rounds' infinite loss alone exceeds delta"


class _Prices(NamedTuple):
    """Results that all accountants of a class share, kept by event because they are costly."""

    accountant: type[ProfileShuffleAccountant]
    relation: NeighboringRelation

    @functools.lru_cache(maxsize=512)  # noqa: B019 - of the class: equal prices are one entry
    def envelope(self, event: Shuffled, least: float) -> tuple[Profile, float]:
        """The profile of a round, and how far its loss is spread."""
        profile = Profile.enveloping(*self.accountant(self.relation)._profile(event, least))
        return profile, profile.spread()

    def mesh(self, events: Iterable[Shuffled], counts: Sequence[int], least: float) -> float:
        """One mesh for all these rounds, from the mean variance of a loss.

        It is wider where the sum of all losses reaches far.
        """
        spreads = [self.envelope(event, least)[1] for event in events]
        variance = math.fsum(c * spread**2 for c, spread in zip(counts, spreads, strict=True))
        return max(
            dyadic_interval(math.sqrt(variance / sum(counts))),
            dyadic_interval(math.sqrt(variance) * _WIDEST),
        )

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
        """The composition of rounds that lose something, for all counts within `blocks`.

        Losses that are rare beside `delta` count as infinite.
        """
        most = [block[1] for block in blocks]
        rare, least = _RARE * delta / sum(most), USUAL_LEAST
        while rare < least > _LEAST:
            least *= _DEEPER
        interval = self.mesh(events, most, least)
        for event in events:  # coarser still where one loss reaches far
            interval = self.pmf(event, interval, rare, least, reverse).interval
        pmfs = [self.pmf(event, interval, rare, least, reverse) for event in events]
        # ... and where rare losses make the window long.
        tilt, interval = fitted_tilt(pmfs, blocks, target)
        meshed = [self.pmf(event, interval, rare, least, reverse) for event in events]
        return Composition(meshed, blocks, target, tilt)
