"""From a certified privacy profile to composed ε: what accountants share."""

import abc
import collections
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy.typing as npt
from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.pld import pld_pmf, privacy_loss_distribution

from accounting.accountant_base import ShuffleAccountant
from accounting.composition import Composition, Target, count_block, fitted_tilt
from accounting.gaussian import gaussian_epsilon, log_gaussian_delta
from accounting.loss_pmf import MAX_LOSS, FloatArray, LossPmf, Profile, dyadic_interval
from accounting.lower_profile import LowerProfile

_Value = TypeVar("_Value")


def pld_from_profile(
    epsilons: npt.ArrayLike, deltas: npt.ArrayLike, interval: float | None = None
) -> privacy_loss_distribution.PrivacyLossDistribution:
    """Returns a dp_accounting privacy loss distribution that dominates a certified profile.

    Its δ(ε) is at least the lower convex hull of the profile (in e^ε) everywhere, and the profile's
    continuation `H_α(P‖Q) = 1 - α + α H_{1/α}(Q‖P)` for ε < 0. The last δ is the infinite loss.
    The composition of dp_accounting errs by FFT rounding, about 1e-16 a round in δ: for small δ
    or many rounds compose with `accounting.composition` instead, which bounds it.

    Args:
        epsilons: Increasing, from 0, shape (K,). One loss should see about 40 points a standard
            deviation; the chords between them are what the result is made of.
        deltas: Upper bounds of the hockey-stick divergence, the maximum over both directions,
            shape (K,).
        interval: The mesh; if None, the power of two at most 1/48 of the loss's standard deviation.

    Raises:
        ValueError: Arrays that are no profile.
    """
    profile = Profile.enveloping(epsilons, deltas)
    pmf = profile.discretised(profile.interval() if interval is None else interval)
    return privacy_loss_distribution.PrivacyLossDistribution(
        pld_pmf.DensePLDPmf(pmf.interval, -pmf.half_width, pmf.probs, pmf.infinity, True)
    )


