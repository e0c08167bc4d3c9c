"""Records from a CSV or Parquet file, with columns that say whose they are and what is learnt."""

from __future__ import annotations

import datetime
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from shufl.learning.data.person_ids import looks, number_users, spelt, where
from shufl.protocol.validation import ConfigError, Count, Record

if TYPE_CHECKING:
    import pyarrow
    import torch

    from shufl.learning.data.columns import Column
    from shufl.learning.data.datasets import Dataset

_TEST_KEY = 671  # the records for testing are always the same

CASTS: dict[str, tuple[type, str, str, int]] = {
    "float32": (np.float32, "iuf", "whole numbers or floats", 2**24),
    "int64": (np.int64, "iu", "whole numbers", 2**63 - 1),
}
"""By type: numpy's type, the kinds of numbers it takes, their name, the largest exact integer."""
_IDS = re.compile(r"u?int\d+|\w*string\w*|\w*binary\w*|null")  # a column of type null has no id
"""Types of columns, by pyarrow's names, whose values Python holds exactly, as ids."""

_INDEX = re.compile(r"Unnamed: \d+|__index_level_\d+__|\.\.\.\d+")
"""The names that pandas, arrow and R give an index without a name in a file."""

_FIELDS = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
"""What pyarrow says of a line of CSV."""

_Column = Annotated[str, Field(min_length=1)]
_Columns = Annotated[
    tuple[_Column, ...], Field(strict=False, min_length=1, description="a list of columns' names")
]
_Numbers = Annotated[
    tuple[Annotated[float, Field(allow_inf_nan=False)], ...],
    Field(strict=False, description="a list of numbers"),
]
_Texts = Annotated[tuple[str, ...], Field(strict=False, description="a list of texts")]
_Date = Annotated[datetime.date, Field(strict=False)]


def _by_column(what: str) -> Any:
    return Field({}, description=f"a table of {what} for each column")


class CsvForm(NamedTuple):
    """How a CSV file is written; see `RecordFile`. Default of missing_texts: pyarrow's own."""

    separator: str = ","
    encoding: str = "utf-8"
    decimal: str = "."
    missing_texts: tuple[str, ...] | None = None


COMMAS = CsvForm()


