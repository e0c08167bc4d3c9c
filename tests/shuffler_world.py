"""A shuffler process with the two ends of its wire, for the tests of this folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from shufl.shuffler import (
    ControlClient,
    Credentials,
    IntakeClient,
    RoundHeader,
    ShufflerProcess,
    ShufflerRefused,
    Verdict,
    generate_key_pair,
    key_digest,
    seal,
    sealed_length,
)
from shufl.shuffler.callers import Caller, Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.store.open_batches import Report
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS
from tiny_disk import fill

PAYLOAD_BYTES = 100
PUBLIC_KEY = generate_key_pair()[1]
"""For rounds whose reports nobody opens."""

KEY_DIGEST = key_digest(PUBLIC_KEY)


def plan(users: int = 100_000, minimum_batch: int = 1, **others: object) -> bytes:
    fields = {"check_in_rate": 1.0, "rounds": 10**6, "delta": 1e-6, "target_epsilon": 1.0}
    mechanism = {"name": "gaussian", "clip_norm": 1.0, "noise_multiplier": 1.0}
    sizes = {"users": users, "minimum_batch": minimum_batch}
    return json.dumps(fields | {"mechanism": mechanism} | sizes | others).encode()


def tls_section(folder: Path) -> tuple[Authority, str]:
    """Makes the files of a shuffler's TLS; their authority, and what the configuration says."""
    authority = Authority.create()
    folder.mkdir()
    authority.issue(Role.SHUFFLER, "shuffler", hosts=["127.0.0.1"]).write(folder, "shuffler")
    files = {"certificate": "shuffler.pem", "key": "shuffler.key", "authority": "authority.pem"}
    lines = [f'{name} = "{folder / file}"\n' for name, file in files.items()]
    return authority, "[tls]\n" + "".join(lines)


def fill_up(disk: Path, store: RunStore | ControlClient) -> Path:
    """Leaves not even room for a line of the record; returns the file that takes it."""
    numbers = itertools.count(5)
    for number in range(5):
        store.create_run(f"filling {number}", plan(), 64)
    filler = fill(disk)
    with pytest.raises(ShufflerRefused, match="STORAGE_FULL"):
        while True:
            store.create_run(f"filling {next(numbers)}", plan(), 64)
    with pytest.raises(ShufflerRefused, match="STORAGE_FULL"):  # a shorter line
        for number in range(next(numbers)):
            store.end_run(f"filling {number}")
    return filler


def raw_channel(
    world: World,
    credentials: Credentials | None = None,
    options: Sequence[tuple[str, int]] = CHANNEL_OPTIONS,
) -> grpc.Channel:
    """A channel without our client; with a node's credentials, or those given."""
    given = credentials or world.process.submit
    assert given is not None
    tls = grpc.ssl_channel_credentials(given.authority, given.private_key, given.certificate)
    return grpc.secure_channel(world.process.address, tls, options)


def report(
    store: RunStore, user: int, sealed: bytes, round: int = 1, run_id: str = "run"
) -> Report:
    """As the store gets it, of an open round."""
    header = store.batches.header(run_id, round)
    caller = Caller(Role.NODE, "node", 2**32)
    return Report(run_id, round, header.commitment, user, sealed, caller)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a command has left."""

    returncode: object
    stdout: str
    stderr: str


class World:
    """One shuffler process, both clients, and a server's key pair."""

    def __init__(self, process: ShufflerProcess) -> None:
        self.process = process
        self.private_key, self.public_key = generate_key_pair()
        self.control = ControlClient(process.address, process.control, timeout=60)
        self.intake = IntakeClient(process.address, process.submit, timeout=60)

    def close(self) -> None:
        self.control.close()
        self.intake.close()

    def begin(
        self,
        run_id: str = "run",
        round: int = 1,
        minimum_batch: int = 1,
        users: int = 100_000,
        report_bytes: int = sealed_length(PAYLOAD_BYTES),
    ) -> RoundHeader:
        digest = self.control.create_run(run_id, plan(users, minimum_batch), report_bytes)
        model = f"model {round}"
        nonce = self.control.open_round(run_id, round, model, self.public_key)
        return RoundHeader(run_id, round, model, digest, key_digest(self.public_key), nonce)

    def reports(self, header: RoundHeader, count: int, first: int = 0) -> list[tuple[int, bytes]]:
        return [
            (user, seal(payload(user), self.public_key, header))
            for user in range(first, first + count)
        ]

    def submit(self, header: RoundHeader, reports: list[tuple[int, bytes]]) -> list[Verdict]:
        return list(self.intake.submit(header, reports))


def payload(user: int) -> bytes:
    return f"payload of {user}".encode().ljust(PAYLOAD_BYTES, b".")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
        for line in lines
        if not line.startswith("#")
    }


def logged(log: Path) -> list[dict[str, Any]]:
    """What a shuffler has logged since its start, without the times."""
    started, *lines = map(json.loads, log.read_text().splitlines())
    assert started["event"] == "shuffler started"
    return [{key: line[key] for key in line if key != "time"} for line in lines]


def in_release(world: World, reports: int = 40):
    """A release that has begun and waits for its reader."""
    header = world.begin(report_bytes=2**20, users=reports)
    world.submit(header, [(user, bytes(2**20)) for user in range(reports)])
    world.control.close_round("run", 1)
    release = world.control.release("run", 1)
    next(release)
    return release


def open_batches(world: World) -> int:
    """How many batches the shuffler has: files without a name."""
    count = 0
    for descriptor in Path(f"/proc/{world.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            name = str(descriptor.readlink())
            count += int(descriptor.name) > 2 and name.endswith(" (deleted)")
    return count


def exit_code(world: World) -> int:
    """Waits for the end of the process, and leaves its code for its owner to take."""
    ended = os.waitid(os.P_PID, world.process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill(world: World) -> None:
    os.kill(world.process.pid, signal.SIGKILL)
    while world.process.alive:
        time.sleep(0.01)


class Silence:
    """Requests of a stream: those given, then nothing until it is let go."""

    def __init__(self, *requests: shuffler_pb2.SubmitRequest) -> None:
        self.requests = [*requests]
        self.let_go = threading.Event()

    def __iter__(self):
        yield from self.requests
        self.let_go.wait(120)
