"""What each process of a deployment has loaded after it has played rounds.

By day import-linter holds the contracts between rooms.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tomli_w

from deployment_world import deployment_of, window_here
from run_world import LIMIT, shufl_command

ROOT = Path(__file__).resolve().parents[2]
NOTE = """
import os, sys

class Note:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "shufl":
            with open(os.environ["TEST_MODULES"] + f"/{os.getpid()}", "a") as file:
                file.write(name + chr(10))

sys.meta_path.insert(0, Note())
with open(os.environ["TEST_MODULES"] + f"/{os.getpid()}", "a") as file:
    file.write(" ".join(sys.orig_argv[1:]).replace(chr(10), " ") + chr(10))
"""
"""A `sitecustomize` that writes down the command of each process and what of shufl it imports."""


def path_of(module):
    """The file of a module; None: it is a name in one."""
    path = ROOT / "src" / module.replace(".", "/")
    files = path / "__init__.py", path.with_suffix(".py")
    return next((file for file in files if file.is_file()), None)


def rooms_of(modules):
    """The second parts of their names."""
    return {name.split(".")[1] for name in modules if "." in name} - {"vendor_internals"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Gives the modules that the processes whose command has a word have imported."""
    base = tmp_path_factory.mktemp("rooms")
    about = {"privacy": {"minimum_batch": 1}, "window": window_here()}
    deployment = deployment_of(base, nodes=1, rounds=2, **about)
    (own := base / "own").mkdir()
    for user in range(3):
        np.savez(own / f"{user}.npz", features=np.zeros((2, 1, 8, 8)), labels=[0, 9])
    node = deployment.nodes[0].model_copy(update={"data": str(own)})
    deployment = deployment.model_copy(update={"nodes": (node,)})
    file = base / "deployment.toml"
    file.write_text(tomli_w.dumps(deployment.model_dump(mode="json", exclude_none=True)))
    (base / "sitecustomize.py").write_text(NOTE)
    (notes := base / "modules").mkdir()
    command = shufl_command("rehearse", file, "--runs", base / "runs")
    env = os.environ | {"PYTHONPATH": str(base), "TEST_MODULES": str(notes)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    processes = [note.read_text().splitlines() for note in notes.iterdir()]

    def of(word):
        found = [
            {name for name in names if path_of(name)}
            for command, *names in processes
            if word in command.split() or any(part.endswith(f"/{word}") for part in command.split())
        ]
        assert found, (word, [command for command, *_ in processes])
        return set.union(*found)

    return of


@pytest.mark.nightly
def test_a_node_loads_no_server_no_simulator_and_its_plan_s_accountant_alone(loaded):
    modules = loaded("node")
    assert rooms_of(modules) == {"accounting", "cli", "clients", "configs"} | {
        *("deploy", "learning", "protocol", "shuffler")
    }
    accountants = {name for name in modules if name.startswith("shufl.accounting.accountants.")}
    of_blanket = {"base", "privacy_profile", "local", "blanket"}
    assert {name.rpartition(".")[2] for name in accountants} <= of_blanket
    assert not {name for name in modules if name.startswith("shufl.shuffler.s")}  # service, store
    assert not modules & {"shufl.shuffler.callers", "shufl.shuffler.wire.seed_reader"}
    lines = sum(len(path_of(name).read_text(encoding="utf-8").splitlines()) for name in modules)
    assert len(modules) <= 82 and lines <= 12_400  # with its command, and records from files


@pytest.mark.nightly
def test_shuffler_server_and_relay_load_what_they_are_for(loaded):
    """The relay is the process that runs what a server sends."""
    assert rooms_of(loaded("shuffler")) == {"cli", "protocol", "shuffler"}
    server = rooms_of(loaded("flwr-serverapp"))
    assert "server" in server and not server & {"clients", "simulator"}
    assert loaded("flwr-clientapp") <= {"shufl.clients", "shufl.clients.relay"} | {
        *("shufl", "shufl.protocol", "shufl.protocol.import_times", "shufl.vendor_internals")
    }
