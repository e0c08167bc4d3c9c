"""A whole deployment in one file, and the processes that each of its sites runs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from shufl.protocol import shuffler_of
from shufl.protocol.validation import Count, Positive, Record, Seconds
from shufl.shuffler.callers import Role
from shufl.shuffler.config import Limits

_LETTERS = "letters, digits, '.', '_' and '-'"
Name = Annotated[
    str,
    Field(
        pattern="^[A-Za-z0-9][A-Za-z0-9-]{0,39}$", description="at most 40 letters, digits or '-'"
    ),
]
Host = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9.:-]+$", description="a DNS name or an IP address")
]
Folder = Annotated[
    str, Field(pattern=r"^(/[A-Za-z0-9._-]+)+$", description=f"an absolute path of {_LETTERS}")
]
Port = Annotated[int, Field(ge=1, le=65535, description="a whole number from 1 to 65535")]


@dataclass(frozen=True)
class Process:
    """A process of a site, started in the site's folder.

    Attributes:
        name: that of its service unit.
        command: its program, by name, and arguments, as a shell reads them.
        about: what it is.
        user: the account that it runs as.
        home: Flower's, in the site's folder.
        stop_seconds: from SIGTERM until it is killed.
        unit: what else its service unit has under `[Service]`.
        after: the process that it starts after, and ends before.
    """

    name: str
    command: str
    about: str
    user: str = "shufl"
    home: str = "flower"
    stop_seconds: float = 90.0
    unit: tuple[str, ...] = ("Restart=always",)
    after: str = ""

    def command_in(self, programs: Path) -> list[str]:
        """The command's words, with its program's path in this folder."""
        program, *arguments = shlex.split(self.command)
        return [str(programs / program), *arguments]


@dataclass(frozen=True)
class Site:
    """A site's folder, as `provision` makes it.

    Attributes:
        name: of the site and its folder.
        files: what is in it, by name.
        requests: what the certificates are for that it asks for, by name.
        processes: what it runs.
    """

    name: str
    files: dict[str, str]
    requests: dict[str, Role]
    processes: tuple[Process, ...]


PROGRAMS = Path(sys.executable).parent
"""Where the programs of this environment are."""

_ENDING_SECONDS = 30.0  # a process that has ended its round needs no more

LONGEST_SOCKET = 100
"""Characters in the path of a node's Unix socket, at most."""


def flower_environment(home: Path) -> dict[str, str]:
    """Environment variables for Flower's programs, which start others by their names alone."""
    path = os.pathsep.join([str(PROGRAMS), os.environ.get("PATH", os.defpath)])
    return {**os.environ, "PATH": path, "FLWR_HOME": str(home)}


_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_IPV4 = re.compile(r"[0-9.]+")


class _Reached(Record):
    """A site that other parties reach.

    Attributes:
        host, port: where they reach the reverse proxy before its process.
        local_port: of the process, on loopback.
    """

    host: Host
    port: Port
    local_port: Port

    @property
    def address(self) -> str:
        """HOST:PORT of the reverse proxy."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def values(self) -> dict[str, object]:
        """What the templates of the site's files need: its keys, and where the proxy listens."""
        listen = "[::]:{} ipv6only=off"  # by IPv4 too: a name may have addresses of both kinds
        if _IPV4.fullmatch(self.host):
            listen = "0.0.0.0:{}"
        if self.host in _LOOPBACK:
            listen = "127.0.0.1:{}"
        values = {"address": self.address, "listen": listen.format(self.port)}
        return self.model_dump() | values


class ServerEntry(_Reached):
    """The server of a deployment, which nodes reach; its process is Flower's SuperLink.

    Attributes:
        round_timeout, patience: as in `ServerSite`.
    """

    port: Port = 8443
    local_port: Port = 8000
    round_timeout: Seconds = 120.0
    patience: Positive = 3600.0

    @property
    def process(self) -> Process:
        """Flower's SuperLink, which starts the ServerApp."""
        command = (
            f"flower-superlink --host 127.0.0.1 --port {self.local_port} "
            "--ssl-certfile keys/superlink.pem --ssl-keyfile keys/superlink.key "
            "--ssl-ca-certfile keys/flower-authority.pem --enable-supernode-auth "
            "--database flower/superlink.db --disable-runtime-dependency-installation"
        )
        return Process("superlink", command, "Flower's SuperLink")


class ShufflerEntry(_Reached):
    """A shuffler, which nodes and the server reach."""

    name: Name
    port: Port = 9000
    local_port: Port = 9001

    @property
    def process(self) -> Process:
        """The shuffler."""
        command = "shufl shuffler --config shuffler.toml"
        seconds = Limits().stop_seconds + _ENDING_SECONDS  # for releases
        return Process("shuffler", command, "the shuffler", stop_seconds=seconds)


