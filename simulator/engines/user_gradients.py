"""The sum of many users' clipped updates, computed together.

Two ways give the same sum. *vmap* (`torch.func`) materialises every user's update. It takes any
model that torch can vectorise, and any local training. *Book-keeping* (Bu et al. 2023,
"Differentially private optimization on large model at small cost") takes one forward over all
records, and one backward to the outputs of the layers. A layer's inputs and the gradients of its
outputs are the factors of every user's gradient: from them follow its norm, and, rescaled, the
clipped sum in one matrix product for all users. It takes `fedsgd` and models of linear,
convolution, embedding and normalisation layers, and costs about as much as plain SGD.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from shufl.learning import (
    LocalTraining,
    ModuleState,
    SeededDropout,
    as_keys,
    epochs_of_users,
    in_type,
    user_updates,
)
from shufl.learning.config import Precision
from shufl.learning.data.partition import Together
from shufl.learning.model_trial import agrees_one_by_one, made_up
from shufl.learning.models import seeded
from shufl.learning.parameters import dimension, trained
from shufl.learning.tasks import Form
from shufl.simulator.engines.book_keeping import autocast, gradients_of_users, names_of
from shufl.simulator.engines.buckets import Bucket
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

Method = Literal["book-keeping", "vmap"]
"""How users' gradients are computed."""

_CANCELLATION = 10.0  # see `Products`
_SIZES = np.full(64, 2)
_NUMBERS = 2**22  # numbers that are computed at once: what caches hold
_SHOWN = 8  # users of a trial whose gradients are compared; they are spread over all of them


@dataclass(frozen=True)
class Computation:
    """How the updates of many users are computed.

    Attributes:
        method: what `fastest_method` gave for the model and the training.
        training: the users' local training.
        precision: what the model computes in.
    """

    method: Method
    training: LocalTraining
    precision: Precision = "float32"


