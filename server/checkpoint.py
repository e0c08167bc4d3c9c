"""Checkpoints of model and optimiser; a crash while writing leaves the old one whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn


def save_checkpoint(
    path: Path, model: nn.Module, optimiser: torch.optim.Optimizer, round: int, run_id: str
) -> None:
    """Saves what training needs to go on after `round`."""
    content = {
        "run_id": run_id,
        "round": round,
        "model": model.state_dict(),
        "optimiser": optimiser.state_dict(),
    }
    save_atomically(path, content)


def save_atomically(path: Path, content: Any) -> None:
    """torch.save to a temporary file, synced and renamed into place.

    Raises:
        OSError: for example a full disk; what was at `path` is still there.
    """
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:  # given a path, torch would hide the OSError
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """`run_id`, `round`, `model` and `optimiser` state; loads tensors and plain values only."""
    return torch.load(path, weights_only=True)
