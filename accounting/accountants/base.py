"""The base of all accountants: which events they take, and what they must say of themselves."""

import abc
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event

from accounting import adjacency
from accounting.events import EVENTS

CompositionErrorDetails = dp_accounting.PrivacyAccountant.CompositionErrorDetails


def leaves_of(event: Any, count: int) -> Iterator[tuple[Any, int]]:
    """Yields the simple events of a nested one, with how often each takes place."""
    if isinstance(event, dp_event.SelfComposedDpEvent):
        yield from leaves_of(event.event, count * event.count)
    elif isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from leaves_of(part, count)
    elif not isinstance(event, dp_event.NoOpDpEvent):
        yield event, count


class ShuffleAccountant(dp_accounting.PrivacyAccountant, abc.ABC):
    """Base of all accountants here.

    Attributes:
        name: Its word in the configuration and in tables.
        covers: One sentence: what its ε holds for, and on what assumption.
        holds_for: Which pairs of neighbouring datasets its ε bounds.
        counts_on_others: Whether its ε assumes that the other users take part and add their noise.
        counts_on_blankets: Whether its ε is less for blankets that the shuffler adds.
        events: The events of `accounting.events` that it prices; it refuses all others.
    """

    name: ClassVar[str]
    covers: ClassVar[str]
    holds_for: ClassVar[Literal["every pair", "homogeneous pair"]]
    counts_on_others: ClassVar[bool] = True
    counts_on_blankets: ClassVar[bool] = False
    events: ClassVar[tuple[type[Any], ...]] = tuple(EVENTS.values())

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
        leaves = list(leaves_of(event, count))
        for leaf, _ in leaves:
            if type(leaf) not in (*self.events, dp_event.NonPrivateDpEvent):
                priced = ", ".join(sorted(cls.__name__ for cls in self.events))
                message = f"{self.name} prices {priced} only"
                return CompositionErrorDetails(invalid_event=leaf, error_message=message)
        if do_compose:
            self._add(leaves)
        return None

    def _sigma(self, event: Any) -> float:
        return adjacency.effective_sigma(event.noise_multiplier, self.neighboring_relation)

    def _checked_leaves(self, event: Any, count: int) -> list[tuple[Any, int]]:
        error = self._maybe_compose(event, count, False)
        if error is not None:
            raise dp_accounting.UnsupportedEventError(
                f"{error.error_message}, got {error.invalid_event!r}"
            )
        return list(leaves_of(event, count))

    @abc.abstractmethod
    def _add(self, leaves: list[tuple[Any, int]]) -> None:
        """Composes simple events into the state."""

    @abc.abstractmethod
    def epsilon_after(self, event: Any, delta: float, count: int = 1) -> float:
        """Returns ε at `delta` if `event` took place `count` more times; composes nothing.

        Raises:
            dp_accounting.UnsupportedEventError: This accountant does not price `event`.
        """

    def epsilon_lower_bound(self, target_delta: float) -> float | None:
        """Returns an ε that no accountant of the same pair can fall below; None if not known."""
        return None

    @abc.abstractmethod
    def best_order(self, delta: float) -> int | None:
        """Returns the Rényi order that gives ε at `delta`, or None if there is none."""

    def note(self, delta: float) -> str | None:
        """Returns one line: why ε at `delta` is infinite, or what limits it; None if nothing does.

        Raises:
            ValueError: δ outside [0, 1].
        """
        return None
