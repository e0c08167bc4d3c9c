"""Accountants that compose Rényi divergences: the published bounds, and the exact values."""

import abc
import dataclasses
import functools
import math
import warnings
from typing import Any, ClassVar

import numpy as np
from dp_accounting import NeighboringRelation

from accounting import validation
from accounting.accountants.base import ShuffleAccountant
from accounting.events import FixedSize, Shuffled
from accounting.numerics import FloatArray, conversion, reverse_moments, theorem3
from accounting.numerics import renyi as rdp_bounds


class OrderRangeWarning(UserWarning):
    """The best Rényi order is the last one computed: more orders could give a smaller ε."""


@dataclasses.dataclass(frozen=True)
class _Spent:
    """Composed rounds: everything before the present run of equal events, and that run."""

    base: FloatArray
    event: Shuffled | None
    count: int


@functools.lru_cache(maxsize=1024)
def _rdp_vector(
    accountant: "type[RdpShuffleAccountant]",
    event: Shuffled,
    sigma: float,
    options: tuple[Any, ...],
) -> FloatArray:
    """One event's ε(λ) for λ = 2..max_order, shared by all accountants of the process."""
    result = rdp_bounds.rdp_from_log_moments(accountant.log_moments(event, sigma, *options))
    if np.any(np.isnan(result)) or np.any(result < 0.0):
        raise ArithmeticError(f"undefined Rényi divergence of {event!r}")
    result.setflags(write=False)
    return result


class RdpShuffleAccountant(ShuffleAccountant):
    """Base of the Rényi accountants: orders 2..max_order, composition by addition.

    An event is priced once a process; after that `compose`, `epsilon_after` and `get_epsilon` cost
    one pass over the orders.
    """

    default_max_order: ClassVar[int]

    def __init__(
        self,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
        max_order: int | None = None,
    ) -> None:
        """Makes an accountant that has spent nothing.

        Args:
            neighboring_relation: REPLACE_ONE or REPLACE_SPECIAL.
            max_order: Highest Rényi order, at least 2; the class's default if None.

        Raises:
            ValueError: ADD_OR_REMOVE_ONE, or `max_order` below 2.
        """
        super().__init__(neighboring_relation)
        wanted = self.default_max_order if max_order is None else max_order
        self._max_order = validation.integer("highest Rényi order", wanted, 2)
        self._orders: FloatArray = np.arange(2.0, self._max_order + 1.0)
        self._spent = _Spent(np.zeros_like(self._orders), None, 0)

    @property
    def orders(self) -> FloatArray:
        """The Rényi orders, shape (K,)."""
        return self._orders.copy()

    @property
    def rdp(self) -> FloatArray:
        """The composed ε(λ) at each order, shape (K,)."""
        return self._total(self._spent)

    @staticmethod
    @abc.abstractmethod
    def log_moments(event: Shuffled, sigma: float, max_order: int, *options: Any) -> FloatArray:
        """Returns one event's `(λ - 1) ε(λ)`, shape (max_order + 1,)."""

    def _options(self) -> tuple[Any, ...]:
        return (self._max_order,)

    def _rdp_of(self, event: Shuffled) -> FloatArray:
        return _rdp_vector(type(self), event, self._sigma(event), self._options())

    def _total(self, spent: _Spent) -> FloatArray:
        if spent.event is None:
            return spent.base
        return spent.base + spent.count * self._rdp_of(spent.event)

    def _pushed(self, leaves: list[tuple[Shuffled, int]]) -> _Spent:
        spent = self._spent
        for event, count in leaves:
            if event == spent.event:
                spent = dataclasses.replace(spent, count=spent.count + count)
            else:
                spent = _Spent(self._total(spent), event, count)
        return spent

    def _add(self, leaves: list[tuple[Shuffled, int]]) -> None:
        self._spent = self._pushed(leaves)

    def _warn_at_last_order(self, value: float, worst: float, index: int) -> None:
        if 0.0 < value < worst and index == self._orders.size - 1:
            warnings.warn(
                f"{self.name}: the best Rényi order is the last one computed "
                f"({self._max_order}); a larger max_order could give a smaller bound",
                OrderRangeWarning,
                stacklevel=3,
            )

    def get_epsilon(self, target_delta: float) -> float:
        """Returns the least ε over the orders at `target_delta` (Lemma 2).

        Warns:
            OrderRangeWarning: The best order is the last one computed.
        """
        epsilon, index = conversion.epsilon_from_rdp(self._orders, self.rdp, target_delta)
        self._warn_at_last_order(epsilon, math.inf, index)
        return epsilon

    def get_delta(self, target_epsilon: float) -> float:
        """Returns the least δ over the orders at `target_epsilon`.

        Warns:
            OrderRangeWarning: The best order is the last one computed.
        """
        delta, index = conversion.delta_from_rdp(self._orders, self.rdp, target_epsilon)
        self._warn_at_last_order(delta, 1.0, index)
        return delta

    def epsilon_after(self, event: Any, delta: float, count: int = 1) -> float:
        """See `ShuffleAccountant.epsilon_after`."""
        total = self._total(self._pushed(self._checked_leaves(event, count)))
        return conversion.epsilon_from_rdp(self._orders, total, delta)[0]

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        epsilon, index = conversion.epsilon_from_rdp(self._orders, self.rdp, delta)
        if epsilon == 0.0:
            return None
        if epsilon == math.inf:
            if delta == 0.0:
                return "no Rényi bound gives a finite epsilon at delta 0"
            return "some round has no noise, or so little that its Rényi moments overflow"
        if index == self._orders.size - 1:
            return f"the best Rényi order is the last one computed ({self._max_order})"
        if index == 0:
            return "the best Rényi order is 2, the lowest there is"
        return None


