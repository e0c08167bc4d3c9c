"""Features: a fixed public map of each record, so that a small model has good inputs.

With good features a linear model learns more under noise than a large one does from raw records
(Tramèr and Boneh 2021, "Differentially private learning needs better features"). Features are
computed before the run and nothing protects the map. So a record's features must be a function of
this record alone, and the map must not be estimated from users' data.
"""

from __future__ import annotations

import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shufl.learning import load_tensors
from shufl.learning.config import FEATURES
from shufl.learning.data.datasets import Dataset, cache_folder, dataset_digest, load_dataset
from shufl.learning.data.files import RecordFile
from shufl.learning.tasks import wrong_tensor
from shufl.learning.your_code import find, one_line, your_code
from shufl.protocol.files import whole_file
from shufl.protocol.validation import ConfigError

Tensors = dict[str, Any]  # a dataset's, by name

_VERSIONS = {"scattering": 2}  # in the names of kept files; raise it when a map's numbers change
_RECORDS_AT_ONCE = 32  # so that a thread's work stays in its core's cache


def load_records(dataset: str | RecordFile, features: str | None) -> Dataset:
    """The dataset of that name, its records mapped to features if there is a map.

    Args:
        dataset: a name or a file, as for `load_dataset`.
        features: a key of FEATURES, `module:callable`, or None for no map. Several threads call
            the callable at once; it must give a record the same features at every call.

    Raises:
        ConfigError: see `load_dataset`; or the map fails, or there is no room to keep its features.
    """
    loaded = load_dataset(dataset)
    return loaded if features is None else mapped(loaded, features)


def data_digest(dataset: str | RecordFile, features: str | None) -> str:
    """The digest by which processes compare their data, as `load_records` gives them.

    If the map is one of shufl's own, it is of the data before the map: machines may round features
    differently.
    """
    return dataset_digest(load_records(dataset, None if features in FEATURES else features))


def check_digest(dataset: str | RecordFile, features: str | None, digest: str | None) -> None:
    """Refuses data that differ from the data of the process where the run began.

    With another split, this process would train on records that the other one tests on.

    Args:
        dataset, features: as for `load_records`.
        digest: of the other process's data. None or "": any data will do.

    Raises:
        ConfigError: the data differ.
    """
    if digest and digest != data_digest(dataset, features):
        own = "" if features is None else f", or data.features {features},"
        raise ConfigError(
            f"data.dataset {dataset}{own} differs between calls: it must be the same at every call "
            "and on every machine (seed random numbers, as of a split, and change no file)"
        )


@functools.lru_cache(maxsize=1)
def mapped(dataset: Dataset, name: str) -> Dataset:
    """The dataset with its records mapped.

    Features of shufl's own maps are kept in a file that all processes share. Features of a map of
    yours are not, because nothing shows whether all that its code depends on is still the same.
    """
    if name not in FEATURES:
        tensors: Tensors = _compute(dataset, name, _shape_of_one(dataset, name))
    else:
        key = f"{name}-{_VERSIONS[name]}-{dataset_digest(dataset)[:16]}"
        path = cache_folder() / "features" / f"{key}.pt"
        tensors = _read(path) or _keep(path, dataset, name)
    return replace(dataset, **tensors, scale=1.0, mean=(0.0,), std=(1.0,))


def map_records(name: str, records: torch.Tensor) -> torch.Tensor:
    """Maps normalised records.

    Args:
        name: of the map.
        records: float32 or int64 of shape (r, ...).

    Returns:
        Their features: float32 of shape (r, ...).

    Raises:
        ConfigError: the map fails, or gives something else.
    """
    make = find("data.features", name, FEATURES)
    failure = f"data.features {name} could not map records of shape {tuple(records.shape[1:])}"
    with your_code(failure, quote=()), torch.no_grad():
        features = make(records.clone())  # the map may change what it gets
    if wrong := wrong_tensor(features, torch.float32):
        raise ConfigError(f"data.features {name} must give {wrong}")
    shape = tuple(features.shape)
    if len(shape) < 2 or shape[0] != len(records) or not features.numel():
        raise ConfigError(
            f"data.features {name} must give features of shape ({len(records)}, ...) for "
            f"{len(records)} records, got shape {shape}"
        )
    if not features.isfinite().all():
        raise ConfigError(f"data.features {name} must give finite features, got others")
    return features


def _shape_of_one(dataset: Dataset, name: str) -> torch.Size:
    """The shape of a record's features; refuses a map whose features depend on other records."""
    few = dataset.inputs(dataset.train_features[:_RECORDS_AT_ONCE])
    alone = [map_records(name, record) for record in few.split(1)]
    together = map_records(name, few)
    alike = all(each.shape[1:] == together.shape[1:] for each in alone)
    if not alike or not torch.allclose(torch.cat(alone), together, rtol=1e-3, atol=1e-5):
        raise ConfigError(
            f"data.features {name} must map each record by itself: its features of a record depend "
            "on the other records of the batch"
        )
    return together.shape[1:]


def _compute(dataset: Dataset, name: str, shape: torch.Size) -> Tensors:
    """Training and test features, by threads of one core each: torch's own are slower."""
    tensors = {}
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
        for part in ("train_features", "test_features"):
            records = getattr(dataset, part)
            tensors[part] = torch.empty(len(records), *shape)

            def fill(records: torch.Tensor, features: torch.Tensor) -> None:
                mapped = map_records(name, dataset.inputs(records))
                if mapped.shape != features.shape:
                    raise ConfigError(
                        f"data.features {name} must give features of shape {tuple(shape)} for "
                        f"every record as for the first, got {tuple(mapped.shape[1:])}"
                    )
                features.copy_(mapped)

            pairs = (each.split(_RECORDS_AT_ONCE) for each in (records, tensors[part]))
            for _ in pool.map(fill, *pairs):
                pass
    return tensors


def _read(path: Path) -> Tensors | None:
    """The file that `_keep` has written, mapped into memory; None if it is missing or damaged."""
    try:
        return load_tensors(path, mmap=True)
    except Exception:  # a damaged file may raise anything
        return None


def _save(tensors: Tensors, file: BinaryIO) -> None:
    """`torch.save`, with an OSError where it makes a RuntimeError of one."""
    try:
        torch.save(tensors, file)
    except RuntimeError as error:
        raise OSError(one_line(error.__context__ or error)) from None


def _keep(path: Path, dataset: Dataset, name: str) -> Tensors:
    """Computes the features and writes them to a file, whole or not at all."""
    shape = _shape_of_one(dataset, name)
    size = 4 * shape.numel() * (len(dataset.train_labels) + len(dataset.test_labels))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(path.parent).free) < size:
            raise OSError(f"{free / 1e9:.2g} GB are free")
        tensors = _compute(dataset, name, shape)
        with whole_file(path, shared=True) as file:
            _save(tensors, file)
        return torch.load(path, mmap=True, weights_only=True)
    except OSError as error:
        raise ConfigError(
            f"data.features {name} needs {size / 1e9:.2g} GB in {path.parent}, which "
            f"XDG_CACHE_HOME can change: {one_line(error)}"
        ) from error
