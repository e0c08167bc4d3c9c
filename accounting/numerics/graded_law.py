"""The law of a sum of n independent copies of a light or heavy-tailed variable, bounded both ways.

What is wanted is `E[(S - a)_+]` and `E[(a - S)_+]` far into the tails: both are expectations of
convex functions, so a variable is replaced by a discrete one that lies above it in convex order
(mass moved to the two ends of its cell, the mean kept) or below it (a cell's mass moved to its
mean). Sums keep that order.

The grid is graded: of one mesh up to a limit on both sides of 0, sixteen times as coarse up to as
many points of those, and so on, so that the cells grow with the distance and a tail over many
orders of magnitude needs few points. Sums are taken by doubling, with direct convolutions: only
positive numbers are added, so each probability has small *relative* error, however small it is.
Whenever the sum has grown enough, the grid is made twice as coarse. There are enough levels to hold
the largest sum.
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.summand import Summand, at_ends, at_means, left_out, totals

GRADE = 16
# Points at the ends are cut off if mass times distance is below `_DUST`, in units of the least δ of
# interest. In 60 sums of at most 10⁵ points that is at most `_ALL_DUST`, for each summand.
_DUST, _ALL_DUST = 1e-38, 1e-32
# Relative, for each summand: a direct sum of N < 8000 positive products errs by less than N 2⁻⁵³,
# and the errors of the two halves of a sum add. (Observed: 1e-16.)
_ROUNDING = 1e-12


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """Mass at `start + j`, j = 0, 1, ..., in units of a level's mesh.

    `moment` is None in an upper law. In a lower one the mass of cell i is at its mean
    `i + moment/mass`.
    """

    start: int
    mass: FloatArray
    moment: FloatArray | None

    @property
    def end(self) -> int:
        return self.start + self.mass.size

    def slice(self, first: int, last: int) -> "_Cells | None":
        """The cells first <= i < last."""
        low, high = max(first - self.start, 0), min(last - self.start, self.mass.size)
        if low >= high:
            return None
        moment = None if self.moment is None else self.moment[low:high]
        return _Cells(self.start + low, self.mass[low:high], moment)

    def trimmed(self, mesh: float, dust: float) -> "_Cells | None":
        """All but dust at the ends."""
        reach = 1.0 + mesh * max(abs(self.start), abs(self.end))
        kept = np.flatnonzero(self.mass >= dust / reach)
        if not kept.size:
            return None
        return self.slice(self.start + int(kept[0]), self.start + int(kept[-1]) + 1)

    def coarser(self, factor: int) -> "_Cells":
        """The same on a mesh `factor` times as wide."""
        if self.moment is not None:
            return self._regrouped(1.0 / factor)
        start = self.start // factor
        below, rest = np.divmod(np.arange(self.start, self.end) - start * factor, factor)
        moved = self.mass * (rest / factor)
        size = int(below[-1]) + 2
        spread = totals(below, self.mass - moved, size) + totals(below + 1, moved, size)
        return _Cells(start, spread, None)

    def finer(self, factor: int) -> "_Cells":
        """The same mass at the same places on a mesh 1/factor as wide."""
        if self.moment is not None:
            return self._regrouped(float(factor))
        mass = np.zeros((self.mass.size - 1) * factor + 1)
        mass[::factor] = self.mass
        return _Cells(self.start * factor, mass, None)

    def _regrouped(self, scale: float) -> "_Cells":
        """A lower law's cells joined where, in units of the other mesh, they are nearest."""
        assert self.moment is not None
        filled = self.mass > 0.0
        if not np.any(filled):
            return _Cells(0, np.zeros(1), np.zeros(1))
        mass = self.mass[filled]
        index = np.flatnonzero(filled) + self.start
        place = (index + self.moment[filled] / mass) * scale
        nearest = np.rint(place).astype(np.int64)
        start = int(np.min(nearest))
        offset = totals(nearest - start, mass * (place - nearest))
        return _Cells(start, totals(nearest - start, mass), offset)


def _plus(a: _Cells | None, b: _Cells | None) -> _Cells | None:
    if a is None or b is None:
        return b if a is None else a
    start, end = min(a.start, b.start), max(a.end, b.end)

    def added(x: FloatArray, y: FloatArray) -> FloatArray:
        total = np.zeros(end - start)
        total[a.start - start : a.end - start] += x
        total[b.start - start : b.end - start] += y
        return total

    moment = None
    if a.moment is not None and b.moment is not None:
        moment = added(a.moment, b.moment)
    return _Cells(start, added(a.mass, b.mass), moment)


