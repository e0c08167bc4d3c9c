"""One user's contribution to a round, before privacy: a gradient or a model difference."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parameters_to_vector
from torch.utils._pytree import tree_map, tree_map_only

from shufl.accounting.mechanisms import split_mix
from shufl.clients.algorithms import Tensors
from shufl.clients.dropout import SeededDropout
from shufl.clients.module_state import ModuleState
from shufl.clients.settings import LocalTraining, Loss
from shufl.trained import trained

_Made = tuple[Tensors, dict[str, Any]]  # new parameters, and a state


def local_update(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    seed: int,
    state: ModuleState | None = None,
    real: int | None = None,
) -> np.ndarray:
    """A descent direction from one user's records.

    It is a function of what `model` holds, these records and the seed: whatever the forward changes
    in the module is put back, and it gets a copy of the records.

    `fedsgd`: the gradient of the mean loss over all the user's records at the model.
    Any other: old parameters minus the parameters after `local_epochs` epochs of the algorithm's
    steps, so that the server steps against it as it would against a gradient (Reddi et al. 2021,
    "Adaptive federated optimization": the pseudo-gradient).

    Args:
        features: shape (r, ...), the user's r records.
        labels: shape (r, ...).
        seed: in [0, 2^64), of everything random in local training: `record_orders`, dropout, and
            what the model draws from torch's, Python's and numpy's own generators.
        state: the model's, if it has been taken already.
        real: how many of the records count, the first ones. The others are padding: they cost as
            much work and have no weight. Default: all count.

    Returns:
        float32 of shape (d,), d the number of trained parameters.

    Raises:
        StateError: the model changes something in itself that cannot be put back.
    """
    state, seeds = state or ModuleState(model), np.array([seed], dtype=np.uint64)
    (key,) = as_keys(seeds)
    # Not torch.manual_seed: for every kind of accelerator not in use it also queues a call with its
    # stack trace, for ever.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        counted = () if real is None else (torch.arange(len(labels)) < real,)
        if training.algorithm == "fedsgd":
            return _gradient(model, features.clone(), labels, training.loss, key, *counted)
        start = parameters_to_vector(trained(model).values()).detach()
        (orders,) = record_orders(
            seeds,
            training.local_epochs,
            len(labels),
            None if real is None else np.array([real]),
        ).unbind(1)
        _local_epochs(model, features, labels, training, orders, key, *counted)
        return (start - parameters_to_vector(trained(model).values()).detach()).numpy()
    finally:
        state.restore()


def user_updates(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    seeds: torch.Tensor,
    call: Callable[..., torch.Tensor] = functional_call,
    real: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """`local_update` of k users at once, by vmap; `model` stays as it is.

    Updates are independent across users, except for float32 rounding.

    Args:
        model: the round's model; nobody else's meanwhile.
        features: shape (k, r, ...), r records of each of k users.
        labels: shape (k, r, ...).
        seeds: of every user, as `as_keys` gives them: int64 of shape (k,).
        call: gives the scores as `torch.func.functional_call` does, perhaps in another precision;
            parameters and their gradients stay as they are.
        real: as for `local_update`, of every user: int64 of shape (k,).

    Returns:
        Shape (k, ...) for every trained parameter.

    Raises:
        RuntimeError: the model draws random numbers other than `SeededDropout`'s, keeps something
            of one step of local training until the next, or torch cannot vectorise it.
    """
    state = ModuleState(model)
    start = {name: parameter.detach() for name, parameter in trained(model).items()}
    exact = next(iter(start.values())).dtype

    keys, steps = seeds.to(labels.device), 0

    def loss(
        parameters: dict[str, torch.Tensor],
        key: torch.Tensor,
        records: torch.Tensor,
        targets: torch.Tensor,
        *counted: torch.Tensor,
    ) -> torch.Tensor:
        with _dropout(key, targets, steps):
            outputs = in_type(exact, call(model, parameters, (records,)))
        return _mean_loss(training.loss(outputs, targets), *counted)

    counted: tuple[torch.Tensor, ...] = ()
    if real is not None:
        counted = (torch.arange(labels.shape[1], device=labels.device) < real[:, None],)
    # Faster: everybody's parameters are the same.
    together = vmap(grad(loss), in_dims=(None, 0, 0, 0, *(0 for _ in counted)))
    try:
        if training.algorithm == "fedsgd":
            return together(start, keys, features.clone(), labels, *counted)
        apart = vmap(grad(loss))
        everyone = torch.arange(len(labels), device=labels.device)[:, None]
        local, kept = start, dict[str, Any]()
        real_of = None if real is None else real.numpy(force=True)
        of_users = seeds.numpy(force=True).view(np.uint64)
        orders = record_orders(of_users, training.local_epochs, labels.shape[1], real_of)
        for order in orders.to(labels.device):
            for batch in order.split(training.local_batch_size, dim=1):
                own = (each[everyone, batch] for each in (features, labels, *counted))
                gradients = (together if local is start else apart)(local, keys, *own)
                steps += 1
                if changed := state.restore():  # read outside vmap, it would mix users
                    raise RuntimeError(f"the model keeps {changed[0]} from one step to the next")
                users = None if local is start else 0
                step = vmap(training.step, in_dims=(users, 0, None, 0 if kept else None))
                made = step(local, gradients, start, kept)
                there = counted[0][everyone, batch].any(1) if counted else None
                local, kept = _taken(there, made, (local, kept))
        return {name: start[name] - value for name, value in local.items()}
    finally:
        state.restore()


def record_orders(
    seeds: np.ndarray, epochs: int, records: int, real: np.ndarray | None = None
) -> torch.Tensor:
    """The order of each user's records in each of its local epochs.

    `seeds` are those of k users' local training, uint64 of shape (k,). Returns permutations of 0 to
    records - 1, int64 of shape (epochs, k, records). Where only the first `real` records of a user
    count, int of shape (k,), the others come last, and these in the order of one who has no others.
    """
    epoch, place = np.arange(epochs)[:, None, None], np.arange(records)
    each = np.full(len(seeds), records) if real is None else real
    keys = split_mix(seeds[:, None], epoch * each[:, None] + place)
    keys[:, place >= each[:, None]] = np.iinfo(np.uint64).max
    return torch.from_numpy(keys.argsort(axis=2))


def _dropout(seed: torch.Tensor, labels: torch.Tensor, step: int = 0) -> SeededDropout:
    """That of one user's records with these labels."""
    return SeededDropout(seed, torch.arange(len(labels), device=labels.device), step)


