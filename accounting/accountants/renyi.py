"""Accountants that compose Rényi divergences: the published bounds, and the exact values."""

import abc
import functools
import math
from typing import ClassVar

import numpy as np
from dp_accounting import NeighboringRelation

from shufl.accounting.accountants.base import ShuffleAccountant, checked_delta
from shufl.accounting.numerics import FloatArray, moments, reverse_moments, theorem3
from shufl.accounting.numerics import renyi_divergence as rdp_bounds
from shufl.protocol import validation
from shufl.protocol.events import FixedSize, Shuffled
from shufl.protocol.text import rounded_up


@functools.lru_cache(maxsize=1024)
def _rdp_vector(
    accountant: "type[RdpShuffleAccountant]",
    event: Shuffled,
    sigma: float,
    max_order: int,
) -> FloatArray:
    """One event's ε(λ) for λ = 2..max_order, shared by all accountants of the process."""
    if not moments.is_representable(sigma, max_order):
        return np.full(max_order - 1, np.inf)
    result = rdp_bounds.rdp_from_log_moments(accountant.log_moments(event, sigma, max_order))
    result.setflags(write=False)
    return result


class RdpShuffleAccountant(ShuffleAccountant):
    """Base of the Rényi accountants, which add up divergences of the orders 2..max_order.

    A process prices each event once. After that `compose`, `epsilon_after` and `get_epsilon` cost
    one pass over the orders.
    """

    default_max_order: ClassVar[int]

    def __init__(
        self,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE,
        max_order: int | None = None,
    ) -> None:
        """Starts with nothing composed.

        Args:
            neighboring_relation: REPLACE_ONE, or REPLACE_SPECIAL for zero-out.
            max_order: The highest Rényi order, at least 2; the class's default if None.

        Raises:
            ValueError: The relation is ADD_OR_REMOVE_ONE, or the order is no whole number from 2.
        """
        super().__init__(neighboring_relation)
        wanted = self.default_max_order if max_order is None else max_order
        self._max_order = validation.integer("highest Rényi order", wanted, 2)
        self._orders: FloatArray = np.arange(2.0, self._max_order + 1.0)

    @property
    def rdp(self) -> FloatArray:
        """The composed ε(λ) at each order, shape (K,)."""
        return self._total(self._counts)

    @classmethod
    @abc.abstractmethod
    def log_moments(cls, event: Shuffled, sigma: float, max_order: int) -> FloatArray:
        """Returns one event's `(λ - 1) ε(λ)`, shape (max_order + 1,); σ is above 0."""

    def _total(self, counts: dict[Shuffled, int]) -> FloatArray:
        total = np.zeros_like(self._orders)
        for event, count in counts.items():
            total += count * _rdp_vector(type(self), event, self._sigma(event), self._max_order)
        return total

    def _epsilon(self, counts: dict[Shuffled, int], delta: float) -> float:
        return rdp_bounds.epsilon_from_rdp(self._orders, self._total(counts), delta)[0]

    def _delta(self, counts: dict[Shuffled, int], epsilon: float) -> float:
        return rdp_bounds.delta_from_rdp(self._orders, self._total(counts), epsilon)

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        at = checked_delta(delta)
        epsilon, index = rdp_bounds.epsilon_from_rdp(self._orders, self.rdp, at)
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

    Guarantee:
        ε holds for the homogeneous pair only (all other users hold the differing user's record);
        assumes that all n users flip their coins and add their noise every round, and that the
        server gets nothing of the round but the shuffled reports.
    """

    name = "theorem3"
    covers = (
        "the homogeneous pair only (all other users hold the differing user's record); assumes "
        "that all n users flip their coins and add their noise every round, and that the server "
        "gets nothing of the round but the shuffled reports"
    )
    holds_for = "homogeneous pair"
    default_max_order = 256

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`: also where Theorem 1 alone would say less."""
        notes = super().note(delta)
        capped = CappedTheorem3Accountant(self.neighboring_relation, self._max_order)
        least = capped._epsilon(self._counts, delta)
        if not least < 0.99 * self._epsilon(self._counts, delta):
            return notes
        text = "Theorem 1 with all n users, which bounds every check-in rate, gives "
        text += rounded_up(least)
        return f"{notes}; {text}" if notes else text

    @classmethod
    def log_moments(cls, event: Shuffled, sigma: float, max_order: int) -> FloatArray:
        """See `RdpShuffleAccountant.log_moments`."""
        exact = CheckInRdpAccountant.log_moments(event, sigma, max_order)
        if event.chance == 1.0:
            return exact
        return np.maximum(cls._printed(event, sigma, max_order), exact)

    @staticmethod
    def _printed(event: Shuffled, sigma: float, max_order: int) -> FloatArray:
        """The bound of the theorem for such rounds."""
        if isinstance(event.participation, FixedSize):
            reports = event.participation.reports
            return rdp_bounds.subsampled_shuffled_gaussian(event.chance, reports, sigma, max_order)
        return theorem3.shuffled_check_in_gaussian(event.users, event.chance, sigma, max_order)


class CappedTheorem3Accountant(Theorem3Accountant):
    """No order costs more than Theorem 1's with all n users.

    That bounds every check-in rate and every number of reports (docs/theory/gaussian.md, section
    3). It is not the published bound then: 0.214 in the published setting, not 9.618.
    """

    @staticmethod
    def _printed(event: Shuffled, sigma: float, max_order: int) -> FloatArray:
        printed = Theorem3Accountant._printed(event, sigma, max_order)
        everyone = rdp_bounds.forward_moments(event.users, event.users, 1.0, sigma, max_order)
        return np.minimum(printed, everyone)


class CheckInRdpAccountant(RdpShuffleAccountant):
    """Exact Rényi divergences of the homogeneous pair, the larger direction at each order.

    Guarantee:
        ε holds for the homogeneous pair only (all other users hold the differing user's record),
        exact in Rényi divergence; the same assumptions as theorem3.
    """

    name = "rdp"
    covers = (
        "the homogeneous pair only (all other users hold the differing user's record), exact in "
        "Rényi divergence; the same assumptions as theorem3"
    )
    holds_for = "homogeneous pair"
    default_max_order = 1024

    @classmethod
    def log_moments(cls, event: Shuffled, sigma: float, max_order: int) -> FloatArray:
        """See `RdpShuffleAccountant.log_moments`."""
        users, draws, rate = event.users, event.users, event.chance
        if isinstance(event.participation, FixedSize):
            draws, rate = event.participation.reports, 1.0
        forward = rdp_bounds.forward_moments(users, draws, rate, sigma, max_order)
        return reverse_moments.larger_direction(forward, users, draws, rate, sigma)
