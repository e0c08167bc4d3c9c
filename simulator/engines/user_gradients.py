"""The sum of many users' clipped updates, computed together.

Two ways give the same sum. *vmap* materialises every user's update (`torch.func`): any model that
torch can vectorise, any local training. *Book-keeping* (Bu et al. 2023, "Differentially private
optimization on large model at small cost") takes one forward over all records and one backward
to the outputs of the layers. What each layer was given and what its output's gradient is are the
factors of every user's gradient: they give its norm, and, rescaled, the clipped sum in one matrix
product for all users. It is for `fedsgd` and for models of linear, convolution and
normalisation layers, and costs about what plain SGD does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from clients import LocalTraining

Tensors = dict[str, torch.Tensor]
"""Parameters by name, or one such tensor for each of k users: shape (k, ...)."""

Method = Literal["book-keeping", "vmap", "user by user"]
"""How users' gradients are computed; one by one on Flower."""

Precision = Literal["float32", "bfloat16"]
"""Of a model's forward and backward to its layers; norms and sums are float32 and float64."""

_FLOAT32 = torch.finfo(torch.float32)
_CANCELLATION = 10.0  # see `_Products`


class Unsupported(Exception):
    """Book-keeping cannot do this model."""


@torch.no_grad()
def clipped_sum_of_updates(
    method: Method,
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor | None,
    clip_norm: float,
    precision: Precision = "float32",
) -> torch.Tensor:
    """The sum over k users of `clients.clip` of `clients.local_update`.

    `model` keeps its parameters; threads may share it. It is computed where its parameters are.

    Args:
        method: what `fastest_method` gave for this model and training.
        model: the round's model, in training mode.
        features: shape (k, r, ...), r records of each of k users, on the model's device.
        labels: int64 of shape (k, r), on the model's device.
        training: one gradient, or local epochs.
        orders: for local epochs: the records' order by epoch and user, int64 of shape (e, k, r).
        clip_norm: C.
        precision: that of forward and backward.

    Returns:
        float32 of shape (d,), on the model's device.
    """
    if method == "vmap":
        own = copy.deepcopy(model)  # functional_call exchanges a model's parameters meanwhile
        updates = user_updates(own, features, labels, training, orders, precision)
        return clipped_sum(updates, clip_norm)
    names = _names(model)
    gradients = _user_gradients(model, names, features, labels, precision)
    norms, bounds = _lengths(gradients)
    scales = _scales(norms, clip_norm)
    # Of the others float32 may not hold an entry, or only few digits of the scale.
    sure = bounds <= min(_FLOAT32.max, clip_norm / _FLOAT32.tiny)
    if bounds is not norms:
        sure &= scales * bounds <= _CANCELLATION * clip_norm
    if sure.all():
        return _weighted_sum(gradients, scales.float(), names.values())
    total = _weighted_sum(_of(gradients, sure), scales[sure].float(), names.values())
    few = features[~sure], labels[~sure], training, None, clip_norm, precision
    return total + clipped_sum_of_updates("vmap", model, *few)


def fastest_method(
    model: nn.Module,
    input_shape: tuple[int, ...],
    classes: int,
    training: LocalTraining,
    device: str = "cpu",
    precision: Precision = "float32",
) -> Method:
    """Book-keeping where it does this model, else vmap; found by trying both.

    Each is tried where and in the precision that it will be used. Parameters and records are
    random, those of the users of very different size, and the two are compared on the CPU in
    float64: a model that mixes the records of a batch, or uses a parameter elsewhere than in its
    layer, shows it.

    Args:
        model: in training mode, on the CPU; it stays as it is.
        input_shape: shape of one record.
        classes: number of classes.
        training: one gradient, or local epochs, which only vmap does.
        device: where updates will be computed.
        precision: in which.

    Raises:
        RuntimeError: not even vmap does this model.
    """
    users, records = 4, 2
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(users, records, *input_shape, generator=generator)
    features *= torch.logspace(-2, 1, users).reshape(-1, *[1] * (features.dim() - 1))
    labels = torch.randint(classes, (users, records), generator=generator)
    orders = torch.arange(records).expand(training.local_epochs, users, records)

    def attempt(method: Method) -> None:
        there = (tensor.to(device) for tensor in (features, labels))
        own = ready_for(method, model, device)
        clipped_sum_of_updates(method, own, *there, training, orders, 1.0, precision)

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
    return model.to(memory_format=torch.channels_last) if method == "book-keeping" else model


