"""Users with unequally many records, in groups that one tensor holds with little padding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch
from torch import nn

_RATIO = 1.4  # of the most records of a bucket's users to the fewest, usually

_Given = TypeVar("_Given")


@dataclass(frozen=True)
class Bucket:
    """Some of k users, whose n records lie one user after another.

    Attributes:
        users: the places of b users among the k, int64 of shape (b,).
        sizes: how many records each of them has, int64 of shape (b,).
        index: their records' places among the n, int64 of shape (b, r). Who has fewer than r gets
            its own records again: padding.
        total: n.
        is_padded: whether somebody may have padding.
    """

    users: torch.Tensor
    sizes: torch.Tensor
    index: torch.Tensor
    total: int
    is_padded: bool

    @classmethod
    def cut(
        cls,
        sizes: np.ndarray,
        device: torch.device | str = "cpu",
        most: int | None = None,
        batch: int | None = None,
    ) -> list[Bucket]:
        """Buckets of all users with so many records, int of shape (k,).

        A bucket has `most` users at most, where that is given. Whoever has a `batch` of records or
        more counts as having a batch, where that is given: they take several steps.
        """
        starts = sizes.cumsum() - sizes
        order = sizes.argsort(kind="stable")
        steps = sizes if batch is None else np.minimum(sizes, batch)
        cuts, least = [0], 0
        for place, size in enumerate(steps[order].tolist()):
            if place and (size > _RATIO * least or place - cuts[-1] == most):
                cuts.append(place)
            if cuts[-1] == place:
                least = size
        found = []
        for users in np.split(order, cuts[1:]):
            own = sizes[users][:, None]
            index = starts[users][:, None] + np.arange(own.max()) % own
            places, many, rows = (
                torch.from_numpy(each).to(device) for each in (users, own[:, 0], index)
            )
            found.append(cls(places, many, rows, int(sizes.sum()), bool(own.min() < own.max())))
        return found

    def only(self, users: torch.Tensor) -> Bucket:
        """The same of some of its users only: bool of shape (b,)."""
        return replace(
            self, users=self.users[users], sizes=self.sizes[users], index=self.index[users]
        )

    @property
    def is_all(self) -> bool:
        """Whether these are all records, in their order."""
        return self.index.numel() == self.total and not self.is_padded

    def real(self) -> torch.Tensor:
        """What is no padding: bool of shape (b, r)."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.sizes[:, None]

    def of(self, given: torch.Tensor) -> torch.Tensor:
        """The users' rows of something of shape (n, ...): shape (b, r, ...)."""
        shape = *self.index.shape, *given.shape[1:]
        return given.reshape(shape) if self.is_all else given[self.index]

    def flat(self, given: _Given, padding: float | None = None) -> _Given | torch.Tensor:
        """The users' rows of a layer's tensor, one row after another; anything else as it is.

        Of a tensor of shape (n m, ...), in which every record has m rows: shape (b r m, ...).
        `padding` is what replaces all numbers of what is padding; None: nothing.
        """
        if self.is_all or not isinstance(given, torch.Tensor) or isinstance(given, nn.Parameter):
            return given
        if given.dim() == 0 or len(given) % self.total:
            return given
        rows = given.reshape(self.total, -1, *given.shape[1:])[self.index.flatten()]
        if padding is not None and self.is_padded:
            rows[~self.real().flatten()] = padding
        return rows.flatten(0, 1)
