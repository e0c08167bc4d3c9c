"""Does ε ever rise when a plan becomes a little safer, and how long does the first answer take?

Random plans are priced, and priced again with one value a little safer: more noise, more blankets,
a larger δ or a round less. `python benchmarks/accounting_order.py --plans 10000` takes hours.
"""

import argparse
import math
import time
from collections import defaultdict

import attrs
import numpy as np
from rich.table import Table

from shufl import accounting
from shufl.accounting import ADJACENCIES
from shufl.accounting.accountants.base import ShuffleAccountant
from shufl.protocol import CheckIn, GaussianMechanism, Shuffled
from shufl.protocol.console import Console

NAMES = "theorem3", "rdp", "pld", "crowd", "blanket", "local"


def random_plan(rng: np.random.Generator) -> tuple[Shuffled, int, float, str]:
    """n to 10⁹, z from 0.2, λ to 10⁷, T to 10⁶, δ from 1e-15."""
    users = int(10 ** rng.uniform(0, 9))
    rate = 1.0 if rng.random() < 0.2 else float(10 ** rng.uniform(-3, 0))
    noise = float(0.2 * 100 ** rng.uniform(0, 1))
    blankets = float(10 ** rng.uniform(-2, 7))
    event = Shuffled(users, CheckIn(rate), GaussianMechanism(noise_multiplier=noise), blankets)
    rounds = int(10 ** rng.uniform(0, 6))
    return event, rounds, float(10 ** rng.uniform(-15, -4)), str(rng.choice([*ADJACENCIES]))


def safer(event: Shuffled, rounds: int, delta: float) -> dict[str, tuple[Shuffled, int, float]]:
    """The same plan with one value a little safer."""
    noise = 1.01 * event.mechanism.noise_multiplier
    more = attrs.evolve(event, mechanism=GaussianMechanism(noise_multiplier=noise))
    return {
        "noise": (more, rounds, delta),
        "blankets": (attrs.evolve(event, blankets=1.05 * event.blankets), rounds, delta),
        "delta": (event, rounds, 1.1 * delta),
        "rounds": (event, max(rounds - 1, 1), delta),
    }


def epsilon(name: str, adjacency: str, event: Shuffled, rounds: int, delta: float) -> float:
    """ε by one accountant."""
    accountant: ShuffleAccountant = accounting.make_accountant(name, adjacency)
    if name != "blanket":
        event = attrs.evolve(event, blankets=0.0)
    return accountant.compose(event, rounds).get_epsilon(delta)


def shown(event: Shuffled, rounds: int, delta: float, adjacency: str) -> str:
    """A plan in one line."""
    numbers = {
        "n": event.users, "γ": event.chance, "z": event.mechanism.noise_multiplier,
        "λ": event.blankets, "T": rounds, "δ": delta,
    }  # fmt: skip
    return ", ".join([*(f"{name} {number:.6g}" for name, number in numbers.items()), adjacency])


def main() -> None:
    """Prints the largest rise of each accountant by each value, and its slowest first answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    rng = np.random.default_rng(given.seed)
    rises: dict[tuple[str, str], tuple[float, str]] = defaultdict(lambda: (0.0, ""))
    times: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for _ in range(given.plans):
        event, rounds, delta, adjacency = random_plan(rng)
        for name in given.only:
            begun = time.process_time()
            before = epsilon(name, adjacency, event, rounds, delta)
            spent = time.process_time() - begun
            times[name].append((spent, shown(event, rounds, delta, adjacency)))
            if not 0.0 < before < math.inf:
                continue
            for value, changed in safer(event, rounds, delta).items():
                if value == "blankets" and name != "blanket":
                    continue
                rise = epsilon(name, adjacency, *changed) / before - 1.0
                known = rises[name, value]
                rises[name, value] = max(known, (rise, times[name][-1][1]), key=lambda e: e[0])
    table = Table("accountant", "value", "largest rise of ε", "where")
    for (name, value), (rise, where) in rises.items():
        table.add_row(name, value, f"{max(rise, 0.0):.2g}", where if rise > 1e-9 else "")
    console = Console(width=160)
    console.print(table)
    table = Table("accountant", "median s", "95 %", "slowest", "where")
    for name, found in times.items():
        seconds = [each[0] for each in found]
        slowest = max(found, key=lambda each: each[0])
        numbers = np.median(seconds), np.percentile(seconds, 95), slowest[0]
        table.add_row(name, *(f"{number:.2f}" for number in numbers), slowest[1])
    console.print(table)


if __name__ == "__main__":
    main()
