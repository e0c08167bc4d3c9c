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

from shufl.learning.dropout import SeededDropout
from shufl.learning.local_training import LocalTraining, Loss, Tensors
from shufl.learning.module_state import ModuleState
from shufl.learning.parameters import trained
from shufl.protocol.mechanisms import split_mix

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
    """One user's update: a descent direction from the user's records.

    It depends only on what `model` holds, these records and the seed: whatever a forward changes in
    the module is put back, and the forward gets a copy of the records.

    `fedsgd`: the gradient of the mean loss over all the user's records.
    Any other algorithm: the model's parameters minus the parameters after `local_epochs` epochs of
    the algorithm's steps. The server steps against it as against a gradient (Reddi et al. 2021,
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
    # Not torch.manual_seed: for each kind of accelerator that is not in use it queues a call with a
    # stack trace, which nothing takes off the queue.
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        counted = None if real is None else torch.arange(len(labels)) < real
        if training.algorithm == "fedsgd":
            return _gradient(model, features.clone(), labels, training.loss, key, counted)
        start = parameters_to_vector(trained(model).values()).detach()
        each = None if real is None else np.array([real])
        (orders,) = record_orders(seeds, training.local_epochs, len(labels), each).unbind(1)
        _local_epochs(model, features, labels, training, orders, key, counted)
        return (start - parameters_to_vector(trained(model).values()).detach()).numpy()
    finally:
        state.restore()


def user_updates(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    keys: torch.Tensor,
    call: Callable[..., torch.Tensor] = functional_call,
    real: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """`local_update` of k users at once, by vmap; `model` stays as it is.

    Updates are independent across users, except for float32 rounding.

    Args:
        model: the round's model; nobody else's meanwhile.
        features: shape (k, r, ...), r records of each of k users.
        labels: shape (k, r, ...).
        keys: of every user, what `as_keys` gives of its seed: int64 of shape (k,).
        call: gives the scores as `torch.func.functional_call` does, perhaps in another precision;
            parameters and their gradients stay as they are.
        real: as for `local_update`, of every user: int64 of shape (k,).

    Returns:
        Shape (k, ...) for every trained parameter.

    Raises:
        RuntimeError: the model draws random numbers other than `SeededDropout`'s, keeps something
            of one step of local training until the next, or torch cannot vectorise it.
    """
    if training.algorithm != "fedsgd":
        users, records = labels.shape[:2]
        return epochs_of_users(
            model,
            features.flatten(0, 1),
            labels.flatten(0, 1),
            places=torch.arange(users * records, device=labels.device).reshape(users, records),
            sizes=torch.full((users,), records) if real is None else real,
            training=training,
            keys=keys,
            call=call,
        )
    state, device, counted = ModuleState(model), labels.device, None
    if real is not None:
        counted = torch.arange(labels.shape[1], device=device) < real[:, None]
    one = _gradients(model, training.loss, call)
    try:
        start = {name: parameter.detach() for name, parameter in trained(model).items()}
        # Without an axis: all have the same parameters, which is faster.
        axes = None, None, 0, 0, 0, None if counted is None else 0
        return vmap(one, axes)(start, 0, keys.to(device), features.clone(), labels, counted)
    finally:
        state.restore()


def epochs_of_users(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    places: torch.Tensor,
    sizes: torch.Tensor,
    training: LocalTraining,
    keys: torch.Tensor,
    call: Callable[..., torch.Tensor] = functional_call,
) -> dict[str, torch.Tensor]:
    """`user_updates` of k users with local epochs, whose records lie anywhere among n.

    Each user takes as many steps as it has batches; then it is left out of the computation.

    Args:
        features, labels: shape (n, ...).
        places: where each user's records are, int64 of shape (k, r); behind them any places.
        sizes: how many records each has, int64 of shape (k,), in 1 to r.
        model, training, keys, call: as for `user_updates`; so are returns and errors.
    """
    state, device, epochs = ModuleState(model), labels.device, training.local_epochs
    start = {name: parameter.detach() for name, parameter in trained(model).items()}
    one, most = _gradients(model, training.loss, call), places.shape[1]
    size = min(training.local_batch_size, most)
    counts = sizes.numpy(force=True)
    batches = -(-counts // size)  # of an epoch
    order = (-batches).argsort(kind="stable")  # who has most steps comes first
    ends = epochs * batches[order]
    users = torch.from_numpy(order).to(device)
    seeds = keys.numpy(force=True).view(np.uint64)
    turns = record_orders(seeds, epochs, most, counts).to(device)[:, users]
    places, keys, sizes = places[users], keys.to(device)[users], sizes.to(device)[users]
    each = torch.from_numpy(batches).to(device)[users]
    local, kept = start, dict[str, Any]()
    try:
        for step in range(int(ends.max())):
            active = int((ends > step).sum())
            number, epoch = step % each[:active], step // each[:active]
            place = number[:, None] * size + torch.arange(size, device=device)
            counted = place < sizes[:active, None]
            turn = turns[epoch, torch.arange(active, device=device)]
            rows = places[:active].gather(1, turn.gather(1, place.clamp(max=most - 1)))
            axis = 0 if step else None  # faster: at first all have the same parameters
            before = _first((local, kept), active) if step else (start, kept)
            found = vmap(one, (axis, None, 0, 0, 0, 0))(
                before[0], step, keys[:active], features[rows], labels[rows], counted
            )
            if changed := state.restore():  # read outside vmap, it would mix users
                raise RuntimeError(f"the model keeps {changed[0]} from one step to the next")
            own = axis if kept else None
            made = vmap(training.step, (axis, 0, None, own))(before[0], found, start, before[1])
            made = tree_map(torch.clone, made)  # it may be, or hold, what it was given
            if active == len(order):
                local, kept = made
            else:
                tree_map(_write, before, made)
        back = torch.from_numpy(order.argsort()).to(device)
        return {name: start[name] - value[back] for name, value in local.items()}
    finally:
        state.restore()


def _write(old: torch.Tensor, new: torch.Tensor) -> None:
    if old.dtype != new.dtype:
        raise RuntimeError(f"a step makes {new.dtype} of what was {old.dtype}")
    old.copy_(new)


def _first(tree: _Made, users: int) -> _Made:
    """What the first `users` users have, as views."""
    made: _Made = tree_map(lambda each: each[:users], tree)
    return made


def _gradients(
    model: nn.Module, loss_of: Loss, call: Callable[..., torch.Tensor]
) -> Callable[..., Tensors]:
    """Gives the gradient of one user's mean loss, at a step, of the records that count."""
    exact = next(iter(trained(model).values())).dtype

    def loss(
        parameters: Tensors,
        step: int,
        key: torch.Tensor,
        records: torch.Tensor,
        targets: torch.Tensor,
        counted: torch.Tensor | None,
    ) -> torch.Tensor:
        with _dropout(key, targets, step):
            outputs = in_type(exact, call(model, parameters, (records,)))
        return _mean_loss(loss_of(outputs, targets), counted)

    gradients: Callable[..., Tensors] = grad(loss)
    return gradients


