"""How many jumps are in a sum: a Poisson number, or that of n independent terms.

Each gives what `accounting.numerics.jump_sum` needs of the sum's law, from that of one jump. In
docs/theory/blanket.md, section 6, are the proofs of the inequalities.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from shufl.accounting.numerics import FloatArray

ComplexArray = npt.NDArray[np.complex128]

# 1 - cos u >= factor u² for |u| <= width
_ARCS = ((math.pi, 2.0 / math.pi**2), (math.pi / 2.0, 4.0 / math.pi**2))


class Tilt(NamedTuple):
    """One jump weighed by e^{cx}: `E[e^{cX} - 1]`, `E[e^{cX}]`, `E[X e^{cX}]`, `E[X² e^{cX}]`.

    Each for one c, or for several at once.
    """

    growth: Any
    whole: Any
    first: Any
    second: Any


def _within(widths: FloatArray, x: FloatArray, *weights: FloatArray) -> list[FloatArray]:
    """The sums of some weights over |x| <= each width."""
    order = np.argsort(np.abs(x))
    count = np.searchsorted(np.abs(x)[order], widths, side="right")
    return [np.append(0.0, np.cumsum(each[order]))[count] for each in weights]


@dataclasses.dataclass(frozen=True)
class PoissonCount:
    """A Poisson number of jumps in b + S, where b <= 0. Tilted means weighed by e^{cx}.

    Attributes:
        jumps: Their expected number, > 0.
        shift: b.
        terms: The independent terms; infinitely many.
        elsewhere: The mean of another Poisson number, of the steps down that sums of signs have.
    """

    jumps: float
    shift: float = 0.0
    terms: float = math.inf
    elsewhere: float = 0.0

    @property
    def fixed(self) -> float:
        """The mean of all but the jumps, <= 0."""
        return self.shift

    def cumulants(self, c: Any, tilt: Tilt) -> tuple[Any, Any, Any]:
        """`log E[e^{c(b + S)}]` and two derivatives."""
        level = self.jumps * tilt.growth + c * self.shift
        return level, self.jumps * tilt.first + self.shift, self.jumps * tilt.second

    def log_ratios(self, c: float, tilt: Tilt, omega: FloatArray, grown: Any) -> ComplexArray:
        """`log E[e^{θ(b + S)}] - log E[e^{c(b + S)}]`, from J(θ) - J(c)."""
        return np.asarray(self.jumps * grown + 1j * self.shift * omega)

    def log_nothing(self, theta: Any) -> Any:
        """`log E[e^{θ(b + S)}; no jump]`."""
        return theta * self.shift - self.jumps

    def few(self, whole: Any, nothing: Any) -> Any:
        """`E[e^{θ(b + S)}; so few jumps that they are taken out]`: here none and one.

        From `1 + J(θ)` and what no jump gives.
        """
        return nothing * (1.0 + self.jumps * whole)

    def many(self, c: float, jump: FloatArray) -> FloatArray:
        """Upper bounds of `|E[e^{θ(b + S)}; more jumps]| / E[e^{c(b + S)}; no jump]`, Re θ = c.

        That of a jump, `|1 + J(θ)|`, is at most `jump`. It is e^y - 1 - y.
        """
        y = np.minimum(self.jumps * jump, 50.0)
        return np.where(y < 1e-4, y * y, np.expm1(y) - y)

    def decay(
        self, c: float, tilt: Tilt, x: FloatArray, tilted: FloatArray, ladder: FloatArray
    ) -> FloatArray:
        """Lower bounds of `-Re log_ratios` between each frequency and the next.

        By the curvature of the cosine. The last of the jumps x is the cap.
        """
        result = np.zeros(ladder.size - 1)
        for width, factor in _ARCS:
            (squares,) = _within(width / ladder[1:], x, tilted * x * x)
            result = np.maximum(result, factor * self.jumps * ladder[:-1] ** 2 * squares)
        return result

    def roughness(self, c: float, tilt: Tilt, smooth: FloatArray, mass: float) -> FloatArray:
        """The same from `|J(θ) + 1| <= smooth` but for the cap; `mass`: of all tilted jumps."""
        return self.jumps * (mass - smooth)


@dataclasses.dataclass(frozen=True)
class TermsCount:
    """n independent terms: a jump with a `chance`, a step `down` with that, otherwise nothing.

    b <= 0 is the shift.
    """

    terms: float
    chance: float
    down: float = 0.0
    step: float = 0.0
    shift: float = 0.0

    @property
    def jumps(self) -> float:
        """As `PoissonCount`'s."""
        return self.terms * self.chance

    @property
    def fixed(self) -> float:
        """As `PoissonCount`'s."""
        return self.shift - self.terms * self.down * self.step

    def _fallen(self, c: Any) -> Any:
        """E[e^{cV}; step down] of one term V."""
        return self.down * np.exp(np.minimum(-c * self.step, 600.0))

    def _total(self, c: Any, tilt: Tilt) -> Any:
        """E[e^{cV}], a sum of positive terms."""
        still = max(1.0 - self.chance - self.down, 0.0)
        return still + self.chance * tilt.whole + self._fallen(c)

    def cumulants(self, c: Any, tilt: Tilt) -> tuple[Any, Any, Any]:
        """As `PoissonCount`'s."""
        down = self.down * np.expm1(np.minimum(-c * self.step, 600.0))
        change = self.chance * tilt.growth + down
        total, fallen = self._total(c, tilt), self._fallen(c)
        mean = (self.chance * tilt.first - fallen * self.step) / total
        square = (self.chance * tilt.second + fallen * self.step**2) / total
        variance = np.maximum(square - mean * mean, 0.0)
        near = np.abs(change) < 0.5
        log_total = np.where(near, np.log1p(np.where(near, change, 0.0)), np.log(total))
        level = self.terms * log_total + c * self.shift
        return level, self.terms * mean + self.shift, self.terms * variance

    def log_ratios(self, c: float, tilt: Tilt, omega: FloatArray, grown: Any) -> ComplexArray:
        """As `PoissonCount`'s."""
        fallen = self._fallen(c) * np.expm1(-1j * self.step * omega)
        change = (self.chance * grown + fallen) / self._total(c, tilt)
        return np.asarray(self.terms * special.log1p(change) + 1j * self.shift * omega)

    def log_nothing(self, theta: Any) -> Any:
        """As `PoissonCount`'s."""
        left = self.down * np.expm1(-theta * self.step) - self.chance
        return self.terms * special.log1p(left) + theta * self.shift

    def few(self, whole: Any, nothing: Any) -> Any:
        """As `PoissonCount`'s: none."""
        return nothing

    def many(self, c: float, jump: FloatArray) -> FloatArray:
        """As `PoissonCount`'s: (1 + y/n)^n - 1."""
        nothing = 1.0 - self.chance + self.down * math.expm1(-c * self.step)
        y = self.chance * jump / max(nothing, 1e-300)
        return np.asarray(np.expm1(np.minimum(self.terms * np.log1p(y), 50.0)))

    def decay(
        self, c: float, tilt: Tilt, x: FloatArray, tilted: FloatArray, ladder: FloatArray
    ) -> FloatArray:
        """As `PoissonCount`'s: `-log |E e^{iωV}| >= ½ E[1 - cos ω(V - V')]`, V' another term."""
        total, fallen = self._total(c, tilt), self._fallen(c)
        still = 1.0 - self.chance - self.down
        v = np.concatenate([x, [0.0, -self.step]])
        p = np.concatenate([self.chance * tilted, [max(still, 0.0), fallen]]) / total
        v = v - float(np.sum(p * v))
        result = np.zeros(ladder.size - 1)
        for width, factor in _ARCS:
            chance, first, second = _within(0.5 * width / ladder[1:], v, p, p * v, p * v * v)
            spread = chance * second - first**2
            result = np.maximum(result, factor * self.terms * ladder[:-1] ** 2 * spread)
        return result

    def roughness(self, c: float, tilt: Tilt, smooth: FloatArray, mass: float) -> FloatArray:
        """As `PoissonCount`'s."""
        left = 1.0 - self.chance * (mass - smooth) / self._total(c, tilt)
        return np.asarray(-self.terms * np.log(np.clip(left, 1e-300, 1.0)))


Count = PoissonCount | TermsCount
"""How many jumps the sum b + S has, and what else is in it."""
