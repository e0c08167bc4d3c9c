"""The base of all accountants: which rounds they price, and what they must say of themselves."""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event

from accounting import adjacency
from accounting.events import CheckIn, FixedSize, Shuffled
from accounting.mechanisms import GaussianMechanism

# How dp_accounting's own event for a release without any protection is priced.
UNPROTECTED = Shuffled(1, CheckIn(1.0), GaussianMechanism(noise_multiplier=0.0))


class ShuffleAccountant(dp_accounting.PrivacyAccountant, abc.ABC):
    """Base of all accountants here.

    Attributes:
        name: Its word in the configuration and in tables.
        covers: One sentence: what its ε holds for, and on what assumption.
        holds_for: Which pairs of neighbouring datasets its ε bounds.
        counts_on_others: Whether its ε assumes that the other users take part and add their noise.
        counts_on_blankets: Whether its ε is less for blankets that the shuffler adds.
        participations: The ways to take part that it prices.
        mechanisms: The mechanisms that it prices.
    """

    name: ClassVar[str]
    covers: ClassVar[str]
    holds_for: ClassVar[Literal["every pair", "homogeneous pair"]]
    counts_on_others: ClassVar[bool] = True
    counts_on_blankets: ClassVar[bool] = False
    participations: ClassVar[tuple[type, ...]] = (CheckIn, FixedSize)
    mechanisms: ClassVar[tuple[type, ...]] = (GaussianMechanism,)

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    ) -> None:
        """Makes an accountant that has spent nothing.

        Raises:
            ValueError: `neighboring_relation` is ADD_OR_REMOVE_ONE.
        """
        adjacency.effective_sigma(1.0, neighboring_relation)
        super().__init__(neighboring_relation)

    def _maybe_compose(self, event: Any, count: int, do_compose: bool) -> Any:
        leaves = list(_leaves_of(event, count))
        for leaf, _ in leaves:
            if (refusal := self._refusal(leaf)) is not None:
                return self.CompositionErrorDetails(invalid_event=leaf, error_message=refusal)
        if do_compose:
            self._add(leaves)
        return None

    def _refusal(self, event: Any) -> str | None:
        """Returns one line if this accountant does not price `event`, which is not a nested one."""
        if (
            isinstance(event, Shuffled)
            and isinstance(event.participation, self.participations)
            and isinstance(event.mechanism, self.mechanisms)
        ):
            return None
        names = sorted(kind.__name__ for kind in self.participations + self.mechanisms)
        return f"{self.name} prices Shuffled rounds of {', '.join(names)} only"

    def _sigma(self, event: Shuffled) -> float:
        noise = event.mechanism.noise_multiplier
        return adjacency.effective_sigma(noise, self.neighboring_relation)

    def _checked_leaves(self, event: Any, count: int) -> list[tuple[Shuffled, int]]:
        error = self._maybe_compose(event, count, False)
        if error is not None:
            raise dp_accounting.UnsupportedEventError(
                f"{error.error_message}, got {error.invalid_event!r}"
            )
        return list(_leaves_of(event, count))

    @abc.abstractmethod
    def _add(self, leaves: list[tuple[Shuffled, int]]) -> None:
        """Composes rounds into the state."""

    @abc.abstractmethod
    def epsilon_after(self, event: Any, delta: float, count: int = 1) -> float:
        """Returns ε at `delta` if `event` took place `count` more times; composes nothing.

        Raises:
            dp_accounting.UnsupportedEventError: This accountant does not price `event`.
        """

    def epsilon_lower_bound(self, target_delta: float) -> float | None:
        """Returns an ε that no accountant of the same pair can fall below; None if not known."""
        return None

    def note(self, delta: float) -> str | None:
        """Returns one line: why ε at `delta` is infinite, or what limits it; None if nothing does.

        Raises:
            ValueError: δ outside [0, 1].
        """
        return None


def _leaves_of(event: Any, count: int) -> Iterator[tuple[Any, int]]:
    """Yields the rounds in an event that release something, with how often each took place."""
    if isinstance(event, dp_event.SelfComposedDpEvent):
        yield from _leaves_of(event.event, count * event.count)
    elif isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from _leaves_of(part, count)
    elif isinstance(event, dp_event.NonPrivateDpEvent):
        yield UNPROTECTED, count
    elif not isinstance(event, dp_event.NoOpDpEvent) and not _is_silent(event):
        yield event, count


def _is_silent(event: Any) -> bool:
    return isinstance(event, Shuffled) and event.participation == FixedSize(0)
