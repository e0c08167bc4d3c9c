"""The numbers of a model on the server's public test data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

Measure = Callable[[Any, torch.Tensor], dict[str, float]]
"""Numbers by name, of a model's outputs and the labels of all test records; `loss` is one."""

_BATCH = 1000


@torch.no_grad()
def evaluate(
    model: nn.Module, features: torch.Tensor, labels: torch.Tensor, measure: Measure
) -> dict[str, float]:
    """What `measure` gives of a copy in eval mode, in batches, on the device of the data.

    Features and labels are of shape (r, ...).
    """
    model = copy.deepcopy(model).to(features.device).eval()
    # Of a copy, which a forward may change in place.
    parts = [model(batch.clone()) for batch in features.split(_BATCH)]
    outputs = parts[0]
    if len(parts) > 1:
        outputs = tree_map(lambda *each: torch.cat(each), *parts)
    return measure(outputs, labels)
