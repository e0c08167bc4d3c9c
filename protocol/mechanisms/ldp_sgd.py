"""LDP-SGD's report: a random unit vector on the side of the update, or on the other by a coin.

Duchi, Jordan and Wainwright 2018, "Minimax optimal procedures for locally private estimation", for
the L2 ball; named LDP-SGD by Erlingsson et al. 2020, "Encode, shuffle, analyze privacy revisited".
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy import linalg, special

from shufl.protocol.mechanisms.gaussian import clip
from shufl.protocol.mechanisms.report_draws import coins, to_normals
from shufl.protocol.validation import Checked, ClipNorm, Positive

_LARGEST = 2**15 - 1
_RANGE = 12.0  # deviations of one entry that the grid holds
_ROOT_HALF_PI = math.sqrt(0.5 * math.pi)


class LdpSgd(Checked):
    """Every report is `±B v`: v uniform on the unit sphere, its sign that of <v, update> or not.

    With ρ = min(‖update‖/C, 1) the sign is right with probability (1 + ρt)/2. Against the report of
    a zero update, which is uniform on the sphere, every report's density is between 1 - t and
    1 + t: pure ε₀-LDP with `t = tanh(ε₀/2)`. `B = C √π Γ((d+1)/2) / (t Γ(d/2))` makes it unbiased.

    The parameter is not ε₀ but z, so that equal z is equal noise: B²/d is (zC)² to within 1/(2d).

    Attributes:
        clip_norm: C in [1e-18, 1e15], the largest Euclidean norm of an update. No ε depends on it.
        noise_multiplier: z = sqrt(π/2)/t, above sqrt(π/2) by a billionth of it or more: ε₀ < 22.

    Guarantee:
        Whatever two updates a user may have, no report is more than e^ε₀ times as likely with one
        as with the other.
    """

    least_noise: ClassVar[float] = 1.254
    is_private: ClassVar[bool] = True
    by_entry: ClassVar[bool] = False  # every entry is scaled by the length of all draws

    name: Literal["ldp-sgd"] = "ldp-sgd"
    clip_norm: ClipNorm = 1.0
    noise_multiplier: Annotated[
        Positive,
        Field(
            gt=_ROOT_HALF_PI * (1.0 + 1e-9),  # 1 - t keeps seven digits
            le=1e15,
            description="a number above sqrt(pi/2) = 1.2533 (at most 1e15) with mechanism ldp-sgd",
        ),
    ]

    @property
    def bias(self) -> float:
        """t in (0, 1)."""
        return _ROOT_HALF_PI / self.noise_multiplier

    @property
    def local_epsilon(self) -> float:
        """ε₀ of one report: 2 artanh t."""
        return 2.0 * math.atanh(self.bias)

    @staticmethod
    def ratio_variance(noise_multiplier: np.ndarray) -> np.ndarray:
        """The variance of a report's density over a blanket's, at most: t²."""
        return (_ROOT_HALF_PI / noise_multiplier) ** 2

    @staticmethod
    def draws(dimension: int) -> int:
        """How many N(0, 1) draws a report of d entries takes: one more, for the coin."""
        return dimension + 1

    def norm(self, dimension: int) -> float:
        """B, the length of every report of d entries."""
        log_ratio = special.gammaln(0.5 * (dimension + 1)) - special.gammaln(0.5 * dimension)
        return self.clip_norm * math.sqrt(math.pi) * math.exp(log_ratio) / self.bias

    def noise_deviation(self, dimension: int) -> float:
        """The standard deviation of one entry of the report of a zero update: B/sqrt(d)."""
        return self.norm(dimension) / math.sqrt(dimension)

    def lengths_along(self, standard_normal: np.ndarray, dimension: int) -> np.ndarray:
        """Returns draws of B |<v, u>|, for a unit vector u and v uniform on the sphere.

        A simulation adds up what reports have along their updates' directions.

        Args:
            standard_normal: One N(0, 1) draw for each result, any shape.
            dimension: d, of the reports.

        Returns:
            Float64 of the same shape.
        """
        if dimension == 1:
            return np.full(standard_normal.shape, self.norm(1))
        chance = special.ndtr(standard_normal)
        squares = special.betaincinv(0.5, 0.5 * (dimension - 1), chance)
        return np.asarray(self.norm(dimension) * np.sqrt(squares))

    def unit(self, dimension: int) -> float:
        """What one step of a report's integers stands for: entries reach to 12 B/sqrt(d), or B."""
        reach = min(1.0, _RANGE / math.sqrt(dimension))
        return self.norm(dimension) * reach / _LARGEST

    def report(self, update: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Returns one report, in units, rounded and saturated.

        Whatever the update, v and -v are equally likely, and a coin decides which of them is sent.
        So rounding errors of v, or of the scalar product that tells the sides apart, cost no ε.
        Draws of 64 random bits give the coin exactly the probability (1 + ρt)/2, with ρ at most 1.

        Args:
            update: Shape (d,), any float type.
            draws: Of a `Randomness`, shape (d + 1,).

        Returns:
            The report in steps of `unit(d)`: int16 of shape (d,).
        """
        clipped = clip(update, self.clip_norm)
        drawn = to_normals(draws[:-1]).astype(np.float64)
        share = min(float(linalg.norm(clipped)) / self.clip_norm, 1.0)
        numerator, denominator = (share * self.bias).as_integer_ratio()
        (right,) = coins(draws[-1:], Fraction(numerator + denominator, 2 * denominator))
        side = 1.0 if float(drawn @ clipped) >= 0.0 else -1.0
        dimension = drawn.size
        drawn_length = float(linalg.norm(drawn))
        if drawn_length == 0.0:  # almost never; a zero vector has no place on the sphere
            drawn[0] = drawn_length = 1.0
        length = self.norm(dimension) / self.unit(dimension) / drawn_length
        drawn *= side * length if right else -side * length
        np.rint(drawn, out=drawn)
        return np.clip(drawn, -_LARGEST, _LARGEST, out=drawn).astype(np.int16)

    def largest_honest_norm(self, dimension: int) -> float:
        """A norm, in units, that no honest report exceeds: B, and sqrt(d)/2 for rounding."""
        return self.norm(dimension) / self.unit(dimension) + math.sqrt(dimension) / 2
