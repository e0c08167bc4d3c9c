"""Flower's simulation engine on Ray, quiet, interruptible, and leaving nothing running."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


def run_on_flower(
    server_app: ServerApp,
    client_app: ClientApp,
    nodes: int,
    cpus_per_node: float,
    stop: threading.Event,
    log_file: Path,
) -> None:
    """Runs a ServerApp and `nodes` ClientApps to the end.

    The first interrupt (Ctrl-C, SIGTERM) sets `stop`, which the ServerApp polls; it then ends the
    run in order. The second one is not caught.

    Args:
        server_app, client_app: the apps.
        nodes: Flower nodes to simulate.
        cpus_per_node: CPUs an active node occupies; decides how many work at once.
        stop: set on an interrupt, and when the engine itself fails.
        log_file: where Flower's log goes.

    Raises:
        Exception: whatever the ServerApp raised.
    """
    import ray
    from flwr.simulation import run_simulation

    with logs_to(log_file, "flwr"):
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        try:
            with _interrupts(stop):
                run_simulation(
                    server_app,
                    client_app,
                    num_supernodes=nodes,
                    backend_config={
                        "client_resources": {"num_cpus": cpus_per_node, "num_gpus": 0.0}
                    },
                )
        finally:
            stop.set()
            ray.shutdown()


@contextmanager
def _interrupts(stop: threading.Event) -> Iterator[None]:
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
