"""SQLite files in a private directory, and what a full disk is called."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shuffler.wire.errors import Refusal, ShufflerRefused

__all__ = [
    "PAGE_BYTES",
    "DamagedFile",
    "claim_directory",
    "connect",
    "damage",
    "delete_database",
    "exists",
    "storage_errors",
    "storage_refusal",
    "sync_directory",
    "transaction",
]

PAGE_BYTES = 4096
"""Length in bytes of a database page."""

_DAMAGE = {  # `ERROR`: a table or a column is not there
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
}


class DamagedFile(OSError):
    """A file is missing or is not what was written: unlike other errors, this one will not pass."""


@contextmanager
def damage() -> Iterator[None]:
    """Turns the errors in the block that show a damaged SQLite file into `DamagedFile`."""
    try:
        yield
    except UnicodeDecodeError:  # in what SQLite says of the file
        raise DamagedFile("it holds a text that is no UTF-8") from None
    except sqlite3.Error as error:
        # Without a code it is about a text that is no UTF-8. Extended codes differ above a byte.
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF in _DAMAGE:
            raise DamagedFile(str(error)) from error
        raise


def exists(path: Path) -> bool:
    """Whether there is such a file; an error that leaves it open is raised.

    Raises:
        OSError: if it can not be found out.
    """
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def claim_directory(directory: Path) -> int:
    """Makes a directory private (mode 0700) and locks it for this process.

    Returns:
        The lock's file descriptor; closing it gives the directory back.

    Raises:
        ValueError: if others may enter the directory, or another process holds it.
        OSError: if the directory can not be made or used.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.geteuid():
        raise ValueError(f"spool directory {directory} belongs to another user")
    if status.st_mode & 0o077:
        if any(directory.iterdir()):
            raise ValueError(
                f"spool directory {directory} must have mode 0700,"
                f" has {status.st_mode & 0o7777:04o}"
            )
        directory.chmod(0o700)
    lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"spool directory {directory} is in use by another shuffler") from None
    return lock


def connect(path: Path) -> sqlite3.Connection:
    """Opens (or creates, mode 0600) a SQLite file whose commits survive a power cut.

    A rollback journal, emptied by every commit, and not a write-ahead log: a log keeps what was
    written in which order until it is folded into the file.

    Raises:
        sqlite3.Error: if the file can not be opened or written.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass
    else:
        sync_directory(path.parent)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        connection.execute("PRAGMA journal_mode=TRUNCATE")
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA secure_delete=ON")
        connection.execute("PRAGMA temp_store=MEMORY")
    except BaseException:
        connection.close()
        raise
    return connection


def delete_database(path: Path) -> None:
    """Deletes a SQLite file with its journal; missing ones are fine."""
    for suffix in ("", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of the block's statements or none of them; on disk when the block has ended."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def storage_refusal(error: sqlite3.Error | OSError) -> Refusal:
    """`STORAGE_FULL` for a full disk, `STORAGE_FAILED` for any other trouble with it."""
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    no_space = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Refusal.STORAGE_FULL if full or no_space else Refusal.STORAGE_FAILED


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns a full or failing disk in the block into `ShufflerRefused`."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = storage_refusal(error)
        raise ShufflerRefused(reason, "the shuffler's disk is full or fails") from error


def sync_directory(directory: Path) -> None:
    """Makes names that were added to or removed from the directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
