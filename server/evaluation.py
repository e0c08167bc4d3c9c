"""Accuracy and loss of a model on the server's public test data."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

_BATCH = 1000


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in [0, 1] and mean cross-entropy."""

    accuracy: float
    loss: float


@torch.no_grad()
def evaluate(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> Evaluation:
    """Evaluates a copy in eval mode, in batches, on the device of the data.

    The model's output has shape (r, classes), the features (r, ...) and the labels, int64, (r,).
    """
    model = copy.deepcopy(model).to(features.device).eval()
    correct, loss = 0, 0.0
    for batch, target in zip(features.split(_BATCH), labels.split(_BATCH), strict=True):
        scores = model(batch.clone())  # which a forward may change in place
        correct += int((scores.argmax(dim=1) == target).sum())
        loss += float(functional.cross_entropy(scores, target, reduction="sum"))
    return Evaluation(correct / len(labels), loss / len(labels))
