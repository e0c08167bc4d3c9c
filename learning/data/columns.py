"""What the cells of a file become: numbers, each by its own record and by what a table states."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

import numpy as np
import pyarrow
import torch

from shufl.learning.data.files import CASTS, tensor_of
from shufl.learning.data.person_ids import looks, where
from shufl.protocol.validation import ConfigError

_NUMBERS = re.compile(r"u?int\d+|halffloat|float|double|bool|null")  # null: all cells are empty
"""Types of columns, by pyarrow's names, whose values are numbers."""
_TEXT = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
"""A number in text."""


@dataclass(frozen=True)
class Column:
    """A column of a file, and what an error says of it.

    Attributes:
        file, name: of the file, and of the column.
        cells: of all r records.
        missing: which cells are missing, of shape (r,).
        kept: which records are used, of shape (r,). What is wrong with the others is no mistake.
        place, first: what a record's place is called, and the number of the first.
    """

    file: str
    name: str
    cells: pyarrow.ChunkedArray
    missing: np.ndarray
    kept: np.ndarray
    place: str
    first: int

    def refuse(self, wrong: np.ndarray, must: str, remedy: str) -> None:
        """Raises a ConfigError if a record that is used is wrong: how many, where, what to do."""
        if at := where(wrong & self.kept, self.place, self.first):
            raise ConfigError(f"{self.file}: column {self.name} must {must} {at}: {remedy}")

    def numbers(self, instead: float, decimal: str, kind: str) -> torch.Tensor:
        """The numbers in the cells.

        Args:
            instead: stands for a missing cell.
            decimal: stands before a fraction in text.
            kind: `float32` or `int64`.
        """
        found, cells = type_of(self.cells), self.cells
        must = f"be {CASTS[kind][2]}, got {found}"
        remedy = (
            f"write categories.{self.name}, dates.{self.name} or missing_texts, or leave it out"
        )
        if "string" in found:
            marks = str.maketrans(",.", ".,")
            texts = [str(cell) for cell in cells.to_pylist()]
            texts = [text.translate(marks) for text in texts] if decimal == "," else texts
            wrong = ~self.missing & [not _TEXT.fullmatch(text) for text in texts]
            told = np.flatnonzero(wrong & self.kept)
            if all(_TEXT.fullmatch(texts[at].translate(marks)) for at in told):
                other = "." if decimal == "," else ","
                remedy = f'decimal = "{other}" reads 0{other}5'
            self.refuse(wrong, must, remedy)
            array = np.array([float(text) if _TEXT.fullmatch(text) else 0.0 for text in texts])
        else:
            self.refuse(~self.missing & (not _NUMBERS.fullmatch(found)), must, remedy)
            plain = {"bool": "int8", "null": "double"}.get(found, cells.type)
            array = cells.cast(plain).to_numpy()
        if self.missing.any():  # else whole numbers stay as they are
            array = np.where(self.missing, instead, array)
        return self._tensor(array, kind)

    def days(self, instead: float, since: datetime.date, form: str, kind: str) -> torch.Tensor:
        """How many days the dates in the cells are after a date; `instead` is a number of days."""
        if type_of(self.cells) in ("date32", "date64", "timestamp"):
            moments = self.cells.cast(pyarrow.timestamp("us"), safe=False).to_numpy()
        else:
            texts = [str(cell) for cell in self.cells.to_pylist()]
            known = {text: _moment(text, form) for text in set(texts)}
            moments = np.array([known[text] for text in texts], "datetime64[us]")
        days = (moments - np.datetime64(since, "us")) / np.timedelta64(1, "D")
        days[self.missing] = instead
        remedy = 'date_format says how they are written, such as "%d.%m.%Y"'
        self.refuse(np.isnan(days), f"be dates like {form}, got others", remedy)
        return self._tensor(days, kind)

    def places(self, instead: str, listed: tuple[str, ...], other: bool, kind: str) -> torch.Tensor:
        """Each cell's place among k categories.

        Args:
            instead: stands for a missing cell.
            listed: all texts of cells.
            other: whether there is one more category, for other texts.
            kind: `int64` for the place, of shape (r,); `float32` for a 1 there and k - 1 zeros.
        """
        cells = ["" if cell is None else str(cell) for cell in self.cells.to_pylist()]
        cells = [instead if it else cell for cell, it in zip(cells, self.missing, strict=True)]
        known, alike = {text: place for place, text in enumerate(listed)}, set(map(looks, listed))
        strange = {text: not other or looks(text) in alike for text in set(cells).difference(known)}
        self.refuse(
            np.array([strange.get(cell, False) for cell in cells]),
            f"have values spelt as categories.{self.name} lists them, got others",
            f'list them too, or other = ["{self.name}"] makes one category of all others',
        )
        places = torch.tensor([known.get(cell, len(listed) * other) for cell in cells])
        return places if kind == "int64" else torch.eye(len(listed) + other)[places]

    def _tensor(self, array: np.ndarray, kind: str) -> torch.Tensor:
        array = np.where(self.kept, array, 0)
        if kind == "int64" and array.dtype.kind == "f":
            wrong = (array % 1 != 0) | (np.abs(array) >= 2**53)
            self.refuse(wrong, "be whole numbers, got others", "a float32 takes any number")
            array = array.astype(np.int64)
        tensor = tensor_of(f"{self.file}: column {self.name}", array, kind)
        self.refuse(~tensor.isfinite().numpy(), "be finite, got others", "float32 ends at 3e38")
        return tensor


def type_of(cells: pyarrow.ChunkedArray) -> str:
    """What pyarrow calls the type of a column's values, without its parameters."""
    kind = getattr(cells.type, "storage_type", cells.type)  # of an extension, such as UUIDs
    kind = kind.value_type if str(kind).startswith("dictionary") else kind
    return re.split(r"\W", str(kind))[0]


def missing_cells(cells: pyarrow.ChunkedArray, texts: set[str]) -> np.ndarray:
    """Which cells are null, NaN or one of these texts: bool of shape (r,)."""
    missing: np.ndarray = cells.is_null(nan_is_null=True).to_numpy()
    if "string" in type_of(cells):
        missing = missing | np.array([cell in texts for cell in cells.to_pylist()], bool)
    return missing


def _moment(text: str, date_format: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.strptime(text, date_format)
    except ValueError:
        return None
