"""The swap bound: a user's report hides among those of n - 1 others, wherever these are.

`docs/theory/swap.md` proves: with N = n - 1, any c >= 1 and M > c, and η = c/(M - c), a round's
hockey-stick divergence between records x and x' of user 1 is at most

    H_α = (1/M) E[(V_1 + ... + V_N + cU)_+] + α γ m N/(M - c) + π,        m = δ_G(log c; 1/z),
    V = 1 - α with probability 1-γ, else of the law `worst`, its positive values times 1 + η,
    U = 0     with probability 1-γ, else E - αE' + α - 1     (E as in `numerics.worst_pairs`),
    π = exp(-t²/(2 (v + t/3))),   v = Nγ (e^{1/z²} - 1),   t = N (1 - γm) - M > 0,

in any dimension. `worst` is to its right the law of `(f_x - αf_{x'})/f_j` where all others hold one
of the ball's two ends on the line of x, and to its left where they hold the other.
"""

import math

import numpy as np
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.capped_jump import Jumps
from shufl.accounting.numerics.gaussian_divergence import (
    gaussian_epsilon,
    log_gaussian_delta,
    reach_of,
)
from shufl.accounting.numerics.jump_counts import TermsCount
from shufl.accounting.numerics.jump_sum import positive_parts
from shufl.accounting.numerics.worst_pairs import Pair

# The share of the mass moved into δ that goes to π.
_RARE_SHARE = 0.1
_CELL = 0.11  # in standard deviations


class SwapBound:
    """H_α of one round, for all α, at one choice of c and M."""

    def __init__(self, users: int, rate: float, noise_multiplier: float, lost: float) -> None:
        """Fixes c and M.

        n >= 1 users, γ in (0, 1] and z >= 0.2. `lost`, in (0, γ/2], is about what the last two
        terms add to H_1.
        """
        self._others, self._rate, self._width = users - 1, rate, 1.0 / noise_multiplier
        rare = _RARE_SHARE * lost
        missing = min((1.0 - _RARE_SHARE) * lost / rate, 0.5)
        self._cap = math.exp(min(gaussian_epsilon(self._width, missing), 700.0))
        missing = math.exp(float(log_gaussian_delta(self._width, math.log(self._cap))))
        variance = self._others * rate * math.expm1(min(self._width**2, 500.0))
        log_rare = -math.log(rare)
        short = log_rare / 3.0 + math.sqrt(log_rare**2 / 9.0 + 2.0 * variance * log_rare)
        self._crowd = self._others * (1.0 - rate * missing) - short
        self._rare = rare
        room = self._crowd - self._cap
        self._missed = rate * missing * self._others / room if room > 0.0 else math.inf
        self._raised = self._cap / room if room > 0.0 else math.inf

    @property
    def holds(self) -> bool:
        """Whether there are enough other users for the bound."""
        return self._raised < 1.0

    def divergence(self, alpha: float, pair: Pair) -> float:
        """Returns an upper bound of H_α, α >= 1, for one direction of the worst pair."""
        worst = worst_law(pair, self._width, alpha, 1.0 + self._raised)
        count = TermsCount(self._others, self._rate, 1.0 - self._rate, alpha - 1.0)
        places, chances, excess = self._own(alpha, pair)
        found = positive_parts(worst, count, np.append(places, 0.0))
        # The expectation is convex in U: all of U's mass at the ends of its cells is a bound.
        total = float(np.sum(chances * found[:-1])) + (1.0 - self._rate) * float(found[-1])
        return (total + excess) / self._crowd + alpha * self._missed + self._rare

    def _own(self, alpha: float, pair: Pair) -> tuple[FloatArray, FloatArray, float]:
        """Places of cU and their chances, the mean of each cell kept; and what lies beyond them."""
        w = self._width
        # What lies beyond is negligible beside π.
        reach = reach_of(min(1e-3 * self._rare, 1e-17)) + w
        ends = np.linspace(-reach, reach, math.ceil(2.0 * reach / _CELL))
        places = self._cap * (pair.jumps(w, alpha).value(ends) + alpha - 1.0)
        mass = _in_cells(ends, 0.0)
        ratios = _in_cells(ends, pair.first * w) - alpha * _in_cells(ends, pair.second * w)
        means = self._cap * (ratios + (alpha - 1.0) * mass)
        inner, mean = mass[1:-1], means[1:-1]
        width = np.maximum(np.diff(places), 1e-300)  # 0 where U hardly changes any more
        up = np.clip((mean - inner * places[:-1]) / width, 0.0, inner)
        chances = np.append(inner - up, 0.0) + np.append(0.0, up)
        chances[0] += mass[0]
        chances[-1] += mass[-1]
        excess = max(float(means[-1] - mass[-1] * places[-1]), 0.0)
        return places, self._rate * chances, self._rate * excess


def _in_cells(ends: FloatArray, shift: float) -> FloatArray:
    """`E[e^{st - s²/2}; t in the cell]`, t ~ N(0, 1), for the cells between and beyond the ends."""
    x = np.concatenate([[-np.inf], ends - shift, [np.inf]])
    right = special.ndtr(-x[:-1]) - special.ndtr(-x[1:])
    left = special.ndtr(x[1:]) - special.ndtr(x[:-1])
    return np.asarray(np.where(x[:-1] > 0.0, right, left))


def worst_law(pair: Pair, width: float, alpha: float, raised: float) -> Jumps:
    """Returns `worst` as a function of t ~ N(0, 1), its positive values times `raised`; w = 1/z.

    It is V above zero with the others at the one end, V below zero with them at the other, and zero
    between.
    """
    distance = (pair.first - pair.second) * width
    right, left = pair.seen_from(-1.0), pair.seen_from(1.0)
    # E_m = αE_k at t = log α / ((m - k) w) + (m + k) w/2.
    above, below = (
        math.log(alpha) / distance + 0.5 * width * (each.first + each.second)
        for each in (right, left)
    )
    rising, falling = right.jumps(width, alpha), left.jumps(width, alpha)

    def value(t: FloatArray) -> FloatArray:
        positive = raised * np.maximum(rising.value(np.maximum(t, above)), 0.0)
        return np.asarray(positive + np.minimum(falling.value(np.minimum(t, below)), 0.0))

    def slope(t: FloatArray) -> FloatArray:
        up = np.where(t > above, raised * rising.slope(np.maximum(t, above)), 0.0)
        return np.asarray(up + np.where(t < below, falling.slope(np.minimum(t, below)), 0.0))

    before = math.exp(float(log_gaussian_delta(distance, math.log(alpha))))  # E[V_+], not raised
    mean = 1.0 - alpha + (raised - 1.0) * before
    return Jumps(value, slope, mean, 2.0 * width, (below, above))
