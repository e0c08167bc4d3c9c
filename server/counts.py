"""Whether shufflers release what users' coins, blankets and the noise of sums explain."""

from __future__ import annotations

import math
from collections import defaultdict

from shufl.accounting import PrivacyPlan

_MOST_DEVIATIONS = 5.0  # by chance once in a million, for a shuffler that is as agreed


class Counts:
    """Reports, or lengths of sums, against what is expected, of each shuffler over all rounds.

    It finds what went wrong by mistake, such as a shuffler that adds no blankets, or no noise to a
    sum. It is no defence: one that cheats also says how many users sent, or makes the sum longer.
    """

    def __init__(self, plan: PrivacyPlan):
        self._plan = plan
        self._excess: dict[int, float] = defaultdict(float)
        self._variance: dict[int, float] = defaultdict(float)

    def add(self, shuffler: int, reports: int, users: int) -> None:
        """Counts a released batch: binomially many users' reports, and Poisson many blankets."""
        rate, blankets = self._plan.check_in_rate, self._plan.shuffler_blankets
        self._excess[shuffler] += reports - (users * rate + blankets)
        self._variance[shuffler] += users * rate * (1 - rate) + blankets

    def add_sum(self, shuffler: int, length: float, users: int, dimension: int) -> None:
        """Compares a sum with its noise alone, which users' updates only make longer.

        `length` is that of the sum with all its noise, the server's too, over C. In units of the
        noise its square is at least chi-squared with d degrees of freedom.
        """
        if noise := self._plan.noise_of_sum(users):
            self._excess[shuffler] += (length / noise) ** 2 - dimension
            self._variance[shuffler] += 2.0 * dimension

    @property
    def doubt(self) -> str:
        """One line about shufflers that are five standard deviations off or more; or nothing."""
        lines = []
        for shuffler, excess in sorted(self._excess.items()):
            deviations = excess / math.sqrt(max(self._variance[shuffler], 1.0))
            if self._plan.mixing == "sum":
                if deviations <= -_MOST_DEVIATIONS:
                    lines.append(
                        f"shuffler {shuffler + 1} released sums that are shorter than their noise, "
                        f"by {-deviations:.1f} standard deviations: ask its operator and the "
                        "nodes' owners whether all add noise"
                    )
            elif abs(deviations) >= _MOST_DEVIATIONS:
                lines.append(
                    f"shuffler {shuffler + 1} released {abs(excess):.0f} reports "
                    f"{'more' if excess > 0 else 'fewer'} than expected, "
                    f"{abs(deviations):.1f} standard deviations: ask its operator"
                )
        return "; ".join(lines)
