"""Other systems' bounds, for comparison tables only: no accountant uses them.

`clones` holds for Gaussian reports. The others, but for the trusted server, price an ε₀-LDP
randomiser. A Gaussian is only (ε₀, δ₀)-LDP, so for it they are no guarantee.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import pld
from scipy import special, stats

from accounting import validation
from accounting.events import ShuffledCheckInGaussianDpEvent
from accounting.numerics import conversion
from accounting.numerics.composition import Composition, Target, count_block
from accounting.numerics.gaussian import gaussian_epsilon
from accounting.numerics.loss_pmf import MAX_LOSS, FloatArray, Profile, dyadic_interval
from accounting.numerics.moments import log_sum_exp
from accounting.peers import clones
from accounting.peers.clones_accountant import ClonesAccountant

Adversary = Literal["strong", "weak"]


def _checked(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    validation.integer("number of reports", reports, 1)
    validation.real("local epsilon", local_epsilon, "(0, inf)")
    checked: FloatArray = np.asarray(orders, dtype=np.float64)
    if checked.ndim != 1 or np.any(checked < 2) or np.any(checked != np.floor(checked)):
        raise ValueError("Rényi orders must be integers from 2")
    return checked


def _log_binomial(order: float, k: FloatArray) -> FloatArray:
    result: FloatArray = (
        special.gammaln(order + 1.0) - special.gammaln(k + 1.0) - special.gammaln(order - k + 1.0)
    )
    return result


def _log_expm1(x: float) -> float:
    return x + math.log(-math.expm1(-x))


def _effective(reports: int, local_epsilon: float) -> int:
    """n̄ = ⌊(n - 1)/(2 e^{ε₀})⌋ + 1."""
    return math.floor((reports - 1) / 2.0 * math.exp(-local_epsilon)) + 1


def girgis_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) of n shuffled ε₀-LDP reports (Girgis et al. 2021, the upper bound).

    With `n̄ = ⌊(n-1)/(2e^{ε₀})⌋ + 1`: `1/(λ-1) log(1 + C(λ,2) (e^{ε₀}-1)²/(n̄ e^{ε₀})
    + Σ_{i>=3} C(λ,i) i Γ(i/2) ((e^{2ε₀}-1)²/(2 e^{2ε₀} n̄))^{i/2} + e^{ε₀λ - (n-1)/(8e^{ε₀})})`.

    Args:
        reports: n >= 1.
        local_epsilon: ε₀ > 0 of one report.
        orders: Integers λ >= 2, shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    checked = _checked(reports, local_epsilon, orders)
    log_n = math.log(_effective(reports, local_epsilon))
    one, two = _log_expm1(local_epsilon), _log_expm1(2.0 * local_epsilon)
    ratio = 2.0 * two - 2.0 * local_epsilon - math.log(2.0) - log_n
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        i = np.arange(3.0, order + 1.0)
        pair = _log_binomial(order, np.array([2.0])) + 2.0 * one - local_epsilon - log_n
        higher = _log_binomial(order, i) + np.log(i) + special.gammaln(i / 2.0) + i / 2.0 * ratio
        rare = local_epsilon * order - (reports - 1) / 8.0 * math.exp(-local_epsilon)
        excess = log_sum_exp(np.concatenate([pair, higher, [rare]]))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result


def girgis_subsampled_rdp(
    rate: float, reports: int, local_epsilon: float, orders: npt.ArrayLike
) -> FloatArray:
    """Returns ε(λ) of k shuffled ε₀-LDP reports, users sampled at rate γ (Girgis et al. 2021).

    With `k̄ = ⌊(k-1)/(2e^{ε₀})⌋ + 1`: `1/(λ-1) log(1 + 4 C(λ,2) γ² (e^{ε₀}-1)²/(k̄ e^{ε₀})
    + Σ_{j>=3} C(λ,j) γ^j j Γ(j/2) (2 (e^{2ε₀}-1)²/(k̄ e^{2ε₀}))^{j/2} + Υ)`,
    `Υ = ((1+γu)^λ - 1 - λγu) e^{-(k-1)/(8e^{ε₀})}`, `u = (e^{2ε₀}-1)/(2e^{ε₀})`.

    Args:
        rate: γ in (0, 1].
        reports: k >= 1.
        local_epsilon: ε₀ > 0 of one report.
        orders: Integers λ >= 2, shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    checked = _checked(reports, local_epsilon, orders)
    log_rate = math.log(validation.real("sampling rate", rate, "(0, 1]"))
    log_k = math.log(_effective(reports, local_epsilon))
    one, two = _log_expm1(local_epsilon), _log_expm1(2.0 * local_epsilon)
    ratio = math.log(2.0) + 2.0 * two - 2.0 * local_epsilon - log_k
    log_u = two - math.log(2.0) - local_epsilon + log_rate
    damping = (reports - 1) / 8.0 * math.exp(-local_epsilon)
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        j = np.arange(3.0, order + 1.0)
        pair = _log_binomial(order, np.array([2.0])) + math.log(4.0) + 2.0 * (log_rate + one)
        pair = pair - local_epsilon - log_k
        higher = _log_binomial(order, j) + np.log(j) + special.gammaln(j / 2.0)
        higher = higher + j * log_rate + j / 2.0 * ratio
        # (1+x)^λ - 1 - λx = Σ_{j>=2} C(λ, j) x^j
        powers = np.arange(2.0, order + 1.0)
        rare = log_sum_exp(_log_binomial(order, powers) + powers * log_u) - damping
        excess = log_sum_exp(np.concatenate([pair, higher, np.atleast_1d(rare)]))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result


