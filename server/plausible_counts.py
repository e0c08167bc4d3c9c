"""Whether a shuffler releases what users' coins, blankets and the noise of sums explain."""

from __future__ import annotations

import math

from shufl.accounting import PrivacyPlan

_MOST_DEVIATIONS = 5.0  # by chance once in a million at each look, for a shuffler that is as agreed
_MOST_SHORT = 25.0  # by chance in T rounds with probability below T exp(-25)


class Counts:
    """A shuffler's reports, or lengths of sums, against what is expected, over all rounds.

    It finds what went wrong by mistake, such as a shuffler that adds no blankets, or no noise to a
    sum. It is no defence: one that cheats also says how many users sent, or makes the sum longer.
    """

    def __init__(self, plan: PrivacyPlan):
        self._plan = plan
        self._excess = self._variance = self._short = 0.0

    def add(self, reports: int, users: int) -> None:
        """Counts a released batch: binomially many users' reports, and Poisson many blankets."""
        rate, blankets = self._plan.check_in_rate, self._plan.shuffler_blankets
        self._excess += reports - (users * rate + blankets)
        self._variance += users * rate * (1 - rate) + blankets

    def add_sum(self, length: float, users: int, dimension: int) -> None:
        """Compares a sum with its noise alone, which users' updates only make longer.

        `length` is that of the sum with all its noise, the server's too, over C. Its square in
        units of the noise is at least chi-squared with d degrees of freedom. What is missing adds
        up, in standard deviations, from the round on in which it began (a cumulative sum, Page
        1954, with 1/2 as its reference value). From any round on, the exponential of what adds up
        is a supermartingale while all add their noise: that law's lower tail is below a Gaussian's.
        """
        if noise := self._plan.noise_of_sum(users):
            missing = (dimension - (length / noise) ** 2) / math.sqrt(2.0 * dimension)
            self._short = max(self._short + missing - 0.5, 0.0)

    @property
    def doubt(self) -> str:
        """What the shuffler has released that no chance explains; or nothing."""
        deviations = self._excess / math.sqrt(max(self._variance, 1.0))
        if abs(deviations) >= _MOST_DEVIATIONS:
            return (
                f"released {abs(self._excess):.0f} reports "
                f"{'more' if deviations > 0 else 'fewer'} than expected, "
                f"{abs(deviations):.1f} standard deviations: ask its operator"
            )
        if self._short >= _MOST_SHORT:
            return (
                f"released sums that are shorter than their noise ({self._short:.0f} where 25 is "
                "allowed): ask its operator and the nodes' owners whether all add noise"
            )
        return ""
