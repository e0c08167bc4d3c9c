"""Which part of a model is trained: servers and clients both use this view.

A report has a number for each entry of `trained`, in its order. `sent` is broadcast, digested and
kept in checkpoints. Frozen parameters stay where they are: everybody builds the model with its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a model does not freeze (`requires_grad`), by name."""
    return {name: each for name, each in model.named_parameters() if each.requires_grad}


def dimension(model: nn.Module) -> int:
    """d, how many numbers are trained."""
    return sum(each.numel() for each in trained(model).values())


def sent(model: nn.Module) -> dict[str, Any]:
    """The model's state dict without frozen parameters."""
    frozen = {id(each) for each in model.parameters() if not each.requires_grad}
    state = model.state_dict(keep_vars=True)
    return {
        name: value.detach().resolve_conj().resolve_neg() if torch.is_tensor(value) else value
        for name, value in state.items()
        if id(value) not in frozen
    }


def load_sent(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Gives a model what `sent` made of another.

    Raises:
        RuntimeError: of a model with other parameters or shapes.
    """
    if state.keys() != sent(model).keys():
        raise RuntimeError("the state is that of a model with other trained parameters")
    model.load_state_dict(state, strict=False)


def frozen_digest(model: nn.Module) -> str:
    """SHA-256, hexadecimal, of the frozen parameters' names, types, shapes and bits; of none ""."""
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    digest = hashlib.sha256()
    for name, value in frozen.items():
        digest.update(json.dumps([name, str(value.dtype), value.shape]).encode())
        bits = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(bits.view(torch.uint8).numpy().data)
    return digest.hexdigest() if frozen else ""
