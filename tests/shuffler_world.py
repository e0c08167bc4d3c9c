"""A shuffler with the two ends of its wire: in a process of its own, or in a thread of this one."""

import asyncio
import datetime
import functools
import itertools
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections import defaultdict
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2
from prometheus_client import generate_latest

from run_world import LIMIT, wait_until
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    Outcome,
    RoundHeader,
    ShufflerProcess,
    ShufflerRefused,
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
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS, READY
from shufl.shuffler.wire.connection import method_of
from shufl.shuffler.wire.shuffler_pb2 import DESCRIPTOR
from tiny_disk import fill

PAYLOAD_BYTES = 100
REPORT_BYTES = sealed_length(PAYLOAD_BYTES)
PUBLIC_KEY = generate_key_pair()[1]
"""For rounds whose reports nobody opens."""

KEY_DIGEST = key_digest(PUBLIC_KEY)

SUMS = {"mixing": "sum", "cover": True, "accountant": "sum-central"}
"""Of a plan whose shuffler hands over sums."""


def plan(users=1000, minimum_batch=1, **others):
    fields = {"check_in_rate": 1.0, "rounds": 10**6, "delta": 1e-6, "target_epsilon": 1.0}
    mechanism = {"name": "gaussian", "clip_norm": 1.0, "noise_multiplier": 1.0}
    sizes = {"users": users, "minimum_batch": minimum_batch}
    return json.dumps(fields | {"mechanism": mechanism} | sizes | others).encode()


ACCEPTED = 'shufl_reports_total{verdict="ACCEPTED"}'
"""Counts accepted reports."""

METHODS = {
    "/shufl.v1.Intake/Agree": shuffler_pb2.AgreeRequest(run_id="run", round=1, commitment="c"),
    "/shufl.v1.Intake/Submit": shuffler_pb2.SubmitRequest(
        run_id="run", round=1, commitment="c" * 64, sealed=b"x" * 64, users=[3], length=2**20
    ),
    "/shufl.v1.Control/CreateRun": shuffler_pb2.CreateRunRequest(
        run_id="run", plan=plan(50), report_bytes=64
    ),
    "/shufl.v1.Control/OpenRound": shuffler_pb2.OpenRoundRequest(
        run_id="run", round=1, model_digest="m", public_key=PUBLIC_KEY
    ),
    "/shufl.v1.Control/CloseRound": shuffler_pb2.CloseRoundRequest(run_id="no"),
    "/shufl.v1.Control/Release": shuffler_pb2.ReleaseRequest(run_id="no", round=1),
    "/shufl.v1.Control/EndRound": shuffler_pb2.EndRoundRequest(run_id="no", round=1),
    "/shufl.v1.Control/EndRun": shuffler_pb2.EndRunRequest(run_id="no"),
    "/grpc.health.v1.Health/Check": health_pb2.HealthCheckRequest(service="a"),
}
"""Every call of the protocol, and a message for it."""


