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
from shufl.learning.your_code import Carried, one_line
from shufl.protocol.files import write_whole
from shufl.simulator.grid.definition import Point
from shufl.simulator.grid.grid_points import ResultFile, read_result, write_result

_POINT = ("series", "value", "seed", "digest")
_OTHERS = {*_POINT, "epsilon", "versions", "rests_on"}
_TOLD = [key for key in ResultFile.model_fields if key not in _OTHERS]
_EPSILON, _VERSIONS = "epsilon_", "versions"


def rows_of(results: Sequence[tuple[Point, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A row for each point's result, with a column for each accountant's ε and each setting."""
    return [
        {
            **{key: getattr(point, key) for key in _POINT},
            **{key: result.get(key) for key in _TOLD},
            _VERSIONS: " ".join(f"{key}={value}" for key, value in result["versions"].items()),
            **{f"{_EPSILON}{name}": value for name, value in result["epsilon"].items()},
            "trainer": point.trainer,
            **{
                key: str(value) if isinstance(value, Carried) else value
                for key, value in flat(point.config.model_dump(exclude={"seed", "about"})).items()
            },
        }
        for point, result in results
    ]


def varying_first(
    results: Sequence[tuple[Point, dict[str, Any]]], axes: Sequence[str]
) -> list[dict[str, Any]]:
    """The rows of results, with their columns in an order for people.

    Args:
        results: as for `rows_of`.
        axes: the columns that come first.

    Returns:
        The rows; those that differ in their seed alone stand together.
    """
    places = list(dict.fromkeys((point.series, point.value) for point, _ in results))
    together = sorted(results, key=lambda each: places.index((each[0].series, each[0].value)))
    rows = rows_of(together)
    first = [*axes, "seed", "score", "loss"]
    columns = dict.fromkeys([*first, *itertools.chain(*rows)])
    if "series" not in axes:
        del columns["series"], columns["value"]
    varies = {
        column: column in first or len({repr(row.get(column)) for row in rows}) > 1
        for column in columns
    }
    order = sorted(columns, key=lambda column: not varies[column])
    return [{column: row.get(column) for column in order} for row in rows]


def write_rows(results: Sequence[tuple[Point, dict[str, Any]]], path: Path) -> None:
    """Writes the rows of points' results."""
    rows = rows_of(results)
    heads = dict.fromkeys([*_POINT, *_TOLD, _VERSIONS, *itertools.chain(*rows)])
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
            missing = {*_POINT, "score", _VERSIONS}.difference(reader.fieldnames or ())
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
            write_result(folder / point.key, point, _came_to(row), strict=False)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the row of {point} is damaged: {one_line(error)}") from error


def _came_to(row: dict[str, str]) -> dict[str, Any]:
    """The result that `write_rows` made this row of, as text; an empty cell stands for none."""
    told = {key: row[key] for key in _TOLD if row.get(key)}
    epsilons = {
        key.removeprefix(_EPSILON): text or None
        for key, text in row.items()
        if key.startswith(_EPSILON)
    }
    versions = dict(each.split("=", 1) for each in row[_VERSIONS].split())
    return told | {"epsilon": epsilons, _VERSIONS: versions}
