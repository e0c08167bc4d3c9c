"""A deployment on loopback for tests: its file, a run on it that can be watched and hurt, nginx."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import tomli_w

from run_world import LIMIT, children, json_lines, shufl
from shufl.accounting import Ledger
from shufl.deploy.deployment import Deployment, flower_environment
from shufl.deploy.node import agreed_plan
from shufl.deploy.rehearse import Rehearsal
from shufl.deploy.server_site import FLOWER_FOLDER
from shufl.learning.config import load
from warm import Warm, play

NAME = "wards"
ACCOUNTS = {"shufl-app": 64_002, "shufl-flower": 64_001, "shufl": 64_000}
"""As in the image."""

_PRIVACY = {
    "accountant": "blanket",
    "target_epsilon": 1000.0,
    "noise_multiplier": 1.0,
    "delta": 1e-5,
    "check_in_rate": 1.0,
    "shuffler_blankets": 4.0,
    "cover": True,
    "minimum_batch": 1,
}

SUMS = {"mixing": "sum", "shuffler_blankets": 0.0, "accountant": "sum-central"}
"""Keys of `[privacy]` that have the shuffler hand over sums; with them goes `central_noise`."""

_WINDOW = {
    "work_until": 10.0,
    "send_after": 10.1,
    "send_spread": 0.0,
    "grace": 2.0,
    "answer_every": 0.05,
    "query_every": 0.05,
}


def moved(site, place, made_at=None):
    """A copy of a site's folder whose files say that it is at that place."""
    shutil.copytree(site, place)
    for path in (*place.glob("*.service"), *place.glob("nginx.conf")):
        path.write_text(path.read_text().replace(str(made_at or site), str(place)))
    return place


def number_accounts(script):
    """Has an install.sh give files to numbers: nobody has the accounts here."""

    def numbered(line):
        return re.sub(r"\bshufl(-\w+)?\b", lambda name: str(ACCOUNTS[name[0]]), line[0])

    lines = re.compile("^ *(chown|setpriv) .*$", re.MULTILINE)
    script.write_text(lines.sub(numbered, script.read_text()))


