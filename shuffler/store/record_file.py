"""`record.jsonl`, the public record and the only file that a shuffler keeps."""

from __future__ import annotations

import bisect
import fcntl
import os
from pathlib import Path
from typing import Any

from shufl.accounting import chain
from shufl.shuffler.record import verify

_ANSWER_BYTES = 2**18  # of lines; one alone may be longer


class RecordFile:
    """The file, held by one process. A line is on disk when `append` returns.

    Attributes:
        found: what each line said when it was opened.
    """

    def __init__(self, directory: Path, durable: bool = True) -> None:
        """Opens the file, or makes it; of a last line that a crash cut short nothing remains.

        Args:
            directory: made, for this user alone, if it is missing.
            durable: whether lines wait for the disk.

        Raises:
            ValueError: others may enter the directory, another process has the file, or it is
                damaged.
        """
        _claim(directory)
        self.path = directory / "record.jsonl"
        self._durable = durable
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            chain.sync_directory(directory)
            lines, torn = chain.split(self.path.read_bytes())
            self.found = verify(line[:-1].decode("ascii", "replace") for line in lines)
            if torn:
                os.ftruncate(self._descriptor, sum(map(len, lines)))
        except BlockingIOError:
            os.close(self._descriptor)
            raise ValueError(f"{directory} is in use by another shuffler") from None
        except ValueError as error:
            os.close(self._descriptor)
            raise ValueError(f"{self.path}: {error}: put it back as it was") from None
        self._check = self.found[-1]["check"] if self.found else chain.START
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def append(self, event: str, run: str, **about: Any) -> None:
        """Appends a line.

        Raises:
            OSError: it is not on disk.
        """
        line, check = chain.encode({"event": event, "run": run, **about}, self._check)
        chain.append(self._descriptor, line, self._durable)
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
