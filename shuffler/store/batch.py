"""One round's batch: an unnamed, encrypted file of equal slots, in an order that says nothing.

Each report lies in a slot that was drawn uniformly among the free ones, from the operating system's
entropy. Whatever the order of arrival, the reports in the order of their slots are a uniformly
random permutation (each sequence of distinct slots is equally likely), so reading the file from
front to back *is* the shuffle.

The file has no name and its key is only in memory: when the process ends, or the batch is
destroyed, nothing of it can be read or released again, whatever is left on the disk or was copied
from it.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

_WRITE_BYTES = 2**20  # encrypted at once
_LARGE_BYTES = 2**26  # of a file whose closing would be waited for
_RESERVE_BYTES = 128 * 2**10  # of the disk, for the record
_NO_DESCRIPTORS = (
    "the shuffler has too many files open: its operator raises the limit (ulimit -n, LimitNOFILE)"
)


def batch_bytes(report_bytes: int, slots: int) -> int:
    """Length in bytes of the file of a batch with so many slots."""
    return report_bytes * slots


class Batch:
    """The batch of one round. Any thread may use it.

    Attributes:
        report_bytes: length of each sealed report.
        senders: how many users' reports are in it. Never for the server, but where the plan has
            cover.
        count: how many reports in all, the shuffler's own too. Not for the server before a release.
    """

    def __init__(
        self, directory: Path, report_bytes: int, users: int, slots: int, *, allocate: bool
    ) -> None:
        """Makes an empty batch.

        Args:
            directory: on whose file system the file is.
            users: how many users' reports it may hold.
            slots: how many reports in all, and on their way.
            allocate: whether the disk's room is taken now, so that no report finds it full.

        Raises:
            ShufflerRefused: `STORAGE_FULL`, `STORAGE_FAILED`; `MALFORMED`, where no file may be so
                long.
        """
        self.report_bytes = report_bytes
        self.senders = self.count = 0
        self._users = users
        self._key = algorithms.AES256(os.urandom(32))
        self._reported: dict[str, np.ndarray] = {}  # which users of each sender
        self._lock = threading.Lock()
        self._ended = False
        self._descriptor = -1
        self._length = length = batch_bytes(report_bytes, slots)
        try:
            self._descriptor = _unnamed_file(directory)
            os.ftruncate(self._descriptor, length)
            if allocate:
                if not _has_room(self._descriptor, length):
                    _wait_for_files_that_close()
                if not _has_room(self._descriptor, length):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(self._descriptor, 0, length)
        except OSError as error:
            self.close()
            if error.errno in (errno.EFBIG, errno.EINVAL):
                raise ShufflerRefused(
                    Refusal.MALFORMED,
                    f"a round's file would have {length} bytes, more than the file system allows",
                ) from None
            raise storage_refusal(error) from error
        # Behind that: memory for slots that the disk has no room for would be taken for nothing.
        self._free = np.arange(slots, dtype=np.uint32)
        self._left = slots  # so many at the front of `_free`
        self._writes = np.zeros(slots, dtype=np.uint32)  # how often each slot was written to
        self._taken = np.zeros(slots, dtype=bool)

    def add(self, sender: str, users: range, most: int, content: bytes | Slot) -> Verdict:
        """Takes a report, if it is the first of each of these users and there is room.

        Args:
            users, most: numbers of the sender's users, from 0, and how many it has.
            content: the sealed report, or where it was written piece by piece; a slot whose report
                is not taken is given back.
        """
        with self._lock:
            verdict = self._judge(sender, users, content)
            if verdict is not Verdict.ACCEPTED:
                if isinstance(content, Slot):
                    self._give_back(content.number)
                return verdict
            try:
                self._take(content)
            except OSError as error:
                return storage_verdict(error)
            known = self._reported.get(sender, np.zeros(0, dtype=bool))
            if users[-1] >= known.size:  # its first, or its credential was renewed for more users
                known = self._reported[sender] = np.pad(known, (0, most - known.size))
            known[_places(users)] = True
            self.senders += len(users)
            self.count += 1
            return Verdict.ACCEPTED

    def reserve(self, sender: str, users: range) -> Slot | Verdict:
        """A slot to write these users' report to, piece by piece, or why it would not be taken.

        It is handed to `add`, or given up.
        """
        with self._lock:
            verdict = self._judge(sender, users)
            return Slot(self, *self._draw()) if verdict is Verdict.ACCEPTED else verdict

    def give_up(self, slot: Slot) -> None:
        """Takes a slot back, to which nothing is being written."""
        with self._lock:
            self._give_back(slot.number)

    def add_own(self, content: bytes, keep: bool) -> bool:
        """Takes a report of the shuffler's own; one that is not kept costs the same work.

        Returns:
            Whether the batch still exists.

        Raises:
            OSError: the disk is full or fails.
        """
        with self._lock:
            if self._descriptor < 0:
                return False
            number = self._store(content)
            if keep:
                self._taken[number] = True
                self.count += 1
            else:
                self._give_back(number)
            return True

    def has_of(self, sender: str) -> bool:
        """Whether a report of this sender's is in it."""
        return sender in self._reported

    def end(self) -> None:
        """Takes no more reports; may be repeated."""
        with self._lock:
            self._ended = True

    def chunks(self, limit: int) -> Iterator[tuple[list[bytes], bool]]:
        """All sealed reports in random order, the same at each call, after the end.

        Yields:
            Reports, of at most `limit` bytes in all; or a piece of one that is longer, and whether
            it goes on in the next chunk.

        Raises:
            ShufflerRefused: the batch was destroyed, or the disk fails.
        """
        numbers = np.flatnonzero(self._taken)
        if self.report_bytes > limit:
            for number in map(int, numbers):
                cipher = self._cipher(number)
                for start in range(0, self.report_bytes, limit):
                    length = min(limit, self.report_bytes - start)
                    yield (
                        [self._read(cipher, number, start, length)],
                        start + length < (self.report_bytes),
                    )
            return
        together = limit // self.report_bytes
        for first in range(0, len(numbers), together):
            yield (
                [
                    self._read(self._cipher(number), number, 0, self.report_bytes)
                    for number in numbers[first : first + together].tolist()
                ],
                False,
            )

    def close(self) -> None:
        """Destroys the batch; may be repeated.

        A large file takes a second for each GB: it is closed beside what else the caller does.
        """
        with self._lock:
            descriptor, self._descriptor, self._ended = self._descriptor, -1, True
        if descriptor < 0:
            return
        if self._length < _LARGE_BYTES:
            os.close(descriptor)
            return
        closing = threading.Thread(target=os.close, args=(descriptor,))
        closing.start()
        _CLOSING[:] = [each for each in (*_CLOSING, closing) if each.is_alive()]

    def write(self, content: bytes, place: int) -> None:
        """Writes encrypted bytes at a place of the file.

        Raises:
            OSError: the disk is full or fails; or the batch was destroyed.
        """
        with self._lock:
            self._write(content, place)

    def _take(self, content: bytes | Slot) -> None:
        """Keeps a report that is accepted."""
        number = content.number if isinstance(content, Slot) else self._store(content)
        self._taken[number] = True

    def _judge(self, sender: str, users: range, content: bytes | Slot | None = None) -> Verdict:
        if self._ended:
            return Verdict.ROUND_NOT_OPEN
        if isinstance(content, Slot) and content.verdict is not Verdict.ACCEPTED:
            return content.verdict
        if isinstance(content, bytes) and len(content) != self.report_bytes:
            return Verdict.WRONG_LENGTH
        known = self._reported.get(sender)
        if known is not None and known[_places(users)].any():
            return Verdict.DUPLICATE
        room = self.senders + len(users) <= self._users
        full = not room or not (self._left or isinstance(content, Slot))
        return Verdict.ROUND_FULL if full else Verdict.ACCEPTED

    def _draw(self) -> tuple[int, CipherContext]:
        """A free slot, uniformly drawn, and what encrypts its report."""
        if not self._left:
            raise OSError(errno.ENOSPC, "no slot is free")
        place = secrets.randbelow(self._left)
        number = int(self._free[place])
        self._left -= 1
        self._free[place] = self._free[self._left]
        self._writes[number] += 1
        return number, self._cipher(number)

    def _give_back(self, number: int) -> None:
        self._free[self._left] = number
        self._left += 1

    def _cipher(self, number: int) -> CipherContext:
        """AES in counter mode, which encrypts and decrypts alike; no two reports share a stream."""
        block = number.to_bytes(4, "big") + int(self._writes[number]).to_bytes(4, "big") + bytes(8)
        return Cipher(self._key, modes.CTR(block)).encryptor()

    def _store(self, content: bytes) -> int:
        """Writes a report to a slot that it draws; the slot's number."""
        number, cipher = self._draw()
        try:
            for start in range(0, len(content), _WRITE_BYTES):
                piece = cipher.update(content[start : start + _WRITE_BYTES])
                self._write(piece, number * self.report_bytes + start)
        except OSError:
            self._give_back(number)
            raise
        return number

    def _write(self, content: bytes, place: int) -> None:
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the batch is destroyed")
        done = 0
        while done < len(content):  # a signal, or a full disk: then the next call says so
            done += os.pwrite(self._descriptor, content[done:], place + done)

    def _read(self, cipher: CipherContext, number: int, start: int, length: int) -> bytes:
        with self._lock:
            if self._descriptor < 0:
                raise ShufflerRefused(Refusal.DISCARDED)
            try:
                return self._plain(cipher, number, start, length)
            except OSError as error:
                raise storage_refusal(error) from error

    def _plain(self, cipher: CipherContext, number: int, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, number * self.report_bytes + start)
        return cipher.update(data)


