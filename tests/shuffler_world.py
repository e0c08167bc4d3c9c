"""A shuffler with the two ends of its wire: in a process of its own, or in a thread of this one."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from run_world import LIMIT, wait_until
from shufl.shuffler import (
    ControlClient,
    Credentials,
    IntakeClient,
    Refusal,
    RoundHeader,
    ShufflerProcess,
    ShufflerRefused,
    Verdict,
    callers,
    generate_key_pair,
    key_digest,
    seal,
    sealed_length,
)
from shufl.shuffler.callers import Caller, Revoked, Role
from shufl.shuffler.config import ShufflerConfig
from shufl.shuffler.keys import Authority
from shufl.shuffler.service.grpc_server import ShufflerServer
from shufl.shuffler.service.log import Log
from shufl.shuffler.service.metrics import Metrics
from shufl.shuffler.serving import open_store
from shufl.shuffler.store.open_batches import Report
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS, READY
from shufl.shuffler.wire.connection import method_of
from shufl.shuffler.wire.shuffler_pb2 import DESCRIPTOR
from tiny_disk import fill

PAYLOAD_BYTES = 100
PUBLIC_KEY = generate_key_pair()[1]
"""For rounds whose reports nobody opens."""

KEY_DIGEST = key_digest(PUBLIC_KEY)


def plan(users: int = 1000, minimum_batch: int = 1, **others: object) -> bytes:
    fields = {"check_in_rate": 1.0, "rounds": 10**6, "delta": 1e-6, "target_epsilon": 1.0}
    mechanism = {"name": "gaussian", "clip_norm": 1.0, "noise_multiplier": 1.0}
    sizes = {"users": users, "minimum_batch": minimum_batch}
    return json.dumps(fields | {"mechanism": mechanism} | sizes | others).encode()


@contextmanager
def shuffler_of(config: Path) -> Iterator[subprocess.Popen[str]]:
    """`shufl shuffler` with this configuration, which may not have been written yet."""
    command = [sys.executable, "-m", "shufl.cli", "shuffler", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def listening(child: subprocess.Popen[str]) -> str:
    """Where it listens, once it does."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line.startswith(READY)
    return line.removeprefix(READY).strip()


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


def stub_of(service: str, channel: grpc.Channel) -> Any:
    """All methods of a service, each an attribute of its name."""
    names = [method.name for method in DESCRIPTOR.services_by_name[service].methods]
    return SimpleNamespace(**{name: method_of(channel, service, name) for name in names})


def report(
    store: RunStore, user: int, sealed: bytes, round: int = 1, run_id: str = "run"
) -> Report:
    """As the store gets it, of an open round."""
    header, _ = store.batches.agree(run_id, round, "", "")
    caller = Caller(Role.NODE, "node", 2**32)
    return Report(run_id, round, header.commitment, only(user), sealed, caller)


def only(user: int) -> range:
    """The numbers of one user, as a batch takes them."""
    return range(user, user + 1)


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One for all shufflers of this process: gRPC's servers like to share."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="shufflers", daemon=True).start()
    return loop


class ShufflerHere(ShufflerProcess):
    """The same shuffler without a process of its own: its server runs in a thread of this one.

    So it costs no start of Python, and a test may put its hands on the server's clocks and stores.
    What `shufl shuffler` does around the server (signals, files of TLS, the parent's end) needs a
    `ShufflerProcess`. With `log_file`, that has what all shufflers of this process log.

    Attributes:
        directory: where its record is.
        metrics: what the server counts.
        store: what it has on disk.
        revoked: whose credentials it refuses; nobody's at first.
    """

    directory: Path
    metrics: Metrics
    store: RunStore
    revoked: Revoked
    _server: ShufflerServer | None = None

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def alive(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        self._stack = ExitStack()
        settings = ShufflerConfig.model_validate(self._config)
        directory = settings.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="shufl-")
            directory = Path(self._stack.enter_context(temporary))
        if settings.log_file is not None:
            self._stack.enter_context(restored_log())
            Log(settings.log_file, settings.log_megabytes, settings.log_kept)
        self.directory = directory
        self.store = open_store(settings, directory)
        self.metrics, self.revoked = Metrics(), Revoked(None)

        async def begin() -> None:
            self._server = ShufflerServer(
                self.store, self._own, self.revoked, settings.limits, self.metrics
            )
            self.address = await self._server.start(settings.listen)

        self._run(begin())

    def wait(self) -> None:
        """It listens already."""

    def scrape(self) -> dict[str, float]:
        """What Prometheus would read."""
        return _values(generate_latest(self.metrics.registry).decode())

    def begin_to_stop(self) -> tuple[Future[None], Callable[[], object]]:
        """What SIGTERM begins, and what a second one does: releases have no more time."""
        server, self._server = self._server, None
        assert server is not None
        at_once = asyncio.Event()
        stopping = asyncio.run_coroutine_threadsafe(server.stop(at_once), _loop())
        return stopping, functools.partial(_loop().call_soon_threadsafe, at_once.set)

    def _stop(self) -> None:
        if self._server is not None:
            stopping, at_once = self.begin_to_stop()
            at_once()
            stopping.result(LIMIT)
        self._stack.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, _loop()).result(LIMIT)


