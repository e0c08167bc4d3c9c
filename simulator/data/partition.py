"""Which training records belong to which user. Every scheme is a function of (labels, seed)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from shufl.simulator.data.datasets import Dataset
from shufl.simulator.data.features import check_digest, load_records
from shufl.simulator.section import ConfigError


def partition(
    labels: np.ndarray, users: int, scheme: str, seed: int, concentration: float = 0.5
) -> np.ndarray:
    """Deals records to users, the same number q to each; what is left over is not used.

    `iid`: a random permutation cut into equal parts. `by-label`: records sorted by label and cut
    into two shards a user, dealt at random (McMahan et al. 2017). `dirichlet`: each user draws its
    own label proportions from Dirichlet(concentration) and fills its quota by them (Hsu et al.
    2019). `repeated`: one record each; the records are dealt again and again in the same random
    order, so that there may be more users than records.

    A small concentration makes `dirichlet` skewed.

    Returns:
        int of shape (k, q), k at most users: row u modulo k has user u's record indices. Rows are
        disjoint; only under `repeated` may users share them.

    Raises:
        ConfigError: there are too few records.
    """
    quota = records_per_user(len(labels), users, scheme)
    rng = np.random.Generator(np.random.Philox(key=seed))
    order = rng.permutation(len(labels))
    if scheme == "repeated":
        return order[:users, None]
    if scheme == "by-label":
        ordered = order[np.argsort(labels[order], kind="stable")]
        shards = ordered[: users * quota].reshape(2 * users, quota // 2)
        return rng.permutation(shards).reshape(users, -1)
    if scheme == "dirichlet":
        return _dirichlet(labels, order, users, quota, rng, concentration)
    return order[: users * quota].reshape(users, quota)


def records_per_user(records: int, users: int, scheme: str) -> int:
    """How many records each user gets."""
    if scheme == "repeated":
        return 1
    least = 2 if scheme == "by-label" else 1
    if records // users < least:
        raise ConfigError(
            f"data.users must lie in [1, {records // least}] ({records} training records, at least "
            f"{least} each under {scheme}), got {users}"
        )
    return records // users // least * least


def sharing(records: int, users: int, scheme: str) -> str:
    """How many records each user gets, and which are unused or held by several, in a few words."""
    each = records_per_user(records, users, scheme)
    said, unused = f"{each} of {records} records each", records - users * each
    if unused > 0:
        said += f" ({unused} records are unused)"
    if unused < 0:
        holders, one_more = divmod(users, records)
        said += f" ({holders}{f' or {holders + 1}' if one_more else ''} users hold each record)"
    return said


def _dirichlet(
    labels: np.ndarray,
    order: np.ndarray,
    users: int,
    quota: int,
    rng: np.random.Generator,
    concentration: float,
) -> np.ndarray:
    """Each user filled record by record, by labels drawn from its own proportions."""
    pools = [list(order[labels[order] == label]) for label in np.unique(labels)]
    dealt = np.empty((users, quota), dtype=order.dtype)
    for user in range(users):
        proportions = rng.dirichlet(np.full(len(pools), concentration))
        for place in range(quota):
            left = np.array([len(pool) for pool in pools], dtype=float)
            weights = proportions * (left > 0)
            if weights.sum() == 0:  # none of the labels this user wants is left
                weights = left
            label = rng.choice(len(pools), p=weights / weights.sum())
            dealt[user, place] = pools[label].pop()
    return dealt


class PartitionedRecords:
    """Maps a user id to its records: features as model input, labels.

    Ids of shape (k,) are mapped to the records of all of them, shapes (k, r, ...) and (k, r): every
    partition gives each user the same number r.
    """

    def __init__(self, dataset: Dataset, parts: np.ndarray, first: int, last: int):
        self._dataset = dataset
        self._parts = parts  # of the users from `first` on, and again from the start
        self._first, self._last = first, last

    def __call__(self, users: int | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The records of one user, or of several at once."""
        lowest, highest = (users, users) if isinstance(users, int) else (users.min(), users.max())
        if lowest < self._first or highest >= self._last:
            raise IndexError(f"users must lie in [{self._first}, {self._last}), got {users}")
        index = torch.from_numpy(self._parts[(users - self._first) % len(self._parts)])
        index = index.to(self._dataset.train_labels.device)
        features, labels = (
            of.index_select(0, index.flatten()).unflatten(0, index.shape)
            for of in (self._dataset.train_features, self._dataset.train_labels)
        )
        return self._dataset.inputs(features), labels

    def to(self, device: str) -> PartitionedRecords:
        """The same with the records on this device."""
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features.to(device),
            train_labels=self._dataset.train_labels.to(device),
        )
        return PartitionedRecords(dataset, self._parts, self._first, self._last)

    def of(self, first: int, last: int) -> PartitionedRecords:
        """The same for the users from `first` to before `last`, holding nobody else's records."""
        rows = np.arange(first, min(last, first + len(self._parts))) - self._first
        parts = self._parts[rows % len(self._parts)]
        held, index = np.unique(parts, return_inverse=True)
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features[held],
            train_labels=self._dataset.train_labels[held],
            test_features=self._dataset.test_features[:0],
            test_labels=self._dataset.test_labels[:0],
        )
        return PartitionedRecords(dataset, index.reshape(parts.shape), first, last)


def load_user_records(
    dataset: str,
    features: str | None,
    users: int,
    scheme: str,
    seed: int,
    concentration: float,
    digest: str | None = None,
) -> PartitionedRecords:
    """The records of all users: what `load_records` gives, dealt as `partition` says.

    `digest` is as for `check_digest`.
    """
    check_digest(dataset, features, digest)
    loaded = load_records(dataset, features)
    parts = partition(loaded.train_labels.numpy(), users, scheme, seed, concentration)
    return PartitionedRecords(loaded, parts, 0, users)