class Slot:
    """A place for one report that is written in pieces, in any thread; one piece at a time.

    Attributes:
        number: the slot's.
        verdict: `ACCEPTED` while the report can be accepted, else why it cannot.
    """

    def __init__(self, batch: Batch, number: int, cipher: CipherContext) -> None:
        self.number = number
        self._batch = batch
        self._cipher = cipher
        self._written = 0
        self._failed: Verdict | None = None

    @property
    def verdict(self) -> Verdict:
        """What can be said of the report by what was written of it."""
        if self._failed is None and self._written < self._batch.report_bytes:
            return Verdict.WRONG_LENGTH
        return self._failed or Verdict.ACCEPTED

    def append(self, pieces: Sequence[bytes]) -> bool:
        """Writes the next pieces; whether the report can still be accepted."""
        content = b"".join(pieces)
        if self._failed is None and self._written + len(content) > self._batch.report_bytes:
            self._failed = Verdict.WRONG_LENGTH
        if self._failed is None:
            place = self.number * self._batch.report_bytes + self._written
            try:
                self._batch.write(self._cipher.update(content), place)
            except OSError as error:
                self._failed = storage_verdict(error)
        self._written += len(content)
        return self._failed is None

    def give_up(self) -> None:
        """Gives the slot back."""
        self._batch.give_up(self)


