"""Theorem 3: the printed Rényi bound of the shuffled check-in Gaussian, split exactly minimised.

`(λ-1) ε_SCI(λ) <= log( P[K < m] e^{(λ-1) ε_SSG(γ,1)} + e^{(λ-1) ε_SSG(γ,m)} )` for every m, with
the Chernoff factor `exp(-Δ_c² nγ/2)`, `Δ_c = 1 - (m-1)/(nγ)`, for the tail P[K < m]. K = 0 belongs
to the first term: nobody reporting costs nothing, and the term allows for more.

Everything rests on two facts. The first term rises with m. The second falls, and for each order it
is a polynomial in 1/m with non-negative coefficients, because all cumulants of Y are positive: so
it is convex, a value at any m costs one sum, and a search by thirds finds the minimum.

Given k reports one user is among them with probability k/n, not γ. The printed theorem uses γ;
where nγ < 1 that can fall below the true divergence, so `Theorem3Accountant` never uses it without
a floor.
"""

import math

import numpy as np
from numpy.typing import NDArray

from shufl.accounting.numerics import FloatArray, moments
from shufl.accounting.numerics import renyi_divergence as rdp_bounds

_Index = NDArray[np.int64]


def _log_chernoff(m: _Index, mean: float) -> FloatArray:
    """`-Δ_c² nγ/2` with `Δ_c = 1 - (m-1)/(nγ)`."""
    split = np.maximum(1.0 - (m - 1.0) / mean, 0.0)
    return np.asarray(-0.5 * mean * split * split)


class _SecondTerm:
    """`h(m) = e^{(λ-1) ε_SSG(γ,m)} - 1` for all orders, as polynomials in 1/m.

    With q = e^s - 1 the minimum in Theorem 2 changes branch at m = q, because `E[Ȳ_m²] = 1 + q/m`:
    4q/m from there on, 2 + 2q/m before. The two polynomials differ in their first coefficients.
    """

    def __init__(self, rate: float, table: FloatArray, log_q: float):
        max_order = table.shape[0] - 1
        self.log_q = log_q
        self._powers = np.arange(float(max_order))
        weights, pair = rdp_bounds.subsampling_weights(rate, max_order)
        # log of the coefficient of m^{-p}: (λ, p), in both branches.
        common = np.full((max_order + 1, max_order), -np.inf)
        common[:, 0] = weights[:, 0]
        for p in range(1, max_order):
            rows, top = slice(p + 1, max_order + 1), min(2 * p, max_order) + 1
            terms = weights[rows, p + 1 : top] + table[p + 1 : top, p]
            common[rows, p] = moments.log_sum_exp(terms)
        common = common[2:]
        self._many, self._few = common, common.copy()
        log_two = math.log(2.0)
        self._many[:, 1] = np.logaddexp(common[:, 1], pair[2:] + 2 * log_two + log_q)
        self._few[:, 1] = np.logaddexp(self._few[:, 1], pair[2:] + log_two + log_q)
        self._few[:, 0] = np.logaddexp(self._few[:, 0], pair[2:] + log_two)

    def value(self, m: _Index) -> FloatArray:
        """`log h_λ(m_λ)` for one m per order, shape (max_order - 1,)."""
        log_m = np.log(m.astype(np.float64))
        coefficients = np.where((log_m >= self.log_q)[:, None], self._many, self._few)
        return moments.log_sum_exp(coefficients - self._powers * log_m[:, None])


def _moment_table(sigma: float, max_order: int) -> FloatArray:
    """`log c[i, p]` with `E[(Ȳ_m - 1)^i] = Σ_p c[i, p] m^{-p}`, from partial Bell polynomials.

    `c[i, i-r] = Σ_k C(i-1, k-1) κ_k c[i-k, ...]` adds one block of size k to r - 1 others.
    """
    log_fact = moments.log_factorials(max_order)
    kappa = moments.log_cumulants(sigma, max_order).copy()
    kappa[1:] -= log_fact[:-1]
    blocks = np.full((max_order + 1, max_order // 2 + 1), -np.inf)
    blocks[0, 0] = 0.0
    table = np.full((max_order + 1, max_order + 1), -np.inf)
    for i in range(2, max_order + 1):
        width = i // 2
        terms = kappa[2 : i + 1, None] + blocks[i - 2 :: -1, :width]
        row = moments.log_sum_exp(terms, axis=0) - math.log(i)
        blocks[i, 1 : width + 1] = row
        table[i, i - width : i] = row[::-1] + log_fact[i]
    return table


def _minimise(
    first: FloatArray, mean: float, second: _SecondTerm, top: int, convex_top: int
) -> FloatArray:
    """The least `log(e^{first} P[K < m] + h(m))` per order over every integer m in 1..top.

    For P[K < m] stands Chernoff's bound of it. That is convex up to `convex_top`, and h on either
    side of q: there a third of the interval is left out at a time. Past `convex_top` (the last
    standard deviation) the terms' own ends bound the sum from below; if that does not settle it,
    enumerate.
    """
    orders = first.size

    def objective(m: _Index) -> FloatArray:
        return np.logaddexp(first + _log_chernoff(m, mean), second.value(m))

    def all_at(m: int) -> _Index:
        return np.full(orders, m, dtype=np.int64)

    switch = math.ceil(math.exp(min(second.log_q, math.log(top + 1.0))))
    best = np.full(orders, np.inf)
    for start, stop in ((1, min(switch - 1, convex_top)), (max(switch, 1), convex_top)):
        if start > stop:
            continue
        low, high = all_at(start), all_at(stop)
        while np.any(high - low > 2):
            third = (high - low) // 3
            falls = objective(low + third) > objective(high - third)
            low, high = np.where(falls, low + third, low), np.where(falls, high, high - third)
        for more in range(3):
            best = np.minimum(best, objective(np.minimum(low + more, high)))
    start = convex_top + 1
    if start > top:
        return best
    chance = _log_chernoff(all_at(start), mean)
    floor = np.logaddexp(first + chance, second.value(all_at(top)))
    if np.any(floor < best):
        for m in range(start, top + 1):
            best = np.minimum(best, objective(all_at(m)))
    return best


def shuffled_check_in_gaussian(
    users: int, check_in_rate: float, sigma: float, max_order: int
) -> FloatArray:
    """Theorem 3, minimised over every split m = 1..⌊nγ⌋+1 separately for each order.

    n is at least 1 and γ in (0, 1]; σ > 0 is the noise's standard deviation over the sensitivity.
    Returns log-moments, of shape (max_order + 1,), rounded up.
    """
    mean = users * check_in_rate
    top = min(math.floor(mean) + 1, users)
    convex_top = min(top, max(math.floor(mean + 1.0 - math.sqrt(mean)), 0))
    table = _moment_table(sigma, max_order)
    log_q = float(moments.log_cumulants(sigma, max_order)[2])
    second = _SecondTerm(check_in_rate, table, log_q)
    first = np.logaddexp(0.0, second.value(np.ones(max_order - 1, dtype=np.int64)))
    excess = _minimise(first, mean, second, top, convex_top)
    return moments.round_up(np.concatenate([np.zeros(2), np.logaddexp(0.0, excess)]))
