"""Models with side effects, for runs that must show or survive them.

Their option `folder` is the test's: a worker of a Ray that tests share has another environment.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from torch import nn

from shufl.learning.models import mlp


class _Linear(nn.Module):
    def __init__(self, input_shape, classes, folder="nowhere"):
        super().__init__()
        self.folder = Path(folder)
        self.linear = nn.Linear(64, classes)

    def forward(self, records):
        tried = len(records) == 2  # as where a node builds its model; users have more
        if self.training and not tried and (self.folder / "runs").exists():
            self.in_training(self.folder)
        return self.linear(records.flatten(1))


class reads_ledger(_Linear):
    """Writes the ledger's rounds, threads that watch, and slow modules, whenever users train."""

    def in_training(self, folder):
        (ledger,) = folder.glob("runs/*/ledger.jsonl")
        rounds = len(ledger.read_text().splitlines()) - 1
        with (folder / "seen").open("a") as file:
            watching = sum(thread.name == "lease" for thread in threading.enumerate())
            slow = {"dp_accounting", "shufl.server.training"} & sys.modules.keys()
            file.write(f"{rounds} {watching} {slow or 0}\n")
        return rounds


class kills_its_worker(reads_ledger):
    """Kills the process it trains in, so many times in all, from a round on."""

    def __init__(self, input_shape, classes, folder, times, first=1):
        super().__init__(input_shape, classes, folder)
        self.times, self.first = times, first

    def in_training(self, folder):
        if super().in_training(folder) < self.first:
            return
        kills = folder / "kills"
        done = kills.read_text() if kills.exists() else ""
        if len(done) < self.times:
            kills.write_text(done + "x")
            os.kill(os.getpid(), signal.SIGKILL)


class waits_in_round_4(nn.Sequential):
    """The tiny configuration's model, whose users wait in the fourth round for the file `go`."""

    def __init__(self, input_shape, classes, folder):
        super().__init__(*mlp(input_shape, classes, hidden=8))
        self.folder = Path(folder)

    def forward(self, records):
        lines = [each.read_text().count("\n") for each in self.folder.glob("runs/*/ledger.jsonl")]
        while self.training and lines == [1 + 4] and not (self.folder / "go").exists():
            time.sleep(0.05)
        return super().forward(records)
