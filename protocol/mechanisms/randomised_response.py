"""k-ary randomised response: a report is the user's category, or by a coin a uniform one.

Warner 1965 for two categories, "Randomized response"; Kairouz, Bonawitz and Ramage 2016, "Discrete
distribution estimation under local privacy", for k.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import numpy as np
from scipy import special

from shufl.protocol.mechanisms.report_draws import coins, place_of, to_normals
from shufl.protocol.plan_fields import Categories, LocalEpsilon
from shufl.protocol.validation import Checked


class RandomisedResponse(Checked):
    """Every report is one category r of k, as `(1/k - e_r)/s`: the mean of many is unbiased.

    r is the user's own category with probability `s = (e^ε₀ - 1)/(e^ε₀ + k - 1)`, otherwise a
    uniform one, which may be the user's too: pure ε₀-LDP. A blanket is a uniform category.

    An update is `1/k - p`, where p holds the shares of the categories among the user's own records:
    the gradient step of the model `histogram`. A user with several records reports one of them,
    drawn from p.

    Attributes:
        categories: k.
        local_epsilon: ε₀ in [1e-9, 20], what a report costs its user whoever cheats.

    Guarantee:
        Whatever two updates a user may have, no report is more than e^ε₀ times as likely with one
        as with the other.
    """

    most_epsilon: ClassVar[float] = 20.0
    is_private: ClassVar[bool] = True
    by_entry: ClassVar[bool] = False  # one category; at most 32 768 entries

    name: Literal["randomised-response"] = "randomised-response"
    categories: Categories
    local_epsilon: LocalEpsilon

    @property
    def truth(self) -> float:
        """s in (0, 1), rounded down, so that no report costs more than ε₀."""
        grown = math.expm1(self.local_epsilon)
        return grown / (grown + self.categories) * (1.0 - 2.0**-49)

    @property
    def clip_norm(self) -> float:
        """1: the length of reports, before they are divided by s, is that of their categories."""
        return 1.0

    @property
    def noise_multiplier(self) -> float:
        """The standard deviation of one entry of a blanket."""
        return math.sqrt(self.categories - 1) / self.categories / self.truth

    @staticmethod
    def draws(dimension: int) -> int:
        """How many draws a report takes: which category, whether it is a uniform one, and which."""
        return 3

    def noise_deviation(self, dimension: int) -> float:
        """The standard deviation of one entry of a blanket."""
        return self.noise_multiplier

    def unit(self, dimension: int) -> float:
        """What a step of a report's integers stands for: the report of r is 1 - k at r, else 1."""
        return 1.0 / (self.categories * self.truth)

    def report(self, update: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Returns one report, in units.

        Whatever the update is, the report's category is drawn from some p, so the coin bounds what
        the report tells. Draws of 64 random bits give the coin exactly the probability s, and make
        all uniform categories equally likely.

        Args:
            update: `1/k - p`, of shape (k,) and any float type; other vectors are made into a p.
            draws: Of a `Randomness`, shape (3,).

        Returns:
            Int16 of shape (k,): 1 - k at the category, 1 elsewhere. The sign is that of an update.
        """
        k = self.categories
        own = float(special.ndtr(to_normals(draws[:1]).astype(np.float64))[0])
        shares = 1.0 / k - np.asarray(update, dtype=np.float64)
        shares = np.where(shares > 1e-6, shares, 0.0)  # rounding of float32 is no share
        total = float(shares.sum())
        if coins(draws[1:2], self.truth)[0] and 0.0 < total < math.inf:
            place = int(np.searchsorted(np.cumsum(shares), own * total, side="right"))
        else:
            place = place_of(draws[2], k)
        report = np.ones(k, dtype=np.int16)
        report[min(place, k - 1)] = 1 - k
        return report

    def largest_honest_norm(self, dimension: int) -> float:
        """A norm, in units, that no honest report exceeds."""
        return math.sqrt(self.categories * (self.categories - 1.0)) + 1e-6