def clones_delta(reports: int, local_epsilon: float, epsilons: npt.ArrayLike) -> FloatArray:
    """Returns δ(ε) of "Hiding among the clones" (Feldman et al. 2021), numerically.

    The pair of Koskela et al. 2021: `C ~ Bin(k-1, e^{-ε₀})`, `A ~ Bin(C, ½)`, one coin of odds
    e^{ε₀}. For every ε₀-LDP randomiser, both directions, rounded up.

    Args:
        reports: k >= 1.
        local_epsilon: ε₀ > 0 of one report.
        epsilons: ε >= 0, shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    return _pair_delta(reports, local_epsilon, math.exp(-local_epsilon), epsilons)


def stronger_clones_delta(
    reports: int, local_epsilon: float, epsilons: npt.ArrayLike
) -> FloatArray:
    """Returns δ(ε) of "Stronger privacy amplification by shuffling" (Feldman et al. 2022).

    The clones pair with clone probability `2/(e^{ε₀}+1)` for `e^{-ε₀}`. **Not a guarantee**: by its
    erratum the theorem holds for some ε₀-LDP randomisers only.

    Args:
        reports: k >= 1.
        local_epsilon: ε₀ > 0 of one report.
        epsilons: ε >= 0, shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    chance = 2.0 / (math.exp(min(local_epsilon, 700.0)) + 1.0)
    return _pair_delta(reports, local_epsilon, chance, epsilons)


def _pair_delta(
    reports: int, local_epsilon: float, chance: float, epsilons: npt.ArrayLike
) -> FloatArray:
    _checked(reports, local_epsilon, [2])
    parameters = clones.CloneParameters(chance, local_epsilon, 0.0, 0.0)
    profile = clones.CloneProfile(np.array([reports]), parameters)
    asked = np.asarray(epsilons, dtype=np.float64)
    found = profile.deltas(0, asked)
    # What a coin of odds e^{ε₀} can lose at most.
    result: FloatArray = np.where(asked >= local_epsilon, 0.0, found)
    return result


def blanket_share(categories: int, local_epsilon: float) -> float:
    """Returns γ of k-ary randomised response: `e^{ε₀} = (1-γ+γ/k)/(γ/k)`."""
    return categories / (math.expm1(min(local_epsilon, 700.0)) + categories)


