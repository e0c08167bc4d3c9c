"""A shuffler under a flood: does every honest report get through, and how much memory does it take?

    python benchmarks/shuffler_load.py
    python benchmarks/shuffler_load.py --nodes 20 --connections 300 --calls 500   # a smoke test

Three parts, each with a shuffler of its own with the default limits behind an nginx of its own with
the configuration that `shufl provision` writes, all on one machine. Every node has a credential of
its own, one user, one connection and one report, sealed in advance. It needs nginx with its
`stream` module.

    none          all nodes submit at once.
    connections   bare TCP connections from another address than the nodes', half of them silent
                  and half with the first bytes of TLS, are kept open, and opened again when they
                  are ended, while the nodes submit.
    calls         one node opens calls that say nothing, over ten connections, while the nodes
                  submit.

The script fails if a report is lost or the shuffler needs more than 300 MB. Peak memory is VmHWM of
its process; `after` is VmRSS some seconds after the flood, because the shuffler gives memory back
every ten seconds. `slowest` is the longest that a node took.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.resources
import resource
import shutil
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import grpc

from shufl.accounting import PrivacyPlan
from shufl.deploy.provision import LEAST_CONNECTIONS
from shufl.protocol import GaussianMechanism
from shufl.shuffler import (
    ControlClient,
    IntakeClient,
    RoundHeader,
    ShufflerError,
    ShufflerProcess,
    Verdict,
    generate_key_pair,
    key_digest,
    seal,
    sealed_length,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.config import Limits
from shufl.shuffler.credentials import Credentials
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS, parse_address

MOST_BYTES = 300e6
WORKER_CONNECTIONS = 4096  # of nginx; its default is fewer than these nodes take
PAYLOAD = 1000
DEADLINE = 120.0
DEFAULTS = Limits()
LIMITS = {  # not those of a simulation's own shuffler
    name: getattr(DEFAULTS, name) for name in ("calls", "calls_per_sender", "idle_seconds")
}
ATTACKER = "127.0.0.2"
STREAM_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")  # where it is not built in
FIRST_BYTES_OF_TLS = b"\x16\x03\x01\x02\x00"


def memory(pid: int, what: str) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{what}:")[2].split()[0]) * 1024


@contextmanager
def nginx(directory: Path, address: str, nodes: int) -> Iterator[str]:
    """nginx before a shuffler; where it listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    template = importlib.resources.files("shufl.deploy") / "templates" / "stream.conf"
    stream = string.Template(template.read_text()).substitute(
        listen=f"127.0.0.1:{port}",
        local_port=parse_address(address)[1],
        connections=max(LEAST_CONNECTIONS, 2 * nodes),
    )
    module = f"load_module {STREAM_MODULE};\n" if STREAM_MODULE.exists() else ""
    main = directory / "nginx.conf"
    main.write_text(
        f"{module}daemon off; pid {directory / 'pid'}; error_log {directory / 'error.log'};\n"
        f"events {{ worker_connections {WORKER_CONNECTIONS}; }}\n{stream}"
    )
    program = shutil.which("nginx")
    if program is None:
        raise SystemExit("shuffler_load.py: nginx is not installed")
    process = subprocess.Popen([program, "-p", str(directory), "-c", str(main)])
    try:
        while process.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 10):
                break
            time.sleep(0.05)
        else:
            raise SystemExit(f"shuffler_load.py: nginx ended with exit code {process.returncode}")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def bare_connections(address: str, count: int) -> Iterator[None]:
    """Keeps so many open; one thread opens again what is ended."""
    host, port, _ = parse_address(address)
    stop = threading.Event()

    def connect(number: int) -> socket.socket:
        connection = socket.create_connection((host, port), 60, (ATTACKER, 0))
        with suppress(OSError):
            connection.sendall(FIRST_BYTES_OF_TLS if number % 2 else b"")
        connection.setblocking(False)
        return connection

    def ended(connection: socket.socket) -> bool:
        try:
            return connection.recv(1000) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def keep(connections: list[socket.socket]) -> None:
        while not stop.wait(0.1):
            for number, connection in enumerate(connections):
                if ended(connection):
                    connection.close()
                    with suppress(OSError):
                        connections[number] = connect(number)

    connections = [connect(number) for number in range(count)]
    thread = threading.Thread(target=keep, args=(connections,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for connection in connections:
            connection.close()


@contextmanager
def silent_calls(address: str, own: Credentials, count: int) -> Iterator[None]:
    """Opens so many calls of one credential and says nothing."""
    opened, stop = threading.Event(), threading.Event()

    async def call() -> None:
        tls = grpc.ssl_channel_credentials(own.authority, own.private_key, own.certificate)
        channels = [grpc.aio.secure_channel(address, tls, CHANNEL_OPTIONS) for _ in range(10)]
        methods = [channel.stream_stream("/grpc.health.v1.Health/Check") for channel in channels]
        calls = [methods[number % 10]() for number in range(count)]
        await asyncio.sleep(1)
        opened.set()
        await asyncio.to_thread(stop.wait)
        for each in calls:
            each.cancel()
        for channel in channels:
            await channel.close()

    thread = threading.Thread(target=asyncio.run, args=(call(),))
    thread.start()
    opened.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(
    name: str,
    credentials: list[Credentials],
    authority: Authority,
    flood: Callable[[str], object],
    rest: float,
) -> bool:
    """One part; prints its line, and says whether nothing was lost and memory was kept."""
    count = len(credentials)
    with (
        tempfile.TemporaryDirectory() as directory,
        ShufflerProcess(Path(directory) / "state", authority=authority, limits=LIMITS) as process,
        nginx(Path(directory), process.address, count) as address,
        ControlClient(address, process.control) as control,
    ):
        plan = PrivacyPlan(
            users=count,
            check_in_rate=1.0,
            mechanism=GaussianMechanism(noise_multiplier=1.0),
            rounds=1,
            delta=1e-6,
            target_epsilon=1.0,
            minimum_batch=1,
        )
        _, public_key = generate_key_pair()
        digest = control.create_run("run", plan.to_json().encode(), sealed_length(PAYLOAD))
        nonce = control.open_round("run", 1, "model", public_key)
        header = RoundHeader("run", 1, "model", digest, key_digest(public_key), nonce)
        sealed = seal(bytes(PAYLOAD), public_key, header)
        before = memory(process.pid, "VmRSS")
        together = threading.Barrier(count)

        def node(own: Credentials) -> tuple[int, float]:
            verdicts: list[Verdict] = []
            with IntakeClient(address, own) as intake:
                together.wait()
                begun = time.perf_counter()
                with suppress(ShufflerError):
                    verdicts += intake.submit(header, [(0, sealed)], deadline=DEADLINE)
                return verdicts.count(Verdict.ACCEPTED), time.perf_counter() - begun

        with flood(address), ThreadPoolExecutor(count) as pool:
            results = list(pool.map(node, credentials))
        time.sleep(rest)
        accepted = sum(taken for taken, _ in results)
        control.close_round("run", 1)
        assert len(list(control.release("run", 1))) == accepted
        peak, after = memory(process.pid, "VmHWM"), memory(process.pid, "VmRSS")
    print(
        f"{name:12} {count:6} {count - accepted:6} {max(took for _, took in results):8.1f} s"
        f" {before / 1e6:8.0f} MB {peak / 1e6:6.0f} MB {after / 1e6:6.0f} MB",
        flush=True,
    )
    return accepted == count and peak <= MOST_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=300)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rest", type=float, default=12.0, help="seconds from a flood to `after`")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    authority = Authority.create()
    nodes = [authority.issue(Role.NODE, f"node-{n}", users=1) for n in range(options.nodes)]
    attacker = authority.issue(Role.NODE, "attacker", users=1)
    names = "nodes", "lost", "slowest", "before", "peak", "after"
    print("{:12} {:>6} {:>6} {:>10} {:>11} {:>9} {:>9}".format("flood", *names))
    parts: dict[str, Callable[[str], object]] = {
        "none": lambda address: nullcontext(),
        "connections": lambda address: bare_connections(address, options.connections),
        "calls": lambda address: silent_calls(address, attacker, options.calls),
    }
    good = [run(name, nodes, authority, flood, options.rest) for name, flood in parts.items()]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
