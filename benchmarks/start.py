"""How long the command takes to answer where no round is played, beside Flower's and an import.

    python benchmarks/start.py

Every command is started several times, all in turn; the median of the seconds of a processor that
it took, and of the seconds until it ended, over those of `python -c 'import torch'`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

PROGRAMS = Path(sys.executable).parent
PLAN = ["--n", "60000", "--gamma", "0.1", "--noise", "5", "--rounds", "5540"]
WRONG = ["--set", "privacy.delta=2"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(repeats):
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


if __name__ == "__main__":
    main()
