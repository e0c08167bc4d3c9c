"""Table 1 and Figure 1(a) of "Shuffle Gaussian Mechanism for Differential Privacy", recomputed.

    python benchmarks/published.py docs/results

It writes published.md and published.svg there, in about a minute.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import numpy as np
import scipy
from dp_accounting.rdp import compute_epsilon

from shufl.accounting import CheckIn, GaussianMechanism, Shuffled, price
from shufl.accounting.numerics import renyi
from shufl.simulator.plots import draw, style_of
from shufl.simulator.tables import epsilon_text

USERS, SIGMA, LARGEST_ORDER = 60_000, 9.48, 30
RATE, FIGURE_SIGMA, ROUNDS = 0.1, 5.0, 5540
PRINTED = {1: "0.2282", 7: "0.22822"}  # the column "Ours" of Table 1
HALTED = "9.6"  # the end of Figure 1

TEXT = """# The published numbers, recomputed

`python benchmarks/published.py docs/results` made this page, with numpy {numpy}, scipy {scipy}
and Python {python}. All is for zero-out adjacency. The paper analyses the homogeneous pair of
datasets, and of that are the published numbers, `theorem3`, `rdp` and `pld`; `crowd` and `local`
hold for every pair; `blanket` counts on blankets, of which there are none. See
[which accountant covers what](../accounting.md).

## Table 1: everybody reports, n = 60 000, σ = 9.48, δ = 1 / n

The paper's numbers are its bound on Rényi divergence with orders up to 30; `rdp` is the same bound
with the orders that it allows, `pld` the privacy loss distribution without a bound on moments.

{table}

## Figure 1(a): γ = 0.1, n = 60 000, σ = 5, δ = 1 / n

The paper halts at ε = {halted} after 5 540 rounds.

![ε against rounds](published.svg)

{figure}
"""


def event(rate: float, sigma: float) -> Shuffled:
    return Shuffled(USERS, CheckIn(rate), GaussianMechanism(noise_multiplier=sigma))


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---:"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def epsilons(rate: float, sigma: float, rounds: list[int]) -> dict[str, list[float | None]]:
    """ε by each accountant that has one."""
    found: dict[str, list[float | None]] = {}
    for count in rounds:
        for row in price(event(rate, sigma), count, "zero-out", 1 / USERS):
            if row.epsilon is not None:
                found.setdefault(row.name, []).append(row.epsilon)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    compositions = list(range(1, 8))
    bound = renyi.shuffled_gaussian(USERS, SIGMA, LARGEST_ORDER)
    rdp = renyi.rdp_from_log_moments(bound)
    orders = np.arange(2, LARGEST_ORDER + 1)
    ours = epsilons(1.0, SIGMA, compositions)
    rows = [
        [
            str(count),
            PRINTED.get(count, "–"),
            f"{compute_epsilon(orders, count * rdp, 1 / USERS)[0]:.5f}",
            *(epsilon_text(values[count - 1]) for values in ours.values()),
        ]
        for count in compositions
    ]
    heads = ["compositions", "published", f"RDP, orders to {LARGEST_ORDER}", *ours]
    rounds = sorted({*(round(ROUNDS ** (step / 8)) for step in range(9))})
    curves = epsilons(RATE, FIGURE_SIGMA, rounds)
    with draw(folder / "published.svg") as axes:
        for name, values in curves.items():
            axes.plot(rounds, values, **style_of(name))
        axes.axhline(float(HALTED), color="gray", linestyle=":", label=f"published end, {HALTED}")
        axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="ε", title="Figure 1(a)")
    figure = [
        [str(count), *(epsilon_text(values[index]) for values in curves.values())]
        for index, count in enumerate(rounds)
    ]
    text = TEXT.format(
        numpy=np.__version__,
        scipy=scipy.__version__,
        python=platform.python_version(),
        table=table(heads, rows),
        figure=table(["rounds", *curves], figure),
        halted=HALTED,
    )
    (folder / "published.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
