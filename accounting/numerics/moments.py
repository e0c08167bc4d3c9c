"""Moments of a mean of lognormal likelihood ratios, in log space and without cancellation.

`Y = exp((2x - 1) / 2σ²)`, `x ~ N(0, σ²)`, is the likelihood ratio of one Gaussian report:
`E[Y] = 1` and `E[Y^k] = e^{s k(k-1)/2}` with `s = 1/σ²`. Everything below sums positive terms
only, because the raw moment `(1 + q)^{k(k-1)/2}`, `q = e^s - 1`, counts all graphs on k labelled
vertices with weight q per edge. So the cumulants of Y count the connected graphs, the central
moments those without an isolated vertex, and both are positive.

Arrays are indexed by the order: entry k of a vector of length `max_order + 1` belongs to order k.
"""

import functools
import math
from typing import Any

import numpy as np
from scipy import special

from shufl.accounting.numerics import FloatArray

# Rounding in the recurrences stays below a few 1e-12 of a log-moment (tests compare with 50-digit
# arithmetic); the result is raised by this much so that it cannot end below the truth.
ROUND_UP = 1e-10
_SMALLEST_S = 1e-300
_LARGEST_EXPONENT = 1e300


def log_factorials(max_order: int) -> FloatArray:
    """Returns `log k!` for k = 0..max_order, shape (max_order + 1,)."""
    return np.asarray(special.gammaln(np.arange(max_order + 1) + 1.0))


def log_expm1(x: Any) -> Any:
    """Returns `log(e^x - 1)` elementwise for x > 0, without overflow."""
    return x + np.log(-np.expm1(-x))


