"""What other systems of the literature published, recomputed beside the right values.

    python benchmarks/literature.py docs/results

It writes literature.md and literature.svg there, in some minutes. It needs
`pip install --group dev`.
"""

from __future__ import annotations

import argparse
import functools
import math
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import prv_accountant
import scipy
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy import optimize

from other_bounds import (
    girgis_lower_rdp,
    girgis_simple_rdp,
    of_any,
    of_laplace,
    of_response,
    poisson_sampled_rdp,
    strong_composition,
    variation_ratio_delta,
)
from shufl.accounting import ADJACENCIES, CrowdAccountant, PldAccountant
from shufl.accounting.numerics.gaussian_divergence import gaussian_epsilon
from shufl.accounting.numerics.renyi_divergence import epsilon_from_rdp
from shufl.accounting.peers.comparisons import (
    blanket_share,
    clones_delta,
    composed_epsilon,
    girgis_rdp,
    girgis_subsampled_rdp,
    randomised_response_delta,
)
from shufl.protocol import CheckIn, GaussianMechanism, RandomisedResponse, Shuffled
from shufl.results.plots import draw

ORDERS = np.arange(2.0, 400.0)

TEXT = """# The other systems of the literature

`python benchmarks/literature.py docs/results` made this page, with numpy {numpy}, scipy {scipy}
and Python {python}. What is published stands as it was printed, or as the authors' code prints it;
where it is wrong, the right value stands beside it. All of ours are upper bounds, up to 0.5 % above
the right value. ε₀ is that of one purely local report.

## Rényi bounds of shuffled reports (Girgis et al. 2021) against composed clones

n = 10⁶ reports a round, ε₀ = 0.5, T = 10⁵ rounds. The abstract says that strong composition of the
clones bound (Feldman et al. 2021) is about 8 times larger. The factor grows as δ falls; it does not
reach 8 here. The lower bound is what such reports can really cost. To compose the clones' privacy
loss distribution, instead of its (ε, δ), is better than all of these bounds.

{girgis}

With Poisson sampling, ε₀ = 3, n = 10⁶, T = 10⁴ the abstract says at least 10 times, but neither γ
nor δ. At δ = 10⁻⁸:

{sampled}

## Numerical composition of clones (Koskela et al.)

n = 10⁴, ε₀ = 4, the pair of 2022: ε at the δ of the paper's Figure 1. The pair of 2021 beside it.

{koskela}

Subsampled: 10³ of 10⁵ users a round, ε₀ = 3, δ = 10⁻⁵. The published code has a wrong step width,
so that its ε is linear in T: too small for few rounds, and far too large for many. Ours holds for
every replacement of one record (Balle, Barthe and Gaboardi 2018). Girgis is the bound with the
whole of its rare term; the published code halves a factor in it, and says 2 to 7 % less.

{subsampled}

## Shuffled randomised response (Balle et al. 2019, Koskela et al.)

n = 1 000, k = 4, γ = 0.25, so ε₀ = {local:.4f}. The weak adversary knows the others' values, the
strong one also who sent a uniform one. The published code for the strong one takes the user's own
report to be none of these, which is a bound; with probability γ it is one, and loses nothing. The
published code for the weak one takes B blankets where there are B + 1: too large by a thousandth.
*Right* is the exact value of either, which enumeration for n ≤ 4 confirms.

{response}

The pair made for k-ary randomised response in 2022 is no bound for k ≥ 4: for n = 5, k = 4,
e^ε₀ = 7 and e^ε = 1.6 it gives δ = 0.327852, but enumeration of all datasets in fractions gives
0.32796. Ours, for the weak adversary, who is given more: {enumerated:.5f}.

## The variation ratio (Wang et al. 2024)

One round of n reports. Their code searches between a lower and an upper value; *ours* is their
pair, summed without a search's error. For k-ary randomised response `crowd` stands beside it, which
holds for every pair of datasets. The pair with the largest variation is that of the clones of 2022.

{variation}

## Central DP-SGD (Gopi et al. 2021)

Noise on the sum, Gaussian with Poisson sampling at rate q or Laplace, one record added or removed.
PRV is their own program, `prv-accountant`, asked for bounds within 0.01 of its estimate; PLD is
that of `dp-accounting`. RDP says more than the truth, and the Gaussian limit (GDP) of many rounds
less: it is no bound.

{central}

## The shuffled Gaussian, tight

One round in which all n users report (zero-out, σ = 2): δ(0.3) by Monte Carlo with 4·10⁶ draws as
Koskela et al. have it for few users, and by `pld`, which takes any number of them.

![δ against ε](literature.svg)

{gaussian}
"""


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---:"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def one_round(delta_at: Callable[[np.ndarray], np.ndarray], local: float, delta: float) -> float:
    """ε of one round at δ."""
    return optimize.brentq(lambda e: delta_at(np.array([e]))[0] - delta, 0.0, local * (1 - 1e-9))


