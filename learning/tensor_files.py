"""Files of tensors, whole or refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch


def load_tensors(path: Path, **options: Any) -> Any:
    """`torch.load` of a file whose checksums are right: torch itself does not look at them.

    Raises:
        Exception: of any kind that a damaged file can raise.
    """
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
    return torch.load(path, weights_only=True, **options)


def save_tensors(content: Any, file: BinaryIO) -> None:
    """`torch.save` to an open file; where it cannot be written, with the reason.

    Raises:
        OSError: for example a full disk.
    """
    try:
        torch.save(content, file)
    except RuntimeError as error:  # torch's own account of it, in place of the file's
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
