"""From an upper bound of a privacy profile to a discrete privacy loss that dominates it.

A profile is α ↦ H_α(P‖Q), the hockey-stick divergence, α = e^ε >= 1. It is convex and decreasing in
α, and `H_α(P‖Q) = 1 - α + α H_{1/α}(Q‖P)` continues it to α < 1 by that of the other direction.
Chords of a convex function lie above it, so every step here returns an upper bound of what it was
given.
"""

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from shufl.accounting.numerics import FloatArray

# Rounding in slopes and sums errs by less; every δ is raised by it (relative).
_ROUND_UP = 1e-11
# A profile's δ below it are not told apart, unless the question is about a tiny δ.
USUAL_LEAST = 1e-22
# Beyond a loss this large α overflows; δ stays constant from there on.
MAX_LOSS = 700.0
# A smaller δ is moved to the infinite loss as a whole.
_NEGLIGIBLE = 1e-110
# Chords of length h add h²/6 to the variance of one loss: 1/48 costs 4e-5 of ε.
_POINTS_PER_DEVIATION = 48.0
_MAX_POINTS = 2**18


@dataclasses.dataclass(frozen=True, eq=False)
class LossPmf:
    """The privacy loss of a pair on a grid.

    Attributes:
        interval: h, the grid's mesh.
        probs: P[loss = jh] for j = -J..J, shape (2J + 1,).
        infinity: P[loss = ∞].
    """

    interval: float
    probs: FloatArray
    infinity: float

    @property
    def half_width(self) -> int:
        """J, the largest loss in units of the mesh."""
        return self.probs.size // 2

    @property
    def losses(self) -> FloatArray:
        """The grid's points jh, shape (2J + 1,)."""
        return np.arange(-self.half_width, self.half_width + 1.0) * self.interval