def storage_verdict(error: OSError) -> Verdict:
    """`STORAGE_FULL` for a full disk, `STORAGE_FAILED` for any other trouble with it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Verdict.STORAGE_FULL if full else Verdict.STORAGE_FAILED


def storage_refusal(error: OSError) -> ShufflerRefused:
    """The same as the refusal of a call."""
    detail = _NO_DESCRIPTORS if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return ShufflerRefused(Refusal[storage_verdict(error).name], detail)


def _places(users: range) -> slice:
    return slice(users.start, users.stop, users.step)


_CLOSING: list[threading.Thread] = []
"""Each closes a large file, whose room the disk has again when it has ended."""


def _has_room(descriptor: int, length: int) -> bool:
    """Whether the disk of this file has room for so many bytes, and for the record."""
    disk = os.fstatvfs(descriptor)
    return disk.f_bavail * disk.f_frsize >= length + _RESERVE_BYTES


def _wait_for_files_that_close() -> None:
    for each in tuple(_CLOSING):
        each.join()


def _unnamed_file(directory: Path) -> int:
    """A descriptor of a new file without a name."""
    with suppress(AttributeError, OSError):  # not every system, or file system, has it
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, name = tempfile.mkstemp(dir=directory)
    Path(name).unlink()
    return descriptor