@contextmanager
def shuffler_of(config):
    """`shufl shuffler` with this configuration, which may not have been written yet."""
    command = [sys.executable, "-m", "shufl.cli", "shuffler", "--config", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield child
        finally:
            child.kill()


def listening(child):
    """Where it listens, once it does."""
    line = child.stdout.readline()
    assert line.startswith(READY)
    return line.removeprefix(READY).strip()


def tls_section(folder):
    """Makes the files of a shuffler's TLS; their authority, and what the configuration says."""
    authority = Authority.create()
    folder.mkdir()
    authority.issue(Role.SHUFFLER, "shuffler", hosts=["127.0.0.1"]).write(folder, "shuffler")
    files = {"certificate": "shuffler.pem", "key": "shuffler.key", "authority": "authority.pem"}
    lines = [f'{name} = "{folder / file}"\n' for name, file in files.items()]
    return authority, "[tls]\n" + "".join(lines)


def fill_up(disk, store):
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


def raw_channel(world, credentials=None, options=CHANNEL_OPTIONS):
    """A channel without our client; with a node's credentials, or those given."""
    given = credentials or world.process.submit
    tls = grpc.ssl_channel_credentials(given.authority, given.private_key, given.certificate)
    return grpc.secure_channel(world.process.address, tls, options)


def stub_of(service, channel):
    """All methods of a service, each an attribute of its name."""
    names = [method.name for method in DESCRIPTOR.services_by_name[service].methods]
    return SimpleNamespace(**{name: method_of(channel, service, name) for name in names})


def report(store, user, sealed, round=1, run_id="run"):
    """As the store gets it, of an open round."""
    header, _ = store.batches.agree(run_id, round, "", "")
    caller = Caller(Role.NODE, "node", 2**32)
    return Report(run_id, round, header.commitment, only(user), sealed, caller)


def read(batch, limit=2**20):
    """All that a batch releases, in chunks of `limit` bytes; what is longer comes in pieces."""
    whole, pieces = [], b""
    for content, more in batch.chunks(limit):
        assert sum(map(len, content)) <= limit
        if more or pieces:
            pieces += b"".join(content)
            if not more:
                whole.append(pieces)
                pieces = b""
        else:
            whole += content
    return whole


def only(user):
    """The numbers of one user, as a batch takes them."""
    return range(user, user + 1)


@functools.cache
def _loop():
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
    def pid(self):
        return os.getpid()

    @property
    def alive(self):
        return self._server is not None

    def start(self):
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

        async def begin():
            self._server = ShufflerServer(
                self.store, self._own, self.revoked, settings.limits, self.metrics
            )
            self.address = await self._server.start(settings.listen)

        self._run(begin())

    def wait(self):
        """It listens already."""

    def scrape(self):
        """What Prometheus would read."""
        return _values(generate_latest(self.metrics.registry).decode())

    def begin_to_stop(self):
        """What SIGTERM begins, and what a second one does: releases have no more time."""
        server, self._server = self._server, None
        at_once = asyncio.Event()
        stopping = asyncio.run_coroutine_threadsafe(server.stop(at_once), _loop())
        return stopping, functools.partial(_loop().call_soon_threadsafe, at_once.set)

    def _stop(self):
        if self._server is not None:
            stopping, at_once = self.begin_to_stop()
            at_once()
            stopping.result(LIMIT)
        self._stack.close()

    def _run(self, work):
        asyncio.run_coroutine_threadsafe(work, _loop()).result(LIMIT)


@contextmanager
def restored_log():
    """Puts the shuffler's logger back as it was."""
    log = logging.getLogger("shufl.shuffler")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    for handler in log.handlers:
        if handler not in handlers:
            handler.close()
    log.handlers[:], log.level, log.propagate = handlers, level, propagate


class World:
    """One shuffler, both clients, and a server's key pair."""

    def __init__(self, process):
        self.process = process
        self.private_key, self.public_key = generate_key_pair()
        self.control = ControlClient(process.address, process.control, timeout=LIMIT)
        self.intake = IntakeClient(process.address, process.submit, timeout=LIMIT)

    def close(self):
        self.control.close()
        self.intake.close()

    def begin(
        self,
        run_id="run",
        round=1,
        minimum_batch=1,
        users=1000,
        report_bytes=REPORT_BYTES,
        **of_plan,
    ):
        about = plan(users, minimum_batch, **of_plan)
        digest = self.control.create_run(run_id, about, report_bytes)
        model = f"model {round}"
        nonce = self.control.open_round(run_id, round, model, self.public_key)
        return RoundHeader(run_id, round, model, digest, key_digest(self.public_key), nonce)

    def reports(self, header, count, first=0):
        return [
            (user, seal(payload(user), self.public_key, header))
            for user in range(first, first + count)
        ]

    def submit(self, header, reports):
        return list(self.intake.submit(header, reports))

    def released(self, header):
        """Closes the round; its batch."""
        about = header.run_id, header.round
        assert self.control.close_round(*about).outcome is Outcome.RELEASABLE
        return list(self.control.release(*about))


@pytest.fixture
def start():
    """Starts shufflers, which are processes; all of them are gone after the test."""
    yield from _starter(ShufflerProcess)


@pytest.fixture
def here():
    """Starts shufflers in this process; all of them are gone after the test."""
    yield from _starter(ShufflerHere)


def _starter(kind):
    with ExitStack() as stack:

        def starter(directory=None, **options):
            process = kind(directory, **options)  # type: ignore[arg-type]
            world = World(stack.enter_context(process))
            stack.callback(world.close)
            return world

        yield starter


@pytest.fixture(scope="module")
def shared():
    """One shuffler for the tests of a module that do not hurt it; use a run id of your own."""
    with ShufflerHere() as shuffler:
        world = World(shuffler)
        yield world
        world.close()


def payload(user):
    return f"payload of {user}".encode().ljust(PAYLOAD_BYTES, b".")


def scrape(address):
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT) as reply:
        return _values(reply.read().decode())


