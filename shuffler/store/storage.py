"""A private directory, the SQLite files in it, and how much room there is for more."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

PAGE_BYTES = 4096
"""Length in bytes of a database page."""

_SETTINGS = (
    *(f"page_size={PAGE_BYTES}", "locking_mode=EXCLUSIVE", "journal_mode=TRUNCATE"),
    *("secure_delete=ON", "temp_store=MEMORY"),
)
_syncs = True  # whether what is written must survive a power cut
_VERSIONS_START, _VERSIONS_END, _VERSIONS = 18, 20, b"\1\1"  # of writing and reading, in a header
_DAMAGE = {  # `ERROR`: a table or a column is not there
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_FORMAT,
}


_NO_DESCRIPTORS = (
    "the shuffler has too many files open: its operator raises the limit (ulimit -n, LimitNOFILE)"
)


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


@contextmanager
def without_syncs() -> Iterator[None]:
    """Has nothing that this process stores wait for the disk, for a directory that goes with it."""
    global _syncs
    _syncs = False
    try:
        yield
    finally:
        _syncs = True


def syncs() -> bool:
    """Whether what is written is to be brought to the disk before it is acknowledged."""
    return _syncs


def exists(path: Path) -> bool:
    """Whether there is such a file; unlike `Path.exists` it raises what leaves that open."""
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
    return lock_file(directory / "lock", f"spool directory {directory}")


def lock_file(path: Path, what: str) -> int:
    """Locks a file, made if it is missing, for this process; closing what it returns ends that.

    Raises:
        ValueError: if another process holds it; `what` says what is then in use.
    """
    lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(f"{what} is in use by another shuffler") from None
    return lock


def connect(path: Path) -> sqlite3.Connection:
    """Opens (or creates, mode 0600) a SQLite file whose commits survive a power cut.

    A rollback journal, emptied by every commit, and not a write-ahead log: a log keeps what was
    written in which order until it is folded into the file.

    Raises:
        DamagedFile: the header asks for another way of writing. SQLite would open such a file, and
            then refuse every change.
    """
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        pass
    else:
        sync_directory(path.parent)
    with path.open("rb") as file:
        if file.read(_VERSIONS_END)[_VERSIONS_START:] not in (b"", _VERSIONS):
            raise DamagedFile("its header is not what was written")
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        for setting in (*_SETTINGS, "synchronous=FULL" if _syncs else "synchronous=OFF"):
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()
        raise
    return connection


def check_schema(connection: sqlite3.Connection, *statements: str) -> None:
    """Finds out whether a file has the tables that these statements make, to the letter.

    Raises:
        DamagedFile: if it has others.
    """
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    if {sql for (sql,) in found} != {each.strip() for each in statements}:
        raise DamagedFile("its tables are not those that were made")


def delete_database(path: Path) -> None:
    """Deletes a SQLite file with its journal; missing ones are fine."""
    for suffix in ("", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    sync_directory(path.parent)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All of the block's statements or none of them; on disk when the block has ended."""
    connection.execute("BEGIN IMMEDIATE")
    with connection:
        yield connection


def storage_verdict(error: sqlite3.Error | OSError) -> Verdict:
    """`STORAGE_FULL` for a full disk, `STORAGE_FAILED` for any other trouble with it."""
    full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    no_space = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Verdict.STORAGE_FULL if full or no_space else Verdict.STORAGE_FAILED


@contextmanager
def storage_errors() -> Iterator[None]:
    """Turns a full or failing disk, or a damaged file, in the block into `ShufflerRefused`."""
    try:
        yield
    except DamagedFile as error:
        raise ShufflerRefused(Refusal.BATCH_LOST) from error
    except (sqlite3.Error, OSError) as error:
        detail = _NO_DESCRIPTORS if _lacks_descriptors(error) else ""
        raise ShufflerRefused(Refusal[storage_verdict(error).name], detail) from error


def _lacks_descriptors(error: sqlite3.Error | OSError) -> bool:
    """Whether no more files can be opened; SQLite only says that it could not."""
    if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CANTOPEN:
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as reason:
            error = reason
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class Disk:
    """The room that the file system of a directory has for reports."""

    def __init__(self, directory: Path, reserve_bytes: int) -> None:
        self._directory = directory
        self._reserve = reserve_bytes

    def room(self) -> int:
        """How many bytes reports may still take: all that are free but the reserve."""
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize - self._reserve

    def require(self, length: int) -> None:
        """Raises the `OSError` of a full disk where there is less room."""
        if self.room() < length:
            raise OSError(errno.ENOSPC, "no room for reports")

    def check_length(self, length: int) -> None:
        """Finds out whether the file system allows a file of this length, nearly all of it holes.

        Raises:
            ShufflerRefused: `MALFORMED`, or storage.
        """
        probe = self._directory / "batch-probe"  # left by a crash, it goes with the next start
        with storage_errors(), probe.open("wb") as file:
            try:
                file.truncate(length)
            except OSError as error:
                if error.errno not in (errno.EFBIG, errno.EINVAL):
                    raise
                raise ShufflerRefused(
                    Refusal.MALFORMED,
                    f"a round's file would have {length} bytes (2 x users x report), more than the"
                    " spool's file system allows",
                ) from None
            finally:
                probe.unlink()


def sync_directory(directory: Path) -> None:
    """Makes names that were added to or removed from the directory durable."""
    if not _syncs:
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
