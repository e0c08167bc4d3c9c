"""One summand of a sum, and its law on the points of a grid: above or below it in convex order."""

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.gaussian_divergence import quadrature, reach_of
from shufl.accounting.numerics.loss_pmf import USUAL_LEAST

_RULE = np.polynomial.legendre.leggauss(8)
_WIDEST_PANEL = 0.25  # in standard deviations: 8 nodes are exact to rounding


@dataclasses.dataclass(frozen=True)
class Summand:
    """X: atoms, and with what is left of the probability `value(t)`, t ~ N(0, 1).

    Attributes:
        atoms: Pairs (x, probability).
        rate: Probability of the continuous part.
        value: Increasing and smooth; FloatArray to FloatArray.
        inverse: Its inverse; -inf and inf outside its range.
        tail: |value(t)| grows at most like e^{tail |t|}.
        jump: E|value(t)|, about: the scale that the mesh starts from.
        least: Expectations far below are not of interest.
    """

    atoms: tuple[tuple[float, float], ...]
    rate: float
    value: Callable[[FloatArray], FloatArray]
    inverse: Callable[[FloatArray], FloatArray]
    tail: float
    jump: float
    least: float = USUAL_LEAST

    @property
    def reach(self) -> float:
        """How many standard deviations of the driving normal count."""
        return reach_of(1e-8 * self.least)

    @property
    def ends(self) -> tuple[float, float]:
        """t between which the continuous part is put on the grid."""
        return -self.reach - self.tail, self.reach + self.tail

    @property
    def span(self) -> tuple[float, float]:
        """The least and the greatest place that is put on the grid."""
        bottom, top = self.value(np.array(self.ends)).tolist()
        places = [place for place, chance in self.atoms if chance > 0.0]
        return min([bottom, *places]), max([top, *places])


def left_out(summand: Summand) -> tuple[float, float]:
    """Returns how far the continuous part reaches beyond its ends: above, and below, in mean."""
    first, last = summand.ends
    low, high = summand.value(np.array(summand.ends)).tolist()
    far = summand.reach + summand.tail
    excess = _Panels(np.array([last, last + far])).integral(lambda t: summand.value(t) - high)
    deficit = _Panels(np.array([first - far, first])).integral(lambda t: low - summand.value(t))
    return summand.rate * excess, summand.rate * deficit


def totals(places: npt.NDArray[np.int64], weights: FloatArray, size: int = 0) -> FloatArray:
    """Returns the sum of the weights at each place 0, 1, ..."""
    return np.bincount(places, weights, size).astype(np.float64)


class _Panels:
    """Gauss-Legendre quadrature under the normal density, by the cells between increasing edges."""

    def __init__(self, edges: FloatArray) -> None:
        between = np.arange(edges[0], edges[-1], _WIDEST_PANEL)
        self.nodes, self._weights = quadrature(np.union1d(edges, between), _RULE)
        self.cells = np.searchsorted(edges, self.nodes, side="right") - 1
        self._count = edges.size - 1

    def per_cell(self, values: FloatArray) -> FloatArray:
        """The integral over each cell of what has these values at the nodes."""
        return totals(self.cells, values * self._weights, self._count)

    def integral(self, value: Callable[[FloatArray], FloatArray]) -> float:
        """The integral over all."""
        return float(np.sum(value(self.nodes) * self._weights))


def _edges(summand: Summand, x: FloatArray) -> FloatArray:
    first, last = summand.ends
    return np.clip(summand.inverse(x), first, last)


def at_ends(summand: Summand, x: FloatArray) -> FloatArray:
    """Returns the mass at the points x if each cell's goes to its two ends, its mean kept."""
    panels = _Panels(_edges(summand, x))
    share = (summand.value(panels.nodes) - x[:-1][panels.cells]) / np.diff(x)[panels.cells]
    share = np.clip(share, 0.0, 1.0)
    right = panels.per_cell(share)
    left = panels.per_cell(1.0 - share)
    first, last = summand.ends
    mass = np.zeros(x.size)
    mass[:-1] += left
    mass[1:] += right
    # What the ends of t leave out sits there.
    for t, chance in ((first, special.ndtr(first)), (last, special.ndtr(-last))):
        _put(mass, x, float(summand.value(np.array([t]))[0]), float(chance))
    mass *= summand.rate
    for place, chance in summand.atoms:
        _put(mass, x, place, chance)
    return mass


def _put(mass: FloatArray, x: FloatArray, place: float, chance: float) -> None:
    """An atom, split between its neighbours on the grid."""
    i = min(max(int(np.searchsorted(x, place, side="right")) - 1, 0), x.size - 2)
    share = (place - x[i]) / (x[i + 1] - x[i])
    mass[i] += chance * (1.0 - share)
    mass[i + 1] += chance * share


def at_means(summand: Summand, x: FloatArray, scale: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns the mass around each point x, and its moment about x in units of the mesh."""
    borders = 0.5 * (x[:-1] + x[1:])
    first, last = summand.ends
    panels = _Panels(np.concatenate([[first], _edges(summand, borders), [last]]))
    mass = panels.per_cell(np.ones_like(panels.nodes)) * summand.rate
    offset = (summand.value(panels.nodes) - x[panels.cells]) / scale[panels.cells]
    moment = panels.per_cell(offset) * summand.rate
    for place, chance in summand.atoms:
        i = int(np.searchsorted(borders, place))
        mass[i] += chance
        moment[i] += chance * (place - x[i]) / scale[i]
    return mass, moment
