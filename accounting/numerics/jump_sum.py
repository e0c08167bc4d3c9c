"""`E[(b + S)_+]` for a sum S of many random jumps, from above.

A jump is `X = x(t)`, t ~ N(0, 1), with x increasing. S has a Poisson number of jumps, or n
independent terms each of which is a jump, a step down of fixed length, or nothing. Its cumulant
function K is known up to one integral, `J(θ) = E[e^{θX} - 1]`, so on any line Re θ = c > 0

    E[(b + S)_+] = (1/2π) ∫ e^{θb + K(θ)} / θ² dω,      θ = c + iω.

The trapezoidal rule of step 2π/P gives this *plus* `Σ_{k≠0} e^{-ckP} E[(b + S + kP)_+]` by
Poisson's summation formula: what it errs is positive, and small if c is near the saddle point and
P spans the tilted law. What makes the result a bound:

- A jump above a cap counts as the cap, and the mean of what is cut off is added. Little is lost,
  because the cap lies where a single jump makes the sum positive but for rare cases, or so high
  that what is cut off adds less than `_BEYOND`.
- Frequencies beyond a cut are left out only where `|e^{K(θ) - K(c)}|` is certainly small
  (`_Law.remainders`), and the bound of them is added.
- Where S is too rough for that (a handful of jumps, or jumps of nearly one size) a Gaussian is
  added to S, which raises the expectation of a convex function.
- With few jumps expected, the cases of none and (Poisson) of one are taken out of the integral.

Integrals over t by Gauss and Legendre are taken to be exact but for rounding (`_Law.rounding`): an
error model, which the tests check against an independent way (`numerics.graded_law`).
"""

import math
from typing import Any, NamedTuple

import numpy as np

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.capped_jump import FAINT, FARTHEST, REACH, RULE, CappedJump, Jumps
from shufl.accounting.numerics.gaussian_divergence import ROOT_TAU, panels, quadrature
from shufl.accounting.numerics.jump_counts import ComplexArray, Count, PoissonCount, Tilt

_BELOW_SADDLE = 0.6
_ALIAS = 20.0
_LADDER = np.geomspace(0.3, 1e5, 120)  # of highest frequencies, in units of c
# The sum goes on to 25 c (`_EASY`), or farther until what is left out is below the second of
# `_LEFT_OUT` (relative, about); but never beyond 183 c (`_LAST`), nor beyond where it is below the
# first. If it is still above `_LITTLE` of the sum and above `_TINY`, the sum goes on to there.
_LAST, _EASY = 60, 41
_LEFT_OUT = 1e-10, 1e-4
_LITTLE, _TINY = 1e-3, 1e-15
_SMOOTH = 6.5  # the deviation of the Gaussian added, times the highest frequency
_UNIT = 1e-15
_BEYOND = 1e-3  # of a bound: if jumps above the cap add more, the cap is put higher
_NOTHING = 1e-30  # for each jump: below it Chernoff's bound is good enough
_ROWS = 32
_AT_ONCE = 5  # c tried at once in the search of the saddle point


def positive_part(jumps: Jumps, count: Count) -> float:
    """Returns an upper bound of `E[(b + S)_+]`.

    X is `jumps`; `count` says how many, and what else is in b + S, whose mean should not be far
    above 0.
    """
    return float(positive_parts(jumps, count, np.zeros(1))[0])


def positive_parts(jumps: Jumps, count: Count, shifts: FloatArray) -> FloatArray:
    """Returns upper bounds of `E[(y + b + S)_+]` for several y at once.

    X is `jumps`, and `count` as for `positive_part`, but not Poisson unless y = 0. y is `shifts`,
    of shape (K,); the bounds are good where it is small beside the spread of S.
    """
    law = _Law(jumps, count)
    bounds, beyond = _bounds(law, count, shifts)
    if law.jump.at_end and np.any(beyond > _BEYOND * bounds):
        return np.minimum(bounds, _bounds(_Law(jumps, count, FARTHEST), count, shifts)[0])
    return bounds