def randomised_response_delta(
    reports: int,
    categories: int,
    local_epsilon: float,
    epsilons: npt.ArrayLike,
    adversary: Adversary = "weak",
) -> FloatArray:
    """Returns δ(ε) of shuffled k-ary randomised response (Balle et al. 2019, Koskela et al. 2021).

    A user sends its value, or with probability γ (see `blanket_share`) a uniform one. Both
    adversaries know all other users' values and which of them sent a uniform one; the strong one
    also knows that the differing user did not. Among m = B + 1 reports, `B ~ Bin(n-1, γ)`, that
    are left, n1 and n2 hold the two candidate values; against uniform reports the density is
    `w + (1-w) k n1/m`, w = γ (weak) or 0 (strong), so with `d = n1 - n2` a sum of s = n1 + n2 signs

        δ(α) = E[(w (1-α) + (1-w) k (s (1-α) + d (1+α))/(2m))_+].

    This is the hockey-stick divergence itself, both directions, in blocks of m valued at their
    first (it falls in m): an upper bound. The published analyses of the strong adversary take the
    larger P[loss >= ε], see `randomised_response_tail`.

    Args:
        reports: n >= 1.
        categories: k >= 2.
        local_epsilon: ε₀ > 0 of one report.
        epsilons: ε >= 0, shape (K,).
        adversary: "weak" or "strong".

    Raises:
        ValueError: A value outside its range.
    """
    _checked(reports, local_epsilon, [2])
    validation.integer("number of categories", categories, 2)
    validation.choice("adversary", adversary, ("strong", "weak"))
    share = blanket_share(categories, local_epsilon)
    own = share if adversary == "weak" else 0.0
    alphas = np.exp(np.asarray(epsilons, dtype=np.float64))
    mean, deviation = (reports - 1) * share, math.sqrt((reports - 1) * share * (1.0 - share))
    # Up to an eighth of a deviation wide; single counts where there are few.
    near = np.arange(mean - 12.0 * deviation, mean + 12.0 * deviation + 2.0, max(deviation / 8, 1))
    first = np.unique(np.append(1, np.clip(np.floor(near), 1, reports)).astype(np.int64))
    last = np.append(first[1:] - 1, reports)
    # m = B + 1. The smaller of two tails keeps its digits.
    below = stats.binom.cdf(last - 1, reports - 1, share)
    above = stats.binom.sf(first - 2, reports - 1, share)
    chance = np.where(
        last - 1 < mean,
        below - stats.binom.cdf(first - 2, reports - 1, share),
        above - stats.binom.sf(last - 1, reports - 1, share),
    )
    result = np.zeros_like(alphas)
    for m, weight in zip(first.tolist(), chance.tolist(), strict=True):
        if weight > 1e-25:
            result += weight * _among(m, categories, own, alphas)
        else:
            result += weight
    if adversary == "weak":  # who sees no more than the reports themselves, each ε₀-LDP
        result[np.asarray(epsilons, dtype=np.float64) >= local_epsilon] = 0.0
    bound: FloatArray = np.minimum(result * (1.0 + 1e-9), 1.0)
    return bound


def _among(m: int, categories: int, own: float, alphas: FloatArray) -> FloatArray:
    """`E[(w (1-α) + (1-w) k (s (1-α) + d (1+α))/(2m))_+]` for one m."""
    center, deviation = 2.0 * m / categories, math.sqrt(m * 2.0 / categories)
    low = max(1, math.floor(center - 9.0 * deviation - 9.0)) if categories > 2 else m
    high = min(m, math.ceil(center + 9.0 * deviation + 9.0))
    signs = np.arange(low, high + 1, dtype=np.float64)
    chance = stats.binom.pmf(signs, m, 2.0 / categories)
    beyond = stats.binom.cdf(low - 1, m, 2.0 / categories) if low > 1 else 0.0
    beyond += stats.binom.sf(high, m, 2.0 / categories)
    offset = own * m / ((1.0 - own) * categories)
    level = np.outer(1.0 + 2.0 * offset / signs, (alphas - 1.0) / (alphas + 1.0))
    calls = clones.sign_mean_calls(signs, level)
    mean = np.einsum("s,sj->j", chance * signs, calls)
    result: FloatArray = (1.0 - own) * categories * (alphas + 1.0) / (2.0 * m) * mean
    result += categories * float(beyond)
    return result


