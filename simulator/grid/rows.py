"""The results of a grid as CSV: a row for each finished point, from which a grid can go on."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simulator.grid.points import read_result, write_result
from simulator.grid.settings import Point

_POINT = ("series", "value", "seed", "digest")
_WORDS = ("adjacency", "accountant", "command", "commit")
_NUMBERS = (
    "accuracy",
    "loss",
    "rounds",
    "delta",
    "check_in_rate",
    "noise_multiplier",
    "shuffler_blankets",
    "seconds",
)
_EPSILON = "epsilon_"


def write_rows(results: Sequence[tuple[Point, dict[str, Any]]], path: Path) -> None:
    """Writes points' results: a column for each accountant's ε, the versions as one."""
    accountants = sorted({name for _, result in results for name in result["epsilon"]})
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        epsilon_heads = (f"{_EPSILON}{name}" for name in accountants)
        writer.writerow([*_POINT, *_NUMBERS, *_WORDS, *epsilon_heads, "versions"])
        for point, result in results:
            of_point = (getattr(point, key) for key in _POINT)
            came_to = (result[key] for key in (*_NUMBERS, *_WORDS))
            versions = " ".join(f"{key}={value}" for key, value in result["versions"].items())
            epsilons = (result["epsilon"].get(name) for name in accountants)
            writer.writerow([*of_point, *came_to, *epsilons, versions])


def take_over_rows(path: Path, points: Sequence[Point], folder: Path) -> None:
    """Gives points their results from a table that an earlier session wrote.

    Args:
        path: what `write_rows` wrote; nothing happens if it is not there.
        points: those that have no result, and whose series and configuration are to the letter
            those of a row, get one.
        folder: has a folder for each point.

    Raises:
        ValueError: the file is not such a table.
    """
    if not path.exists():
        return
    with path.open(newline="", encoding="utf-8") as file:
        rows = {(row.get("series"), row.get("digest")): row for row in csv.DictReader(file)}
    for point in points:
        row = rows.get((point.series, point.digest))
        if row is not None and read_result(folder / point.key) is None:
            try:
                write_result(folder / point.key, point, _came_to(row))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{path} must be a table that shufl experiment wrote; the row of {point} is not"
                ) from error


def _came_to(row: dict[str, str]) -> dict[str, Any]:
    numbers = {key: float(row[key]) if row[key] else None for key in _NUMBERS}
    return {
        **numbers,
        **{key: row[key] for key in _WORDS},
        "rounds": int(row["rounds"]),
        "epsilon": {
            key.removeprefix(_EPSILON): float(text) if text else None
            for key, text in row.items()
            if key.startswith(_EPSILON)
        },
        "versions": dict(each.split("=", 1) for each in row["versions"].split()),
    }
