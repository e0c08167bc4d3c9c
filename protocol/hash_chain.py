"""A hash chain of JSON lines: each vouches for itself and for all lines before it.

The last value of a line, `~check`, is the SHA-256 of the check value before it and of the line's
own text. Nobody can change, drop or insert a line without changing all check values after it, and
whoever has kept one of them can tell.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

START = ""
"""What stands for the check value before the first line."""


def encode(body: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """The line of a JSON object, in ASCII with its end, and its check value.

    `previous` is the check value of the line before, or `START`.
    """
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    check = hashlib.sha256((previous + text).encode()).hexdigest()
    return f'{text[:-1]},"~check":"{check}"}}\n'.encode(), check


def decode(line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    """What `encode` was given, and the line's check value.

    Raises:
        ValueError: it is not a line that follows the one with this check value.
    """
    try:
        body = json.loads(line)
        if not isinstance(body, dict):
            raise ValueError("not a JSON object")
        body.pop("~check", None)
        encoded, check = encode(body, previous)
    except RecursionError:
        raise ValueError("not what was written") from None
    if encoded != line:
        raise ValueError("check value does not match")
    return body, check


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole lines of a file, each with its end, and what a crash left of another."""
    *lines, torn = data.split(b"\n")
    return [line + b"\n" for line in lines], torn


def append(descriptor: int, line: bytes, sync: bool = True) -> None:
    """Writes a line at the end of an open file; it is on disk when this returns.

    Raises:
        OSError: it is not, as where the disk is full. Its `__notes__` tell if some of it may be.
    """
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        write_all(descriptor, line)
        if sync:
            os.fsync(descriptor)
    except OSError as error:
        try:
            os.ftruncate(descriptor, end)
            os.fsync(descriptor)
        except OSError:
            error.add_note("part of it may be on disk")
        raise


def write_all(descriptor: int, data: bytes) -> None:
    """Writes all of the data at the file's position."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
