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
from collections.abc import Iterator

from shuffler.store.storage import DamagedFile, transaction

__all__ = ["BlanketsLeft", "ReportedUsers", "TakenSlots", "count_rows", "make_rows"]

_BITS = 4096  # slots of one row
_ROW_BYTES = _BITS // 8  # of one row, for one of its two sets
_HASH_BYTES = 16
_BUCKET_HASHES = 253  # of one row: what fits into a page
_BUCKET_BYTES = _BUCKET_HASHES * _HASH_BYTES
_BUCKET_MEAN = 128  # of a full batch, at most
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
CREATE TABLE blankets(
    counts BLOB NOT NULL
);
"""
_KEY_ROW = "SELECT key FROM hash_key WHERE rowid = ?"
_BLANKETS_ROW = "SELECT counts FROM blankets WHERE rowid = ?"
_COUNTS = struct.Struct(">QQQ")
_SLOTS_ROW = "SELECT bits FROM slots WHERE part = ?"
_REPORTED_ROW = "SELECT hashes FROM reported WHERE bucket = ?"


@dataclasses.dataclass(frozen=True)
class BlanketsLeft:
    """How far a round's blankets are: of `work` that are made, `kept` of them are in the batch.

    `kept` is the secret number M, drawn once, when the round was opened; the others are made,
    written and marked all the same, as thrown away, so that the time does not tell M.

    Attributes:
        work: how many are made in all.
        kept: how many of them, the first ones, are in the batch in the end.
        made: how many have been made.
    """

    work: int = 0
    kept: int = 0
    made: int = 0

    @property
    def stored(self) -> int:
        """How many are in the batch by now."""
        return min(self.made, self.kept)

    def after(self, more: int) -> BlanketsLeft:
        """When so many more have been made."""
        return dataclasses.replace(self, made=self.made + more)

    @staticmethod
    def read(connection: sqlite3.Connection) -> BlanketsLeft:
        """The row of a batch.

        Raises:
            DamagedFile: if it is not what was written.
        """
        counts = _blob(connection, _BLANKETS_ROW, 1)
        if len(counts) != _COUNTS.size:
            raise DamagedFile("the blankets' row of the batch's file is damaged")
        left = BlanketsLeft(*_COUNTS.unpack(counts))
        if not max(left.kept, left.made) <= left.work:
            raise DamagedFile("the blankets' row of the batch's file is damaged")
        return left

    def write(self, connection: sqlite3.Connection) -> None:
        """Puts this into the batch's row, within the caller's transaction."""
        counts = _COUNTS.pack(self.work, self.kept, self.made)
        connection.execute("UPDATE blankets SET counts = ?", (counts,))


def make_rows(
    connection: sqlite3.Connection, slots: int, users: int, blankets: BlanketsLeft
) -> None:
    """Makes all rows of a new batch for so many slots and users, in order.

    Raises:
        sqlite3.Error: if the file can not be written.
    """
    with transaction(connection) as rows:
        for statement in _SCHEMA.split(";"):
            rows.execute(statement)
        rows.execute("INSERT INTO hash_key VALUES (?)", (secrets.token_bytes(_HASH_BYTES),))
        rows.execute("INSERT INTO blankets VALUES (zeroblob(?))", (_COUNTS.size,))
        blankets.write(rows)
        rows.executemany(
            "INSERT INTO slots VALUES (?, zeroblob(?))",
            ((part, 2 * _ROW_BYTES) for part in range(_parts(slots))),
        )
        rows.executemany(
            "INSERT INTO reported VALUES (?, zeroblob(?))",
            ((bucket, _BUCKET_BYTES) for bucket in range(_buckets(users))),
        )


def count_rows(connection: sqlite3.Connection, slots: int, users: int) -> int:
    """How many slots are taken.

    Raises:
        DamagedFile: if not all rows are there.
        sqlite3.Error: if the file can not be read.
    """
    keys = connection.execute("SELECT key FROM hash_key").fetchall()
    parts = connection.execute(
        "SELECT count(*) FROM slots WHERE typeof(bits) = 'blob' AND length(bits) = ?",
        (2 * _ROW_BYTES,),
    )
    buckets = connection.execute(
        "SELECT count(*) FROM reported WHERE typeof(hashes) = 'blob' AND length(hashes) = ?",
        (_BUCKET_BYTES,),
    )
    found = [type(key) for (key,) in keys], *parts.fetchone(), *buckets.fetchone()
    if found != ([bytes], _parts(slots), _buckets(users)):
        raise DamagedFile("rows of the batch's file are missing")
    bits = connection.execute("SELECT bits FROM slots")
    return sum(int.from_bytes(b[:_ROW_BYTES], "little").bit_count() for (b,) in bits)


class TakenSlots:
    """Which slots are taken, and which were thrown away, as rows of bits.

    A row has a bit for each of some slots that says whether it is taken, and behind these as many
    that say whether a blanket was written there that is not kept. Both kinds change one bit of one
    row, so that they take the same time. Changes are kept here until they are saved.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._rows: dict[int, bytearray] = {}
        self._changed: set[int] = set()

    def holds(self, number: int) -> bool:
        """Whether the slot is taken or thrown away."""
        part, bit = divmod(number, _BITS)
        row = self._row(part)
        return bool((row[bit >> 3] | row[_ROW_BYTES + (bit >> 3)]) & 1 << (bit & 7))

    def put(self, number: int, keep: bool = True) -> None:
        """Takes the slot, or throws it away."""
        part, bit = divmod(number, _BITS)
        self._row(part)[(0 if keep else _ROW_BYTES) + (bit >> 3)] |= 1 << (bit & 7)
        self._changed.add(part)

    def rising(self) -> Iterator[int]:
        """The numbers of the taken slots, as saved."""
        for part, bits in self._connection.execute("SELECT part, bits FROM slots ORDER BY part"):
            for index, byte in enumerate(bits[:_ROW_BYTES]):
                for bit in range(8):
                    if byte >> bit & 1:
                        yield part * _BITS + index * 8 + bit

    def save(self) -> None:
        """Writes the changes, within the caller's transaction."""
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


class ReportedUsers:
    """The set of users who have reported; changes are kept here until they are saved."""

    def __init__(self, connection: sqlite3.Connection, users: int) -> None:
        self._connection = connection
        self._key = _blob(connection, _KEY_ROW, 1)
        self._buckets = _buckets(users)
        self._rows: dict[int, set[bytes]] = {}
        self._changed: set[int] = set()

    def holds(self, sender: str, user: int) -> bool:
        """Whether the user has reported."""
        bucket, name = self._place(sender, user)
        return name in self._row(bucket)

    def has_room(self, sender: str, user: int) -> bool:
        """Whether the user's bucket has room for one more."""
        bucket, _ = self._place(sender, user)
        return len(self._row(bucket)) < _BUCKET_HASHES

    def put(self, sender: str, user: int) -> None:
        """Notes that the user has reported."""
        bucket, name = self._place(sender, user)
        self._row(bucket).add(name)
        self._changed.add(bucket)

    def save(self) -> None:
        """Writes the changes, within the caller's transaction."""
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


def _parts(slots: int) -> int:
    """How many rows of bits."""
    return -(-slots // _BITS)


def _buckets(users: int) -> int:
    """How many rows of hashes."""
    return -(-users // _BUCKET_MEAN)
