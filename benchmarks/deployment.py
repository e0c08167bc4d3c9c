"""What a round costs on real nodes, beside Flower's own PyTorch example on the same ones.

    python benchmarks/deployment.py [--nodes 3] [--rounds 10] [--peer-rounds 10]

Both run one after the other on one SuperLink and the same SuperNodes: first Flower's FedAvg, whose
ClientApp trains the same model on the same digits, in a process for every message, as Flower's
PyTorch example does; then shufl, whose nodes check in, add noise, seal, and report to a shuffler.
The memory is that of shufl's run: proportional set size, which counts once what processes share.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path

from shufl.deploy.plan import Deployment, NodeEntry, ServerEntry, ShufflerEntry
from shufl.deploy.rehearse import Rehearsal
from shufl.deploy.submit import run_on
from shufl.learning.config import load

RUN = """
name = "digits"
[privacy]
accountant = "blanket"
target_epsilon = 1e6
delta = 1e-5
adjacency = "replace"
check_in_rate = 0.5
clip_norm = 1.0
noise_multiplier = 0.6
rounds = {rounds}
shuffler_blankets = 100
cover = true
[data]
dataset = "digits"
users = {users}
[model]
name = "mlp"
[training]
learning_rate = 0.5
"""
PEER = {
    "pyproject.toml": """\
[project]
name = "peer"
version = "1.0.0"
description = "Flower's PyTorch example on digits"
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = []
[tool.flwr.app]
publisher = "flwrlabs"
[tool.flwr.app.components]
serverapp = "peer.server:app"
clientapp = "peer.client:app"
[tool.flwr.app.config]
rounds = 3
nodes = 2
""",
    "peer/__init__.py": "",
    "peer/task.py": """\
import torch
from sklearn.datasets import load_digits
from torch import nn

def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

def records():
    digits = load_digits()
    return (
        torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1),
        torch.tensor(digits.target),
    )
""",
    "peer/client.py": """\
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peer.task import make_model, records

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    features, labels = records()
    features, labels = features[:200], labels[:200]
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, len(labels), 32):
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(
            model(features[start : start + 32]), labels[start : start + 32]
        )
        loss.backward()
        optimiser.step()
    content = RecordDict({
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"train_loss": float(loss), "num-examples": len(labels)}),
    })
    return Message(content=content, reply_to=message)
""",
    "peer/server.py": """\
import time
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peer.task import make_model, records

app = ServerApp()

class Timed(FedAvg):
    def configure_train(self, server_round, arrays, config, grid):
        print(f"TIME {time.time()}", flush=True)
        return super().configure_train(server_round, arrays, config, grid)

@app.main()
def main(grid: Grid, context: Context) -> None:
    model = make_model()
    strategy = Timed(
        fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=context.run_config["nodes"],
        min_available_nodes=context.run_config["nodes"],
    )
    strategy.start(
        grid=grid, initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=context.run_config["rounds"],
    )
    print(f"TIME {time.time()}", flush=True)
""",
}


def deployment(nodes: int) -> Deployment:
    return Deployment(
        name="bench",
        config="run.toml",
        server=ServerEntry(host="server.example", round_timeout=120.0),
        shufflers=(ShufflerEntry(name="shuffler", host="shuffler.example"),),
        nodes=tuple(NodeEntry(name=f"node-{i}", users=200) for i in range(nodes)),
    )


def memory_of(pids: set[int]) -> int:
    """Megabytes of these processes and all that they have started."""
    kilobytes = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, TypeError):  # it has ended meanwhile
            family, pid = set(), int(entry.name)
            while pid > 1:
                family.add(pid)
                stat = Path(f"/proc/{pid}/stat").read_text()
                pid = int(stat.rpartition(")")[2].split()[1])
            if family & pids:
                text = (entry / "smaps_rollup").read_text()
                kilobytes += int(re.search(r"^Pss:\s+(\d+)", text, re.MULTILINE)[1])
    return kilobytes // 1024


def memory_by_machine(rehearsal: Rehearsal, node: str) -> dict[str, int]:
    """Megabytes on the server's, the shuffler's, and a node's machine."""
    pids = {key: process.pid for key, process in rehearsal.running.items()}
    return {
        machine: memory_of({pid for (site, _), pid in pids.items() if site == machine})
        for machine in ("server", "shuffler", node)
    }


def peer_seconds(rehearsal: Rehearsal, folder: Path, rounds: int, nodes: int) -> list[float]:
    for name, text in PEER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    out = rehearsal.flwr(
        "run", str(folder), "bench", "--stream", "-c", f"rounds={rounds} nodes={nodes}"
    )
    times = [float(each) for each in re.findall(r"TIME ([\d.]+)", out)]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def shufl_seconds(rehearsal: Rehearsal, runs: Path) -> tuple[list[float], list[dict[str, int]]]:
    server, memory, stop = rehearsal.folder / "server", [], threading.Event()

    def watch() -> None:
        while not stop.wait(2.0):
            if any(runs.glob("*/metrics.jsonl")):  # all have begun
                memory.append(memory_by_machine(rehearsal, "node-0"))

    thread = threading.Thread(target=watch)
    thread.start()
    started = time.monotonic()
    try:
        run_on("bench", server / "server.toml", load(str(server / "run.toml")), runs)
    finally:
        stop.set()
        thread.join()
    print(f"the whole run took {time.monotonic() - started:.0f} s")
    (folder,) = runs.iterdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["seconds"] for row in rows], memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--peer-rounds", type=int, default=10)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shufl-") as temporary:
        base = Path(temporary)
        text = RUN.format(rounds=given.rounds, users=200 * given.nodes)
        (base / "run.toml").write_text(text)
        with Rehearsal(deployment(given.nodes), base, base / "s") as rehearsal:
            peer = sorted(peer_seconds(rehearsal, base / "peer", given.peer_rounds, given.nodes))
            ours, memory = shufl_seconds(rehearsal, base / "runs")
    ours.sort()
    middle = ours[len(ours) // 2], peer[len(peer) // 2]
    print(f"{given.nodes} nodes, {given.rounds} rounds, {os.cpu_count()} cores")
    print("seconds a round     median  fastest  slowest")
    print(f"Flower's example    {middle[1]:6.1f}  {peer[0]:7.1f}  {peer[-1]:7.1f}")
    print(f"shufl               {middle[0]:6.1f}  {ours[0]:7.1f}  {ours[-1]:7.1f}")
    print(f"ratio               {middle[0] / middle[1]:6.2f}")
    tenth = max(1, len(memory) // 10)
    print("MB, median of         the first tenth  the last  most")
    for machine in memory[0]:
        values = [each[machine] for each in memory]
        first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
        print(f"{machine:20}  {first:15.0f}  {last:8.0f}  {max(values):4.0f}")


if __name__ == "__main__":
    main()
