"""Features: a fixed public map of each record, so that a small model has good inputs.

With good features a linear model learns more under noise than a large one does from raw records
(Tramèr and Boneh 2021, "Differentially private learning needs better features"). A map is computed
before the run and nothing protects it. So it must be a function of each record alone, and of
nothing that was estimated from users' data.
"""

from __future__ import annotations

import functools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from shufl.learning import load_tensors, save_tensors
from shufl.learning.data.datasets import (
    Dataset,
    cache_folder,
    dataset_digest,
    load_dataset,
    wrong_tensor,
)
from shufl.learning.data.files import RecordFile
from shufl.learning.data.scattering import COEFFICIENTS, scattering
from shufl.learning.data.whitening import dead_leaves, whitened, whitening
from shufl.learning.names import DATASETS, FEATURES
from shufl.learning.section import ConfigError, find, one_line, readers_code

Tensors = dict[str, Any]  # a dataset's, by name


def whitened_scattering(images: torch.Tensor) -> torch.Tensor:
    """The scattering transform, normalised within each record and then whitened.

    Within a record every three of the 81 coefficients of an image's channel get mean 0 and variance
    1, so that the faint second order counts like the first. Then the coefficients are made as
    uncorrelated as those of dead leaves are; see `shufl.learning.data.whitening`.
    """
    planes = _normalised(scattering(images))
    return whitened(planes, *_of_dead_leaves()).reshape(len(images), -1, *planes.shape[2:])


def _normalised(coefficients: torch.Tensor) -> torch.Tensor:
    planes = coefficients.reshape(-1, COEFFICIENTS, *coefficients.shape[2:])
    return functional.group_norm(planes, COEFFICIENTS // 3)


@functools.cache
def _of_dead_leaves() -> tuple[torch.Tensor, torch.Tensor]:
    return whitening(_normalised(scattering(dead_leaves())))


_VERSIONS = {"scattering": 2}  # to be raised when a map gives other numbers: files are kept by it
_RECORDS_AT_ONCE = 32  # what a thread works on stays in its core's cache


def load_records(dataset: str | RecordFile, features: str | None) -> Dataset:
    """The dataset of that name, its records mapped to features if there is a map.

    `features` is a key of FEATURES, `module:callable`, or None. Several threads call the callable
    at once; it must give a record the same features at every call.

    Raises:
        ConfigError: see `load_dataset`; or the map fails, or there is no room to keep its features.
    """
    loaded = load_dataset(dataset)
    return loaded if features is None else mapped(loaded, features)


def data_digest(dataset: str | RecordFile, features: str | None) -> str:
    """The digest of what `load_records` gives, to compare what processes have loaded.

    Features of the maps here are left out: machines may round them differently.
    """
    return dataset_digest(load_records(dataset, None if features in FEATURES else features))


def check_digest(dataset: str | RecordFile, features: str | None, digest: str | None) -> None:
    """Refuses data that are not those of another process, unless its digest is None or empty.

    With another split this process would train on records that the other one tests on.
    """
    if digest and digest != data_digest(dataset, features):
        if features in (None, *FEATURES) and (dataset in DATASETS or not isinstance(dataset, str)):
            raise ConfigError(
                f"data.dataset {dataset} has changed since the run began: its file must stay as it "
                "is, and be the same on every machine"
            )
        own = "" if features is None else f", or data.features {features},"
        raise ConfigError(
            f"data.dataset {dataset}{own} differs between calls: it must be the same at every call "
            "(seed its random numbers, as those of a split, and change no file that it reads)"
        )


@functools.lru_cache(maxsize=1)
def mapped(dataset: Dataset, name: str) -> Dataset:
    """The dataset with its records mapped.

    The features of the maps here are kept in a file that all processes share. Those of the
    reader's are not, because nothing tells whether what its code rests on has changed.
    """
    if name not in FEATURES:
        tensors: Tensors = _compute(dataset, name, _shape_of_one(dataset, name))
    else:
        key = f"{name}-{_VERSIONS[name]}-{dataset_digest(dataset)[:16]}"
        path = cache_folder() / "features" / f"{key}.pt"
        tensors = _read(path) or _keep(path, dataset, name)
    return replace(dataset, **tensors, scale=1.0, mean=(0.0,), std=(1.0,))


def map_records(name: str, records: torch.Tensor) -> torch.Tensor:
    """The features of normalised records, float32 of shape (r, ...).

    Raises:
        ConfigError: the map fails, or gives something else.
    """
    make = find("data.features", name, FEATURES)
    failure = f"data.features {name} could not map records of shape {tuple(records.shape[1:])}"
    with readers_code(failure, quote=()), torch.no_grad():
        features = make(records.clone())  # which it may change
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
    """The shape of a record's features, from a trial that shows whether they are its own alone."""
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
    """Training and test features. Threads of one core each are faster than torch's own."""
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
    """What `_keep` has written, mapped into memory; None if it is not there or damaged."""
    try:
        return load_tensors(path, mmap=True)
    except Exception:  # of all the kinds that a damaged file can raise
        return None


def _keep(path: Path, dataset: Dataset, name: str) -> Tensors:
    """Computes the features and writes them to a file, which is whole as soon as it is there."""
    shape = _shape_of_one(dataset, name)
    size = 4 * shape.numel() * (len(dataset.train_labels) + len(dataset.test_labels))
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(path.parent).free) < size:
            raise OSError(f"{free / 1e9:.2g} GB are free")
        tensors = _compute(dataset, name, shape)
        try:
            with temporary.open("wb") as file:
                save_tensors(tensors, file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return torch.load(path, mmap=True, weights_only=True)
    except OSError as error:
        raise ConfigError(
            f"data.features {name} needs {size / 1e9:.2g} GB in {path.parent}, which "
            f"XDG_CACHE_HOME can change: {one_line(error)}"
        ) from error
