"""How long the command takes to answer, beside Flower's command, Ray's start and an import.

    python benchmarks/start.py

All commands are started several times, in turn. The table has the median of each one's processor
seconds, and of the seconds until it ended, divided by those of `python -c 'import torch'`. Below
stands a run of one round: seconds until the round has ended, processor seconds that the machine was
busy until then (by whichever process), and seconds until the command has ended. Beside it stand
plain Flower with as many nodes and a model as large, and the start and end of Ray alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
PLAN = ["--users", "60000", "--check-in-rate", "0.1", "--noise-multiplier", "5", "--rounds", "5540"]
WRONG = ["--set", "privacy.delta=2"]
FIRST_ROUND = ["quickstart", "--set", "privacy.rounds=1"]
PLAIN_FLOWER = """
import time
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

client_app, server_app = ClientApp(), ServerApp()

@client_app.train()
def train(message, context):
    import torch
    model = torch.nn.Linear(64, 10)
    model.load_state_dict(message.content["model"].to_torch_state_dict())
    labels = torch.zeros(40, dtype=torch.long)
    torch.nn.functional.cross_entropy(model(torch.randn(40, 64)), labels).backward()
    content = RecordDict({"gradient": ArrayRecord([model.weight.grad.numpy()])})
    return Message(content, reply_to=message)

@server_app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < 20:
        time.sleep(0.01)
    content = RecordDict({"model": ArrayRecord(torch.nn.Linear(64, 10).state_dict())})
    replies = grid.send_and_receive([Message(content, node, "train") for node in nodes])
    assert not any(reply.has_error() for reply in replies)
    print("round 1/1", flush=True)

resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
run_simulation(server_app, client_app, num_supernodes=20, backend_config=resources)
"""
RAY = "import ray; ray.init('local', include_dashboard=False); ray.shutdown()"
COMMANDS = {
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    "flwr --help": [PROGRAMS / "flwr", "--help"],
    "shufl --help": [PROGRAMS / "shufl", "--help"],
    "shufl run, misspelt": [PROGRAMS / "shufl", "run", "quikstart"],
    "shufl run, a key out of range": [PROGRAMS / "shufl", "run", "quickstart", *WRONG],
    "shufl account, all accountants": [PROGRAMS / "shufl", "account", *PLAN],
}


def seconds_of(command: list[str]) -> tuple[float, float]:
    """Of a processor, and until the command ended."""
    before, started = os.times(), time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after, ended = os.times(), time.monotonic()
    spent = after.children_user + after.children_system
    return spent - before.children_user - before.children_system, ended - started


def busy_seconds() -> float:
    """Of all processors of this machine since it started."""
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def seconds_of_a_round(command: list[str | Path]) -> list[float]:
    """Until the command says that its first round has ended, busy until then, until it ends."""
    started, before, seen = time.monotonic(), busy_seconds(), []
    given = list(map(str, command))
    with subprocess.Popen(
        given, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("round 1/1"):
                seen += [time.monotonic() - started, busy_seconds() - before]
    if run.returncode != 0 or not seen:
        raise RuntimeError(f"{given[0]} ended with {run.returncode}")
    return [*seen, time.monotonic() - started]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5, help="runs of one round; 0: none")
    given = parser.parse_args()
    os.environ["RAY_ADDRESS"] = "local"  # else Flower's would join another Ray of this machine
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(given.repeats):
        for name, command in COMMANDS.items():
            taken[name].append(seconds_of(list(map(str, command))))
    medians = {
        name: [statistics.median(each) for each in zip(*found, strict=True)]
        for name, found in taken.items()
    }
    unit = medians["python -c 'import torch'"][1]
    print("| command | processor, s | until it ended, s | ratio |")
    print("| --- | ---: | ---: | ---: |")
    for name, (spent, ended) in medians.items():
        print(f"| `{name}` | {spent:.2f} | {ended:.2f} | {ended / unit:.2f} |")
    if not given.rounds:
        return
    shown = {name: [] for name in ("shufl run quickstart", "plain Flower", "Ray alone")}
    with tempfile.TemporaryDirectory() as runs:
        ours = [PROGRAMS / "shufl", "run", *FIRST_ROUND, "--runs", runs]
        for _ in range(given.rounds):
            shown["shufl run quickstart"].append(seconds_of_a_round(ours))
            plain = seconds_of_a_round([sys.executable, "-c", PLAIN_FLOWER])
            shown["plain Flower"].append(plain)
            before = busy_seconds()
            _, ended = seconds_of([sys.executable, "-c", RAY])
            shown["Ray alone"].append([ended, busy_seconds() - before, ended])
    print("\n| one round | until the round ended, s | busy until then, s | until the end, s |")
    print("| --- | ---: | ---: | ---: |")
    for name, found in shown.items():
        medians_of = (f"{statistics.median(each):.1f}" for each in zip(*found, strict=True))
        print(f"| {name} | {' | '.join(medians_of)} |")


if __name__ == "__main__":
    main()