def randomised_response_tail(
    reports: int, categories: int, local_epsilon: float, epsilons: npt.ArrayLike
) -> FloatArray:
    """Returns `P[N1/N2 >= e^ε]`: the published δ of the strong adversary (Balle et al. 2019).

    `(N1 - 1, N2)` are two counts of a multinomial of n - 1 trials, γ/k each. It bounds
    `randomised_response_delta` from above.

    Args:
        reports: n >= 1.
        categories: k >= 2.
        local_epsilon: ε₀ > 0 of one report.
        epsilons: ε >= 0, shape (K,).

    Raises:
        ValueError: A value outside its range.
    """
    _checked(reports, local_epsilon, [2])
    validation.integer("number of categories", categories, 2)
    each = blanket_share(categories, local_epsilon) / categories
    trials = reports - 1
    reach = 9.0 * math.sqrt(trials * each) + 9.0
    low = max(0, math.floor(trials * each - reach))
    high = min(trials, math.ceil(trials * each + reach))
    second = np.arange(low, high + 1, dtype=np.float64)
    chance = stats.binom.pmf(second, trials, each)
    beyond = stats.binom.cdf(low - 1, trials, each) + stats.binom.sf(high, trials, each)
    least = np.ceil(np.multiply.outer(np.exp(np.asarray(epsilons, dtype=np.float64)), second))
    rest = stats.binom.sf(least - 2.0, trials - second, each / (1.0 - each))
    result: FloatArray = np.minimum(np.einsum("jn,n->j", rest, chance) + beyond, 1.0)
    return result


def composed_epsilon(
    delta_at: Callable[[FloatArray], FloatArray],
    grid: npt.ArrayLike,
    rounds: int,
    delta: float,
    rate: float = 1.0,
) -> float:
    """Returns ε after `rounds` rounds of a mechanism known by its δ(ε), users drawn at a rate.

    Sampling: `δ(1+v) = q δ₁(1 + v/q)`, for a δ₁ that holds for every replacement of one record
    (Balle, Barthe and Gaboardi 2018). Composition: as the accountants do (`composition`).

    Args:
        delta_at: δ₁ at ε >= 0, shape (K,) to (K,), an upper bound in both directions.
        grid: Where to read it, ε from 0, increasing, shape (K,).
        rounds: T >= 1.
        delta: δ in (0, 1).
        rate: q in (0, 1].
    """
    inner = np.asarray(grid, dtype=np.float64)
    profile = Profile.enveloping(
        np.log1p(rate * np.expm1(inner)), np.minimum(rate * delta_at(inner), 1.0)
    )
    if profile.is_trivial:
        return 0.0
    spread = profile.spread()
    mesh = max(dyadic_interval(spread), dyadic_interval(math.sqrt(rounds) * spread * 1e-3))
    composed = Composition([profile.discretised(mesh)], [count_block(rounds)], Target(delta=delta))
    return composed.epsilon((rounds,), delta)


