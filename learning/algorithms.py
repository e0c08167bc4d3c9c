"""The step that a user takes by each batch of its records, in training with local epochs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
"""Parameters, or their gradients, by name."""

Step = Callable[..., tuple[Tensors, dict[str, Any]]]
"""`step(parameters, gradients, start, state, learning_rate, **options)`: the new parameters, state.

`gradients` are of the mean loss of a batch, and `start` is the model of the round. `state` is empty
in a user's first step; then it is what its last step returned: tensors, in dictionaries, lists or
tuples. Nothing is changed in place.
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
    """SGD on the loss + proximal/2 ||parameters - start||^2, which keeps users near the start.

    Li et al. 2020, "Federated optimization in heterogeneous networks".
    """
    return {
        name: own - learning_rate * (gradients[name] + proximal * (own - start[name]))
        for name, own in parameters.items()
    }, state


STEPS: dict[str, Step] = {"fedavg": fedavg, "fedprox": fedprox}
"""The algorithms that take local steps."""
