"""`shufl node`: the process of a deployed node, which has its data, coins and keys."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from shufl.cli.options import fail
from shufl.simulator.logs import log_handler


def node_command(
    config: Annotated[Path, typer.Option(help="The node's file, node.toml.")] = Path("node.toml"),
    log_file: Annotated[
        Path | None, typer.Option(help="Where the log goes; left out: standard error.")
    ] = None,
) -> None:
    """Run a deployed node: answer the messages that Flower's SuperNode passes on."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    folder = config.absolute().parent
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is said in our own words
    try:
        logging.basicConfig(level=logging.INFO, handlers=[log_handler(log_file)])
    except OSError as error:
        fail(error)
    from shufl.deploy.node import serve_node
    from shufl.deploy.sites import NodeSite, load_site
    from shufl.simulator.section import ConfigError, make_importable

    make_importable([folder])
    try:
        serve_node(load_site(config, NodeSite), folder, stop)
    except ConfigError as error:
        fail(error)
