"""Which training records belong to which user: as the data say, or dealt at random by a seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from shufl.learning.config import Data, Scheme
from shufl.learning.data.datasets import Dataset, load_dataset
from shufl.learning.data.features import check_digest, load_records
from shufl.learning.data.person_ids import spaced
from shufl.protocol.validation import ConfigError


@dataclass(frozen=True, eq=False)
class Partition:
    """The records of each user. Users may share a row of records, so many users need no memory.

    Attributes:
        index: the records of all k rows, one row after another, int64 of shape (r,).
        starts: where each row starts, and r at the end: int64 of shape (k + 1,).
        users: n, the number of users. User u has the records of row u modulo k.
        left: how many records of the dataset no row has.
    """

    index: np.ndarray
    starts: np.ndarray
    users: int
    left: int = 0

    def __len__(self) -> int:
        return len(self.starts) - 1

    def sizes(self, users: np.ndarray) -> np.ndarray:
        """How many records each of these users has."""
        rows = users % len(self)
        return self.starts[rows + 1] - self.starts[rows]

    def rows(self, users: np.ndarray) -> np.ndarray:
        """The records of these users, one user after another."""
        sizes = self.sizes(users)
        ends = sizes.cumsum()
        first = np.repeat(self.starts[users % len(self)] - (ends - sizes), sizes)
        return self.index[first + np.arange(len(first))]

    def before(self, users: np.ndarray) -> np.ndarray:
        """How many records the users with smaller ids have, for each of these users."""
        turns, rows = np.divmod(users, len(self))
        return turns * self.starts[-1] + self.starts[rows]

    def user_at(self, place: int) -> int:
        """The first user before whom there are at least `place` records."""
        turns, rest = divmod(place, int(self.starts[-1]))
        return min(self.users, turns * len(self) + int(self.starts.searchsorted(rest)))

    @functools.cached_property
    def most_records(self) -> int:
        """The most records that a user has."""
        return int(np.diff(self.starts).max())

    def told(self, users_by: str) -> str:
        """How many users and records there are: a line for the start of a run."""
        sizes = np.diff(self.starts)
        each = f"{spaced(sizes.max())} record{'s' * int(sizes.max() > 1)} each"
        if sizes.min() < sizes.max():
            each = f"{spaced(sizes.min())} to {each} (median {spaced(np.median(sizes))})"
        total = f"{spaced(len(self.index))} in all"
        if self.left:
            total += f" ({spaced(self.left)} more are left out)"
        if self.users > len(self):
            total += f", each held by up to {spaced(-(-self.users // len(self)))} users"
        return f"{spaced(self.users)} users {users_by}, {each}, {total}"


def deal(labels: np.ndarray, owners: np.ndarray | None, data: Data, seed: int) -> Partition:
    """Gives every record to a user, as `data.partition` says.

    `natural`: every record goes to its owner; if there are more owners than `data.users`, a random
    choice of them takes part. `repeated`: the owners are repeated in a random order, so that there
    may be more users than owners; without owners, every record counts as an owner's. The other
    schemes ignore owners, and deal numbers of records that differ by 2 at most. `iid`: a random
    permutation is cut. `by-label`: records are sorted by label and cut into two shards a user, and
    the shards are dealt at random (McMahan et al. 2017). `dirichlet`: each user draws its own label
    proportions from Dirichlet(`data.concentration`), which are more skewed the smaller it is, and
    fills its share by them (Hsu et al. 2019).

    Args:
        labels: int64 of shape (r,).
        owners: each record's owner, int64 of shape (r,), numbered from 0 without a gap; None: the
            data do not say.
        data: with users and partition decided. Of a user with more than `data.most_records`
            records, a random choice of that number is used.
        seed: of all that is random.

    Raises:
        ConfigError: there are too few records or owners.
    """
    assert data.users is not None
    random, most = np.random.Generator(np.random.Philox(key=seed)), data.most_records
    if data.partition in ("natural", "repeated"):
        index, sizes = _of_owners(len(labels), owners, data, random)
    else:
        index, sizes = _dealt(labels, data, random)
    starts = np.concatenate([[0], sizes.cumsum()])
    if most is not None and sizes.max() > most:
        rows = [
            row if len(row) <= most else np.sort(random.permutation(row)[:most])
            for row in np.split(index, starts[1:-1])
        ]
        index = np.concatenate(rows)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Partition(index, starts, data.users, len(labels) - len(index))


def _of_owners(
    records: int, owners: np.ndarray | None, data: Data, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The records of the chosen owners, one owner after another; how many each owner has."""
    assert data.users is not None
    natural, users = data.partition == "natural", data.users
    if owners is None:
        if natural:
            raise ConfigError(
                "data.partition natural needs a dataset that says whose each record is "
                "(Dataset.users), got one that does not"
            )
        return random.permutation(records)[:users], np.ones(min(users, records), dtype=np.int64)
    sizes = np.bincount(owners)
    if natural and users > len(sizes):
        raise ConfigError(
            f"data.users must lie in [1, {len(sizes)}], the users of the dataset (data.partition "
            f"repeated takes them again and again), got {users}"
        )
    chosen = random.permutation(len(sizes))[:users]
    if natural:
        chosen.sort()
    starts = np.concatenate([[0], sizes.cumsum()])
    return Partition(owners.argsort(kind="stable"), starts, users).rows(chosen), sizes[chosen]