def central_subsampled_gaussian(
    rate: float, noise_multiplier: float, rounds: int, delta: float
) -> float:
    """Returns ε of DP-SGD with a trusted server: dp_accounting's PLD accountant.

    One user added or removed, Poisson sampling at rate γ, Gaussian noise once on the sum.

    Args:
        rate: γ in (0, 1].
        noise_multiplier: Of the noise on the sum, over the clip norm, > 0.
        rounds: T >= 1.
        delta: δ in (0, 1).
    """
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if rate < 1.0:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    return float(pld.PLDAccountant().compose(event, rounds).get_epsilon(delta))


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another system's ε against rounds.

    Attributes:
        name: Its column in tables.
        epsilons: ε at each number of rounds asked for.
        covers: What it is the ε of, and why it is no guarantee for ours.
    """

    name: str
    epsilons: tuple[float, ...]
    covers: str


def peers(
    users: int, check_in_rate: float, noise_multiplier: float, rounds: Sequence[int], delta: float
) -> list[Peer]:
    """Returns other systems at the Gaussian's own ε₀, for a table; replace adjacency.

    ε₀ is that at which one Gaussian report is (ε₀, δ₀)-LDP, `δ₀ = δ/(8 T k)` with T the most
    rounds and k = ⌈nγ⌉ reports. The systems price an ε₀-LDP report of k users a round, a share
    k/n of all, so the numbers say what an analysis that knows only ε₀ gets; for Gaussian reports
    its own δ₀ would have to be added to δ, and is not.

    Args:
        users: n >= 1.
        check_in_rate: γ in (0, 1].
        noise_multiplier: z > 0, the noise over the clip norm.
        rounds: Numbers of rounds T >= 1.
        delta: δ in (0, 1).

    Raises:
        ValueError: A value outside its range.
    """
    validation.integer("users", users, 1)
    validation.real("check-in rate", check_in_rate, "(0, 1]")
    validation.real("noise multiplier", noise_multiplier, "(0, inf)")
    k = min(users, math.ceil(users * check_in_rate))
    rate = k / users
    delta0 = delta / (8.0 * max(rounds) * k)
    local = gaussian_epsilon(2.0 / noise_multiplier, delta0)
    if local > MAX_LOSS:
        raise ValueError(
            f"one report's ε₀ must be at most {MAX_LOSS:g} for other systems, got {local:.4g} at "
            f"noise multiplier {noise_multiplier:g}"
        )
    base = f"an ε₀ = {local:.3g} LDP report (the Gaussian's ε₀ at δ₀ = {delta0:.2g}), {k} a round"
    orders = np.unique(np.round(np.geomspace(2, 2048, 120)))
    with np.errstate(over="ignore"):
        if rate < 1.0:
            divergences = girgis_subsampled_rdp(rate, k, local, orders)
        else:
            divergences = girgis_rdp(k, local, orders)

    def by_rdp(count: int) -> float:
        return conversion.epsilon_from_rdp(orders, count * divergences, delta)[0]

    # One loss is about sqrt(2 e^{ε₀}/k) wide.
    width = min(local, 14.0 * math.sqrt((math.exp(min(local, 50.0)) + 1.0) / k))
    grid = np.unique(np.append(np.linspace(0.0, width, 500), np.linspace(width, local, 100)))

    def by_profile(delta_at: Callable[[FloatArray], FloatArray]) -> list[float]:
        read = delta_at(grid)
        return [composed_epsilon(lambda _: read, grid, count, delta, rate) for count in rounds]

    def response(adversary: Adversary) -> Callable[[FloatArray], FloatArray]:
        return lambda e: randomised_response_delta(k, 2, local, e, adversary)

    def made(name: str, epsilons: Iterable[float], covers: str) -> Peer:
        return Peer(name, tuple(float(value) for value in epsilons), covers)

    central = noise_multiplier * math.sqrt(k)
    event = ShuffledCheckInGaussianDpEvent(users, check_in_rate, noise_multiplier)
    return [
        made("girgis", map(by_rdp, rounds), f"Girgis et al. 2021, Rényi: {base}"),
        made(
            "clones",
            (ClonesAccountant().epsilon_after(event, delta, count) for count in rounds),
            "hiding among the clones, re-derived for Gaussian reports (docs/theory-clones.md): "
            "unlike the others here it holds for this system; crowd does too, mostly with less",
        ),
        made(
            "clones-2021",
            by_profile(lambda e: clones_delta(k, local, e)),
            f"Feldman et al. 2021 with the numerical accounting of Koskela et al.: {base}",
        ),
        made(
            "rr-strong",
            by_profile(response("strong")),
            f"shuffled binary randomised response, strong adversary: one bit, {base}",
        ),
        made(
            "rr-weak",
            by_profile(response("weak")),
            f"shuffled binary randomised response, weak adversary: one bit, {base}",
        ),
        made(
            "central",
            (central_subsampled_gaussian(check_in_rate, central, count, delta) for count in rounds),
            "a trusted server that adds the sum of the users' noise itself and shows only the sum; "
            "one user added or removed (dp_accounting's PLD accountant)",
        ),
    ]
