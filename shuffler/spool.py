"""One round's batch on disk, in an order that says nothing.

Reports of a run have one length, so a batch is a file of equal slots, twice as many as the plan has
users, with holes where nothing is stored. Each accepted report is written into a slot that is drawn
uniformly among the free ones, from the operating system's entropy. Whatever the order of arrival,
the reports in the order of their slots are a uniformly random permutation (each sequence of
distinct slots is equally likely), so reading the file from front to back *is* the shuffle.

Which slots are taken is a set of bits, and which users of which sender have reported is a set of
keyed hashes, in buckets by their first bits, each sorted: both in a small SQLite file. All of its
rows are made when the round is opened, in order, and afterwards only replaced in place by rows of
the same length. So every byte of both files is a function of the sets (which slot holds which
report, which users have reported) and of the hashes' key, and the order of arrival is in neither:
a row that came with its first report would lie in its page where SQLite had room *then*. No row
connects a user with a report, and none holds a time or a number of arrival. The journal that makes
a commit atomic is emptied by the commit. The key lies in the file: it keeps senders from choosing
their buckets, and hides nothing from whoever has the file.

A bucket is a page and holds 253 hashes; there are so many that a full batch fills each with 128 on
average at most. The number in one is binomial, so by Chernoff's bound it exceeds 253 with
probability below exp(126 - 254 ln(254/128)) < 2e-21; in any of 2**17 buckets (2**24 users) below
3e-16. The report that would be one too many is answered `ROUND_FULL`.

A group of reports is stored in this order: into free slots; `fdatasync`; then one commit that marks
slots and users, synced. What has no mark was never acknowledged and is never read. The kernel
reports what it could not write to *one* `fdatasync` and forgets it, whichever slot it was: after a
failed one, every slot that was reserved before is given up.

What remains for whoever reads the raw device *during* a round: the file system gives out blocks as
they are needed, so the places of the reports' blocks, and what is left of the journals' deleted
blocks, tell roughly which reports came in the same group, and which users. A copy of the files does
not tell it. Deleting unlinks, which leaves blocks to the file system: use an encrypted disk where
that matters.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shuffler.errors import Refusal, ShufflerRefused, Verdict
from shuffler.storage import (
    DamagedFile,
    connect,
    damage,
    delete_database,
    exists,
    storage_errors,
    sync_directory,
    transaction,
)

__all__ = ["RoundSpool", "Slot", "file_bytes", "slot_bytes"]

_BLOCK_BYTES = 4096  # of a file system; no two slots share one, unless several fit into it
_BITS = 4096  # of one row
_PARTS = 1024  # written with one call; the system takes no more (IOV_MAX)
_HASH_BYTES = 16
_BUCKET_HASHES = 253  # of one row: what fits into a page
_BUCKET_BYTES = _BUCKET_HASHES * _HASH_BYTES
_BUCKET_MEAN = 128  # of a full batch, at most
_SLOTS_PER_USER = 2  # a random slot is free at least every other time
_SCHEMA = """
CREATE TABLE slots(
    part INTEGER PRIMARY KEY, bits BLOB NOT NULL
);
CREATE TABLE reported(
    bucket INTEGER PRIMARY KEY, hashes BLOB NOT NULL
);
CREATE TABLE hash_key(
    key BLOB NOT NULL
);
"""


def slot_bytes(report_bytes: int) -> int:
    """Length in bytes of the slot that a report of this length gets."""
    if report_bytes > _BLOCK_BYTES // 2:
        return -(-report_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    return int(1 << (report_bytes - 1).bit_length())


def file_bytes(report_bytes: int, capacity: int) -> int:
    """Length in bytes of the reports' file of such a batch; nearly all of it is holes."""
    return _SLOTS_PER_USER * capacity * slot_bytes(report_bytes)


