"""A model's parameters: which are trained, which are sent, and files of them.

A report has a number for each entry of `trained`, in its order. `sent` is broadcast, digested and
kept in checkpoints. Frozen parameters are never sent: everybody builds the model with its own.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
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
    """Loads into a model the state that `sent` gave of another one.

    Raises:
        RuntimeError: the models differ in parameters or shapes.
    """
    if state.keys() != sent(model).keys():
        raise RuntimeError("the state is of a model with other trained parameters")
    model.load_state_dict(state, strict=False)


def frozen_digest(model: nn.Module) -> str:
    """The `tensors_digest` of the frozen parameters."""
    parameters = model.named_parameters()
    return tensors_digest({name: each for name, each in parameters if not each.requires_grad})


def tensors_digest(named: Mapping[str, torch.Tensor]) -> str:
    """SHA-256, hexadecimal, of tensors' names, types, shapes and bits; "" if there is none."""
    digest = hashlib.sha256()
    for name, value in named.items():
        digest.update(json.dumps([name, str(value.dtype), value.shape]).encode())
        bits = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        digest.update(bits.view(torch.uint8).numpy().data)
    return digest.hexdigest() if named else ""


def load_tensors(path: Path, **options: Any) -> Any:
    """`torch.load` of a file after a check of its checksums, which torch ignores.

    Raises:
        Exception: the file is damaged; of any class.
    """
    with zipfile.ZipFile(path) as archive:
        if (damaged := archive.testzip()) is not None:
            raise zipfile.BadZipFile(f"{damaged} is damaged")
    return torch.load(path, weights_only=True, **options)
