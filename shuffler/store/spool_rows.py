"""What a round keeps in SQLite: taken slots, users who have reported, and blankets still to make.

All rows are made when the round is opened and afterwards only replaced in place by rows of the same
length: see `shuffler.store.spool` for why.

A bucket is a page and holds 253 hashes; there are so many that a full batch fills each with 128 on
average at most. The number in one is binomial, so by Chernoff's bound it exceeds 253 with
probability below exp(126 - 254 ln(254/128)) < 2e-21; in any of 2**17 buckets (2**24 users) below
3e-16. The report that would be one too many is answered `ROUND_FULL`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from shuffler.store.storage import DamagedFile, transaction

_T = TypeVar("_T")

USERS_PER_BUCKET = 128
"""How many users a bucket gets on average, at most."""

_BITS = 4096  # slots of one row
_ROW_BYTES = _BITS // 8  # of one row, for one of its two sets
_HASH_BYTES = 16
_BUCKET_HASHES = 253  # of one row: what fits into a page
_BUCKET_BYTES = _BUCKET_HASHES * _HASH_BYTES
_COUNTS = struct.Struct(">QQQQ")


def _tables(slots: int, users: int) -> dict[str, tuple[int, int]]:
    """The tables: how many rows each has, and how many bytes a row."""
    return {
        "slots": (-(-slots // _BITS), 2 * _ROW_BYTES),
        "reported": (_buckets(users), _BUCKET_BYTES),
        "hash_key": (1, _HASH_BYTES),
        "blankets": (1, _COUNTS.size),
    }


def make_rows(
    connection: sqlite3.Connection, slots: int, users: int, blankets: BlanketsLeft
) -> None:
    """Makes all rows of a new batch for so many slots and users, in order."""
    with transaction(connection) as rows:
        for table, (count, length) in _tables(slots, users).items():
            rows.execute(f"CREATE TABLE {table}(number INTEGER PRIMARY KEY, content BLOB NOT NULL)")
            empty = ((number, length) for number in range(count))
            rows.executemany(f"INSERT INTO {table} VALUES (?, zeroblob(?))", empty)
        _replace(rows, "hash_key", {0: secrets.token_bytes(_HASH_BYTES)})
        blankets.write(rows)


def count_rows(connection: sqlite3.Connection, slots: int, users: int) -> int:
    """How many slots are taken.

    Raises:
        DamagedFile: if not all rows are there.
    """
    for table, expected in _tables(slots, users).items():
        found = connection.execute(
            f"SELECT count(*), min(length(content)) FROM {table}"
            " WHERE typeof(content) = 'blob' AND length(content) = ?",
            expected[1:],
        )
        if found.fetchone() != expected:
            raise DamagedFile("rows of the batch's file are missing")
    bits = connection.execute("SELECT content FROM slots")
    return sum(int.from_bytes(b[:_ROW_BYTES], "little").bit_count() for (b,) in bits)


@dataclasses.dataclass(frozen=True)
class BlanketsLeft:
    """How far a round's blankets are: of `work` that are made, the first `drawn` are its blankets.

    `drawn` is the secret number M, drawn once, when the round was opened. The others are made,
    written and marked all the same, so that the time does not tell M: as thrown away, or, with
    cover, as empty reports that are in the batch like those of users who did not check in.

    Attributes:
        work: how many are made in all.
        drawn: how many of them, the first ones, are blankets.
        cover: whether the others are in the batch too.
        made: how many have been made.
    """

    work: int = 0
    drawn: int = 0
    cover: bool = False
    made: int = 0

    @property
    def stored(self) -> int:
        """How many are in the batch by now, empty reports too."""
        return min(self.made, self.work if self.cover else self.drawn)

    def after(self, more: int) -> BlanketsLeft:
        """When so many more have been made."""
        return dataclasses.replace(self, made=self.made + more)

    @staticmethod
    def read(connection: sqlite3.Connection) -> BlanketsLeft:
        """The row of a batch.

        Raises:
            DamagedFile: if it is not what was written.
        """
        work, drawn, cover, made = _COUNTS.unpack(_row(connection, "blankets", 0))
        if not (max(drawn, made) <= work and cover <= 1):
            raise DamagedFile("the blankets' row of the batch's file is damaged")
        return BlanketsLeft(work, drawn, bool(cover), made)

    def write(self, connection: sqlite3.Connection) -> None:
        """Puts this into the batch's row, within the caller's transaction."""
        _replace(connection, "blankets", {0: _COUNTS.pack(*dataclasses.astuple(self))})


class TakenSlots:
    """Which slots are taken, and which were thrown away, as rows of bits.

    A row has a bit for each of some slots that says whether it is taken, and behind these as many
    that say whether a blanket was written there that is not kept. Both kinds change one bit of one
    row, so that they take the same time. Changes are kept here until they are saved.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows = _Rows(lambda part: bytearray(_row(connection, "slots", part)))

    def holds(self, number: int) -> bool:
        """Whether the slot is taken or thrown away."""
        part, bit = divmod(number, _BITS)
        row = self._rows[part]
        return bool((row[bit >> 3] | row[_ROW_BYTES + (bit >> 3)]) & 1 << (bit & 7))

    def put(self, number: int, keep: bool = True) -> None:
        """Takes the slot, or throws it away."""
        part, bit = divmod(number, _BITS)
        self._rows[part][(0 if keep else _ROW_BYTES) + (bit >> 3)] |= 1 << (bit & 7)
        self._rows.changed.add(part)

    def rising(self) -> Iterator[int]:
        """The numbers of the taken slots, as saved."""
        for part, bits in self._connection.execute("SELECT * FROM slots ORDER BY number"):
            for bit in range(_BITS):
                if bits[bit >> 3] & 1 << (bit & 7):
                    yield part * _BITS + bit

    def save(self) -> None:
        """Writes the changes, within the caller's transaction."""
        _replace(self._connection, "slots", self._rows.take_changed(bytes))


