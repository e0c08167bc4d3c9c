"""Many users' gradients, as book-keeping holds them: their norms, and their clipped sum.

A layer's gradients are held materialised for each user (`Dense`), or as the factors they are
products of (`Products`), whichever takes fewer operations; an embedding's as its rows (`Rows`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import special

from shufl.protocol.mechanisms import LdpSgd

FLOAT32 = torch.finfo(torch.float32)
"""What the type of gradients can hold."""

_SQUARES = 64  # the most squares that are summed in float32

Tensors = dict[str, torch.Tensor]
"""Parameters by name, or one such tensor for each of k users: shape (k, ...)."""


@dataclass(frozen=True)
class Dense:
    """A parameter's gradient of each user, materialised.

    Attributes:
        gradients: float32 of shape (k, size).
        kernel: see `_in_order`.
    """

    gradients: torch.Tensor
    kernel: tuple[int, int] = (1, 1)

    def squared_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Squared norms, float64 of shape (k,), twice: as measured and as bounded."""
        squares = squared_lengths_of(self.gradients)
        if not squares.sum().isfinite():  # in float64 every square of a finite float32 is
            large = ~squares.isfinite()
            squares[large] = self.gradients[large].double().square().sum(1)
        return squares, squares

    def of(self, users: torch.Tensor) -> Dense:
        """The same gradients of these users only: bool of shape (k,)."""
        return Dense(self.gradients[users], self.kernel)

    def weighted_sums(self, weights: torch.Tensor) -> Iterator[torch.Tensor]:
        """The sum over users with weights of shape (k,), of shape (size,)."""
        yield _in_order(weights @ self.gradients, self.kernel)


