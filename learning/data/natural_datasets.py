"""Small public datasets of people who rate lecturers or films: every record has a user.

A record is a row of ids, one for each of its properties, for the model `additive`. The ids are
public, and so is the middle of the scale of ratings. A fifth of the users are for testing.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from shufl.learning.data.datasets import Dataset
from shufl.learning.data.files import read_table
from shufl.learning.data.person_ids import number_users
from shufl.protocol.validation import ConfigError

_KEY = 2972  # of the choice of the users for testing
_DECADES = range(190, 202)


def insteval() -> Dataset:
    """Students of ETH Zurich rate lecturers: 73 421 ratings from 1 to 5 of 2 972 students.

    A record has five ids: of the lecturer, of the student's age, of the lecture's age, of whether
    the lecture is for another department, and of the department. The label is the rating less 3.
    """
    names = ["s", "d", "studage", "lectage", "service", "dept", "y"]
    how = "in R: write.csv(lme4::InstEval, gzfile('insteval.csv.gz'), row.names = FALSE)"
    columns = _columns("insteval.csv.gz", names, how)
    properties = [np.unique(columns[name], return_inverse=True)[1] for name in names[1:-1]]
    return _dataset(columns["s"], properties, columns["y"].astype(np.float32) - 3.0)


def movielens() -> Dataset:
    """671 people rate films: 100 004 ratings from 0.5 to 5 (MovieLens latest small, 2016).

    A record has the ids of the film and of its decade, and for each of 19 genres the id of whether
    the film has it. The label is the rating less 3.
    """
    how = "MovieLens latest small of 2016, as R's dslabs::movielens has it"
    ratings = _columns("movielens-ratings.csv.gz", ["userId", "movieId", "rating"], how)
    films = _columns("movielens-movies.csv.gz", ["movieId", "year", "genres"], how)
    order = films["movieId"].argsort()
    place = order[np.searchsorted(films["movieId"], ratings["movieId"], sorter=order)]
    years = np.nan_to_num(films["year"].astype(float), nan=1900.0).astype(int) // 10
    genres = [set(str(each).split("|")) for each in films["genres"]]
    known = sorted(set().union(*genres) - {"(no genres listed)"})
    has = [np.array([name in each for each in genres]).astype(int) for name in known]
    of_films = [np.arange(len(years)), np.clip(years - _DECADES[0], 0, len(_DECADES) - 1), *has]
    counts = [len(years), len(_DECADES), *[2] * len(known)]
    label = ratings["rating"].astype(np.float32) - 3.0
    return _dataset(ratings["userId"], [each[place] for each in of_films], label, counts)


def _columns(name: str, columns: list[str], how: str) -> dict[str, np.ndarray]:
    folder = os.environ.get("SHUFL_DATA")
    path = Path(folder or "", "natural", name).expanduser()
    if not folder or not path.is_file():
        raise ConfigError(
            f"{name} must be in the folder natural of the one that SHUFL_DATA names, got "
            f"{path if folder else 'no SHUFL_DATA'} ({how})"
        )
    table = read_table(path)
    if missing := set(columns).difference(table.column_names):
        raise ConfigError(f"{path} must have a column {min(missing)}")
    return {each: table.column(each).to_numpy() for each in columns}


def _dataset(
    users: np.ndarray,
    properties: list[np.ndarray],
    labels: np.ndarray,
    counts: list[int] | None = None,
) -> Dataset:
    """A dataset of ratings.

    Args:
        users: r ids.
        properties: of each property r values, numbered from 0.
        labels: float32 of shape (r,).
        counts: how many values each property has. Default: those that there are.
    """
    counts = counts or [int(each.max()) + 1 for each in properties]
    starts = np.concatenate([[0], np.cumsum(counts[:-1])])
    ids = torch.from_numpy(np.stack(properties, axis=1) + starts)
    owners = torch.from_numpy(number_users(users))
    random = np.random.Generator(np.random.Philox(key=_KEY))
    chosen = random.permutation(int(owners.max()) + 1)
    tested = torch.isin(owners, torch.from_numpy(chosen[: len(chosen) // 5]))
    ratings = torch.from_numpy(labels)
    return Dataset(
        train_features=ids[~tested],
        train_labels=ratings[~tested],
        test_features=ids[tested],
        test_labels=ratings[tested],
        users=owners[~tested],
        task="regression",
    )
