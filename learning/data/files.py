"""Records from a CSV or Parquet file, with columns that say whose they are and what is learnt."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, model_validator

from shufl.learning.config_section import Section
from shufl.learning.data.person_ids import number_users, where
from shufl.protocol.validation import ConfigError, Count

if TYPE_CHECKING:
    import pyarrow
    import torch

    from shufl.learning.data.datasets import Dataset

_TEST_KEY = 671  # the records for testing are always the same

_CASTS: dict[str, tuple[type, str, str, int]] = {
    "float32": (np.float32, "iuf", "whole numbers or floats", 2**24),
    "int64": (np.int64, "iu", "whole numbers", 2**63 - 1),
}
"""By type: numpy's type, the kinds of numbers it takes, their name, the largest exact integer."""
_NUMBERS = re.compile(r"u?int\d+|halffloat|float|double|bool")
_IDS = re.compile(r"u?int\d+|\w*string\w*|\w*binary\w*|null")  # a column of type null has no id
"""Types of columns, by pyarrow's names, whose values Python holds exactly."""

_INDEX = re.compile(r"Unnamed: \d+|__index_level_\d+__|\.\.\.\d+")
"""The names that pandas, arrow and R give an index without a name in a file."""

_Column = Annotated[str, Field(min_length=1)]
_Columns = Annotated[
    tuple[_Column, ...], Field(strict=False, min_length=1, description="a list of columns' names")
]
_Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    Field(strict=False, description="a list of numbers"),
]


