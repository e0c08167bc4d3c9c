"""Rényi bounds of the shuffled Gaussian for all integer orders at once (Theorems 1 and 2, exact).

Every function returns log-moments `(λ - 1) ε(λ)`, shape (max_order + 1,): entry λ belongs to order
λ, entries 0 and 1 are 0. `rdp_from_log_moments` turns them into `ε(λ)` for λ = 2..max_order.
`sigma` is always the noise standard deviation in units of the sensitivity of one report; see
`shufl.accounting.adjacency` for how the noise multiplier becomes one.

All of them hold for the homogeneous pair: the users other than the differing one all hold its
record. Theorem 3 lives in `shufl.accounting.numerics.theorem3`.
"""

import math

import numpy as np
from numpy.typing import NDArray

from shufl.accounting.numerics import FloatArray, moments


def rdp_from_log_moments(log_moments: FloatArray) -> FloatArray:
    """Returns `ε(λ)` for λ = 2..L from `(λ - 1) ε(λ)` for λ = 0..L."""
    result: FloatArray = log_moments[2:] / np.arange(1.0, log_moments.size - 1.0)
    return result


def _infinite(max_order: int) -> FloatArray:
    result = np.full(max_order + 1, np.inf)
    result[:2] = 0.0
    return result


def shuffled_gaussian(users: int, sigma: float, max_order: int) -> FloatArray:
    """Theorem 1: all n users take part; `(λ-1) ε_SG(λ) = log E[Ȳ_n^λ]`, an equality.

    n is at least 1. σ, the noise's standard deviation over the sensitivity, may be 0, which gives
    infinite bounds. Returns log-moments, of shape (max_order + 1,), with `max_order` at least 2.
    """
    if not moments.is_representable(sigma, max_order):
        return _infinite(max_order)
    return moments.log_moments_around_one(
        moments.log_central_moments(sigma, max_order, float(users))
    )


def shuffled_check_in_gaussian(
    users: int, check_in_rate: float, sigma: float, max_order: int
) -> FloatArray:
    """Exact moments of the shuffled check-in Gaussian: `log E[W̄_n^λ]`.

    Averaged over the coins, the likelihood ratio is the mean of n independent W, where W is 1
    with probability 1 - γ and Y with probability γ. The case that nobody checks in is in it.

    γ lies in (0, 1]; n, σ, `max_order` and the result are as for `shuffled_gaussian`.
    """
    if check_in_rate == 1.0:
        return shuffled_gaussian(users, sigma, max_order)
    if not moments.is_representable(sigma, max_order):
        return _infinite(max_order)
    log_moments = moments.log_central_moments(sigma, max_order)
    log_moments[1:] += math.log(check_in_rate)
    return moments.log_moments_around_one(moments.log_moments_of_mean(log_moments, users))


def fixed_size_shuffled_gaussian(
    users: int, reports: int, sigma: float, max_order: int
) -> FloatArray:
    """Exact moments when exactly m of n users, drawn without replacement, report.

    The likelihood ratio is `(1 - m/n) + (m/n) Ȳ_m`. With m the realised number of reports this
    also prices one round of the check-in mechanism, because the coins do not depend on the data.

    m lies in 0..n, and no report costs nothing; n, σ, `max_order` and the result are as for
    `shuffled_gaussian`.
    """
    if reports == 0:
        return np.zeros(max_order + 1)
    if not moments.is_representable(sigma, max_order):
        return _infinite(max_order)
    return moments.log_moments_around_one(
        moments.log_central_moments(sigma, max_order, float(reports)),
        math.log(reports / users),
    )


def subsampling_weights(rates: NDArray[np.float64], order: int) -> tuple[FloatArray, FloatArray]:
    """Returns the coefficients of Theorem 2 after its moments are expanded around 1.

    With `E[Ȳ^j] = Σ_i C(j, i) M_i`, the sum `Σ_{j>=3} 2 γ^j C(λ, j) E[Ȳ^j]` becomes
    `Σ_i weight_i M_i` with `weight_i = 2 C(λ, i) γ^i (1+γ)^{λ-i}` less what j < 3 contributes.

    `rates` are γ, of shape (B,), and `order` is λ >= 2. Returns `log weight_i`, of shape
    (λ + 1, B), and `log γ² C(λ, 2)`, of shape (B,).
    """
    log_fact = moments.log_factorials(order)
    index = np.arange(order + 1.0)[:, None]
    log_rate, log_one_plus = np.log(rates)[None, :], np.log1p(rates)[None, :]
    log_choose = (log_fact[order] - log_fact - log_fact[::-1])[:, None]
    log_powers = log_choose + index * log_rate
    weights = math.log(2.0) + log_powers + (order - index) * log_one_plus
    weights[:2] = -np.inf
    if order >= 3:
        weights[0] = math.log(2.0) + moments.log_sum_exp(log_powers[3:], axis=0)
        grown = moments.log_expm1((order - 2.0) * log_one_plus[0])
        weights[2] = math.log(2.0) + log_powers[2] + grown
    else:
        weights[2] = -np.inf
    return weights, log_powers[2]