class NodeEntry(Record):
    """A node; `users` and `data` are as in `NodeSite`.

    Attributes:
        port: of its SuperNode, on loopback.
        withdrawn: whether it no longer takes part.
    """

    name: Name
    users: Count = 1
    data: str = "simulated"
    port: Port = 9094
    withdrawn: bool = False

    def processes(self, server_address: str, seconds: float) -> tuple[Process, ...]:
        """A node's own process, and Flower's two, which pass messages on to it.

        A round takes `seconds`. The last process runs the code that the server sends; it has no
        key of Flower's and, under systemd, no network but loopback.
        """
        relay = (
            f"shufl-supernode --superlink {server_address} --port {self.port} "
            "--root-certificates keys/flower-authority.pem "
            "--auth-supernode-private-key keys/flower.key "
            """--node-config 'socket="node.sock"' --isolation process"""
        )
        counters = "/sys/fs/cgroup", "/run/dbus", "/run/systemd/io.systemd.Manager"
        no_counters = "InaccessiblePaths=" + " ".join(f"-{path}" for path in counters)
        only_loopback = "IPAddressDeny=any", "IPAddressAllow=localhost"
        return (
            Process(
                "node",
                "shufl node --config node.toml",
                "the process that has the data, coins and keys",
                stop_seconds=seconds + _ENDING_SECONDS,
                unit=("Restart=always", "RestartPreventExitStatus=2"),  # 2: somebody has to look
            ),
            Process("supernode", relay, "Flower's SuperNode, the connection", user="shufl-flower"),
            Process(
                "clientapp",
                f"flower-superexec --runtime-api-address 127.0.0.1:{self.port} --insecure",
                "Flower's SuperExec, which runs what the server sends",
                user="shufl-app",
                home="app",
                unit=("Restart=always", *only_loopback, no_counters),
            ),
        )


def run_process(name: str, seconds: float) -> Process:
    """A deployment's run on the SuperLink; each of its rounds takes `seconds`."""
    # It ends with 2 where somebody has to look, and with 130 where it was asked to.
    unit = "Restart=on-failure", "RestartPreventExitStatus=2", "SuccessExitStatus=130"
    return Process(
        "run",
        f"shufl run run.toml --on {name} --continue",
        "the run, which goes on with the next round when it is started again",
        stop_seconds=seconds + _ENDING_SECONDS,
        unit=unit,
        after="superlink",
    )


class Deployment(Record):
    """`deployment.toml`.

    Attributes:
        name: of the deployment, and of its connection in Flower's configuration.
        config: the run's configuration: a file, relative to this one, or a name that ships.
        server, shufflers, nodes: its sites. The order of the nodes numbers them: append new ones,
            and leave those in the file that are withdrawn, and say so.
        folder: where each site's folder is on its machine. Its last part begins the names of the
            site's units, so that two deployments have sites on one machine.
        trusted_nodes: whether the software of all nodes is trusted, as sums need it.
    """

    name: Name
    config: str
    server: ServerEntry
    shufflers: tuple[ShufflerEntry, ...] = Field(min_length=1, strict=False)
    nodes: tuple[NodeEntry, ...] = Field(min_length=1, strict=False)
    folder: Folder = "/srv/shufl"
    trusted_nodes: bool = False

    @model_validator(mode="after")
    def _names_differ(self) -> Deployment:
        names = self.sites
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"every site has a name of its own, got {name} twice")
            if name.startswith("authority") or name == "superlink":
                raise ValueError(f"a site's name must be another than {name}, which is taken")
        if not self.numbered:
            raise ValueError("one node at least must not be withdrawn")
        return self

    @property
    def numbered(self) -> dict[int, NodeEntry]:
        """The nodes that are not withdrawn, by their numbers."""
        return {number: node for number, node in enumerate(self.nodes) if not node.withdrawn}

    @property
    def sites(self) -> list[str]:
        """Names of all sites."""
        shufflers = (each.name for each in self.shufflers)
        return ["server", *shufflers, *(each.name for each in self.nodes)]

    @property
    def keys(self) -> set[str]:
        """Names of all keys that parties make."""
        return {"superlink", *self.sites, *(f"{node.name}.flower" for node in self.nodes)}

    @property
    def shuffler_names(self) -> dict[str, str]:
        """To which shuffler each node reports."""
        names = [each.name for each in self.shufflers]
        return {
            node.name: names[shuffler_of(number, len(names))]
            for number, node in enumerate(self.nodes)
        }
