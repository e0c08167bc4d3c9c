"""One round's batch on disk, in an order that says nothing.

A batch is one SQLite file (write-ahead log, every commit synced). Each report is stored under a key
of 16 random bytes that the shuffler draws for it, and read back in the order of the keys: the keys
are independent of everything and distinct up to a probability below n²/2¹²⁹, so the order is a
uniformly random permutation of the reports. The senders are in a table of their own, sorted by
name, only to hold each sender to one report. No row connects the two, and none holds a time or a
number of arrival.

What remains: whoever reads the shuffler's disk *during* a round can guess from the pages of the two
tables which reports and senders arrived at about the same time (in one group commit, rows are
written sorted; the groups follow each other). The shuffler itself knows that anyway; the server
must not get at this disk. Deleting a batch unlinks its files, which leaves the blocks to the file
system: use an encrypted disk where that matters.
"""

from __future__ import annotations

import secrets
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

from shuffler.errors import Refusal, ShufflerRefused, Verdict
from shuffler.storage import connect, delete_database, storage_errors, transaction

__all__ = ["RoundSpool"]

_KEY_BYTES = 16
_SCHEMA = """
CREATE TABLE IF NOT EXISTS reports(key BLOB PRIMARY KEY, sealed BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS senders(sender TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class RoundSpool:
    """The batch of one round.

    One thread at a time may use it, except that `destroy` may come from another thread while a
    chunk is being read.
    """

    def __init__(self, path: Path) -> None:
        """Opens the batch in this file, or starts an empty one.

        Raises:
            sqlite3.Error: if the file can not be opened or written.
            OSError: if the file can not be created.
        """
        self._path = path
        self._lock = threading.Lock()
        self._count = 0
        self._connection: sqlite3.Connection | None = connect(path)
        self._cursor: sqlite3.Cursor | None = None
        try:
            self._connection.executescript(_SCHEMA)
            (self._count,) = self._connection.execute("SELECT COUNT(*) FROM senders").fetchone()
        except BaseException:
            self._connection.close()
            raise

    @property
    def count(self) -> int:
        """How many reports are in the batch. Not for the server before a release."""
        return self._count

    def add(self, reports: Sequence[tuple[str, bytes]], capacity: int) -> list[Verdict]:
        """Stores the reports in one transaction, synced to disk on return.

        Args:
            reports: pairs of sender and sealed bytes. The first of a sender counts.
            capacity: how many reports the batch may hold in all.

        Returns:
            For each report `ACCEPTED`, `DUPLICATE` or `ROUND_FULL`.

        Raises:
            sqlite3.Error: if the disk is full or fails; none of the reports is stored then.
        """
        with self._lock:
            connection = self._open()
            accepted: dict[str, bytes] = {}
            verdicts = []
            with transaction(connection):
                for sender, sealed in reports:
                    known = "SELECT 1 FROM senders WHERE sender = ?"
                    if sender in accepted or connection.execute(known, (sender,)).fetchone():
                        verdicts.append(Verdict.DUPLICATE)
                    elif self._count + len(accepted) >= capacity:
                        verdicts.append(Verdict.ROUND_FULL)
                    else:
                        accepted[sender] = sealed
                        verdicts.append(Verdict.ACCEPTED)
                # Sorted, so that even the pages of one commit do not pair senders with reports.
                connection.executemany(
                    "INSERT INTO senders VALUES (?)", [(sender,) for sender in sorted(accepted)]
                )
                connection.executemany(
                    "INSERT INTO reports VALUES (?, ?)",
                    sorted(
                        (secrets.token_bytes(_KEY_BYTES), sealed) for sealed in accepted.values()
                    ),
                )
            self._count += len(accepted)
            return verdicts

    def next_reports(self, limit: int) -> list[bytes]:
        """The next at most `limit` sealed reports in random order; empty after the last.

        Raises:
            ShufflerRefused: if the batch has been destroyed meanwhile, or the disk fails.
        """
        with self._lock, storage_errors():
            if self._cursor is None:
                self._cursor = self._open().execute("SELECT sealed FROM reports ORDER BY key")
            elif self._connection is None:
                self._open()
            return [sealed for (sealed,) in self._cursor.fetchmany(limit)]

    def close(self) -> None:
        """Closes the file and keeps it."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def destroy(self) -> None:
        """Closes and deletes the file; may be repeated.

        Raises:
            OSError: if a file can not be deleted.
        """
        # The names go first: a crash in between leaves nothing to find.
        delete_database(self._path)
        self.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ShufflerRefused(Refusal.RUN_ENDED, "the batch has been destroyed")
        return self._connection
