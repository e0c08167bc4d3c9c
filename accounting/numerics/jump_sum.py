"""`E[(b + S)_+]` for a sum S of many random jumps, from above and from below.

A jump is `X = x(t)`, t ~ N(0, 1), with x increasing. S has a Poisson number of jumps, or n
independent terms each of which is a jump, a step down of fixed length, or nothing. Its cumulant
function K is known up to one integral, `J(θ) = E[e^{θX} - 1]`, so on any line Re θ = c > 0

    E[(b + S)_+] = (1/2π) ∫ e^{θb + K(θ)} / θ² dω,      θ = c + iω.

The trapezoidal rule of step 2π/P gives this *plus* `Σ_{k≠0} e^{-ckP} E[(b + S + kP)_+]` by
Poisson's summation formula: what it errs is positive, and small if c is near the saddle point and
P spans the tilted law. What makes the result a bound:

- A jump above a cap counts as the cap, and the mean of what is cut off is added. Little is lost,
  because the cap lies where a single jump makes the sum positive but for rare cases.
- Frequencies beyond a cut are left out only where `|e^{K(θ) - K(c)}|` is certainly small
  (`_Law.remainders`), and the bound of them is added.
- Where S is too rough for that (a handful of jumps, or jumps of nearly one size) a Gaussian is
  added to S, which raises the expectation of a convex function. A lower bound does without and
  loses the remainder.
- With few jumps expected, the cases of none and (Poisson) of one are taken out of the integral.

Integrals over t by Gauss and Legendre are taken to be exact but for rounding (`_Law.rounding`): an
error model, which the tests check against an independent way (`accounting.numerics.graded_law`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

from accounting.numerics.jump_counts import ComplexArray, Count, PoissonCount, Tilt
from accounting.numerics.loss_pmf import FloatArray

_RULE = np.polynomial.legendre.leggauss(10)
# A panel of t: its width in standard deviations, and over the scale 1/w of e^{wt}; and how far
# e^{θx} may turn or grow from end to end. 10 nodes integrate that to 1e-14.
_WIDEST, _STEEPEST = 0.7, 1.4
_PHASE = 5.0
# Where e^{θx} turns fast: 32 nodes for panels that are three times as wide and turn by so much, to
# 1e-15.
_FINE_RULE = np.polynomial.legendre.leggauss(32)
_FINE_PHASE, _FINE_WIDTH = 40.0, 3.0
_REACH = 10.5  # t beyond which fewer than 1e-25 of the jumps are
_FAINT = -36.0  # exponent below which a part of the sum is a rounding error
_DEVIATIONS = 5.0  # how far the rest of the sum may be below zero for a jump of the cap to lift it
_BELOW_SADDLE = 0.6
_ALIAS = 20.0
_LADDER = np.geomspace(0.3, 1e5, 120)  # of highest frequencies, in units of c
# The last that is taken, 86 c; up to 25 c what is left out is to be the first of these (relative,
# about), from there on the second.
_LAST, _EASY = 53, 41
_LEFT_OUT = 1e-10, 1e-4
_SMOOTH = 6.5  # the deviation of the Gaussian added, times the highest frequency
_UNIT = 1e-15
_NOTHING = 1e-30  # for each jump: where Chernoff's bound serves
_ROWS = 32
_AT_ONCE = 5  # c tried at once in the search of the saddle point
_GRID = 800  # points of t to search and to measure panels by
_ROOT_TAU = math.sqrt(2.0 * math.pi)


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


def positive_part(jumps: Jumps, count: Count, lower: bool = False) -> float:
    """Returns an upper bound of `E[(b + S)_+]`, or a lower one.

    Args:
        jumps: X.
        count: How many, and what else is in b + S; its mean should not be far above 0.
        lower: Whether to bound from below.
    """
    if not lower:
        return float(positive_parts(jumps, count, np.zeros(1))[0])
    law = _Law(jumps, count)
    line = _line(law, count, lower=True)
    if line is None:
        return 0.0
    found = line.read(np.zeros(1))[0] - line.slack - law.aliases(line.c, line.level, line.period)
    alone = law.one_jump() if line.few_out else 0.0
    return max(math.exp(line.level) * float(found), 0.0) + alone + law.sure_excess()


def positive_parts(jumps: Jumps, count: Count, shifts: FloatArray) -> FloatArray:
    """Returns upper bounds of `E[(y + b + S)_+]` for several y at once.

    Args:
        jumps: X.
        count: As for `positive_part`; not Poisson unless y = 0.
        shifts: y, where the bounds are good if it is small beside the spread of S, shape (K,).
    """
    law = _Law(jumps, count)
    beyond, line = count.jumps * law.excess, _line(law, count, lower=False)
    if line is None:
        return law.chernoff(shifts) + beyond
    y = np.append(shifts, 0.0)
    found = np.exp(np.minimum(line.level + line.c * y, 500.0))
    found = found * np.maximum(line.read(y) + line.slack, 0.0)
    if line.few_out:
        nothing = math.exp(float(np.real(count.log_nothing(0.0))))
        found = found + law.one_jump() + nothing * np.maximum(y, 0.0)
    # (y + s)_+ <= y_+ + s_+, for y so large that the line is none for it.
    limit = found[-1] + np.maximum(shifts, 0.0)
    return np.asarray(np.minimum(found[:-1], limit) + beyond)


class _Line(NamedTuple):
    """The integrand on Re θ = c, in units of e^level, and what the sum over it may lack."""

    c: float
    level: float
    omega: FloatArray
    values: ComplexArray
    slack: float
    period: float
    few_out: bool

    def read(self, shifts: FloatArray) -> FloatArray:
        """The trapezoidal sum for each y, in units of `e^{level + cy}`."""
        turned = np.exp(1j * np.multiply.outer(shifts, self.omega))
        summed = np.einsum("ij,j->i", turned, self.values).real
        return np.asarray(2.0 / self.period * summed)


def _line(law: "_Law", count: Count, lower: bool) -> _Line | None:
    """Returns None where Chernoff's bound says that there is next to nothing."""
    if law.cap <= 0.0:
        return None
    c = _BELOW_SADDLE * law.saddle()
    law.refine(c)
    tilt = law.tilt(c)
    level, _, variance = count.cumulants(c, tilt)
    if math.exp(min(level, 700.0)) / (math.e * c) < _NOTHING * count.jumps:
        return None
    deviation = math.sqrt(variance)
    out = math.exp(min(float(np.real(count.log_nothing(c))) - level, 0.0))
    out = out if out > math.exp(_FAINT) else 0.0

    ladder = _LADDER * c
    rests = law.remainders(c, tilt, ladder, out)
    goal = 1.0 / (c * max(c * deviation, 1.0))
    strict, loose = (int(np.argmax(np.append(rests, 0.0) <= each * goal)) for each in _LEFT_OUT)
    place = min(strict, max(loose, _EASY), _LAST)
    cut, rest, smooth = float(ladder[place]), float(rests[place]), 0.0
    if loose > place and not lower:
        smooth, rest = _SMOOTH / cut, 4.0 * math.exp(-0.5 * _SMOOTH**2) / cut

    period = law.period(c, level, goal)
    step = 2.0 * math.pi / period
    omega = step * np.arange(math.ceil(cut / step) + 1.0)
    theta, grown = c + 1j * omega, law.grown(c, omega)
    values = np.exp(count.log_ratios(c, tilt, omega, grown))
    if out:
        values -= count.few(tilt.whole + grown, np.exp(count.log_nothing(theta) - level))
    values *= np.exp(0.5 * (smooth * theta) ** 2) / theta**2
    values[0] *= 0.5
    absolute = 2.0 / period * float(np.sum(np.abs(values)))
    slack = law.rounding(c, omega) * absolute + rest / math.pi
    return _Line(c, level, omega, values, slack, period, out > 0.0)


