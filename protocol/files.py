"""Writing a file whole: it has all of its new content, or nothing of it was written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def unfinished(path: Path) -> Path:
    """The file beside `path` that holds the new content until it is whole."""
    return path.with_name(f".{path.name}.new")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Has an OSError of the block name this file, as those of a full disk name none."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def whole_file(
    path: Path, mode: int = 0o644, *, must_be_new: bool = False, shared: bool = False
) -> Iterator[BinaryIO]:
    """Opens a file to be written, which gets its name when the block ends and all is on disk.

    If the block fails, the file that was there before is still there.

    Args:
        path: of the file.
        mode: of the new file; the umask is taken off.
        must_be_new: whether to refuse if there is such a file.
        shared: whether other processes may write the same file meanwhile.

    Raises:
        FileExistsError: there is such a file, which `must_be_new` refuses.
        OSError: the file cannot be written, for example because the disk is full.
    """
    if must_be_new and os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    own = shared or must_be_new  # then no other process touches the unfinished file
    new = unfinished(path.with_name(f"{path.name}.{os.getpid()}") if own else path)
    try:
        new.unlink(missing_ok=True)  # what a killed process has left; the mode is set anew
        descriptor = os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
        (give_new_name if must_be_new else os.replace)(new, path)
    except OSError as error:
        if error.filename not in (None, new, str(new)):  # of another file
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            new.unlink()


def give_new_name(file: Path, path: Path) -> None:
    """Gives a file another name, which no file may have: not even one that has got it just now.

    Raises:
        FileExistsError: there is a file of this name.
    """
    try:
        path.hardlink_to(file)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):  # as on FAT, which has no links
            raise
        file.replace(path)
    else:
        file.unlink()


def write_whole(
    path: Path, *parts: bytes | memoryview, mode: int = 0o644, must_be_new: bool = False
) -> None:
    """Writes the parts, one after the other, as a file; see `whole_file`."""
    with whole_file(path, mode, must_be_new=must_be_new) as file:
        file.writelines(parts)
