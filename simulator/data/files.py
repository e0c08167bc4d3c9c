"""Records from a CSV or Parquet file, with columns that say whose they are and what is learnt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from shufl.accounting.validation import Count
from shufl.simulator.section import ConfigError, Section, one_line

if TYPE_CHECKING:
    import pyarrow
    import torch

    from shufl.simulator.data.datasets import Dataset

_TEST_KEY = 671  # the records for testing are always the same

_CASTS: dict[str, tuple[type, str, str, int]] = {
    "float32": (np.float32, "iuf", "whole numbers or floats", 2**24),
    "int64": (np.int64, "iu", "whole numbers", 2**63 - 1),
}
"""What an array becomes, its kinds of numbers, and the largest whole one kept exact."""

_Column = Annotated[str, Field(min_length=1)]
_Columns = Annotated[
    tuple[_Column, ...],
    Field(strict=False, min_length=1, description="a list of columns' names"),
]
_Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    Field(strict=False, description="a list of numbers"),
]


class RecordFile(Section):
    """A table `data.dataset` of a configuration: a file, and what its columns are.

    Classes and scaling are stated, because nothing would protect what was estimated from records.

    Attributes:
        file: a CSV file with a line of names, or a Parquet file (`.parquet`).
        user: the column that says whose a record is.
        label: the column, or columns, to be learnt.
        features: the columns that a model gets. Default: all others.
        classes: how many there are. Default: none, since labels are numbers (regression).
        input_type: what a model gets, floats or whole numbers such as ids.
        mean, std: of each feature. Default: features stay as they are.
        test: the share of users, or of records, that are for testing.
        test_of: whether whole users are for testing, or records of everybody.
    """

    file: str
    user: _Column
    label: _Column | _Columns
    features: _Columns | None = None
    classes: Count | None = None
    input_type: Literal["float32", "int64"] = "float32"
    mean: _Numbers | None = None
    std: _Numbers | None = None
    test: float = Field(default=0.2, gt=0, lt=1, description="a number in (0, 1)")
    test_of: Literal["users", "records"] = "users"

    @model_validator(mode="after")
    def _scaling(self) -> RecordFile:
        """Refuses half a scaling."""
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std must both be there, of equal length, or none")
        if self.std is not None and min(self.std, default=1.0) <= 0:
            raise ValueError(f"std must be above 0, got {min(self.std)}")
        return self

    def __str__(self) -> str:
        return Path(self.file).name

    def load(self) -> Dataset:
        """The dataset, with its records for training and for testing.

        Raises:
            ConfigError: the file cannot be read, or a column is not what it should be.
        """
        import torch

        from shufl.simulator.data.datasets import Dataset, number_users

        features, labels, users = self.records_in(Path(self.file))
        owners = number_users(users)
        random = np.random.Generator(np.random.Philox(key=_TEST_KEY))
        drawn_of = int(owners.max()) + 1 if self.test_of == "users" else len(owners)
        count = round(self.test * drawn_of)
        if not 0 < count < drawn_of:
            raise ConfigError(
                f"data.dataset {self}: test must leave {self.test_of} for both training and "
                f"testing, got {self.test:g} of {drawn_of}"
            )
        chosen = torch.zeros(drawn_of, dtype=torch.bool)
        chosen[torch.from_numpy(random.permutation(drawn_of)[:count])] = True
        tested = chosen[owners] if self.test_of == "users" else chosen
        records = features[~tested], labels[~tested], features[tested], labels[tested]
        return Dataset(
            *records,
            self.classes,
            mean=self.mean or (0.0,),
            std=self.std or (1.0,),
            users=owners[~tested].tolist(),
            task="classification" if self.classes else "regression",
        )

    def records_in(self, path: Path) -> tuple[torch.Tensor, torch.Tensor, list[object]]:
        """Features of shape (r, f), labels and owners of all records in such a file."""
        import torch

        table = read_table(path, self.user)
        labels = (self.label,) if isinstance(self.label, str) else self.label
        features = self.features
        if features is None:
            features = tuple(n for n in table.column_names if n not in (self.user, *labels))
        named = (self.user, *labels, *features)
        if twice := {name for name in named if named.count(name) > 1}:
            raise ConfigError(
                f"{path.name}: user, label and features must be different columns, got "
                f"{min(twice)} twice"
            )
        for name in named:
            if table.column_names.count(name) > 1:
                raise ConfigError(f"{path.name}: only one column may be called {name}")
            if name not in table.column_names:
                raise ConfigError(
                    f"{path.name}: a column must be one of {', '.join(table.column_names)}, "
                    f"got {name}"
                )
            if empty := table.column(name).null_count:
                raise ConfigError(
                    f"{path.name}: column {name} must have no empty cells, got {empty} in "
                    f"{len(table)} records"
                )
        if not features or not len(table):
            raise ConfigError(f"{path.name} must have records, and at least one feature")
        if self.mean is not None and len(self.mean) != len(features):
            raise ConfigError(
                f"data.dataset: mean and std must have {len(features)} numbers, one for each "
                f"feature, got {len(self.mean)}"
            )
        label_type = "float32" if self.classes is None else "int64"
        kinds = dict.fromkeys(features, self.input_type) | dict.fromkeys(labels, label_type)
        found = {name: _numbers(path, table, name, kind) for name, kind in kinds.items()}
        label = found[labels[0]]
        if not isinstance(self.label, str):
            label = torch.stack([found[name] for name in labels], dim=1)
        owners: list[object] = table.column(self.user).to_pylist()
        return torch.stack([found[name] for name in features], dim=1), label, owners


def read_table(path: Path, user: str = "") -> pyarrow.Table:
    """The columns of a CSV or Parquet file. In CSV the column `user` is text: 007 is not 7.

    Raises:
        ConfigError: it cannot be read.
    """
    import pyarrow
    from pyarrow import csv, parquet

    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        given = {user: pyarrow.string()} if user else {}
        options = csv.ConvertOptions(strings_can_be_null=True, column_types=given)
        return csv.read_csv(path, convert_options=options)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as CSV or Parquet: {one_line(error)}") from error


def _numbers(path: Path, table: pyarrow.Table, name: str, kind: str) -> torch.Tensor:
    try:
        array = table.column(name).to_numpy()
        return tensor_of(name, array + 0 if array.dtype == bool else array, kind)
    except ValueError as error:
        raise ConfigError(f"{path.name}: column {error}") from None


def tensor_of(name: str, array: np.ndarray, kind: str) -> torch.Tensor:
    """An array of a file as a tensor, `float32` or `int64`.

    Raises:
        ValueError: it holds something else than numbers, or whole numbers that the cast changes.
    """
    import torch

    dtype, kinds, allowed, most = _CASTS[kind]
    if array.dtype.kind not in kinds:
        raise ValueError(f"{name} must be {allowed}, got {array.dtype}")
    exact = array.dtype.kind == "f" or not array.size
    if not exact and not -most <= int(array.min()) <= int(array.max()) <= most:
        raise ValueError(
            f"{name} must be whole numbers of at most {most}, got {array.min()} to {array.max()}: "
            f"{dtype.__name__} does not hold them"
        )
    with np.errstate(over="ignore"):  # what is infinite then is refused
        return torch.from_numpy(array.astype(dtype))
