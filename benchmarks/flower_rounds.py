"""Rounds per minute of the Flower engine, beside plain Flower on the same users.

The peer is what a Flower user would write without shufl: the same nodes, users, coins, model and
per-user gradients, but every node sums its gradients and returns the sum in its reply: no clipping,
noise, sealing or shuffler. *One by one* computes user after user, as a loop does; *together* up to
256 at once by vmap, as shufl's own nodes do where the model is small.

    python benchmarks/flower_rounds.py mnist --rounds 7
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from rich.table import Table

from shufl.learning import local_update, user_updates
from shufl.learning.config import load
from shufl.protocol.console import Console
from shufl.protocol.mechanisms import SeededRandomness
from shufl.results.experiment import Experiment, prepare
from shufl.results.run import Run
from shufl.results.run_folder import read_rows
from shufl.simulator.engines.flower import run_on_flower
from shufl.simulator.engines.ray_cluster import running_ray

_loaded: dict[str, tuple] = {}


def plain_flower(experiment: Experiment, rounds: int, folder: Path, together: bool) -> list[float]:
    """Seconds of each round without shufl."""
    seconds: list[float] = []
    nodes = experiment.config.simulation.nodes
    make_model, load_users, training = (
        experiment.make_model,
        experiment.load_users,
        experiment.local_training,
    )
    users, rate, seed = experiment.plan.users, experiment.plan.check_in_rate, experiment.seed
    client_app = ClientApp()

    @client_app.train()
    def train(message: Message, context) -> Message:
        if "parts" not in _loaded:
            _loaded["parts"] = (make_model(), load_users())
        model, records = _loaded["parts"]
        model.load_state_dict(message.content["model"].to_torch_state_dict())
        mine = np.arange(context.node_config["partition-id"], users, nodes)
        round = int(message.metadata.group_id)
        coins = SeededRandomness(seed).check_ins(round, mine, rate)
        total = np.zeros(experiment_size(model), dtype=np.float32)
        for first in range(0, coins.sum(), 256):
            given = [records(user) for user in mine[coins][first : first + 256].tolist()]
            if together:
                features, labels = map(torch.stack, zip(*given, strict=True))
                seeds = torch.arange(len(given))  # of nothing that is drawn
                updates = user_updates(model, features, labels, training, seeds)
                total += torch.cat([each.flatten(1).sum(0) for each in updates.values()]).numpy()
            else:
                total += sum(local_update(model, *each, training, seed=0) for each in given)
        content = RecordDict({"sum": ArrayRecord({"sum": Array(total)})})
        return Message(content, reply_to=message)

    def play(grid) -> None:
        model = make_model()
        while len(ids := list(grid.get_node_ids())) < nodes:
            time.sleep(0.05)
        for round in range(1, rounds + 1):
            started = time.monotonic()
            content = RecordDict({"model": ArrayRecord(model.state_dict())})
            messages = [Message(content, i, "train", group_id=str(round)) for i in ids]
            replies = grid.send_and_receive(messages, timeout=3600)
            total = sum(reply.content["sum"]["sum"].numpy() for reply in replies)
            pace = experiment.config.training.learning_rate
            step = torch.from_numpy(total / (users * rate) * pace)
            vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach() - step
            torch.nn.utils.vector_to_parameters(vector, model.parameters())
            seconds.append(time.monotonic() - started)

    with running_ray(folder / "ray.log"):
        run_on_flower(
            play,
            client_app,
            nodes,
            experiment.config.simulation.cpus_per_node,
            threading.Event(),
            folder / f"plain-{together}.log",
        )
    return seconds


def experiment_size(model: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = load(
        arguments.config,
        [f"privacy.rounds={arguments.rounds}", f"training.evaluate_every={arguments.rounds}"],
    )
    with tempfile.TemporaryDirectory() as folder:
        Run.new(config, Path(folder), Console(quiet=True)).train()
        (made,) = Path(folder).glob(f"{config.name}-*")
        rows = read_rows(made / "metrics.jsonl")
        given = prepare(config), arguments.rounds, Path(folder)
        one_by_one, together = (plain_flower(*given, together=each) for each in (False, True))
    reports = float(np.mean([row["reports"] for row in rows]))
    what = f"{reports:.0f} reports and blankets a round, {arguments.rounds} rounds"
    table = Table(title=f"{config.name}: {what}")
    for column in ("path", "median s/round", "rounds/min", "reports/s", "ratio"):
        table.add_column(column, justify="right")
    timings = {
        "plain Flower, one by one": one_by_one,
        "plain Flower, together": together,
        "shufl": [row["seconds"] for row in rows],
    }
    base = float(np.median(one_by_one))
    for name, seconds in timings.items():
        median = float(np.median(seconds))
        table.add_row(
            name, f"{median:.2f}", f"{60 / median:.1f}", f"{reports / median:.0f}",
            f"{base / median:.2f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