def grid(local: float, reports: int) -> np.ndarray:
    width = min(local, 14.0 * math.sqrt((math.exp(local) + 1.0) / reports))
    return np.unique(np.append(np.linspace(0, width, 600), np.linspace(width, local, 100)))


def by_rdp(divergences: np.ndarray, delta: float) -> float:
    return epsilon_from_rdp(ORDERS, divergences, delta)[0]


def clones_of(reports: int, local: float, year: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda e: clones_delta(reports, local, e, year)


def girgis_rows() -> list[list[str]]:
    n, local, rounds = 10**6, 0.5, 10**5
    places = grid(local, n)
    rows = []
    for delta in (1e-4, 1e-6, 1e-8, 1e-12, 1e-16, 1e-24):
        one = one_round(clones_of(n, local, 2021), local, delta / (2 * rounds))
        composed = strong_composition(one, rounds, delta / 2)
        first, second, least = (
            by_rdp(rounds * bound(n, local, ORDERS), delta)
            for bound in (girgis_rdp, girgis_simple_rdp, girgis_lower_rdp)
        )
        pld = [
            composed_epsilon(clones_of(n, local, year), places, rounds, delta)
            for year in (2021, 2022)
        ]
        values = composed, first, second, least, *pld
        rows.append([f"{delta:.0e}", *(f"{v:.3f}" for v in values), f"{composed / first:.2f}"])
    return rows


def sampled_rows() -> list[list[str]]:
    n, local, rounds, delta = 10**6, 3.0, 10**4, 1e-8
    rows = []
    for rate in (1e-3, 1e-2, 1e-1):
        k = round(rate * n)
        fixed = rounds * girgis_subsampled_rdp(rate, k, local, ORDERS)
        poisson = rounds * poisson_sampled_rdp(rate, girgis_rdp(k, local, ORDERS))
        inner = one_round(clones_of(k, local, 2021), local, delta / (2 * rounds * rate))
        sampled = math.log1p(rate * math.expm1(inner))
        composed = strong_composition(sampled, rounds, delta / 2)
        pld = composed_epsilon(clones_of(k, local, 2022), grid(local, k), rounds, delta, rate)
        least = by_rdp(poisson, delta)
        found = composed, least, by_rdp(fixed, delta), pld
        values = *(f"{each:.3f}" for each in found), f"{composed / least:.2f}"
        rows.append([f"{rate:g}", *values])
    return rows


def koskela_rows() -> list[list[str]]:
    n, local = 10**4, 4.0
    published = [
        (1, 2.5586137e-4, 0.252542),
        (2, 1.3225330e-4, 0.405085),
        (4, 2.5370775e-4, 0.557628),
    ]
    rows = []
    for rounds, delta, epsilon in published:
        found = [
            composed_epsilon(clones_of(n, local, year), grid(local, n), rounds, delta)
            for year in (2022, 2021)
        ]
        rows.append([str(rounds), f"{delta:.4g}", f"{epsilon:.4f}", *(f"{e:.4f}" for e in found)])
    return rows


def subsampled_rows() -> list[list[str]]:
    n, k, local, delta = 10**5, 10**3, 3.0, 1e-5
    printed = {10: "0.0051", 100: "–", 1000: "0.512", 10000: "5.114"}
    right = {10: "0.0170", 100: "0.0595", 1000: "0.2090", 10000: "0.7328"}
    divergences = girgis_subsampled_rdp(k / n, k, local, ORDERS)
    rows = []
    for rounds in printed:
        ours = composed_epsilon(clones_of(k, local, 2022), grid(local, k), rounds, delta, k / n)
        rdp = by_rdp(rounds * divergences, delta)
        rows.append([str(rounds), printed[rounds], right[rounds], f"{ours:.4f}", f"{rdp:.3f}"])
    return rows


def response_rows(local: float) -> list[list[str]]:
    n, k = 1000, 4
    printed = {
        (1, 1e-4): ("0.54733", "0.53076", "0.38952", "0.38906"),
        (4, 1e-4): ("–", "1.07404", "0.84319", "0.84222"),
        (16, 1e-4): ("2.58666", "2.25517", "1.84969", "1.84752"),
        (1, 10**-5.5): ("–", "0.71472", "0.51914", "0.51854"),
        (4, 10**-5.5): ("1.49809", "1.40455", "1.08451", "1.08329"),
        (16, 10**-5.5): ("–", "2.83817", "2.31187", "2.30925"),
    }
    places, share = grid(local, n), blanket_share(k, local)
    rows = []
    for (rounds, delta), known in printed.items():
        found = [
            composed_epsilon(profile, places, rounds, delta)
            for profile in (
                lambda e: (1 - share) * randomised_response_delta(n, k, local, e, "strong"),
                lambda e: randomised_response_delta(n, k, local, e, "weak"),
                clones_of(n, local, 2022),
            )
        ]
        strong, weak, clones = (f"{e:.5f}" for e in found)
        cells = *known[:2], strong, *known[2:], weak, clones
        rows.append([str(rounds), f"{delta:.2g}", *cells])
    return rows


def root(profile: Callable[[list[float]], np.ndarray], delta: float, local: float) -> float:
    """ε at δ of one round, below ε₀."""
    return optimize.brentq(
        lambda e: math.log(float(profile([e])[0]) / delta), 0.0, 0.999 * local, xtol=1e-12
    )


def variation_rows() -> list[list[str]]:
    published = {
        ("response", 10, 10_000, 1.0, 1e-6): (0.023251676931977272, 0.02325186599045992),
        ("response", 3, 10_000, 1.0, 1e-6): (0.037998056039214134, 0.037998344749212265),
        ("response", 10, 100_000, 2.0, 1e-7): (0.027144750580191612, 0.027161289006471634),
        ("response", 10, 10_000, 3.0, 1e-6): (0.18975073378533125, 0.18975192960351706),
        ("laplace", None, 10_000, 1.0, 1e-6): (0.039616892114281654, 0.03961719200015068),
        ("laplace", None, 100_000, 2.0, 1e-7): (0.035080792382359505, 0.03510160930454731),
        ("laplace", None, 10_000, 3.0, 1e-6): (0.20798664260655642, 0.20798794459551573),
        ("any", None, 10_000, 3.0, 1e-6): (0.22607897780835629, 0.22608039155602455),
    }
    names = {"laplace": "Laplace", "any": "largest variation"}
    rows = []
    for (mechanism, k, n, local, delta), known in published.items():
        make = of_laplace if mechanism == "laplace" else of_any
        pair = functools.partial(
            variation_ratio_delta, n, *(of_response(k, local) if k else make(local))
        )
        ours, all_pairs = root(pair, delta, local), "–"
        if k:
            event = Shuffled(n, CheckIn(1.0), RandomisedResponse(categories=k, local_epsilon=local))
            all_pairs = f"{CrowdAccountant().epsilon_after(event, delta, 1):.6f}"
        name = f"randomised response, k = {k}" if k else names[mechanism]
        about = name, f"{n:,}", f"{local:g}", f"{delta:.0e}"
        rows.append([*about, *(f"{e:.6f}" for e in (*known, ours)), all_pairs])
    return rows


Central = list[
    tuple[
        dp_event.DpEvent,
        privacy_loss_distribution.PrivacyLossDistribution,
        prv_accountant.PrivacyRandomVariable,
        int,
    ]
]
"""A mechanism, its privacy loss from below, the same for `prv-accountant`, and how often."""


def gaussian(rate: float, sigma: float, steps: int) -> Central:
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    least = privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        pessimistic_estimate=False,
        sampling_prob=rate,
        use_connect_dots=False,
        value_discretization_interval=2e-6,
    )
    variable = prv_accountant.PoissonSubsampledGaussianMechanism(rate, sigma)
    return [(event, least, variable, steps)]


