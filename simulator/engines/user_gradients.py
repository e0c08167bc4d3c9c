"""The sum of many users' clipped updates, computed together.

Two ways give the same sum. *vmap* materialises every user's update (`torch.func`): any model that
torch can vectorise, any local training. *Book-keeping* (Bu et al. 2023, "Differentially private
optimization on large model at small cost") takes one forward over all records and one backward
to the outputs of the layers. What each layer was given and what its output's gradient is are the
factors of every user's gradient: they give its norm, and, rescaled, the clipped sum in one matrix
product for all users. It is for `fedsgd` and for models of linear, convolution, embedding and
normalisation layers, and costs about what plain SGD does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.func import functional_call

from shufl.clients import LocalTraining, ModuleState, user_updates
from shufl.simulator.engine_table import Precision
from shufl.simulator.engines.book_keeping import autocast, gradients_of_users, names_of
from shufl.simulator.engines.gradient_forms import (
    FLOAT32,
    Clipping,
    Dense,
    Gradients,
    Tensors,
    lengths,
    only,
    scaled_sum,
    weighted_sum,
)
from shufl.simulator.models import seeded
from shufl.simulator.trial import agrees_one_by_one, made_up

Method = Literal["book-keeping", "vmap"]
"""How users' gradients are computed."""

_CANCELLATION = 10.0  # see `Products`
_SHOWN = 8  # users whose gradients a trial compares, spread over all that are computed at once


@torch.no_grad()
def clipped_sum_of_updates(
    method: Method,
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor | None,
    clipping: Clipping,
    precision: Precision = "float32",
) -> torch.Tensor:
    """The sum over k users of `shufl.clients.clip` of `shufl.clients.local_update`.

    `model` keeps its parameters; it is nobody else's meanwhile. It is computed where they are.

    Args:
        method: what `fastest_method` gave for this model and training.
        model: in training mode.
        features: shape (k, r, ...), r records of each of k users, on the model's device.
        labels: int64 of shape (k, r), on the model's device.
        orders: for local epochs: the records' order by epoch and user, int64 of shape (e, k, r).

    Returns:
        float32 of shape (d,), on the model's device.
    """
    if method == "vmap":
        updates = user_updates(model, features, labels, training, orders, call_in(precision))
        return clipped_sum(updates, clipping)
    names = names_of(model)
    gradients = gradients_of_users(model, names, features, labels, precision)
    norms, bounds = lengths(gradients)
    scales = clipping.scales(norms)
    # The others may overflow or lose precision in float32, so they take the vmap path.
    sure = bounds <= min(FLOAT32.max, clipping.clip_norm / FLOAT32.tiny)
    if bounds is not norms:
        sure &= scales.abs() * bounds <= _CANCELLATION * clipping.clip_norm
    if sure.all():
        return weighted_sum(gradients, scales.float(), names.values())
    total = weighted_sum(only(gradients, sure), scales[sure].float(), names.values())
    few = features[~sure], labels[~sure], training, None, clipping.only(~sure), precision
    return total + clipped_sum_of_updates("vmap", model, *few)


def fastest_method(
    model: nn.Module,
    input_shape: tuple[int, ...],
    classes: int,
    training: LocalTraining,
    device: str = "cpu",
    precision: Precision = "float32",
    users: int = 64,
    records: int = 2,
) -> Method:
    """Book-keeping where it does this model, else vmap; found by trying both.

    Each is tried where and in the precision that it will be used. Parameters and records are
    random, those of the users of very different size, or of tokens 0 and 1 for a model that looks
    its records up. A few users' gradients by vmap are compared with those one by one; and those by
    book-keeping with vmap's, in float64, for several numbers of users at once: a model that mixes
    the records of a batch, or uses a parameter elsewhere than in its layer, shows it.

    Args:
        model: in training mode, on the CPU; it stays as it is.
        device: where updates will be computed.
        users: the most that are ever computed at once.
        records: of each user.

    Raises:
        RuntimeError: not even vmap does this model.
    """
    few = min(users, 4)
    given = made_up(model, input_shape, classes, users * records)
    features, labels = (each.unflatten(0, (users, records)) for each in given)
    orders = torch.arange(records).expand(training.local_epochs, few, records)
    model = copy.deepcopy(model)
    with seeded(0):
        agrees = agrees_one_by_one(model, features[:few], labels[:few], training)
    if not agrees:
        raise RuntimeError(
            "users computed together get other updates than one by one: the model draws random "
            "numbers, or keeps something of a step"
        )

    def attempt(method: Method) -> None:
        x, y = (tensor[:few].to(device) for tensor in (features, labels))
        own = ready_for(method, model, device)
        clipped_sum_of_updates(method, own, x, y, training, orders, Clipping(1.0), precision)

    attempt("vmap")
    if training.algorithm != "fedsgd":
        return "vmap"
    try:
        attempt("book-keeping")
        exact = ready_for("book-keeping", model).double()
        return "book-keeping" if _agrees(exact, features.double(), labels) else "vmap"
    except Exception:  # whatever a model does that the layers' formulas do not expect
        return "vmap"


def ready_for(method: Method, model: nn.Module, device: str = "cpu") -> nn.Module:
    """A copy of the model on the device, in training mode, as this method computes it fastest.

    On CPUs convolution and pooling take half the time when the channels of a pixel are neighbours.
    """
    model = copy.deepcopy(model).train().to(device)
    if method == "vmap":
        return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def _agrees(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether book-keeping gives each user's gradient at random parameters and keeps no state."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    state = ModuleState(model)
    most = len(labels)
    for users in sorted({1, min(4, most), most // 2 + 1, max(1, most - 1), most}):
        kept = gradients_of_users(
            model, names_of(model), features[:users], labels[:users], "float32"
        )
        if state.restore():
            return False
        shown = torch.linspace(0, users - 1, min(users, _SHOWN)).round().long()
        chosen = torch.zeros(users, dtype=torch.bool)
        chosen[shown] = True
        kept = only(kept, chosen)
        updates = user_updates(model, features[shown], labels[shown], LocalTraining())
        alone = torch.eye(len(shown), dtype=features.dtype)
        ours = torch.stack([weighted_sum(kept, one, updates) for one in alone])
        theirs = torch.cat([update.flatten(1) for update in updates.values()], dim=1)
        if not torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9):
            return False
    return True


def call_in(precision: Precision) -> Callable[..., torch.Tensor]:
    """`torch.func.functional_call` in this precision."""

    def call(model: nn.Module, parameters: Tensors, given: tuple[torch.Tensor]) -> torch.Tensor:
        with autocast(given[0].device, precision):
            return functional_call(model, parameters, given)

    return call


def clipped_sum(updates: Tensors, clipping: Clipping) -> torch.Tensor:
    """The sum over users of `clients.clip`, which makes an update with a NaN or infinity zero.

    `updates` are float32 of shape (k, ...) for every parameter; the sum is of shape (d,).
    """
    gradients: Gradients = {
        (name,): Dense(each.reshape(len(each), -1)) for name, each in updates.items()
    }
    norms, _ = lengths(gradients)
    finite = norms.isfinite()
    if not finite.all():
        gradients, norms = only(gradients, finite), norms[finite]
        clipping = clipping.only(finite)
    return scaled_sum(gradients, clipping.scales(norms), updates)
