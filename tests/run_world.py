"""Runs the real `shufl` command: real Flower on Ray, a real shuffler process, real gRPC."""

import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import torch

import warm_ray
from rounds import check_in
from shufl.accounting import make_accountant
from tiny import ADJACENCY, CLIP_NORM, NOISE, RATE, USERS
from warm import COLD, Warm, play

LIMIT = 1200
"""Seconds in which anything that is waited for happens, however busy the machine is."""

CONFIG = f"""
name = "tiny"
seed = 5
[privacy]
check_in_rate = {RATE}
clip_norm = {CLIP_NORM}
noise_multiplier = {NOISE}
adjacency = "{ADJACENCY}"
target_epsilon = TARGET
rounds = 1000
minimum_batch = 5
[data]
dataset = "digits"
users = {USERS}
[model]
name = "mlp"
options = {{ hidden = 8 }}
[training]
learning_rate = 0.5
optimiser_options.momentum = 0.9
checkpoint_every = 2
[simulation]
nodes = 3
round_timeout = 600.0
"""


def epsilon_after(rounds):
    """Theorem 3's epsilon of the tiny plan, composed round by round."""
    accountant = make_accountant("theorem3", ADJACENCY)
    for _ in range(rounds):
        accountant.compose(check_in(USERS, RATE, NOISE))
    return accountant.get_epsilon(1 / USERS)


def budget_of(rounds):
    """A target epsilon that admits exactly `rounds` rounds."""
    return (epsilon_after(rounds) + epsilon_after(rounds + 1)) / 2


def tiny_config(folder, rounds):
    """The tiny configuration with a budget that admits exactly `rounds` rounds."""
    path = Path(folder) / "tiny.toml"
    path.write_text(CONFIG.replace("TARGET", repr(budget_of(rounds))))
    return path


def shufl_command(*arguments):
    """For an interpreter of its own; `shufl` takes less time."""
    return [sys.executable, "-m", "shufl.cli", *map(str, arguments)]


def shufl(*arguments, **options):
    """The end of a command that begins warm."""
    return play(arguments, LIMIT, **options)


def invoke(command, *more):
    """What a command answers, played in this process; its words, and more arguments as they are."""
    from typer.testing import CliRunner

    from shufl.cli.__main__ import app

    return CliRunner().invoke(app, [*command.split(), *map(str, more)])


def told(command, *more):
    """What it prints as JSON."""
    ended = invoke(command, *more, "--json")
    assert ended.exit_code == 0, ended.output
    return json.loads(ended.stdout)


def refused(command, *more):
    """The one line by which it refuses, with status 2, and prints nothing else."""
    ended = invoke(command, *more)
    assert (ended.exit_code, ended.stdout) == (2, ""), ended.output
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def python_path(folder):
    """A PYTHONPATH with this folder first."""
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def set_options(*settings):
    """A command's options for settings of a configuration, such as `seed=5`."""
    return [part for each in settings for part in ("--set", each)]


def trained(config, runs):
    """The folder of a whole run in this process, of a configuration that was loaded."""
    from shufl.protocol.console import Console
    from shufl.results.run import Run

    Run.new(config, runs, Console(quiet=True)).train()
    return only_folder(runs)


def only_folder(runs):
    (folder,) = Path(runs).iterdir()
    return folder


def model_of(folder):
    """The final model of a run."""
    return torch.load(Path(folder) / "model.pt", weights_only=True)


def same_model(one, other):
    """Whether two runs ended with the same model, to the bit."""
    models = model_of(one), model_of(other)
    return all(torch.equal(models[0][name], value) for name, value in models[1].items())


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_bytes())


def json_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def children(pid):
    """Process ids of a process's children and their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, ValueError):
                continue
            if parent == pid:
                found[int(entry.name)] = command
    return found


def running(pid):
    """Whether a process exists and is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_behind(folder):
    """Processes that have inherited TEST_FOLDER."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"TEST_FOLDER={folder}".encode() in environment and running(int(process.name)):
            found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def peak_bytes(pid, anew=False):
    """The most memory that a process has had. `anew`: from now on, until it is asked anew."""
    if anew:
        Path(f"/proc/{pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def wait_until(condition, seconds, what):
    """Waits for a state, for LIMIT seconds at least: a busy machine takes longer than `seconds`."""
    seconds = max(seconds, LIMIT)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


@contextmanager
def ray_of_its_own(warm=True, nodes=1, **resources):
    """A Ray in a process of its own; its address. `warm`: its workers are forks.

    Each of its nodes has the resources.

    Ray forks where it starts, which in a process with gRPC's threads sometimes hangs.
    """
    code = (
        "import ray, sys\n"
        "from ray._private import ray_constants\n"
        f"if {warm}: ray_constants.SETUP_WORKER_FILENAME = {warm_ray.__file__!r}\n"
        f"own = {resources} | {{'include_dashboard': False}}\n"
        f"if {nodes} == 1: ray.init('local', log_to_driver=False, **own)\n"
        "else:\n"
        "    from ray.cluster_utils import Cluster\n"
        "    cluster = Cluster(True, head_node_args=own)\n"
        f"    for _ in range({nodes} - 1): cluster.add_node(**{resources})\n"
        "    ray.init(cluster.address, log_to_driver=False)\n"
        "print(ray.get_runtime_context().gcs_address, flush=True)\n"
        "sys.stdin.read()\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    process = Warm([code], program="python", env=env, piped=True)
    try:
        address = process.stdout.readline().decode().strip()
        assert address, process.communicate()
        yield address
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


class LongRun:
    """A run in the background with a budget it will not reach."""

    def __init__(self, folder, *arguments, ray="shared", cwd=None):
        """Begins it in `folder`; `ray`: "own" has it start a Ray."""
        config = tiny_config(folder, 3)
        self.runs = Path(folder) / "runs"
        endless = "--set", "privacy.target_epsilon=1e9"
        its_own = {"RAY_ADDRESS": ""} if ray == "own" else {}
        self.process = Warm(
            ("run", config, "--runs", self.runs, *endless, *arguments),
            process_group=0,
            cwd=cwd,
            env=os.environ | COLD | its_own,  # a forked shuffler would be another's child
        )
        self.spawned = {}

    @property
    def folder(self):
        return only_folder(self.runs)

    @property
    def shuffler_pid(self):
        (pid,) = [pid for pid, line in self.spawned.items() if " -m shufl.cli shuffler " in line]
        return pid

    def wait_for_rounds(self, rounds):
        def enough():
            assert self.process.poll() is None, self.process.communicate()
            files = list(self.runs.glob("*/metrics.jsonl"))
            return files and files[0].read_text().count("\n") >= rounds

        wait_until(enough, 120, f"{rounds} rounds")
        self.spawned = children(self.process.pid)

    def finish(self, seconds=LIMIT):
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def clean_up(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        for pid in self.spawned:
            if running(pid):
                os.kill(pid, signal.SIGKILL)