def _times(a: _Cells | None, b: _Cells | None) -> _Cells | None:
    """The law of the sum of the two."""
    if a is None or b is None:
        return None
    mass = np.convolve(a.mass, b.mass)
    moment = None
    if a.moment is not None and b.moment is not None:
        moment = np.convolve(a.moment, b.mass)
        moment += moment if a is b else np.convolve(a.mass, b.moment)
    return _Cells(a.start + b.start, mass, moment)


class GradedLaw:
    """A discrete law on a graded grid, above or below another in convex order.

    Attributes:
        lower: Whether it lies below.
        least: Expectations far below it are not of interest.
    """

    def __init__(
        self,
        mesh: float,
        limit: int,
        levels: list[_Cells | None],
        lower: bool,
        least: float,
    ) -> None:
        """Brings cells to the levels they belong to; see `on_grid` and `law_of_sum`."""
        self.mesh, self.lower, self.least = mesh, lower, least
        self._limit = limit
        self._levels = levels
        for level in range(len(levels) - 1, 0, -1):
            levels[level - 1] = _plus(levels[level - 1], self._underflow(level))
        for level in range(len(levels) - 1):
            levels[level + 1] = _plus(levels[level + 1], self._overflow(level))
        for level, cells in enumerate(levels):
            if cells is not None:
                levels[level] = cells.trimmed(mesh * float(GRADE) ** level, _DUST * least)

    @classmethod
    def on_grid(
        cls, summand: Summand, mesh: float, limit: int, levels: int, lower: bool
    ) -> "GradedLaw":
        """Returns the law of one summand on the grid.

        `mesh` is the finest one.

        Args:
            limit: Points on each side of 0 on each level; a multiple of 16.
            levels: How many; `summand.ends` must lie within them.
            lower: Whether the law shall lie below X in convex order, not above.
        """
        index, level = _points(limit, levels)
        scale: FloatArray = mesh * float(GRADE) ** level.astype(np.float64)
        x: FloatArray = index * scale
        bottom, top = summand.span
        # One point beyond each end at least: what is cut off is then what `ends` leaves out.
        kept = slice(max(int(np.searchsorted(x, bottom)) - 1, 0), int(np.searchsorted(x, top)) + 2)
        index, level, scale, x = index[kept], level[kept], scale[kept], x[kept]
        if lower:
            mass, moment = at_means(summand, x, scale)
        else:
            mass, moment = at_ends(summand, x), np.zeros(0)
        cells: list[_Cells | None] = []
        for wanted in range(levels):
            here = np.flatnonzero(level == wanted)
            if not here.size:
                cells.append(None)
                continue
            places = index[here] - index[here[0]]
            offset = totals(places, moment[here]) if lower else None
            cells.append(_Cells(int(index[here[0]]), totals(places, mass[here]), offset))
        return cls(mesh, limit, cells, lower, summand.least)

    def _underflow(self, level: int) -> _Cells | None:
        """Takes out of a level the points that the next finer one reaches and has too."""
        cells, reached = self._levels[level], self._limit // GRADE
        inner = None if cells is None else cells.slice(-reached, reached + 1)
        if cells is None or inner is None:
            return None
        low, high = cells.slice(cells.start, -reached), cells.slice(reached + 1, cells.end)
        # Both keep their places: the gap between them is empty.
        self._levels[level] = _plus(low, high)
        return inner.finer(GRADE)

    def _overflow(self, level: int) -> _Cells | None:
        """Takes out of a level what lies beyond its limit, on the mesh of the next."""
        cells, limit = self._levels[level], self._limit
        if cells is None or (cells.start >= -limit and cells.end <= limit + 1):
            return None
        low, high = cells.slice(cells.start, -limit), cells.slice(limit + 1, cells.end)
        self._levels[level] = cells.slice(-limit, limit + 1)
        return _plus(low.coarser(GRADE) if low else None, high.coarser(GRADE) if high else None)

    def coarsened(self) -> "GradedLaw":
        """Returns this law on a grid of twice the mesh."""
        levels = [None if each is None else each.coarser(2) for each in self._levels]
        return GradedLaw(2.0 * self.mesh, self._limit, levels, self.lower, self.least)

    def plus(self, other: "GradedLaw") -> "GradedLaw":
        """Returns the law of the sum of two independent variables on the same grid."""
        sums: list[_Cells | None] = []
        finer: _Cells | None = None
        finer_other: _Cells | None = None
        for cells, others in zip(self._levels, other._levels, strict=True):
            # Each pair of levels meets once, on the mesh of the coarser one.
            if self is other:
                sums.append(_times(cells, _plus(cells, _plus(finer, finer))))
            else:
                upto = _plus(others, finer_other)
                sums.append(_plus(_times(cells, upto), _times(finer, others)))
            total, total_other = _plus(finer, cells), _plus(finer_other, others)
            finer = None if total is None else total.coarser(GRADE)
            finer_other = None if total_other is None else total_other.coarser(GRADE)
        return GradedLaw(self.mesh, self._limit, sums, self.lower, self.least)

    def atoms(self) -> tuple[FloatArray, FloatArray]:
        """Returns places, increasing, and their masses."""
        places, masses = [], []
        for level, cells in enumerate(self._levels):
            if cells is None:
                continue
            index = np.arange(cells.start, cells.end, dtype=np.float64)
            filled = cells.mass > 0.0
            at = index[filled]
            if cells.moment is not None:
                at = at + cells.moment[filled] / cells.mass[filled]
            places.append(at * (self.mesh * float(GRADE) ** level))
            masses.append(cells.mass[filled])
        x, p = np.concatenate(places), np.concatenate(masses)
        order = np.argsort(x, kind="stable")
        return x[order], p[order]


