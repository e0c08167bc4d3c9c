"""The base of all accountants: which rounds they price, and what they must say of themselves."""

import abc
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Literal

import dp_accounting
import numpy as np
from dp_accounting import DpEvent, NeighboringRelation, dp_event

from shufl.protocol import validation
from shufl.protocol.events import CheckIn, FixedSize, Shuffled
from shufl.protocol.mechanisms import GaussianMechanism

# Reports are clipped to norm C and carry noise of standard deviation zC. Under `replace` one user's
# record becomes any other: two clipped reports differ by up to 2C, so σ = z/2. Under `zero-out` one
# user's report becomes the clipped zero vector: they differ by up to C, so σ = z.
ADJACENCIES: dict[str, NeighboringRelation] = {
    "replace": NeighboringRelation.REPLACE_ONE,
    "zero-out": NeighboringRelation.REPLACE_SPECIAL,
}

# How dp_accounting's own event for a release without any protection is priced.
UNPROTECTED = Shuffled(1, CheckIn(1.0), GaussianMechanism(noise_multiplier=0.0))


def relation_of(adjacency: str) -> NeighboringRelation:
    """Returns the neighbouring relation of an adjacency's name.

    Raises:
        ValueError: An unknown name.
    """
    return ADJACENCIES[validation.choice("adjacency", adjacency, tuple(ADJACENCIES))]


def effective_sigma(noise_multiplier: float, relation: NeighboringRelation) -> float:
    """Returns σ = zC/Δ, the noise in units of the sensitivity of one report.

    Raises:
        ValueError: ADD_OR_REMOVE_ONE. With a shuffler the number of reports is public, so adding or
            removing a user is not a change this mechanism hides.
    """
    if relation not in ADJACENCIES.values():
        raise ValueError(
            "neighbouring relation must be REPLACE_ONE ('replace') or REPLACE_SPECIAL "
            f"('zero-out'), got {relation}"
        )
    return noise_multiplier / (2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0)


def gaussian_noise(event: Shuffled) -> float:
    """Returns z of a Gaussian report; 0 of another, which no Gaussian bounds."""
    mechanism = event.mechanism
    return mechanism.noise_multiplier if isinstance(mechanism, GaussianMechanism) else 0.0


def usual_errors() -> np.errstate:
    """Numpy's own handling of overflow and the like, as a context or a decorator."""
    return np.errstate(divide="warn", over="warn", under="ignore", invalid="warn")


