"""The command that runs a deployed node; other commands' modules are not loaded beside records."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from shufl.cli import options
from shufl.protocol.text import log_handler
from shufl.protocol.validation import check_linux


def node_command(
    config: Annotated[Path, typer.Option(help="The node's file, node.toml.")] = Path("node.toml"),
    log_file: Annotated[
        Path | None, typer.Option(help="Log file. Default: standard error.")
    ] = None,
) -> None:
    """Run a deployed node: answer the messages that Flower's SuperNode passes on.

    SIGTERM and SIGINT end it when the round that is under way is over; a second one ends it at
    once.
    """
    stop, at_once = threading.Event(), threading.Event()

    def end(number: int, _: object) -> None:
        (at_once if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    folder = config.absolute().parent
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is said in our own words
    with options.failing(OSError):
        logging.basicConfig(level=logging.INFO, handlers=[log_handler(log_file)])
    from shufl.clients import serve_device
    from shufl.deploy.node import node_settings
    from shufl.deploy.site_files import NodeSite, load_site
    from shufl.learning.your_code import make_importable

    make_importable([folder])
    with options.failing(ValueError):
        check_linux("a node")
        site = load_site(config, NodeSite)
        serve_device(node_settings(site, folder), Path(site.socket), stop, at_once)