def law_of_sum(summand: Summand, count: int, points: int, lower: bool = False) -> "BoundedLaw":
    """Returns the law of the sum of `count` independent copies of a summand.

    The grid is finest around 0, so the summand's mean should be about 0. It has about `points` mesh
    points in the scale of the sum, twice as many at most. `lower` bounds expectations of convex
    functions from below, not from above.
    """
    limit = math.ceil(18 * points / GRADE) * GRADE
    mesh = summand.jump / points
    farthest = 2.0 * count * max(abs(end) for end in summand.span)
    levels = 1
    while mesh * float(GRADE) ** (levels - 1) * limit < farthest:
        levels += 1
    law = GradedLaw.on_grid(summand, mesh, limit, levels, lower)
    single, done = law, 1
    for bit in bin(count)[3:]:
        law, done = law.plus(law), 2 * done
        scale = summand.jump * math.sqrt(max(1.0, done * summand.rate))
        while 2.0 * law.mesh * points <= scale:
            law = law.coarsened()
        if bit == "1":
            if single.mesh != law.mesh:
                single = GradedLaw.on_grid(summand, law.mesh, limit, levels, lower)
            law, done = law.plus(single), done + 1
    return BoundedLaw(law, summand, count)


class BoundedLaw:
    """The expectations that a `GradedLaw` bounds, rounding included."""

    def __init__(self, law: GradedLaw, summand: Summand, count: int) -> None:
        """Reads the atoms of the law of `count` summands."""
        self._lower = law.lower
        self._excess, self._deficit = (count * each for each in left_out(summand))
        self.places, self._mass = law.atoms()
        self._from = np.append(np.cumsum(self._mass[::-1])[::-1], 0.0)
        self._upto = np.append(0.0, np.cumsum(self._mass))
        gaps = np.diff(self.places)
        self._calls = np.append(np.cumsum((gaps * self._from[1:-1])[::-1])[::-1], [0.0, 0.0])
        self._puts = np.concatenate([[0.0, 0.0], np.cumsum(gaps * self._upto[1:-1])])
        self._rounding = count * _ROUNDING
        self._dust = count * _ALL_DUST * law.least

    def call(self, thresholds: FloatArray) -> FloatArray:
        """Returns a bound of `E[(S - a)_+]` at each threshold a, from above or (lower) below."""
        after = np.searchsorted(self.places, thresholds, side="right")
        place = np.append(self.places, math.inf)[after]
        step = np.where(np.isfinite(place), place - thresholds, 0.0)
        return self._bound(self._calls[after] + step * self._from[after], self._excess)

    def put(self, thresholds: FloatArray) -> FloatArray:
        """Returns a bound of `E[(a - S)_+]` at each threshold a, from above or (lower) below."""
        before = np.searchsorted(self.places, thresholds, side="left")
        place = np.append(-math.inf, self.places)[before]
        step = np.where(np.isfinite(place), thresholds - place, 0.0)
        return self._bound(self._puts[before] + step * self._upto[before], self._deficit)

    def _bound(self, values: FloatArray, cut: float) -> FloatArray:
        if self._lower:
            return np.maximum(values * (1.0 - self._rounding) - self._dust, 0.0)
        return (values + cut) * (1.0 + self._rounding) + self._dust


def _points(limit: int, levels: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Index and level of all points of the grid, increasing."""
    inner = np.arange(-limit, limit + 1)
    outer = inner[np.abs(inner) > limit // GRADE]
    index = np.concatenate([inner, np.tile(outer, levels - 1)])
    level = np.repeat(np.arange(levels), [inner.size] + [outer.size] * (levels - 1))
    order = np.argsort(index * float(GRADE) ** level)
    return index[order], level[order]
