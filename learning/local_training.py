"""How a user turns records into an update: algorithms with local steps, loss, epochs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch.nn import functional

Tensors = dict[str, torch.Tensor]
"""Parameters, or their gradients, by name."""

Step = Callable[..., tuple[Tensors, dict[str, Any]]]
"""`step(parameters, gradients, start, state, learning_rate, **options)`: new parameters and state.

`fedprox` explains the arguments. A state holds tensors, in dictionaries, lists or tuples. A step
changes nothing in place.
"""


def fedavg(
    parameters: Tensors, gradients: Tensors, start: Tensors, state: Any, learning_rate: float
) -> tuple[Tensors, Any]:
    """Plain SGD (McMahan et al. 2017, "Communication-efficient learning of deep networks")."""
    return {n: p - learning_rate * gradients[n] for n, p in parameters.items()}, state


def fedprox(
    parameters: Tensors,
    gradients: Tensors,
    start: Tensors,
    state: Any,
    learning_rate: float,
    proximal: float = 0.1,
) -> tuple[Tensors, Any]:
    """A step of SGD on the loss + proximal/2 ||parameters - start||², which stays near the start.

    Li et al. 2020, "Federated optimization in heterogeneous networks". A step of your own
    (`training.algorithm = "module:callable"`) takes the same first five arguments; its keyword
    arguments come from `training.algorithm_options`.

    Args:
        parameters: the user's own parameters before this step, by name; tensors of any shape.
        gradients: of the mean loss over a batch of the user's records; the same names and shapes.
        start: the parameters of the round's model; the same names and shapes.
        state: what the user's last step returned; an empty dictionary in its first step.
        learning_rate: `training.local_learning_rate`.
        proximal: the weight of the distance from the start.

    Returns:
        The new parameters, and the state for the next step; this algorithm returns it unchanged.
    """
    return {
        name: own - learning_rate * (gradients[name] + proximal * (own - start[name]))
        for name, own in parameters.items()
    }, state


STEPS: dict[str, Step] = {"fedavg": fedavg, "fedprox": fedprox}
"""The algorithms that take local steps."""


Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Gives each of r records its loss, from a model's outputs and the labels: shape (r,)."""


def logits_of(outputs: Any) -> Any:
    """The tensor `logits` of a dictionary or a dataclass, as models of Hugging Face return.

    Outputs that have none are returned as they are.
    """
    if isinstance(outputs, Mapping):
        return outputs.get("logits", outputs)
    return getattr(outputs, "logits", outputs) if is_dataclass(outputs) else outputs


def cross_entropy(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of classification: scores of shape (r, classes), int64 labels of shape (r,)."""
    return functional.cross_entropy(logits_of(outputs), labels, reduction="none")


UserRecords = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Gives the records of a user id: features of shape (r, ...) and labels of shape (r, ...)."""


@dataclass(frozen=True)
class LocalTraining:
    """How a user turns records into an update.

    Attributes:
        algorithm: `fedsgd`, one gradient over all records; or one with local epochs.
        local_epochs, local_learning_rate, local_batch_size: of algorithms with local epochs.
        loss: the task's.
        options: keyword arguments of the algorithm's step.
        own: the step of an algorithm of your own.
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