def _quadrature(
    edges: FloatArray, rule: tuple[FloatArray, FloatArray] = _RULE
) -> tuple[FloatArray, FloatArray]:
    """Nodes t and their weights under the normal density, between increasing edges."""
    half = 0.5 * np.diff(edges)
    t = ((edges[:-1] + half)[:, None] + half[:, None] * rule[0]).ravel()
    weights = (half[:, None] * rule[1]).ravel()
    return t, weights * np.exp(-0.5 * t * t) / _ROOT_TAU


def _dots(rows: Any, weights: Any) -> Any:
    """The sum of each row (last axis) times the weights.

    One product of two vectors after the other: where cores are busy, the threads that a BLAS starts
    for a matrix make it a hundred times slower.
    """
    return np.matmul(rows[..., None, :], weights[:, None])[..., 0, 0]


def _panels(low: float, high: float, widest: float) -> FloatArray:
    return np.linspace(low, high, max(math.ceil((high - low) / widest), 1) + 1)


class _Law:
    """b + S with its jumps capped."""

    def __init__(self, jumps: Jumps, count: Count) -> None:
        self._jumps, self._count = jumps, count
        self._widest = min(_WIDEST, _STEEPEST / jumps.reach)
        reach = _REACH + jumps.reach
        t = np.linspace(-reach, reach, _GRID)
        x = jumps.value(t)
        last = self._highest(t, x)
        self._grid, self._values = t[: last + 1], x[: last + 1]
        self._slopes = jumps.slope(self._grid)
        low, high = -reach, float(t[last])
        self._ends = low, high
        self.cap = float(x[last])
        t, weights = _quadrature(_panels(high, high + reach, self._widest))
        self.excess = float(np.sum(weights * (jumps.value(t) - self.cap)))
        self._rest = float(special.ndtr(-high))
        self._take(_panels(low, high, self._widest))

    def _take(self, edges: FloatArray) -> None:
        """Takes nodes between these edges; the last of all is the cap."""
        self._t, weights = _quadrature(self._with_flat(edges))
        self._weights = np.append(weights, self._rest)
        self._x = np.append(self._jumps.value(self._t), self.cap)

    def _highest(self, t: FloatArray, x: FloatArray) -> int:
        """Place of the cap: as far above zero as the rest of the sum is ever likely to be below."""
        count = self._count
        weights = count.jumps * np.exp(-0.5 * t * t) / _ROOT_TAU * (t[1] - t[0])
        fall = -(count.fixed + count.jumps * self._jumps.mean)
        sizes = np.abs(x)
        order = np.argsort(sizes)
        size, weight = sizes[order], weights[order]
        beyond = np.append(np.cumsum(weight[:0:-1])[::-1], 0.0)
        spread = np.empty_like(x)
        spread[order] = np.sqrt(np.cumsum(size * size * weight) + size * size * beyond)
        short = np.flatnonzero(x < fall + _DEVIATIONS * spread)
        return min(int(short[-1]) + 1, x.size - 1) if short.size else 0

    def _tilted(self, c: float) -> FloatArray:
        result: FloatArray = self._weights * np.exp(c * self._x)
        return result

    def tilt(self, c: Any, x: FloatArray | None = None) -> Tilt:
        """One jump at each c of either sign; with others for the jumps if given."""
        jumps = self._x if x is None else x
        first = self._weights * jumps
        grown = np.expm1(np.multiply.outer(c, jumps))
        growth = grown @ self._weights  # so few numbers that no BLAS starts threads
        grown += 1.0
        moments = grown @ np.stack([self._weights, first, first * jumps]).T
        return Tilt(growth, moments[..., 0], moments[..., 1], moments[..., 2])

    def cumulants(self, c: Any) -> tuple[Any, Any, Any]:
        """`log E[e^{c(b + S)}]` and its first two derivatives at each c > 0."""
        return self._count.cumulants(c, self.tilt(c))

    def saddle(self) -> float:
        """The minimum of `log E[e^{c(b + S)}] - 2 log c` in c > 0, about."""
        low, ratio = 1e-9 / self.cap, 6e11
        while ratio > 1.02:
            ratio **= 1.0 / (_AT_ONCE + 1)
            tried = low * ratio ** np.arange(1.0, _AT_ONCE + 1.0)
            below = self.cumulants(tried)[1] * tried <= 2.0
            low *= ratio ** int(np.argmin(np.append(below, False)))
        return low

    def grown(self, c: float, omega: FloatArray) -> ComplexArray:
        """J(c + iω) - J(c) at equidistant ω from 0."""
        x, tilted = self._fine(c, float(omega[-1]))
        if omega.size <= _ROWS:
            # e^{iu} - 1 = 2 sin(u/2) (-sin(u/2) + i cos(u/2)).
            half = np.multiply.outer(0.5 * omega, x)
            sines = np.sin(half)
            weighed = 2.0 * sines * tilted
            real = -np.einsum("ij,ij->i", sines, weighed)
            return np.asarray(real + 1j * np.einsum("ij,ij->i", np.cos(half), weighed))
        # Where there are many frequencies, by multiplication: `rounding` knows.
        turns = np.empty((_ROWS, x.size), dtype=np.complex128)
        turns[0], known = 1.0, 1
        while known < _ROWS:
            turn = np.exp(1j * omega[known] * x)
            np.multiply(turns[:known], turn, out=turns[known : 2 * known])
            known *= 2
        block, weights = np.exp(1j * omega[_ROWS] * x), tilted.astype(np.complex128)
        parts = []
        for _ in range(0, omega.size, _ROWS):
            parts.append(_dots(turns, weights) - np.sum(tilted))
            weights = weights * block
        return np.asarray(np.concatenate(parts)[: omega.size])

    def _fine(self, c: float, highest: float) -> tuple[FloatArray, FloatArray]:
        """Jumps at nodes fit for all frequencies up to `highest`, and their tilted weights."""
        density, widest = math.hypot(c, highest) / _FINE_PHASE, _FINE_WIDTH * self._widest
        edges = self._with_flat(self._edges(c, density, widest))
        fine, weights = _quadrature(edges, _FINE_RULE)
        x = np.append(self._jumps.value(fine), self.cap)
        return x, np.append(weights, self._rest) * np.exp(c * x)

    def refine(self, c: float) -> None:
        """Takes nodes fit for e^{3cx}, the most that is asked for once c is known."""
        self._take(self._edges(c, 3.0 * c / _PHASE, self._widest))

    def _edges(self, c: float, density: float, widest: float) -> FloatArray:
        """Edges of panels, so many for each unit of x, where e^{cx} counts."""
        t = self._grid
        weight = c * self._values - 0.5 * t * t + math.log(max(self._count.jumps, 1.0))
        slope = np.where(weight > _FAINT, self._slopes, 0.0)
        each = np.maximum(1.0 / widest, density * slope)
        panels = np.append(0.0, np.cumsum(0.5 * (each[1:] + each[:-1])) * (t[1] - t[0]))
        edges = np.interp(np.linspace(0.0, panels[-1], math.ceil(panels[-1]) + 1), panels, t)
        return np.asarray(edges)

    def _with_flat(self, edges: FloatArray) -> FloatArray:
        """The edges, and where X is not smooth."""
        bends = [t for t in self._jumps.flat if edges[0] < t < edges[-1]]
        return np.unique(np.append(edges, bends))

    def remainders(self, c: float, tilt: Tilt, ladder: FloatArray, out: float) -> FloatArray:
        """Upper bounds of `∫_Ω^∞ |integrand| dω` for increasing Ω, in units of `e^{cb + K(c)}`."""
        count, tilted = self._count, self._tilted(c)
        # |∫ e^{iωx} p(x) dx| <= (total variation of p)/ω; a tenth for reading it at nodes.
        slope = self._jumps.slope(self._t)
        moving = slope > 0.0
        density = np.exp(c * self._x[:-1] - 0.5 * self._t**2)[moving] / _ROOT_TAU / slope[moving]
        variation = 1.1 * float(np.sum(np.abs(np.diff(density))) + density[0] + density[-1])
        smooth, mass = variation / ladder, float(np.sum(tilted[:-1][moving]))
        decay = np.append(count.decay(c, tilt, self._x, tilted, ladder), 0.0)
        # There windows are narrower than the nodes lie, and a moment may be read too large.
        decay[_EASY:] *= 0.25
        bound = np.exp(-np.maximum(decay, count.roughness(c, tilt, smooth, mass)))
        if out:
            jump = np.minimum(smooth, mass) + float(np.sum(tilted)) - mass
            bound = np.minimum(bound + out * count.few(jump, 1.0), out * count.many(c, jump))
        bound = np.maximum.accumulate(bound[::-1])[::-1]  # so that its sum is below its integral
        inverse = 1.0 / np.append(ladder, math.inf)
        return np.asarray(np.cumsum((bound * (inverse[:-1] - inverse[1:]))[::-1])[::-1])

    def rounding(self, c: float, omega: FloatArray) -> float:
        """The error of the integrand, relative to it, at most."""
        tilted, turns = self._tilted(c), np.minimum(omega[-1] * np.abs(self._x), 2.0)
        if omega.size > _ROWS:
            turns = np.full(turns.size, 2.0)
        summed = np.abs(np.expm1(c * self._x)) * self._weights + tilted * turns
        phase = abs(self._count.fixed) * float(omega[-1])
        return _UNIT * (100.0 + phase + 4.0 * self._count.jumps * float(np.sum(summed)))

    def chernoff(self, shifts: FloatArray) -> FloatArray:
        """Upper bounds of `E[(y + b + S)_+]` with capped jumps: `x_+ <= e^{cx}/(ec)`."""
        above: FloatArray = np.maximum(shifts, 0.0)
        if self.cap <= 0.0:
            return above
        c = self.saddle()
        level = self.cumulants(c)[0] - math.log(math.e * c)
        direct: FloatArray = np.exp(np.minimum(level + c * shifts, 500.0))
        return np.minimum(direct, math.exp(min(level, 500.0)) + above)

    def one_jump(self) -> float:
        """`E[(b + S)_+; one jump]` of a Poisson number of capped jumps, which `few` takes out."""
        strike, (low, high) = -self._count.fixed, self._ends
        if self.cap <= strike or not isinstance(self._count, PoissonCount):
            return 0.0
        end = high
        while end - low > 1e-9:
            middle = 0.5 * (low + end)
            below = float(self._jumps.value(np.array(middle))) < strike
            low, end = (middle, end) if below else (low, middle)
        t, weights = _quadrature(_panels(low, high, self._widest))
        value = float(np.sum(weights * np.maximum(self._jumps.value(t) - strike, 0.0)))
        value += float(self._weights[-1]) * (self.cap - strike)
        return self._count.jumps * math.exp(-self._count.jumps) * value

    def period(self, c: float, level: float, goal: float) -> float:
        """P for which little is added: see `aliases`."""
        least = (_ALIAS - min(level, 0.0)) / c
        others = self._steeper(c)
        exponents = self.cumulants(others)[0] - level - np.log(math.e * others * goal * 1e-7)
        return max(least, float(np.min(exponents / (others - c), initial=math.inf)))

    def _steeper(self, c: float) -> FloatArray:
        """Some more c to compare with."""
        others = c * np.array([1.1, 1.2, 1.35, 1.6, 2.0, 3.0])
        return others[others * self.cap < 600.0]

    def aliases(self, c: float, level: float, period: float) -> float:
        """What the trapezoidal rule adds at most, in units of `e^level`."""
        most = math.exp(level) / (math.e * c)  # of E[(b + S)_+]
        near = math.exp(-c * period - level) * (period + most) * 1.01
        others = self._steeper(c)
        exponents = self.cumulants(others)[0] - level - (others - c) * period
        ratios = -np.expm1(-(others - c) * period)
        far = np.exp(np.minimum(exponents, 50.0)) / (math.e * others * ratios)
        return near + float(np.min(far, initial=math.inf))

    def sure_excess(self) -> float:
        """What the caps certainly took off: where b + S is positive with one jump at its cap."""
        # It is not if a jump goes down far, or if the others come to less than -cap: Chernoff.
        least = math.inf
        for share in (0.1, 0.2, 0.4, 0.8):
            near = self._x > -share * self.cap
            x = np.where(near, self._x, 0.0)
            far = self._count.jumps * float(np.sum(self._weights[~near]))
            for c in np.geomspace(2.0, 40.0, 12) / self.cap:
                others = 1.0 - 1.0 / self._count.terms  # all but the one with the jump
                shift = c * self._count.shift
                level = self._count.cumulants(-c, self.tilt(-c, x))[0] + shift
                exponent = others * level - shift - c * self.cap
                least = min(least, far + math.exp(min(exponent, 0.0)))
        return self._count.jumps * self.excess * max(1.0 - least, 0.0)
