"""One round's batch on disk, in an order that says nothing.

Reports of a run have one length, so a batch is a file of equal slots, twice as many as the plan has
users, with holes where nothing is stored. Each accepted report is written into a slot that is drawn
uniformly among the free ones, from the operating system's entropy. Whatever the order of arrival,
the reports in the order of their slots are a uniformly random permutation (each sequence of
distinct slots is equally likely), so reading the file from front to back *is* the shuffle.

Which slots are taken, and which users of which sender have reported, are two sets of bits in a
small SQLite file. Sets have no order: neither file's contents depend on the order of arrival. No
row connects a user with a report, and none holds a time or a number of arrival. The journal that
makes a commit atomic is emptied by the commit.

A group of reports is stored in this order: into free slots; `fdatasync`; then one commit that marks
slots and users, synced. What has no mark was never acknowledged and is never read.

What remains for whoever reads the raw device *during* a round: the file system gives out blocks as
they are needed, so the places of blocks on the device, and of rows in SQLite's pages, tell roughly
which reports came in the same group. A copy of the files does not tell it. Deleting unlinks, which
leaves blocks to the file system: use an encrypted disk where that matters.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shuffler.errors import Refusal, ShufflerRefused, Verdict
from shuffler.storage import (
    connect,
    delete_database,
    storage_errors,
    sync_directory,
    transaction,
)

__all__ = ["RoundSpool", "Slot", "slot_bytes"]

_BLOCK_BYTES = 4096  # of a file system; no two slots share one, unless several fit into it
_BITS = 4096  # of one row
_SLOTS_PER_USER = 2  # a random slot is free at least every other time
_SCHEMA = """
CREATE TABLE IF NOT EXISTS slots(
    part INTEGER PRIMARY KEY, bits BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS reported(
    sender TEXT, part INTEGER, bits BLOB NOT NULL, PRIMARY KEY (sender, part)
) WITHOUT ROWID;
"""


def slot_bytes(report_bytes: int) -> int:
    """Length in bytes of the slot that a report of this length gets."""
    if report_bytes > _BLOCK_BYTES // 2:
        return -(-report_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    return int(1 << (report_bytes - 1).bit_length())


class RoundSpool:
    """The batch of one round.

    One thread at a time may use it, except that `destroy` may come from another thread while a
    chunk is being read.
    """

    def __init__(self, path: Path, report_bytes: int, capacity: int) -> None:
        """Opens the batch in this file, or starts an empty one.

        Args:
            path: of the SQLite file; the reports lie beside it.
            report_bytes: length of every report.
            capacity: how many reports the batch may hold.

        Raises:
            sqlite3.Error: if the file can not be opened or written.
            OSError: if a file can not be created, or the slots are more than the file system
                allows in a file.
        """
        self._path = path
        self._report_bytes = report_bytes
        self._capacity = capacity
        self._stride = slot_bytes(report_bytes)
        self._slots = _SLOTS_PER_USER * capacity
        self._spoilt: list[int] = []  # written to in vain; the next to be given out
        self._reserved: set[int] = set()  # being written to piece by piece
        self._lock = threading.Lock()
        self._reader: Iterator[int] | None = None
        self._place: tuple[int, int] | None = None  # of a report read in pieces: where, how much
        self._file: int | None = os.open(
            _reports_path(path), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        try:
            os.ftruncate(self._file, self._slots * self._stride)
            self._connection = connect(path)
        except BaseException:
            os.close(self._file)
            raise
        try:
            self._connection.executescript(_SCHEMA)
            rows = self._connection.execute("SELECT bits FROM slots")
            self._count = sum(int.from_bytes(bits, "little").bit_count() for (bits,) in rows)
            sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many reports are in the batch. Not for the server before a release."""
        return self._count

    def reserve(self) -> Slot:
        """A slot to write a report to, piece by piece; hand it to `add` or to `give_up`.

        Raises:
            ShufflerRefused: if the batch has been destroyed.
            sqlite3.Error, OSError: if the disk fails.
        """
        with self._lock:
            number = self._draw(self._open(), _Bits(self._connection, "slots"))
            assert self._file is not None
            slot = Slot(number, os.dup(self._file), number * self._stride)
            self._reserved.add(number)
            return slot

    def give_up(self, slot: Slot) -> None:
        """Takes a reserved slot back; it is the next that a report gets.

        Which of the slots drawn so far a report gets does not matter to the order: all are drawn
        alike. So what is written in vain takes no more room than there were reports at once.
        """
        with self._lock:
            self._spoil([slot])

    def add(self, reports: Sequence[tuple[str, int, bytes | Slot]]) -> list[Verdict]:
        """Stores the reports with one commit, synced to disk on return.

        Args:
            reports: sender, number of its user, and the report's bytes, or the slot (`reserve`)
                where they are. The first of a user counts.

        Returns:
            For each report `ACCEPTED`, `DUPLICATE` or `ROUND_FULL`.

        Raises:
            ShufflerRefused: if the batch has been destroyed.
            sqlite3.Error, OSError: if the disk is full or fails; none of the reports is stored.
        """
        with self._lock:
            connection = self._open()
            verdicts: list[Verdict] = []
            drawn: list[int] = []
            own = [content for *_, content in reports if isinstance(content, Slot)]
            try:
                with transaction(connection):
                    slots, users = _Bits(connection, "slots"), _Bits(connection, "reported")
                    room = self._capacity - self._count
                    for sender, user, content in reports:
                        if users.holds(user, sender):
                            verdicts.append(Verdict.DUPLICATE)
                        elif not room:
                            verdicts.append(Verdict.ROUND_FULL)
                        else:
                            if isinstance(content, Slot):
                                slots.put(content.number)
                            else:
                                drawn.append(self._draw(connection, slots))
                                slots.put(drawn[-1])
                                self._pwrite(drawn[-1] * self._stride, content)
                            users.put(user, sender)
                            verdicts.append(Verdict.ACCEPTED)
                            room -= 1
                    assert self._file is not None
                    if room != self._capacity - self._count:
                        os.fdatasync(self._file)
                    slots.save()
                    users.save()
            except BaseException:
                self._spoilt += drawn
                self._spoil(own)
                raise
            self._count = self._capacity - room
            self._spoil(
                content
                for (*_, content), verdict in zip(reports, verdicts, strict=True)
                if isinstance(content, Slot) and verdict is not Verdict.ACCEPTED
            )
            for slot in own:
                self._reserved.discard(slot.number)
                slot.close()
            return verdicts

    def has_reported(self, sender: str, user: int) -> bool:
        """Whether a report of this user is in the batch."""
        with self._lock:
            return _Bits(self._open(), "reported").holds(user, sender)

    def next_chunk(self, limit: int) -> tuple[list[bytes], bool]:
        """The next sealed reports in random order, of at most `limit` bytes in all.

        Returns:
            The reports, none after the last; or a piece of a report longer than `limit`, and
            whether it goes on in the next chunk.

        Raises:
            ShufflerRefused: if the batch has been destroyed meanwhile, or the disk fails.
        """
        reports: list[bytes] = []
        with self._lock, storage_errors():
            connection = self._open()
            if self._reader is None:
                self._reader = _taken(connection)
            if self._report_bytes > limit:
                return self._next_piece(self._reader, limit)
            while len(reports) < limit // self._report_bytes:
                slot = next(self._reader, None)
                if slot is None:
                    break
                reports.append(self._pread(slot * self._stride, self._report_bytes))
        return reports, False

    def _next_piece(self, reader: Iterator[int], limit: int) -> tuple[list[bytes], bool]:
        if self._place is None:
            slot = next(reader, None)
            if slot is None:
                return [], False
            self._place = slot * self._stride, self._report_bytes
        start, left = self._place
        piece = self._pread(start, min(left, limit))
        left -= len(piece)
        self._place = (start + len(piece), left) if left else None
        return [piece], left > 0

    def close(self) -> None:
        """Closes the files and keeps them."""
        with self._lock:
            if self._file is not None:
                self._connection.close()
                os.close(self._file)
                self._file = None

    def destroy(self) -> None:
        """Closes and deletes the files; may be repeated.

        Raises:
            OSError: if a file can not be deleted.
        """
        # The names go first: a crash in between leaves nothing to find.
        _reports_path(self._path).unlink(missing_ok=True)
        delete_database(self._path)
        self.close()

    def _spoil(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot.number in self._reserved:
                self._reserved.discard(slot.number)
                self._spoilt.append(slot.number)
            slot.close()

    def _open(self) -> sqlite3.Connection:
        if self._file is None:
            raise ShufflerRefused(Refusal.RUN_ENDED, "the batch has been destroyed")
        return self._connection

    def _draw(self, connection: sqlite3.Connection, slots: _Bits) -> int:
        """A slot that is uniformly random among those that were never drawn, or a spoilt one."""
        if self._spoilt:
            return self._spoilt.pop()
        while True:
            slot = secrets.randbelow(self._slots)
            if slot not in self._reserved and not slots.holds(slot):
                return slot

    def _pread(self, offset: int, length: int) -> bytes:
        assert self._file is not None
        data = os.pread(self._file, length, offset)
        if len(data) != length:
            raise OSError("a report is shorter than it was")
        return data

    def _pwrite(self, offset: int, data: bytes) -> None:
        assert self._file is not None
        _write_at(self._file, [data], offset)


class Slot:
    """A place for one report that is written in pieces, in any thread; one at a time.

    It has a descriptor of its own, which stays good when the batch is destroyed meanwhile.
    """

    def __init__(self, number: int, descriptor: int, start: int) -> None:
        self.number = number
        self._descriptor: int | None = descriptor
        self._end = start

    def append(self, pieces: Sequence[bytes]) -> None:
        """Writes the next pieces; not synced before `add`.

        Raises:
            OSError: if the disk is full or fails.
        """
        if self._descriptor is None:
            raise OSError("the slot has been given up")
        _write_at(self._descriptor, pieces, self._end)
        length = sum(map(len, pieces))
        # Starts writing back at once, so that the sync in `add` finds little left to wait for.
        os.posix_fadvise(self._descriptor, self._end, length, os.POSIX_FADV_DONTNEED)
        self._end += length

    def close(self) -> None:
        """Ends the writing; may be repeated."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


class _Bits:
    """Sets of numbers, as rows of bits; changes are kept here until they are saved."""

    def __init__(self, connection: sqlite3.Connection, table: str) -> None:
        self._connection = connection
        self._keyed = table == "reported"
        self._rows: dict[tuple[str, int], bytearray] = {}
        self._changed: set[tuple[str, int]] = set()

    def holds(self, number: int, sender: str = "") -> bool:
        part, bit = divmod(number, _BITS)
        row = self._row((sender, part))
        return bit >> 3 < len(row) and bool(row[bit >> 3] & 1 << (bit & 7))

    def put(self, number: int, sender: str = "") -> None:
        part, bit = divmod(number, _BITS)
        row = self._row((sender, part))
        row.extend(bytes(max(0, (bit >> 3) + 1 - len(row))))
        row[bit >> 3] |= 1 << (bit & 7)
        self._changed.add((sender, part))

    def save(self) -> None:
        # Sorted, so that new rows do not follow the order in the group.
        for sender, part in sorted(self._changed):
            bits = bytes(self._rows[sender, part])
            if self._keyed:
                values: tuple[object, ...] = (sender, part, bits)
                self._connection.execute("REPLACE INTO reported VALUES (?, ?, ?)", values)
            else:
                self._connection.execute("REPLACE INTO slots VALUES (?, ?)", (part, bits))
        self._changed.clear()

    def _row(self, key: tuple[str, int]) -> bytearray:
        row = self._rows.get(key)
        if row is None:
            if self._keyed:
                found = self._connection.execute(
                    "SELECT bits FROM reported WHERE sender = ? AND part = ?", key
                ).fetchone()
            else:
                found = self._connection.execute(
                    "SELECT bits FROM slots WHERE part = ?", key[1:]
                ).fetchone()
            row = self._rows[key] = bytearray(found[0] if found else b"")
        return row


def _write_at(descriptor: int, parts: Sequence[bytes], offset: int) -> None:
    """Writes the parts one after the other, all of them."""
    done, length = os.pwritev(descriptor, parts, offset), sum(map(len, parts))
    while done < length:  # a signal, or a full disk: then the next call says so
        done += os.pwrite(descriptor, b"".join(parts)[done:], offset + done)


def _taken(connection: sqlite3.Connection) -> Iterator[int]:
    """The numbers of the taken slots, rising."""
    for part, bits in connection.execute("SELECT part, bits FROM slots ORDER BY part"):
        for index, byte in enumerate(bits):
            for bit in range(8):
                if byte >> bit & 1:
                    yield part * _BITS + index * 8 + bit


def _reports_path(path: Path) -> Path:
    return path.with_suffix(".reports")