def subsampling_weight_table(rate: float, max_order: int) -> tuple[FloatArray, FloatArray]:
    """Returns `subsampling_weights` of one rate for every order at once.

    γ lies in (0, 1]; `max_order` is at least 2.

    Returns:
        `log weight_i` of order λ at [λ, i], -inf where i > λ or λ < 2, shape
        (max_order + 1, max_order + 1), and `log γ² C(λ, 2)`, shape (max_order + 1,).
    """
    log_fact = moments.log_factorials(max_order)
    order, index = np.ogrid[: max_order + 1, : max_order + 1]
    within = (index <= order) & (order >= 2)
    log_choose = log_fact[order] - log_fact[index] - log_fact[np.abs(order - index)]
    log_powers = np.where(within, log_choose + index * math.log(rate), -np.inf)
    log_one_plus = math.log1p(rate)
    weights: FloatArray = math.log(2.0) + log_powers + (order - index) * log_one_plus
    weights[:, :2] = -np.inf
    weights[:3, 2] = -np.inf
    if max_order >= 3:
        weights[3:, 0] = math.log(2.0) + moments.log_sum_exp(log_powers[3:, 3:])
        grown = moments.log_expm1(np.arange(1.0, max_order - 1.0) * log_one_plus)
        weights[3:, 2] = math.log(2.0) + log_powers[3:, 2] + grown
    return weights, log_powers[:, 2]


def subsampled_log_excess(
    rates: NDArray[np.float64], reports: NDArray[np.float64], sigma: float, max_order: int
) -> FloatArray:
    """Theorem 2's bound as `log(e^{(λ-1) ε_SSG(γ, m)} - 1)` for pairs (γ, m).

    The general bound for sampling without replacement (Wang, Balle, Kasiviswanathan 2019,
    Theorem 9) with `ε(∞) = ∞`:
    `1 + γ² C(λ,2) min{4(e^{ε(2)} - 1), 2 e^{ε(2)}} + Σ_{j>=3} 2 γ^j C(λ,j) e^{(j-1) ε(j)}`.

    γ in (0, 1] and m >= 1 have shape (B,). σ is representable. Returns shape (max_order + 1, B),
    not rounded up; rows 0 and 1 are -inf.
    """
    central = moments.log_central_moments(sigma, max_order, reports)
    log_two = math.log(2.0)
    second = np.minimum(2.0 * log_two + central[2], log_two + np.logaddexp(0.0, central[2]))
    result = np.full((max_order + 1, rates.size), -np.inf)
    for order in range(2, max_order + 1):
        weights, log_pair = subsampling_weights(rates, order)
        rest = moments.log_sum_exp(weights + central[: order + 1], axis=0)
        result[order] = np.logaddexp(log_pair + second, rest)
    return result


def subsampled_shuffled_gaussian(
    rate: float, reports: int, sigma: float, max_order: int
) -> FloatArray:
    """Theorem 2: `ε_SSG(γ, m)`, the printed bound for m reports sampled at rate γ.

    It is not tight: its terms j >= 3 do not vanish as m grows, and at γ = 1 it stays above
    Theorem 1.

    γ lies in (0, 1], and m = 0 costs nothing; σ, `max_order` and the result are as for
    `shuffled_gaussian`.
    """
    if reports == 0:
        return np.zeros(max_order + 1)
    if not moments.is_representable(sigma, max_order):
        return _infinite(max_order)
    excess = subsampled_log_excess(np.array([rate]), np.array([float(reports)]), sigma, max_order)
    return moments.round_up(np.logaddexp(0.0, excess[:, 0]))
