"""A batch's file of equal slots, of which each report gets one at random.

The kernel reports what it could not write to *one* `fdatasync` and forgets it, whichever slot it
was: after a failed one, every slot that was reserved before is given up.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shufl.shuffler.store.checks import CHECK_BYTES, Checks
from shufl.shuffler.store.spool_rows import TakenSlots
from shufl.shuffler.store.storage import PAGE_BYTES, DamagedFile, Disk, storage_verdict, syncs
from shufl.shuffler.wire.errors import Verdict

_BLOCK_BYTES = 4096  # of a file system; no two slots share one, unless several fit into it
_PARTS = 1024  # written with one call; the system takes no more (IOV_MAX)
_SLOTS_PER_REPORT = 2  # a random slot is free at least every other time


def slot_bytes(report_bytes: int) -> int:
    """Length in bytes of the slot that a report of this length gets, with its checksum."""
    length = report_bytes + CHECK_BYTES
    if length > _BLOCK_BYTES // 2:
        return -(-length // _BLOCK_BYTES) * _BLOCK_BYTES
    return int(1 << (length - 1).bit_length())


def file_bytes(report_bytes: int, capacity: int) -> int:
    """Length in bytes, nearly all of it holes, of a file for so many reports and blankets."""
    return _SLOTS_PER_REPORT * capacity * slot_bytes(report_bytes)


class SlotFile:
    """The file, and which slots are being written to. Which are taken is in `TakenSlots`.

    Attributes:
        slots: how many there are.
        stride: how many bytes each has.
        checks: of the reports, each bound to its slot.
    """

    def __init__(
        self, path: Path, report_bytes: int, capacity: int, existing: bool, checks: Checks
    ) -> None:
        """Opens the file, or makes it; an existing one that is missing or too short is damaged."""
        self.checks = checks
        self.slots = _SLOTS_PER_REPORT * capacity
        self.report_bytes = report_bytes
        self.stride = slot_bytes(report_bytes)
        self._spoilt: list[int] = []  # written to in vain; the next to be given out
        self._reserved: set[int] = set()  # being written to piece by piece
        self._generation = 0  # how often syncing has failed
        length = file_bytes(report_bytes, capacity)
        create = 0 if existing else os.O_CREAT | os.O_TRUNC
        try:
            self.descriptor = os.open(path, create | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise DamagedFile("the reports' file is missing") from None
        try:
            if not existing:
                os.ftruncate(self.descriptor, length)
            elif os.fstat(self.descriptor).st_size != length:
                raise DamagedFile("the reports' file has another length than it was made with")
        except BaseException:
            self.close()
            raise

    def has_slot(self, used: int) -> bool:
        """Whether there is one to draw when so many were drawn for good."""
        return bool(self._spoilt) or used + len(self._reserved) < self.slots

    def reserve(self, taken: TakenSlots) -> Slot:
        """A slot to write a report to, piece by piece."""
        number = self._draw(taken)
        slot = Slot(self, number, self._generation)
        self._reserved.add(number)
        return slot

    def is_good(self, slot: Slot) -> bool:
        """Whether no sync has failed since the slot was reserved."""
        return slot.generation == self._generation

    @contextmanager
    def group(self, reserved: Sequence[Slot] = ()) -> Iterator[list[int]]:
        """A group of reports. If the block fails, what it adds to the list, the numbers of the
        slots that it draws, is spoilt, and so are the reserved slots of the group."""
        drawn: list[int] = []
        try:
            yield drawn
        except BaseException:
            self._spoilt += drawn
            self.give_up(reserved)
            raise

    def write(self, content: bytes, taken: TakenSlots, drawn: list[int]) -> int:
        """Writes a report to a slot that it draws, and returns the slot's number."""
        drawn.append(self._draw(taken))
        check = self.checks.make(drawn[-1], content=content)
        _write_at(self.descriptor, [content, check], drawn[-1] * self.stride)
        return drawn[-1]

    def read(self, number: int, length: int) -> Iterator[bytes]:
        """A report in pieces of at most so many bytes.

        Raises:
            DamagedFile: before the last piece, if it is not what was written.
        """
        check, place = self.checks.begin(number), number * self.stride
        for start in range(0, self.report_bytes, length):
            end = min(start + length, self.report_bytes)
            last = end == self.report_bytes
            wanted = end - start + (CHECK_BYTES if last else 0)
            data = os.pread(self.descriptor, wanted, place + start)
            check.update(data[: end - start])
            if len(data) != wanted or (last and data[end - start :] != check.digest()):
                raise DamagedFile("a report is not what was written")
            yield data[: end - start]

    def sync(self) -> None:
        """Brings all that was written to the disk."""
        if not syncs():
            return
        try:
            os.fdatasync(self.descriptor)
        except OSError:
            self._generation += 1
            raise

    def keep(self, slot: Slot) -> None:
        """Notes that the report in a reserved slot is in the batch."""
        self._reserved.discard(slot.number)
        slot.close()

    def give_up(self, slots: Iterable[Slot]) -> None:
        """Takes reserved slots back; they are the next that reports get.

        Which of the slots drawn so far a report gets does not matter to the order: all are drawn
        alike. So what is written in vain takes no more room than there were reports at once.
        """
        for slot in slots:
            if slot.number in self._reserved:
                self._spoilt.append(slot.number)
            self.keep(slot)

    def erase(self) -> None:
        """Cuts the file to nothing: a stream that has a slot keeps it, though it is deleted."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Closes the file and keeps it."""
        os.close(self.descriptor)

    def _draw(self, taken: TakenSlots) -> int:
        """A slot that is uniformly random among those that were never drawn, or a spoilt one."""
        if self._spoilt:
            return self._spoilt.pop()
        while True:
            slot = secrets.randbelow(self.slots)
            if slot not in self._reserved and not taken.holds(slot):
                return slot


