"""One random jump of a sum, capped, at the nodes of a quadrature rule.

A jump is `X = x(t)`, t ~ N(0, 1). A jump above the cap counts as the cap. Nodes are placed so that
integrals of `e^{θx}` over t are exact but for rounding, for all θ that are asked for.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian_divergence import ROOT_TAU, panels, quadrature
from shufl.accounting.numerics.jump_counts import Count

RULE = np.polynomial.legendre.leggauss(10)
# A panel of t: its width in standard deviations, and over the scale 1/w of e^{wt}; and how far
# e^{θx} may turn or grow from end to end. 10 nodes integrate that to 1e-14.
_WIDEST, _STEEPEST = 0.7, 1.4
_PHASE = 5.0
# Where e^{θx} turns fast: 32 nodes for panels that are three times as wide and turn by so much, to
# 1e-15.
_FINE_RULE = np.polynomial.legendre.leggauss(32)
_FINE_PHASE, _FINE_WIDTH = 40.0, 3.0
REACH, FARTHEST = 10.5, 23.5
"""t beyond which fewer than 1e-25 of the jumps are; and 1e-120, where rarer ones lift the sum."""

FAINT = -36.0  # exponent below which a part of the sum is a rounding error
_DEVIATIONS = 5.0  # how far the rest of the sum may be below zero for a jump of the cap to lift it
_GRID = 800  # points of t to search and to measure panels by


@dataclasses.dataclass(frozen=True)
class Jumps:
    """X as a function of t ~ N(0, 1).

    Attributes:
        value: x, increasing.
        slope: Its derivative.
        mean: E[X].
        reach: |x(t)| grows at most like e^{reach |t|}.
        flat: Ends of the t for which X is 0, if there are any: no jump at all.
    """

    value: Callable[[FloatArray], FloatArray]
    slope: Callable[[FloatArray], FloatArray]
    mean: float
    reach: float
    flat: tuple[float, ...] = ()


class CappedJump:
    """X with a cap, at nodes.

    Attributes:
        jumps: X.
        cap: Where X is cut off.
        excess: E[(X - cap)_+].
        ends: The least t, and that of the cap.
        at_end: Whether jumps beyond `reach` would lift the sum, too.
        t: Nodes, shape (K,).
        x: X at the nodes, the cap last, shape (K + 1,).
        weights: Of `x` under the normal law, shape (K + 1,).
    """

    def __init__(self, jumps: Jumps, count: Count, reach: float) -> None:
        self.jumps, self._count = jumps, count
        self.widest = min(_WIDEST, _STEEPEST / jumps.reach)
        reach += jumps.reach
        t = np.linspace(-reach, reach, _GRID)
        x = jumps.value(t)
        last = self._highest(t, x)
        self.at_end = last == _GRID - 1
        self._grid, self._values = t[: last + 1], x[: last + 1]
        self._slopes = jumps.slope(self._grid)
        low, high = -reach, float(t[last])
        self.ends = low, high
        self.cap = float(x[last])
        t, weights = quadrature(panels(high, high + reach, self.widest), RULE)
        self.excess = float(np.sum(weights * (jumps.value(t) - self.cap)))
        self._rest = float(special.ndtr(-high))
        self._take(panels(low, high, self.widest))

    def _take(self, edges: FloatArray) -> None:
        """Takes nodes between these edges; the last of all is the cap."""
        self.t, weights = quadrature(self._with_flat(edges), RULE)
        self.weights = np.append(weights, self._rest)
        self.x = np.append(self.jumps.value(self.t), self.cap)

    def refine(self, c: float) -> None:
        """Takes nodes fit for e^{3cx}, the most that is asked for once c is known."""
        self._take(self._edges(c, 3.0 * c / _PHASE, self.widest))

    def tilted(self, c: float) -> FloatArray:
        """Returns the weights times e^{cx}."""
        return self.weights * np.exp(c * self.x)

    def fine(self, c: float, highest: float) -> tuple[FloatArray, FloatArray]:
        """Returns jumps at nodes fit for frequencies up to `highest`, and tilted weights."""
        density, widest = math.hypot(c, highest) / _FINE_PHASE, _FINE_WIDTH * self.widest
        edges = self._with_flat(self._edges(c, density, widest))
        fine, weights = quadrature(edges, _FINE_RULE)
        x = np.append(self.jumps.value(fine), self.cap)
        return x, np.append(weights, self._rest) * np.exp(c * x)

    def _highest(self, t: FloatArray, x: FloatArray) -> int:
        """Place of the cap: as far above zero as the rest of the sum is ever likely to be below."""
        count = self._count
        weights = count.jumps * np.exp(-0.5 * t * t) / ROOT_TAU * (t[1] - t[0])
        fall = -(count.fixed + count.jumps * self.jumps.mean)
        sizes = np.abs(x)
        order = np.argsort(sizes)
        size, weight = sizes[order], weights[order]
        beyond = np.append(np.cumsum(weight[:0:-1])[::-1], 0.0)
        spread = np.empty_like(x)
        spread[order] = np.sqrt(np.cumsum(size * size * weight) + size * size * beyond)
        short = np.flatnonzero(x < fall + _DEVIATIONS * spread)
        return min(int(short[-1]) + 1, x.size - 1) if short.size else 0

    def _edges(self, c: float, density: float, widest: float) -> FloatArray:
        """Edges of panels, so many for each unit of x, where e^{cx} counts."""
        t = self._grid
        weight = c * self._values - 0.5 * t * t + math.log(max(self._count.jumps, 1.0))
        slope = np.where(weight > FAINT, self._slopes, 0.0)
        each = np.maximum(1.0 / widest, density * slope)
        panels = np.append(0.0, np.cumsum(0.5 * (each[1:] + each[:-1])) * (t[1] - t[0]))
        edges = np.interp(np.linspace(0.0, panels[-1], math.ceil(panels[-1]) + 1), panels, t)
        return np.asarray(edges)

    def _with_flat(self, edges: FloatArray) -> FloatArray:
        """The edges, and where X is not smooth."""
        bends = [t for t in self.jumps.flat if edges[0] < t < edges[-1]]
        return np.unique(np.append(edges, bends))
