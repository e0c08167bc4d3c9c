"""Datasets: digits (scikit-learn), MNIST, Fashion-MNIST, CIFAR-10 (torchvision), or your own.

torchvision's archives are taken from the folder named by SHUFL_DATA when they are there, and
downloaded otherwise; either way they are verified and unpacked by torchvision in a cache folder.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import shutil
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from shufl.learning.config import DATASETS
from shufl.learning.data.files import RecordFile
from shufl.learning.data.person_ids import number_users, where
from shufl.learning.tasks import Form, Task, outside, wrong_tensor
from shufl.learning.your_code import Carried, find, is_carried, one_line, your_code
from shufl.protocol.files import whole_file
from shufl.protocol.validation import ConfigError


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory, on the CPU.

    In place of each tensor you may give an array, a column of a table (numpy, pandas, pyarrow,
    Hugging Face's `datasets`) or a list; it becomes a tensor here. Below, r is the number of
    training records or of test records.

    Examples:
        >>> import numpy as np
        >>> from shufl import Dataset
        >>> flowers = Dataset(
        ...     train_features=np.zeros((4, 3), dtype=np.float32),
        ...     train_labels=np.array([0, 1, 1, 0]),
        ...     test_features=np.zeros((2, 3), dtype=np.float32),
        ...     test_labels=np.array([0, 1]),
        ...     classes=2,
        ...     users=["ann", "ann", "bob", "cid"],
        ... )

    Attributes:
        train_features, test_features: shape (r, ...). Numbers of type uint8 or float32 are
            normalised by `scale`, `mean` and `std`. A model gets int64, such as the ids of tokens,
            as they are; int32 becomes int64.
        train_labels, test_labels: classification: int64 of shape (r,), from 0 to `classes` - 1.
            Regression: float32 of shape (r, ...). Next-token: int64 of shape (r, t); a token
            labelled -100 does not count. A task of your own: int64 or float32 of shape (r, ...).
        classes: the number of classes or tokens. Default: none, as for regression.
        scale: raw values are divided by it, before `mean` and `std`. Default: 1.
        mean, std: of the training features after that division: one number, or one for each
            channel. Nothing protects them, so do not estimate them from users' data; the datasets
            here have published constants. Default: 0 and 1.
        users: the id of each training record's user: r ids, each text, bytes, a whole number, a
            UUID or a tuple of these. They become numbers from 0, in the order of appearance: int64
            of shape (r,). Default: the data do not say.
        task: what is learnt: the name of a task (`data.task`), or a `Task`.
    """

    train_features: torch.Tensor
    train_labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor
    classes: int | None = None
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    users: torch.Tensor | None = None
    task: str | Task = "classification"

    if TYPE_CHECKING:  # you may give arrays; `__post_init__` makes tensors of them

        def __init__(
            self,
            train_features: ArrayLike,
            train_labels: ArrayLike,
            test_features: ArrayLike,
            test_labels: ArrayLike,
            classes: int | None = None,
            scale: float = 1.0,
            mean: Sequence[float] = (0.0,),
            std: Sequence[float] = (1.0,),
            users: Sequence[Hashable] | torch.Tensor | np.ndarray | None = None,
            task: str | Task = "classification",
        ) -> None: ...

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if name == "users":
                value = None if value is None else torch.from_numpy(number_users(value))
            elif name in ("classes", "scale", "mean", "std"):
                value = value.tolist() if hasattr(value, "tolist") else value
            elif name != "task":
                value = _tensor(name, value)
            object.__setattr__(self, name, value)  # nothing else can change this object

    def __repr__(self) -> str:
        """Says what the dataset holds, and quotes no record."""
        parts = [
            f"{part} records {_form(features)} with labels {_form(labels)}"
            for part, features, labels in (
                ("training", self.train_features, self.train_labels),
                ("test", self.test_features, self.test_labels),
            )
        ]
        users = "users not named" if self.users is None else f"{len(self.users.unique())} users"
        classes = "" if self.classes is None else f", {self.classes} classes"
        return f"<dataset for {self.task_name}: {', '.join(parts)}{classes}, {users}>"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(self.train_features.shape[1:])

    def form(self, task: str | None = None) -> Form:
        """What a record is made of.

        Args:
            task: the task's name. Default: the dataset's own. The bare name of an object, which
                is all that a stored configuration has, stands for the dataset's own too.

        Returns:
            Shapes and types of a record's features and label, and the number of outputs.
        """
        own = isinstance(self.task, Task) and is_carried(task or "")
        if task is None or (own and not isinstance(task, Carried)):
            task = self.task_name
        labels = self.train_labels
        tokens = self.train_features.dtype == torch.int64
        return Form(
            input_shape=self.input_shape,
            outputs=self.classes or labels.shape[1:].numel(),
            input_type="int64" if tokens else "float32",
            label_shape=tuple(labels.shape[1:]),
            label_type="int64" if labels.dtype == torch.int64 else "float32",
            task=task,
        )

    @functools.cached_property
    def task_name(self) -> str:
        """What a configuration calls the task."""
        return Carried("task", self.task) if isinstance(self.task, Task) else self.task

    def inputs(self, raw: torch.Tensor) -> torch.Tensor:
        """Normalises records for a model.

        Args:
            raw: r records as the dataset has them, of shape (r, ...).

        Returns:
            float32 of shape (r, ...). Records of int64, and float32 ones that need no change, are
            returned as they are.
        """
        if raw.dtype == torch.int64:
            return raw
        if not self.normalises:
            return raw.float()
        mean, std = (each.to(raw.device) for each in self._mean_and_std)
        return (raw / self.scale).sub_(mean).div_(std)

    @property
    def normalises(self) -> bool:
        """Whether `inputs` changes records."""
        return (self.scale, self.mean, self.std) != (1.0, (0.0,), (1.0,))

    @functools.cached_property
    def _mean_and_std(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation, in a shape that fits records."""
        shape = (-1, *([1] * (len(self.input_shape) - 1)))
        return torch.tensor(self.mean).reshape(shape), torch.tensor(self.std).reshape(shape)


def digits() -> Dataset:
    """1 797 handwritten digits, 8x8, values 0 to 16; a fixed fifth of them is the test set."""
    # Its file is read without scikit-learn, whose import would take every Ray worker a second.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",", dtype=np.float32)
    rows = rows[np.random.Generator(np.random.Philox(key=1797)).permutation(len(rows))]
    features = torch.from_numpy(rows[:, :-1].reshape(-1, 1, 8, 8))
    labels = torch.from_numpy(rows[:, -1]).long()
    split = len(labels) * 4 // 5
    return Dataset(
        train_features=features[:split],
        train_labels=labels[:split],
        test_features=features[split:],
        test_labels=labels[split:],
        classes=10,
        scale=16.0,
        mean=(0.5,),
        std=(0.5,),
    )


def _of_torchvision(
    class_name: str, folder: Path, pattern: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> Dataset:
    """A torchvision dataset of ten classes, from SHUFL_DATA or by download."""
    import torchvision.datasets

    cache = cache_folder()
    if local := os.environ.get("SHUFL_DATA"):
        copy_archives(Path(local).expanduser(), cache, folder, pattern)
    remove_cut_short(cache / folder, pattern)
    constructor = getattr(torchvision.datasets, class_name)
    try:
        train, test = (constructor(cache, train=part, download=True) for part in (True, False))
    except (RuntimeError, OSError, ValueError, AssertionError) as error:
        raise ConfigError(
            f"{class_name} could not be downloaded, verified or read ({one_line(error)}); put its "
            f"archives ({folder / pattern}) in a folder and name that folder in SHUFL_DATA, or "
            f"delete {cache / folder} if files there were cut short"
        ) from error
    return Dataset(
        train_features=_images(train.data),
        train_labels=torch.as_tensor(train.targets).long(),
        test_features=_images(test.data),
        test_labels=torch.as_tensor(test.targets).long(),
        classes=10,
        scale=255.0,
        mean=mean,
        std=std,
    )


def _images(data: torch.Tensor | np.ndarray) -> torch.Tensor:
    """Images of shape (r, channels, height, width); torchvision has channels last, or none."""
    images = torch.as_tensor(data)
    return images.unsqueeze(1) if images.dim() == 3 else images.permute(0, 3, 1, 2).contiguous()


def copy_archives(local: Path, cache: Path, folder: Path, pattern: str) -> None:
    """Copies archives not yet in the cache; the local folder stays as it is."""
    if not local.is_dir():
        raise ConfigError(f"SHUFL_DATA must name an existing folder, got {local}")
    for archive in sorted((local / folder).glob(pattern)):
        target = cache / folder / archive.name
        if target.exists() and target.stat().st_size == archive.stat().st_size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with archive.open("rb") as source, whole_file(target, shared=True) as copy:
            shutil.copyfileobj(source, copy)


def remove_cut_short(folder: Path, pattern: str) -> None:
    """Removes unpacked files that are shorter or longer than the gzip archives beside them say.

    torchvision unpacks a file that is missing, but keeps one whose unpacking was killed.
    """
    for archive in folder.glob(pattern):
        unpacked = archive.with_suffix("")
        length = int.from_bytes(archive.read_bytes()[-4:], "little")  # RFC 1952: ISIZE
        if unpacked.is_file() and unpacked.stat().st_size != length:
            unpacked.unlink()


def cache_folder() -> Path:
    """Where datasets and features are kept: $XDG_CACHE_HOME/shufl, or ~/.cache/shufl."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shufl"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


def mnist() -> Dataset:
    """MNIST: handwritten digits, 28x28, one channel."""
    return _of_torchvision("MNIST", Path("MNIST/raw"), "*-ubyte.gz", (0.1307,), (0.3081,))


def fashion_mnist() -> Dataset:
    """Fashion-MNIST: pieces of clothing in the form of MNIST."""
    folder = Path("FashionMNIST/raw")
    return _of_torchvision("FashionMNIST", folder, "*-ubyte.gz", (0.2860,), (0.3530,))


def cifar10() -> Dataset:
    """CIFAR-10: 32x32, three channels."""
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    return _of_torchvision("CIFAR10", Path(), "cifar-10-python.tar.gz", mean, std)


@functools.lru_cache(maxsize=1)
def load_dataset(name: str | RecordFile) -> Dataset:
    """The dataset of that name or file, kept in memory for the process.

    A name is a key of DATASETS, or `module:callable`. The callable takes no arguments and returns
    a `Dataset`. Each process calls it anew, so every call must return the same data.

    Raises:
        ConfigError: the dataset is not there, its archive does not verify, or it is not valid.
    """
    make = name.load if isinstance(name, RecordFile) else find("data.dataset", name, DATASETS)
    with your_code(f"data.dataset {name} could not be loaded", quote=()):
        # A copy: what is kept of a dataset, such as its digest, is not that of an edited one.
        dataset = copy.copy(make() if callable(make) else make)
    if (mistake := _mistake(dataset)) is not None:
        raise ConfigError(f"data.dataset {name} {mistake}")
    return dataset


def held_out_mnist() -> Dataset:
    """MNIST: 50 000 training records, and the other 10 000 to try on."""
    return held_out(load_dataset("mnist"), 10_000)


def held_out_fashion_mnist() -> Dataset:
    """Fashion-MNIST: 50 000 training records, and the other 10 000 to try on."""
    return held_out(load_dataset("fashion-mnist"), 10_000)


def held_out(dataset: Dataset, records: int) -> Dataset:
    """The training records alone: the last `records` of them stand for the test set."""
    features, labels = dataset.train_features, dataset.train_labels
    return replace(
        dataset,
        train_features=features[:-records],
        train_labels=labels[:-records],
        test_features=features[-records:],
        test_labels=labels[-records:],
        users=None if dataset.users is None else dataset.users[:-records],
    )


@functools.lru_cache(maxsize=2)  # of a dataset and of its features
def dataset_digest(dataset: Dataset) -> str:
    """SHA-256 (hexadecimal) of all that a dataset holds."""
    digest = hashlib.sha256()
    for field in fields(dataset):
        value = getattr(dataset, field.name)
        if field.name == "task" or value is None:
            continue
        digest.update(f"{field.name} {getattr(value, 'shape', value)}".encode())
        if isinstance(value, torch.Tensor):
            digest.update(value.contiguous().numpy(force=True).data)
    return digest.hexdigest()


def _tensor(name: str, given: Any) -> Any:
    """Numbers as a tensor, ids in it as int64; a masked array, or what is no array, stays.

    Raises:
        ConfigError: an array does not hold numbers, or its rows differ in length.
    """
    if isinstance(given, Sequence):
        given = given[:]  # Hugging Face's columns read their rows here, and not one by one
    if not isinstance(given, torch.Tensor):
        listed = isinstance(given, list | tuple)
        if isinstance(given, np.ma.MaskedArray) or not (listed or hasattr(given, "__array__")):
            return given
        try:
            array = np.array(given)  # writable, of positive strides
            if array.dtype == object:  # such as rows that are arrays or lists
                listed, array = True, np.array(array.tolist())
        except ValueError as error:
            raise ConfigError(
                f"{name} must have rows of one length, got others: pad or cut them"
            ) from error
        if array.dtype.kind not in "biuf":
            kinds = {"O": "missing values, or objects", "U": "text", "S": "text", "T": "text"}
            got = kinds.get(array.dtype.kind, array.dtype)
            raise ConfigError(f"{name} must be numbers, got {got}")
        if listed and array.dtype == np.float64:  # Python has no other floats
            array = array.astype(np.float32)
        given = torch.from_numpy(array)
    return given.long() if given.dtype == torch.int32 else given


def _form(numbers: Any) -> str:
    """Shape and type of a tensor; of what should be one, its class."""
    if not isinstance(numbers, torch.Tensor):
        return f"({type(numbers).__name__})"
    return f"{tuple(numbers.shape)} {numbers.dtype}".replace("torch.", "")


_CONVERT = {
    torch.float32: 'x.float(), or x.astype("float32") in numpy',
    torch.int64: 'x.long(), or x.astype("int64") in numpy',
}

_LABELS: dict[str, tuple[torch.dtype, int | None]] = {
    "classification": (torch.int64, 1),
    "next-token": (torch.int64, 2),
    "regression": (torch.float32, None),
}
"""The type of each task's labels, and the number of their axes; None: any number."""


def check_task(name: str | RecordFile, dataset: Dataset, task: str) -> None:
    """Refuses a dataset whose labels do not fit a task; `name` is the dataset's.

    Raises:
        ConfigError: the line says which labels the task needs.
    """
    if (mistake := _mistake(replace(dataset, task=task))) is not None:
        raise ConfigError(f"data.dataset {name} {mistake}, for data.task {task}")


def _mistake(dataset: Any) -> str | None:
    """What is wrong with something that should be a dataset, or None."""
    if not isinstance(dataset, Dataset):
        return f"must be a shufl.Dataset or return one, got {type(dataset).__name__}"
    if not isinstance(dataset.task, str | Task):
        return f"must have a task, the name of one or a shufl.Task, got {dataset.task!r}"
    classes, task = dataset.classes, dataset.task_name
    types = (_LABELS[task][0],) if task in _LABELS else (torch.int64, torch.float32)
    if classes is None and torch.int64 in types and task in _LABELS:
        return "must have classes, a whole number of at least 1, got None"
    if classes is not None and (type(classes) is not int or classes < 1):
        return f"must have classes, a whole number of at least 1, got {classes!r}"
    if classes is not None and torch.int64 not in types:
        return f"must have no classes, got {classes!r}"
    for part in ("train", "test"):
        features, labels = (getattr(dataset, f"{part}_{what}") for what in ("features", "labels"))
        for name, tensor, dtypes in (
            (f"{part}_features", features, (torch.uint8, torch.float32, torch.int64)),
            (f"{part}_labels", labels, types),
        ):
            if wrong := wrong_tensor(tensor, *dtypes):
                of_type = not isinstance(tensor, torch.Tensor) or tensor.dtype in dtypes
                remedy = "" if of_type else f": convert it with {_CONVERT[min(dtypes, key=str)]}"
                return f"must have {name} as {wrong}{remedy}"
        shape = features.shape[1:]
        if features.dim() < 2 or shape != dataset.input_shape or shape.numel() == 0:
            return (
                "must have features of shape (records, ...), alike in training and test, with at "
                "least one number a record, got "
                f"{tuple(dataset.train_features.shape)} and {tuple(dataset.test_features.shape)}"
            )
        axes = _LABELS.get(task, (None, None))[1] or labels.dim()
        if labels.shape[:1] != features.shape[:1] or labels.dim() != axes or labels.numel() == 0:
            return (
                f"must have one {part} label for each of at least one record, got "
                f"{tuple(labels.shape)} labels and {tuple(features.shape)} features"
            )
        if labels.shape[1:] != dataset.train_labels.shape[1:]:
            return (
                "must have labels alike in training and test, got "
                f"{tuple(dataset.train_labels.shape)} and {tuple(labels.shape)}"
            )
        if at := where(~labels.isfinite()):
            return f"must have finite {part}_labels, got NaN or infinity {at}"
        if classes is not None and (at := where(outside(labels, classes, task))):
            return f"must have {part}_labels from 0 to {classes - 1}, got others {at}"
        if features.dtype == torch.int64 and dataset.normalises:
            return "must have no scale, mean and std with features of int64"
    if dataset.users is not None and dataset.users.shape != dataset.train_labels.shape[:1]:
        return (
            f"must have one entry of users for each of {len(dataset.train_labels)} training "
            f"records, got {len(dataset.users)}"
        )
    for name in ("train_features", "test_features"):
        features = getattr(dataset, name)
        if features.dtype == torch.int64:
            continue
        try:  # normalising is linear: all other numbers stay between these two
            low, high = features.aminmax()
            inputs = dataset.inputs(
                torch.stack([torch.full_like(features[0], value) for value in (low, high)])
            )
        except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
            return f"cannot be normalised by its scale, mean and std: {one_line(error)}"
        if not inputs.isfinite().all() and (at := where(~features.isfinite())):
            return f"must have finite {name}, got NaN or infinity {at}"
        if not (inputs.isfinite().all() and inputs.shape[1:] == dataset.input_shape):
            return (
                "must give finite records of the same shape, normalised by its scale, mean and "
                f"std, got others of {name}"
            )
    return None
