"""Checkpoints of model and optimiser; a crash while writing leaves the old one whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch


class CheckpointError(RuntimeError):
    """A checkpoint is missing or damaged, or does not belong to this run."""


@dataclass(frozen=True)
class Checkpoint:
    """What training needs to go on after `round`.

    Attributes:
        run_id: the run it belongs to, as in that run's ledger.
        origin: what else decides a run's numbers, as text by name: configuration, versions.
        round: the last round that the model knows of, 0 before the first.
        model, optimiser, average: their state dicts; `average` None where there is none.
    """

    run_id: str
    origin: dict[str, str]
    round: int
    model: dict[str, Any]
    optimiser: dict[str, Any]
    average: dict[str, Any] | None

    def save(self, path: Path) -> None:
        """Writes it to `path`, atomically.

        Raises:
            OSError: for example a full disk; what was at `path` is still there.
        """
        save_atomically(path, vars(self))


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint; takes tensors and plain values only.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    if not path.exists():
        raise CheckpointError(f"checkpoint {path} is missing")
    try:
        checkpoint = Checkpoint(**torch.load(path, weights_only=True))
    except Exception as error:  # whatever unpickling makes of damaged bytes
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {type(error).__name__}"
        ) from error
    return checkpoint


def save_atomically(path: Path, content: Any) -> None:
    """torch.save to a temporary file, synced and renamed into place.

    Raises:
        OSError: for example a full disk; what was at `path` is still there.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            save_tensors(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


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
