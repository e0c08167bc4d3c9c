"""`shufl rehearse`: a whole deployment on this machine, as real processes on loopback.

Only hosts, ports and the reverse proxy differ from production. The sites have keys of their own,
TLS and node authentication; Flower's SuperLink and SuperNodes, shufflers and nodes are real.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from shufl.deploy.deployment import (
    LONGEST_SOCKET,
    PROGRAMS,
    Deployment,
    NodeEntry,
    ServerEntry,
    ShufflerEntry,
    flower_environment,
)
from shufl.deploy.provision import provision
from shufl.deploy.superlink import register, run_on
from shufl.learning.config import load
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import EngineFailed
from shufl.shuffler.keys import Request, make_flower_key

_START_SECONDS = 600.0
_STOP_SECONDS = 10.0
_AGAIN_SECONDS = 2.0


_Reached = TypeVar("_Reached", ServerEntry, ShufflerEntry)


def on_loopback(deployment: Deployment, proxied: bool) -> Deployment:
    """The same deployment with every site on this machine, on free ports."""
    ports = free_ports(2 + 2 * len(deployment.shufflers) + len(deployment.nodes))

    def here(site: _Reached) -> _Reached:
        own, proxy = next(ports), next(ports)
        places = {"host": "127.0.0.1", "port": proxy if proxied else own, "local_port": own}
        return site.model_copy(update=places)

    moved = {
        "server": here(deployment.server),
        "shufflers": tuple(map(here, deployment.shufflers)),
        "nodes": tuple(node.model_copy(update={"port": next(ports)}) for node in deployment.nodes),
    }
    return deployment.model_copy(update=moved)


def free_ports(number: int) -> Iterator[int]:
    """Ports of loopback that nobody listens on."""
    with ExitStack() as stack:
        servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
        return iter([stack.enter_context(server).getsockname()[1] for server in servers])


class Rehearsal:
    """The sites of a deployment in one folder, and their processes.

    Whatever ends unasked is started again.

    Attributes:
        deployment: as it runs here.
        folder: holds a folder for each site.
        running: by site and process name.
    """

    def __init__(self, deployment: Deployment, base: Path, folder: Path, proxied: bool = False):
        """Provisions every site, makes all keys, and has them signed.

        The deployment's file is in `base`; its hosts and ports are replaced. If `proxied`, nodes go
        through reverse proxies, which the caller starts with the sites' `nginx.conf`.
        """
        self.deployment = on_loopback(deployment, proxied)
        self.folder = folder.absolute()
        self.running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self._lock = threading.RLock()
        longest = max(len(node.name) for node in self._nodes) + len("/node.sock")
        if len(str(self.folder)) + longest > LONGEST_SOCKET:
            raise ConfigError(
                f"the path of a Unix socket is at most {LONGEST_SOCKET} characters long, that of "
                f"{self.folder} leaves no room: rehearse in another folder"
            )
        provision_here = functools.partial(
            provision, self.deployment, base, self.folder, lambda *_: True, in_place=True
        )
        self.sites = {site.name: site for site in provision_here().sites}
        for site in self.sites.values():
            keys = self.folder / site.name / "keys"
            for name in site.requests:
                Request.create(name).write(keys)
        for node in self._nodes:
            make_flower_key(self.folder / node.name / "keys")
        provision_here()

    def __enter__(self) -> Self:
        """Starts everything."""
        try:
            threading.Thread(target=self._start_again, daemon=True).start()
            for shuffler in self.deployment.shufflers:
                self.start(shuffler.name, "shuffler")
            self.start("server", "superlink")
            shufflers = (each.port for each in self.deployment.shufflers)
            for port in (self.deployment.server.local_port, *shufflers):
                self.wait_for_port(port)
            for _ in register(self.folder / "server" / "server.toml"):
                pass
            for node in self._nodes:
                self.start_node(node.name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Stops everything, by process id."""
        self._stopping.set()
        with self._lock:
            for process in reversed(self.running.values()):
                process.terminate()
            deadline = time.monotonic() + _STOP_SECONDS
            for process in self.running.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                self._kill_group(process)
            self.running.clear()

    def start(self, site: str, name: str, **options: Any) -> None:
        """Starts a process of a site, as its service unit would; options are those of `Popen`."""
        (process,) = [each for each in self.sites[site].processes if each.name == name]
        folder = self.folder / site
        with self._lock, (folder / f"{name}.out").open("ab") as log:
            self.running[site, name] = subprocess.Popen(
                process.command_in(PROGRAMS),
                cwd=folder,
                env=flower_environment(folder / process.home),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                **options,
            )

    def start_node(self, name: str) -> None:
        """Starts a node's processes."""
        for process in self.sites[name].processes:
            self.start(name, process.name)

    @property
    def _nodes(self) -> list[NodeEntry]:
        return list(self.deployment.numbered.values())

    def _start_again(self) -> None:
        while not self._stopping.wait(_AGAIN_SECONDS):
            with self._lock:
                for (site, name), process in list(self.running.items()):
                    if process.poll() is not None and not self._stopping.is_set():
                        self._kill_group(process)  # what it had started
                        self.start(site, name)

    def wait_for_port(self, port: int) -> None:
        """Waits until a process listens there.

        Raises:
            EngineFailed: none did for ten minutes.
        """
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise EngineFailed(
                        f"nothing listens on port {port}; {self.folder}/*/*.out say more"
                    ) from None
                time.sleep(0.1)

    def _kill_group(self, process: subprocess.Popen[bytes]) -> None:
        """Also what it has started, which is in its process group."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rehearse(deployment: Deployment, base: Path, folder: Path, runs: Path) -> str:
    """Runs a deployment on this machine from keys to the end of its budget.

    The deployment's file is in `base`; the sites go to `folder` and the run folder to `runs`.
    Returns what stopped the run.

    Raises:
        ConfigError: before any work.
        EngineFailed, RoundFailed: it ended early; everything stays in the folder.
    """
    with Rehearsal(deployment, base, folder) as rehearsal:
        site, config = (rehearsal.folder / "server" / name for name in ("server.toml", "run.toml"))
        return run_on(deployment.name, site, load(str(config)), runs)
