"""Other systems' bounds, for comparison tables only: no accountant uses them.

All but the trusted server price an ε₀-LDP randomiser. A Gaussian is only (ε₀, δ₀)-LDP, so for it
they are no guarantee. For LDP-SGD, whose reports are ε₀-LDP, `girgis` and `clones-2021` are one.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import pld

from shufl.accounting.numerics import FloatArray
from shufl.accounting.numerics.composition import Composition, Target, count_block
from shufl.accounting.numerics.gaussian import gaussian_epsilon
from shufl.accounting.numerics.loss_pmf import MAX_LOSS, Profile, dyadic_interval
from shufl.accounting.numerics.renyi import epsilon_from_rdp
from shufl.accounting.peers.girgis import girgis_rdp, girgis_subsampled_rdp
from shufl.accounting.peers.signs import Adversary, clones_delta, randomised_response_delta
from shufl.protocol.mechanisms import GaussianMechanism, LdpSgd


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
        "girgis": _girgis(rate, k, local, rounds, delta),
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


def _girgis(
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
