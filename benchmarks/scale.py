"""The vectorised engine from 10^4 to 10^7 users: seconds a round and peak memory.

Users share the dataset's records (`data.partition = "repeated"`), and the check-in rate is chosen
so that equally many report. Each row is a process of its own.

    python benchmarks/scale.py mnist --users 10000 100000 1000000 10000000 --reports 2000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

import numpy as np
import torch
from rich.table import Table

from shufl.learning.config import load
from shufl.protocol.console import Console
from shufl.protocol.mechanisms import make_randomness
from shufl.results.experiment import prepare
from shufl.simulator.engines.report_sum import ReportSum
from shufl.simulator.engines.vectorised import VectorisedEngine, VectorisedRounds


def measure(
    name: str, overrides: list[str], users: int, reports: int, rounds: int
) -> dict[str, float]:
    """Plays rounds of about `reports` reports of `users` users.

    Returns:
        Reports of a round, seconds until the first, seconds of a round by the clock and of all
        cores together, seconds of a core for its coins (medians, the first round left out), and
        the process's peak memory in MB.
    """
    started = time.perf_counter()
    settings = {
        "simulation.engine": "vectorised", "data.partition": "repeated", "data.users": users,
        "privacy.check_in_rate": reports / users, "privacy.target_epsilon": 1e9,
        "privacy.minimum_batch": 1,
    }  # fmt: skip
    given = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    experiment = prepare(load(name, [*overrides, *given]))
    plan, model = experiment.plan, experiment.make_model()
    engine = VectorisedEngine(experiment)
    reports_of = ReportSum(engine.settings, engine.load_users())
    play = VectorisedRounds(engine.settings, reports_of.sum)
    set_up = time.perf_counter() - started
    seconds, cores, coins, counts = [], [], [], []
    for round in range(1, rounds + 2):
        started, worked = time.perf_counter(), time.process_time()
        aggregate = play(round, model).aggregate
        seconds.append(time.perf_counter() - started)
        cores.append(time.process_time() - worked)
        counts.append(aggregate.reports if aggregate else 0)
        worked = time.process_time()
        make_randomness(experiment.seed).checked_in(round, plan.users, plan.check_in_rate)
        coins.append(time.process_time() - worked)
    return {
        "users": users,
        "reports": float(np.mean(counts[1:])),
        "set-up s": set_up,
        "round s": float(np.median(seconds[1:])),
        "core s": float(np.median(cores[1:])),
        "coins, core s": float(np.median(coins[1:])),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--users", type=int, nargs="+", default=[10**4, 10**5, 10**6, 10**7])
    parser.add_argument("--reports", type=int, nargs="+", default=[2000])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.config}, {torch.get_num_threads()} threads")
    rows: list[dict[str, Any]] = []
    for users in arguments.users:
        for reports in arguments.reports:
            with multiprocessing.get_context("spawn").Pool(1) as process:
                given = (arguments.config, arguments.set, users, reports, arguments.rounds)
                rows.append(process.apply(measure, given))
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            *(f"{value:.4g}" if value < 1e4 else f"{value:.0f}" for value in row.values())
        )
    Console().print(table)


if __name__ == "__main__":
    main()
