"""Addresses, and the settings that both ends of the wire share."""

from __future__ import annotations

import ipaddress
import socket

MAX_REPORT_BYTES = 64 * 2**20
"""Longest sealed report that a run may declare, in bytes."""

MOST_USERS = 2**24
"""Most users of one round at a shuffler, which has 10 bytes of memory for each."""

PIECE_BYTES = 2**18
"""A longer report travels in pieces of this many bytes."""

MOST_TOGETHER = 256
"""Reports in one message, at most."""

READY = "shuffler listening on "
"""A started shuffler's one line on standard output is this and its address."""

SERVER_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # The longest: a piece of a report, or a plan, and names.
    ("grpc.max_receive_message_length", PIECE_BYTES + 2**16),
    # Otherwise a second process could listen on the same port and take half of the reports.
    ("grpc.so_reuseport", 0),
    # A peer that is gone without a word is noticed within 40 s; its own pings are welcome, too.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A peer has so long for the handshake of TLS, and so long without any call.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
    # How much of a stream is received ahead of being read: fixed, because gRPC would let it grow to
    # some megabytes for each. With 1/6 of it reports of 100 kB came at less than half the rate.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 3 * 2**19),
]

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    # The longest: entries of the record.
    ("grpc.max_receive_message_length", 2**20 + 2**16),
    ("grpc.enable_retries", 0),
    # A peer that says nothing any more is found out while a call waits, however long that may.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Straight to the shuffler, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
    # A restarted shuffler is found again within seconds rather than minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Else channels of one process to one address share a connection and its window.
    ("grpc.use_local_subchannel_pool", 1),
]


def parse_address(address: str) -> tuple[str, int, bool]:
    """Splits `HOST:PORT`, an IPv6 host in brackets.

    Returns:
        The host, the port, and whether the host is certain to be this machine's loopback. Of names
        only `localhost` is, and it is taken as 127.0.0.1: other names may resolve to anything.

    Raises:
        ValueError: if there is no host, or the port does not lie in [0, 65535].
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"an IPv6 address goes in brackets, [HOST]:PORT, got {address!r}")
    if not (host and colon and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"an address is HOST:PORT with a port in [0, 65535], got {address!r}")
    if host == "localhost":
        return "127.0.0.1", int(port), True
    try:
        return host, int(port), ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host, int(port), False


def check_address(address: str) -> str:
    """The address, if it is one that can be called.

    Raises:
        ValueError: as for `parse_address`, or if the port is 0.
    """
    if parse_address(address)[1] == 0:
        raise ValueError(f"an address to call has a port in [1, 65535], got {address!r}")
    return address


def join_address(host: str, port: int) -> str:
    """`HOST:PORT`, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def probe(host: str, port: int) -> None:
    """Takes an address for a moment.

    Raises:
        OSError: this machine does not have it, or another process does.
    """
    for family, kind, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        with socket.socket(family, kind) as own:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            own.bind(target)