def _bounds(law: "_Law", count: Count, shifts: FloatArray) -> tuple[FloatArray, float]:
    """Returns the upper bounds of `positive_parts`, and what jumps above the cap add to each."""
    beyond, line = count.jumps * law.jump.excess, _line(law, count)
    if line is None:
        return law.chernoff(shifts) + beyond, beyond
    y = np.append(shifts, 0.0)
    found = np.exp(np.minimum(line.level + line.c * y, 500.0))
    found = found * np.maximum(line.read(y) + line.slack, 0.0)
    if line.few_out:
        nothing = math.exp(float(np.real(count.log_nothing(0.0))))
        found = found + law.one_jump() + nothing * np.maximum(y, 0.0)
    # (y + s)_+ <= y_+ + s_+, for y so large that the line is none for it.
    limit = found[-1] + np.maximum(shifts, 0.0)
    return np.asarray(np.minimum(found[:-1], limit) + beyond), beyond


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
        # e^{iyω} at equidistant ω from 0, by multiplication; `rounding` has room for it.
        turned = np.ones((shifts.size, self.omega.size), dtype=np.complex128)
        known = 1
        while known < self.omega.size:
            new = turned[:, known : 2 * known]
            turn = np.exp(1j * self.omega[known] * shifts)[:, None]
            np.multiply(turned[:, : new.shape[1]], turn, out=new)
            known *= 2
        summed = np.einsum("ij,j->i", turned, self.values).real
        return np.asarray(2.0 / self.period * summed)


def _line(law: "_Law", count: Count) -> _Line | None:
    """Returns the integrand; None if by Chernoff's bound the expectation is next to nothing."""
    if law.jump.cap <= 0.0:
        return None
    c = _BELOW_SADDLE * law.saddle()
    law.jump.refine(c)
    tilt = law.tilt(c)
    level, _, variance = count.cumulants(c, tilt)
    if math.exp(min(level, 700.0)) / (math.e * c) < _NOTHING * count.jumps:
        return None
    deviation = math.sqrt(variance)
    out = math.exp(min(float(np.real(count.log_nothing(c))) - level, 0.0))
    out = out if out > math.exp(FAINT) else 0.0

    ladder = _LADDER * c
    rests = law.remainders(c, tilt, ladder, out)
    goal = 1.0 / (c * max(c * deviation, 1.0))
    strict, loose = (int(np.argmax(np.append(rests, 0.0) <= each * goal)) for each in _LEFT_OUT)
    period = law.period(c, level, goal)
    step = 2.0 * math.pi / period
    farthest, faint = min(strict, _LAST), math.exp(-min(level, 700.0))
    for place in sorted({min(farthest, max(loose, _EASY)), farthest}):
        cut, rest, smooth = float(ladder[place]), float(rests[place]), 0.0
        if loose > place:
            smooth = _SMOOTH / cut
            rest = min(rest, 4.0 * math.exp(-0.5 * _SMOOTH**2) / cut)
        omega = step * np.arange(math.ceil(cut / step) + 1.0)
        theta, grown = c + 1j * omega, law.grown(c, omega)
        values = np.exp(count.log_ratios(c, tilt, omega, grown))
        if out:
            values -= count.few(tilt.whole + grown, np.exp(count.log_nothing(theta) - level))
        values *= np.exp(0.5 * (smooth * theta) ** 2) / theta**2
        values[0] *= 0.5
        if rest <= max(_LITTLE * 2.0 / period * abs(float(np.sum(values.real))), _TINY * faint):
            break
    absolute = 2.0 / period * float(np.sum(np.abs(values)))
    slack = law.rounding(c, omega) * absolute + rest / math.pi
    return _Line(c, level, omega, values, slack, period, out > 0.0)


def _dots(rows: Any, weights: Any) -> Any:
    """The sum of each row (last axis) times the weights.

    One product of two vectors after the other: where cores are busy, the threads that a BLAS starts
    for a matrix make it a hundred times slower.
    """
    return np.matmul(rows[..., None, :], weights[:, None])[..., 0, 0]


