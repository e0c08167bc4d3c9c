"""What users of unequal size cost the vectorised engine: records a second beside equal sizes.

MNIST's 60 000 records belong to 2 378 users. Unequal users hold records in proportion to the
ratings of InstEval's students; equal users hold 25 each. All else is the same: model, expected
number of records a round, algorithm, one thread. Each case has a process of its own, and the cases
take turns, as in `vectorised.py`. pfl 0.6.0 has the same unequal users, algorithm and clipping; it
draws each user's noise on the CPU.

    python benchmarks/unequal_users.py
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os

import numpy as np
import torch
from rich.table import Table

import shufl
from shufl.learning.config import Config, load
from shufl.learning.data.datasets import load_dataset
from shufl.protocol.console import Console
from shufl.results.experiment import prepare
from vectorised import measure

MODELS = {"logistic-regression": {}, "mlp": {"hidden": 64}, "small-cnn": {}}
ALGORITHMS = {"fedsgd": {}, "fedavg": {"local_epochs": 1, "local_batch_size": 8}}
RATES = 0.03, 0.25, 1.0  # 71, 594 and 2 378 users a round


def owned() -> shufl.Dataset:
    """MNIST, of users with records in proportion to the ratings of InstEval's students."""
    dataset = load_dataset("mnist")
    share = np.unique(load_dataset("insteval").users, return_counts=True)[1].cumsum()
    place = np.arange(len(dataset.train_labels)) / len(dataset.train_labels)
    return dataclasses.replace(dataset, users=np.searchsorted(share / share[-1], place, "right"))


def case(model: str, algorithm: str, rate: float, partition: str) -> Config:
    """The configuration of one case."""
    changes = {
        "data.dataset": "unequal_users:owned",
        "data.partition": partition,
        "model.name": model,
        "model.options": MODELS[model],
        "training.algorithm": algorithm,
        "privacy.check_in_rate": rate,
        "privacy.minimum_batch": 1,
        "privacy.target_epsilon": 1e9,
        "simulation.engine": "vectorised",
        "simulation.noise": "aggregate",
    } | {f"training.{key}": value for key, value in ALGORITHMS[algorithm].items()}
    users = {"data.users": 2378} if partition == "iid" else {}
    return load("mnist", changes | users)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5, help="of each case")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--no-pfl", action="store_true", help="leaves pfl out")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    torch.set_num_threads(1)
    with_pfl = not arguments.no_pfl and importlib.util.find_spec("pfl") is not None
    table = Table(title=f"records a second, one thread, load {os.getloadavg()[0]:.1f}")
    for column in ("model", "algorithm", "users", "equal", "unequal", "ratio", "pfl, unequal"):
        table.add_column(column, justify="left" if column[0] in "ma" else "right")
    console = Console()
    for model in arguments.models:
        for algorithm in arguments.algorithms:
            for rate in arguments.rates:
                row = _row(model, algorithm, rate, with_pfl, arguments.turns)
                table.add_row(model, algorithm, *row)
                console.print(model, algorithm, *row)
    console.print(table)


def _row(model: str, algorithm: str, rate: float, with_pfl: bool, turns: int) -> list[str]:
    equal, unequal = (case(model, algorithm, rate, each) for each in ("iid", "natural"))
    engine = "vectorised, aggregate noise"
    cases = {"equal": (engine, equal), "unequal": (engine, unequal)}
    if with_pfl:
        cases["pfl"] = ("pfl, local noise", unequal)
    users = prepare(unequal).plan.users
    found = {
        name: 60_000 / users * float(np.median([speed for speed, _ in each]))
        for name, each in measure(cases, turns).items()
    }
    ratio = f"{found['unequal'] / found['equal']:.2f}"
    told = {name: f"{speed:.0f}" for name, speed in found.items()}
    return [f"{rate * users:.0f}", told["equal"], told["unequal"], ratio, told.get("pfl", "")]


if __name__ == "__main__":
    main()
