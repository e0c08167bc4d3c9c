"""A deployment rehearsed on this machine, and a run on it that can be watched and hurt."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from run_world import children, json_lines

from accounting import Ledger, PrivacyPlan
from simulator.config import load
from simulator.deployment.node import agreed_plan
from simulator.deployment.plan import Deployment, NodeEntry, ServerEntry, ShufflerEntry
from simulator.deployment.rehearse import Rehearsal

RUN = """
name = "digits"

[privacy]
accountant = "blanket"
target_epsilon = 1.48
delta = 1e-5
adjacency = "replace"
check_in_rate = 0.5
clip_norm = 1.0
noise_multiplier = 0.8
rounds = 1000
shuffler_blankets = 200
cover = true

[data]
dataset = "digits"
users = 600

[model]
name = "mlp"

[training]
learning_rate = 0.5
checkpoint_every = 1
"""
ROOT = Path(__file__).parents[2]
APP = ROOT / "simulator" / "deployment" / "flower_app"


def deployment(nodes: int, shufflers: int, users: int, least_nodes: int) -> Deployment:
    """As an operator would write it."""
    return Deployment(
        name="digits",
        config="run.toml",
        server=ServerEntry(
            host="server.example", least_nodes=least_nodes, round_timeout=20.0, patience=90.0
        ),
        shufflers=tuple(
            ShufflerEntry(name=f"shuffler-{k}", host=f"s{k}.example") for k in range(shufflers)
        ),
        nodes=tuple(
            NodeEntry(name=f"node-{i}", users=users // nodes, reply_after=0.5) for i in range(nodes)
        ),
    )


class World(Rehearsal):
    """A rehearsal, and `shufl run --on` on its server as a process."""

    def __init__(
        self,
        base: Path,
        nodes: int,
        shufflers: int,
        run: str = RUN,
        users: int = 600,
        least_nodes: int | None = None,
    ):
        (base / "run.toml").write_text(run)
        least_nodes = least_nodes or max(1, nodes - 1)
        super().__init__(deployment(nodes, shufflers, users, least_nodes), base, base / "sites")
        self.server = self.folder / "server"
        self.command: subprocess.Popen | None = None

    def __exit__(self, *_: object) -> None:
        """Ends the run, then the rest."""
        if self.command is not None and self.command.poll() is None:
            self.command.kill()
            self.command.communicate()
        super().__exit__()

    def run(self, *arguments: object) -> None:
        """Begins `shufl run ARGUMENTS --on digits` in the server's folder."""
        self.command = subprocess.Popen(
            [
                *(sys.executable, "-m", "simulator.cli", "run"),
                *(str(each) for each in (*arguments, "--on", "digits")),
            ],
            cwd=self.server,
            env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def resume(self) -> None:
        """Goes on with the one run there is."""
        self.run("--resume", self.run_folder)

    def finish(self, seconds: float = 240) -> tuple[int, str, str]:
        """Waits for the command to end."""
        assert self.command is not None
        out, err = self.command.communicate(timeout=seconds)
        return self.command.returncode, out, err

    @property
    def run_folder(self) -> Path:
        (folder,) = (self.server / "runs").iterdir()
        return folder

    @property
    def shown(self) -> str:
        """What the run has said to its operator; empty: there is none yet."""
        found = (self.server / "runs").glob("*/console.txt")
        return "".join(file.read_text() for file in found)

    @property
    def rows(self) -> list[dict]:
        """Of the rounds so far."""
        with contextlib.suppress(ValueError, OSError):
            return json_lines(self.run_folder / "metrics.jsonl")
        return []

    @property
    def rounds_spent(self) -> list[int]:
        """By the ledger."""
        return [entry.round for entry in Ledger.read(self.run_folder / "ledger.jsonl").entries]

    def rounds_offered(self, node: str) -> list[int]:
        """By the ledger of its device."""
        path = self.folder / node / "device.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(path)) as ledger:
            return [round for (round,) in ledger.execute("SELECT round FROM rounds ORDER BY 1")]

    @property
    def plan(self) -> PrivacyPlan:
        """That all sites have."""
        return agreed_plan(load(str(self.server / "run.toml")))

    def status(self) -> dict:
        """What `shufl status --json` prints on the server."""
        done = subprocess.run(
            [sys.executable, "-m", "simulator.cli", "status", "--json"],
            cwd=self.server,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def wait_for_round(self, round: int, seconds: float = 120) -> None:
        """Waits until a round has ended."""
        deadline = time.monotonic() + seconds
        while not any(row["round"] >= round for row in self.rows):
            assert self.command is not None
            assert self.command.poll() is None, self.command.communicate()
            assert time.monotonic() < deadline, f"round {round} has not ended: {self.rows}"
            time.sleep(0.1)

    def kill_server_app(self) -> None:
        """kill -9 of the process that runs the ServerApp."""
        (pid,) = [
            pid
            for executor in children(self.running["server", "superlink"].pid)
            for pid, line in children(executor).items()
            if "flwr-serverapp" in line
        ]
        os.kill(pid, signal.SIGKILL)

    def kill_process(self, site: str, name: str) -> None:
        """kill -9 of one process alone, which is then started again."""
        os.kill(self.running[site, name].pid, signal.SIGKILL)

    def wait_for_superlink(self) -> None:
        """Waits until it listens."""
        self._wait_for_port(self.deployment.server.local_port)

    def tell(self) -> str:
        """What the run's logs say last."""
        logs = [self.run_folder / name for name in ("server.log", "flower.log", "console.txt")]
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in logs if path.exists())
