"""The accountant without a shuffler: what remains if it colludes with the server."""

import math
from typing import Any

from dp_accounting import NeighboringRelation, dp_event
from scipy import special

from accounting.accountant_base import ShuffleAccountant
from accounting.events import EVENTS

# Special functions in the Gaussian conversion err by less; ε and δ are raised.
_GAUSSIAN_ROUND_UP = 1e-9
_ROOT_TWO = math.sqrt(2.0)


def gaussian_epsilon(shift: float, delta: float) -> float:
    """Returns ε at `delta` of two Gaussians of variance 1, `shift` apart, raised by 1e-9.

    `δ = Φ(-x) - e^ε Φ(-x-μ)`, `ε = μ (x + μ/2)` (Balle and Wang 2018). log δ is a concave function
    of x (it convolves log-concave ones), so Newton's steps from `Φ(-x) = δ` downwards never pass
    the root: wherever they end, ε is large enough.

    Args:
        shift: μ > 0.
        delta: δ in (0, 1).
    """
    if delta >= 1.0:
        return 0.0
    # erfcx errs by some 1e-15, which the quotient's distance from 1, about μ, magnifies.
    wanted = math.log(delta) - 1e-12 - 1e-14 / min(shift, 1.0)
    x = -float(special.ndtri(delta))
    for _ in range(100):
        if x <= -shift / 2.0:
            return 0.0
        # e^ε Φ(-x-μ)/Φ(-x), a quotient of two Mills ratios
        here = float(special.erfcx(max(x, -35.0) / _ROOT_TWO))
        ratio = min(float(special.erfcx((x + shift) / _ROOT_TWO)) / here, 1.0 - 1e-16)
        excess = float(special.log_ndtr(-x)) + math.log1p(-ratio) - wanted
        step = excess * (1.0 - ratio) / (shift * ratio) if ratio > 0.0 else 0.0
        x += step
        if step > -1e-13 * max(abs(x), 1.0):
            break
    epsilon = shift * (x + shift / 2.0)
    return max(epsilon * (1.0 + _GAUSSIAN_ROUND_UP), 0.0)


class LocalAccountant(ShuffleAccountant):
    """No shuffling at all: a user whose reports are all seen by name.

    T Gaussian reports of one user are one Gaussian with `1/σ² = Σ_t 1/σ_t²`, also when chosen
    adaptively, so the conversion is exact (Balle and Wang 2018).

    With blankets it is an upper bound: replacing one's Gaussian report by fresh noise of the same
    law, by a coin that does not depend on the data, is post-processing of that report. So every
    blanket-mixed report is priced as the Gaussian one it was made of, whatever β is.
    """

    name = "local"
    covers = (
        "every pair of neighbouring datasets, a user who takes part in every round, and a server "
        "that colludes with the shuffler; assumes only that the user's own device adds the noise"
    )
    events = tuple(EVENTS.values())

    def __init__(
        self, neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_ONE
    ) -> None:
        """Makes an accountant that has spent nothing.

        Raises:
            ValueError: `neighboring_relation` is ADD_OR_REMOVE_ONE.
        """
        super().__init__(neighboring_relation)
        self._rounds: dict[float, int] = {}

    def _with(self, leaves: list[tuple[Any, int]]) -> dict[float, int]:
        rounds = dict(self._rounds)
        for event, count in leaves:
            if getattr(event, "reports", None) == 0:
                continue
            private = not isinstance(event, dp_event.NonPrivateDpEvent)
            sigma = self._sigma(event) if private else 0.0
            rounds[sigma] = rounds.get(sigma, 0) + count
        return rounds

    def _add(self, leaves: list[tuple[Any, int]]) -> None:
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
        near = float(special.log_ndtr(shift / 2.0 - target_epsilon / shift))
        far = target_epsilon + float(special.log_ndtr(-shift / 2.0 - target_epsilon / shift))
        delta = math.exp(near) * -math.expm1(min(far - near, 0.0))
        return min(1.0, delta * (1.0 + _GAUSSIAN_ROUND_UP))

    def epsilon_after(self, event: Any, delta: float, count: int = 1) -> float:
        """See `ShuffleAccountant.epsilon_after`."""
        leaves = self._checked_leaves(event, count)
        return self._epsilon(self._mean_shift(self._with(leaves)), delta)

    def best_order(self, delta: float) -> int | None:
        """Returns None: no Rényi order is involved."""
        return None

    def note(self, delta: float) -> str | None:
        """See `ShuffleAccountant.note`."""
        if self.get_epsilon(delta) < math.inf:
            return None
        if delta == 0.0:
            return "Gaussian noise gives no finite epsilon at delta 0"
        return "some round has no noise"
