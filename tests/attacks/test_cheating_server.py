"""The server decides what code Flower runs on a node. Hostile code there reads and learns nothing.

Accounts, modes and units are those that the node's README and service files say, followed word by
word. The code runs where Flower starts it: under the SuperNode, in the SuperNode's account.
"""

import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deployment_world import (
    ACCOUNTS,
    NAME,
    deployment_of,
    number_accounts,
    run_flwr,
    write_flower_app,
)
from run_world import LIMIT, wait_until
from shufl.deploy.provision import experiment_of
from shufl.deploy.rehearse import Rehearsal

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes of other accounts"),
]
# And the group shufl; nobody has these numbers.
_GROUP = 64_000
_NEW_MOUNTS, _BIND, _PRIVATE = 0x20000, 0x1000, 0x44000

_SERVER = """
import json
import time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.2)
    message = Message(RecordDict({"go": ConfigRecord({"on": 1})}), nodes[0], "query")
    (answer,) = grid.send_and_receive([message], timeout=LIMIT)
    said = answer.content["said"]["json"] if answer.has_content() else json.dumps(str(answer.error))
    Path(OUT + ".new").write_text(said)
    Path(OUT + ".new").rename(OUT)
"""

_CLIENT = """
import json, os
from pathlib import Path

import grpc
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as Proto
import numpy as np

app = ClientApp()


def attempt(work):
    try:
        return work()
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"
    except Exception as error:
        return type(error).__name__


def call(kind, content):
    with grpc.insecure_channel(f"unix:{SITE}/node.sock") as channel:
        answer = channel.unary_unary(f"/shufl.Device/{kind}")(content, timeout=LIMIT)
    return {name: dict(record) for name, record in recorddict_from_proto(
        Proto.FromString(answer)).items()}


def records(model=None, **fields):
    content = RecordDict({"round": ConfigRecord(fields)})
    if model is not None:
        content["model"] = model
    return recorddict_to_proto(content).SerializeToString()


@app.query()
def query(message, context):
    run = {"run_id": "f" * 32, "plan_digest": DIGEST}
    round = {**run, "round": 1, "public_key": b"k" * 32, "seconds": 30.0}
    model = ArrayRecord([np.zeros((3, 3), np.float32)])
    said = {
        "account": os.getresuid(),
        "listed": attempt(lambda: os.listdir(SITE)),
        "read": [p for p in PATHS if isinstance(attempt(Path(p).read_bytes), bytes)],
        "written": [p for p in PATHS if isinstance(attempt(lambda p=p: open(p, "ab").close()),
                                                   type(None))],
        "made": attempt(lambda: Path(SITE, "node.toml.new").touch()),
        "moved": attempt(lambda: os.rename(f"{SITE}/node.toml", f"{SITE}/other")),
        "memory": attempt(lambda: open(f"/proc/{NODE}/mem", "rb").close()),
        "environment": attempt(lambda: Path(f"/proc/{NODE}/environ").read_bytes()),
        "killed": attempt(lambda: os.kill(NODE, 9)),
        "became": attempt(lambda: os.setuid(64000)),
        "honest query": attempt(lambda: call("query", records(**run))),
        "other plan": attempt(lambda: call("query", records(**run | {"plan_digest": "0" * 64}))),
        "no plan": attempt(lambda: call("query", records(**run | {"plan_digest": "x"}))),
        "own round": attempt(lambda: call("train", records(model, **round))),
        "no model": attempt(lambda: call("train", records(**round))),
        "junk": attempt(lambda: call("train", b"\\xff" * 100)),
        "nothing": attempt(lambda: call("query", b"")),
        "other method": attempt(lambda: call("read_data", b"")),
    }
    content = RecordDict({"said": ConfigRecord({"json": json.dumps(said)})})
    return Message(content, reply_to=message)
"""


def _become(account, mask):
    """What a new process does to become another account.

    An interpreter that lies in root's home is shown to it by mounts of its own.
    """
    prefix = Path(sys.base_prefix).resolve()
    closed = [path for path in reversed(prefix.parents) if not path.stat().st_mode & 0o001]

    libc = ctypes.CDLL(None)

    def become():
        if closed:
            failed = libc.unshare(_NEW_MOUNTS) or libc.mount(None, b"/", None, _PRIVATE, None)
            shown = os.open(prefix, os.O_PATH)
            source, over = f"/proc/self/fd/{shown}".encode(), bytes(closed[0])
            failed = failed or libc.mount(b"none", over, b"tmpfs", 0, b"mode=755")
            prefix.mkdir(parents=True)
            if failed or libc.mount(source, bytes(prefix), None, _BIND, None):
                raise OSError("the interpreter cannot be shown to another account")
            os.close(shown)
        os.umask(mask)
        os.setgroups([])
        os.setresgid(_GROUP, _GROUP, _GROUP)
        os.setresuid(account, account, account)

    return become


