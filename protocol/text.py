"""Text that people read: lines with text from outside, numbers, and logs.

A privacy number is printed as a bound: upper bounds are rounded up, lower bounds down.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import Any

_MOST, _END = 1000, 300
_MOST_LOGGED = 8000


def printable(text: str) -> str:
    """The text, with an escape such as `\\x1b` for each character that has no picture of its own.

    Those are line breaks, a terminal's escape codes, and characters that turn the direction of
    writing or have no width.
    """
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )


def one_line(text: str) -> str:
    """The text on one printable line of at most 1000 characters: its beginning and its end."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= _MOST else f"{line[: _MOST - _END - 3]} … {line[-_END:]}"


def rounded_up(value: float, digits: int = 4) -> str:
    """Returns some digits of an upper bound, or of a noise, a δ or a number of blankets.

    What is printed is then true: more of any of these is no more ε.
    """
    return _rounded(value, ROUND_CEILING, digits)


def rounded_down(value: float, digits: int = 4) -> str:
    """Returns some digits of a lower bound, or of a check-in rate."""
    return _rounded(value, ROUND_FLOOR, digits)


def _rounded(value: float, rounding: str, count: int) -> str:
    """Rounds in one direction; what lies within the errors of floating point is ignored."""
    digits = Context(prec=12).create_decimal_from_float(value)
    return f"{float(Context(prec=count, rounding=rounding).plus(digits)):.{count}g}"


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
    half = _MOST_LOGGED // 2
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