class RecordFile(Record):
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
        mean, std: of each feature but categories. Default: features stay as they are.
        test: the share of users, or of records, for testing.
        test_of: whether the records for testing are all of some users, or some of all users.
        separator: what stands between two cells of a CSV file.
        encoding: of a CSV file, a name that Python knows.
        decimal: what stands before a fraction in a CSV file.
        missing_texts: what stands for a missing cell beside an empty one, NA, NaN, null, ….
        missing: by column, what takes the place of a missing cell: a number, or a category.
        drop: columns; a record that misses one of these cells is left out.
        categories: by column, the texts that it may have. A feature becomes a number for each of
            them, 1 for the record's own and 0 for the others. With `input_type` int64, and as the
            label, it becomes the place of the record's own in the list.
        other: columns with one more category, for all texts that are not listed.
        dates: by column, the date after which its days count.
        date_format: of dates in text, as for Python's strptime.
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
    separator: str = Field(",", pattern=r"^[\t !#-/:-@\[-`{-~]$", description="one character")
    encoding: str = "utf-8"
    decimal: Literal[".", ","] = Field(".", description='"." or ","')
    missing_texts: _Texts = ()
    missing: dict[str, float | str] = _by_column("a number, or one of its categories,")
    drop: _Texts = ()
    categories: dict[str, _Texts] = _by_column("a list of texts")
    other: _Texts = ()
    dates: dict[str, _Date] = _by_column("a date, such as 2020-01-31,")
    date_format: str = "%Y-%m-%d"

    def __hash__(self) -> int:
        """Tables of values have no hash of their own."""
        return hash(self.model_dump_json())

    @model_validator(mode="after")
    def _cells(self) -> RecordFile:
        """Refuses what is stated of cells where no file would fit it."""
        for column, listed in self.categories.items():
            if len(listed) < 2 or len(set(map(looks, listed))) < len(listed):
                raise ValueError(f"categories.{column} must be two texts or more, none alike")
        for column, value in self.missing.items():
            if value not in self.categories.get(column, set() if value is str(value) else {value}):
                allowed = "a number, or a category (to leave records out, see drop)"
                raise ValueError(f"missing.{column} must be {allowed}, got {value!r}")
        if not isinstance(self.label, str) and set(self.label).intersection(self.categories):
            raise ValueError("label must be a single column to have categories")
        for column in set(self.other).difference(self.categories):
            raise ValueError(f"other must be of columns in categories, got {column}")
        if self.classes not in (None, self.outputs):
            raise ValueError(f"classes must be {self.outputs}, the label's categories")
        return self

    @property
    def outputs(self) -> int | None:
        """The number of classes, which the label's categories may say."""
        if isinstance(self.label, str) and self.label in self.categories:
            return len(self.categories[self.label]) + (self.label in self.other)
        return self.classes

    @model_validator(mode="after")
    def _scaling(self) -> RecordFile:
        """Refuses a mean without std, and the other way round."""
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            raise ValueError("mean and std must both be there, of equal length, or none")
        if self.std is not None and min(self.std, default=1.0) <= 0:
            raise ValueError(f"std must be above 0, got {min(self.std)}")
        if self.std is not None and self.input_type == "int64":
            raise ValueError("mean and std must be left out with input_type int64")
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
            classes=self.outputs,
            users=owners[~tested],
            task="classification" if self.outputs else "regression",
        )

    def records_in(self, path: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Features, labels and owners of the r records in a file that are not left out.

        What becomes of a record depends on that record alone.

        Returns:
            Features, scaled by `mean` and `std`, of shape (r, f); labels of shape (r,), or (r, l)
            for a list of l columns; and each record's owner, int64 of shape (r,), numbered from 0
            in the order of appearance.

        Raises:
            ConfigError: as for `load`; no error quotes a record.
        """
        import torch

        from shufl.learning.data.columns import type_of

        user, *columns = self._columns(path)
        labels = 1 if isinstance(self.label, str) else len(self.label)
        kind = "int64" if self.outputs else "float32"
        label = torch.stack([self._tensor(column, kind) for column in columns[:labels]], dim=1)
        if isinstance(self.label, str):
            label = label[:, 0]
        if self.outputs:
            wrong = ((label < 0) | (label >= self.outputs)).numpy()
            remedy = f"state more classes, or list all labels in categories.{columns[0].name}"
            columns[0].refuse(wrong, f"be from 0 to {self.outputs - 1}, got others", remedy)
        features = [self._tensor(column, self.input_type) for column in columns[labels:]]
        both = zip(features, columns[labels:], strict=True)
        scaled = [numbers for numbers, column in both if column.name not in self.categories]
        if self.mean is not None and len(self.mean) != len(scaled):
            raise ConfigError(
                f"data.dataset: mean and std must have {len(scaled)} numbers, one for each feature "
                f"but categories, got {len(self.mean)}"
            )
        for numbers, mean, std in zip(scaled, self.mean or (), self.std or (), strict=False):
            numbers.sub_(mean).div_(std)
        features = [numbers.reshape(len(numbers), -1) for numbers in features]
        what = f"{path.name}: column {self.user}"
        if not _IDS.fullmatch(kind := type_of(user.cells)):
            raise ConfigError(f"{what} must be text, bytes or whole numbers, got {kind}")
        left_out = "left", "out"  # no id in a file is a pair
        given = zip(user.cells.to_pylist(), user.kept, strict=True)
        ids = [each if kept else left_out for each, kept in given]
        owners = number_users(ids, what, user.place, user.first)[user.kept]
        owners = np.unique(owners, return_inverse=True)[1]
        kept = torch.from_numpy(user.kept)
        return torch.cat(features, dim=1)[kept], label[kept], torch.from_numpy(owners)

    def _tensor(self, column: Column, kind: str) -> torch.Tensor:
        """The numbers that a column's cells become."""
        name = column.name
        instead: Any = self.missing.get(name, 0.0)
        if name in self.categories:
            return column.places(instead, self.categories[name], name in self.other, kind)
        if name in self.dates:
            return column.days(instead, self.dates[name], self.date_format, kind)
        return column.numbers(instead, self.decimal, kind)

    def _columns(self, path: Path) -> list[Column]:
        """The user's column, those of labels, and those of features."""
        from pyarrow import csv

        from shufl.learning.data.columns import Column, missing_cells

        given = [*csv.ConvertOptions().null_values, *self.missing_texts]
        form = CsvForm(self.separator, self.encoding, self.decimal, tuple(given))
        table = read_table(path, form, (self.user, *self.categories, *self.dates))
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
                place = "its schema" if is_parquet(path) else "line 1"
                hint = _separator_hint(path, form)
                sure = not set(names).isdisjoint((self.user, *labels, *(self.features or ())))
                raise ConfigError(f"{path.name}: {no_column(name, names, sure, place)}{hint}")
            if not name.strip():
                raise ConfigError(
                    f"{path.name}: column {names.index(name) + 1} must have a name (a comma at the "
                    "end of line 1 makes one without), or features must list the others"
                )
        if twice := {name for name in named if named.count(name) > 1}:
            raise ConfigError(
                f"{path.name}: user, label and features must be different columns, got "
                f"{min(twice)} twice"
            )
        for key in ("drop", "missing", "categories", "dates"):
            for name in set(getattr(self, key)).difference(named[key != "drop" :]):
                whose = "user, " * (key == "drop")
                raise ConfigError(
                    f"data.dataset.{key} must be of {whose}features and label, got {name}"
                )
        cells = [table.column(name) for name in named]
        texts = [set(given).difference(self.categories.get(name, ())) for name in named]
        missing = list(map(missing_cells, cells, texts))
        kept = np.ones(len(table), bool)
        for name in self.drop:
            kept &= ~missing[named.index(name)]
        if not features or not kept.any():
            raise ConfigError(f"{path.name} must have records, and at least one feature")
        about = kept, *_place(path, form, len(table))
        each = zip(named, cells, missing, strict=True)
        columns = [Column(path.name, *its, *about) for its in each]
        for column in columns[1:]:
            if column.name not in self.missing:
                remedy = f"missing.{column.name} fills them, drop leaves such records out"
                if column.name in labels:  # nobody fills what is to be learnt
                    alone = missing[0] & kept
                    drop = self.user if alone.any() and column.missing[alone].all() else column.name
                    remedy = f'drop = ["{drop}"] leaves such records out'
                column.refuse(column.missing, "have no empty cells, got some", remedy)
        return columns


def read_table(path: Path, form: CsvForm = COMMAS, texts: Iterable[str] = ()) -> pyarrow.Table:
    """The columns of a CSV or Parquet file.

    Args:
        path: of the file.
        form: of a CSV file.
        texts: columns that are read as text in CSV: 007 is not 7, and no cell is null.

    Raises:
        ConfigError: the file cannot be read. The error leaves out pyarrow's own text, which might
            quote a record.
    """
    import pyarrow
    from pyarrow import csv, parquet

    failure = f"{path} cannot be read as CSV or Parquet"
    try:
        if is_parquet(path):
            with parquet.ParquetFile(path) as file:
                table = file.read()
            table.validate(full=True)  # finds bytes that are no text
            return table
        table = csv.read_csv(
            path,
            # With threads, errors have no line number.
            csv.ReadOptions(use_threads=False, encoding=form.encoding),
            csv.ParseOptions(delimiter=form.separator, newlines_in_values=True),
            csv.ConvertOptions(
                column_types=dict.fromkeys(texts, pyarrow.string()),
                null_values=form.missing_texts,
                decimal_point=form.decimal,
            ),
        )
        assert table.column_names  # raises UnicodeDecodeError if a name is no text
        return table
    except OSError as error:
        raise ConfigError(f"{failure}: {error.strerror or 'it is cut short or damaged'}") from None
    except LookupError:
        raise ConfigError(
            f"encoding must be one that Python knows, such as cp1252, got {form.encoding}"
        ) from None
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        encoding = form.encoding.upper()
        why = (
            "it is empty, damaged, of another kind (a workbook must be saved as CSV), or not in "
            f"{encoding}, or a line is over 1 MiB long"
        )
        if b"\0" not in _start(path):  # else it is binary, without fields
            if broken := _FIELDS.search(str(error)):
                row, there, found = map(int, broken.groups())
                place, first = _place(path, form, row - 1)
                why = f"{place} {row - 2 + first} has {found} fields, line 1 has {there}"
                why += _separator_hint(path, form)
            elif at := where(["\ufffd" in line for line in _lines(path, form)], "line"):
                why = f'it is not in {encoding} {at}: encoding = "cp1252" is usual on Windows'
        raise ConfigError(f"{failure}: {why}") from None


def _lines(path: Path, form: CsvForm) -> Iterator[str]:
    with path.open(encoding=form.encoding, errors="replace") as file:
        yield from file


def _separator_hint(path: Path, form: CsvForm) -> str:
    """What seems to stand between the cells of line 1, if the form says something else."""
    line = "" if is_parquet(path) else next(_lines(path, form), "")
    found = max(form.separator, *",;|\t", key=line.count)
    return "" if found == form.separator else f"; separator = {json.dumps(found)} would split it"


def _place(path: Path, form: CsvForm, records: int) -> tuple[str, int]:
    """What an error calls a record's place, and the number of the first.

    It is a line, unless lines are blank, or cells have line ends.
    """
    lines = () if is_parquet(path) else islice(_lines(path, form), records + 1)
    whole = [bool(line.strip()) and line.count('"') % 2 == 0 for line in lines]
    return ("line", 2) if all(whole) and len(whole) > records else ("record", 1)


def _start(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096)


def is_parquet(path: Path) -> bool:
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
    closest = [each if each.strip() == each else spelt(each) for each in close]
    hint = f"; did you mean {closest[0]}?" if close else ""
    return f"{place} must name a column {name}, got {len(names)} other columns{hint}"


def tensor_of(name: str, array: np.ndarray, kind: str) -> torch.Tensor:
    """An array of a file as a tensor, `float32` or `int64`.

    Raises:
        ConfigError: it holds something other than numbers, or whole numbers that would change.
    """
    import torch

    dtype, kinds, allowed, most = CASTS[kind]
    if array.dtype.kind not in kinds:
        raise ConfigError(f"{name} must be {allowed}, got {array.dtype}")
    if array.dtype.kind != "f" and (at := where((array > most) | (array < -most))):
        raise ConfigError(
            f"{name} must be whole numbers of at most {most}, which {dtype.__name__} holds, got "
            f"others {at}"
        )
    with np.errstate(over="ignore"):  # a number that becomes infinite is refused later
        return torch.from_numpy(array.astype(dtype))
