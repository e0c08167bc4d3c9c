"""A small deployment on loopback for tests: its file, nginx before it, and a run on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import tomli_w

from simulator.deployment.plan import Deployment, flower_environment
from simulator.deployment.rehearse import Rehearsal

NAME = "wards"
WAIT_SECONDS = 90.0


def deployment_of(base: Path, nodes: int, rounds: int, **server: object) -> Deployment:
    """A deployment of a few users with a model of 2.4 MB, whose configuration goes into `base`."""
    users = 3
    config = {
        "name": NAME,
        "privacy": {
            "accountant": "blanket",
            "target_epsilon": 1000.0,
            "noise_multiplier": 1.0,
            "delta": 1e-5,
            "check_in_rate": 1.0,
            "rounds": rounds,
            "shuffler_blankets": 4.0,
            "cover": True,
            "minimum_batch": 1,
        },
        "data": {"dataset": "digits", "users": users * nodes},
        "model": {"name": "mlp", "options": {"hidden": 8192}},
        "training": {"learning_rate": 0.1},
    }
    (base / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    return Deployment.model_validate(
        {
            "name": NAME,
            "config": "run.toml",
            "server": {"host": "server.example", "round_timeout": 60.0} | server,
            "shufflers": [{"name": "shuffler-1", "host": "shuffler.example"}],
            "nodes": [
                {"name": f"ward-{number}", "users": users, "reply_after": 1.0}
                for number in range(1, nodes + 1)
            ],
        }
    )


class Nginx:
    """nginx in the foreground, with the `nginx.conf` of the server."""

    def __init__(self, conf: Path, folder: Path):
        """Starts it; its own files are in `folder`."""
        folder.mkdir()
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {folder / kind};\n" for kind in kinds)
        main = folder / "main.conf"
        main.write_text(
            f"daemon off; pid {folder / 'pid'}; error_log {folder / 'error.log'};\n"
            f"events {{}}\nhttp {{\naccess_log {folder / 'access.log'};\n{temporary}"
            f"include {conf};\n}}\n"
        )
        program = shutil.which("nginx")
        assert program is not None
        self.process = subprocess.Popen([program, "-p", str(folder), "-c", str(main)])

    def stop(self) -> None:
        """Ends it, by process id."""
        self.process.terminate()
        self.process.wait(10)


class DeployedRun:
    """`shufl run --on` on the server of a rehearsal."""

    def __init__(self, rehearsal: Rehearsal):
        """Starts it."""
        self.server = rehearsal.folder / "server"
        self._log = (rehearsal.folder / "run.out").open("w+")
        self.process = subprocess.Popen(
            [command("shufl"), "run", "run.toml", "--on", NAME],
            cwd=self.server,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def rounds(self) -> int:
        """Number of rounds played."""
        files = list((self.server / "runs").glob("*/metrics.jsonl"))
        return sum(file.read_text().count("\n") for file in files)

    def output(self) -> str:
        """What it has printed."""
        self._log.flush()
        return Path(self._log.name).read_text()

    def wait_for_rounds(self, rounds: int) -> None:
        """Waits until as many have been played."""
        wait_until(lambda: self.rounds() >= rounds or self.process.poll() is not None)
        assert self.rounds() >= rounds, self.output()


def command(name: str) -> str:
    """A program of this environment."""
    return str(Path(sys.executable).with_name(name))


def run_flwr(home: Path, *arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs Flower's command with the connections of a folder."""
    return subprocess.run(
        [command("flwr"), *arguments],
        env=flower_environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )


def wait_until(happened: Callable[[], bool]) -> None:
    """Waits for something that should happen soon."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def write_flower_app(folder: Path, server: str, client: str) -> None:
    """Writes a Flower app of these two modules, each of which has an `app`."""
    (folder / "strange").mkdir(parents=True)
    for name, text in {"__init__": "", "server": server, "client": client}.items():
        (folder / "strange" / f"{name}.py").write_text(text, encoding="utf-8")
    components = {"serverapp": "strange.server:app", "clientapp": "strange.client:app"}
    about = {
        "project": {"name": "strange", "version": "1.0.0", "license": "Apache-2.0"},
        "tool": {"flwr": {"app": {"publisher": "stranger", "components": components}}},
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(about), encoding="utf-8")
