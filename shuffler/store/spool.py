"""One round's batch on disk, in an order that says nothing.

Each accepted report lies in a slot of a file, drawn uniformly among the free ones, from the
operating system's entropy. Whatever the order of arrival, the reports in the order of their slots
are a uniformly random permutation (each sequence of distinct slots is equally likely), so reading
the file from front to back *is* the shuffle. There are twice as many slots as there may be reports.

Which slots are taken is a set of bits, and which users of which sender have reported is a set of
keyed hashes: rows of a small SQLite file that are all made when the round is opened, in order, and
then replaced in place. So every byte of both files is a function of the sets and of the hashes'
key, and the order of arrival is in neither: a row that came with its first report would lie in its
page where SQLite had room *then*. No row connects a user with a report. The journal that makes a
commit atomic is emptied by the commit. The key keeps senders from choosing their buckets, and hides
nothing from whoever has the file.

The shuffler's own reports, the blankets, lie among the others in slots drawn alike. How many are
kept is decided when the round is opened and lies in the SQLite file, so that a crash does not draw
it anew. A fixed number is made and written, and those beyond the number kept are marked as thrown
away, a bit in the same row; their slots are not used again.

A group of reports is stored in this order: into free slots; `fdatasync`; then one commit that marks
slots and users, synced. What has no mark was never acknowledged and is never read. What remains for
whoever reads the raw device *during* a round is in docs/shuffler.md.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from shufl.shuffler.store.checks import Checks
from shufl.shuffler.store.slots import Slot, SlotFile
from shufl.shuffler.store.spool_rows import BatchRows, BlanketsLeft, ReportedUsers, TakenSlots
from shufl.shuffler.store.storage import (
    DamagedFile,
    connect,
    damage,
    delete_database,
    exists,
    storage_errors,
    sync_directory,
    transaction,
)
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

_UNKEYED = Checks(b"")


def delete_batch(path: Path) -> None:
    """Deletes the files of the batch whose SQLite file this is; missing ones are fine."""
    _reports_path(path).unlink(missing_ok=True)
    delete_database(path)


class RoundSpool:
    """The batch of one round.

    One thread at a time may use it, except that it may be destroyed in another thread while a
    chunk is being read. What is asked of a destroyed batch is refused. A disk that is full or fails
    raises `sqlite3.Error` or `OSError`, and what was to be stored is not.

    Attributes:
        count: how many reports are in it, blankets too. Not for the server before a release.
        blankets: how far its blankets are. Never for the server.
    """

    def __init__(
        self,
        path: Path,
        report_bytes: int,
        users: int,
        work: int = 0,
        draw: Callable[[], int] = lambda: 0,
        cover: bool = False,
        checks: Checks = _UNKEYED,
    ) -> None:
        """Opens the batch in this file, or starts an empty one.

        The reports lie beside the SQLite file `path`; each has `report_bytes`.

        Args:
            users: how many users' reports the batch may hold.
            work: how many blankets are made for it.
            draw: how many of them are blankets; asked where the batch is new.
            cover: whether the others, empty reports, are kept too.
            checks: what makes the checksums of everything in the files.

        Raises:
            DamagedFile: if a file of an existing batch is missing or damaged.
        """
        existing = exists(path)
        self._path = path
        self._report_bytes = report_bytes
        self._users = users
        self._lock = threading.Lock()
        self._chunks: Iterator[tuple[list[bytes], bool]] | None = None
        with ExitStack() as files:
            self._file = SlotFile(_reports_path(path), report_bytes, users + work, existing, checks)
            files.callback(self._file.close)
            with damage():
                self._connection = connect(path)
            files.callback(self._connection.close)
            self._rows = BatchRows(self._connection, checks)
            if not existing:
                self._rows.make(self._file.slots, users, BlanketsLeft(work, draw(), cover))
            with damage():
                self.count, thrown_away, reported = self._rows.count(self._file.slots, users)
                self.blankets = BlanketsLeft.read(self._rows)
            if self.blankets.work != work:
                raise DamagedFile("the batch's file is for another number of blankets")
            # Rows that are good one by one may be of different commits.
            marks = reported + self.blankets.stored, self.blankets.made - self.blankets.stored
            if (self.count, thrown_away) != marks:
                raise DamagedFile("the rows of the batch's file do not fit together")
            sync_directory(path.parent)
            self._files: ExitStack | None = files.pop_all()
            self._deleted: ExitStack | None = None

    def reserve(self) -> Slot | None:
        """A slot to write a report to, piece by piece; hand it to `add` or give it up.

        None: all are taken or reserved, as unfinished reports alone can bring about.
        """
        with self._lock:
            taken = TakenSlots(self._open())
            return self._file.reserve(taken) if self._has_slot(0) else None

    def add(self, reports: Sequence[tuple[str, int, bytes | Slot]]) -> list[Verdict]:
        """Stores the reports with one commit, synced to disk on return.

        Args:
            reports: sender, number of its user, and the report's bytes, or the slot (`reserve`)
                where they are. The first of a user counts.

        Returns:
            For each report `ACCEPTED`, `DUPLICATE`, `ROUND_FULL`, or `STORAGE_FAILED` where the
            slot was reserved before a sync that failed.
        """
        own = [content for *_, content in reports if isinstance(content, Slot)]
        verdicts: list[Verdict] = []
        accepted = 0
        with self._lock:
            rows = self._open()
            with self._file.group(own) as drawn, transaction(rows.connection):
                taken, users = TakenSlots(rows), ReportedUsers(rows, self._users)
                for sender, user, content in reports:
                    verdicts.append(self._judge(users, sender, user, content, accepted))
                    if verdicts[-1] is not Verdict.ACCEPTED:
                        continue
                    if isinstance(content, Slot):
                        taken.put(content.number)
                    else:
                        taken.put(self._file.write(content, taken, drawn))
                    users.put(sender, user)
                    accepted += 1
                if accepted:
                    self._file.sync()
                taken.save()
                users.save()
            self.count += accepted
            for (*_, content), verdict in zip(reports, verdicts, strict=True):
                if isinstance(content, Slot):
                    if verdict is Verdict.ACCEPTED:
                        self._file.keep(content)
                    else:
                        self._file.give_up([content])
            return verdicts

    def add_blankets(self, sealed: Sequence[bytes]) -> None:
        """Stores the next blankets with one commit, synced to disk on return.

        All get a slot, are written and marked, and those beyond the number that is kept as thrown
        away: that takes as long, so that nobody can tell from the time how many are kept.
        """
        with self._lock:
            rows = self._open()
            after = self.blankets.after(len(sealed))
            keep = after.stored - self.blankets.stored
            with self._file.group() as drawn, transaction(rows.connection):
                taken = TakenSlots(rows)
                for index, content in enumerate(sealed):
                    if not self._has_slot(index):
                        raise OSError("no slot is free")
                    taken.put(self._file.write(content, taken, drawn), keep=index < keep)
                self._file.sync()
                taken.save()
                after.write(rows)
            self.count += keep
            self.blankets = after

    def has_reported(self, sender: str, user: int) -> bool:
        """Whether a report of this user is in the batch."""
        with self._lock:
            return ReportedUsers(self._open(), self._users).holds(sender, user)

    def next_chunk(self, limit: int) -> tuple[list[bytes], bool]:
        """The next sealed reports in random order, of at most `limit` bytes in all.

        Returns:
            The reports, none after the last; or a piece of a report longer than `limit` (the same
            at each call), and whether it goes on in the next chunk.

        Raises:
            ShufflerRefused: also if the disk fails; the rest of the batch is then lost.
        """
        with self._lock, storage_errors():
            rows = self._open()
            if self._chunks is None:
                self._chunks = self._read(rows, limit)
            return next(self._chunks, ([], False))

    def _read(self, rows: BatchRows, limit: int) -> Iterator[tuple[list[bytes], bool]]:
        reports: list[bytes] = []
        for number in TakenSlots(rows).rising():
            pieces = self._file.read(number, limit)
            if self._report_bytes > limit:
                for start, piece in zip(range(0, self._report_bytes, limit), pieces, strict=True):
                    yield [piece], start + limit < self._report_bytes
                continue
            reports += pieces
            if len(reports) == limit // self._report_bytes:
                yield reports, False
                reports = []
        if reports:
            yield reports, False

    def close(self) -> None:
        """Closes the files and keeps them."""
        with self._lock:
            if self._files is not None:
                self._files.close()
                self._files = None

    def destroy(self) -> None:
        """Deletes the files, and gives back the room that they took; may be repeated."""
        self.delete()  # first: a crash in between leaves nothing to find
        self.free()

    def delete(self) -> None:
        """Deletes the files and ends all use of them; may be repeated."""
        delete_batch(self._path)
        with self._lock:
            if self._files is not None:
                self._deleted, self._files = self._files, None

    def free(self) -> None:
        """Gives back the room of deleted files, which may take a second for each GB."""
        with self._lock:
            deleted, self._deleted = self._deleted, None
        if deleted is not None:
            with deleted:
                self._file.erase()

    def _open(self) -> BatchRows:
        if self._files is None:
            raise ShufflerRefused(Refusal.RUN_ENDED)
        return self._rows

    def _has_slot(self, more: int) -> bool:
        """Whether there is one to draw, when so many more are taken than are marked."""
        thrown_away = self.blankets.made - self.blankets.stored
        return self._file.has_slot(self.count + thrown_away + more)

    def _judge(
        self, users: ReportedUsers, sender: str, user: int, content: bytes | Slot, accepted: int
    ) -> Verdict:
        """Whether a report may be stored, when so many of its group were accepted before it."""
        if users.holds(sender, user):
            return Verdict.DUPLICATE
        reports = self.count - self.blankets.stored + accepted
        if reports == self._users or not users.has_room(sender, user):
            return Verdict.ROUND_FULL
        if isinstance(content, Slot):
            good = self._file.is_good(content)
            return Verdict.ACCEPTED if good else Verdict.STORAGE_FAILED
        return Verdict.ACCEPTED if self._has_slot(accepted) else Verdict.ROUND_FULL


def _reports_path(path: Path) -> Path:
    return path.with_suffix(".reports")