class ReportedUsers:
    """The set of users who have reported; changes are kept here until they are saved."""

    def __init__(self, connection: sqlite3.Connection, users: int) -> None:
        self._connection = connection
        self._key = _row(connection, "hash_key", 0)
        self._buckets = _buckets(users)
        self._rows = _Rows(lambda bucket: _split(_row(connection, "reported", bucket)))

    def holds(self, sender: str, user: int) -> bool:
        """Whether the user has reported."""
        bucket, name = self._place(sender, user)
        return name in self._rows[bucket]

    def has_room(self, sender: str, user: int) -> bool:
        """Whether the user's bucket has room for one more."""
        bucket, _ = self._place(sender, user)
        return len(self._rows[bucket]) < _BUCKET_HASHES

    def put(self, sender: str, user: int) -> None:
        """Notes that the user has reported."""
        bucket, name = self._place(sender, user)
        self._rows[bucket].add(name)
        self._rows.changed.add(bucket)

    def save(self) -> None:
        """Writes the changes, within the caller's transaction."""
        _replace(self._connection, "reported", self._rows.take_changed(_join))

    def _place(self, sender: str, user: int) -> tuple[int, bytes]:
        # The user's bytes are of one length, so no two pairs give the same bytes.
        pair = sender.encode() + user.to_bytes(8, "big")
        name = hashlib.blake2b(pair, digest_size=_HASH_BYTES, key=self._key).digest()
        return int.from_bytes(name[:8], "big") * self._buckets >> 64, name


class _Rows(dict[int, _T]):
    """Rows, each read when it is first asked for; `changed`: those to be written."""

    def __init__(self, read: Callable[[int], _T]) -> None:
        self.changed: set[int] = set()
        self._read = read

    def __missing__(self, number: int) -> _T:
        self[number] = self._read(number)
        return self[number]

    def take_changed(self, content: Callable[[_T], bytes]) -> dict[int, bytes]:
        changed, self.changed = self.changed, set()
        return {number: content(self[number]) for number in changed}


def _split(hashes: bytes) -> set[bytes]:
    names = {hashes[i : i + _HASH_BYTES] for i in range(0, len(hashes), _HASH_BYTES)}
    return names - {bytes(_HASH_BYTES)}


def _join(names: set[bytes]) -> bytes:
    return b"".join(sorted(names)).ljust(_BUCKET_BYTES, b"\0")


def _row(connection: sqlite3.Connection, table: str, number: int) -> bytes:
    query = f"SELECT content FROM {table} WHERE number = ?"
    found = connection.execute(query, (number,)).fetchone()
    if found is None:
        raise sqlite3.DatabaseError("a row of the batch's file is missing")
    return bytes(found[0])


def _replace(connection: sqlite3.Connection, table: str, rows: Mapping[int, bytes]) -> None:
    """Puts other contents of the same length into rows; SQLite writes them where they were."""
    connection.executemany(
        f"UPDATE {table} SET content = ? WHERE number = ?",
        [(rows[number], number) for number in sorted(rows)],
    )


def _buckets(users: int) -> int:
    return -(-users // USERS_PER_BUCKET)