def laplace(scale: float, steps: int) -> Central:
    least = privacy_loss_distribution.from_laplace_mechanism(
        scale,
        pessimistic_estimate=False,
        use_connect_dots=False,
        value_discretization_interval=2e-6,
    )
    variable = prv_accountant.LaplaceMechanism(1 / scale)
    return [(dp_event.LaplaceDpEvent(scale), least, variable, steps)]


def central_rows() -> list[list[str]]:
    rows = []
    for rate, sigma, steps, delta, estimate in [
        (0.01, 1.0, 1000, 1e-5, "1.8282"), (0.004, 0.8, 1000, 1e-7, "2.0859"),
        (0.01, 4.0, 10000, 1e-5, "0.9469"), (0.001, 0.8, 10000, 1e-6, "0.9472"),
    ]:  # fmt: skip
        gdp = gaussian_epsilon(rate * math.sqrt(steps * math.expm1(sigma**-2)), delta)
        name = f"Gaussian, q = {rate:g}, σ = {sigma:g}, T = {steps}"
        found = central_epsilons(gaussian(rate, sigma, steps), delta)
        rows.append([name, f"{delta:.0e}", estimate, *found, f"{gdp:.4f}"])
    for name, mechanisms, delta, estimate in [
        ("Laplace, scale 1, T = 10", laplace(1.0, 10), 1e-5, "9.9874"),
        ("Laplace, scale 10, T = 100", laplace(10.0, 100), 1e-6, "4.6971"),
        (
            "Gaussian, q = 0.01, σ = 1, T = 500, and Laplace, scale 10, T = 50",
            gaussian(0.01, 1.0, 500) + laplace(10.0, 50), 1e-5, "3.1353",
        ),
    ]:  # fmt: skip
        rows.append([name, f"{delta:.0e}", estimate, *central_epsilons(mechanisms, delta), "–"])
    return rows