def deployment_of(
    base,
    nodes,
    rounds,
    *,
    shufflers=1,
    users=3,
    hidden=64,
    window=None,
    privacy=None,
    **server,
):
    """A deployment whose nodes have `users` each; its configuration goes into the folder `base`.

    `window`, `privacy` and `server` are keys of those sections that are others than usual. A model
    of the `hidden` width 4096 has 1.2 MB.
    """
    config = {
        "name": NAME,
        "privacy": _PRIVACY | {"rounds": rounds} | (privacy or {}),
        "data": {"dataset": "digits", "users": users * nodes},
        "model": {"name": "mlp", "options": {"hidden": hidden}},
        "training": {"learning_rate": 0.1},
        "window": _WINDOW | (window or {}),
    }
    (base / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    return Deployment.model_validate(
        {
            "name": NAME,
            "trusted_nodes": config["privacy"].get("mixing") == "sum",
            "config": "run.toml",
            "server": {"host": "server.example", "round_timeout": 60.0} | server,
            "shufflers": [
                {"name": f"shuffler-{number}", "host": f"s{number}.example"}
                for number in range(1, shufflers + 1)
            ],
            "nodes": [{"name": f"ward-{number}", "users": users} for number in range(1, nodes + 1)],
        }
    )


def message_seconds():
    """In which a message comes to all nodes here, for which Flower starts a process at each."""
    begun = time.monotonic()
    subprocess.run([command("flwr"), "--version"], check=True, capture_output=True)
    return max(10.0, math.ceil(5 * (time.monotonic() - begun)))


def window_here():
    """A window in which nodes get a round's message, and have three times their work left."""
    work_until = 2 * message_seconds()
    return {"work_until": work_until, "send_after": work_until + 0.1}


class World(Rehearsal):
    """A rehearsal, and `shufl run --on` on its server as a process."""

    def __init__(self, base, nodes, rounds, *, proxied=False, **about):
        """Provisions it in the folder `base`; a round needs the users of all nodes but one.

        It needs one user where there are two shufflers, or the minimum batch that `about` says,
        which is as for `deployment_of`.
        """
        least = max(1, nodes - 1) * about.get("users", 3) if about.get("shufflers", 1) == 1 else 1
        about["privacy"] = {"minimum_batch": least} | about.get("privacy", {})
        usual = {"round_timeout": 20.0, "patience": LIMIT, "window": window_here()}
        deployment = deployment_of(base, nodes, rounds, **(usual | about))
        super().__init__(deployment, base, base / "s", proxied)
        self.server = self.folder / "server"
        self.command = None

    def __exit__(self, *_):
        """Ends the run, then the rest."""
        if self.command is not None and self.command.poll() is None:
            self.command.kill()
            self.command.communicate()
        super().__exit__()

    def run(self, *arguments):
        """Begins `shufl run ARGUMENTS --on` in the server's folder."""
        given = "run", *(arguments or ["run.toml"]), "--on", NAME
        self.command = Warm(given, cwd=self.server, env={**os.environ, "COLUMNS": "120"})

    def resume(self):
        """Goes on with the one run there is."""
        self.run("--resume", self.run_folder)

    def finish(self, seconds=LIMIT):
        """Waits for the command to end."""
        out, err = self.command.communicate(timeout=seconds)
        return self.command.returncode, out, err

    @property
    def run_folder(self):
        (folder,) = (self.server / "runs").iterdir()
        return folder

    @property
    def shown(self):
        """What the run has said to its operator; empty: there is none yet."""
        found = (self.server / "runs").glob("*/console.txt")
        return "".join(file.read_text() for file in found)

    @property
    def rows(self):
        """Of the rounds so far."""
        with contextlib.suppress(ValueError, OSError):
            return json_lines(self.run_folder / "metrics.jsonl")
        return []

    @property
    def rounds_spent(self):
        """By the ledger."""
        return [entry.round for entry in Ledger.read(self.run_folder / "ledger.jsonl").entries]

    def rounds_offered(self, node):
        """By the ledger of its device."""
        path = self.folder / node / "device.db"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(path)) as ledger:
            tables = ledger.execute("SELECT name FROM sqlite_master").fetchall()
            if ("rounds",) not in tables:  # the file is there before its tables are
                return []
            return [round for (round,) in ledger.execute("SELECT round FROM rounds ORDER BY 1")]

    @property
    def plan(self):
        """That all sites have."""
        return agreed_plan(load(str(self.server / "run.toml")))

    def status(self):
        """What `shufl status --json` prints on the server."""
        done = shufl("status", "--json", cwd=self.server)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def flwr(self, *arguments):
        """What Flower's command says on the server."""
        env = flower_environment(self.server / FLOWER_FOLDER)
        done = play(arguments, LIMIT, program="flwr", cwd=self.server, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def wait_for_round(self, round):
        """Waits until a round has ended."""
        self.wait_until(lambda: any(row["round"] >= round for row in self.rows), f"round {round}")

    def wait_until(self, condition, what):
        """Waits for a state; resumes the run where a machine was too busy for three rounds."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            if self.command is not None and self.command.poll() is not None:
                error = self.command.communicate()[1]
                assert "3 rounds in a row were not released" in error, (error, self.tell())
                self.resume()
            assert time.monotonic() < deadline, f"waited for {what}: {self.tell()}"
            time.sleep(0.1)

    def kill_server_app(self):
        """kill -9 of the process that runs the ServerApp."""
        (pid,) = [
            pid
            for executor in children(self.running["server", "superlink"].pid)
            for pid, line in children(executor).items()
            if "flwr-serverapp" in line
        ]
        os.kill(pid, signal.SIGKILL)

    def end(self, site, name):
        """SIGTERM of one process, which is not started again; then of what it has started."""
        with self._lock:
            process = self.running.pop((site, name))
            process.terminate()
            process.wait()
            self._kill_group(process)

    def kill(self, site, *names):
        """Ends processes of a site (SIGKILL), with all that they have started, for good."""
        with self._lock:
            for name in names or [name for at, name in self.running if at == site]:
                self._kill_group(self.running.pop((site, name)))

    def kill_process(self, site, name):
        """kill -9 of one process alone, which is then started again."""
        os.kill(self.running[site, name].pid, signal.SIGKILL)

    def wait_for_superlink(self):
        """Waits until it listens."""
        self.wait_for_port(self.deployment.server.local_port)

    def tell(self):
        """What the run's logs say last."""
        logs = [self.run_folder / name for name in ("server.log", "flower.log", "console.txt")]
        return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in logs if path.exists())


class Nginx:
    """nginx in the foreground, with the `nginx.conf` of the server or of a shuffler."""

    def __init__(self, conf, folder, *, stream=False):
        """Starts it; its own files are in `folder`. The file of a shuffler is of a `stream`."""
        folder.mkdir()
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        temporary = "".join(f"{kind}_temp_path {folder / kind};\n" for kind in kinds)
        main = folder / "main.conf"
        http = f"http {{\naccess_log {folder / 'access.log'};\n{temporary}include {conf};\n}}\n"
        module = Path("/usr/lib/nginx/modules/ngx_stream_module.so")  # where it is not built in
        main.write_text(
            (f"load_module {module};\n" if stream and module.exists() else "")
            + f"daemon off; pid {folder / 'pid'}; error_log {folder / 'error.log'};\n"
            "events {}\n" + (f"include {conf};\n" if stream else http)
        )
        program = shutil.which("nginx")
        assert program is not None
        self.process = subprocess.Popen([program, "-p", str(folder), "-c", str(main)])

    def stop(self):
        """Ends it, by process id."""
        self.process.terminate()
        self.process.wait(LIMIT)


def command(name):
    """A program of this environment."""
    return str(Path(sys.executable).with_name(name))


def run_flwr(home, *arguments):
    """Runs Flower's command with the connections of a folder."""
    done = play(arguments, LIMIT, program="flwr", env=flower_environment(home))
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout + done.stderr)


def write_flower_app(folder, server, client):
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
