"""What a simulated node is beside its ClientApp, in the process of a Ray worker.

Such a process starts faster for importing neither the accountants nor the server.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from shufl.clients import DeviceLedger
from shufl.learning.section import make_importable
from shufl.simulator.engines.memory import keep_freed_memory


def simulated_device(devices: Path, node: int) -> DeviceLedger:
    """The ledger of a simulated node, as a real device has one."""
    return DeviceLedger(devices / f"node-{node}.db")


def leased(client_app: ClientApp, lease: Path, path: list[str]) -> ClientApp:
    """The same app, in Ray workers whose processes end when the folder `lease` is gone.

    Neither Flower nor Ray has a call that stops a node at work from outside. The processes
    also find the modules in the folders of `path`, as the driver does.
    """
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        _enter(lease, tuple(path))
        return client_app(message, context)

    app.train()(handle)
    app.query()(handle)
    return app


@functools.cache  # in a process of a Ray worker, where Flower unpickles the app for every message
def _enter(lease: Path, path: tuple[str, ...]) -> None:
    """Puts a Ray worker's process under a lease, once."""

    def watch() -> None:
        while lease.exists():
            time.sleep(1)
        os._exit(1)

    make_importable(path)
    keep_freed_memory()
    threading.Thread(target=watch, name="lease", daemon=True).start()