@torch.no_grad()
def _agrees(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether book-keeping gives each user's gradient at random parameters, and no state is kept.

    Threads share a model under book-keeping, so its forward must not write to it.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    before = [dict(vars(module)) for module in model.modules()]
    kept = _user_gradients(model, _names(model), features, labels, "float32")
    if before != [vars(module) for module in model.modules()]:
        return False
    alone = torch.eye(len(labels), dtype=features.dtype)
    updates = user_updates(model, features, labels, LocalTraining())
    ours = torch.stack([_weighted_sum(kept, one, updates) for one in alone])
    theirs = torch.cat([update.flatten(1) for update in updates.values()], dim=1)
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-9)


def user_updates(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor | None = None,
    precision: Precision = "float32",
) -> Tensors:
    """`clients.local_update` of k users at once, by vmap; `model` keeps its parameters.

    Args:
        model: the round's model; nobody else's meanwhile.
        features: shape (k, r, ...), r records of each of k users.
        labels: int64 of shape (k, r).
        training: one gradient, or local epochs.
        orders: for local epochs: the records' order by epoch and user, int64 of shape (e, k, r).
        precision: that of forward and backward; parameters and their gradients stay float32.

    Returns:
        float32 of shape (k, ...) for every parameter.

    Raises:
        RuntimeError: the model draws random numbers, or torch cannot vectorise it.
    """
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: Tensors, records: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with _autocast(records.device, precision):
            scores = functional_call(model, parameters, (records,))
        return functional.cross_entropy(scores.to(records.dtype), targets)

    together = vmap(grad(loss), in_dims=(None, 0, 0))  # faster: everybody's parameters the same
    if training.algorithm == "fedsgd":
        return together(start, features, labels)
    apart = vmap(grad(loss))
    everyone = torch.arange(len(labels), device=labels.device)[:, None]
    local = start
    for order in orders.to(labels.device):
        for batch in order.split(training.local_batch_size, dim=1):
            gradients = together if local is start else apart
            steps = gradients(local, features[everyone, batch], labels[everyone, batch])
            local = {
                name: value - training.local_learning_rate * steps[name]
                for name, value in local.items()
            }
    return {name: start[name] - value for name, value in local.items()}


def clipped_sum(updates: Tensors, clip_norm: float) -> torch.Tensor:
    """The sum over users of `clients.clip`, which makes an update with a NaN or infinity zero.

    Args:
        updates: float32 of shape (k, ...) for every parameter.
        clip_norm: C.

    Returns:
        float32 of shape (d,).
    """
    gradients: Gradients = {
        (name,): _Dense(each.reshape(len(each), -1)) for name, each in updates.items()
    }
    norms, _ = _lengths(gradients)
    finite = norms.isfinite()
    if not finite.all():
        gradients, norms = _of(gradients, finite), norms[finite]
    return _scaled_sum(gradients, _scales(norms, clip_norm), updates)


def _of(gradients: Gradients, users: torch.Tensor) -> Gradients:
    """Of these users only."""
    return {names: part.of(users) for names, part in gradients.items()}


