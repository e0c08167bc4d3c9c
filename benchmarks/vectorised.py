"""Reports a second of the vectorised engine, beside plain SGD and the Flower engine.

*Plain* is the limit: forward and backward of the same model on the same users' records in batches,
nobody's gradient apart, no clipping, no noise; the faster of two ways to use the cores. All but the
Flower engine, which runs last, take turns in one process.

    python benchmarks/vectorised.py mnist --rounds 5 --flower-rounds 2
"""

from __future__ import annotations

import argparse
import functools
import resource
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from accounting import OrderRangeWarning
from clients import SeededRandomness
from simulator.config import Config, load
from simulator.experiment import Experiment, prepare
from simulator.records import read_rows
from simulator.run import run
from simulator.vectorised import ReportSum, VectorisedRounds

_PLAIN_BATCH = 256


def vectorised(config: Config, noise: str) -> Callable[[int], int]:
    """Plays a round of the engine and returns its reports."""
    changed = {"engine": "vectorised", "noise": noise}
    simulation = config.simulation.model_copy(update=changed)
    experiment = prepare(config.model_copy(update={"simulation": simulation}))
    reports, model = ReportSum(experiment, experiment.load_users()), experiment.make_model()
    rounds = VectorisedRounds(experiment, reports.sum)
    return lambda round: rounds(round, model).aggregate.reports


def plain(experiment: Experiment, apart: bool) -> Callable[[int], int]:
    """Forward and backward over the round's users' records, with their fetching.

    Args:
        experiment: the experiment.
        apart: each batch on one core, as the engine does it; else on torch's threads together.
    """
    records = experiment.load_users()

    def batch_gradient(model: torch.nn.Module, users: np.ndarray) -> None:
        features, labels = (part.flatten(0, 1) for part in records(users))
        loss = functional.cross_entropy(model(features), labels)
        torch.autograd.grad(loss, list(model.parameters()))

    model = experiment.make_model().train()

    def play(round: int) -> int:
        users = checked_in(experiment, round)
        batches = np.split(users, range(_PLAIN_BATCH, len(users), _PLAIN_BATCH))
        if apart:
            with ThreadPoolExecutor(torch.get_num_threads(), "", torch.set_num_threads, (1,)) as t:
                list(t.map(functools.partial(batch_gradient, model), batches))
        else:
            for batch in batches:
                batch_gradient(model, batch)
        return len(users)

    return play


def checked_in(experiment: Experiment, round: int) -> np.ndarray:
    """Who checks in."""
    plan = experiment.plan
    coins = SeededRandomness(experiment.seed).check_ins(
        round, np.arange(plan.users), plan.check_in_rate
    )
    return np.flatnonzero(coins)


def on_flower(config: Config, rounds: int) -> list[float]:
    """Reports a second of each round of the Flower engine."""
    privacy = config.privacy.model_copy(update={"rounds": rounds})
    training = config.training.model_copy(update={"evaluate_every": rounds + 1})
    config = config.model_copy(update={"privacy": privacy, "training": training})
    with tempfile.TemporaryDirectory() as folder:
        run(config, Path(folder), Console(quiet=True))
        (metrics,) = Path(folder).glob("*/metrics.jsonl")
        return [row["reports"] / row["seconds"] for row in read_rows(metrics)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flower-rounds", type=int, default=2, help="0 leaves Flower out")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", OrderRangeWarning)  # of epsilon after a few rounds; not shown
    config = load(arguments.config, ["training.algorithm=fedsgd", *arguments.set])
    experiment = prepare(config)
    paths = {
        "plain, torch's threads": plain(experiment, apart=False),
        "plain, a batch a core": plain(experiment, apart=True),
        "noise = aggregate": vectorised(config, "aggregate"),
        "noise = report": vectorised(config, "report"),
    }
    speeds: dict[str, list[float]] = {name: [] for name in paths}
    for round in range(arguments.rounds + 1):  # the first warms up
        for name, play in paths.items():
            started = time.perf_counter()
            reports = play(round + 1)
            if round:
                speeds[name].append(reports / (time.perf_counter() - started))
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if arguments.flower_rounds:
        speeds["Flower engine"] = on_flower(config, arguments.flower_rounds)
    table = Table(
        title=f"reports a second, {config.name}: {config.model.name}, {experiment.parameters} "
        f"parameters\n{torch.get_num_threads()} threads, peak before Flower {megabytes:.0f} MB"
    )
    for column in ("path", "rounds", "median/s", "lowest", "highest", "of plain"):
        table.add_column(column, justify="left" if column == "path" else "right")
    limit = max(float(np.median(found)) for name, found in speeds.items() if "plain" in name)
    for name, found in speeds.items():
        median = float(np.median(found))
        table.add_row(
            name, str(len(found)), f"{median:.0f}", f"{min(found):.0f}", f"{max(found):.0f}",
            f"{median / limit:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
