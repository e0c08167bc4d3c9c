"""The process of a shuffler, from its configuration file to its end."""

from __future__ import annotations

import asyncio
import functools
import importlib.metadata
import logging
import os
import resource
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from shufl.protocol.mechanisms import make_randomness
from shufl.protocol.validation import check_linux
from shufl.shuffler.callers import Revoked
from shufl.shuffler.config import ShufflerConfig, Tls, load_config
from shufl.shuffler.credentials import read_certificate
from shufl.shuffler.service.grpc_server import ShufflerServer
from shufl.shuffler.service.log import Log
from shufl.shuffler.service.metrics import Metrics
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire.channel import READY

_log = logging.getLogger("shufl.shuffler")

_PARENT_SECONDS = 0.5
# The threads that write to disk come back for a moment after each write; by default they wait 5 ms
# for the event loop to let go.
_SWITCH_SECONDS = 0.0005


def serve(config: Path, exit_with_parent: bool) -> None:
    """Serves until it is told to stop.

    With `exit_with_parent` it stops when standard input ends or the parent is gone.

    Raises:
        ShufflerError, ValueError, OSError: one line says what is wrong.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can be heard, and once it cannot
    parent = os.getppid()
    with ExitStack() as stack:
        if not exit_with_parent:
            check_linux("a shuffler")
        settings = load_config(config)
        if settings.directory is None and not exit_with_parent:
            raise ValueError(f"{config}: directory is missing: where the public record is kept")
        if settings.simulation_seed is not None and not exit_with_parent:
            raise ValueError(f"{config}: simulation_seed is for a simulation's own shuffler")
        credentials = settings.tls.read()
        revoked = Revoked(settings.tls.revoked)
        os.umask(0o077)
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError):  # macOS takes no "unlimited"
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        log = Log(settings.log_file, settings.log_megabytes, settings.log_kept)
        directory = settings.directory
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="shufl-")
            directory = Path(stack.enter_context(temporary))
        store = open_store(settings, directory)
        metrics = Metrics()
        if settings.metrics is not None:
            stack.callback(metrics.serve(settings.metrics).shutdown)
        make_server = functools.partial(
            ShufflerServer, store, credentials, revoked, settings.limits, metrics
        )
        watched = parent if exit_with_parent else None
        asyncio.run(_serve(make_server, settings, revoked, log, watched))


def open_store(settings: ShufflerConfig, directory: Path) -> RunStore:
    """The store of a shuffler with these settings; raises what `RunStore` does."""
    randomness, durable = make_randomness(settings.simulation_seed), settings.directory is not None
    return RunStore(directory, settings.limits, randomness, settings.floor, durable)


async def _serve(
    make_server: Callable[[], ShufflerServer],
    settings: ShufflerConfig,
    revoked: Revoked,
    log: Log,
    parent: int | None,
) -> None:
    """Serves until SIGTERM, SIGINT, or the end of the parent.

    A signal lets releases finish; a second one, or the end of the parent, ends them at once.
    SIGHUP opens the log file and reads the withdrawn credentials and its own certificate again.
    """
    sys.setswitchinterval(_SWITCH_SECONDS)
    server = make_server()
    loop = asyncio.get_running_loop()
    stopped, at_once = asyncio.Event(), asyncio.Event()

    def stop(now: bool = False) -> None:
        if now or stopped.is_set():
            at_once.set()
        stopped.set()

    heard = False  # no lock: the handler runs between any two steps of this thread

    def read_again() -> None:
        nonlocal heard
        heard = False
        _read_again(log, revoked, settings.tls, server)

    def hang_up(*_: object) -> None:
        nonlocal heard
        if not heard:  # many signals are read for once
            heard = True
            loop.call_soon_threadsafe(read_again)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    # Not the loop's own handler: with the loop that would end, and SIGHUP would kill.
    signal.signal(signal.SIGHUP, hang_up)
    read_again()  # a SIGHUP before this went unheard
    minutes = asyncio.create_task(_every_minute(log))
    try:
        address = await server.start(settings.listen)
        if parent is not None:
            _watch_parent(parent, functools.partial(loop.call_soon_threadsafe, stop, True))
        _log.info("shuffler started", extra=_about(settings, address))
        print(f"{READY}{address}", flush=True)
        await stopped.wait()
        _log.info("shuffler stopping")
    finally:
        await server.stop(at_once)
        minutes.cancel()
        log.next_minute()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _log.info("shuffler stopped")


def _about(settings: ShufflerConfig, address: str) -> dict[str, object]:
    """What the log says at the start: the whole configuration, but for the simulation's seed."""
    configuration = settings.model_dump(mode="json", exclude={"simulation_seed"}, exclude_none=True)
    version = importlib.metadata.version("shufl")
    return {"address": address, "version": version, "configuration": configuration}


async def _every_minute(log: Log) -> None:
    while True:
        await asyncio.sleep(60)
        log.next_minute()


def _read_again(log: Log, revoked: Revoked, tls: Tls, server: ShufflerServer) -> None:
    try:
        log.reopen()
    except OSError as error:
        _log.error("log file not opened again, the one before stays: %s", error)
    try:
        if server.renew(tls.read()):
            until = read_certificate(tls.certificate).not_valid_after_utc
            _log.info("another certificate read, valid until %s", f"{until:%F %T} UTC")
    except (OSError, ValueError) as error:
        _log.error("certificate not read, the one before stays: %s", error)
    if revoked.path is None:
        return
    try:
        revoked.read()
        _log.info("withdrawn credentials read: %d", len(revoked))
    except (OSError, ValueError) as error:
        _log.error("withdrawn credentials not read, those before stay: %s", error)


def _watch_parent(parent: int, stop: Callable[[], object]) -> None:
    """Calls `stop` when standard input ends or the parent process changes.

    Both, because either alone can fail: another child of the parent may hold the pipe open, and
    the parent may have been gone before its id was read.
    """

    def watch() -> None:
        with suppress(OSError):
            while os.getppid() == parent:
                readable, _, _ = select.select([0], [], [], _PARENT_SECONDS)
                if readable and not os.read(0, 4096):
                    break
        with suppress(RuntimeError):  # the loop has ended by itself
            stop()

    threading.Thread(target=watch, daemon=True).start()