class RecordFile(Section):
    """The table `[data.dataset]` of a configuration: a file, and what its columns are.

    You state classes and scaling here: nothing would protect them if they were estimated from
    records.

    Attributes:
        file: a CSV file with a line of names, or a Parquet file.
        user: the column with the id of each record's user.
        label: the column, or columns, to be learnt.
        features: the columns that a model gets. Default: all others.
        classes: the number of classes. Default: none, since labels are numbers (regression).
        input_type: what a model gets: floats, or whole numbers such as ids.
        mean, std: of each feature. Default: features stay as they are.
        test: the share of users, or of records, for testing.
        test_of: whether the records for testing are all of some users, or some of all users.
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
        """Refuses a mean without std, and the other way round."""
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

        from shufl.learning.data.datasets import Dataset

        features, labels, owners = self.records_in(Path(self.file))
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
        return Dataset(
            train_features=features[~tested],
            train_labels=labels[~tested],
            test_features=features[tested],
            test_labels=labels[tested],
            classes=self.classes,
            mean=self.mean or (0.0,),
            std=self.std or (1.0,),
            users=owners[~tested],
            task="classification" if self.classes else "regression",
        )

    def records_in(self, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, labels and owners of all r records in a file with these columns.

        Returns:
            Features of shape (r, f) for f columns; labels of shape (r,), or (r, l) for a list of l
            columns; and each record's owner, int64 of shape (r,), numbered from 0 in the order of
            appearance.

        Raises:
            ConfigError: as for `load`; no error quotes a record.
        """
        import torch

        table = read_table(path, self.user)
        labels = (self.label,) if isinstance(self.label, str) else self.label
        features = self.features
        names = table.column_names
        if features is None:
            features = tuple(n for n in names if n not in (self.user, *labels))
            _refuse_index(path, table, features)
        named = (self.user, *labels, *features)
        for name in named:
            if names.count(name) > 1 and name.strip():
                raise ConfigError(f"{path.name}: only one column may be called {name}")
            if name not in names:
                place = "its schema" if _is_parquet(path) else "line 1"
                sure = not set(names).isdisjoint((self.user, *labels, *(self.features or ())))
                raise ConfigError(f"{path.name}: {no_column(name, names, sure, place)}")
            if not name.strip():
                raise ConfigError(
                    f"{path.name}: column {names.index(name) + 1} must have a name (a comma at the "
                    "end of line 1 makes one without), or features must list the others"
                )
            if name != self.user and (at := where(table.column(name).is_null().to_numpy())):
                raise ConfigError(
                    f"{path.name}: column {name} must have no empty cells, got some {at}"
                )
        if twice := {name for name in named if named.count(name) > 1}:
            raise ConfigError(
                f"{path.name}: user, label and features must be different columns, got "
                f"{min(twice)} twice"
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
        what, ids = f"{path.name}: column {self.user}", table.column(self.user)
        if not _IDS.fullmatch(kind := _type_of(ids)):
            raise ConfigError(f"{what} must be text, bytes or whole numbers, got {kind}")
        owners = torch.from_numpy(number_users(ids.to_pylist(), what))
        return torch.stack([found[name] for name in features], dim=1), label, owners


def read_table(path: Path, user: str = "") -> pyarrow.Table:
    """The columns of a CSV or Parquet file.

    Args:
        path: of the file.
        user: a column that is read as text in CSV: 007 is not 7, and no cell is null.

    Raises:
        ConfigError: the file cannot be read. The error leaves out pyarrow's own text, which might
            quote a record.
    """
    import pyarrow
    from pyarrow import csv, parquet

    failure, broken = f"{path} cannot be read as CSV or Parquet", ""

    def end_at(row: Any) -> str:
        nonlocal broken
        fields = f"{row.actual_columns} fields, line 1 has {row.expected_columns}"
        broken = broken or f"record {row.number - 1} has {fields}"
        return "error"

    try:
        if _is_parquet(path):
            with parquet.ParquetFile(path) as file:
                table = file.read()
            table.validate(full=True)  # finds bytes that are no text
            return table
        given = {user: pyarrow.string()} if user else {}
        table = csv.read_csv(
            path,
            csv.ReadOptions(use_threads=False),  # with threads, errors have no line number
            csv.ParseOptions(newlines_in_values=True, invalid_row_handler=end_at),
            csv.ConvertOptions(column_types=given),
        )
        assert table.column_names  # raises UnicodeDecodeError if a name is no text
        return table
    except OSError as error:
        raise ConfigError(f"{failure}: {error.strerror or 'it is cut short or damaged'}") from None
    except (pyarrow.ArrowException, UnicodeDecodeError):
        why = "it is empty, damaged, of another kind, or not in UTF-8, or a line is over 1 MiB long"
        if broken and b"\0" not in _start(path):  # a binary file has no fields
            why = broken
        raise ConfigError(f"{failure}: {why}") from None


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


def _is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by its first bytes or, if it is damaged or empty, by its name."""
    return _start(path).startswith(b"PAR1") or path.suffix == ".parquet"


def _refuse_index(path: Path, table: pyarrow.Table, features: tuple[str, ...]) -> None:
    """Refuses an index, as pandas or R write it, if the configuration lists no features."""
    try:
        index = table.schema.pandas_metadata["index_columns"] or ()
    except (ValueError, TypeError, KeyError):  # there is no metadata, or pandas did not write it
        index = ()
    for number, name in enumerate(table.column_names, start=1):
        unnamed = _INDEX.fullmatch(name) or (number == 1 and not name)
        if name in features and (name in index or unnamed):
            raise ConfigError(
                f'{path.name}: column {number}, "{name}", is a table\'s index, not a feature: '
                "write the file without it, or name features"
            )


def no_column(name: str, names: list[str], sure: bool = False, place: str = "line 1") -> str:
    """The error for a file that has no column of this name.

    It does not list the columns: in a file without a line of names they would be a record.

    Args:
        name: of the column.
        names: of the file's columns.
        sure: whether there is a line of names, so that the error may quote the closest of them.
        place: where the names stand.
    """
    close = difflib.get_close_matches(name, names, n=1) if sure else []
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"{place} must name a column {name}, got {len(names)} other columns{hint}"


def _type_of(column: pyarrow.ChunkedArray) -> str:
    """What pyarrow calls the type of a column's values, without its parameters."""
    kind = getattr(column.type, "storage_type", column.type)  # of an extension, such as UUIDs
    kind = kind.value_type if str(kind).startswith("dictionary") else kind
    return re.split(r"\W", str(kind))[0]


def _numbers(path: Path, table: pyarrow.Table, name: str, kind: str) -> torch.Tensor:
    column, what = table.column(name), f"{path.name}: column "
    if not _NUMBERS.fullmatch(found := _type_of(column)):
        text = [not _is_number(each) for each in column.to_pylist()] if "string" in found else []
        at = f": no number is {where(text)}" if any(text) else ""
        raise ConfigError(f"{what}{name} must be {_CASTS[kind][2]}, got {found}{at}")
    array = column.to_numpy()
    try:
        return tensor_of(name, array + 0 if array.dtype == bool else array, kind)
    except ConfigError as error:
        raise ConfigError(f"{what}{error}") from None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def tensor_of(name: str, array: np.ndarray, kind: str) -> torch.Tensor:
    """An array of a file as a tensor, `float32` or `int64`.

    Raises:
        ConfigError: it holds something other than numbers, or whole numbers that would change.
    """
    import torch

    dtype, kinds, allowed, most = _CASTS[kind]
    if array.dtype.kind not in kinds:
        raise ConfigError(f"{name} must be {allowed}, got {array.dtype}")
    if array.dtype.kind != "f" and (at := where((array > most) | (array < -most))):
        raise ConfigError(
            f"{name} must be whole numbers of at most {most}, which {dtype.__name__} holds, got "
            f"others {at}"
        )
    with np.errstate(over="ignore"):  # a number that becomes infinite is refused later
        return torch.from_numpy(array.astype(dtype))
