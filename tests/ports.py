"""Ports of loopback for what a test starts later: until then nothing else takes them.

They are below those that Linux gives to connections, and each of xdist's workers has its own.
"""

import itertools
import os
import socket
from contextlib import suppress
from pathlib import Path

_FIRST = 20_000  # above those that Ray takes
_END = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_OWN = range(_FIRST + _WORKER, max(_END, _FIRST + 2000), _WORKERS)
_IN_TURN = itertools.cycle(itertools.chain(_OWN[os.getpid() % len(_OWN) :], _OWN))
"""Not from the first: another pytest may be at work."""


def free_port():
    """One that nobody listens on."""
    for port in itertools.islice(_IN_TURN, len(_OWN)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    raise AssertionError(f"no port of {_OWN} is free")


def free_ports(number):
    """As many, for what asks `shufl.deploy.rehearse.free_ports`."""
    return iter([free_port() for _ in range(number)])
