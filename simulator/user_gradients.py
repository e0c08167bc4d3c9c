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

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

_LARGEST_FLOAT32 = torch.finfo(torch.float32).max
_CANCELLATION = 100.0  # see `_Products`
_LARGEST_INPUT = 1e25  # likewise


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
) -> torch.Tensor:
    """The sum over k users of `clients.clip` of `clients.local_update`.

    `model` keeps its parameters; threads may share it.

    Args:
        method: what `fastest_method` gave for this model and training.
        model: the round's model, in training mode.
        features: shape (k, r, ...), r records of each of k users.
        labels: int64 of shape (k, r).
        training: one gradient, or local epochs.
        orders: for local epochs: the records' order by epoch and user, int64 of shape (e, k, r).
        clip_norm: C.

    Returns:
        float64 of shape (d,).
    """
    if method == "vmap":
        own = copy.deepcopy(model)  # functional_call exchanges a model's parameters meanwhile
        return clipped_sum(user_updates(own, features, labels, training, orders), clip_norm)
    parts = list(_user_gradients(model, features, labels).values())
    norms, bounds = _lengths(parts)
    scales = _scales(norms, clip_norm)
    sure = (scales * bounds <= _CANCELLATION * clip_norm) & (bounds <= _LARGEST_FLOAT32)
    if sure.all():
        return _weighted_sum(parts, scales)
    total = _weighted_sum([part.of(sure) for part in parts], scales[sure])
    doubtful = norms.isfinite() & ~sure
    if not doubtful.any():
        return total
    few = features[doubtful], labels[doubtful], training, None, clip_norm
    return total + clipped_sum_of_updates("vmap", model, *few)


def fastest_method(
    model: nn.Module, input_shape: tuple[int, ...], classes: int, training: LocalTraining
) -> Method:
    """Book-keeping where it does this model, else vmap; found by trying both.

    Parameters and records are random, those of the users of very different size, and the two are
    compared in float64: a model that mixes the records of a batch, or uses a parameter elsewhere
    than in its layer, shows it.

    Args:
        model: in training mode; it stays as it is.
        input_shape: shape of one record.
        classes: number of classes.
        training: one gradient, or local epochs, which only vmap does.

    Raises:
        RuntimeError: not even vmap does this model.
    """
    users, records = 4, 2
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(users, records, *input_shape, generator=generator)
    features *= torch.logspace(-2, 1, users).reshape(-1, *[1] * (features.dim() - 1))
    labels = torch.randint(classes, (users, records), generator=generator)
    orders = torch.arange(records).expand(training.local_epochs, users, records)
    model = copy.deepcopy(model)
    user_updates(model, features, labels, training, orders)
    if training.algorithm != "fedsgd":
        return "vmap"
    try:
        return "book-keeping" if _agrees(model.double(), features.double(), labels) else "vmap"
    except Exception:  # whatever a model does that the layers' formulas do not expect
        return "vmap"