class AsInstalled(Rehearsal):
    """Nodes are installed by their install.sh, and run as their units say."""

    def install(self, name):
        """Runs `install.sh modes`, with numbers for the accounts, which nobody has here."""
        site = self.folder / name
        (site / ".venv").mkdir()
        (site / "records").mkdir()
        (site / "records" / "0.npz").write_bytes(b"records")
        number_accounts(site / "install.sh")
        self.install_modes(name)

    def install_modes(self, name):
        """Gives the files their owners and modes, as at any later time."""
        subprocess.run(["sh", "install.sh", "modes"], cwd=self.folder / name, check=True)

    def start_node(self, name):
        """Starts the processes with the units' accounts."""
        for process in ("node", "supernode", "clientapp"):
            unit = (self.folder / name / f"shufl-{process}.service").read_text()
            about = dict(re.findall(r"^(User|Group|UMask)=(.*)$", unit, re.MULTILINE))
            assert about["Group"] == "shufl"
            become = _become(ACCOUNTS[about["User"]], int(about["UMask"], 8))
            self.start(name, process, preexec_fn=become)


@pytest.fixture(scope="module")
def said(warm_deployment):
    """What the hostile code got."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        folder.chmod(0o711)
        deployment = deployment_of(folder, nodes=1, rounds=3)
        rehearsal = AsInstalled(deployment, folder, folder)
        site = folder / "ward-1"
        rehearsal.install("ward-1")
        with rehearsal:
            wait_until((site / "node.sock").exists, LIMIT, "the node")
            before = (site / "node.sock").stat()
            rehearsal.install_modes("ward-1")  # while it runs
            assert (site / "node.sock").stat() == before
            files = [path for path in site.rglob("*") if path.is_file()]
            paths = [str(path) for path in files if path.suffix != ".out"]  # the journal
            about = {
                "LIMIT": LIMIT,
                "SITE": str(site),
                "PATHS": [*paths, str(folder / "authority" / "authority.key")],
                "NODE": rehearsal.running["ward-1", "node"].pid,
                "DIGEST": experiment_of(rehearsal.deployment, folder).plan.digest(),
            }
            out = folder / "said.json"
            told = "".join(f"{name} = {value!r}\n" for name, value in about.items())
            write_flower_app(folder / "app", f"OUT = {str(out)!r}\n{told}{_SERVER}", told + _CLIENT)
            home = folder / "server" / "flower"
            done = run_flwr(home, "run", str(folder / "app"), NAME)
            assert done.returncode == 0, done.stdout
            wait_until(out.exists, LIMIT, "an answer")
            yield json.loads(out.read_text()) | {"site": site, "tried": paths}
            assert rehearsal.running["ward-1", "node"].poll() is None


def test_hostile_code_runs_in_an_account_of_its_own(said):
    assert said["account"] == [ACCOUNTS["shufl-app"]] * 3
    assert said["became"] == "PermissionError"


def test_hostile_code_reads_a_public_certificate_and_nothing_else(said):
    own = {"keys/flower-authority.pem"}
    tried = {str(Path(path).relative_to(said["site"])) for path in said["tried"]}
    read = {str(Path(path).relative_to(said["site"])) for path in said["read"]}
    secrets = {"device.db", "records/0.npz", "keys/ward-1.key", "device.toml", "node.toml"}
    secrets.add("keys/flower.key")
    assert tried > secrets | own
    assert {path for path in read if not path.startswith("app/")} == own
    assert said["listed"] == "PermissionError"


def test_hostile_code_changes_nothing_of_the_owner_s(said):
    written = {str(Path(path).relative_to(said["site"])) for path in said["written"]}
    assert not {path for path in written if not path.startswith("app/")}
    for attempt in ("made", "moved", "memory", "environment", "killed"):
        assert said[attempt] == "PermissionError", attempt


def test_hostile_code_gets_constant_answers_through_the_socket(said):
    about = {"number": 0, "users": 3, "shuffler": 0, "sums": 2}
    assert said["honest query"] == {"acknowledgement": about}
    refused = "FAILED_PRECONDITION: "
    assert said["junk"] == f"{refused}the message is malformed"
    assert said["nothing"] == f"{refused}a message must have the records round, and no others"
    assert said["no model"] == (
        f"{refused}a message must have the records round and model, and no others"
    )
    assert said["no plan"] == f"{refused}the run's announcement is malformed"
    assert said["other plan"].startswith("FAILED_PRECONDITION: privacy plan must be")
    assert said["own round"].startswith("FAILED_PRECONDITION: the ")
    assert said["other method"].startswith("UNIMPLEMENTED")
