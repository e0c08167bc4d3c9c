"""The accountant without a shuffler: what remains if it colludes with the server."""

import math
from typing import Any

from dp_accounting import NeighboringRelation

from accounting.accountants.base import ShuffleAccountant
from accounting.events import Shuffled
from accounting.numerics.gaussian import gaussian_epsilon, log_gaussian_delta


class LocalAccountant(ShuffleAccountant):
    """No shuffling at all: a user whose reports are all seen by name.

    T Gaussian reports of one user are one Gaussian with `1/σ² = Σ_t 1/σ_t²`, also when chosen
    adaptively, so the conversion is exact (Balle and Wang 2018).
    """

    name = "local"
    holds_for = "every pair"
    counts_on_others = False
    covers = (
        "every pair of neighbouring datasets, a user who takes part in every round, and a server "
        "that colludes with the shuffler; assumes only that the user's own device adds the noise"
    )

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    ) -> None:
        """Makes an accountant that has spent nothing.

        Raises:
            ValueError: `neighboring_relation` is ADD_OR_REMOVE_ONE.
        """
        super().__init__(neighboring_relation)
        self._rounds: dict[float, int] = {}

    def _with(self, leaves: list[tuple[Shuffled, int]]) -> dict[float, int]:
        rounds = dict(self._rounds)
        for event, count in leaves:
            sigma = self._sigma(event)
            rounds[sigma] = rounds.get(sigma, 0) + count
        return rounds

    def _add(self, leaves: list[tuple[Shuffled, int]]) -> None:
        self._rounds = self._with(leaves)

    @staticmethod
    def _mean_shift(rounds: dict[float, int]) -> float:
        """μ = 1/σ of the one Gaussian that all rounds amount to."""
        return math.sqrt(
            sum(count / sigma / sigma if sigma else math.inf for sigma, count in rounds.items())
        )

    @staticmethod
    def _epsilon(shift: float, delta: float) -> float:
        if not 0.0 <= delta <= 1.0:
            raise ValueError(f"delta must lie in [0, 1], got {delta}")
        if shift == 0.0:
            return 0.0
        if shift == math.inf or delta == 0.0:
            return math.inf
        return gaussian_epsilon(shift, delta)

    def get_epsilon(self, target_delta: float) -> float:
        """Returns the exact ε of the composed Gaussian reports at `target_delta`."""
        return self._epsilon(self._mean_shift(self._rounds), target_delta)

    def get_delta(self, target_epsilon: float) -> float:
        """Returns the exact δ of the composed Gaussian reports at `target_epsilon` >= 0."""
        if not target_epsilon >= 0.0:
            raise ValueError(f"epsilon must be at least 0, got {target_epsilon}")
        shift = self._mean_shift(self._rounds)
        if shift == math.inf:
            return 1.0
        if shift == 0.0 or target_epsilon == math.inf:
            return 0.0
        return min(1.0, math.exp(float(log_gaussian_delta(shift, target_epsilon))))

    def epsilon_after(self, event: Any, delta: float, count: int = 1) -> float:
        """See `ShuffleAccountant.epsilon_after`."""
        leaves = self._checked_leaves(event, count)
        return self._epsilon(self._mean_shift(self._with(leaves)), delta)

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if self.get_epsilon(delta) < math.inf:
            return None
        if delta == 0.0:
            return "Gaussian noise gives no finite epsilon at delta 0"
        return "some round has no noise"