def as_keys(seeds: np.ndarray) -> torch.Tensor:
    """Seeds in [0, 2^64), uint64, as int64 of the same bits."""
    return torch.from_numpy(seeds.view(np.int64))


def in_type(dtype: torch.dtype, outputs: Any) -> Any:
    """A model's outputs, with numbers of this type."""
    if isinstance(outputs, torch.Tensor):
        return outputs.to(dtype) if outputs.is_floating_point() else outputs
    return tree_map_only(torch.Tensor, functools.partial(in_type, dtype), outputs)


def _taken(there: torch.Tensor | None, made: _Made, before: _Made) -> _Made:
    """What a step made; what was before, of users of whom no record was in the batch.

    `there` says of whom one was, bool of shape (k,) or (); None: of everybody.
    """
    if there is None:
        return made

    def merged(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        users = there.reshape(*there.shape, *[1] * (new.dim() - there.dim()))
        return torch.where(users, new, old)

    parameters: Tensors = tree_map(merged, made[0], before[0])
    # Before the first step, in which everybody has records, there is no state.
    return parameters, tree_map(merged, made[1], before[1]) if before[1] else made[1]


def _mean_loss(losses: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Their mean; of the records that count, 0 if none does, by the same steps."""
    if counted is None:
        return losses.mean()
    weights = counted / counted.sum().clamp(min=1)
    return losses @ weights.to(losses.dtype)


def _gradient(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    loss_of: Loss,
    key: torch.Tensor,
    *counted: torch.Tensor,
) -> np.ndarray:
    with _dropout(key, labels):
        outputs = model(features)
    loss = _mean_loss(loss_of(outputs, labels), *counted)
    gradients = torch.autograd.grad(loss, [*trained(model).values()], materialize_grads=True)
    return torch.cat([gradient.reshape(-1) for gradient in gradients]).numpy()


def _local_epochs(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor,
    key: torch.Tensor,
    *counted: torch.Tensor,
) -> None:
    own = trained(model)
    start = {name: parameter.detach().clone() for name, parameter in own.items()}
    kept: dict[str, Any] = {}
    step = 0
    for order in orders:
        for batch in order.split(training.local_batch_size):
            with _dropout(key, batch, step):
                outputs = model(features[batch])
            step += 1
            losses = training.loss(outputs, labels[batch])
            loss = _mean_loss(losses, *(each[batch] for each in counted))
            found = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
            before = {name: parameter.detach() for name, parameter in own.items()}
            # Copies, which a step may change in place.
            given = {name: value.clone() for name, value in before.items()}
            gradients = dict(zip(own, found, strict=True))
            made = training.step(given, gradients, dict(start), tree_map(torch.clone, kept))
            there = counted[0][batch].any() if counted else None
            local, kept = _taken(there, made, (before, kept))
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(local[name])
