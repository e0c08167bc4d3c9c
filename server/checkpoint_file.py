"""A checkpoint's file: a line with its round and digest, then the content; needs no torch."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from shufl.protocol.files import write_whole

_HEADER = re.compile(rb"shufl checkpoint of round (\d{1,18}), SHA-256 [0-9a-f]{64}\n")


class CheckpointError(RuntimeError):
    """A checkpoint is missing or damaged, or does not belong to this run."""


def write_checkpoint(path: Path, round: int, content: bytes | memoryview) -> None:
    """Writes a checkpoint.

    Raises:
        OSError: for example a full disk; what was at `path` is still there.
    """
    write_whole(path, _header(round, content), content)


def read_checkpoint(path: Path) -> tuple[int, memoryview]:
    """Returns the round and the content of a checkpoint, if not a bit of the file has changed.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from None
    header = _HEADER.match(data)
    if header is None:
        raise CheckpointError(f"checkpoint {path} cannot be read: it has no digest")
    round, content = int(header[1]), data[header.end() :]
    if _header(round, content) != header[0]:
        raise CheckpointError(f"checkpoint {path} is damaged: its digest does not match")
    return round, content


def _header(round: int, content: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(b"%d\n" % round)
    digest.update(content)
    return b"shufl checkpoint of round %d, SHA-256 %s\n" % (round, digest.hexdigest().encode())