def record_orders(
    seeds: np.ndarray, epochs: int, records: int, real: np.ndarray | None = None
) -> torch.Tensor:
    """The order of each user's records in each of its local epochs.

    Args:
        seeds: of k users' local training, uint64 of shape (k,).
        epochs: how many.
        records: how many each user has, with padding.
        real: how many of them count, the first ones: int of shape (k,). Padding comes last, and the
            others are in the order that they have without it. Default: all count.

    Returns:
        Permutations of 0 to records - 1, int64 of shape (epochs, k, records).
    """
    epoch, place = np.arange(epochs)[:, None, None], np.arange(records)
    each = np.full(len(seeds), records) if real is None else real
    keys = split_mix(seeds[:, None], epoch * each[:, None] + place)
    keys[:, place >= each[:, None]] = np.iinfo(np.uint64).max
    return torch.from_numpy(keys.argsort(axis=2))


def _dropout(seed: torch.Tensor, labels: torch.Tensor, step: int = 0) -> SeededDropout:
    """The dropout of one user's records with these labels."""
    return SeededDropout(seed, torch.arange(len(labels), device=labels.device), step)


def as_keys(seeds: np.ndarray) -> torch.Tensor:
    """Seeds in [0, 2^64), uint64, as int64 of the same bits."""
    return torch.from_numpy(seeds.view(np.int64).copy())


def in_type(dtype: torch.dtype, outputs: Any) -> Any:
    """A model's outputs, with numbers of this type."""
    if isinstance(outputs, torch.Tensor):
        return outputs.to(dtype) if outputs.is_floating_point() else outputs
    return tree_map_only(torch.Tensor, functools.partial(in_type, dtype), outputs)


def _taken(there: torch.Tensor | None, made: _Made, before: _Made) -> _Made:
    """What a step made; a user without a record in the batch keeps what it had before.

    `there` says whether it has one, bool of shape (); None: it has.
    """
    if there is None:
        return made
    merged = functools.partial(torch.where, there)
    parameters: Tensors = tree_map(merged, made[0], before[0])
    # Before the first step, in which everybody has records, there is no state.
    return parameters, tree_map(merged, made[1], before[1]) if before[1] else made[1]


def _mean_loss(losses: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """The mean loss of the records that count; 0 if none does, by the same operations."""
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
    counted: torch.Tensor | None,
) -> np.ndarray:
    with _dropout(key, labels):
        outputs = model(features)
    loss = _mean_loss(loss_of(outputs, labels), counted)
    gradients = torch.autograd.grad(loss, [*trained(model).values()], materialize_grads=True)
    return torch.cat([gradient.to_dense().reshape(-1) for gradient in gradients]).numpy()


def _local_epochs(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor,
    key: torch.Tensor,
    counted: torch.Tensor | None,
) -> None:
    own = trained(model)
    start = {name: parameter.detach().clone() for name, parameter in own.items()}
    kept: dict[str, Any] = {}
    size = training.local_batch_size
    batches = -(-(len(labels) if counted is None else int(counted.sum())) // size)  # with records
    for epoch, order in enumerate(orders):
        for number, batch in enumerate(order.split(size)):
            with _dropout(key, batch, epoch * batches + number):
                outputs = model(features[batch])
            losses = training.loss(outputs, labels[batch])
            own_counted = None if counted is None else counted[batch]
            loss = _mean_loss(losses, own_counted)
            found = torch.autograd.grad(loss, list(own.values()), materialize_grads=True)
            before = {name: parameter.detach() for name, parameter in own.items()}
            # Copies, which a step may change in place.
            given = {name: value.clone() for name, value in before.items()}
            gradients = dict(zip(own, (each.to_dense() for each in found), strict=True))
            made = training.step(given, gradients, dict(start), tree_map(torch.clone, kept))
            there = None if own_counted is None else own_counted.any()
            local, kept = _taken(there, made, (before, kept))
            with torch.no_grad():
                for name, parameter in own.items():
                    parameter.copy_(local[name])
