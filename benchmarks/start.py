"""How long the command takes to answer, beside Flower's command, Ray's start and an import.

    python benchmarks/start.py

Every command is started several times, all in turn; the median of the seconds of a processor that
it took, and of the seconds until it ended, over those of `python -c 'import torch'`. Below, a run
of one round: seconds until its folder is there, until the round has ended, and until the command
has; and Ray alone, which the run starts and ends.
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
PLAN = ["--n", "60000", "--gamma", "0.1", "--noise", "5", "--rounds", "5540"]
WRONG = ["--set", "privacy.delta=2"]
FIRST_ROUND = ["quickstart", "--set", "privacy.rounds=1"]
RAY = "import ray; ray.init(include_dashboard=False); ray.shutdown()"
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


def seconds_of_a_round(runs: str) -> list[float]:
    """Until the run's folder is made, until its first round has ended, until the command has."""
    command = [*COMMANDS["shufl run, misspelt"][:2], *FIRST_ROUND, "--runs", runs]
    started, seen = time.monotonic(), []
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith(("folder", "round 1/1")):
                seen.append(time.monotonic() - started)
    if run.returncode != 0 or len(seen) != 2:
        raise RuntimeError(f"shufl run ended with {run.returncode}")
    return [*seen, time.monotonic() - started]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=5, help="runs of one round; 0: none")
    given = parser.parse_args()
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
    with tempfile.TemporaryDirectory() as runs:
        rounds = [seconds_of_a_round(runs) for _ in range(given.rounds)]
    ray = [seconds_of([sys.executable, "-c", RAY])[1] for _ in range(given.rounds)]
    print("\n| `shufl run quickstart`, one round | seconds |\n| --- | ---: |")
    for place, name in enumerate(("the folder", "the round", "the end")):
        print(f"| until {name} | {statistics.median(each[place] for each in rounds):.1f} |")
    print(f"| Ray alone, until its end | {statistics.median(ray):.1f} |")


if __name__ == "__main__":
    main()
