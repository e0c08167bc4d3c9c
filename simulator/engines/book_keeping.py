"""Each user's gradient of its loss by book-keeping: one forward and one backward for all users.

While the model computes its scores, `_Tape` keeps the inputs of each layer. One backward then gives
the gradients of the layers' outputs. From the two, a formula for the kind of layer gives every
user's gradient of the layer's parameters.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shufl.learning import Loss, SeededDropout, in_type, unfolded_attention
from shufl.learning.config import Precision
from shufl.learning.data.partition import Together
from shufl.learning.parameters import trained
from shufl.simulator.engines.buckets import Bucket
from shufl.simulator.engines.gradient_forms import Dense, Gradients, Products, Rows, users_at_a_time

_T = torch.Tensor
_P = torch.Tensor | None  # a parameter, if there is one
_Parts = Iterator[tuple[tuple[_P, ...], Dense | Products | Rows]]
_Layer = Callable[..., _Parts]


class Unsupported(Exception):
    """Book-keeping cannot do this model."""


def names_of(model: nn.Module) -> dict[int, str]:
    """The trained parameters' names by their `id`, in the model's order."""
    return {id(parameter): name for name, parameter in trained(model).items()}


@torch.no_grad()
def gradients_of_users(
    model: nn.Module,
    records: Together,
    buckets: Sequence[Bucket],
    loss_of: Loss,
    masks: SeededDropout,
    precision: Precision,
) -> Iterator[Gradients]:
    """Each user's gradient of its mean loss, bucket by bucket, by one forward and one backward.

    Factors are converted to float32 first, so the norm is that of the gradient that is summed.

    Args:
        model, records: see `clipped_sum_of_updates`.
        buckets: of all users.
        loss_of: gives each record's loss.
        masks: the users' dropout.
        precision: what the model computes in.

    Raises:
        Unsupported: a layer uses a parameter that another call uses too, or uses one beside a
            tensor that is computed from others; or its first axis is not that of the records.
    """
    features, labels, _ = records
    exact, known = next(iter(trained(model).values())).dtype, names_of(model)
    shares = torch.empty(len(labels), dtype=exact, device=features.device)
    for bucket in buckets:
        shares[bucket.index] = bucket.sizes.to(exact).reciprocal()[:, None]
    with torch.enable_grad():
        with masks, _Tape(known) as tape, autocast(features.device, precision):
            outputs = in_type(exact, model(features.clone()))  # it may change them
        loss = loss_of(outputs, labels) @ shares
    output_gradients = torch.autograd.grad(loss, [output for *_, output in tape.calls])
    layers = []
    for (layer, arguments, _), output_gradient in zip(tape.calls, output_gradients, strict=True):
        inputs, *parameters = arguments
        inputs = inputs.to(exact) if inputs.is_floating_point() else inputs
        if len(output_gradient) % len(labels):
            raise Unsupported("a layer whose first axis is not that of the records")
        layers.append((layer, output_gradient.to(exact), inputs, parameters))
    for bucket in buckets:
        gradients: Gradients = {}
        used: set[str | None] = {None}
        for layer, output_gradient, inputs, parameters in layers:
            own = bucket.flat(output_gradient, 0.0), bucket.flat(inputs), *parameters
            for tensors, part in layer(len(bucket.users), *own):
                names = tuple(known.get(id(tensor)) for tensor in tensors if tensor is not None)
                if any(names):
                    if used.intersection(names):
                        raise Unsupported(f"{names}: used twice, or beside a computed one")
                    used.update(names)
                    gradients[tuple(filter(None, names))] = part
        yield gradients


def autocast(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager[Any]:
    """With bfloat16, lets torch choose what to compute in it; threads share no cache."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