_SLOTS_ROW = "SELECT bits FROM slots WHERE part = ?"
_REPORTED_ROW = "SELECT hashes FROM reported WHERE bucket = ?"


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
            DamagedFile: if a file of an existing batch is missing or damaged.
            sqlite3.Error, OSError: if a file can not be opened or written, or the slots are more
                than the file system allows in a file.
        """
        existing = exists(path)
        self._path = path
        self._report_bytes = report_bytes
        self._capacity = capacity
        self._stride = slot_bytes(report_bytes)
        self._slots = _SLOTS_PER_USER * capacity
        self._parts = -(-self._slots // _BITS)
        self._buckets = -(-capacity // _BUCKET_MEAN)
        self._spoilt: list[int] = []  # written to in vain; the next to be given out
        self._reserved: set[int] = set()  # being written to piece by piece
        self._generation = 0  # how often syncing has failed
        self._lock = threading.Lock()
        self._reader: Iterator[int] | None = None
        self._place: tuple[int, int] | None = None  # of a report read in pieces: where, how much
        create = 0 if existing else os.O_CREAT | os.O_TRUNC
        if existing and not exists(_reports_path(path)):
            raise DamagedFile("the reports' file is missing")
        self._file: int | None = os.open(
            _reports_path(path), create | os.O_RDWR | os.O_CLOEXEC, 0o600
        )
        try:
            if not existing:
                os.ftruncate(self._file, file_bytes(report_bytes, capacity))
            elif os.fstat(self._file).st_size != file_bytes(report_bytes, capacity):
                raise DamagedFile("the reports' file has another length than it was made with")
            with damage():
                self._connection = connect(path)
        except BaseException:
            os.close(self._file)
            raise
        try:
            if not existing:
                self._prepare()
            with damage():
                self._key, self._count = self._examine()
            sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many reports are in the batch. Not for the server before a release."""
        return self._count

    def reserve(self) -> Slot | None:
        """A slot to write a report to, piece by piece; hand it to `add` or to `give_up`.

        None: all are taken or reserved, as unfinished reports alone can bring about.

        Raises:
            ShufflerRefused: if the batch has been destroyed.
            sqlite3.Error, OSError: if the disk fails.
        """
        with self._lock:
            connection = self._open()
            if not self._has_slot(self._capacity - self._count):
                return None
            number = self._draw(_Bits(connection))
            assert self._file is not None
            slot = Slot(number, os.dup(self._file), number * self._stride, self._generation)
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
            For each report `ACCEPTED`, `DUPLICATE`, `ROUND_FULL`, or `STORAGE_FAILED` where the
            slot was reserved before a sync that failed.

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
                    slots, users = _Bits(connection), self._users()
                    room = self._capacity - self._count
                    for sender, user, content in reports:
                        if users.holds(sender, user):
                            verdicts.append(Verdict.DUPLICATE)
                        elif (
                            not room
                            or not users.has_room(sender, user)
                            or not (isinstance(content, Slot) or self._has_slot(room))
                        ):
                            verdicts.append(Verdict.ROUND_FULL)
                        elif isinstance(content, Slot) and content.generation != self._generation:
                            verdicts.append(Verdict.STORAGE_FAILED)
                        else:
                            if isinstance(content, Slot):
                                slots.put(content.number)
                            else:
                                drawn.append(self._draw(slots))
                                slots.put(drawn[-1])
                                self._pwrite(drawn[-1] * self._stride, content)
                            users.put(sender, user)
                            verdicts.append(Verdict.ACCEPTED)
                            room -= 1
                    assert self._file is not None
                    if room != self._capacity - self._count:
                        self._sync(self._file)
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
            self._open()
            return self._users().holds(sender, user)

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
            self._close()

    def destroy(self) -> None:
        """Closes and deletes the files; may be repeated.

        Raises:
            OSError: if a file can not be deleted.
        """
        # The names go first: a crash in between leaves nothing to find.
        _reports_path(self._path).unlink(missing_ok=True)
        delete_database(self._path)
        with self._lock:
            if self._file is not None:
                os.ftruncate(self._file, 0)  # a stream that has a slot keeps the file open
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._connection.close()
            os.close(self._file)
            self._file = None

    def _prepare(self) -> None:
        """Makes all rows of a new batch, in order."""
        with transaction(self._connection) as rows:
            for statement in _SCHEMA.split(";"):
                rows.execute(statement)
            rows.execute("INSERT INTO hash_key VALUES (?)", (secrets.token_bytes(_HASH_BYTES),))
            rows.executemany(
                "INSERT INTO slots VALUES (?, zeroblob(?))",
                ((part, _BITS // 8) for part in range(self._parts)),
            )
            rows.executemany(
                "INSERT INTO reported VALUES (?, zeroblob(?))",
                ((bucket, _BUCKET_BYTES) for bucket in range(self._buckets)),
            )

    def _examine(self) -> tuple[bytes, int]:
        """The hashes' key and the number of reports; raises if a row is missing."""
        rows = self._connection
        keys = rows.execute("SELECT key FROM hash_key").fetchall()
        parts = rows.execute(
            "SELECT count(*) FROM slots WHERE typeof(bits) = 'blob' AND length(bits) = ?",
            (_BITS // 8,),
        )
        buckets = rows.execute(
            "SELECT count(*) FROM reported WHERE typeof(hashes) = 'blob' AND length(hashes) = ?",
            (_BUCKET_BYTES,),
        )
        found = [type(key) for (key,) in keys], *parts.fetchone(), *buckets.fetchone()
        if found != ([bytes], self._parts, self._buckets):
            raise DamagedFile("rows of the batch's file are missing")
        bits = rows.execute("SELECT bits FROM slots")
        return keys[0][0], sum(int.from_bytes(b, "little").bit_count() for (b,) in bits)

    def _sync(self, file: int) -> None:
        try:
            os.fdatasync(file)
        except OSError:
            self._generation += 1
            raise

    def _users(self) -> _Users:
        return _Users(self._connection, self._key, self._buckets)

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

    def _has_slot(self, room: int) -> bool:
        """Whether there is one to draw, with room for so many more reports."""
        return bool(self._spoilt) or self._capacity - room + len(self._reserved) < self._slots

    def _draw(self, slots: _Bits) -> int:
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

    def __init__(self, number: int, descriptor: int, start: int, generation: int) -> None:
        self.number = number
        self.generation = generation
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
    """The set of taken slots, as rows of bits; changes are kept here until they are saved."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows: dict[int, bytearray] = {}
        self._changed: set[int] = set()

    def holds(self, number: int) -> bool:
        part, bit = divmod(number, _BITS)
        return bool(self._row(part)[bit >> 3] & 1 << (bit & 7))

    def put(self, number: int) -> None:
        part, bit = divmod(number, _BITS)
        self._row(part)[bit >> 3] |= 1 << (bit & 7)
        self._changed.add(part)

    def save(self) -> None:
        # Of the same length as before, so SQLite writes them where they were.
        self._connection.executemany(
            "UPDATE slots SET bits = ? WHERE part = ?",
            [(bytes(self._rows[part]), part) for part in sorted(self._changed)],
        )
        self._changed.clear()

    def _row(self, part: int) -> bytearray:
        row = self._rows.get(part)
        if row is None:
            row = self._rows[part] = bytearray(_blob(self._connection, _SLOTS_ROW, part))
        return row


class _Users:
    """The set of users who have reported; changes are kept here until they are saved."""

    def __init__(self, connection: sqlite3.Connection, key: bytes, buckets: int) -> None:
        self._connection = connection
        self._key = key
        self._buckets = buckets
        self._rows: dict[int, set[bytes]] = {}
        self._changed: set[int] = set()

    def holds(self, sender: str, user: int) -> bool:
        bucket, name = self._place(sender, user)
        return name in self._row(bucket)

    def has_room(self, sender: str, user: int) -> bool:
        bucket, _ = self._place(sender, user)
        return len(self._row(bucket)) < _BUCKET_HASHES

    def put(self, sender: str, user: int) -> None:
        bucket, name = self._place(sender, user)
        self._row(bucket).add(name)
        self._changed.add(bucket)

    def save(self) -> None:
        self._connection.executemany(
            "UPDATE reported SET hashes = ? WHERE bucket = ?",
            [
                (b"".join(sorted(self._rows[bucket])).ljust(_BUCKET_BYTES, b"\0"), bucket)
                for bucket in sorted(self._changed)
            ],
        )
        self._changed.clear()

    def _place(self, sender: str, user: int) -> tuple[int, bytes]:
        # The user's bytes are of one length, so no two pairs give the same bytes.
        pair = sender.encode() + user.to_bytes(8, "big")
        name = hashlib.blake2b(pair, digest_size=_HASH_BYTES, key=self._key).digest()
        return int.from_bytes(name[:8], "big") * self._buckets >> 64, name

    def _row(self, bucket: int) -> set[bytes]:
        row = self._rows.get(bucket)
        if row is None:
            hashes = _blob(self._connection, _REPORTED_ROW, bucket)
            names = {hashes[i : i + _HASH_BYTES] for i in range(0, len(hashes), _HASH_BYTES)}
            row = self._rows[bucket] = names - {bytes(_HASH_BYTES)}
        return row


def _blob(connection: sqlite3.Connection, query: str, number: int) -> bytes:
    found = connection.execute(query, (number,)).fetchone()
    if found is None:
        raise sqlite3.DatabaseError("a row of the batch's file is missing")
    return bytes(found[0])


def _write_at(descriptor: int, parts: Sequence[bytes], offset: int) -> None:
    """Writes the parts one after the other, all of them."""
    if len(parts) > _PARTS:
        parts = [b"".join(parts)]
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