def log_sum_exp(terms: FloatArray, axis: int = -1) -> FloatArray:
    """Returns `log Σ e^terms` along an axis; all terms -inf gives -inf, any +inf gives +inf."""
    top = np.max(terms, axis=axis, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore", over="ignore"):
        total = np.log(np.sum(np.exp(terms - shift), axis=axis))
    return np.asarray(total + np.squeeze(shift, axis=axis))


def _log_sum(terms: FloatArray) -> float:
    """`log_sum_exp` of one vector: the recurrences ask some thousand times."""
    top = float(terms.max())
    if not math.isfinite(top):
        return top
    return math.log(float(np.exp(terms - top).sum())) + top


def is_representable(sigma: float, max_order: int) -> bool:
    """Tells whether the log-moments up to `max_order` are finite floats at all."""
    if sigma <= 0.0:
        return False
    return max_order**2 / _LARGEST_EXPONENT < sigma * sigma


@functools.lru_cache(maxsize=64)
def log_cumulants(sigma: float, max_order: int) -> FloatArray:
    """Returns the logarithms of the cumulants of Y.

    Splitting a connected graph on k + 1 vertices at its last vertex, with i the size of the
    component of vertex 1 once that last vertex is gone, gives
    `κ_{k+1} = Σ_{i=1..k} C(k-1, i-1) (e^{is} - 1) κ_i κ_{k-i+1}`.

    σ > 0 is the noise's standard deviation over the sensitivity; `max_order` is at least 1.

    Returns:
        Shape (max_order + 1,), read-only; entry 0 is -inf, entry 1 is 0 (the mean is 1).
    """
    s = max(1.0 / sigma / sigma, _SMALLEST_S)
    log_fact = log_factorials(max_order)
    result = np.full(max_order + 1, -np.inf)
    result[1] = 0.0
    edge = log_expm1(s * np.arange(1.0, max_order + 1.0))
    # left[i] = log (e^{is}-1) κ_i / (i-1)!,  right[j] = log κ_j / (j-1)!
    left = np.full(max_order + 1, -np.inf)
    right = np.full(max_order + 1, -np.inf)
    left[1], right[1] = edge[0], 0.0
    for k in range(1, max_order):
        result[k + 1] = _log_sum(left[1 : k + 1] + right[k:0:-1]) + log_fact[k - 1]
        right[k + 1] = result[k + 1] - log_fact[k]
        left[k + 1] = right[k + 1] + edge[k]
    result.setflags(write=False)
    return result


def log_central_moments(sigma: float, max_order: int, users: int = 1) -> FloatArray:
    """Returns `log E[(Ȳ_n - 1)^j]`, the central moments of a mean of n copies of Y.

    The cumulants of the mean are `κ_k n^{1-k}`, and
    `M_j = Σ_{k=2..j} C(j-1, k-1) κ_k n^{1-k} M_{j-k}` has positive terms for every n >= 1.

    σ and `max_order` are as for `log_cumulants`. Returns shape (max_order + 1,); order 0 is 0 and
    order 1 is -inf.
    """
    log_fact = log_factorials(max_order)
    kappa = log_cumulants(sigma, max_order).copy()
    kappa[1:] -= log_fact[:-1]
    kappa -= (np.arange(max_order + 1.0) - 1.0) * np.log(float(users))
    # egf[j] = log M_j / j!
    egf = np.full(max_order + 1, -np.inf)
    egf[0] = 0.0
    for j in range(2, max_order + 1):
        egf[j] = _log_sum(kappa[2 : j + 1] + egf[j - 2 :: -1]) - math.log(j)
    return egf + log_fact


def log_moments_of_mean(log_moments: FloatArray, users: int) -> FloatArray:
    """Returns the log-moments of the mean of n i.i.d. variables with mean zero.

    The power-of-a-series recurrence
    `M_m = Σ_{k=2..m} C(m, k) (k(n+1) - m)/m · μ_k n^{-k} M_{m-k}`
    has no negative term while m <= 2(n+1); beyond that the power is taken by repeated squaring.

    `log_moments` are `log E[Z^k]`, all moments non-negative, entry 1 -inf. Returns `log E[Z̄_n^m]`.
    Both have shape (L + 1,).
    """
    max_order = log_moments.size - 1
    log_fact = log_factorials(max_order)
    orders = np.arange(max_order + 1.0)
    egf = log_moments - log_fact - orders * math.log(users)
    if max_order > 2 * (users + 1):
        return _log_power(egf, users) + log_fact
    result = np.full(max_order + 1, -np.inf)
    result[0] = 0.0
    for m in range(2, max_order + 1):
        with np.errstate(divide="ignore"):
            factor = np.log((orders[2 : m + 1] * (users + 1.0) - m) / m)
        result[m] = _log_sum(factor + egf[2 : m + 1] + result[m - 2 :: -1])
    return result + log_fact


def _log_power(egf: FloatArray, exponent: int) -> FloatArray:
    """The coefficients of a power of a series with non-negative coefficients, all as logs."""
    result = np.full(egf.size, -np.inf)
    result[0] = 0.0
    while True:
        if exponent & 1:
            result = _log_convolve(result, egf)
        exponent >>= 1
        if not exponent:
            return result
        egf = _log_convolve(egf, egf)


def _log_convolve(a: FloatArray, b: FloatArray) -> FloatArray:
    result = np.empty_like(a)
    for m in range(a.size):
        result[m] = _log_sum(a[: m + 1] + b[m::-1])
    return result


def log_moments_around_one(log_central: FloatArray, log_scale: float = 0.0) -> FloatArray:
    """Returns `log E[(1 + c Z̄)^λ]` for every λ, rounded up by `ROUND_UP`.

    `E[(1 + c Z̄)^λ] = 1 + Σ_{j>=2} C(λ, j) c^j E[Z̄^j]`, summed by its excess over 1 so that a
    log-moment of 1e-12 keeps its digits.

    `log_central` are `log E[Z̄^j]`, with `E[Z̄] = 0`, and `log_scale` is `log c`. The result has
    the same shape (L + 1,); entries 0 and 1 are 0.
    """
    max_order = log_central.size - 1
    log_fact = log_factorials(max_order)
    left = log_central - log_fact + np.arange(max_order + 1.0) * log_scale
    excess = np.full(max_order + 1, -np.inf)
    for order in range(2, max_order + 1):
        terms = left[2 : order + 1] - log_fact[order - 2 :: -1]
        excess[order] = _log_sum(terms) + log_fact[order]
    return round_up(np.logaddexp(0.0, excess))


def round_up(log_moments: FloatArray) -> FloatArray:
    """Raises log-moments by the rounding allowance; a NaN becomes +inf, never a small number."""
    raised = log_moments * (1.0 + ROUND_UP)
    return np.where(np.isnan(raised), np.inf, raised)
