"""How a user turns records into an update: algorithm, loss, local epochs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from shufl.learning.algorithms import STEPS, Step, Tensors

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Gives each of r records its loss, from a model's outputs and the labels: shape (r,)."""


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of classification: scores of shape (r, classes), int64 labels of shape (r,)."""
    return functional.cross_entropy(scores, labels, reduction="none")


UserRecords = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Gives the records of a user id: features of shape (r, ...) and labels of shape (r, ...)."""


@dataclass(frozen=True)
class LocalTraining:
    """How a user turns records into an update.

    Attributes:
        algorithm: `fedsgd`, one gradient over all records; or the name of one with local epochs.
        local_epochs, local_learning_rate, local_batch_size: of local epochs.
        loss: of the task.
        options: of the algorithm.
        own: the step of an algorithm that is none of `STEPS`.
    """

    algorithm: str = "fedsgd"
    local_epochs: int = 1
    local_learning_rate: float = 0.1
    local_batch_size: int = 32
    loss: Loss = cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    own: Step | None = None

    def step(
        self, parameters: Tensors, gradients: Tensors, start: Tensors, state: dict[str, Any]
    ) -> tuple[Tensors, dict[str, Any]]:
        """A user's next step in its local epochs; see `Step`."""
        step = self.own or STEPS[self.algorithm]
        return step(parameters, gradients, start, state, self.local_learning_rate, **self.options)
