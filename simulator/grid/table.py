"""The results of a grid as CSV: a row for each finished point, from which a grid can go on."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shufl.learning.config import flat
from shufl.learning.data.files import RecordFile
from shufl.learning.your_code import one_line
from shufl.protocol.files import write_whole
from shufl.simulator.grid.definition import Point
from shufl.simulator.grid.grid_points import ResultFile, read_result, write_result

_POINT = ("series", "value", "seed", "digest")
_OTHERS = {"epsilon", "versions", "rests_on"}
_COLUMNS = {key: field for key, field in ResultFile.model_fields.items() if key not in _OTHERS}
_WORDS = [key for key, field in _COLUMNS.items() if key not in _POINT and field.annotation is str]
_NUMBERS = [key for key in _COLUMNS if key not in (*_POINT, *_WORDS)]
_EPSILON, _VERSIONS = "epsilon_", "versions"


def write_rows(results: Sequence[tuple[Point, dict[str, Any]]], path: Path) -> None:
    """Writes points' results, with a column for each accountant's ε and each setting."""
    rows = [
        {
            **{key: getattr(point, key) for key in _POINT},
            **{key: result.get(key) for key in (*_NUMBERS, *_WORDS)},
            _VERSIONS: " ".join(f"{key}={value}" for key, value in result["versions"].items()),
            **{f"{_EPSILON}{name}": value for name, value in result["epsilon"].items()},
            "trainer": point.trainer,
            **flat(point.config.model_dump(exclude={"seed", "about"})),
        }
        for point, result in results
    ]
    heads = dict.fromkeys([*_POINT, *_NUMBERS, *_WORDS, _VERSIONS, *itertools.chain(*rows)])
    table = io.StringIO()
    writer = csv.DictWriter(table, list(heads))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, table.getvalue().encode())


def take_over_rows(path: Path, points: Sequence[Point], folder: Path) -> None:
    """Gives points their results from a table that `write_rows` wrote, if there is one at `path`.

    A point gets a row's result if series and configuration are the same to the letter. A point that
    needs code or data of your own gets none: on another machine the name may mean something else.

    Raises:
        ValueError: the file is no such table, or the row of a point is damaged.
    """
    if not path.exists():
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            needed = (key for key, field in _COLUMNS.items() if field.is_required())
            missing = {*needed, "digest", _VERSIONS}.difference(reader.fieldnames or ())
            rows = {(row["series"], row["digest"]): row for row in reader if not missing}
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be a table that shufl experiment wrote: {error}") from error
    if missing:
        raise ValueError(
            f"{path} must be a table that shufl experiment wrote; it has no column {min(missing)}"
        )
    for point in points:
        row = rows.get((point.series, point.digest))
        own = point.own_code or isinstance(point.config.data.dataset, RecordFile)
        if row is None or own or read_result(folder / point.key) is not None:
            continue
        try:
            write_result(folder / point.key, point, _came_to(row))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the row of {point} is damaged: {one_line(error)}") from error


def _came_to(row: dict[str, str]) -> dict[str, Any]:
    """The result that `write_rows` made this row of."""
    return {
        **{key: float(row[key]) if row[key] else None for key in _NUMBERS if key in row},
        **{key: row.get(key, "") for key in _WORDS},
        "rounds": int(row["rounds"]),
        "epsilon": {
            key.removeprefix(_EPSILON): float(text) if text else None
            for key, text in row.items()
            if key.startswith(_EPSILON)
        },
        _VERSIONS: dict(each.split("=", 1) for each in row[_VERSIONS].split()),
    }
