"""What a Ray worker's process needs beside the ClientApp in order to be a simulated node.

This module imports neither the accountants nor the server, so that the process starts faster.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from shufl.clients import SimulatedLedger
from shufl.learning.your_code import make_importable
from shufl.simulator.engines import keep_freed_memory


def simulated_device(devices: Path, node: int) -> SimulatedLedger:
    """The ledger of a simulated node, as a real device has one."""
    return SimulatedLedger(devices / f"node-{node}.db")


def leased(client_app: ClientApp, lease: Path, path: list[str]) -> ClientApp:
    """The same app, for Ray workers whose processes end when the folder `lease` is gone.

    Neither Flower nor Ray has a call that stops a node at work from outside. The processes also
    find the modules in the folders of `path`, as this process does.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        _enter(lease, tuple(path))
        return client_app(message, context)

    app.train()(handle)
    app.query()(handle)
    return app


@functools.cache  # Flower unpickles the app for every message, in one process of a Ray worker
def _enter(lease: Path, path: tuple[str, ...]) -> None:
    """Puts a Ray worker's process under a lease, once."""

    def watch() -> None:
        while lease.exists():
            time.sleep(1)
        os._exit(1)

    make_importable(path)
    keep_freed_memory()
    threading.Thread(target=watch, name="lease", daemon=True).start()
