"""Other systems' bounds, for comparison tables only: no accountant uses them.

All but the trusted server price an ε₀-LDP randomiser. A Gaussian is only (ε₀, δ₀)-LDP, so for it
they are no guarantee. For LDP-SGD, whose reports are ε₀-LDP, `girgis` and `clones-2021` are one.

Clones and randomised response are sums of fair signs. A user's own report hides among
B ~ Bin(n-1, p) others, so that m = B + 1 are seen. For every f, `E[f(m)] = E[K f(K)]/(np)` with
K ~ Bin(n, p). So each δ, which averages a mean of m signs over m, is a sum of K signs, and
`numerics.sign_sum` bounds that from above. It holds in both directions.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import pld
from scipy import special

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.composition import Composition, Target, count_block
from shufl.accounting.numerics.gaussian_divergence import gaussian_epsilon
from shufl.accounting.numerics.jump_counts import TermsCount
from shufl.accounting.numerics.loss_pmf import MAX_LOSS, Profile, dyadic_interval
from shufl.accounting.numerics.moments import log_expm1
from shufl.accounting.numerics.renyi_divergence import epsilon_from_rdp
from shufl.accounting.numerics.sign_sum import positive_parts
from shufl.protocol.mechanisms import GaussianMechanism, LdpSgd

# Beyond this ε, 1 - c has few digits left; the profile may stay constant instead.
_MOST_EPSILON = 20.0

Adversary = Literal["strong", "weak"]


def over_clones(reports: int, local_epsilon: float) -> int:
    """Returns n̄ = ⌊(n - 1)/(2 e^{ε₀})⌋ + 1."""
    return math.floor((reports - 1) / 2.0 * math.exp(-local_epsilon)) + 1


def log_binomial(order: float, k: FloatArray) -> FloatArray:
    """Returns log C(λ, k)."""
    divided = special.gammaln(k + 1.0) + special.gammaln(order - k + 1.0)
    return np.asarray(special.gammaln(order + 1.0) - divided)


def girgis_rdp(reports: int, local_epsilon: float, orders: npt.ArrayLike) -> FloatArray:
    """Returns ε(λ) of n shuffled ε₀-LDP reports (Girgis et al. 2021, the upper bound).

    With n̄ of `over_clones`: `1/(λ-1) log(1 + C(λ,2) (e^{ε₀}-1)²/(n̄ e^{ε₀})
    + Σ_{i>=3} C(λ,i) i Γ(i/2) ((e^{2ε₀}-1)²/(2 e^{2ε₀} n̄))^{i/2} + e^{ε₀λ - (n-1)/(8e^{ε₀})})`.

    n >= 1, ε₀ > 0 of one report, and integers λ >= 2 of shape (K,).
    """

    def log_rare(order: float) -> float:
        return local_epsilon * order

    return _girgis(reports, local_epsilon, orders, (0.0, -math.log(2.0)), log_rare)


def girgis_subsampled_rdp(
    rate: float, reports: int, local_epsilon: float, orders: npt.ArrayLike
) -> FloatArray:
    """Returns ε(λ) of k shuffled ε₀-LDP reports, users sampled at rate γ (Girgis et al. 2021).

    With k̄ of `over_clones`: `1/(λ-1) log(1 + 4 C(λ,2) γ² (e^{ε₀}-1)²/(k̄ e^{ε₀})
    + Σ_{j>=3} C(λ,j) γ^j j Γ(j/2) (2 (e^{2ε₀}-1)²/(k̄ e^{2ε₀}))^{j/2} + Υ)`,
    `Υ = ((1+γu)^λ - 1 - λγu) e^{-(k-1)/(8e^{ε₀})}`, `u = e^{ε₀} - e^{-ε₀}`, the most
    by which a density ratio is off 1. (Published code has u/2, which nothing justifies.)

    γ in (0, 1], k >= 1, ε₀ > 0 of one report, and integers λ >= 2 of shape (K,).
    """
    log_u = log_expm1(2.0 * local_epsilon) - local_epsilon + math.log(rate)

    def log_rare(order: float) -> float:  # (1+x)^λ - 1 - λx = Σ_{j>=2} C(λ, j) x^j
        powers = np.arange(2.0, order + 1.0)
        return float(special.logsumexp(log_binomial(order, powers) + powers * log_u))

    squared = 2.0 * math.log(rate)
    factors = math.log(4.0) + squared, math.log(2.0) + squared
    return _girgis(reports, local_epsilon, orders, factors, log_rare)


def _girgis(
    reports: int,
    local_epsilon: float,
    orders: npt.ArrayLike,
    log_factors: tuple[float, float],
    log_rare: Callable[[float], float],
) -> FloatArray:
    """Both of the above: the factors of the second term and of the powers, and the last term."""
    checked: FloatArray = np.asarray(orders, dtype=np.float64)
    log_clones = math.log(over_clones(reports, local_epsilon))
    pair = log_factors[0] + 2.0 * log_expm1(local_epsilon) - local_epsilon - log_clones
    power = log_factors[1] + 2.0 * log_expm1(2.0 * local_epsilon) - 2.0 * local_epsilon - log_clones
    few = (reports - 1) / 8.0 * math.exp(-local_epsilon)
    result = np.empty_like(checked)
    for at, order in enumerate(checked):
        i = np.arange(2.0, order + 1.0)
        terms = log_binomial(order, i) + np.log(i) + special.gammaln(i / 2.0) + i / 2.0 * power
        terms[0] = log_binomial(order, i[:1])[0] + pair
        excess = special.logsumexp(np.append(terms, log_rare(order) - few))
        result[at] = np.logaddexp(0.0, excess) / (order - 1.0)
    return result


def clones_delta(
    reports: int,
    local_epsilon: float,
    epsilons: npt.ArrayLike,
    year: Literal[2021, 2022] = 2021,
) -> FloatArray:
    """Returns δ(ε) of k shuffled reports of an ε₀-LDP randomiser (Feldman, McMillan, Talwar).

    Every other user's report is, with probability p = e^{-ε₀}, a clone of the differing user's;
    what is left to see is how many of m = C + 1 coins fell heads, C ~ Bin(k-1, p), all fair but one
    of odds e^{ε₀} (Koskela et al. 2021). In the analysis of 2022 ("Stronger privacy amplification
    by shuffling"), which is by its erratum for some randomisers only, p is 2/(e^{ε₀}+1). With W_m
    the mean of m signs

        δ(α) = (1 + α) t E[(W_m - c)_+],   t = tanh(ε₀/2),   c = (α - 1) / ((α + 1) t).

    k >= 1, ε₀ > 0, and ε >= 0 of shape (K,); δ is constant from ε = 20 on, and 0 from ε₀ on.
    """
    share = math.exp(-local_epsilon)
    if year == 2022:
        share = 2.0 * share / (1.0 + share)
    asked = np.asarray(epsilons, dtype=np.float64)
    t = math.tanh(min(local_epsilon, 700.0) / 2.0)
    v = np.expm1(np.minimum(asked, _MOST_EPSILON))
    level = np.maximum(v / ((v + 2.0) * t) - 1e-15, 0.0)
    none = np.zeros_like(v)
    calls = positive_parts(-level, np.ones_like(v), none, none, TermsCount(reports, share))
    found = (v + 2.0) * (t * (1.0 + 1e-12)) * calls / (reports * share)
    return np.where(asked >= local_epsilon, 0.0, np.minimum(found, 1.0))


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

    This is the hockey-stick divergence itself. The published analyses of the strong adversary take
    P[loss >= ε], which is larger.

    n >= 1, k >= 2, ε₀ > 0 of one report, and ε >= 0 of shape (K,).
    """
    share, near = blanket_share(categories, local_epsilon), 2.0 / categories
    own = share if adversary == "weak" else 0.0
    asked = np.asarray(epsilons, dtype=np.float64)
    falls, swing = np.expm1(asked), (1.0 - own) / near
    count = TermsCount(reports, share * near, share * (1.0 - near))
    found = positive_parts(
        -falls * (own + swing), swing * (2.0 + falls), np.zeros_like(falls), own * falls, count
    )
    result = np.minimum(found / (reports * share), 1.0)
    if adversary == "weak":  # who sees no more than the reports themselves, each ε₀-LDP
        result[asked >= local_epsilon] = 0.0
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

    `delta_at` gives δ₁ at ε >= 0, shape (K,) to (K,), an upper bound in both directions. It is read
    on `grid`, increasing from ε = 0, of shape (K,). q lies in (0, 1].
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

    One user added or removed, Poisson sampling at rate γ, Gaussian noise once on the sum:
    `noise_multiplier` is that of the sum's noise, over the clip norm.
    """
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    if rate < 1.0:
        event = dp_accounting.PoissonSampledDpEvent(rate, event)
    return float(pld.PLDAccountant().compose(event, rounds).get_epsilon(delta))


@dataclasses.dataclass(frozen=True)
class Peer:
    """Another system's ε at each number of rounds, and what it is the ε of."""

    name: str
    epsilons: tuple[float, ...]
    covers: str


def peers(
    users: int,
    check_in_rate: float,
    mechanism: GaussianMechanism | LdpSgd,
    rounds: Sequence[int],
    delta: float,
) -> list[Peer]:
    """Returns other systems at the ε₀ of a mechanism's report, for a table; replace adjacency.

    For Gaussian noise ε₀ is that at which one report is (ε₀, δ₀)-LDP, `δ₀ = δ/(8 T k)` with T the
    most rounds and k = ⌈nγ⌉ reports. The systems price an ε₀-LDP report of k users a round, a share
    k/n of all, so the numbers say what an analysis that knows only ε₀ gets; for Gaussian reports
    its own δ₀ would have to be added to δ, and is not.

    Raises:
        ValueError: ε₀ is beyond what can be computed.
    """
    noise = mechanism.noise_multiplier
    if not noise > 0.0:
        raise ValueError(f"other systems price no report without noise, got {noise:g}")
    k = min(users, math.ceil(users * check_in_rate))
    rate = k / users
    if isinstance(mechanism, LdpSgd):
        local, why = mechanism.local_epsilon, "LDP-SGD's"
    else:
        delta0 = delta / (8.0 * max(rounds) * k)
        local = gaussian_epsilon(2.0 / noise, delta0)
        why = f"the Gaussian's ε₀ at δ₀ = {delta0:.2g}"
    if not 0.0 < local <= MAX_LOSS:
        raise ValueError(
            f"one report's ε₀ must lie in (0, {MAX_LOSS:g}] for other systems, got {local:.4g} at "
            f"noise multiplier {noise:g}"
        )
    grid = _grid(k, local)

    def by_profile(delta_at: Callable[[FloatArray], FloatArray]) -> list[float]:
        read = delta_at(grid)
        return [composed_epsilon(lambda _: read, grid, count, delta, rate) for count in rounds]

    def response(adversary: Adversary) -> list[float]:
        return by_profile(lambda e: randomised_response_delta(k, 2, local, e, adversary))

    sum_noise = noise * math.sqrt(k)
    found = {
        "girgis": _girgis_epsilons(rate, k, local, rounds, delta),
        "clones-2021": by_profile(lambda e: clones_delta(k, local, e)),
        "clones-2022": by_profile(lambda e: clones_delta(k, local, e, 2022)),
        "rr-strong": response("strong"),
        "rr-weak": response("weak"),
        "central": [
            central_subsampled_gaussian(check_in_rate, sum_noise, count, delta) for count in rounds
        ],
    }
    base = f"an ε₀ = {local:.3g} LDP report ({why}), {k} a round"
    return [
        Peer(name, tuple(map(float, epsilons)), _COVERS[name].format(base=base))
        for name, epsilons in found.items()
    ]


_COVERS = {
    "girgis": "Girgis et al. 2021, Rényi: {base}",
    "clones-2021": "Feldman et al. 2021 with the numerical accounting of Koskela et al.: {base}",
    "clones-2022": "Feldman et al. 2022, likewise, also the variation-ratio pair of Wang et al. "
    "2024; by the erratum for some randomisers only: {base}",
    "rr-strong": "shuffled binary randomised response, strong adversary: one bit, {base}",
    "rr-weak": "shuffled binary randomised response, weak adversary: one bit, {base}",
    "central": "a trusted server that adds the sum of the users' noise itself and shows only the "
    "sum; one user added or removed (dp_accounting's PLD accountant)",
}


def _girgis_epsilons(
    rate: float, reports: int, local_epsilon: float, rounds: Sequence[int], delta: float
) -> list[float]:
    orders = np.unique(np.round(np.geomspace(2, 2048, 120)))
    with np.errstate(over="ignore"):
        if rate < 1.0:
            divergences = girgis_subsampled_rdp(rate, reports, local_epsilon, orders)
        else:
            divergences = girgis_rdp(reports, local_epsilon, orders)
    return [epsilon_from_rdp(orders, count * divergences, delta)[0] for count in rounds]


def _grid(reports: int, local_epsilon: float) -> FloatArray:
    """Where to read the profile of a round: one loss is about sqrt(2 e^{ε₀}/k) wide."""
    spread = math.sqrt((math.exp(min(local_epsilon, 50.0)) + 1.0) / reports)
    width = min(local_epsilon, 14.0 * spread)
    points = np.append(np.linspace(0.0, width, 500), np.linspace(width, local_epsilon, 100))
    return np.unique(points)
