"""Checkpoints of model and optimiser; a crash while writing leaves the old one whole."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shufl.server.checkpoint_file import CheckpointError, read_checkpoint, write_checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """What training needs to go on after `round`.

    Attributes:
        run_id: the run it belongs to, as in that run's ledger.
        origin: what else decides a run's numbers, as text by name: configuration, versions.
        round: the last round that the model knows of, 0 before the first.
        model, average: what `sent` gives of them; `average` None where there is none.
        optimiser: its state dict.
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
        write_checkpoint(path, self.round, tensor_bytes(vars(self)))


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint; takes tensors and plain values only.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    _, content = read_checkpoint(path)
    try:
        return Checkpoint(**torch.load(io.BytesIO(content), weights_only=True))
    except Exception as error:  # whatever unpickling makes of another version's values
        raise CheckpointError(
            f"checkpoint {path} cannot be read: {type(error).__name__}"
        ) from error


def tensor_bytes(content: Any) -> memoryview:
    """What `torch.save` makes of tensors and plain values."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getbuffer()