@dataclass(frozen=True)
class Products:
    """A weight's gradient of each user as a sum of outer products, sum_t g_t a_t^T, not formed.

    A bias is the weight of one more input that is always 1.

    The norm is ||sum_t g_t a_t^T||^2 = sum_st (g_s.g_t)(a_s.a_t), whose terms may cancel. Let b =
    sum_t |g_t||a_t|, which bounds the norm. In float64 the squared norm is off by at most about
    1e-12 b^2. The sum itself, in float32, is off by some 1e-7 b, or by 2e-6 b where hundreds of
    products are rounded alike. While a user's scale times b is at most 10 C, its clipped update is
    therefore no longer than C (1 + 2e-5). Users for whom more cancels are left to vmap, which
    measures the very numbers that it sums. So are users with inputs above 1e19, whose squared
    length float32 could not hold. A subnormal scaled g_t is off by up to 1e-45; times a_t ≤ 1e19
    that is 1e-26 per entry, far below 1e-18, the least C that `shufl.learning.config` takes.

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
        one = squared_lengths_of(self.inputs, self.bias).float()  # or infinity
        other = squared_lengths_of(self.output_gradients)
        if self.inputs.shape[2] == 1:
            norms = (one * other).sum((1, 2))
            return norms, norms
        bounds = (one * other).sqrt_().sum(2).square_().sum(1)
        a, g = self.inputs.double(), self.output_gradients.double()
        return ((a @ a.mT + self.bias) * (g @ g.mT)).sum((1, 2, 3)).clamp_(min=0.0), bounds

    def of(self, users: torch.Tensor) -> Products:
        """The same gradients of these users only."""
        return replace(
            self, inputs=self.inputs[users], output_gradients=self.output_gradients[users]
        )

    def weighted_sums(self, weights: torch.Tensor) -> Iterator[torch.Tensor]:
        """The sums over users with weights of shape (k,).

        The weight's is of shape (groups * q * p,), and the bias's of shape (groups * q,).
        """
        scaled = self.output_gradients * weights[:, None, None, None]
        g, a = (x.transpose(0, 1).flatten(1, 2) for x in (scaled, self.inputs))
        yield _in_order((g.mT @ a).flatten(), self.kernel)
        if self.bias:
            yield scaled.sum((0, 2)).flatten()


@dataclass(frozen=True)
class Rows:
    """An embedding's gradient of each user: the rows of its own tokens; all others are zero.

    Attributes:
        users: k.
        number: how many tokens the embedding has.
        owners, tokens: each row's user and token, int64 of shape (u,); no pair comes twice.
        rows: float32 of shape (u, q).
    """

    users: int
    number: int
    owners: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of_tokens(cls, tokens: torch.Tensor, output_gradients: torch.Tensor, number: int) -> Rows:
        """Sums the gradients of a user's equal tokens: tokens (k, t), gradients (k, t, q)."""
        users = len(tokens)
        keys = tokens + number * torch.arange(users, device=tokens.device)[:, None]
        keys, places = keys.unique(return_inverse=True)
        rows = output_gradients.new_zeros(len(keys), output_gradients.shape[2])
        rows.index_add_(0, places.flatten(), output_gradients.flatten(0, 1))
        return cls(users, number, keys // number, keys % number, rows)

    def squared_lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Dense`."""
        squares = self.rows.double().square().sum(1)
        squares = squares.new_zeros(self.users).index_add_(0, self.owners, squares)
        return squares, squares

    def of(self, users: torch.Tensor) -> Rows:
        """The same gradients of these users only."""
        kept = users[self.owners]
        owners = users.cumsum(0)[self.owners[kept]] - 1
        return Rows(int(users.sum()), self.number, owners, self.tokens[kept], self.rows[kept])

    def weighted_sums(self, weights: torch.Tensor) -> Iterator[torch.Tensor]:
        """The sum over users with weights of shape (k,), of shape (number * q,).

        It is added in float64, since all users may have one token.
        """
        scaled = self.rows.double() * weights[self.owners, None]
        total = scaled.new_zeros(self.number, scaled.shape[1])
        yield total.index_add_(0, self.tokens, scaled).flatten().to(weights.dtype)


Gradients = dict[tuple[str, ...], Dense | Products | Rows]
"""Users' gradients by the names of a layer's parameters."""


def squared_lengths_of(vectors: torch.Tensor, more: float = 0.0) -> torch.Tensor:
    """Squared lengths along the last axis, plus `more`, as float64.

    For float32 vectors the relative error is at most 4e-6, whatever torch's summation order: up to
    64 squares at a time are summed in float32, which is much faster, and those sums in float64.
    An addend bounds the squares that are too small for float32. Squares that are too large may give
    infinity.
    """
    size = vectors.shape[-1]
    if size > _SQUARES:
        divisors = (each for each in range(_SQUARES, _SQUARES // 2, -1) if size % each == 0)
        piece = next(divisors, _SQUARES)
        whole = size - size % piece
        pieces = vectors[..., :whole].unflatten(-1, (-1, piece))
        lengths = torch.linalg.vector_norm(pieces, dim=-1)
        vectors = lengths if whole == size else torch.cat([lengths, vectors[..., whole:]], dim=-1)
    sums = torch.linalg.vector_norm(vectors, dim=-1, dtype=torch.float64).square_()
    return sums.add_(more + size * FLOAT32.tiny)


def _in_order(total: torch.Tensor, kernel: tuple[int, int]) -> torch.Tensor:
    """Brings a sum over users from channels last, (..., positions, channels), to channels first."""
    return total if kernel == (1, 1) else total.unflatten(0, (-1, *kernel)).mT.flatten()


def only(gradients: Gradients, users: torch.Tensor) -> Gradients:
    """The same gradients of these users only."""
    return {names: part.of(users) for names, part in gradients.items()}


def lengths(gradients: Gradients) -> tuple[torch.Tensor, torch.Tensor]:
    """Users' norms over all parameters, and bounds of them: float64 of shape (k,).

    If nothing can cancel, norms and bounds are the same object.
    """
    squares, bounds = zip(*(part.squared_lengths() for part in gradients.values()), strict=True)
    norms = functools.reduce(torch.add, squares).sqrt()
    if all(map(operator.is_, squares, bounds)):
        return norms, norms
    return norms, functools.reduce(torch.add, bounds).sqrt()


@dataclass(frozen=True)
class Clipping:
    """The factor of a user's update in the sum: min(1, C/norm)."""

    clip_norm: float

    def scales(self, norms: torch.Tensor) -> torch.Tensor:
        """The factors of updates with these norms: 1 for a zero update, as C / 0 is infinite."""
        return (self.clip_norm / norms).clamp(max=1.0)

    def only(self, users: torch.Tensor) -> Clipping:
        """The clipping of some users only; `users` is bool of shape (k,), or their places."""
        return self


@dataclass(frozen=True)
class RandomSides(Clipping):
    """The factor of an update in a report of `LdpSgd`, along the update's direction.

    Attributes:
        bias: t of the mechanism.
        lengths: B |<v, u>| for the report B v and the update's direction u, float64 of shape (k,).
        coins: uniform draws, which say whether v is on the update's side, shape (k,).
    """

    bias: float
    lengths: torch.Tensor
    coins: torch.Tensor

    @classmethod
    def drawn(
        cls, mechanism: LdpSgd, draws: np.ndarray, dimension: int, device: torch.device
    ) -> RandomSides:
        """The factors from two N(0, 1) draws for each of k users, shape (k, 2)."""
        first, second = draws.astype(float).T
        given = mechanism.lengths_along(first, dimension), special.ndtr(second)
        there = (torch.from_numpy(each).to(device) for each in given)
        return cls(mechanism.clip_norm, mechanism.bias, *there)

    def scales(self, norms: torch.Tensor) -> torch.Tensor:
        """See `Clipping`; a zero update has no direction."""
        right = self.coins < 0.5 * (1.0 + self.bias * (norms / self.clip_norm).clamp(max=1.0))
        along = torch.where(right, self.lengths, -self.lengths)
        return torch.where(norms > 0.0, along / norms, 0.0)

    def only(self, users: torch.Tensor) -> RandomSides:
        """See `Clipping`."""
        return replace(self, lengths=self.lengths[users], coins=self.coins[users])


def scaled_sum(gradients: Gradients, scales: torch.Tensor, order: Iterable[str]) -> torch.Tensor:
    """The sum over users for float64 scales, float32 of shape (d,), the parameters in order."""
    # Scales are rounded down: among the smallest float32 the nearest one may be far above.
    rounded = scales.float()
    scales = torch.where(rounded > scales, rounded.nextafter(torch.zeros_like(rounded)), rounded)
    return weighted_sum(gradients, scales, order)


def weighted_sum(gradients: Gradients, weights: torch.Tensor, order: Iterable[str]) -> torch.Tensor:
    """As `scaled_sum`, for weights of the gradients' own type."""
    sums: Tensors = {}
    for names, part in gradients.items():
        sums.update(zip(names, part.weighted_sums(weights), strict=True))
    return torch.cat([sums[name] for name in order])


def users_at_a_time(size: int, device: torch.device) -> int:
    """How many users, with `size` numbers each, a core's cache holds at a time.

    A GPU takes more at a time.
    """
    return max(1, (2**18 if device.type == "cpu" else 2**26) // (size + 1))
