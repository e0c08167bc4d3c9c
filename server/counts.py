"""Whether shufflers release what users' coins, blankets and the noise of sums explain."""

from __future__ import annotations

import math
from collections import defaultdict

from shufl.accounting import PrivacyPlan

_MOST_DEVIATIONS = 5.0  # by chance once in a million at each look, for a shuffler that is as agreed
_MOST_SHORT = 25.0  # by chance in T rounds with probability below T exp(-25)


class Counts:
    """Reports, or lengths of sums, against what is expected, of each shuffler over all rounds.

    It finds what went wrong by mistake, such as a shuffler that adds no blankets, or no noise to a
    sum. It is no defence: one that cheats also says how many users sent, or makes the sum longer.
    """

    def __init__(self, plan: PrivacyPlan):
        self._plan = plan
        self._excess: dict[int, float] = defaultdict(float)
        self._variance: dict[int, float] = defaultdict(float)
        self._short: dict[int, float] = defaultdict(float)

    def add(self, shuffler: int, reports: int, users: int) -> None:
        """Counts a released batch: binomially many users' reports, and Poisson many blankets."""
        rate, blankets = self._plan.check_in_rate, self._plan.shuffler_blankets
        self._excess[shuffler] += reports - (users * rate + blankets)
        self._variance[shuffler] += users * rate * (1 - rate) + blankets

    def add_sum(self, shuffler: int, length: float, users: int, dimension: int) -> None:
        """Compares a sum with its noise alone, which users' updates only make longer.

        `length` is that of the sum with all its noise, the server's too, over C. Its square in
        units of the noise is at least chi-squared with d degrees of freedom. What is missing adds
        up, in standard deviations, from the round on in which it began (a cumulative sum, Page
        1954, with 1/2 as its reference value). From any round on, the exponential of what adds up
        is a supermartingale while all add their noise: that law's lower tail is below a Gaussian's.
        """
        if noise := self._plan.noise_of_sum(users):
            missing = (dimension - (length / noise) ** 2) / math.sqrt(2.0 * dimension)
            self._short[shuffler] = max(self._short[shuffler] + missing - 0.5, 0.0)

    @property
    def doubt(self) -> str:
        """One line about shufflers whose releases no chance explains; or nothing."""
        lines = []
        for shuffler, excess in sorted(self._excess.items()):
            deviations = excess / math.sqrt(max(self._variance[shuffler], 1.0))
            if abs(deviations) >= _MOST_DEVIATIONS:
                lines.append(
                    f"shuffler {shuffler + 1} released {abs(excess):.0f} reports "
                    f"{'more' if excess > 0 else 'fewer'} than expected, "
                    f"{abs(deviations):.1f} standard deviations: ask its operator"
                )
        for shuffler, short in sorted(self._short.items()):
            if short >= _MOST_SHORT:
                lines.append(
                    f"shuffler {shuffler + 1} released sums that are shorter than their noise "
                    f"({short:.0f} where 25 is allowed): ask its operator and the nodes' owners "
                    "whether all add noise"
                )
        return "; ".join(lines)