def central_epsilons(mechanisms: Central, delta: float) -> list[str]:
    """From below and from above by PRV and by privacy loss distributions, and by RDP."""
    *_, variables, counts = zip(*mechanisms, strict=True)
    errors = {"eps_error": 0.01, "delta_error": delta / 1000}
    prv = prv_accountant.PRVAccountant(variables, max_self_compositions=counts, **errors)
    prv_lower, _, prv_upper = prv.compute_epsilon(delta, counts)
    accountants = PLDAccountant(), RdpAccountant()
    lower = None
    for event, least, _, count in mechanisms:
        for accountant in accountants:
            accountant.compose(event, count)
        several = least.self_compose(count)
        lower = several if lower is None else lower.compose(several)
    assert lower is not None
    upper, rdp = (accountant.get_epsilon(delta) for accountant in accountants)
    least = lower.get_epsilon_for_delta(delta)
    return [f"{epsilon:.4f}" for epsilon in (prv_lower, prv_upper, least, upper, rdp)]


def likelihood_ratios(users: int, sigma: float, draws: int) -> np.ndarray:
    """p/q at draws from q, where one user's report of 1 became one of 0 as all others'."""
    random, total = np.random.default_rng(users), np.zeros(draws)
    for _ in range(users):
        total += np.exp(random.normal(size=draws) / sigma - 0.5 / sigma**2)
    return total / users


