"""The command that runs a deployed node; other commands' modules are not loaded beside records."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
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
    once. It exits with 2 if somebody has to mend what it was given, and with 1 if it may start
    later: a file or folder is not there yet, the machine is too busy, a signal ended a child
    process, or your code that gives the records raised an error.
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
    try:
        check_linux("a node")
        site = load_site(config, NodeSite)
        serve_device(node_settings(site, folder), Path(site.socket), stop, at_once)
    except (OSError, ValueError) as error:
        options.fail(error, 1 if _may_pass(error) else 2)


def _may_pass(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, is of what may be there a moment later."""
    from shufl.clients.worker import TooBusy
    from shufl.deploy.node import RecordsAway
    from shufl.learning.node_updates import lacks_memory

    while error is not None:
        # A plain OSError without a number is what pyarrow says of a damaged file.
        if isinstance(error, OSError) and (error.errno or type(error) is not OSError):
            return True
        if isinstance(error, (TooBusy, RecordsAway, sqlite3.OperationalError)):
            return True
        if lacks_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False
