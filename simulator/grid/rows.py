"""The results of a grid as CSV: a row for each finished point, from which a grid can go on."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shufl.learning.config import flat
from shufl.learning.data.files import RecordFile
from shufl.learning.section import one_line
from shufl.simulator.grid.points import checked_result, read_result, write_result
from shufl.simulator.grid.settings import Point

_POINT = ("series", "value", "seed", "digest")
_WORDS = ("score_name", "adjacency", "accountant", "command", "commit", "date")
_NUMBERS = (
    "score",
    "loss",
    "rounds",
    "delta",
    "check_in_rate",
    "noise_multiplier",
    "shuffler_blankets",
    "central_noise",
    "seconds",
)
_NEW = ("date", "central_noise")  # older tables have none
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
            **flat(point.config.model_dump(exclude={"seed"})),
        }
        for point, result in results
    ]
    heads = dict.fromkeys([*_POINT, *_NUMBERS, *_WORDS, _VERSIONS, *itertools.chain(*rows)])
    unfinished = path.with_name(f"{path.name}.tmp")
    with unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(heads))
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)


def take_over_rows(path: Path, points: Sequence[Point], folder: Path) -> None:
    """Gives points their results from a table that an earlier session wrote.

    `path` is what `write_rows` wrote; nothing happens if it is not there. A point gets a row's
    result if series and configuration are to the letter the same. One whose records or model come
    from the reader's own code gets none: the same name may mean something else there.

    Raises:
        ValueError: the file is not such a table, or a row that is wanted is damaged.
    """
    if not path.exists():
        return
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            wanted = {*_POINT, *_NUMBERS, *_WORDS, _VERSIONS}.difference(_NEW)
            missing = wanted.difference(reader.fieldnames or ())
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
            came_to = _came_to(row)
            checked_result(point, came_to)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: the row of {point} is damaged: {one_line(error)}") from error
        write_result(folder / point.key, point, came_to)


def _came_to(row: dict[str, str]) -> dict[str, Any]:
    given = [key for key in _NUMBERS if row.get(key) or key not in _NEW]
    numbers = {key: float(row[key]) if row[key] else None for key in given}
    return {
        **numbers,
        **{key: row.get(key, "") for key in _WORDS},
        "rounds": int(row["rounds"]),
        "epsilon": {
            key.removeprefix(_EPSILON): float(text) if text else None
            for key, text in row.items()
            if key.startswith(_EPSILON)
        },
        _VERSIONS: dict(each.split("=", 1) for each in row[_VERSIONS].split()),
    }
