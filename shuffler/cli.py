"""The shuffler's command: `python -m shuffler`, or a command of another typer application."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sqlite3
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Optional

import typer

from shuffler.channel import READY, TOKEN_VARIABLE, parse_address
from shuffler.runs import RunStore
from shuffler.service import MIN_TOKEN_CHARACTERS, ShufflerServer

__all__ = ["shuffler_command"]

_PARENT_SECONDS = 0.5
# The threads that write to disk come back for a moment after each write; by default they wait 5 ms
# for the event loop to let go.
_SWITCH_SECONDS = 0.0005


def shuffler_command(
    listen: Annotated[
        str, typer.Option(help="HOST:PORT; port 0 picks a free one. Loopback only without TLS.")
    ] = "127.0.0.1:0",
    spool: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads the annotation)
        typer.Option(help="Directory for accepted reports. Default: temporary, removed at exit."),
    ] = None,
    log_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Append the log here instead of writing it to standard error."),
    ] = None,
    tls_certificate: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="PEM file with the certificate chain to serve with."),
    ] = None,
    tls_key: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="PEM file with the certificate's private key."),
    ] = None,
    exit_with_parent: Annotated[
        bool, typer.Option(help="Shut down when standard input ends or the parent is gone.")
    ] = False,
) -> None:
    """Run the shuffler: collect sealed reports, release each batch once in random order.

    The server's control token is read from the environment variable SHUFL_CONTROL_TOKEN.
    """
    parent = os.getppid()
    with ExitStack() as stack:
        try:
            token = os.environ.pop(TOKEN_VARIABLE, "")
            if len(token) < MIN_TOKEN_CHARACTERS:
                raise ValueError(
                    f"{TOKEN_VARIABLE} must hold a token of at least"
                    f" {MIN_TOKEN_CHARACTERS} characters"
                )
            parse_address(listen)
            tls = _read_tls(tls_certificate, tls_key)
            os.umask(0o077)
            _log_to(log_file)
            if spool is None:
                spool = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shufl-")))
            store = RunStore(spool)
            stack.callback(store.close)
            watch = (lambda stop: _watch_parent(parent, stop)) if exit_with_parent else None
            asyncio.run(_serve(store, token, listen, tls, watch))
        except (ValueError, OSError, sqlite3.Error) as error:
            typer.echo(f"shuffler: {error}", err=True)
            raise typer.Exit(2) from None


async def _serve(
    store: RunStore,
    token: str,
    listen: str,
    tls: tuple[bytes, bytes] | None,
    watch: Callable[[Callable[[], None]], None] | None,
) -> None:
    """Serves until SIGTERM, SIGINT, or the end of the parent."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = ShufflerServer(store, token)
    try:
        address = await server.start(listen, tls)
        if watch is not None:
            watch(lambda: _from_thread(loop, stopped.set))
        typer.echo(f"{READY}{address}")
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await server.stop()


def _from_thread(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


def _watch_parent(parent: int, stop: Callable[[], None]) -> None:
    """Calls `stop` when standard input ends or the parent process changes.

    Both, because either alone can fail: another child of the parent may hold the pipe open, and
    the parent may have been gone before its id was read.
    """

    def read() -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError:
            pass
        stop()

    def poll() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(_PARENT_SECONDS)
        stop()

    for target in (read, poll):
        threading.Thread(target=target, daemon=True).start()


def _read_tls(certificate: Path | None, key: Path | None) -> tuple[bytes, bytes] | None:
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ValueError("--tls-certificate and --tls-key go together")
    pair = certificate.read_bytes(), key.read_bytes()
    try:
        # Asked here, because gRPC would only say that it can not listen.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except ssl.SSLError as error:
        raise ValueError(f"TLS certificate and key do not fit: {error.reason}") from None
    return pair


def _log_to(path: Path | None) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if path is not None:
        handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log = logging.getLogger("shuffler")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
