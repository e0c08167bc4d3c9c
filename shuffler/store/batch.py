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

import dataclasses
import errno
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes

from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict, malformed

_WRITE_BYTES = 2**20  # encrypted at once
_IDLE_SECONDS = 10.0  # after which a long report may be given up for another
RESERVE_BYTES = 128 * 2**10  # of the disk, for the record
_NO_DESCRIPTORS = (
    "the shuffler has too many files open: its operator raises the limit (ulimit -n, LimitNOFILE)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Which piece of a report that is longer than `PIECE_BYTES`.

    Attributes:
        upload: a number that the pieces of a report share, and no other report of its sender.
        start: where in the report the piece begins, a multiple of `PIECE_BYTES`.
        length: of the whole report.
    """

    upload: int
    start: int
    length: int


@dataclasses.dataclass(slots=True)
class _Upload:
    """A long report that is on its way.

    Attributes:
        slot: the number of the slot to which its pieces are written, in any order.
        missing: where the pieces begin that have not come yet.
        since: when a piece came last, by `time.monotonic`.
    """

    slot: int
    missing: set[int]
    since: float


class Batch:
    """The batch of one round. Any thread may use it.

    Attributes:
        report_bytes: length of each sealed report.
        senders: how many users' reports are in it. The server is told only under a plan with cover.
        count: how many reports there are in all, with the shuffler's own. Not for the server before
            a release.
    """

    def __init__(
        self,
        directory: Path,
        report_bytes: int,
        users: int,
        slots: int,
        uploads: int,
        *,
        allocate: bool,
    ) -> None:
        """Makes an empty batch.

        Args:
            directory: on whose file system the file is.
            users: how many users' reports it may hold.
            slots: how many reports in all, and on their way.
            uploads: how many long reports may be on their way at once.
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
        self._starts = range(0, report_bytes, PIECE_BYTES)  # of a long report's pieces
        self._most_uploads = uploads
        self._uploads: dict[tuple[str, int], _Upload] = {}  # by sender and `Piece.upload`
        self._lock = threading.Lock()
        self._ended = False
        self._descriptor = -1
        length = report_bytes * slots
        try:
            with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
                self._descriptor = os.dup(file.fileno())
            os.ftruncate(self._descriptor, length)
            if allocate:
                disk = os.fstatvfs(self._descriptor)
                if disk.f_bavail * disk.f_frsize < length + RESERVE_BYTES:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.posix_fallocate(self._descriptor, 0, length)
        except OSError as error:
            self.close()
            if error.errno in (errno.EFBIG, errno.EINVAL):
                why = f"a round's file would have {length} bytes, more than the file system allows"
                raise malformed(why) from None
            raise storage_refusal(error) from error
        # Behind that: memory for slots that the disk has no room for would be taken for nothing.
        self._free = np.arange(slots, dtype=np.uint32)
        self._left = slots  # so many at the front of `_free`
        self._writes = np.zeros(slots, dtype=np.uint32)  # how often each slot was written to
        self._taken = np.zeros(slots, dtype=bool)

    def add(
        self, sender: str, users: range, most: int, content: bytes, piece: Piece | None = None
    ) -> Verdict | None:
        """Takes a report, if it is the first of each of these users and there is room.

        Args:
            users, most: numbers of the sender's users, from 0, and how many it has.
            content: the sealed report, or one piece of it.
            piece: which piece of a long report the content is; None: it is a whole report.

        Returns:
            The verdict on the report; None while pieces of it are missing.

        Raises:
            ShufflerRefused: `BUSY`: too many long reports are on their way.
        """
        with self._lock:
            verdict = self._judge(sender, users, content, piece)
            try:
                if verdict is Verdict.ACCEPTED and piece is None:
                    self._take(content)
                elif verdict is Verdict.ACCEPTED and piece is not None:
                    upload = self._write_piece(sender, content, piece)
                    if upload.missing:
                        return None
                    del self._uploads[sender, piece.upload]
                    self._take_slot(upload.slot)
            except OSError as error:
                verdict = storage_verdict(error)
            if verdict is not Verdict.ACCEPTED:
                if piece is not None:
                    self._give_up((sender, piece.upload))
                return verdict
            known = self._reported.get(sender, np.zeros(0, dtype=bool))
            if users[-1] >= known.size:  # its first, or its credential was renewed for more users
                known = self._reported[sender] = np.pad(known, (0, most - known.size))
            known[_places(users)] = True
            self.senders += len(users)
            self.count += 1
            return verdict

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
        """Destroys the batch; may be repeated."""
        with self._lock:
            descriptor, self._descriptor, self._ended = self._descriptor, -1, True
        if descriptor >= 0:
            os.close(descriptor)

    def _take(self, content: bytes) -> None:
        """Keeps a report that is accepted."""
        self._take_slot(self._store(content))

    def _take_slot(self, slot: int) -> None:
        """Keeps the report in a slot."""
        self._taken[slot] = True

    def _judge(self, sender: str, users: range, content: bytes, piece: Piece | None) -> Verdict:
        """Whether a report, or a piece of one, can be accepted."""
        if self._ended:
            return Verdict.ROUND_NOT_OPEN
        start, length, whole = 0, len(content), self.report_bytes
        if piece is not None:
            start, length = piece.start, piece.length
            whole = min(PIECE_BYTES, length - start)
        if length != self.report_bytes or len(content) != whole or start not in self._starts:
            return Verdict.WRONG_LENGTH
        known = self._reported.get(sender)
        if known is not None and known[_places(users)].any():
            return Verdict.DUPLICATE
        room = self.senders + len(users) <= self._users
        return Verdict.ACCEPTED if room else Verdict.ROUND_FULL

    def _write_piece(self, sender: str, content: bytes, piece: Piece) -> _Upload:
        """Writes a piece to its report's slot, once however often it comes."""
        key = sender, piece.upload
        if key not in self._uploads:
            self._make_room(sender)
            self._uploads[key] = _Upload(self._draw(), set(self._starts), time.monotonic())
        upload = self._uploads[key]
        if piece.start in upload.missing:
            self._write(self._cipher(upload.slot, piece.start), content, upload.slot, piece.start)
            upload.missing.remove(piece.start)
            upload.since = time.monotonic()
        return upload

    def _make_room(self, sender: str) -> None:
        """Makes sure that one more long report may be on its way.

        Where there are too many, one is given up that has been idle, or whose sender would still
        have as many as this one; of several the one that has been idle for longest.
        """
        if len(self._uploads) < self._most_uploads:
            return
        idle, own = time.monotonic() - _IDLE_SECONDS, Counter(name for name, _ in self._uploads)
        may_go = [
            key
            for key, upload in self._uploads.items()
            if upload.since < idle or own[key[0]] > own[sender] + 1
        ]
        if not may_go:
            raise ShufflerRefused(Refusal.BUSY, "too many long reports at once")
        self._give_up(min(may_go, key=lambda key: self._uploads[key].since))

    def _give_up(self, key: tuple[str, int]) -> None:
        """Forgets what has come of a long report."""
        upload = self._uploads.pop(key, None)
        if upload is not None:
            self._give_back(upload.slot)

    def _draw(self) -> int:
        """The number of a free slot, uniformly drawn."""
        if not self._left:
            raise OSError(errno.ENOSPC, "no slot is free")
        place = secrets.randbelow(self._left)
        number = int(self._free[place])
        self._left -= 1
        self._free[place] = self._free[self._left]
        self._writes[number] += 1
        return number

    def _give_back(self, number: int) -> None:
        self._free[self._left] = number
        self._left += 1

    def _cipher(self, number: int, start: int = 0) -> CipherContext:
        """AES in counter mode, which encrypts and decrypts alike; no two reports share a stream.

        `start` is a place in the report, a multiple of 16.
        """
        block = number.to_bytes(4, "big") + int(self._writes[number]).to_bytes(4, "big")
        return Cipher(self._key, modes.CTR(block + (start // 16).to_bytes(8, "big"))).encryptor()

    def _store(self, content: bytes) -> int:
        """Writes a report to a slot that it draws; the slot's number."""
        number = self._draw()
        cipher = self._cipher(number)
        try:
            for start in range(0, len(content), _WRITE_BYTES):
                self._write(cipher, content[start : start + _WRITE_BYTES], number, start)
        except OSError:
            self._give_back(number)
            raise
        return number

    def _write(self, cipher: CipherContext, content: bytes, number: int, start: int) -> None:
        """Encrypts a part of a report, and writes it to the report's slot."""
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the batch is destroyed")
        encrypted, place = cipher.update(content), number * self.report_bytes + start
        done = 0
        while done < len(encrypted):  # a signal, or a full disk: then the next call says so
            done += os.pwrite(self._descriptor, encrypted[done:], place + done)

    def _read(self, cipher: CipherContext, number: int, start: int, length: int) -> bytes:
        with self._lock:
            self._check_there()
            try:
                return self._plain(cipher, number, start, length)
            except OSError as error:
                raise storage_refusal(error) from error

    def _check_there(self) -> None:
        if self._descriptor < 0:
            raise ShufflerRefused(Refusal.DISCARDED)

    def _plain(self, cipher: CipherContext, number: int, start: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, number * self.report_bytes + start)
        return cipher.update(data)


def storage_verdict(error: OSError) -> Verdict:
    """The verdict on a report that could not be stored: whether the disk is full, or fails."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Verdict.STORAGE_FULL if full else Verdict.STORAGE_FAILED


def storage_refusal(error: OSError) -> ShufflerRefused:
    """The refusal of a call for the same reason."""
    detail = _NO_DESCRIPTORS if error.errno in (errno.EMFILE, errno.ENFILE) else ""
    return ShufflerRefused(Refusal[storage_verdict(error).name], detail)


def _places(users: range) -> slice:
    return slice(users.start, users.stop, users.step)
