"""`record.jsonl`, the public record and the only file that a shuffler keeps."""

from __future__ import annotations

import bisect
import fcntl
import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from shufl.protocol import hash_chain
from shufl.shuffler.public_record import verified

_ANSWER_BYTES = 2**18  # of lines; one alone may be longer


class RecordFile:
    """The file, held by one process. A line is on disk when `append` returns."""

    def __init__(self, directory: Path, durable: bool = True) -> None:
        """Opens the file, or makes it. It must be read before anything is appended.

        Args:
            directory: made, for this user alone, if it is missing.
            durable: whether lines wait for the disk.

        Raises:
            ValueError: others may enter the directory, or another process has the file.
        """
        _claim(directory)
        self.path = directory / "record.jsonl"
        self._durable = durable
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            hash_chain.sync_directory(directory)
        except BlockingIOError:
            os.close(self._descriptor)
            raise ValueError(f"{directory} is in use by another shuffler") from None
        self._check = hash_chain.START
        self._starts = array("Q", [0])  # of the lines, and where the next one will

    def read(self) -> Iterator[dict[str, Any]]:
        """What each line says; of a last one that a crash cut short nothing remains.

        Raises:
            ValueError: the file is damaged.
        """
        try:
            with self.path.open("rb") as file:
                for line in verified(self._whole_lines(file)):
                    self._check = line["check"]
                    yield line
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}: put it back as it was") from None

    def append(self, event: str, run: str, **about: Any) -> None:
        """Appends a line.

        Raises:
            OSError: it is not on disk.
        """
        line, check = hash_chain.encode({"event": event, "run": run, **about}, self._check)
        hash_chain.append(self._descriptor, line, self._durable)
        self._check = check
        self._starts.append(self._starts[-1] + len(line))

    def lines(self, first: int) -> list[str]:
        """Lines without their ends, from this one on (from 0): as many as one answer may hold."""
        if first >= len(self._starts) - 1:
            return []
        start = self._starts[first]
        after = bisect.bisect_right(self._starts, start + _ANSWER_BYTES) - 1
        length = self._starts[max(after, first + 1)] - start
        return os.pread(self._descriptor, length, start).decode().splitlines()

    def _whole_lines(self, file: Iterable[bytes]) -> Iterator[str]:
        for line in file:
            if not line.endswith(b"\n"):
                os.ftruncate(self._descriptor, self._starts[-1])
                return
            self._starts.append(self._starts[-1] + len(line))
            yield line[:-1].decode("ascii", "replace")

    def close(self) -> None:
        """Closes the file and lets another process have it."""
        os.close(self._descriptor)


def _claim(directory: Path) -> None:
    """Makes sure that a directory is this user's alone."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"{directory} belongs to another user")
    if status.st_mode & 0o077:
        if any(directory.iterdir()):
            raise ValueError(f"{directory} must have mode 0700, has {status.st_mode & 0o7777:04o}")
        directory.chmod(0o700)