class Slot:
    """A place for one report that is written in pieces, in any thread; one at a time.

    It has a descriptor of its own, which stays good when the batch is destroyed meanwhile.

    Attributes:
        generation: how often syncing had failed when it was reserved.
        verdict: `ACCEPTED` while the report can be accepted, else why it cannot.
    """

    def __init__(self, file: SlotFile, number: int, generation: int) -> None:
        self.number = number
        self.generation = generation
        self.verdict = Verdict.ACCEPTED
        self._file = file
        self._descriptor = os.dup(file.descriptor)
        self._next = number * file.stride
        self._end = self._next + file.report_bytes
        self._check = file.checks.begin(number)

    @property
    def complete(self) -> bool:
        """Whether all of the report is there."""
        return self._next == self._end

    def append(self, pieces: Sequence[bytes], disk: Disk | None = None) -> None:
        """Writes the next pieces, if the disk has room; what goes wrong is the slot's verdict.

        They are not synced before `RoundSpool.add`.
        """
        length = sum(map(len, pieces))
        if self.verdict is Verdict.ACCEPTED and self._next + length > self._end:
            self.verdict = Verdict.WRONG_LENGTH
        if self.verdict is not Verdict.ACCEPTED:
            return
        try:
            if disk is not None:
                disk.require(length + PAGE_BYTES)
            for piece in pieces:
                self._check.update(piece)
            last = [self._check.digest()] if self._next + length == self._end else []
            _write_at(self._descriptor, [*pieces, *last], self._next)
            if syncs():  # starts writing back at once: the one in `add` finds little left to do
                os.posix_fadvise(self._descriptor, self._next, length, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            self.verdict = storage_verdict(error)
        self._next += length

    def give_up(self) -> None:
        """Gives the slot back; in the store's thread, like everything else of the store."""
        self._file.give_up([self])

    def close(self) -> None:
        """Ends the writing; may be repeated."""
        descriptor, self._descriptor = self._descriptor, -1  # to which nothing can be written
        if descriptor >= 0:
            os.close(descriptor)


def _write_at(descriptor: int, parts: Sequence[bytes], offset: int) -> None:
    """Writes the parts one after the other, all of them."""
    if len(parts) > _PARTS:
        parts = [b"".join(parts)]
    done, length = os.pwritev(descriptor, parts, offset), sum(map(len, parts))
    while done < length:  # a signal, or a full disk: then the next call says so
        done += os.pwrite(descriptor, b"".join(parts)[done:], offset + done)