class Theorem3Accountant(RdpShuffleAccountant):
    """The published analysis: Theorem 3 for check-in rounds, 2 for fixed-size ones, 1 for all.

    Where the printed bound falls below the exact divergence (nγ < 1: Theorem 3 samples at rate γ
    though k reports mean rate k/n), the exact one is taken. If everyone takes part for certain
    (γ = 1 or m = n) the mechanism is Theorem 1's and is priced by it.
    """

    name = "theorem3"
    holds_for = "homogeneous pair"
    covers = (
        "the homogeneous pair only (all other users hold the differing user's record); assumes "
        "that all n users flip their coins every round, and that the server gets nothing of the "
        "round but the shuffled reports"
    )
    default_max_order = 256

    def __init__(
        self,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
        max_order: int | None = None,
        split: theorem3.Split = "chernoff",
        rate: theorem3.Rate = "nominal",
        capped: bool = False,
    ) -> None:
        """Makes an accountant that has spent nothing.

        Args:
            neighboring_relation: REPLACE_ONE or REPLACE_SPECIAL.
            max_order: Highest Rényi order; 256 if None.
            split: See `theorem3.shuffled_check_in_gaussian`.
            rate: See `theorem3.shuffled_check_in_gaussian`.
            capped: Whether no order costs more than Theorem 1's with all n users, which bounds
                every check-in rate and every number of reports (docs/theory.md, section 3). Not
                the published bound then: 0.213 in the published setting, not 9.617.

        Raises:
            ValueError: A value outside its range.
        """
        super().__init__(neighboring_relation, max_order)
        validation.choice("split", split, ("chernoff", "binomial"))
        validation.choice("rate", rate, ("nominal", "conditional"))
        self._form = (split, rate, bool(capped))

    def _options(self) -> tuple[Any, ...]:
        return (self._max_order, *self._form)

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`: also where Theorem 1 alone would say less."""
        notes, (split, rate, capped) = super().note(delta), self._form
        if capped or self._spent.event is None or np.any(self._spent.base):
            return notes
        relation, order = self.neighboring_relation, self._max_order
        other = Theorem3Accountant(relation, order, split, rate, capped=True)
        least = other.epsilon_after(self._spent.event, delta, self._spent.count)
        mine = conversion.epsilon_from_rdp(self._orders, self.rdp, delta)[0]
        if not least < 0.99 * mine:
            return notes
        text = f"Theorem 1 with all n users, which bounds every check-in rate, gives {least:.4g}"
        return f"{notes}; {text}" if notes else text

    @staticmethod
    def log_moments(event: Shuffled, sigma: float, max_order: int, *options: Any) -> FloatArray:
        """See `RdpShuffleAccountant.log_moments`."""
        *form, capped = options
        users, rate = event.users, event.chance
        exact = CheckInRdpAccountant.log_moments(event, sigma, max_order)
        if rate == 1.0:
            return exact
        if isinstance(event.participation, FixedSize):
            reports = event.participation.reports
            bound = rdp_bounds.subsampled_shuffled_gaussian(rate, reports, sigma, max_order)
        else:
            arguments = (users, rate, sigma, max_order)
            bound = theorem3.shuffled_check_in_gaussian(*arguments, *form)
        if capped:
            bound = np.minimum(bound, rdp_bounds.shuffled_gaussian(users, sigma, max_order))
        floored: FloatArray = np.maximum(bound, exact)
        return floored


class CheckInRdpAccountant(RdpShuffleAccountant):
    """Exact Rényi divergences of the homogeneous pair, the larger direction at each order."""

    name = "rdp"
    holds_for = "homogeneous pair"
    covers = (
        "the homogeneous pair only (all other users hold the differing user's record), exact in "
        "Rényi divergence; the same assumptions as theorem3"
    )
    default_max_order = 1024

    @staticmethod
    def log_moments(event: Shuffled, sigma: float, max_order: int, *options: Any) -> FloatArray:
        """See `RdpShuffleAccountant.log_moments`."""
        users, draws, rate = event.users, event.users, event.chance
        if rate == 1.0:
            forward = rdp_bounds.shuffled_gaussian(users, sigma, max_order)
        elif isinstance(event.participation, FixedSize):
            draws, rate = event.participation.reports, 1.0
            forward = rdp_bounds.fixed_size_shuffled_gaussian(users, draws, sigma, max_order)
        else:
            forward = rdp_bounds.shuffled_check_in_gaussian(users, rate, sigma, max_order)
        return reverse_moments.larger_direction(forward, users, draws, rate, sigma)
