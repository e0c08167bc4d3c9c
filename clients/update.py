"""One user's contribution to a round, before privacy: a gradient or a model difference."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from clients.settings import LocalTraining


def local_update(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    seed: int,
) -> np.ndarray:
    """A descent direction from one user's records; `model` keeps its parameters.

    `fedsgd`: the gradient of the mean cross-entropy over all the user's records at the model.
    `fedavg`: old parameters minus the parameters after `local_epochs` epochs of SGD, so that the
    server steps against it as it would against a gradient (Reddi et al. 2021, "Adaptive federated
    optimization": the pseudo-gradient).

    Args:
        model: the round's model.
        features: shape (r, ...), the user's r records.
        labels: int64 of shape (r,).
        training: which of the two, and its steps.
        seed: everything random in local training (order of records, dropout).

    Returns:
        float32 of shape (d,), d the number of parameters.
    """
    # Not torch.manual_seed: for every kind of accelerator not in use it also queues a call with its
    # stack trace, for ever.
    torch.default_generator.manual_seed(seed)
    if training.algorithm == "fedsgd":
        return _gradient(model, features, labels)
    start = parameters_to_vector(model.parameters()).detach().clone()
    try:
        _local_epochs(model, features, labels, training)
        end = parameters_to_vector(model.parameters()).detach()
        return (start - end).numpy()
    finally:
        vector_to_parameters(start, model.parameters())


def _gradient(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    loss = functional.cross_entropy(model(features), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()


def _local_epochs(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=training.local_learning_rate)
    for _ in range(training.local_epochs):
        for batch in torch.randperm(len(labels)).split(training.local_batch_size):
            optimiser.zero_grad()
            functional.cross_entropy(model(features[batch]), labels[batch]).backward()
            optimiser.step()