@dataclasses.dataclass(frozen=True, eq=False)
class Profile:
    """A convex, decreasing upper bound of a pair's hockey-stick divergence, in one direction.

    Linear in α between its points, constant after the last.

    Attributes:
        epsilons: Increasing, from 0, shape (K,).
        deltas: δ at them, decreasing, in [0, 1], shape (K,).
        other: That of the other direction, with the same δ at 0; None: the same.
    """

    epsilons: FloatArray
    deltas: FloatArray
    other: "Profile | None" = None

    @classmethod
    def enveloping(cls, epsilons: npt.ArrayLike, deltas: npt.ArrayLike) -> "Profile":
        """Returns the lower convex hull of points, raised by 1e-11 (relative).

        The divergence is convex, so it lies below every chord between points above it; the hull
        is made of such chords. At α = 1 both directions are equal, and at most
        `(δ + δ' + e^ε - 1)/(e^ε + 1)` for each ε, where one has δ and the other δ': the chord of
        the one to the other's continuation to α < 1.

        Args:
            epsilons: They increase from 0, shape (K,). Those above 700 are dropped.
            deltas: Upper bounds of the divergence in both directions, shape (K,); or of each, shape
                (2, K). They need be neither monotone nor convex; what exceeds 1 counts as 1.

        Raises:
            ValueError: Not of this form, as where a δ is not a number.
        """
        eps = np.asarray(epsilons, dtype=np.float64)
        values = np.asarray(deltas, dtype=np.float64)
        increasing = eps.size and eps[0] == 0.0 and np.all(np.diff(eps) > 0.0)
        fits = values.shape in {eps.shape, (2, *eps.shape)}
        if not (increasing and fits and np.all(values >= 0.0)):
            raise ValueError("a profile needs epsilons that increase from 0 and as many deltas")
        kept = eps <= MAX_LOSS
        eps, excess = eps[kept], np.expm1(eps[kept])
        rows = np.minimum(np.atleast_2d(values)[:, kept] * (1.0 + _ROUND_UP), 1.0)
        rows = np.minimum.accumulate(rows, axis=1)
        first = np.min((np.mean(rows, axis=0) + 0.5 * excess) / (1.0 + 0.5 * excess))
        rows[:, 0] = min(float(first), float(np.min(rows[:, 0])))
        rows = np.minimum.accumulate(rows, axis=1)
        hulls = [lower_hull(excess, row) for row in rows]
        each = [cls(eps[hull], row[hull]) for hull, row in zip(hulls, rows, strict=True)]
        return each[0] if len(each) == 1 else dataclasses.replace(each[0], other=each[1])

    @property
    def most(self) -> float:
        """The largest loss there can be, in either direction."""
        each = (self, self.other or self)
        return max(float(p.epsilons[-1]) if p.deltas[-1] == 0.0 else math.inf for p in each)

    @property
    def swapped(self) -> "Profile":
        """That of the other direction."""
        if self.other is None:
            return self
        return dataclasses.replace(self.other, other=dataclasses.replace(self, other=None))

    @property
    def is_trivial(self) -> bool:
        """Whether nothing is lost at all."""
        return bool(self.deltas[0] == 0.0)

    def delta_at(self, epsilons: npt.ArrayLike) -> FloatArray:
        """Returns δ by linear interpolation in α; the last value beyond the last point."""
        return np.interp(
            np.expm1(np.minimum(epsilons, MAX_LOSS)), np.expm1(self.epsilons), self.deltas
        )

    def spread(self) -> float:
        """Returns the standard deviation of one loss, its largest thousandth capped.

        The cap keeps a rare large loss from coarsening the mesh of all others.
        """
        other = self.other or self
        upper, lower = (_masses(each.epsilons, each.deltas) for each in (self, other))
        losses = np.concatenate([self.epsilons[1:], -other.epsilons[1:]])
        masses = np.concatenate([upper, lower * np.exp(-other.epsilons[1:])])
        order = np.argsort(np.abs(losses))
        above = np.cumsum(masses[order][::-1])[::-1]
        beyond = np.flatnonzero(above > 1e-3)
        cap = float(np.abs(losses)[order[beyond[-1]]]) if beyond.size else math.inf
        losses = np.clip(losses, -cap, cap)
        mean = float(np.sum(masses * losses))
        return math.sqrt(max(float(np.sum(masses * losses**2)) - mean * mean, 0.0))

    def discretised(self, interval: float, rare: float = 0.0) -> LossPmf:
        """Returns the loss on a grid: δ at its points joined by chords ("connect the dots").

        Doroshenko et al. 2022, Algorithm 1. Below 0 by the other direction: `P[-x] = e^{-x} Q[x]`.

        The mesh is `interval`, doubled until the grid has at most 2¹⁸ points. A δ of `rare` is
        moved to the infinite loss as a whole, as 1e-110 is always.
        """
        other = self.other or self
        top = max(each._top(rare) for each in (self, other))
        while top / interval > _MAX_POINTS:
            interval *= 2.0
        grid: FloatArray = np.arange(max(math.ceil(top / interval), 1) + 1.0) * interval
        deltas = self.delta_at(grid)
        with np.errstate(over="ignore", invalid="ignore"):
            upper = _masses(grid, deltas)
            lower = _masses(grid, other.delta_at(grid)) * np.exp(-grid[1:])
        infinity = float(deltas[-1])
        middle = max(1.0 - infinity - float(np.sum(upper)) - float(np.sum(lower)), 0.0)
        probs = np.concatenate([lower[::-1], [middle], upper])
        if not np.all(np.isfinite(probs)):  # e^loss overflows on so coarse a grid: all is infinite
            return LossPmf(interval, np.zeros_like(probs), 1.0)
        return LossPmf(interval, probs, infinity)

    def _top(self, rare: float) -> float:
        """The ε from which on δ is moved to the infinite loss."""
        cut = int(np.argmax(self.deltas <= max(rare, _NEGLIGIBLE))) or self.deltas.size - 1
        return float(self.epsilons[cut])


def dyadic_interval(spread: float) -> float:
    """Returns the largest power of two at most 1/48 of a loss's standard deviation."""
    if spread <= 0.0:
        return 1.0
    return float(2.0 ** math.floor(math.log2(spread / _POINTS_PER_DEVIATION)))


def _masses(epsilons: FloatArray, deltas: FloatArray) -> FloatArray:
    """P[loss = ε_i], i >= 1: e^{ε_i} times the change of the slope in α there."""
    slopes = np.diff(deltas) / (np.exp(epsilons[:-1]) * np.expm1(np.diff(epsilons)))
    kinks = np.diff(np.append(slopes, 0.0))
    return np.maximum(kinks, 0.0) * np.exp(epsilons[1:])


def lower_hull(x: FloatArray, y: FloatArray) -> npt.NDArray[np.intp]:
    """Returns the indices of the lower convex hull of points with increasing x."""
    xs, ys = x.tolist(), y.tolist()

    def slope(i: int, j: int) -> float:
        return float((ys[j] - ys[i]) / (xs[j] - xs[i]))

    hull: list[int] = []
    for i in range(x.size):
        while len(hull) > 1 and slope(hull[-1], i) <= slope(hull[-2], hull[-1]):
            hull.pop()
        hull.append(i)
    return np.array(hull, dtype=np.intp)
