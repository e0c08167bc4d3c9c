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
        index: the places of their records among the n, int64 of shape (b, r). A user with fewer
            than r records gets its own again: padding.
        total: n.
        is_padded: whether a user may have padding.
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
        """Cuts all k users into buckets.

        Args:
            sizes: how many records each user has, int of shape (k,).
            device: of the buckets' tensors.
            most: how many users a bucket has at most. Default: any number.
            batch: the most records of one step. A user with more takes several steps, and is
                sorted as if it had `batch` records. Default: no limit.
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
        """The bucket of some of its users only; `users` is bool of shape (b,)."""
        return replace(
            self, users=self.users[users], sizes=self.sizes[users], index=self.index[users]
        )

    @property
    def is_all(self) -> bool:
        """Whether these are all records, in their order."""
        return self.index.numel() == self.total and not self.is_padded

    def real(self) -> torch.Tensor:
        """Which places are not padding: bool of shape (b, r)."""
        return torch.arange(self.index.shape[1], device=self.index.device) < self.sizes[:, None]

    def of(self, given: torch.Tensor) -> torch.Tensor:
        """The users' rows of a tensor of shape (n, ...): shape (b, r, ...)."""
        shape = *self.index.shape, *given.shape[1:]
        return given.reshape(shape) if self.is_all else given[self.index]

    def flat(self, given: _Given, padding: float | None = None) -> _Given | torch.Tensor:
        """The users' rows of a layer's tensor, one row after another.

        Args:
            given: a tensor of shape (n m, ...), in which every record has m rows. Anything else,
                such as a parameter, is returned as it is.
            padding: replaces all numbers in rows of padding. Default: they stay.

        Returns:
            Shape (b r m, ...).
        """
        if self.is_all or not isinstance(given, torch.Tensor) or isinstance(given, nn.Parameter):
            return given
        if given.dim() == 0 or len(given) % self.total:
            return given
        rows = given.reshape(self.total, -1, *given.shape[1:])[self.index.flatten()]
        if padding is not None and self.is_padded:
            rows[~self.real().flatten()] = padding
        return rows.flatten(0, 1)
