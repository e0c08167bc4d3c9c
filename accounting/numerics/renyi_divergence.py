"""Rényi bounds of the shuffled Gaussian for all integer orders at once (Theorems 1 and 2, exact).

Every bound is given as log-moments `(λ - 1) ε(λ)`, shape (max_order + 1,): entry λ belongs to order
λ, entries 0 and 1 are 0. `rdp_from_log_moments` turns them into `ε(λ)` for λ = 2..max_order, and
`epsilon_from_rdp` that into ε at a δ.
`sigma` is always the noise standard deviation in units of the sensitivity of one report; see
`accountants.base.effective_sigma` for how the noise multiplier becomes one.

All of them hold for the homogeneous pair: the users other than the differing one all hold its
record. Theorem 3 lives in `shufl.accounting.numerics.theorem3`.
"""

import math

import numpy as np

from shufl.accounting.numerics import FloatArray, moments


def rdp_from_log_moments(log_moments: FloatArray) -> FloatArray:
    """Returns `ε(λ)` for λ = 2..L from `(λ - 1) ε(λ)` for λ = 0..L."""
    return log_moments[2:] / np.arange(1.0, log_moments.size - 1.0)


def forward_moments(
    users: int, draws: int, rate: float, sigma: float, max_order: int
) -> FloatArray:
    """Exact moments `log E[W̄^λ]` of the likelihood ratio `W̄ = 1 + (1/n) Σ_{i<=N} B_i (Y_i - 1)`.

    N = n users who each report with probability B = γ: if all take part, `(λ-1) ε_SG(λ)` of
    Theorem 1, an equality; averaged over coins otherwise, and the case that nobody checks in is in
    it. Or N = m reports for certain, drawn without replacement: with m the realised number of
    reports this also prices one round of the check-in mechanism, because the coins do not depend on
    the data.

    n is at least 1, N in 0..n, γ in (0, 1], and σ > 0 the noise's standard deviation over the
    sensitivity; moments that `moments.is_representable` refuses are infinite. Returns log-moments,
    of shape (max_order + 1,), with `max_order` at least 2.
    """
    if draws == 0:
        return np.zeros(max_order + 1)
    if rate == 1.0:
        central = moments.log_central_moments(sigma, max_order, draws)
    else:
        central = moments.log_central_moments(sigma, max_order)
        central[1:] += math.log(rate)
        central = moments.log_moments_of_mean(central, draws)
    return moments.log_moments_around_one(central, math.log(draws / users))


def subsampling_weights(rate: float, max_order: int) -> tuple[FloatArray, FloatArray]:
    """Returns the coefficients of Theorem 2 after its moments are expanded around 1.

    With `E[Ȳ^j] = Σ_i C(j, i) M_i`, the sum `Σ_{j>=3} 2 γ^j C(λ, j) E[Ȳ^j]` becomes
    `Σ_i weight_i M_i` with `weight_i = 2 C(λ, i) γ^i (1+γ)^{λ-i}` less what j < 3 contributes.

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


def subsampled_shuffled_gaussian(
    rate: float, reports: int, sigma: float, max_order: int
) -> FloatArray:
    """Theorem 2: `ε_SSG(γ, m)`, the printed bound for m reports sampled at rate γ.

    The general bound for sampling without replacement (Wang, Balle, Kasiviswanathan 2019,
    Theorem 9) with `ε(∞) = ∞`:
    `1 + γ² C(λ,2) min{4(e^{ε(2)} - 1), 2 e^{ε(2)}} + Σ_{j>=3} 2 γ^j C(λ,j) e^{(j-1) ε(j)}`.

    It is not tight: its terms j >= 3 do not vanish as m grows, and at γ = 1 it stays above
    Theorem 1.

    γ lies in (0, 1], and m = 0 costs nothing; σ, `max_order` and the result are as for
    `forward_moments`.
    """
    if reports == 0:
        return np.zeros(max_order + 1)
    weights, log_pair = subsampling_weights(rate, max_order)
    central = moments.log_central_moments(sigma, max_order, reports)
    log_two = math.log(2.0)
    second = min(2.0 * log_two + central[2], log_two + np.logaddexp(0.0, central[2]))
    excess = np.logaddexp(log_pair + second, moments.log_sum_exp(weights + central))
    return moments.round_up(np.logaddexp(0.0, excess))


def epsilon_from_rdp(orders: FloatArray, rdp: FloatArray, delta: float) -> tuple[float, int]:
    """Returns the least ε over the orders (Lemma 2), and the index of the order that gives it.

    The formulas, and the shortcut through the Kullback-Leibler divergence, are those of
    `dp_accounting.rdp.compute_epsilon` and `compute_delta` (Canonne, Kamath, Steinke 2020, Prop.
    12), which loop over the orders in Python: too slow to ask before every round.

    Orders λ > 1.01 and their ε(λ) >= 0, which may be inf, have shape (K,); δ lies in [0, 1].

    Raises:
        ValueError: A negative or undefined divergence.
    """
    _check(rdp)
    if delta == 0.0:
        return (0.0, 0) if np.all(rdp == 0.0) else (math.inf, 0)
    epsilons = rdp + np.log1p(-1.0 / orders) - np.log(delta * orders) / (orders - 1.0)
    # δ <= sqrt(1 - e^{-KL}) (Bretagnolle-Huber), and KL is at most any Rényi divergence.
    epsilons = np.where(delta**2 + np.expm1(-rdp) > 0.0, 0.0, epsilons)
    best = int(np.argmin(epsilons))
    return max(0.0, float(epsilons[best])), best


def delta_from_rdp(orders: FloatArray, rdp: FloatArray, epsilon: float) -> float:
    """Returns the least δ over the orders at ε >= 0, which may be inf; as `epsilon_from_rdp`."""
    _check(rdp)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_kl = 0.5 * np.log(-np.expm1(-rdp))
        by_order = (orders - 1.0) * (rdp - epsilon + np.log1p(-1.0 / orders)) - np.log(orders)
    log_deltas = np.fmin(by_kl, by_order)  # inf - inf is no bound: fmin drops it
    return min(1.0, math.exp(min(0.0, float(np.min(log_deltas)))))


def _check(rdp: FloatArray) -> None:
    if np.any(np.isnan(rdp)) or np.any(rdp < 0.0):
        raise ValueError("Rényi divergences must be non-negative numbers")