def _dealt(
    labels: np.ndarray, data: Data, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The records dealt to users, one user after another; how many each user gets."""
    assert data.users is not None and data.partition is not None
    users = data.users
    check_enough(len(labels), users, data.partition)
    order = random.permutation(len(labels))
    if data.partition == "by-label":
        ordered = order[labels[order].argsort(kind="stable")]
        shards = np.array_split(ordered, 2 * users)
        dealt = [shards[shard] for shard in random.permutation(2 * users)]
        return np.concatenate(dealt), np.array([len(each) for each in dealt]).reshape(-1, 2).sum(1)
    sizes = np.diff(len(labels) * np.arange(users + 1) // users)
    if data.partition == "dirichlet":
        order = _dirichlet(labels, order, sizes, random, data.concentration)
    return order, sizes


def check_enough(records: int, users: int, scheme: Scheme) -> None:
    """Refuses more users than there are records for."""
    least = 2 if scheme == "by-label" else 1
    if users > records // least:
        raise ConfigError(
            f"data.users must lie in [1, {records // least}] ({records} training records, at least "
            f"{least} each under {scheme}), got {users}"
        )


def _dirichlet(
    labels: np.ndarray,
    order: np.ndarray,
    sizes: np.ndarray,
    random: np.random.Generator,
    concentration: float,
) -> np.ndarray:
    """Deals record by record: each label is drawn from the user's own proportions."""
    pools = [list(order[labels[order] == label]) for label in np.unique(labels)]
    dealt: list[int] = []
    for size in sizes.tolist():
        proportions = random.dirichlet(np.full(len(pools), concentration))
        for _ in range(size):
            left = np.array([len(pool) for pool in pools], dtype=float)
            weights = proportions * (left > 0)
            if weights.sum() == 0:  # no record of a label that this user wants is left
                weights = left
            dealt.append(pools[random.choice(len(pools), p=weights / weights.sum())].pop())
    return np.array(dealt)


class Together(NamedTuple):
    """The n records of k users, one user after another.

    Attributes:
        features: as model input, shape (n, ...).
        labels: shape (n, ...).
        sizes: how many records each user has, int64 of shape (k,).
    """

    features: torch.Tensor
    labels: torch.Tensor
    sizes: np.ndarray


class PartitionedRecords:
    """Gives a user's records by the user's id: features as model input, and labels.

    Attributes:
        partition: of the users; it numbers them from 0.
    """

    def __init__(self, dataset: Dataset, partition: Partition, first: int = 0, before: int = 0):
        """Takes the users from `first`; those with smaller ids have `before` records."""
        self._dataset, self.partition = dataset, partition
        self._first, self._before = first, before

    def __call__(self, user: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The records of one user."""
        features, labels, _ = self.together(np.array([user]))
        return features, labels

    def together(self, users: np.ndarray) -> Together:
        """The records of k users, by their ids: int of shape (k,)."""
        own = users - self._first
        if own.min() < 0 or own.max() >= self.partition.users:
            last = self._first + self.partition.users
            raise IndexError(f"users must lie in [{self._first}, {last}), got {users}")
        index = torch.from_numpy(self.partition.rows(own)).to(self._dataset.train_labels.device)
        features, labels = (
            of.index_select(0, index)
            for of in (self._dataset.train_features, self._dataset.train_labels)
        )
        return Together(self._dataset.inputs(features), labels, self.partition.sizes(own))

    def sizes(self, users: np.ndarray) -> np.ndarray:
        """How many records each of these users has."""
        return self.partition.sizes(users - self._first)

    def before(self, users: np.ndarray) -> np.ndarray:
        """How many records the users with smaller ids have, for each of these users."""
        return self._before + self.partition.before(users - self._first)

    def to(self, device: str) -> PartitionedRecords:
        """The same records on this device."""
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features.to(device),
            train_labels=self._dataset.train_labels.to(device),
        )
        return PartitionedRecords(dataset, self.partition, self._first, self._before)

    def of(self, first: int, last: int) -> PartitionedRecords:
        """The records of the users from `first` to `last` - 1 only."""
        some = np.arange(first, min(last, first + len(self.partition))) - self._first
        held, index = np.unique(self.partition.rows(some), return_inverse=True)
        starts = np.concatenate([[0], self.partition.sizes(some).cumsum()])
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features[held],
            train_labels=self._dataset.train_labels[held],
            test_features=self._dataset.test_features[:0],
            test_labels=self._dataset.test_labels[:0],
            users=None,
        )
        partition = Partition(index, starts, last - first)
        (before,) = self.before(np.array([first])).tolist()
        return PartitionedRecords(dataset, partition, first, before)


@functools.lru_cache(maxsize=1)
def load_partition(data: Data, seed: int) -> Partition:
    """`deal` of the dataset that `data` names."""
    loaded = load_dataset(data.dataset)
    owners = None if loaded.users is None else np.asarray(loaded.users)
    return deal(loaded.train_labels.numpy(), owners, data, seed)


def load_users(data: Data, seed: int, digest: str | None = None) -> PartitionedRecords:
    """The records of all users, dealt as `load_partition` says.

    Args:
        data: with users and partition decided.
        seed: of the partition.
        digest: of the data in the process where the run began; see `check_digest`.

    Raises:
        ConfigError: this process has other data.
    """
    check_digest(data.dataset, data.features, digest)
    dataset = load_records(data.dataset, data.features)
    return PartitionedRecords(dataset, load_partition(data, seed))
