"""What a round keeps in SQLite: taken slots, users who have reported, and blankets still to make.

All rows are made when the round is opened and afterwards only replaced in place by rows of the same
length: see `shuffler.store.spool` for why.

Every row ends with a keyed checksum of what is in it and where it belongs.

A bucket is a page and holds 252 hashes; there are so many that a full batch fills each with 128 on
average at most. The number in one is binomial, so by Chernoff's bound it exceeds 252 with
probability below exp(125 - 253 ln(253/128)) < 3e-21; in any of 2**17 buckets (2**24 users) below
4e-16. The report that would be one too many is answered `ROUND_FULL`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import sqlite3
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from shufl.shuffler.store.checks import CHECK_BYTES, Checks
from shufl.shuffler.store.storage import DamagedFile, check_schema, transaction

_T = TypeVar("_T")

USERS_PER_BUCKET = 128
"""How many users a bucket gets on average, at most."""

_BITS = 4096  # slots of one row
_ROW_BYTES = _BITS // 8  # of one row, for one of its two sets
_HASH_BYTES = 16
_BUCKET_HASHES = 252  # of one row: what fits into a page
_BUCKET_BYTES = _BUCKET_HASHES * _HASH_BYTES
_TABLE = "CREATE TABLE {}(number INTEGER PRIMARY KEY, content BLOB NOT NULL)"
_COUNTS = struct.Struct(">QQQQ")


def _tables(slots: int, users: int) -> dict[str, tuple[int, int]]:
    """The tables: how many rows each has, and how many bytes a row."""
    return {
        "slots": (-(-slots // _BITS), 2 * _ROW_BYTES),
        "reported": (_buckets(users), _BUCKET_BYTES),
        "hash_key": (1, _HASH_BYTES),
        "blankets": (1, _COUNTS.size),
    }


class BatchRows:
    """The rows of one batch's SQLite file, each with its checksum."""

    def __init__(self, connection: sqlite3.Connection, checks: Checks) -> None:
        self.connection = connection
        self._checks = checks

    def make(self, slots: int, users: int, blankets: BlanketsLeft) -> None:
        """Makes all rows of a new batch for so many slots and users, in order."""
        with transaction(self.connection) as rows:
            for table, (count, length) in _tables(slots, users).items():
                rows.execute(_TABLE.format(table))
                empty = bytes(length)
                rows.executemany(
                    f"INSERT INTO {table} VALUES (?, ?)",
                    ((number, self._checked(table, number, empty)) for number in range(count)),
                )
            self.replace("hash_key", {0: secrets.token_bytes(_HASH_BYTES)})
            blankets.write(self)

    def count(self, slots: int, users: int) -> tuple[int, int, int]:
        """How many slots are taken, how many thrown away, and how many users have reported.

        Raises:
            DamagedFile: if a row is missing, or is not what was written.
        """
        tables = _tables(slots, users)
        taken = thrown_away = reported = 0
        check_schema(self.connection, *map(_TABLE.format, tables))
        for table, (count, length) in tables.items():
            found = self.connection.execute(f"SELECT number, content FROM {table} ORDER BY number")
            expected = 0
            for number, content in found:
                if number != expected or len(self._content(table, number, content)) != length:
                    raise DamagedFile("a row of the batch's file is another one")
                expected += 1
                if table == "slots":
                    taken += int.from_bytes(content[:_ROW_BYTES]).bit_count()
                    thrown_away += int.from_bytes(content[_ROW_BYTES:-CHECK_BYTES]).bit_count()
                elif table == "reported":
                    hashes = content[:-CHECK_BYTES].rstrip(b"\0")
                    reported += -(-len(hashes) // _HASH_BYTES)  # one may end in zeros
            if expected != count:
                raise DamagedFile("rows of the batch's file are missing")
        return taken, thrown_away, reported

    def read(self, table: str, number: int) -> bytes:
        """A row's content.

        Raises:
            DamagedFile: if it is missing, or is not what was written.
        """
        query = f"SELECT content FROM {table} WHERE number = ?"
        found = self.connection.execute(query, (number,)).fetchone()
        if found is None:
            raise DamagedFile("a row of the batch's file is missing")
        return self._content(table, number, found[0])

    def replace(self, table: str, rows: Mapping[int, bytes]) -> None:
        """Puts other contents of the same length into rows; SQLite writes them where they were."""
        self.connection.executemany(
            f"UPDATE {table} SET content = ? WHERE number = ?",
            [(self._checked(table, number, rows[number]), number) for number in sorted(rows)],
        )

    def _checked(self, table: str, number: int, content: bytes) -> bytes:
        return content + self._checks.make(table, number, content=content)

    def _content(self, table: str, number: int, row: Any) -> bytes:
        if not isinstance(row, bytes):
            raise DamagedFile("a row of the batch's file is damaged")
        content, check = row[:-CHECK_BYTES], row[-CHECK_BYTES:]
        if not self._checks.verify(check, table, number, content=content):
            raise DamagedFile("a row of the batch's file is damaged")
        return content


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
    def read(rows: BatchRows) -> BlanketsLeft:
        """The row of a batch.

        Raises:
            DamagedFile: if it is not what was written.
        """
        work, drawn, cover, made = _COUNTS.unpack(rows.read("blankets", 0))
        if not (max(drawn, made) <= work and cover <= 1):
            raise DamagedFile("the blankets' row of the batch's file is damaged")
        return BlanketsLeft(work, drawn, bool(cover), made)

    def write(self, rows: BatchRows) -> None:
        """Puts this into the batch's row, within the caller's transaction."""
        rows.replace("blankets", {0: _COUNTS.pack(*dataclasses.astuple(self))})


class TakenSlots:
    """Which slots are taken, and which were thrown away, as rows of bits.

    A row has a bit for each of some slots that says whether it is taken, and behind these as many
    that say whether a blanket was written there that is not kept. Both kinds change one bit of one
    row, so that they take the same time. Changes are kept here until they are saved.
    """

    def __init__(self, rows: BatchRows) -> None:
        self._batch = rows
        self._rows = _Rows(lambda part: bytearray(rows.read("slots", part)))

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
        (parts,) = self._batch.connection.execute("SELECT count(*) FROM slots").fetchone()
        for part in range(parts):
            bits = self._batch.read("slots", part)
            for bit in range(_BITS):
                if bits[bit >> 3] & 1 << (bit & 7):
                    yield part * _BITS + bit

    def save(self) -> None:
        """Writes the changes, within the caller's transaction."""
        self._batch.replace("slots", self._rows.take_changed(bytes))


class ReportedUsers:
    """The set of users who have reported; changes are kept here until they are saved."""

    def __init__(self, rows: BatchRows, users: int) -> None:
        self._batch = rows
        self._key = rows.read("hash_key", 0)
        self._buckets = _buckets(users)
        self._rows = _Rows(lambda bucket: _split(rows.read("reported", bucket)))

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
        self._batch.replace("reported", self._rows.take_changed(_join))

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
    used = len(hashes.rstrip(b"\0"))  # one may end in zeros
    return {hashes[i : i + _HASH_BYTES] for i in range(0, used, _HASH_BYTES)}


def _join(names: set[bytes]) -> bytes:
    return b"".join(sorted(names)).ljust(_BUCKET_BYTES, b"\0")


def _buckets(users: int) -> int:
    return -(-users // USERS_PER_BUCKET)
