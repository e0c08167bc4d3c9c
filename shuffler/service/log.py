"""The shuffler's log: one JSON object a line, a limited number of lines, files of a limited size.

No line names a sender, a user or a report, or how many reports there are.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from logging.handlers import RotatingFileHandler
from pathlib import Path

LINES_PER_MINUTE = 60
"""How many lines of a kind are written between two calls of `Log.next_minute`."""

_FIELDS = (
    *("run", "round", "outcome", "reason"),
    *("address", "version", "configuration", "line", "left_out"),
)
_log = logging.getLogger("shufl.shuffler")


class Log:
    """Writes what the logger `shufl.shuffler` is told, to a file or to standard error."""

    def __init__(self, path: Path | None, megabytes: float, kept: int) -> None:
        """Opens the file.

        Without a path lines go to standard error. A file that grows beyond `megabytes` is renamed
        to `path`.1, and `kept` of the renamed ones are kept; with 0 megabytes none is renamed.

        Raises:
            OSError: the file cannot be opened.
        """
        self._lines: Counter[str] = Counter()
        self._file: RotatingFileHandler | None = None
        if path is not None:
            size = round(megabytes * 1e6)
            self._file = RotatingFileHandler(
                path, maxBytes=size, backupCount=kept, encoding="utf-8"
            )
        handler = self._file or logging.StreamHandler()
        handler.setFormatter(_Lines())
        handler.addFilter(self._is_one_of_few)
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        _log.propagate = False

    def reopen(self) -> None:
        """Opens the file again, which somebody may have renamed.

        Raises:
            OSError: it cannot be opened; the one before stays.
        """
        if self._file is not None:
            before = self._file.setStream(self._file._open())
            if before is not None:
                before.close()

    def next_minute(self) -> None:
        """Writes how many lines of each kind were left out, and lets more of them pass."""
        lines, self._lines = self._lines, Counter()
        for line, count in lines.items():
            if count > LINES_PER_MINUTE:
                about = {"line": line, "left_out": count - LINES_PER_MINUTE}
                _log.warning("lines left out", extra=about)

    def _is_one_of_few(self, record: logging.LogRecord) -> bool:
        """Whether a line is among the first of its kind in this minute."""
        self._lines[record.msg] += 1
        return self._lines[record.msg] <= LINES_PER_MINUTE


class _Lines(logging.Formatter):
    """One JSON object for each line: time, level, event, and what run and round it is about."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **{name: getattr(record, name) for name in _FIELDS if hasattr(record, name)},
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)  # in ASCII: no name in it is a terminal's escape code