def shuffled_gaussian(folder: Path) -> list[list[str]]:
    sigma, draws, shown = 2.0, 4_000_000, [0.05, 0.1, 0.2, 0.3, 0.5, 0.8]
    accountants = {}
    for users in (*range(1, 8), 100, 10**4, 10**6):
        accountants[users] = PldAccountant(ADJACENCIES["zero-out"])
        mechanism = GaussianMechanism(noise_multiplier=sigma)
        accountants[users].compose(Shuffled(users, CheckIn(1.0), mechanism))
    rows = []
    with draw(folder / "literature.svg") as axes:
        for users, accountant in accountants.items():
            monte_carlo = "–"
            if users <= 7:
                ratio, points = likelihood_ratios(users, sigma, draws), []
                for epsilon in shown:
                    alpha = math.exp(epsilon)
                    sides = np.maximum(ratio - alpha, 0.0), np.maximum(1.0 - alpha * ratio, 0.0)
                    best = max(sides, key=np.mean)
                    points.append(float(best.mean()))
                    if epsilon == 0.3:
                        error = 2.0 * float(best.std()) / math.sqrt(draws)
                        monte_carlo = f"{points[-1]:.5f} ± {error:.5f}"
                axes.plot(shown, points, "x", color="black")
            delta, at = accountant.get_delta(0.3), accountant.get_epsilon(1e-6)
            tight = f"{delta:.5f}" if delta > 1e-5 else "below 1e-5"
            rows.append([f"{users:,}", monte_carlo, tight, f"{at:.4g}"])
            if users in (1, 2, 4, 7, 100, 10**4, 10**6):
                epsilons = np.geomspace(at / 300, at, 60)
                deltas = [accountant.get_delta(float(each)) for each in epsilons]
                axes.plot(epsilons, deltas, markevery=0.1, label=f"n = {users:,}")
        axes.set(xscale="log", yscale="log", xlabel="ε", ylabel="δ", title="σ = 2; ×: Monte Carlo")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    local = math.log(((1 - 0.25) * 4 + 0.25) / 0.25)
    weak = randomised_response_delta(5, 4, math.log(7.0), [math.log(1.6)], "weak")
    text = TEXT.format(
        numpy=np.__version__,
        scipy=scipy.__version__,
        python=platform.python_version(),
        local=local,
        enumerated=float(weak[0]),
        girgis=table(
            ["δ", "clones, strong composition", "Girgis, first bound", "second bound",
             "lower bound", "clones 2021, PLD", "clones 2022, PLD", "factor"],
            girgis_rows(),
        ),
        sampled=table(
            ["γ", "clones, strong composition", "Girgis, Poisson", "Girgis, fixed size",
             "clones 2022, PLD", "factor"],
            sampled_rows(),
        ),
        koskela=table(["T", "δ", "published ε", "ε", "ε, pair of 2021"], koskela_rows()),
        subsampled=table(["T", "published", "right", "ours", "Girgis"], subsampled_rows()),
        response=table(
            ["T", "δ", "strong, published", "right", "ours",
             "weak, published", "right", "ours", "clones 2022"],
            response_rows(local),
        ),
        variation=table(
            ["report", "n", "ε₀", "δ", "published, lower", "upper", "ours", "crowd"],
            variation_rows(),
        ),
        central=table(
            ["mechanism", "δ", "published", "PRV, lower", "PRV, upper", "PLD, lower",
             "PLD, upper", "RDP", "GDP"],
            central_rows(),
        ),
        gaussian=table(
            ["n", "δ(0.3), Monte Carlo", "δ(0.3), pld", "ε at δ = 1e-6, pld"],
            shuffled_gaussian(folder),
        ),
    )  # fmt: skip
    (folder / "literature.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