def _values(text):
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return defaultdict(float, {name: float(value) for name, _, value in lines})


def logged(log):
    """What a shuffler has logged, without the times."""
    lines = map(json.loads, log.read_text().splitlines())
    return [{key: line[key] for key in line if key != "time"} for line in lines]


def pass_days(monkeypatch, days):
    """Has shufflers of this process see certificates as expired that expire in so many days."""
    real = datetime.datetime

    class Later(real):
        @classmethod
        def now(cls, tz=None):
            return real.now(tz) + datetime.timedelta(days=days)

    monkeypatch.setattr(callers, "datetime", SimpleNamespace(datetime=Later, UTC=datetime.UTC))


def in_release(world, reports=40):
    """A release that has begun and waits for its reader."""
    header = world.begin(report_bytes=2**20, users=reports)
    world.submit(header, [(user, bytes(2**20)) for user in range(reports)])
    world.control.close_round("run", 1)
    release = world.control.release("run", 1)
    next(release)
    return release


def open_batches(world):
    """How many batches the shuffler has: files without a name."""
    process = world.process
    here = isinstance(process, ShufflerHere)
    return nameless_files(process.pid, str(process.directory) if here else "")


def nameless_files(pid, place):
    """How many files without a name a process has open, where they were made in such a place."""
    count = 0
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since it was listed
            name = str(descriptor.readlink())
            is_ours = int(descriptor.name) > 2 and name.startswith(place)
            count += is_ours and name.endswith(" (deleted)")
    return count


def refusal(call, *arguments):
    """Why the shuffler refuses a call, or a release at its first part."""
    with pytest.raises(ShufflerRefused) as refused:
        list(call(*arguments) or [])
    return refused.value.reason


def exit_code(world):
    """Waits for the end of the process, and leaves its code for its owner to take."""
    ended = os.waitid(os.P_PID, world.process.pid, os.WEXITED | os.WNOWAIT)
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def kill(world):
    os.kill(world.process.pid, signal.SIGKILL)
    wait_until(lambda: not world.process.alive, LIMIT, "its end")


class Relay:
    """Passes bytes on between clients and the shuffler, and stops connections.

    Args:
        to_shuffler, to_client: after how many bytes that go so, of each connection in turn; those
            beyond pass all.
        go_on: goes on when this event is set; None: the connection is cut.
    """

    def __init__(self, shuffler, to_shuffler=(), to_client=(), go_on=None):
        host, _, port = shuffler.rpartition(":")
        self._there, self._go_on = (host, int(port)), go_on
        self._stops = iter(to_shuffler), iter(to_client)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(self._there)
            for (one, other), stops in zip([(near, far), (far, near)], self._stops, strict=True):
                about = one, other, next(stops, math.inf)
                threading.Thread(target=self._pass, args=about, daemon=True).start()

    def _pass(self, one, other, most):
        passed = 0
        with suppress(OSError):  # the other direction has ended
            while data := one.recv(2**16):
                if passed > most:
                    if self._go_on is None:
                        break
                    self._go_on.wait(LIMIT)
                other.sendall(data)
                passed += len(data)
        for each in (one, other):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Silence:
    """The request of a call, which does not come; the call is over when it is let go."""

    def __init__(self):
        self.let_go = threading.Event()

    def __iter__(self):
        self.let_go.wait(LIMIT)
        yield from ()
