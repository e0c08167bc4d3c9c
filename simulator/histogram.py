"""A private histogram of a categorical column: its estimate, its error, and its simulation.

Every user reports one category by `RandomisedResponse`, and the shuffler adds blankets. On real
machines this is a run of `configs/histogram.toml`. Here the reports are drawn as counts and not
made one by one, since a shuffler's release tells only how many reports each category has.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shufl.accounting import ACCOUNTANTS, OpenPlan, PrivacyPlan, calibrate, unused_note
from shufl.learning.data.files import COMMAS, CsvForm, is_parquet, no_column, read_table
from shufl.learning.data.person_ids import looks, number_users, spelt
from shufl.protocol import RandomisedResponse
from shufl.protocol.mechanisms import make_randomness
from shufl.protocol.plan_fields import AccountantName

_CONFIDENT = 1.959964  # half the width of a 95 % interval, in standard errors


@dataclass(frozen=True)
class Histogram:
    """A server's estimate of how many users have each category.

    Attributes:
        shares: of all users, shape (k,); they are unbiased, so that some may be below 0.
        errors: standard errors of the shares, shape (k,), from coins, answers and blankets.
    """

    shares: np.ndarray
    errors: np.ndarray

    @classmethod
    def of(
        cls,
        shares: np.ndarray,
        plan: PrivacyPlan,
        present: int | None = None,
        shufflers: int = 1,
        one_each: bool = False,
    ) -> Histogram:
        """Adds the standard errors, which follow from the plan and the shares themselves.

        Args:
            shares: of all users, shape (k,).
            plan: of randomised response over k categories.
            present: how many users were present. Default: all.
            shufflers: the number of shufflers; each adds its own blankets.
            one_each: whether every user has one category. Otherwise a user may have records of many
                categories, and its report varies more.
        """
        k, users, rate = len(shares), present or plan.users, plan.check_in_rate
        truth = response_of(plan).truth
        held = np.clip(shares, 0.0, 1.0)
        reported = truth * held + (1.0 - truth) / k
        # E[(1{report = j} - 1/k)²], of a user's report and of a blanket; less the mean's square.
        user = (reported * (1.0 - 2.0 / k) + 1.0 / k**2) / (rate * truth**2)
        mean = (held - 1.0 / k) ** 2  # the mean over users is no less, and is this if all are alike
        if one_each:
            mean = held * (1.0 - 1.0 / k) ** 2 + (1.0 - held) / k**2
        blankets = shufflers * plan.shuffler_blankets * (1.0 - 1.0 / k) / k / (rate * truth) ** 2
        return cls(shares, np.sqrt((users * (user - mean) + blankets) / users**2))

    @property
    def margins(self) -> np.ndarray:
        """Half the width of each share's 95 % interval."""
        return _CONFIDENT * self.errors

    def consistent(self) -> Histogram:
        """The nearest shares that are at least 0 and add up to 1, with the same errors.

        This is the Euclidean projection on the simplex; Wang et al. 2020, "Locally differentially
        private frequency estimation with consistency", call it Norm-Sub.
        """
        falling = np.sort(self.shares)[::-1]
        excess = (np.cumsum(falling) - 1.0) / np.arange(1, len(falling) + 1)
        kept = np.flatnonzero(falling > excess)[-1]
        return Histogram(np.maximum(self.shares - excess[kept], 0.0), self.errors)


def response_of(plan: PrivacyPlan) -> RandomisedResponse:
    """The mechanism of a histogram's plan."""
    assert isinstance(plan.mechanism, RandomisedResponse)
    return plan.mechanism


def plan_for(
    users: int,
    categories: int,
    accountant: AccountantName = "blanket",
    *,
    target_epsilon: float,
    delta: float,
    check_in_rate: float = 1.0,
    local_epsilon: float | None = None,
) -> tuple[PrivacyPlan, str | None]:
    """The plan of one round with about the least error that the target allows.

    Args:
        users: n.
        categories: k, at least 2.
        accountant: prices the round. Without blankets, if it does not count them.
        target_epsilon, delta: of the round.
        check_in_rate: γ.
        local_epsilon: ε₀ of a report. Default: the best one.

    Returns:
        The plan, and its `unused_note`.

    Raises:
        ValueError: a value is out of range, or nothing reaches the target.
    """
    counts = ACCOUNTANTS[accountant].counts_on_blankets
    asked = OpenPlan(
        users=users,
        mechanism="randomised-response",
        categories=categories,
        rounds=1,
        minimum_batch=1,
        shuffler_blankets="least-error" if counts else 0.0,
        accountant=accountant,
        target_epsilon=target_epsilon,
        delta=delta,
        check_in_rate=check_in_rate,
        local_epsilon=local_epsilon,
    )
    plan = calibrate(asked)
    if not asked.open and (costs := plan.epsilon()) > target_epsilon:
        raise ValueError(
            f"local_epsilon must be smaller for ε {target_epsilon:g}: by {accountant}, "
            f"{local_epsilon:g} costs {costs:.4g}"
        )
    return plan, unused_note(asked, plan)


class Column(NamedTuple):
    """The values in a column of a file.

    Attributes:
        counts: how many users have each category in the row that they report: shape (k,).
        shares: each category's share of a user's rows, as a mean over users: shape (k,).
        rows: how many rows the file has.
    """

    counts: np.ndarray
    shares: np.ndarray
    rows: int


