"""Which training records belong to which user: as the data say, or dealt by the seed."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from shufl.learning.data.datasets import Dataset, load_dataset
from shufl.learning.data.features import check_digest, load_records
from shufl.learning.data.files import RecordFile
from shufl.learning.data.users import spaced
from shufl.learning.names import Scheme
from shufl.learning.section import ConfigError


@dataclass(frozen=True, eq=False)
class Partition:
    """The records of each user. Memory is taken by rows, of which users may share some.

    Attributes:
        index: the records of all rows, one row after another, int64 of shape (r,).
        starts: where each of k rows starts, and r: int64 of shape (k + 1,).
        users: n. User u has the records of row u modulo k.
        left: how many records of the dataset are in no row.
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
        """The first user before whom there are at least so many records."""
        turns, rest = divmod(place, int(self.starts[-1]))
        return min(self.users, turns * len(self) + int(self.starts.searchsorted(rest)))

    @functools.cached_property
    def most_records(self) -> int:
        """The most records that a user has."""
        return int(np.diff(self.starts).max())

    def told(self, users_by: str) -> str:
        """How many users and records there are, for the start of a run."""
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


def deal(
    labels: np.ndarray,
    owners: np.ndarray | None,
    users: int,
    scheme: Scheme,
    seed: int,
    concentration: float = 0.5,
    most_records: int | None = None,
) -> Partition:
    """Gives every record to a user.

    `natural`: to its owner; of more owners than `users` a random choice takes part. `repeated`:
    the owners are repeated in a random order, so that there may be more users than owners; without
    owners every record is an owner's. The other schemes do not look at owners, and deal numbers of
    records that differ by 2 at most. `iid`: a random permutation, cut. `by-label`: records sorted
    by label and cut into two shards a user, dealt at random (McMahan et al. 2017). `dirichlet`:
    each user draws its own label proportions from Dirichlet(concentration), which is skewed where
    this is small, and fills its share by them (Hsu et al. 2019).

    Args:
        labels: int64 of shape (r,).
        owners: whose each record is, from 0 without a gap, int64 of shape (r,).
        most_records: of a user with more, a random choice of so many.

    Raises:
        ConfigError: there are too few records or owners.
    """
    random = np.random.Generator(np.random.Philox(key=seed))
    if scheme in ("natural", "repeated"):
        index, sizes = _of_owners(len(labels), owners, users, scheme, random)
    else:
        index, sizes = _dealt(labels, users, scheme, concentration, random)
    starts = np.concatenate([[0], sizes.cumsum()])
    if most_records is not None and sizes.max() > most_records:
        rows = [
            row if len(row) <= most_records else np.sort(random.permutation(row)[:most_records])
            for row in np.split(index, starts[1:-1])
        ]
        index = np.concatenate(rows)
        starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return Partition(index, starts, users, len(labels) - len(index))