def _agrees(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> bool:
    """Whether book-keeping gives each user's gradient at random parameters, and no state is kept.

    Threads share a model under book-keeping, so its forward must not write to it.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    before = [dict(vars(module)) for module in model.modules()]
    kept = _user_gradients(model, features, labels)
    if before != [vars(module) for module in model.modules()]:
        return False
    alone = torch.eye(len(labels), dtype=features.dtype)
    gradients = [torch.stack([part.weighted_sum(one) for one in alone]) for part in kept.values()]
    updates = user_updates(model, features, labels, LocalTraining())
    return all(
        torch.allclose(ours, update.flatten(1), rtol=1e-6, atol=1e-9)
        for ours, update in zip(gradients, updates.values(), strict=True)
    )


def user_updates(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor | None = None,
) -> Tensors:
    """`clients.local_update` of k users at once, by vmap; `model` keeps its parameters.

    Args:
        model: the round's model; nobody else's meanwhile.
        features: shape (k, r, ...), r records of each of k users.
        labels: int64 of shape (k, r).
        training: one gradient, or local epochs.
        orders: for local epochs: the records' order by epoch and user, int64 of shape (e, k, r).

    Returns:
        float32 of shape (k, ...) for every parameter.

    Raises:
        RuntimeError: the model draws random numbers, or torch cannot vectorise it.
    """
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: Tensors, records: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (records,)), targets)

    together = vmap(grad(loss), in_dims=(None, 0, 0))  # faster: everybody's parameters the same
    if training.algorithm == "fedsgd":
        return together(start, features, labels)
    apart = vmap(grad(loss))
    everyone = torch.arange(len(labels))[:, None]
    local = start
    for order in orders:
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
        float64 of shape (d,).
    """
    parts = [_Dense(update.flatten(1)) for update in updates.values()]
    norms, _ = _lengths(parts)
    finite = norms.isfinite()
    if not finite.all():
        parts, norms = [part.of(finite) for part in parts], norms[finite]
    return _weighted_sum(parts, _scales(norms, clip_norm))


def _lengths(parts: Sequence[_Dense | _Products]) -> tuple[torch.Tensor, torch.Tensor]:
    """Users' norms over all parts, and their bounds: float64 of shape (k,) each."""
    norms, bounds = zip(*(part.squared_lengths() for part in parts), strict=True)
    return sum(norms).sqrt(), sum(bounds).sqrt()


def _scales(norms: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What each user's update is multiplied by; of a zero update: C / 0 = inf, so 1."""
    return (clip_norm / norms).clamp(max=1.0)


def _weighted_sum(parts: Sequence[_Dense | _Products], scales: torch.Tensor) -> torch.Tensor:
    """The sum over users, float64 of shape (d,)."""
    rounded = scales.float()  # down: among the smallest float32 the nearest may be far above
    scales = torch.where(rounded > scales, rounded.nextafter(torch.zeros(())), rounded)
    sums = [part.weighted_sum(scales) for part in parts]
    return torch.cat(sums, out=torch.empty(sum(map(len, sums)), dtype=torch.float64))


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
        # In float64 no square of a finite float32 overflows: a norm is finite if its update is.
        norms = torch.empty(len(self.gradients), dtype=torch.float64)
        size = _users_at_a_time(self.gradients.shape[1])
        for block, out in zip(self.gradients.split(size), norms.split(size), strict=True):
            torch.linalg.vector_norm(block, dim=1, dtype=torch.float64, out=out)
        squares = norms.square_()
        return squares, squares

    def of(self, users: torch.Tensor) -> _Dense:
        """Of these users only."""
        return _Dense(self.gradients[users], self.kernel)

    def weighted_sum(self, scales: torch.Tensor) -> torch.Tensor:
        """Of shape (size,), for float32 scales of shape (k,)."""
        return _in_order(scales @ self.gradients, self.kernel)


@dataclass(frozen=True)
class _Products:
    """A weight's gradient of each user as a sum of outer products, sum_t g_t a_t^T, not formed.

    Its norm: ||sum_t g_t a_t^T||^2 = sum_st (g_s.g_t)(a_s.a_t). The terms may cancel. In float64
    that is wrong by about 1e-12 b^2 at most, where b = sum_t |g_t||a_t| bounds the norm; and the
    sum itself, in float32, by about 1e-7 b. While a user's scale times b is at most 100 C, its
    clipped update is therefore no longer than C (1 + 1e-5). Users of whom more cancels are left
    to vmap, which measures the very numbers that it sums. So are users with inputs above 1e25: a
    scaled g_t is wrong by 1e-45 an entry where it is hardly a float32, and a_t multiplies that.

    Attributes:
        inputs: a, float32 of shape (k, groups, t, p).
        output_gradients: g, float32 of shape (k, groups, t, q).
        kernel: see `_in_order`.
    """

    inputs: torch.Tensor
    output_gradients: torch.Tensor
    kernel: tuple[int, int] = (1, 1)

    def squared_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms, and b^2 or infinity for a user left to vmap: float64 of shape (k,)."""
        factors = self.inputs, self.output_gradients
        one, other = (torch.linalg.vector_norm(x, dim=3, dtype=torch.float64) for x in factors)
        bounds = (one * other).sum(2).square().sum(1)
        norms = bounds
        bounds = bounds.where(one.amax((1, 2)) <= _LARGEST_INPUT, math.inf)
        if self.inputs.shape[2] == 1:
            return norms, bounds
        one, other = (x @ x.mT for x in map(torch.Tensor.double, factors))
        return (one * other).sum((1, 2, 3)).clamp(min=0.0), bounds

    def of(self, users: torch.Tensor) -> _Products:
        """Of these users only."""
        return _Products(self.inputs[users], self.output_gradients[users], self.kernel)

    def weighted_sum(self, scales: torch.Tensor) -> torch.Tensor:
        """Of shape (groups * q * p,), for float32 scales of shape (k,)."""
        scaled = self.output_gradients * scales[:, None, None, None]
        g, a = (x.transpose(0, 1).flatten(1, 2) for x in (scaled, self.inputs))
        return _in_order((g.mT @ a).flatten(), self.kernel)


def _in_order(total: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    """A sum over users from (..., positions, channels), as it was computed, to channels first."""
    return total.unflatten(0, (-1, *kernel)).mT.flatten()


@torch.no_grad()
def _user_gradients(
    model: nn.Module, features: torch.Tensor, labels: torch.Tensor
) -> dict[str, _Dense | _Products]:
    """Each user's gradient of its mean cross-entropy, by parameter, from one forward and backward.

    Raises:
        Unsupported: a parameter is not used exactly once, in a layer of `_LAYERS`.
    """
    users, records = labels.shape
    with torch.enable_grad(), _Tape() as tape:
        scores = model(features.flatten(0, 1))
        loss = functional.cross_entropy(scores, labels.flatten(), reduction="sum") / records
    output_gradients = torch.autograd.grad(loss, [output for *_, output in tape.calls])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gradients: dict[str, _Dense | _Products] = {}
    for (layer, arguments, _), output_gradient in zip(tape.calls, output_gradients, strict=True):
        for parameter, part in layer(users, output_gradient, *arguments):
            name = names.get(id(parameter))
            if name in gradients:
                raise Unsupported(f"{name} is used twice")
            if name:
                gradients[name] = part
    return {name: gradients[name] for name in names.values()}


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
    yield weight, _weight(x.reshape(users, 1, -1, x.shape[-1]), g)
    yield bias, _Dense(g.sum((1, 2)))


def _conv2d(users, g, x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
    x = x.contiguous(memory_format=torch.channels_last)  # a patch is then few long pieces
    x = functional.pad(x, _edges(padding, weight.shape[2:], dilation))
    for axis, (size, step, space) in enumerate(
        zip(weight.shape[2:], _two(stride), _two(dilation), strict=True)
    ):
        x = x.unfold(2 + axis, (size - 1) * space + 1, step)[..., ::space]
    # from (k r, groups c, h, w, height, width) to (k, groups, r, h, w, height, width, c)
    x = x.unflatten(1, (groups, -1)).unflatten(0, (users, -1)).permute(0, 2, 1, 4, 5, 6, 7, 3)
    g = g.unflatten(1, (groups, -1)).unflatten(0, (users, -1)).permute(0, 2, 1, 4, 5, 3)
    yield weight, _weight(x, g.flatten(2, 4), (weight.shape[2:].numel(), weight.shape[1]))
    yield bias, _Dense(g.sum((2, 3, 4)).flatten(1))


def _group_norm(users, g, x, num_groups, weight=None, bias=None, eps=1e-5):
    normal = functional.group_norm(x, num_groups, eps=eps)
    shape = (users, len(x) // users, x.shape[1], -1)
    yield weight, _Dense((g * normal).reshape(shape).sum((1, 3)))
    yield bias, _Dense(g.reshape(shape).sum((1, 3)))


def _layer_norm(users, g, x, normalized_shape, weight=None, bias=None, eps=1e-5):
    normal = functional.layer_norm(x, normalized_shape, eps=eps)
    shape = (users, -1, math.prod(normalized_shape))
    yield weight, _Dense((g * normal).reshape(shape).sum(1))
    yield bias, _Dense(g.reshape(shape).sum(1))


_LAYERS = {
    functional.linear: _linear,
    functional.conv2d: _conv2d,
    functional.group_norm: _group_norm,
    functional.layer_norm: _layer_norm,
}
"""What gives, for k users, a call's output gradient and its arguments, each parameter's part."""


def _weight(
    inputs: torch.Tensor, output_gradients: torch.Tensor, kernel: tuple[int, int] = (1, 1)
) -> _Dense | _Products:
    """The form that takes fewer operations; float64, in which products are measured, counts twice.

    So a materialised gradient is never more than twice as large as what it was made from.

    Args:
        inputs: a view of shape (k, groups, r, h, w, height, width, c), or (k, groups, t, p).
        output_gradients: shape (k, groups, t, q).
        kernel: see `_in_order`.
    """
    users, groups, t, q = output_gradients.shape
    p = inputs[0].numel() // (groups * t)
    if t == 1 or 2 * t * (p + q) < p * q:
        return _Products(inputs.reshape(users, groups, t, p), output_gradients, kernel)
    gradients = inputs.new_empty(users, groups, q, p)
    size = _users_at_a_time(groups * t * p)
    for a, g, out in zip(
        *(x.split(size) for x in (inputs, output_gradients, gradients)), strict=True
    ):
        torch.matmul(g.mT, a.reshape(len(a), groups, t, p), out=out)
    return _Dense(gradients.flatten(1), kernel)


def _users_at_a_time(size: int) -> int:
    """Of how many users `size` numbers each stay in a core's cache."""
    return max(1, 2**17 // (size + 1))


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