@torch.no_grad()
def clipped_sum_of_updates(
    computation: Computation,
    model: nn.Module,
    records: Together,
    seeds: np.ndarray,
    clipping: Clipping,
) -> torch.Tensor:
    """The sum over k users of `shufl.learning.local_update`, clipped as `clipping` says.

    Args:
        computation: how it is computed.
        model: in training mode; it keeps its parameters, and nothing else may use it meanwhile.
        records: of the users, on the model's device.
        seeds: of the users' local training, uint64 of shape (k,).
        clipping: of the updates.

    Returns:
        float32 of shape (d,), on the model's device.
    """
    device, training = records.features.device, computation.training
    keys, vmapped = as_keys(seeds).to(device), computation.method == "vmap"
    first, *_ = trained(model).values()
    total = first.new_zeros(dimension(model))
    most = max(1, _worth(device.type) // len(total)) if vmapped else None
    batch = None if training.algorithm == "fedsgd" else training.local_batch_size
    buckets = Bucket.cut(records.sizes, device, most, batch)
    if vmapped:
        for bucket in buckets:
            updates = _by_vmap(computation, model, records, bucket, keys)
            total += clipped_sum(updates, clipping.only(bucket.users))
        return total
    names = names_of(model).values()
    masks = _dropout(records.sizes, keys)
    gradients = gradients_of_users(
        model, records, buckets, training.loss, masks, computation.precision
    )
    for bucket, of_bucket in zip(buckets, gradients, strict=True):
        own = clipping.only(bucket.users)
        norms, bounds = lengths(of_bucket)
        scales = own.scales(norms)
        # All other users may overflow or lose precision in float32, so they take the vmap path.
        sure = bounds <= min(FLOAT32.max, clipping.clip_norm / FLOAT32.tiny)
        if bounds is not norms:
            sure &= scales.abs() * bounds <= _CANCELLATION * clipping.clip_norm
        if not sure.all():
            updates = _by_vmap(computation, model, records, bucket.only(~sure), keys)
            total += clipped_sum(updates, own.only(~sure))
            of_bucket, scales = only(of_bucket, sure), scales[sure]
        total += weighted_sum(of_bucket, scales.float(), names)
    return total


def _by_vmap(
    computation: Computation,
    model: nn.Module,
    records: Together,
    bucket: Bucket,
    keys: torch.Tensor,
) -> Tensors:
    """`user_updates` of a bucket's users; for the arguments see `clipped_sum_of_updates`."""
    features, labels, _ = records
    training, own = computation.training, keys[bucket.users]
    called = call_in(computation.precision)
    if training.algorithm != "fedsgd":
        return epochs_of_users(
            model, features, labels, bucket.index, bucket.sizes, training, own, called
        )
    real = bucket.sizes if bucket.is_padded else None
    return user_updates(model, bucket.of(features), bucket.of(labels), training, own, called, real)


def _dropout(sizes: np.ndarray, keys: torch.Tensor) -> SeededDropout:
    """The dropout of k users, one user after another; shapes (k,) of `sizes` and `keys`."""
    places = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
    users = np.repeat(np.arange(len(sizes)), sizes)
    return SeededDropout(keys[torch.from_numpy(users)], torch.from_numpy(places).to(keys.device))


def fastest_method(
    model: nn.Module,
    form: Form,
    training: LocalTraining,
    device: str = "cpu",
    precision: Precision = "float32",
    sizes: np.ndarray = _SIZES,
) -> Method:
    """Book-keeping if it can do this model, else vmap; both are tried.

    Each is tried on the device and in the precision of the run, with random parameters and records:
    numbers of very different size, or tokens 0 and 1 for a model that looks records up. First the
    gradients of a few users by vmap are compared with gradients computed one by one. Then those
    by book-keeping are compared with vmap's in float64, for several numbers of users at once. This
    finds a model that mixes the records of a batch, or uses a parameter outside its layer.

    Args:
        model: in training mode, on the CPU; it stays as it is.
        form: of its records.
        training: how users compute their updates.
        device: where updates will be computed.
        precision: in which updates will be computed.
        sizes: how many records each of the users of a trial has, int of shape (k,).

    Raises:
        RuntimeError: not even vmap does this model.
    """
    features, labels = made_up(model, form, int(sizes.sum()))
    few = sizes[:4]
    count = int(few.sum())
    most = int(few.max())
    if training.algorithm != "fedsgd":  # up to three steps and a part of one
        most = max(most, min(int(sizes.max()), 3 * training.local_batch_size + 1))
    longest = made_up(model, form, len(few) * most)
    model = copy.deepcopy(model)
    with seeded(0):
        x, y = (each.reshape(len(few), most, *each.shape[1:]) for each in longest)
        agrees = agrees_one_by_one(model, x, y, training)
        if training.algorithm != "fedsgd" or np.ptp(sizes):
            unequal = np.resize([most, 1, most // 2 + 1], len(few))
            agrees &= agrees_one_by_one(model, x, y, training, unequal)
    if not agrees:
        raise RuntimeError(
            "users computed together get other updates than one by one: the model draws random "
            "numbers, rounds (as bfloat16 does), or lets records of a batch change each other's "
            "scores"
        )

    def attempt(method: Method) -> None:
        own, seeds = ready_for(method, model, device), np.arange(len(few), dtype=np.uint64)
        records = Together(features[:count].to(device), labels[:count].to(device), few)
        computation = Computation(method, training, precision)
        clipped_sum_of_updates(computation, own, records, seeds, Clipping(1.0))

    attempt("vmap")
    if training.algorithm != "fedsgd":
        return "vmap"
    try:
        attempt("book-keeping")
        exact = ready_for("book-keeping", model).double()
        x, y = (in_type(torch.float64, each) for each in (features, labels))
        return "book-keeping" if _agrees(exact, Together(x, y, sizes), training) else "vmap"
    except Exception:  # whatever a model does that the layers' formulas do not expect
        return "vmap"


def _worth(device: str) -> int:
    """How many numbers to compute at once: on CPUs as many as caches hold."""
    return _NUMBERS if device == "cpu" else 64 * _NUMBERS


def usual_chunk(model: nn.Module, form: Form, training: LocalTraining, device: str = "cpu") -> int:
    """About how many records to compute at once if the configuration does not say: 16 to 4096.

    A forward over this many records keeps tensors for its backward, or has a largest output, of
    twice `_worth` numbers; with local epochs, whose steps take only some of the records, 16 times.
    """
    copied, kept = copy.deepcopy(model), 1
    own = {parameter.data_ptr() for parameter in copied.parameters()}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if tensor.data_ptr() in own else tensor.numel()
        return tensor

    largest = 1

    def look(module: nn.Module, given: Any, output: Any) -> None:
        nonlocal largest  # a frozen layer keeps nothing for the backward, but has an output
        largest = max(largest, output.numel() if isinstance(output, torch.Tensor) else 1)

    features, _ = made_up(model, form, _SHOWN)
    for each in copied.modules():
        if not isinstance(each, torch.jit.ScriptModule):  # such a module takes no hooks
            each.register_forward_hook(look)
    with seeded(0), torch.enable_grad(), saved_tensors_hooks(count, lambda tensor: tensor):
        copied(features)
    kept = max(kept, largest)
    most = (2 if training.algorithm == "fedsgd" else 16) * _worth(device)
    return min(max(len(features) * most // kept, 16), 4096)


def ready_for(method: Method, model: nn.Module, device: str = "cpu") -> nn.Module:
    """A copy of the model on the device, in training mode, in the memory format of the method.

    On CPUs convolution and pooling take half the time when the channels of a pixel are neighbours.
    """
    model = copy.deepcopy(model).train().to(device)
    if method == "vmap":
        return model
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def _agrees(model: nn.Module, records: Together, training: LocalTraining) -> bool:
    """Whether book-keeping gives each user's gradient at random parameters, and leaves no state."""
    generator = torch.Generator().manual_seed(1)
    for parameter in trained(model).values():
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    state, names = ModuleState(model), names_of(model).values()
    most, by_vmap = len(records.sizes), Computation("vmap", training)
    for users in sorted({1, min(4, most), most // 2 + 1, max(1, most - 1), most}):
        sizes = records.sizes[:users]
        count = int(sizes.sum())
        some = Together(records.features[:count], records.labels[:count], sizes)
        keys, buckets = torch.arange(users), Bucket.cut(sizes)
        masks = _dropout(sizes, keys)
        found = gradients_of_users(model, some, buckets, training.loss, masks, "float32")
        given = list(zip(buckets, found, strict=True))
        if state.restore():
            return False
        shown = torch.linspace(0, users - 1, min(users, _SHOWN)).round().long()
        for bucket, gradients in given:
            chosen = torch.isin(bucket.users, shown)
            if not chosen.any():
                continue
            kept, alone = only(gradients, chosen), torch.eye(int(chosen.sum()), dtype=torch.float64)
            ours = torch.stack([weighted_sum(kept, one, names) for one in alone])
            updates = _by_vmap(by_vmap, model, some, bucket.only(chosen), keys)
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
    """The sum of k users' clipped updates; an update with a NaN or infinity counts as zero.

    Args:
        updates: of every parameter by name, float32 of shape (k, ...).
        clipping: of the updates.

    Returns:
        float32 of shape (d,).
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