def _lengths(gradients: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
    """Users' norms over all parameters, and their bounds, or the norms where nothing can cancel.

    Float64 of shape (k,).
    """
    squares, bounds = zip(*(part.squared_lengths() for part in gradients.values()), strict=True)
    norms = functools.reduce(torch.add, squares).sqrt()
    if all(map(operator.is_, squares, bounds)):
        return norms, norms
    return norms, functools.reduce(torch.add, bounds).sqrt()


def _scales(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What each user's update is multiplied by; of a zero update: C / 0 = inf, so 1."""
    return (clip_norm / norms).clamp(max=1.0)


def _scaled_sum(gradients: Gradients, scales: torch.Tensor, order: Iterable[str]) -> torch.Tensor:
    """The sum over users for float64 scales, float32 of shape (d,), the parameters in order."""
    rounded = scales.float()  # down: among the smallest float32 the nearest may be far above
    scales = torch.where(rounded > scales, rounded.nextafter(torch.zeros_like(rounded)), rounded)
    return _weighted_sum(gradients, scales, order)


def _weighted_sum(
    gradients: Gradients, weights: torch.Tensor, order: Iterable[str]
) -> torch.Tensor:
    """The same for weights of the gradients' type."""
    sums: Tensors = {}
    for names, part in gradients.items():
        sums.update(zip(names, part.weighted_sums(weights), strict=True))
    return torch.cat([sums[name] for name in order])


@dataclass(frozen=True)
class _Dense:
    """A parameter's gradient of each user, materialised.

    Attributes:
        gradients: float32 of shape (k, size).
        kernel: see `_in_order`.
    """

    gradients: torch.Tensor
    kernel: tuple[int, int] = (1, 1)

    def squared_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms, float64 of shape (k,), twice: as measured and as bounded."""
        size = _users_at_a_time(self.gradients.shape[1], self.gradients.device)
        blocks = self.gradients.split(size)
        squares = torch.cat([_squared_lengths(block) for block in blocks])
        large = ~squares.isfinite()
        if large.any():  # in float64 no square of a finite float32 is
            squares[large] = self.gradients[large].double().square().sum(1)
        return squares, squares

    def of(self, users: torch.Tensor) -> _Dense:
        """Of these users only."""
        return _Dense(self.gradients[users], self.kernel)

    def weighted_sums(self, weights: torch.Tensor) -> Iterator[torch.Tensor]:
        """Of shape (size,), for weights of shape (k,)."""
        yield _in_order(weights @ self.gradients, self.kernel)


@dataclass(frozen=True)
class _Products:
    """A weight's gradient of each user as a sum of outer products, sum_t g_t a_t^T, not formed.

    A bias is the weight of one more input that is always 1.

    The norm: ||sum_t g_t a_t^T||^2 = sum_st (g_s.g_t)(a_s.a_t). The terms may cancel. In float64
    that is wrong by about 1e-12 b^2 at most, where b = sum_t |g_t||a_t| bounds the norm; and the
    sum itself, in float32, by some 1e-7 b, or 2e-6 b where the products are such that hundreds are
    rounded alike. While a user's scale times b is at most 10 C, its clipped update is therefore no
    longer than C (1 + 2e-5). Users of whom more cancels are left to vmap, which measures the very
    numbers that it sums. So are users with inputs above 1e19, whose squares are too large for
    float32: a scaled g_t is wrong by 1e-45 an entry where it is hardly a float32, and a_t
    multiplies that. To 1e-26 an entry, which is little of a C of 1e-18, the least that
    `simulator.config` takes.

    Attributes:
        inputs: a, float32 of shape (k, groups, t, p).
        output_gradients: g, float32 of shape (k, groups, t, q).
        bias: whether there is one.
        kernel: see `_in_order`.
    """

    inputs: torch.Tensor
    output_gradients: torch.Tensor
    bias: bool
    kernel: tuple[int, int]

    def squared_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms, and b^2 or infinity for a user left to vmap: float64 of shape (k,)."""
        one = _squared_lengths(self.inputs, self.bias)
        other = _squared_lengths(self.output_gradients)
        if self.inputs.shape[2] == 1:
            norms = one.mul_(other).sum((1, 2))
            return norms, norms
        bounds = (one * other).sqrt_().sum(2).square_().sum(1)
        a, g = self.inputs.double(), self.output_gradients.double()
        return ((a @ a.mT + self.bias) * (g @ g.mT)).sum((1, 2, 3)).clamp_(min=0.0), bounds

    def of(self, users: torch.Tensor) -> _Products:
        """Of these users only."""
        return replace(
            self, inputs=self.inputs[users], output_gradients=self.output_gradients[users]
        )

    def weighted_sums(self, weights: torch.Tensor) -> Iterator[torch.Tensor]:
        """Of shape (groups * q * p,) and, of the bias, (groups * q,), for weights of shape (k,)."""
        scaled = self.output_gradients * weights[:, None, None, None]
        if scaled.shape[1] == 1:  # faster so
            total = scaled.flatten(0, 2).mT @ self.inputs.flatten(0, 2)
        else:
            g, a = (x.transpose(0, 1).flatten(1, 2) for x in (scaled, self.inputs))
            total = g.mT @ a
        yield _in_order(total.flatten(), self.kernel)
        if self.bias:
            yield scaled.sum((0, 2)).flatten()


Gradients = dict[tuple[str, ...], _Dense | _Products]
"""Users' gradients by the names of a layer's parameters."""


def _squared_lengths(vectors: torch.Tensor, more: float = 0.0) -> torch.Tensor:
    """Of the last axis and `more`, float64; of float32 too short by 4e-6 of it at most.

    On CPUs torch sums float32 in cascades (64 terms at most one after the other), and much faster
    than in float64; elsewhere it promises no order. Squares too small for float32 are made up for;
    one too large makes the sum infinite.
    """
    exact = None if vectors.device.type == "cpu" else torch.float64
    sums = vectors.square().sum(-1, dtype=exact).double()
    return sums.add_(more + vectors.shape[-1] * torch.finfo(vectors.dtype).tiny)


def _in_order(total: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    """A sum over users from (..., positions, channels), as it was computed, to channels first."""
    return total if kernel == (1, 1) else total.unflatten(0, (-1, *kernel)).mT.flatten()


def _names(model: nn.Module) -> dict[int, str]:
    """Of the parameters, by `id`, in the model's order."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


@torch.no_grad()
def _user_gradients(
    model: nn.Module,
    known: dict[int, str],
    features: torch.Tensor,
    labels: torch.Tensor,
    precision: Precision,
) -> Gradients:
    """Each user's gradient of its mean cross-entropy, from one forward and backward.

    Whatever their precision, the factors are taken as float32 numbers, of which the norm is then
    that of the gradient which is summed.

    Args:
        model, features, labels, precision: see `clipped_sum_of_updates`.
        known: `_names` of the model.

    Raises:
        Unsupported: a parameter is used twice, or with a tensor that is none.
    """
    users, records = labels.shape
    exact = features.dtype
    with torch.enable_grad():
        with _Tape() as tape, _autocast(features.device, precision):
            scores = model(features.flatten(0, 1)).to(exact)
        loss = functional.cross_entropy(scores, labels.flatten(), reduction="sum") / records
    output_gradients = torch.autograd.grad(loss, [output for *_, output in tape.calls])
    gradients: Gradients = {}
    used: set[str | None] = {None}
    for (layer, arguments, _), output_gradient in zip(tape.calls, output_gradients, strict=True):
        inputs, *parameters = arguments
        for tensors, part in layer(users, output_gradient.to(exact), inputs.to(exact), *parameters):
            names = tuple(known.get(id(tensor)) for tensor in tensors if tensor is not None)
            if any(names):
                if used.intersection(names):
                    raise Unsupported(f"{names}: used twice, or beside a computed one")
                used.update(names)
                gradients[names] = part
    return gradients


def _autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager:
    """Lets torch choose where to compute in bfloat16; threads share no cache."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class _Tape(TorchFunctionMode):
    """Keeps the calls of layers with parameters, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable, tuple, GradientEdge]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls `func`; of a layer keeps arguments and, before any change in place, the output."""
        output = func(*args, **(kwargs or {}))
        if func in _LAYERS and output.requires_grad:
            layer = functools.partial(_LAYERS[func], **(kwargs or {}))
            self.calls.append((layer, args, get_gradient_edge(output)))
        return output


def _linear(users, g, x, weight, bias=None):
    g = g.reshape(users, 1, -1, g.shape[-1])
    yield from _weight(weight, bias, x.reshape(users, 1, -1, x.shape[-1]), g)


def _conv2d(users, g, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    height, width = weight.shape[2:]
    (step_h, step_w), (space_h, space_w) = _two(stride), _two(dilation)
    edges = _edges(padding, weight.shape[2:], dilation)
    x = functional.pad(x, edges) if any(edges) else x
    # Patches in two steps, columns first, so that what is copied lies in long pieces.
    x = x.unflatten(1, (groups, -1)).unflatten(0, (users, -1))  # k, r, groups, c, rows, columns
    x = x.unfold(5, (width - 1) * space_w + 1, step_w)[..., ::space_w]
    x = x.permute(0, 2, 1, 5, 4, 6, 3).contiguous()  # k, groups, r, w, rows, width, c
    x = x.unfold(4, (height - 1) * space_h + 1, step_h)[..., ::space_h]
    x = x.permute(0, 1, 2, 3, 4, 7, 5, 6)  # k, groups, r, w, h, height, width, c
    g = g.unflatten(1, (groups, -1)).unflatten(0, (users, -1)).permute(0, 2, 1, 5, 4, 3)
    kernel = height * width, weight.shape[1]
    yield from _weight(weight, bias, x, g.flatten(2, 4), kernel)


def _group_norm(users, g, x, num_groups, weight=None, bias=None, eps=1e-5):
    normal = functional.group_norm(x, num_groups, eps=eps)
    shape = (users, len(x) // users, x.shape[1], -1)
    yield (weight,), _Dense((g * normal).reshape(shape).sum((1, 3)))
    yield (bias,), _Dense(g.reshape(shape).sum((1, 3)))


def _layer_norm(users, g, x, normalized_shape, weight=None, bias=None, eps=1e-5):
    normal = functional.layer_norm(x, normalized_shape, eps=eps)
    shape = (users, -1, math.prod(normalized_shape))
    yield (weight,), _Dense((g * normal).reshape(shape).sum(1))
    yield (bias,), _Dense(g.reshape(shape).sum(1))


_LAYERS = {
    functional.linear: _linear,
    functional.conv2d: _conv2d,
    functional.group_norm: _group_norm,
    functional.layer_norm: _layer_norm,
}
"""What gives, for k users, a call's output gradient and its arguments, its parameters' parts."""


def _weight(weight, bias, inputs, output_gradients, kernel=(1, 1)):
    """The form that takes fewer operations; float64, in which products are measured, counts twice.

    So a materialised gradient is never more than twice as large as what it was made from.

    Args:
        weight, bias: the parameters.
        inputs: a view of shape (k, groups, r, w, h, height, width, c), or (k, groups, t, p).
        output_gradients: shape (k, groups, t, q).
        kernel: see `_in_order`.
    """
    users, groups, t, q = output_gradients.shape
    p = inputs.shape[1:].numel() // (groups * t)
    if t == 1 or 2 * t * (p + q) < p * q:
        inputs = inputs.reshape(users, groups, t, p)
        yield (weight, bias), _Products(inputs, output_gradients, bias is not None, kernel)
        return
    gradients = inputs.new_empty(users, groups, q, p)
    size = _users_at_a_time(groups * t * p, inputs.device)
    for a, g, out in zip(
        *(x.split(size) for x in (inputs, output_gradients, gradients)), strict=True
    ):
        torch.matmul(g.mT, a.reshape(len(a), groups, t, p), out=out)
    yield (weight,), _Dense(gradients.flatten(1), kernel)
    yield (bias,), _Dense(output_gradients.sum(2).flatten(1))


def _users_at_a_time(size: int, device: torch.device) -> int:
    """Of how many users `size` numbers each stay in a core's cache; a GPU wants more at a time."""
    return max(1, (2**18 if device.type == "cpu" else 2**26) // (size + 1))


def _two(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _edges(padding, kernel, dilation) -> list[int]:
    """As `functional.pad` takes them: the last axis first, before and after."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [space * (size - 1) for size, space in zip(kernel, _two(dilation), strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in _two(padding)]
    return [side for pair in reversed(sides) for side in pair]