def simulate(counts: np.ndarray, plan: PrivacyPlan, seed: int, one_each: bool = True) -> Histogram:
    """What a server would estimate.

    Args:
        counts: how many users report each category, shape (k,).
        plan: of randomised response over k categories.
        seed: of all that is random.
        one_each: as for `Histogram.of`.
    """
    draw, k = np.random.Generator(np.random.Philox(key=seed)), len(counts)
    rate, truth = plan.check_in_rate, response_of(plan).truth
    present = draw.binomial(counts, rate)
    true = draw.binomial(present, truth)
    uniform = int((present - true).sum()) + int(draw.poisson(plan.shuffler_blankets))
    reports = true + draw.multinomial(uniform, np.full(k, 1.0 / k))
    shares = 1.0 / k + (reports - reports.sum() / k) / (plan.users * rate * truth)
    return Histogram.of(shares, plan, one_each=one_each)


def count_column(
    path: Path,
    column: str,
    categories: list[str],
    other: bool,
    user_column: str | None = None,
    seed: int | None = None,
    form: CsvForm = COMMAS,
) -> Column:
    """Counts the users of a CSV or Parquet file who report each category.

    In CSV the first line names the columns, and every other line is a row: a quote must end in its
    line, since one that is left open would turn many users into a single value.

    Args:
        path: of the file.
        column: the name of the column with the values.
        categories: k values, all that there may be.
        other: whether the last category stands for any other value.
        user_column: the name of the column with users' ids. One row of each user counts, drawn at
            random. Default: each row is another user's.
        seed: of the draw. Default: the operating system's entropy.
        form: of a CSV file: its separator and encoding.

    Raises:
        ValueError: a line is not a row, a column is missing, a value is no category, or there are
            no rows. An error quotes only what looks like a category or like another user's id.
    """
    if is_parquet(path):
        table, row_at, first = read_table(path), "record", 1
        names, columns = table.column_names, [each.to_pylist() for each in table.columns]
    else:
        row_at, first = "line", 2
        names, columns = _table(path, form)
    if not columns or not columns[0]:
        raise ValueError(f"{path} has no rows")
    place = _place("--column", column, names)
    values = ["" if cell is None else str(cell) for cell in columns[place]]
    named = dict.fromkeys(categories[:-1] if other else categories)
    seen = {looks(category): category for category in named}
    for value in (value for value in dict.fromkeys(values) if value not in named):
        where = f"{path}, {row_at} {values.index(value) + first}: column {column!r} has"
        if (meant := seen.get(looks(value))) is not None:
            raise ValueError(
                f"{where} {spelt(value)}, which looks like the category {spelt(meant)} and is "
                "another"
            )
        if not other:
            what = 'the empty value, which "" names,' if value == "" else "a value"
            raise ValueError(f"{where} {what} that is not among --categories; or give --other")
    places = {category: place for place, category in enumerate(categories)}
    held = np.array([places.get(value, len(categories) - 1) for value in values])
    owners = np.arange(len(values))
    if user_column is not None:
        of_user = _place("--user-column", user_column, names)
        if of_user == place:
            raise ValueError(f"--user-column must be another than --column, got {column}")
        owners = number_users(columns[of_user], f"{path}: column {user_column!r}", row_at, first)
    sizes = np.bincount(owners)
    draws = make_randomness(seed).training_seeds(0, np.arange(len(sizes)))
    of_own = (draws % sizes.astype(np.uint64)).astype(np.int64)  # uniform, to some 2^-64 sizes
    chosen = owners.argsort(kind="stable")[sizes.cumsum() - sizes + of_own]
    k = len(categories)
    shares = np.bincount(held, 1.0 / sizes[owners], k) / len(sizes)
    return Column(np.bincount(held[chosen], minlength=k), shares, len(values))


def _table(path: Path, form: CsvForm) -> tuple[list[str], list[list[str]]]:
    """Names and columns of a CSV file; refuses a line that is not a row."""
    rows: list[list[str]] = []
    encoding = form.encoding.upper()
    refusal = f"{path} must be CSV in {encoding}, a row a line, with no quote left open: line"
    content = path.read_bytes()
    try:
        text = content.decode(form.encoding).removeprefix("\ufeff")
    except LookupError:
        raise ValueError(f"--encoding must be one that Python knows, got {form.encoding}") from None
    except UnicodeDecodeError as error:
        number = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{refusal} {number}: it is not {encoding}; see --encoding") from None
    for number, line in enumerate(io.StringIO(text), 1):
        try:
            (row,) = csv.reader([line], strict=True, delimiter=form.separator)
            if not (row or rows):
                raise csv.Error("it is blank")
            if rows and len(row) != len(rows[0]):
                raise csv.Error(f"it has {len(row)} fields, line 1 has {len(rows[0])}")
        except csv.Error as error:
            raise ValueError(f"{refusal} {number}: {error}") from None
        rows.append(row)
    names, *rows = rows or [[]]
    return names, [[row[place] for row in rows] for place in range(len(names))]


def _place(option: str, column: str, names: list[str]) -> int:
    """The index of a column; refuses a name that is missing, or that another looks like."""
    if column not in names:
        raise ValueError(f"{option}: {no_column(column, names)}")
    if list(map(looks, names)).count(looks(column)) > 1:
        raise ValueError(f"{option} must differ from all other columns, got {column}")
    return names.index(column)
