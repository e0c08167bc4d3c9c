"""Models with side effects, for runs that must show or survive them."""

import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

from torch import nn


class _Linear(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)

    def forward(self, records):
        tried = len(records) == 2  # as where a node builds its model; users have more
        if self.training and not tried and Path(os.environ["TEST_FOLDER"], "runs").exists():
            self.in_training(Path(os.environ["TEST_FOLDER"]))
        return self.linear(records.flatten(1))


class reads_ledger(_Linear):
    """Writes, whenever users train, the ledger's rounds, threads that watch, and slow modules."""

    def in_training(self, folder):
        (ledger,) = folder.glob("runs/*/ledger.jsonl")
        rounds = len(ledger.read_text().splitlines()) - 1
        with (folder / "seen").open("a") as file:
            watching = sum(thread.name == "lease" for thread in threading.enumerate())
            slow = {"dp_accounting", "shufl.server.training"} & sys.modules.keys()
            file.write(f"{rounds} {watching} {slow or 0}\n")


class in_float64(_Linear):
    """Keeps its parameters in a type that the server cannot step."""

    def __init__(self, input_shape, classes):
        super().__init__(input_shape, classes)
        self.double()

    def forward(self, records):
        return super().forward(records.double())


class kills_its_worker(_Linear):
    """Kills the process it trains in, TEST_KILLS times in all, from round TEST_KILLS_FROM on."""

    def in_training(self, folder):
        (ledger,) = folder.glob("runs/*/ledger.jsonl")
        if ledger.read_text().count("\n") <= int(os.environ.get("TEST_KILLS_FROM", "1")):
            return
        kills = folder / "kills"
        done = kills.read_text() if kills.exists() else ""
        if len(done) < int(os.environ["TEST_KILLS"]):
            kills.write_text(done + "x")
            os.kill(os.getpid(), signal.SIGKILL)


class always_hangs(_Linear):
    """Keeps every user busy for longer than the test."""

    def in_training(self, folder):
        time.sleep(600)


class fails_on_some_records(nn.Module):
    """Logistic regression that raises for records named in the folder `failing`."""

    def __init__(self, input_shape, classes):
        super().__init__()
        self.linear = nn.Linear(64, classes)

    def forward(self, records):
        failing = Path(os.environ["TEST_FOLDER"], "failing")
        if self.training and (failing / fingerprint(records)).exists():
            raise RuntimeError("this user's records fail")
        return self.linear(records.flatten(1))


def fingerprint(records):
    """A name for one user's records."""
    return hashlib.sha256(records.detach().numpy().tobytes()).hexdigest()
