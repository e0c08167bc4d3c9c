"""The logs of servers and nodes, in which no other party can forge or hide an event."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shufl.protocol.text import printable

_MOST_CHARACTERS = 8000


class EventFormatter(logging.Formatter):
    """Makes one printable line of an event; a traceback follows it, indented.

    Servers, shufflers and nodes have a say in what is logged. Their line breaks must not look like
    other events, and their escape codes must not reach the terminal of who reads the log. What is
    long loses its middle.
    """

    def __init__(self) -> None:
        """Has the time and the level first."""
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The whole event, whatever another formatter has made of its traceback."""
        record.exc_text = None
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The event's line."""
        return printable(_cut(super().formatMessage(record)))

    def formatException(self, ei: Any) -> str:
        """The lines of a traceback."""
        lines = _cut(super().formatException(ei)).split("\n")
        return "\n".join(f"    {printable(line)}" for line in lines)


def _cut(text: str) -> str:
    half = _MOST_CHARACTERS // 2
    return text if len(text) <= 2 * half else f"{text[:half]} … {text[-half:]}"


def log_handler(path: Path | None) -> logging.Handler:
    """Writes events to the end of a file, or to standard error.

    Raises:
        OSError: the file cannot be opened.
    """
    handler = logging.FileHandler(path, encoding="utf-8") if path else logging.StreamHandler()
    handler.setFormatter(EventFormatter())
    return handler


@contextmanager
def logs_to(path: Path, name: str) -> Iterator[None]:
    """Sends a logger to a file instead of the console."""
    logger = logging.getLogger(name)
    handlers, propagate = logger.handlers[:], logger.propagate
    file_handler = log_handler(path)
    logger.handlers, logger.propagate = [file_handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        file_handler.close()