class ShuffleAccountant(dp_accounting.PrivacyAccountant, abc.ABC):
    """Base of all accountants here.

    Attributes:
        name: Its word in the configuration and in tables.
        covers: One sentence: what its ε holds for, and on what assumption.
        holds_for: Which pairs of neighbouring datasets its ε bounds.
        counts_on_others: Whether its ε assumes that the other users take part and add their noise.
        counts_on_blankets: Whether blankets of the shuffler make its ε smaller.
        round_kinds: The kinds of rounds that it prices: `Shuffled`, `Summed` or both.
        participations: The ways to take part that it prices.
        mechanisms: The mechanisms that it prices.
    """

    name: ClassVar[str]
    covers: ClassVar[str]
    holds_for: ClassVar[Literal["every pair", "homogeneous pair"]]
    counts_on_others: ClassVar[bool] = True
    counts_on_blankets: ClassVar[bool] = False
    round_kinds: ClassVar[tuple[type, ...]] = (Shuffled,)
    participations: ClassVar[tuple[type, ...]] = (CheckIn, FixedSize)
    mechanisms: ClassVar[tuple[type, ...]] = (GaussianMechanism,)

    def __init_subclass__(cls, **given: Any) -> None:
        """Has questions answered under `usual_errors`, whatever the caller has set in numpy."""
        super().__init_subclass__(**given)
        for name in {"_epsilon", "_delta", "note"} & vars(cls).keys():
            setattr(cls, name, usual_errors()(vars(cls)[name]))

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    ) -> None:
        """Starts with nothing composed.

        Args:
            neighboring_relation: REPLACE_ONE, or REPLACE_SPECIAL for zero-out.

        Raises:
            ValueError: The relation is ADD_OR_REMOVE_ONE.
        """
        effective_sigma(1.0, neighboring_relation)  # refuses ADD_OR_REMOVE_ONE
        super().__init__(neighboring_relation)
        self._rounds: dict[Shuffled, int] = {}  # how often each took place

    def _maybe_compose(self, event: DpEvent, count: int, do_compose: bool) -> Any:
        leaves = list(_leaves_of(event, count))
        for leaf, _ in leaves:
            if (refusal := self._refusal(leaf)) is not None:
                return self.CompositionErrorDetails(invalid_event=leaf, error_message=refusal)
        if do_compose:
            self._rounds = added(self._rounds, leaves)
        return None

    @property
    def _counts(self) -> dict[Shuffled, int]:
        """What was composed, as the accountants price it."""
        return _composed(self._rounds)

    def _refusal(self, event: DpEvent) -> str | None:
        """Returns one line if this accountant does not price `event`, which is not a nested one."""
        if (
            isinstance(event, Shuffled)
            and (type(event) in self.round_kinds or event == UNPROTECTED)
            and isinstance(event.participation, self.participations)
            and isinstance(event.mechanism, self.mechanisms)
        ):
            return None
        names = sorted(kind.__name__ for kind in self.participations + self.mechanisms)
        kinds = " and ".join(kind.__name__ for kind in self.round_kinds)
        return f"{self.name} prices {kinds} rounds of {', '.join(names)} only"

    def _sigma(self, event: Shuffled) -> float:
        """σ of a Gaussian report; 0 of another."""
        return effective_sigma(gaussian_noise(event), self.neighboring_relation)

    @abc.abstractmethod
    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        """Returns ε at `delta`, in [0, 1], of so many rounds."""

    @abc.abstractmethod
    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        """Returns δ at `epsilon` >= 0 of so many rounds."""

    def get_epsilon(self, target_delta: float) -> float:
        """Returns ε of what was composed.

        Args:
            target_delta: δ in [0, 1].

        Returns:
            ε >= 0; inf if no finite one is known.

        Raises:
            ValueError: δ is outside [0, 1].
        """
        return self._epsilon(self._counts, checked_delta(target_delta))

    def get_delta(self, target_epsilon: float) -> float:
        """Returns δ of what was composed.

        Args:
            target_epsilon: ε >= 0, which may be inf.

        Returns:
            δ in [0, 1].

        Raises:
            ValueError: ε is below 0.
        """
        if not target_epsilon >= 0.0:
            raise ValueError(f"epsilon must be at least 0, got {target_epsilon}")
        return self._delta(self._counts, target_epsilon)

    def epsilon_after(self, event: DpEvent, delta: float, count: int = 1) -> float:
        """Returns what ε would be after more rounds; composes nothing.

        Args:
            event: What one more round would release.
            delta: δ in [0, 1].
            count: How many such rounds, a whole number from 0.

        Returns:
            ε >= 0 of what was composed and of these rounds; inf if no finite one is known.

        Raises:
            ValueError: δ is outside [0, 1], or the count is negative or not whole.
            dp_accounting.UnsupportedEventError: This accountant does not price `event`.
        """
        validation.integer("count", count, 0)
        error = self._maybe_compose(event, count, False)
        if error is not None:
            raise dp_accounting.UnsupportedEventError(
                f"{error.error_message}, got {error.invalid_event!r}"
            )
        rounds = added(self._rounds, _leaves_of(event, count))
        return self._epsilon(_composed(rounds), checked_delta(delta))

    def note(self, delta: float) -> str | None:
        """Returns why ε is infinite, or what limits it.

        Args:
            delta: δ in [0, 1].

        Returns:
            One line, or None if there is nothing to say.

        Raises:
            ValueError: δ is outside [0, 1].
        """
        return None


def checked_delta(delta: float) -> float:
    """Returns δ, which must lie in [0, 1]."""
    if not 0.0 <= delta <= 1.0:
        raise ValueError(f"delta must lie in [0, 1], got {delta}")
    return delta


def added(counts: dict[Shuffled, int], more: Iterable[tuple[Shuffled, int]]) -> dict[Shuffled, int]:
    """Returns the sum of how often each event took place."""
    total = dict(counts)
    for event, count in more:
        if count:
            total[event] = total.get(event, 0) + count
    return total


def _composed(rounds: dict[Shuffled, int]) -> dict[Shuffled, int]:
    """Returns the rounds with blocks in place of those by `Allocation`."""
    return added({}, (event.composed(count) for event, count in rounds.items()))


def _leaves_of(event: DpEvent, count: int) -> Iterator[tuple[Shuffled, int]]:
    """Yields the rounds in an event that release something, with how often each took place."""
    if isinstance(event, dp_event.SelfComposedDpEvent):
        yield from _leaves_of(event.event, count * event.count)
    elif isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from _leaves_of(part, count)
    elif isinstance(event, dp_event.NonPrivateDpEvent):
        yield UNPROTECTED, count
    elif isinstance(event, Shuffled) and event.participation == FixedSize(0):
        return  # nobody reports
    elif not isinstance(event, dp_event.NoOpDpEvent):
        yield event, count
