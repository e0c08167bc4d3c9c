"""Flower's SuperNode, as a program that ends when its connection does."""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points


def main() -> None:
    """Runs `flower-supernode`, and ends with 1 where that returns or raises an error.

    Flower 1.42 returns when it gets an answer after which it does not try again, such as a failed
    handshake. Its other threads would then stay for ever, connected to nobody, and the node with
    them; this way its service starts it again.
    """
    (supernode,) = entry_points(group="console_scripts", name="flower-supernode")
    try:
        supernode.load()()
    except Exception:
        logging.exception("flower-supernode ended with an error")
    logging.shutdown()
    os._exit(1)