class _Law:
    """b + S with its jumps capped."""

    def __init__(self, jumps: Jumps, count: Count, reach: float = REACH) -> None:
        self.jump, self._count = CappedJump(jumps, count, reach), count

    def tilt(self, c: Any, x: FloatArray | None = None) -> Tilt:
        """One jump at each c of either sign; with others for the jumps if given."""
        jumps = self.jump.x if x is None else x
        first = self.jump.weights * jumps
        grown = np.expm1(np.multiply.outer(c, jumps))
        growth = grown @ self.jump.weights  # so few numbers that no BLAS starts threads
        grown += 1.0
        moments = grown @ np.stack([self.jump.weights, first, first * jumps]).T
        return Tilt(growth, moments[..., 0], moments[..., 1], moments[..., 2])

    def cumulants(self, c: Any) -> tuple[Any, Any, Any]:
        """`log E[e^{c(b + S)}]` and its first two derivatives at each c > 0."""
        return self._count.cumulants(c, self.tilt(c))

    def saddle(self) -> float:
        """The minimum of `log E[e^{c(b + S)}] - 2 log c` in c > 0, about."""
        low, ratio = 1e-9 / self.jump.cap, 6e11
        while ratio > 1.02:
            ratio **= 1.0 / (_AT_ONCE + 1)
            tried = low * ratio ** np.arange(1.0, _AT_ONCE + 1.0)
            below = self.cumulants(tried)[1] * tried <= 2.0
            low *= ratio ** int(np.argmin(np.append(below, False)))
        return low

    def grown(self, c: float, omega: FloatArray) -> ComplexArray:
        """J(c + iω) - J(c) at equidistant ω from 0."""
        x, tilted = self.jump.fine(c, float(omega[-1]))
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

    def remainders(self, c: float, tilt: Tilt, ladder: FloatArray, out: float) -> FloatArray:
        """Upper bounds of `∫_Ω^∞ |integrand| dω` for increasing Ω, in units of `e^{cb + K(c)}`."""
        count, tilted = self._count, self.jump.tilted(c)
        # |∫ e^{iωx} p(x) dx| <= (total variation of p)/ω; a tenth for reading it at nodes.
        slope = self.jump.jumps.slope(self.jump.t)
        moving = slope > 0.0
        density = (
            np.exp(c * self.jump.x[:-1] - 0.5 * self.jump.t**2)[moving] / ROOT_TAU / slope[moving]
        )
        variation = 1.1 * float(np.sum(np.abs(np.diff(density))) + density[0] + density[-1])
        smooth, mass = variation / ladder, float(np.sum(tilted[:-1][moving]))
        decay = np.append(count.decay(c, tilt, self.jump.x, tilted, ladder), 0.0)
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
        tilted, turns = self.jump.tilted(c), np.minimum(omega[-1] * np.abs(self.jump.x), 2.0)
        if omega.size > _ROWS:
            turns = np.full(turns.size, 2.0)
        summed = np.abs(np.expm1(c * self.jump.x)) * self.jump.weights + tilted * turns
        phase = abs(self._count.fixed) * float(omega[-1])
        return _UNIT * (100.0 + phase + 4.0 * self._count.jumps * float(np.sum(summed)))

    def chernoff(self, shifts: FloatArray) -> FloatArray:
        """Upper bounds of `E[(y + b + S)_+]` with capped jumps: `x_+ <= e^{cx}/(ec)`."""
        above: FloatArray = np.maximum(shifts, 0.0)
        if self.jump.cap <= 0.0:
            return above
        c = self.saddle()
        level = self.cumulants(c)[0] - math.log(math.e * c)
        direct: FloatArray = np.exp(np.minimum(level + c * shifts, 500.0))
        return np.minimum(direct, math.exp(min(level, 500.0)) + above)

    def one_jump(self) -> float:
        """`E[(b + S)_+; one jump]` of a Poisson number of capped jumps, which `few` takes out."""
        strike, (low, high) = -self._count.fixed, self.jump.ends
        if self.jump.cap <= strike or not isinstance(self._count, PoissonCount):
            return 0.0
        end = high
        while end - low > 1e-9:
            middle = 0.5 * (low + end)
            below = float(self.jump.jumps.value(np.array(middle))) < strike
            low, end = (middle, end) if below else (low, middle)
        t, weights = quadrature(panels(low, high, self.jump.widest), RULE)
        value = float(np.sum(weights * np.maximum(self.jump.jumps.value(t) - strike, 0.0)))
        value += float(self.jump.weights[-1]) * (self.jump.cap - strike)
        return self._count.jumps * math.exp(-self._count.jumps) * value

    def period(self, c: float, level: float, goal: float) -> float:
        """P for which the trapezoidal rule adds little."""
        least = (_ALIAS - min(level, 0.0)) / c
        others = self._steeper(c)
        exponents = self.cumulants(others)[0] - level - np.log(math.e * others * goal * 1e-7)
        return max(least, float(np.min(exponents / (others - c), initial=math.inf)))

    def _steeper(self, c: float) -> FloatArray:
        """Some more c to compare with."""
        others = c * np.array([1.1, 1.2, 1.35, 1.6, 2.0, 3.0])
        return others[others * self.jump.cap < 600.0]