class _Tape(TorchFunctionMode):
    """While entered, keeps every call of a layer with trained parameters that this thread makes."""

    def __init__(self, known: dict[int, str]) -> None:
        """`known` has the names of trained parameters by their `id`."""
        super().__init__()
        self._known = known
        self.calls: list[tuple[_Layer, tuple[Any, ...], GradientEdge]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls `func`; keeps a layer's arguments, and its output before any change in place."""
        if func is functional.multi_head_attention_forward:
            with self:  # torch has left this mode; entered again, it sees the linear layers
                if (made := unfolded_attention(args, kwargs or {})) is not None:
                    return made
        output = func(*args, **(kwargs or {}))
        given = *args, *(kwargs or {}).values()
        known = any(id(each) in self._known for each in given)
        if known and func in _LAYERS and output.requires_grad:
            layer = functools.partial(_LAYERS[func], **(kwargs or {}))
            self.calls.append((layer, args, get_gradient_edge(output)))
        return output


def _linear(users: int, g: _T, x: _T, weight: _T, bias: _P = None) -> _Parts:
    g = g.reshape(users, 1, -1, g.shape[-1])
    yield from _weight(weight, bias, x.reshape(users, 1, -1, x.shape[-1]), g)


def _conv2d(
    users: int,
    g: _T,
    x: _T,
    weight: _T,
    bias: _P = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> _Parts:
    height, width = weight.shape[2:]
    (step_h, step_w), (space_h, space_w) = _two(stride), _two(dilation)
    edges = _edges(padding, weight.shape[2:], dilation)
    x = functional.pad(x, edges) if any(edges) else x
    # Patches are made in two steps, columns first, so that memory is copied in long pieces.
    x = x.unflatten(1, (groups, -1)).unflatten(0, (users, -1))  # k, r, groups, c, rows, columns
    x = x.unfold(5, (width - 1) * space_w + 1, step_w)[..., ::space_w]
    x = x.permute(0, 2, 1, 5, 4, 6, 3).contiguous()  # k, groups, r, w, rows, width, c
    x = x.unfold(4, (height - 1) * space_h + 1, step_h)[..., ::space_h]
    x = x.permute(0, 1, 2, 3, 4, 7, 5, 6)  # k, groups, r, w, h, height, width, c
    g = g.unflatten(1, (groups, -1)).unflatten(0, (users, -1)).permute(0, 2, 1, 5, 4, 3)
    kernel = height * width, weight.shape[1]
    yield from _weight(weight, bias, x, g.flatten(2, 4), kernel)


def _group_norm(
    users: int, g: _T, x: _T, num_groups: int, weight: _P = None, bias: _P = None, eps: float = 1e-5
) -> _Parts:
    normal = functional.group_norm(x, num_groups, eps=eps)
    shape = (users, len(x) // users, x.shape[1], -1)
    yield (weight,), Dense((g * normal).reshape(shape).sum((1, 3)))
    yield (bias,), Dense(g.reshape(shape).sum((1, 3)))


def _layer_norm(
    users: int,
    g: _T,
    x: _T,
    normalized_shape: Any,
    weight: _P = None,
    bias: _P = None,
    eps: float = 1e-5,
) -> _Parts:
    normal = functional.layer_norm(x, normalized_shape, eps=eps)
    shape = (users, -1, math.prod(normalized_shape))
    yield (weight,), Dense((g * normal).reshape(shape).sum(1))
    yield (bias,), Dense(g.reshape(shape).sum(1))


def _embedding(
    users: int,
    g: _T,
    x: _T,
    weight: _T,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    **of_batch: Any,
) -> _Parts:
    if max_norm is not None or of_batch.get("scale_grad_by_freq"):
        raise Unsupported("an embedding that depends on the whole batch")
    tokens = x.reshape(users, -1).long()
    g = g.reshape(*tokens.shape, -1)
    if padding_idx is not None:
        g = g * (tokens != padding_idx % len(weight))[..., None]
    yield (weight,), Rows.of_tokens(tokens, g, len(weight))


def _sum(users: int, g: _T, *summands: Any) -> _Parts:
    for each in summands:
        if isinstance(each, nn.Parameter):
            shape = (1,) * (g.dim() - each.dim()) + tuple(each.shape)
            if shape[0] != 1:
                raise Unsupported("a parameter with an entry for each record of a batch")
            everywhere = [axis + 1 for axis, size in enumerate(shape) if size == 1]
            gradients = g.unflatten(0, (users, -1)).sum(everywhere)
            yield (each,), Dense(gradients.reshape(users, -1))


_SUMS = tuple(getattr(torch.Tensor, name) for name in ("add", "__add__", "__radd__", "expand"))
"""Functions that give all records one parameter, such as the embedding of a position."""

_LAYERS: dict[Any, _Layer] = {
    functional.linear: _linear,
    functional.conv2d: _conv2d,
    functional.group_norm: _group_norm,
    functional.layer_norm: _layer_norm,
    functional.embedding: _embedding,
    **dict.fromkeys(_SUMS, _sum),
}
"""The layers that book-keeping knows, each with the formula of its parameters' gradients.

A formula is called with the number of users, the gradient g of the layer's output, and the
arguments of the layer's call. It yields pairs: some of the layer's parameters, and every user's
gradients of them.
"""


def _weight(
    weight: _T, bias: _P, inputs: _T, output_gradients: _T, kernel: tuple[int, int] = (1, 1)
) -> _Parts:
    """Yields the gradients of a weight and a bias, in the form that takes fewer operations.

    Operations in float64, in which products are measured, count twice. A materialised gradient is
    therefore never more than twice as large as what it was made from.

    Args:
        inputs: a view of shape (k, groups, r, w, h, height, width, c), or (k, groups, t, p).
        output_gradients: shape (k, groups, t, q).
        kernel: see `_in_order`.
    """
    users, groups, t, q = output_gradients.shape
    p = inputs.shape[1:].numel() // (groups * t)
    if t == 1 or 2 * t * (p + q) < p * q:
        inputs = inputs.reshape(users, groups, t, p)
        yield (weight, bias), Products(inputs, output_gradients, bias is not None, kernel)
        return
    gradients = inputs.new_empty(users, groups, q, p)
    size = users_at_a_time(groups * t * p, inputs.device)
    parts = (x.split(size) for x in (inputs, output_gradients.mT, gradients))
    for a, g, out in zip(*parts, strict=True):
        torch.matmul(g, a.reshape(-1, groups, t, p), out=out)
    yield (weight,), Dense(gradients.flatten(1), kernel)
    yield (bias,), Dense(output_gradients.sum(2).flatten(1))


def _two(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _edges(padding: Any, kernel: torch.Size, dilation: Any) -> list[int]:
    """A convolution's padding as `functional.pad` takes it: last axis first, before and after."""
    if padding == "valid":
        padding = 0
    if padding == "same":
        totals = [space * (size - 1) for size, space in zip(kernel, _two(dilation), strict=True)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(side, side) for side in _two(padding)]
    return [side for pair in reversed(sides) for side in pair]
