"""One round's batch on disk, in an order that says nothing.

Reports of a run have one length, so a batch is a file of equal slots, twice as many as there may be
reports, with holes where nothing is stored. Each accepted report is written into a slot drawn
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

The shuffler's own reports, the blankets, lie among the others in slots drawn alike. How many are
kept is decided when the round is opened and lies in the SQLite file, so that a crash does not draw
it anew. A fixed number is made and written, and those beyond the number kept are marked as thrown
away, a bit in the same row; their slots are not used again.

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

import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from shuffler.store.spool_rows import BlanketsLeft, ReportedUsers, TakenSlots, count_rows, make_rows
from shuffler.store.storage import (
    DamagedFile,
    connect,
    damage,
    delete_database,
    exists,
    storage_errors,
    sync_directory,
    transaction,
)
from shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

__all__ = ["RoundSpool", "Slot", "file_bytes", "slot_bytes"]

_BLOCK_BYTES = 4096  # of a file system; no two slots share one, unless several fit into it
_PARTS = 1024  # written with one call; the system takes no more (IOV_MAX)
_SLOTS_PER_REPORT = 2  # a random slot is free at least every other time


def slot_bytes(report_bytes: int) -> int:
    """Length in bytes of the slot that a report of this length gets."""
    if report_bytes > _BLOCK_BYTES // 2:
        return -(-report_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
    return int(1 << (report_bytes - 1).bit_length())


def file_bytes(report_bytes: int, capacity: int) -> int:
    """Length in bytes of the reports' file of a batch of at most `capacity` reports and blankets.

    Nearly all of it is holes.
    """
    return _SLOTS_PER_REPORT * capacity * slot_bytes(report_bytes)


class RoundSpool:
    """The batch of one round.

    One thread at a time may use it, except that `destroy` may come from another thread while a
    chunk is being read.
    """

    def __init__(
        self,
        path: Path,
        report_bytes: int,
        users: int,
        work: int = 0,
        draw: Callable[[], int] = lambda: 0,
    ) -> None:
        """Opens the batch in this file, or starts an empty one.

        Args:
            path: of the SQLite file; the reports lie beside it.
            report_bytes: length of every report.
            users: how many users' reports the batch may hold.
            work: how many blankets are made for it.
            draw: how many of them are kept; asked where the batch is new.

        Raises:
            DamagedFile: if a file of an existing batch is missing or damaged.
            sqlite3.Error, OSError: if a file can not be opened or written, or the slots are more
                than the file system allows in a file.
        """
        existing = exists(path)
        capacity = users + work
        self._path = path
        self._report_bytes = report_bytes
        self._users = users
        self._stride = slot_bytes(report_bytes)
        self._slots = _SLOTS_PER_REPORT * capacity
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
                blankets = BlanketsLeft(work, draw())
                make_rows(self._connection, self._slots, users, blankets)
            with damage():
                self._count = count_rows(self._connection, self._slots, users)
                self._blankets = BlanketsLeft.read(self._connection)
                if self._blankets.work != work:
                    raise DamagedFile("the batch's file is for another number of blankets")
            sync_directory(path.parent)
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many reports are in the batch, blankets too. Not for the server before a release."""
        return self._count

    @property
    def blankets(self) -> BlanketsLeft:
        """How far the blankets are. Never for the server."""
        return self._blankets

    @property
    def _room(self) -> int:
        """For how many more users' reports there is room."""
        return self._users - (self._count - self._blankets.stored)

    def reserve(self) -> Slot | None:
        """A slot to write a report to, piece by piece; hand it to `add` or to `give_up`.

        None: all are taken or reserved, as unfinished reports alone can bring about.

        Raises:
            ShufflerRefused: if the batch has been destroyed.
            sqlite3.Error, OSError: if the disk fails.
        """
        with self._lock:
            connection = self._open()
            if not self._has_slot(self._count):
                return None
            number = self._draw(TakenSlots(connection))
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
                    slots, users = TakenSlots(connection), ReportedUsers(connection, self._users)
                    room, count = self._room, self._count
                    for sender, user, content in reports:
                        if users.holds(sender, user):
                            verdicts.append(Verdict.DUPLICATE)
                        elif (
                            not room
                            or not users.has_room(sender, user)
                            or not (isinstance(content, Slot) or self._has_slot(count))
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
                            count += 1
                    if count != self._count:
                        self._sync()
                    slots.save()
                    users.save()
            except BaseException:
                self._spoilt += drawn
                self._spoil(own)
                raise
            self._count = count
            self._spoil(
                content
                for (*_, content), verdict in zip(reports, verdicts, strict=True)
                if isinstance(content, Slot) and verdict is not Verdict.ACCEPTED
            )
            for slot in own:
                self._reserved.discard(slot.number)
                slot.close()
            return verdicts

    def add_blankets(self, sealed: Sequence[bytes]) -> None:
        """Stores the next blankets with one commit, synced to disk on return.

        All get a slot, are written and marked, and those beyond the number that is kept as thrown
        away: that takes as long, so that nobody can tell from the time how many are kept.

        Args:
            sealed: no more than are still to be made, each as long as a report.

        Raises:
            ShufflerRefused: if the batch has been destroyed.
            sqlite3.Error, OSError: if the disk is full or fails; none is stored, and they are still
                to be made.
        """
        with self._lock:
            connection = self._open()
            after = self._blankets.after(len(sealed))
            keep = after.stored - self._blankets.stored
            drawn: list[int] = []
            try:
                with transaction(connection):
                    slots = TakenSlots(connection)
                    for index, content in enumerate(sealed):
                        if not self._has_slot(self._count + len(drawn)):
                            raise OSError("no slot is free")
                        drawn.append(self._draw(slots))
                        self._pwrite(drawn[-1] * self._stride, content)
                        slots.put(drawn[-1], keep=index < keep)
                    self._sync()
                    slots.save()
                    after.write(connection)
            except BaseException:
                self._spoilt += drawn
                raise
            self._count += keep
            self._blankets = after

    def has_reported(self, sender: str, user: int) -> bool:
        """Whether a report of this user is in the batch."""
        with self._lock:
            return ReportedUsers(self._open(), self._users).holds(sender, user)

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
                self._reader = TakenSlots(connection).rising()
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

    def _sync(self) -> None:
        assert self._file is not None
        try:
            os.fdatasync(self._file)
        except OSError:
            self._generation += 1
            raise

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

    def _has_slot(self, taken: int) -> bool:
        """Whether there is one to draw, when so many are taken."""
        thrown_away = self._blankets.made - self._blankets.stored
        return bool(self._spoilt) or taken + thrown_away + len(self._reserved) < self._slots

    def _draw(self, slots: TakenSlots) -> int:
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


def _write_at(descriptor: int, parts: Sequence[bytes], offset: int) -> None:
    """Writes the parts one after the other, all of them."""
    if len(parts) > _PARTS:
        parts = [b"".join(parts)]
    done, length = os.pwritev(descriptor, parts, offset), sum(map(len, parts))
    while done < length:  # a signal, or a full disk: then the next call says so
        done += os.pwrite(descriptor, b"".join(parts)[done:], offset + done)


def _reports_path(path: Path) -> Path:
    return path.with_suffix(".reports")
