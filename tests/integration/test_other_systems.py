"""Research on a laptop: what simulations use of the system is there beside Linux, too.

No Mac runs these tests. Python is taken what only Linux has, and starts processes as macOS does.
"""

import json
import os
import subprocess

import pytest

from nights import by_night
from run_world import LIMIT, only_folder, python_path, set_options, shufl_command

AS_ON_A_MAC = """
import multiprocessing, os
for name in ("O_TMPFILE", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "memfd_create"):
    delattr(os, name)
multiprocessing.set_start_method("spawn")
"""
ROUNDS = set_options("privacy.rounds=2", "simulation.nodes=2")


@pytest.fixture
def elsewhere(tmp_path):
    """Plays commands in interpreters without what only Linux has."""
    (tmp_path / "sitecustomize.py").write_text(AS_ON_A_MAC)
    env = os.environ | {"PYTHONPATH": python_path(tmp_path)}

    def play(*arguments):
        command = shufl_command(*arguments)
        about = {"cwd": tmp_path, "env": env, "capture_output": True, "text": True}
        return subprocess.run(command, timeout=LIMIT, **about)

    return play


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vectorised", *by_night("flower")])
def test_the_quickstart_runs(elsewhere, tmp_path, engine):
    done = elsewhere("run", "quickstart", "--engine", engine, *ROUNDS, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 2
    assert (only_folder(tmp_path / "runs") / "model.pt").is_file()


@pytest.mark.nightly
@pytest.mark.parametrize(
    "command",
    [
        "account -n 1000 --check-in-rate 0.1 --noise-multiplier 3 --rounds 9 --accountant all",
        "calibrate -n 1000 --target-epsilon 2 --delta 1e-5 --dimension 10 --rounds 100",
        "audit -n 20 --check-in-rate 1 --noise-multiplier 1 --samples 1000 --accountant pld",
        "experiment digits",
    ],
    ids=lambda command: command.partition(" ")[0],
)
def test_plans_audits_and_grids_run(elsewhere, command):
    done = elsewhere(*command.split())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["shuffler --config none.toml", "node --config none.toml"])
def test_what_protects_real_users_says_that_it_needs_linux(elsewhere, command):
    done = elsewhere(*command.split())
    what = command.partition(" ")[0]
    assert done.returncode == 2
    assert f": a {what} for real users needs Linux, got Linux; simulations" in done.stderr
