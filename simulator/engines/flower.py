"""Flower's simulation engine on Ray, quiet, interruptible, and leaving nothing running."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

_GRACE_SECONDS = 5.0  # for nodes still at work when the ServerApp has ended


class EngineFailed(RuntimeError):
    """Flower's simulation engine or Ray failed; the ServerApp did not."""


def run_on_flower(
    server_app: ServerApp,
    client_app: ClientApp,
    nodes: int,
    cpus_per_node: float,
    stop: threading.Event,
    log_file: Path,
) -> None:
    """Runs a ServerApp and `nodes` ClientApps until the ServerApp ends.

    The first interrupt (Ctrl-C, SIGTERM) sets `stop`, which the ServerApp polls; it then ends the
    run in order. Nodes still at work when it has ended are killed after some seconds.

    Args:
        server_app, client_app: the apps.
        nodes: Flower nodes to simulate.
        cpus_per_node: CPUs an active node occupies; decides how many work at once.
        stop: set on an interrupt, and when the engine itself fails.
        log_file: where Flower's log goes.

    Raises:
        EngineFailed: Flower or Ray failed.
        Exception: whatever the ServerApp raised.
    """
    import ray
    from flwr.simulation import run_simulation

    main = _Main(server_app)
    home = Path.cwd()
    with logs_to(log_file, "flwr"), tempfile.TemporaryDirectory(prefix="shufl-") as lease:
        try:
            with path_for_workers():
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            with interrupts(stop):  # again: Ray has put its own handler in place
                threading.Thread(target=main.end_lease_late, args=(lease,), daemon=True).start()
                run_simulation(
                    main.app,
                    _leased(client_app, Path(lease), home),
                    num_supernodes=nodes,
                    backend_config={
                        "client_resources": {"num_cpus": cpus_per_node, "num_gpus": 0.0}
                    },
                )
        except Exception as error:
            if not main.ended.is_set():
                main.error = EngineFailed(
                    f"Flower's simulation engine failed ({_root_cause(error)}); see {log_file}"
                )
        finally:
            stop.set()
            main.returned.set()
            ray.shutdown()
    if main.error is not None:
        raise main.error


class _Main:
    """A ServerApp that notes how it ended, which Flower's engine does not tell."""

    def __init__(self, server_app: ServerApp):
        self.app = ServerApp()
        self.error: BaseException | None = EngineFailed("Flower never started the ServerApp")
        self.ended = threading.Event()
        self.returned = threading.Event()

        @self.app.main()
        def main(grid: Grid, context: Context) -> None:
            try:
                server_app(grid, context)
                self.error = None
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.ended.set()

    def end_lease_late(self, lease: str) -> None:
        """Flower's engine waits for every node at work, however long: give it some seconds."""
        self.ended.wait()
        if not self.returned.wait(_GRACE_SECONDS):
            shutil.rmtree(lease, ignore_errors=True)


_under_lease = False  # whether this worker process watches its lease


def _leased(client_app: ClientApp, lease: Path, home: Path) -> ClientApp:
    """The same app, in worker processes that end when the folder `lease` is gone.

    Neither Flower nor Ray has a call that stops a node at work from outside. The workers also
    change to `home`, so that relative paths mean what they mean in the driver.
    """
    leased = ClientApp()

    def watch() -> None:
        while lease.exists():
            time.sleep(1)
        os._exit(1)

    def enter() -> None:
        global _under_lease
        if not _under_lease:
            _under_lease = True
            os.chdir(home)
            threading.Thread(target=watch, daemon=True).start()

    def handle(message: Message, context: Context) -> Message:
        enter()
        return client_app(message, context)

    leased.train()(handle)
    leased.query()(handle)
    return leased


@contextmanager
def path_for_workers() -> Iterator[None]:
    """Lets Ray's workers find our packages first, then whatever the driver finds.

    Ray puts the working directory of `ray.init` at the head of its workers' path: there a user's
    folder named `server` would hide ours. So it is ours while Ray starts.
    """
    here, path = Path.cwd(), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
    os.chdir(Path(__file__).resolve().parents[2])
    try:
        yield
    finally:
        os.chdir(here)
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


@contextmanager
def interrupts(stop: threading.Event) -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into `stop`; then the old handlers are back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()


@contextmanager
def logs_to(path: Path, name: str) -> Iterator[None]:
    """Sends a logger to a file instead of the console."""
    logger = logging.getLogger(name)
    handlers, propagate = logger.handlers[:], logger.propagate
    file_handler = logging.FileHandler(path)
    file_handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers, logger.propagate = [file_handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        file_handler.close()
