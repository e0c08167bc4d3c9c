"""Connections: those over which no call goes make room for new ones.

gRPC accepts connections, and closes those beyond a number, but does not tell them apart: whoever
opens many and says nothing would keep all others out. Here those without a call are ended when they
are too many, so that a new one finds room. Their sockets are found among this process's open files;
one is ended by a shutdown, which to gRPC is a peer that hangs up. Nothing is added to the way of
the bytes.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import unquote

from shufl.shuffler.wire.channel import parse_address

Peer = tuple[str, int]

_STRANGER_SECONDS = 20  # that a connection may stay without a call
_SILENT_SECONDS = 5  # that the kernel keeps a connection over which not a byte comes
_KEPT_FILES = 1200  # for the disk: three for each batch, two for each stream, and some


def raise_descriptor_limit() -> None:
    """Raises the number of files that this process may have open as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def most_connections(wanted: int) -> int:
    """So many connections, or fewer where they would take the descriptors of the disk."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(wanted, files - min(files // 2, _KEPT_FILES)))


@dataclass
class _Connection:
    """How a connection is used.

    Attributes:
        since: when it was found, or the last call over it ended.
        sender: whose calls come over it; None: none has come yet.
        calls: how many are open.
    """

    since: float = field(default_factory=time.monotonic)
    sender: str | None = None
    calls: int = 0


class Connections:
    """The connections to one port. At most half of those that there may be have no open call.

    Attributes:
        most: how many there may be.
    """

    def __init__(self, most: int, most_of_sender: int) -> None:
        """Remembers how many there may be: in all, and of one sender."""
        self.most = most
        self._most_of_sender = most_of_sender
        self._port = 0
        self._open: dict[Peer, _Connection] = {}
        self._known: dict[int, Peer | None] = {}  # whose connection each socket is, by its inode

    def watch(self, port: int) -> None:
        """From now on the connections are those to this port.

        The kernel then keeps connections over which not a byte comes, for some seconds, and drops
        them: gRPC does not see them, and they take no descriptor.
        """
        self._port = port
        for descriptor in _sockets().values():
            with suppress(OSError), _duplicate(descriptor) as found:
                listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and self._is_here(found):
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT_SECONDS)

    @contextmanager
    def call(self, name: str, sender: str) -> Iterator[bool]:
        """A call that comes over a connection, for as long as the block lasts.

        `name` is the peer's, as gRPC says it.

        Yields:
            Whether it may come: its sender has not too many connections.
        """
        peer = _parse(name)
        if peer not in self._open or self._open[peer].sender is None:
            self._update()
        found = self._open.get(peer)
        if found is None:  # it has just ended
            yield True
            return
        if found.sender is None:
            of_sender = sum(other.sender == sender for other in self._open.values())
            if of_sender >= self._most_of_sender:
                yield False
                return
            found.sender = sender
        found.calls += 1
        try:
            yield True
        finally:
            found.calls -= 1
            found.since = time.monotonic()

    def end_unused(self) -> bool:
        """Ends connections that wait too long for their first call, and some of too many unused.

        Those go first over which no call has come, then those that are unused for longest.

        Returns:
            Whether there were too many.
        """
        descriptors = self._update()
        unused = sorted(
            (found.sender is not None, found.since, peer)
            for peer, found in self._open.items()
            if not found.calls and peer in descriptors
        )
        too_many = len(unused) - max(1, self.most // 2)
        old = time.monotonic() - _STRANGER_SECONDS
        for index, (called, since, peer) in enumerate(unused):
            if index < too_many or (since < old and not called):
                self._shut_down(descriptors[peer], peer)
        return too_many > 0

    def _update(self) -> dict[Peer, int]:
        """Finds new connections and forgets ended ones; the descriptor of each that is open."""
        try:
            sockets = _sockets()
        except OSError:  # no descriptor is left to look with
            return {}
        known, descriptors = {}, {}
        for inode, descriptor in sockets.items():
            if inode not in self._known:
                self._known[inode] = self._peer_of(descriptor)
            known[inode] = peer = self._known[inode]
            if peer is not None:
                descriptors[peer] = descriptor
        self._known = known
        self._open = {peer: self._open.get(peer) or _Connection() for peer in descriptors}
        return descriptors

    def _peer_of(self, descriptor: int) -> Peer | None:
        """Whose connection to the port a socket is, if it is one."""
        with suppress(OSError), _duplicate(descriptor) as found:
            if self._is_here(found):
                host, port, *_ = found.getpeername()
                return _host(host), port
        return None

    def _is_here(self, found: socket.socket) -> bool:
        internet = found.family in (socket.AF_INET, socket.AF_INET6)
        return internet and found.getsockname()[1] == self._port

    def _shut_down(self, descriptor: int, peer: Peer) -> None:
        """Hangs up, if the descriptor is still that connection's."""
        with suppress(OSError), _duplicate(descriptor) as found:
            host, port, *_ = found.getpeername()
            if (_host(host), port) == peer and self._is_here(found):
                found.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """The descriptor of each socket that this process has open, by its inode."""
    found = {}
    with os.scandir("/proc/self/fd") as files:
        for file in files:
            with suppress(OSError):
                status = os.fstat(int(file.name))
                if stat.S_ISSOCK(status.st_mode):
                    found[status.st_ino] = int(file.name)
    return found


def _duplicate(descriptor: int) -> closing[socket.socket]:
    """A socket that is another descriptor's; closing it closes no connection."""
    return closing(socket.socket(fileno=os.dup(descriptor)))


def _parse(name: str) -> Peer:
    """Address and port of a peer as gRPC names it, such as `ipv6:%5B::1%5D:5000`."""
    host, port, _ = parse_address(unquote(name).partition(":")[2])
    return _host(host), port


def _host(address: str) -> str:
    """An address in one form: without its zone, and IPv4 as itself in IPv6."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)