class Lru(collections.OrderedDict[Hashable, Any]):
    """The most recently used values, so many at most."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def find(self, key: Hashable, make: Callable[[], _Value]) -> _Value:
        """Returns the value of `key`, made if need be."""
        if key in self:
            self.move_to_end(key)
        else:
            self[key] = make()
            if len(self) > self._size:
                self.popitem(last=False)
        value: _Value = self[key]
        return value


# Shared by all accountants of the process: a profile is costly, and an event recurs.
_PROFILES = Lru(512)
_PMFS = Lru(128)
_LOWER_PROFILES = Lru(64)
_COMPOSITIONS = Lru(64)

# The mesh is at least this share (times 1/48) of the whole sum's standard deviation: memory.
_WIDEST = 1e-3

# Losses so rare that those of all rounds come to this share of δ count as infinite: they would
# make windows long.
_RARE = 1e-7

# Fourier transforms of dp_accounting were seen to err by 1e-15 a round in δ; they bound nothing.
_FFT_ERROR = 1e-14

Counts = tuple[tuple[Any, int], ...]


class ProfileShuffleAccountant(ShuffleAccountant):
    """Base of the accountants that certify one round's privacy profile and compose that.

    A subclass prices one event in `_profile`. ε and δ are functions of how often each event took
    place, not of the order or of how it was asked, so the guard and `rounds_within_budget` agree.
    The first question about an event costs its profile; later ones about 0.2 ms.
    """

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    ) -> None:
        """Makes an accountant that has spent nothing.

        Raises:
            ValueError: `neighboring_relation` is ADD_OR_REMOVE_ONE.
        """
        super().__init__(neighboring_relation)
        self._counts: dict[Any, int] = {}

    @abc.abstractmethod
    def _profile(self, event: Any) -> tuple[FloatArray, FloatArray]:
        """Returns one round's epsilons (increasing, from 0) and certified deltas at them.

        The deltas bound the hockey-stick divergence of every pair the accountant covers, in both
        directions. `event` is never NonPrivateDpEvent, and its noise multiplier is above 0.
        """

    def _additive_delta(self, event: Any) -> float:
        """Returns a δ that each round of `event` adds to everything else."""
        return 0.0

    def _cache_key(self) -> Hashable:
        """Returns all that a profile depends on besides the event; options belong in here."""
        return type(self), self.neighboring_relation

    def _search(self, counts: Counts, target: Target, read: Callable[[Hashable], float]) -> float:
        """Returns the least answer over an accountant's free parameters: `_profile_of`'s variants.

        Every variant is a bound. The answer must not depend on what was asked before.
        """
        return read(None)

    def _profile_of(self, event: Any, variant: Hashable) -> tuple[FloatArray, FloatArray]:
        return self._profile(event)

    def _with(self, leaves: list[tuple[Any, int]]) -> dict[Any, int]:
        counts = dict(self._counts)
        for event, count in leaves:
            if count and getattr(event, "reports", None) != 0:
                counts[event] = counts.get(event, 0) + count
        return counts

    def _add(self, leaves: list[tuple[Any, int]]) -> None:
        self._counts = self._with(leaves)

    def _is_private(self, event: Any) -> bool:
        return not isinstance(event, dp_event.NonPrivateDpEvent) and event.noise_multiplier > 0.0

    def _envelope(self, event: Any, variant: Hashable) -> tuple[Profile, float]:
        key = (self._cache_key(), event, variant)

        def make() -> tuple[Profile, float]:
            profile = Profile.enveloping(*self._profile_of(event, variant))
            return profile, profile.spread()

        return _PROFILES.find(key, make)

    def _pmf(self, event: Any, variant: Hashable, interval: float, rare: float) -> LossPmf:
        key = (self._cache_key(), event, variant, interval, rare)
        profile = self._envelope(event, variant)[0]
        return _PMFS.find(key, lambda: profile.discretised(interval, rare))

    def _composed(
        self, counts: Counts, variant: Hashable, target: Target
    ) -> tuple[Composition, tuple[int, ...]] | None:
        """The composition of all rounds and its counts, or None if they lose nothing."""
        lossy = [each for each in counts if not self._envelope(each[0], variant)[0].is_trivial]
        if not lossy:
            return None
        # ε grows with the count and the tilt must follow; δ fixes the tilt for a whole block.
        share = target.delta is not None
        blocks = tuple(count_block(count) if share else (count, count) for _, count in lossy)
        key = (self._cache_key(), tuple(event for event, _ in lossy), variant, blocks, target)

        def make() -> Composition:
            # One mesh for all: that of the mean variance of a loss, unless the sum reaches far.
            most = [block[1] for block in blocks]
            spreads = [self._envelope(event, variant)[1] for event, _ in lossy]
            total = sum(c * spread**2 for c, spread in zip(most, spreads, strict=True))
            interval = max(
                dyadic_interval(math.sqrt(total / sum(most))),
                dyadic_interval(math.sqrt(total) * _WIDEST),
            )
            rare = _RARE * (target.delta or 0.0) / sum(most)
            for event, _ in lossy:  # coarser still where one loss reaches far
                interval = self._pmf(event, variant, interval, rare).interval
            pmfs = [self._pmf(event, variant, interval, rare) for event, _ in lossy]
            # ... and where rare losses make the window long.
            tilt, coarser = fitted_tilt(pmfs, blocks, target)
            if coarser > interval:
                pmfs = [self._pmf(event, variant, coarser, rare) for event, _ in lossy]
            return Composition(pmfs, blocks, target, tilt)

        return _COMPOSITIONS.find(key, make), tuple(count for _, count in lossy)

    def _least(
        self,
        counts: dict[Any, int],
        target: Target,
        read: Callable[[Composition, tuple[int, ...]], float],
    ) -> float:
        """The least answer over the variants; 0 if nothing is lost."""
        ordered = tuple(sorted(counts.items(), key=lambda item: repr(item[0])))

        def answer(variant: Hashable) -> float:
            composed = self._composed(ordered, variant, target)
            return 0.0 if composed is None else read(*composed)

        return self._search(ordered, target, answer)

    def _additive(self, counts: dict[Any, int]) -> float:
        return math.fsum(count * self._additive_delta(event) for event, count in counts.items())

    def _unshuffled(self, counts: dict[Any, int]) -> float:
        """μ of the Gaussian that the rounds amount to without a shuffler, which bounds all pairs.

        Where shuffling hides nearly nothing it is below what composition on a grid can certify.
        """
        sigmas = ((self._sigma(event), count) for event, count in counts.items())
        return math.sqrt(sum(sorted(count / sigma / sigma for sigma, count in sigmas)))

    def _epsilon(self, counts: dict[Any, int], delta: float) -> float:
        if not 0.0 <= delta <= 1.0:
            raise ValueError(f"delta must lie in [0, 1], got {delta}")
        if not all(map(self._is_private, counts)):
            return math.inf
        left = delta - self._additive(counts)
        if not counts or (left > 0.0 and delta == 1.0):
            return 0.0
        if left <= 0.0:
            return math.inf
        least = self._least(
            counts, Target(delta=delta), lambda composed, times: composed.epsilon(times, left)
        )
        shift = self._unshuffled(counts)
        return min(least, gaussian_epsilon(shift, delta)) if shift < math.inf else least

    def get_epsilon(self, target_delta: float) -> float:
        """Returns a certified ε at `target_delta`; inf if none is found."""
        return self._epsilon(self._counts, target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Returns a certified δ at `target_epsilon` >= 0."""
        if not target_epsilon >= 0.0:
            raise ValueError(f"epsilon must be at least 0, got {target_epsilon}")
        if not all(map(self._is_private, self._counts)):
            return 1.0
        if not self._counts or target_epsilon == math.inf:
            return 0.0
        least = self._least(
            self._counts,
            Target(epsilon=target_epsilon),
            lambda composed, times: composed.delta(times, target_epsilon),
        )
        least, shift = least + self._additive(self._counts), self._unshuffled(self._counts)
        if shift < math.inf:
            least = min(least, math.exp(float(log_gaussian_delta(shift, target_epsilon))))
        return min(1.0, least)

    def _lower_profile(self, event: Any) -> LowerProfile | None:
        """Returns a lower bound of one round's profile for the accountant's worst pair, if known.

        It is one direction's, P against Q; the accountant composes the larger of both.
        """
        return None

    def epsilon_lower_bound(self, target_delta: float) -> float | None:
        """Returns a lower bound of the worst pair's ε; None if no such bound is known.

        No accountant of the same pair, and none that holds for every pair on the same assumptions,
        can be below. It takes one direction throughout, where `get_epsilon` takes the larger of
        both in every round. 0 where δ is too small for the Fourier transform it is computed with,
        below about 1e-14 for each round.

        Args:
            target_delta: δ in [0, 1].
        """
        if not all(map(self._is_private, self._counts)):
            return 0.0  # without noise δ may still be small: by the coins
        profiles = self._lower_profiles()
        if profiles is None:
            return None
        distribution, at = self._lower_distribution(profiles), target_delta + self._slack()
        if distribution is None or at >= 1.0:
            return 0.0
        if distribution.get_delta_for_epsilon(MAX_LOSS) >= at:
            return MAX_LOSS  # e^ε overflows beyond
        return float(max(distribution.get_epsilon_for_delta(at), 0.0))

    def delta_lower_bound(self, target_epsilon: float) -> float | None:
        """Returns a lower bound of the worst pair's δ at `target_epsilon` >= 0; None if not known.

        See `epsilon_lower_bound`.
        """
        if not all(map(self._is_private, self._counts)):
            return 0.0
        profiles = self._lower_profiles()
        if profiles is None:
            return None
        distribution = self._lower_distribution(profiles)
        if distribution is None:
            return 0.0
        return float(max(distribution.get_delta_for_epsilon(target_epsilon) - self._slack(), 0.0))

    def _slack(self) -> float:
        return _FFT_ERROR * (1.0 + sum(self._counts.values()))

    def _lower_profiles(self) -> dict[Any, LowerProfile] | None:
        profiles: dict[Any, LowerProfile] = {}
        for event in self._counts:
            key = (self._cache_key(), event)
            found = _LOWER_PROFILES.find(key, functools.partial(self._lower_profile, event))
            if found is None:
                return None
            profiles[event] = found
        return profiles

    def _lower_distribution(
        self, profiles: dict[Any, LowerProfile]
    ) -> privacy_loss_distribution.PrivacyLossDistribution | None:
        counts = [(event, count) for event, count in self._counts.items() if count]
        if not counts:
            return None
        total = sum(count * self._envelope(event, None)[1] ** 2 for event, count in counts)
        interval = max(
            dyadic_interval(math.sqrt(total / sum(count for _, count in counts))),
            dyadic_interval(math.sqrt(total) * _WIDEST),
        )
        composed = None
        for event, count in counts:
            one = profiles[event].distribution(interval).self_compose(count)
            composed = one if composed is None else composed.compose(one)
        return composed

    def epsilon_after(self, event: Any, delta: float, count: int = 1) -> float:
        """See `ShuffleAccountant.epsilon_after`."""
        return self._epsilon(self._with(self._checked_leaves(event, count)), delta)

    def best_order(self, delta: float) -> int | None:
        """Returns None: no Rényi order is involved."""
        return None

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if self.get_epsilon(delta) < math.inf:
            return None
        if not all(map(self._is_private, self._counts)):
            return "some round has no noise"
        added = self._additive(self._counts)
        if added >= delta > 0.0:
            return f"the rounds add {added:.3g} to delta by themselves"
        if delta == 0.0:
            return "no finite epsilon is known at delta 0"
        return "the rounds' infinite loss alone exceeds delta"
