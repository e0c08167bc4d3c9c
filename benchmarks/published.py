"""Table 1 and Figure 1 of "Shuffle Gaussian Mechanism for Differential Privacy", recomputed.

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

from shufl.accounting import price
from shufl.accounting.numerics import renyi_divergence
from shufl.protocol import CheckIn, GaussianMechanism, Shuffled
from shufl.results.plots import draw, style_of
from shufl.results.tables import epsilon_text

USERS, SIGMA, LARGEST_ORDER = 60_000, 9.48, 30
RATE, TRAINING_SIGMA, ROUNDS = 0.1, 5.0, 5540
CLONES = {1: "0.186"}
OURS = {1: "0.22820", 3: "0.22821", 4: "0.22821", 6: "0.22822", 7: "0.22822"}
"""Two rows of Table 1 by the number of compositions, as far as they were copied from the paper."""

TEXT = """# The published numbers, recomputed

`python benchmarks/published.py docs/results` made this page, with numpy {numpy}, scipy {scipy}
and Python {python}. All is for zero-out adjacency. The paper analyses the homogeneous pair of
datasets, and of that are its numbers *Ours*, `theorem3`, `rdp` and `pld`; `crowd` and `local` hold
for every pair; `blanket` counts on blankets, of which there are none. See
[which accountant covers what](../accounting.md).

## Table 1: the shuffle Gaussian, γ = 1, n = 60 000, σ = 9.48, δ = 1 / n

Everybody reports. *Clones* and *Ours* are rows of the paper's table; a dash stands where we have
no copy of its number. At one composition the paper's *Clones* is below its *Ours*. *Ours* is a
bound on Rényi divergence with orders up to {order}; the next column has it recomputed. That limit
decides its value: `rdp` is the same bound with the orders that it allows, and `pld` the privacy
loss distribution without a bound on moments.

{table}

## Figure 1(a): the same over the number of compositions

![ε against compositions](published.svg)

{figure}

## The plan of Figure 1(b): γ = 0.1, n = 60 000, σ = 5, δ = 1 / n

All values are ours, up to the {rounds} rounds of [our run](figure-1b.md).

{training}
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


def spread(last: int) -> list[int]:
    """Nine numbers from 1 to the last, about equally far apart on a logarithmic axis."""
    return [round(last ** (step / 8)) for step in range(9)]


def priced(head: str, rounds: list[int], curves: dict[str, list[float | None]]) -> str:
    """A table of what `epsilons` gives."""
    rows = zip(rounds, *curves.values(), strict=True)
    return table([head, *curves], [[str(at), *map(epsilon_text, values)] for at, *values in rows])


def table_1() -> str:
    compositions = list(range(1, 8))
    bound = renyi_divergence.forward_moments(USERS, USERS, 1.0, SIGMA, LARGEST_ORDER)
    rdp = renyi_divergence.rdp_from_log_moments(bound)
    orders = np.arange(2, LARGEST_ORDER + 1)
    ours = epsilons(1.0, SIGMA, compositions)
    rows = [
        [
            str(count),
            CLONES.get(count, "–"),
            OURS.get(count, "–"),
            f"{compute_epsilon(orders, count * rdp, 1 / USERS)[0]:.5f}",
            *(epsilon_text(values[count - 1]) for values in ours.values()),
        ]
        for count in compositions
    ]
    recomputed = f"RDP, orders to {LARGEST_ORDER}"
    return table(["compositions", "*Clones*", "*Ours*", recomputed, *ours], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    compositions, rounds = spread(1000), spread(ROUNDS)
    curves = epsilons(1.0, SIGMA, compositions)
    with draw(folder / "published.svg") as axes:
        for name, values in curves.items():
            axes.plot(compositions, values, **style_of(name))
        for name, printed, marker in (("Clones", CLONES, "x"), ("Ours", OURS, "+")):
            at, told = list(printed), list(map(float, printed.values()))
            axes.plot(at, told, marker, color="gray", label=f"Table 1, {name}")
        axes.set(xscale="log", yscale="log", xlabel="compositions", ylabel="ε", title="Figure 1(a)")
    text = TEXT.format(
        numpy=np.__version__,
        scipy=scipy.__version__,
        python=platform.python_version(),
        order=LARGEST_ORDER,
        rounds=f"{ROUNDS:,}".replace(",", " "),
        table=table_1(),
        figure=priced("compositions", compositions, curves),
        training=priced("rounds", rounds, epsilons(RATE, TRAINING_SIGMA, rounds)),
    )
    (folder / "published.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
