"""Whether shufflers release as many reports as users' coins and blankets explain."""

from __future__ import annotations

import math
from collections import defaultdict

from shufl.accounting import PrivacyPlan

_MOST_DEVIATIONS = 5.0  # by chance once in a million, for a shuffler that is as agreed


class Counts:
    """Reports against their expectation, of each shuffler over all rounds so far.

    It finds what went wrong by mistake, such as a shuffler that adds no blankets. It is no defence:
    one that cheats also says how many users sent.
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

    @property
    def doubt(self) -> str:
        """One line about shufflers that are five standard deviations off or more; or nothing."""
        lines = []
        for shuffler, excess in sorted(self._excess.items()):
            deviations = excess / math.sqrt(max(self._variance[shuffler], 1.0))
            if abs(deviations) >= _MOST_DEVIATIONS:
                lines.append(
                    f"shuffler {shuffler + 1} released {abs(excess):.0f} reports "
                    f"{'more' if excess > 0 else 'fewer'} than expected, "
                    f"{abs(deviations):.1f} standard deviations: ask its operator"
                )
        return "; ".join(lines)
