"""The reverse Rényi direction of the homogeneous pair: `E[W̄^{-k}]`, k = λ - 1.

`W̄ = 1 + (1/n) Σ_{i<=N} B_i (Y_i - 1)`: N = n users who each report with probability B = γ, or
N = m reports for certain. `u = x/n` below. With `1/w^k = (1/Γ(k)) ∫_0^∞ x^{k-1} e^{-xw} dx`

    E[W̄^{-k}] - 1 = (1/Γ(k)) ∫ x^k e^{-x} (e^{D(x)} - 1) d log x,
    D(x) = N log(1 + γ E[φ(u (Y - 1))]),   φ(v) = e^{-v} - 1 + v >= 0,

because E[Y] = 1. Nothing is subtracted, so an excess of 1e-18 keeps its digits.

The trapezoidal rule in log x, step h, errs by at most `2 Σ_j |Γ(a_j + 2)| / Γ(k + 2)` of this
excess, `a_j = k + 2πij/h`, whatever W̄ is: the integrand's Fourier transform is
`Γ(a) (E[W̄^{-a}] - 1)`, and `|E[W̄^{-a}] - 1| <= |a(a+1)|/(k(k+1)) (E[W̄^{-k}] - 1)`, because
`w^{-a} - 1 + a(w - 1) = a(a+1) ∫_1^w (w - r) r^{-a-2} dr`. With the steps here that is below 1e-15.
Below the first node lies at most `P[Gamma(k) < x]` of the excess, since D rises; beyond the last at
most `x^{-j} (Γ(k+j)/Γ(k)) E[W̄^{-(k+j)}]`, for every j > 0. By the inequality of arithmetic and
geometric means `E[W̄^{-k}] <= (1 - γ + γ E[Y^{-k/n}])^N`, `E[Y^{-a}] = e^{(a² + a)/2σ²}`.
E[φ] is one more trapezoidal sum. Where the result is known, at n = 1, all of it errs by about 1e-12
of a log-moment; it is raised by 1e-10 of it.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from shufl.accounting.numerics import FloatArray, moments

_NEGLIGIBLE = 45.0  # e^-45 of the result is left out at each end
_LARGEST_EXPONENT = 600.0
_MOST_VALUES = 2**21  # of the integrand over (x, t) at once; the geometric bound beyond
_SERIES = [(-1.0) ** i / math.factorial(i) for i in range(15, 1, -1)]


def larger_direction(
    forward: FloatArray, users: int, draws: int, rate: float, sigma: float
) -> FloatArray:
    """Returns the larger log-moment of both directions, for every order.

    Where the bound by geometric means is below the forward direction it is taken for the reverse
    one; nothing is integrated there. At σ = 0 `forward` is the answer.

    `forward` is `log E[W̄^λ]`, rounded up, of shape (max_order + 1,). Each of the N `draws` reports
    with chance `rate`.
    """
    result = forward.copy()
    if draws == 0 or sigma == 0.0:
        return result
    k = np.arange(1.0, forward.size - 1.0)
    mean = _MeanRatio(float(users), float(draws), rate, sigma)
    geometric = mean.geometric_bound(k)
    open_orders = np.flatnonzero(geometric > forward[2:])
    for block in range(math.frexp(k.size)[1]):
        within = open_orders[(k[open_orders] >= 2**block) & (k[open_orders] < 2 ** (block + 1))]
        if within.size:
            reverse = mean.reverse(k[within], forward[within + 2])
            reverse = np.fmin(moments.round_up(reverse), geometric[within])
            result[within + 2] = np.maximum(result[within + 2], reverse)
    return result


class _MeanRatio(NamedTuple):
    """The law of W̄."""

    users: float
    draws: float
    rate: float
    sigma: float

    def geometric_bound(self, k: FloatArray) -> FloatArray:
        """`N log(1 - γ + γ e^{(k²/n² + k/n)/2σ²})`, an upper bound of `log E[W̄^{-k}]`."""
        rate, sigma = self.rate, self.sigma
        share = k / self.users
        with np.errstate(divide="ignore", over="ignore"):
            exponent = (share + 1.0) * share / 2.0 / sigma / sigma
            large = np.logaddexp(np.log1p(-rate), math.log(rate) + exponent)
        small = np.log1p(rate * np.expm1(np.minimum(exponent, 1.0)))
        return self.draws * np.where(exponent > 1.0, large, small)

    def reverse(self, k: FloatArray, forward: FloatArray) -> FloatArray:
        """`log E[W̄^{-k}]` for k within a factor of 2; inf where that would take too many nodes."""
        # Below the first node: Chernoff for Gamma(k), k (log r - r + 1) = -45 at x = kr.
        root = float(special.lambertw(-math.exp(-1.0 - _NEGLIGIBLE / k[0])).real)
        first = math.log(k[0]) + math.log(-root)
        # Beyond the last: e^-45 of the forward excess, with the best j.
        j = np.geomspace(1.0, 4096.0, 37)
        log_excess = moments.log_expm1(forward)
        beyond = special.gammaln(k[:, None] + j) - special.gammaln(k)[:, None]
        beyond += self.geometric_bound(k[:, None] + j)
        last = float(np.max(np.min((beyond + _NEGLIGIBLE - log_excess[:, None]) / j, axis=1)))
        step = min(0.16, 0.5 / math.sqrt(k[-1]))
        if not (last - first) / step < _MOST_VALUES:
            return np.full(k.size, np.inf)
        log_x = np.arange(first, last + step, step)
        weights = self._log_weights(log_x)
        if weights is None:
            return np.full(k.size, np.inf)
        terms = k[:, None] * log_x + weights
        excess = moments.log_sum_exp(terms) + math.log(step) - special.gammaln(k)
        return np.asarray(np.logaddexp(0.0, excess))

    def _log_weights(self, log_x: FloatArray) -> FloatArray | None:
        """`log(e^{-x} (e^{D(x)} - 1))` at each x, not below; None if that takes too many values."""
        users, draws, rate, sigma = self
        log_u = log_x - math.log(users)
        # e^{-uY} moves the Gaussian's mode to -uY/σ; φ <= v²/2 e^{|v|} to 2/σ at most.
        shift = min(sigma * max(log_u[-1], 0.0), math.exp(min(log_u[-1], 700.0)) / sigma)
        step = min(0.6 / math.sqrt(1.0 + shift / sigma), 0.25 * sigma)
        low, high = -shift - 9.5, 2.0 / sigma + 9.5
        if not log_x.size * (high - low) / step < _MOST_VALUES or log_u[-1] > 700.0:
            return None
        t = np.arange(low, high + step, step)
        log_density = -0.5 * t * t + math.log(step / math.sqrt(2.0 * math.pi))
        u = np.exp(log_u)[:, None]
        log_ratio = t / sigma - 0.5 / sigma / sigma
        v = u * np.expm1(log_ratio)
        result = np.empty(log_x.size)
        tame = v[:, 0] > -_LARGEST_EXPONENT
        if np.any(tame):
            mean = np.sum(_phi(v[tame]) * np.exp(log_density), axis=1)
            grown = draws * np.log1p(rate * mean)
            with np.errstate(divide="ignore"):
                result[tame] = grown - np.exp(log_x[tame]) + np.log(-np.expm1(-grown))
        wild = ~tame
        if np.any(wild):
            laplace = moments.log_sum_exp(log_density - u[wild] * np.exp(log_ratio))
            with np.errstate(divide="ignore"):
                one = np.logaddexp(np.log1p(-rate) - u[wild, 0], math.log(rate) + laplace)
            result[wild] = draws * one - (users - draws) * u[wild, 0]
        return result


def _phi(v: NDArray[np.float64]) -> FloatArray:
    """`e^{-v} - 1 + v` without cancellation."""
    small = np.clip(v, -0.5, 0.5)
    return np.where(np.abs(v) < 0.5, np.polyval(_SERIES, small) * small * small, np.expm1(-v) + v)
