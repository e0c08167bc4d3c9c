"""Real datasets by name: digits (scikit-learn), MNIST, Fashion-MNIST, CIFAR-10 (torchvision).

torchvision's archives are taken from the folder named by SHUFL_DATA when they are there, and
downloaded otherwise; either way they are verified and unpacked by torchvision in a cache folder.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from simulator.data.vision import torchvision_datasets


class DatasetError(RuntimeError):
    """A dataset could not be found, downloaded or verified."""


@dataclass(frozen=True)
class Dataset:
    """A classification dataset in memory.

    Attributes:
        train_features, test_features: shape (r, ...), uint8 or float32; `inputs` normalises.
        train_labels, test_labels: int64 of shape (r,).
        classes: number of classes.
        mean, std: of the training pixels after division by `scale`; published constants, not
            estimated from users' data.
        scale: what raw values are divided by.
    """

    train_features: torch.Tensor
    train_labels: torch.Tensor
    test_features: torch.Tensor
    test_labels: torch.Tensor
    classes: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one record."""
        return tuple(self.train_features.shape[1:])

    def inputs(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw records as model input, float32 of the same shape, normalised per channel."""
        shape = (-1, *([1] * (len(self.input_shape) - 1)))
        mean = torch.tensor(self.mean, device=raw.device).reshape(shape)
        std = torch.tensor(self.std, device=raw.device).reshape(shape)
        return (raw / self.scale).sub_(mean).div_(std)


def _digits() -> Dataset:
    """1 797 handwritten digits, 8x8, values 0 to 16; a fixed fifth of them is the test set."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    order = np.random.Generator(np.random.Philox(key=1797)).permutation(len(bunch.target))
    features = torch.from_numpy(bunch.images[order]).float().unsqueeze(1)
    labels = torch.from_numpy(bunch.target[order]).long()
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


def _idx(class_name: str, mean: float, std: float) -> Dataset:
    """MNIST or a dataset in its format: 28x28, one channel."""
    train, test = _torchvision(class_name, Path(class_name) / "raw", "*-ubyte.gz")
    return Dataset(
        train_features=train.data.unsqueeze(1),
        train_labels=train.targets.long(),
        test_features=test.data.unsqueeze(1),
        test_labels=test.targets.long(),
        classes=10,
        scale=255.0,
        mean=(mean,),
        std=(std,),
    )


def _cifar10() -> Dataset:
    """CIFAR-10: 32x32, three channels."""
    train, test = _torchvision("CIFAR10", Path(), "cifar-10-python.tar.gz")
    return Dataset(
        train_features=torch.from_numpy(train.data).permute(0, 3, 1, 2).contiguous(),
        train_labels=torch.tensor(train.targets),
        test_features=torch.from_numpy(test.data).permute(0, 3, 1, 2).contiguous(),
        test_labels=torch.tensor(test.targets),
        classes=10,
        scale=255.0,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )


def _torchvision(class_name: str, folder: Path, pattern: str) -> tuple:
    """The training and the test set of a torchvision dataset, from SHUFL_DATA or by download."""
    cache = _cache_folder()
    if local := os.environ.get("SHUFL_DATA"):
        _copy_archives(Path(local).expanduser(), cache, folder, pattern)
    constructor = getattr(torchvision_datasets(), class_name)
    try:
        return constructor(cache, train=True, download=True), constructor(
            cache, train=False, download=True
        )
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DatasetError(
            f"{class_name} could not be downloaded or verified ({reason}); put its archives "
            f"({folder / pattern}) in a folder and name that folder in SHUFL_DATA"
        ) from error


def _copy_archives(local: Path, cache: Path, folder: Path, pattern: str) -> None:
    """Copies archives not yet in the cache; the local folder stays as it is."""
    if not local.is_dir():
        raise DatasetError(f"SHUFL_DATA must name an existing folder, got {local}")
    for archive in sorted((local / folder).glob(pattern)):
        target = cache / folder / archive.name
        if target.exists() and target.stat().st_size == archive.stat().st_size:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(archive, temporary)
        temporary.replace(target)


def _cache_folder() -> Path:
    """Where unpacked datasets are kept: $XDG_CACHE_HOME/shufl, by default ~/.cache/shufl."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shufl"
    cache.mkdir(parents=True, exist_ok=True)
    return cache


DATASETS: dict[str, Callable[[], Dataset]] = {
    "digits": _digits,
    "mnist": functools.partial(_idx, "MNIST", 0.1307, 0.3081),
    "fashion-mnist": functools.partial(_idx, "FashionMNIST", 0.2860, 0.3530),
    "cifar10": _cifar10,
}


@functools.lru_cache(maxsize=1)
def load_dataset(name: str) -> Dataset:
    """The dataset of that name, kept in memory for the process.

    Raises:
        DatasetError: it is not available, or its archive does not verify.
    """
    return DATASETS[name]()