def _of_owners(
    records: int,
    owners: np.ndarray | None,
    users: int,
    scheme: Scheme,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The records of the chosen owners, one owner after another; how many each has."""
    if owners is None:
        if scheme == "natural":
            raise ConfigError(
                "data.partition natural needs a dataset that says whose each record is "
                "(Dataset.users), got one that does not"
            )
        return random.permutation(records)[:users], np.ones(min(users, records), dtype=np.int64)
    sizes = np.bincount(owners)
    if scheme == "natural" and users > len(sizes):
        raise ConfigError(
            f"data.users must lie in [1, {len(sizes)}], the users of the dataset (data.partition "
            f"repeated takes them again and again), got {users}"
        )
    chosen = random.permutation(len(sizes))[:users]
    if scheme == "natural":
        chosen.sort()
    starts = np.concatenate([[0], sizes.cumsum()])
    return Partition(owners.argsort(kind="stable"), starts, users).rows(chosen), sizes[chosen]


def _dealt(
    labels: np.ndarray,
    users: int,
    scheme: Scheme,
    concentration: float,
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The records dealt to users, one user after another; how many each has."""
    check_enough(len(labels), users, scheme)
    order = random.permutation(len(labels))
    if scheme == "by-label":
        ordered = order[labels[order].argsort(kind="stable")]
        shards = np.array_split(ordered, 2 * users)
        dealt = [shards[shard] for shard in random.permutation(2 * users)]
        return np.concatenate(dealt), np.array([len(each) for each in dealt]).reshape(-1, 2).sum(1)
    sizes = np.diff(len(labels) * np.arange(users + 1) // users)
    if scheme == "dirichlet":
        order = _dirichlet(labels, order, sizes, random, concentration)
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
    """Each user filled record by record, by labels drawn from its own proportions."""
    pools = [list(order[labels[order] == label]) for label in np.unique(labels)]
    dealt: list[int] = []
    for size in sizes.tolist():
        proportions = random.dirichlet(np.full(len(pools), concentration))
        for _ in range(size):
            left = np.array([len(pool) for pool in pools], dtype=float)
            weights = proportions * (left > 0)
            if weights.sum() == 0:  # none of the labels this user wants is left
                weights = left
            dealt.append(pools[random.choice(len(pools), p=weights / weights.sum())].pop())
    return np.array(dealt)


class PartitionedRecords:
    """Maps a user id to its records: features as model input, labels.

    Attributes:
        partition: of the users from `first` to before `last`, by their ids less `first`.
    """

    def __init__(self, dataset: Dataset, partition: Partition, first: int, last: int, before: int):
        self._dataset, self.partition = dataset, partition
        self._first, self._last = first, last
        self._before = before  # records of users with smaller ids than `first`

    def __call__(self, user: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The records of one user."""
        features, labels, _ = self.together(np.array([user]))
        return features, labels

    def together(self, users: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
        """Features and labels of k users, one user after another, and how many each has.

        Shapes (r, ...), (r,) and (k,).
        """
        if users.min() < self._first or users.max() >= self._last:
            raise IndexError(f"users must lie in [{self._first}, {self._last}), got {users}")
        own = users - self._first
        index = torch.from_numpy(self.partition.rows(own)).to(self._dataset.train_labels.device)
        features, labels = (
            of.index_select(0, index)
            for of in (self._dataset.train_features, self._dataset.train_labels)
        )
        return self._dataset.inputs(features), labels, self.partition.sizes(own)

    def sizes(self, users: np.ndarray) -> np.ndarray:
        """How many records each of these users has."""
        return self.partition.sizes(users - self._first)

    def before(self, users: np.ndarray) -> np.ndarray:
        """How many records the users with smaller ids have, for each of these users."""
        return self._before + self.partition.before(users - self._first)

    def to(self, device: str) -> PartitionedRecords:
        """The same with the records on this device."""
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features.to(device),
            train_labels=self._dataset.train_labels.to(device),
        )
        return PartitionedRecords(dataset, self.partition, self._first, self._last, self._before)

    def of(self, first: int, last: int) -> PartitionedRecords:
        """The same for the users from `first` to before `last`, holding nobody else's records."""
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
        return PartitionedRecords(dataset, partition, first, last, before)


@functools.lru_cache(maxsize=1)
def load_partition(
    dataset: str | RecordFile,
    users: int,
    scheme: Scheme,
    seed: int,
    concentration: float,
    most_records: int | None,
) -> Partition:
    """`deal` of what `load_dataset` gives."""
    loaded = load_dataset(dataset)
    owners = None if loaded.users is None else np.asarray(loaded.users)
    labels = loaded.train_labels.numpy()
    return deal(labels, owners, users, scheme, seed, concentration, most_records)


def load_user_records(
    dataset: str | RecordFile,
    features: str | None,
    users: int,
    scheme: Scheme,
    seed: int,
    concentration: float,
    most_records: int | None = None,
    digest: str | None = None,
) -> PartitionedRecords:
    """The records of all users: what `load_records` gives, dealt as `deal` says.

    `digest` is as for `check_digest`.
    """
    check_digest(dataset, features, digest)
    partition = load_partition(dataset, users, scheme, seed, concentration, most_records)
    return PartitionedRecords(load_records(dataset, features), partition, 0, users, 0)