@contextmanager
def restored_log() -> Iterator[None]:
    """Puts the shuffler's logger back as it was."""
    log = logging.getLogger("shufl.shuffler")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    for handler in log.handlers:
        if handler not in handlers:
            handler.close()
    log.handlers[:], log.level, log.propagate = handlers, level, propagate


@dataclasses.dataclass(frozen=True)
class Ended:
    """What a command has left."""

    returncode: object
    stdout: str
    stderr: str


class World:
    """One shuffler, both clients, and a server's key pair."""

    def __init__(self, process: ShufflerProcess) -> None:
        self.process = process
        self.private_key, self.public_key = generate_key_pair()
        self.control = ControlClient(process.address, process.control, timeout=LIMIT)
        self.intake = IntakeClient(process.address, process.submit, timeout=LIMIT)

    def close(self) -> None:
        self.control.close()
        self.intake.close()

    def begin(
        self,
        run_id: str = "run",
        round: int = 1,
        minimum_batch: int = 1,
        users: int = 1000,
        report_bytes: int = sealed_length(PAYLOAD_BYTES),
        **of_plan: object,
    ) -> RoundHeader:
        about = plan(users, minimum_batch, **of_plan)
        digest = self.control.create_run(run_id, about, report_bytes)
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


@pytest.fixture
def start() -> Iterator[Callable[..., World]]:
    """Starts shufflers, which are processes; all of them are gone after the test."""
    yield from _starter(ShufflerProcess)


@pytest.fixture
def here() -> Iterator[Callable[..., World]]:
    """Starts shufflers in this process; all of them are gone after the test."""
    yield from _starter(ShufflerHere)


def _starter(kind: type[ShufflerProcess]) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def starter(directory: Path | None = None, **options: object) -> World:
            process = kind(directory, **options)  # type: ignore[arg-type]
            world = World(stack.enter_context(process))
            stack.callback(world.close)
            return world

        yield starter


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One shuffler for the tests of a module that do not hurt it; use a run id of your own."""
    with ShufflerHere() as shuffler:
        world = World(shuffler)
        yield world
        world.close()


def payload(user: int) -> bytes:
    return f"payload of {user}".encode().ljust(PAYLOAD_BYTES, b".")


def scrape(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT) as reply:
        return _values(reply.read().decode())


def _values(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def logged(log: Path) -> list[dict[str, Any]]:
    """What a shuffler has logged, without the times."""
    lines = map(json.loads, log.read_text().splitlines())
    return [{key: line[key] for key in line if key != "time"} for line in lines]


def pass_days(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Has shufflers of this process see certificates as expired that expire in so many days."""
    real = datetime.datetime

    class Later(real):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real.now(tz) + datetime.timedelta(days=days)

    monkeypatch.setattr(callers, "datetime", SimpleNamespace(datetime=Later, UTC=datetime.UTC))


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
    process = world.process
    here = isinstance(process, ShufflerHere)
    return nameless_files(process.pid, str(process.directory) if here else "")


def nameless_files(pid: int, place: str) -> int:
    """How many files without a name a process has open, where they were made in such a place."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            name = str(descriptor.readlink())
            is_ours = int(descriptor.name) > 2 and name.startswith(place)
            count += is_ours and name.endswith(" (deleted)")
    return count


def refusal(call: Callable[..., Any], *arguments: object) -> Refusal:
    """Why the shuffler refuses a call, or a release at its first part."""
    with pytest.raises(ShufflerRefused) as refused:
        list(call(*arguments) or [])
    return refused.value.reason


def exit_code(world: World) -> int:
    """Waits for the end of the process, and leaves its code for its owner to take."""
    ended = os.waitid(os.P_PID, world.process.pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill(world: World) -> None:
    os.kill(world.process.pid, signal.SIGKILL)
    wait_until(lambda: not world.process.alive, LIMIT, "its end")


class Silence:
    """The request of a call, which does not come; the call is over when it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()

    def __iter__(self):
        self.let_go.wait(LIMIT)
        yield from ()
