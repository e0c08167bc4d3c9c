"""A private histogram of a categorical column: its estimate, its error, and its simulation.

Every user reports one category by `RandomisedResponse`, and the shuffler adds blankets. Between
machines it is a run of `configs/histogram.toml`. Here the reports are counted, not made one by one:
what a shuffler releases of them is how many there are of each category, and nothing else.
"""

from __future__ import annotations

import codecs
import csv
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shufl.accounting import (
    ACCOUNTANTS,
    OpenPlan,
    PrivacyPlan,
    RandomisedResponse,
    calibrate,
    unused_note,
)
from shufl.accounting.plan import AccountantName

_CONFIDENT = 1.959964  # standard errors of 95 %


@dataclass(frozen=True)
class Histogram:
    """What a server knows of the users' categories.

    Attributes:
        shares: of all users, shape (k,); unbiased, so that some may be below 0.
        errors: standard errors of the shares, of everything that is random: coins, answers and
            blankets, shape (k,).
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
        """With the standard errors that follow from the plan and the shares themselves.

        The plan has randomised response. Each of the `shufflers` has its own blankets.

        Args:
            shares: unbiased estimates, shape (k,).
            present: how many users were there; None: all.
            one_each: every user is known to have one category. A user of several records has shares
                of many, and the reports of such users vary more, by as much as this assumes then.
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
        """The nearest shares that are none below 0 and 1 in all; the errors stay as they are.

        The Euclidean projection on the simplex, which Wang et al. 2020, "Locally differentially
        private frequency estimation with consistency", call Norm-Sub.
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
    target_epsilon: float,
    delta: float,
    check_in_rate: float = 1.0,
    accountant: AccountantName = "blanket",
    local_epsilon: float | None = None,
) -> tuple[PrivacyPlan, str | None]:
    """The plan of one round of reports with about the least error that the target allows.

    With it comes why it does not use up the target, or None. n users, k categories, and
    γ = `check_in_rate`. With an accountant that does not count blankets there are none.
    ε₀ = `local_epsilon` is the best one if None.

    Raises:
        ValueError: a value out of range, or nothing reaches the target.
    """
    counts = ACCOUNTANTS[accountant].counts_on_blankets
    asked = OpenPlan(
        users=users,
        check_in_rate=check_in_rate,
        mechanism="randomised-response",
        categories=categories,
        local_epsilon=local_epsilon,
        rounds=1,
        delta=delta,
        target_epsilon=target_epsilon,
        minimum_batch=1,
        shuffler_blankets="least-error" if counts else 0.0,
        accountant=accountant,
    )
    plan = calibrate(asked)
    if not asked.open and (costs := plan.epsilon()) > target_epsilon:
        raise ValueError(
            f"local_epsilon must be smaller for ε {target_epsilon:g}: by {accountant}, "
            f"{local_epsilon:g} costs {costs:.4g}"
        )
    return plan, unused_note(asked, plan)


def simulate(counts: np.ndarray, plan: PrivacyPlan, seed: int) -> Histogram:
    """What a server would estimate of users whose categories are known.

    `counts` are the users of each category, shape (k,). The plan has randomised response.
    """
    draw, k = np.random.Generator(np.random.Philox(key=seed)), len(counts)
    rate, truth = plan.check_in_rate, response_of(plan).truth
    present = draw.binomial(counts, rate)
    true = draw.binomial(present, truth)
    uniform = int((present - true).sum()) + int(draw.poisson(plan.shuffler_blankets))
    reports = true + draw.multinomial(uniform, np.full(k, 1.0 / k))
    shares = 1.0 / k + (reports - reports.sum() / k) / (plan.users * rate * truth)
    return Histogram.of(shares, plan, one_each=True)


def count_column(path: Path, column: str, categories: list[str], other: bool) -> np.ndarray:
    """How many rows of a CSV file have each category, shape (k,).

    Every line is a row. What a reader of CSV would mend in silence is refused: one open quote makes
    one value of many users.

    The first line names the columns. No two of the categories, which are all there may be, are
    alike; `other` says whether the last of them stands for any other value.

    Raises:
        ValueError: a line is no row, the column or a value's category is not there, or there are no
            rows; names the line, and shows a few characters of it.
    """
    names: list[str] = []
    found: Counter[str] = Counter()
    first: dict[str, int] = {}  # line of each value
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if number == 1:
                    names = _fields(line.removeprefix(codecs.BOM_UTF8))
                    place = _place(column, names)
                    continue
                row = _fields(line)
                if len(row) != len(names):
                    raise _NoRow(f"has {len(row)} fields, line 1 has {len(names)}")
            except _NoRow as why:
                raise ValueError(f"{path} must be CSV in UTF-8: line {number} {why}") from None
            found[row[place]] += 1
            first.setdefault(row[place], number)
    if not found:
        raise ValueError(f"{path} has no rows")
    _check_values(path, column, first, categories[:-1] if other else categories, other)
    counts = [found.pop(category, 0) for category in categories]
    if other:
        counts[-1] += found.total()
    return np.array(counts)


_ODD = r"\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ufeff"
"""Control characters but the tab, line breaks, and the mark that may begin a file."""

_PLAIN = re.compile(f'[^"{_ODD}]*')
_FIELD = f'(?:"(?:[^"{_ODD}]|"")*"|[^",{_ODD}]*)'
_QUOTED = re.compile(f"{_FIELD}(?:,{_FIELD})*")
_MOST_IN_LINE = 2**17
_MOST_SHOWN = 60


class _NoRow(ValueError):
    """Why a line is no row of a CSV file."""


def _fields(line: bytes) -> list[str]:
    """The fields of a line of CSV (RFC 4180), in none of which a line may end.

    Raises:
        _NoRow: it has none.
    """
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").decode()
    except UnicodeDecodeError as error:
        raise _NoRow(f"has bytes that are not UTF-8, from byte {error.start + 1} on") from None
    if not text:
        raise _NoRow('is blank; an empty value alone is written ""')
    if len(text) > _MOST_IN_LINE:
        raise _NoRow(f"has {len(text)} characters, at most {_MOST_IN_LINE} are read")
    if _PLAIN.fullmatch(text):
        return text.split(",")
    if odd := re.search(f"[{_ODD}]", text):
        raise _NoRow(f"has the character {odd[0]!a} at place {odd.start() + 1}")
    if not _QUOTED.fullmatch(text):
        raise _NoRow(
            "has an open or a stray quote: quotes are around a whole field, two stand for one in "
            "it, and no line ends between them"
        )
    return next(csv.reader([text], strict=True))


def _place(column: str, names: list[str]) -> int:
    """Where a column is.

    Raises:
        _NoRow: two columns have one name.
        ValueError: it is not there.
    """
    twice = [name for name, count in Counter(map(_looks, names)).items() if count > 1]
    if twice:
        raise _NoRow(f"names the column {shown(twice[0])} twice")
    if column not in names:
        listed = ", ".join(name if name == _looks(name) else shown(name) for name in names)
        listed = listed if len(listed) <= 5 * _MOST_SHOWN else f"{listed[: 5 * _MOST_SHOWN]} …"
        raise ValueError(f"--column must be one of {listed}, got {column}")
    return names.index(column)


def _check_values(
    path: Path, column: str, first: dict[str, int], named: list[str], other: bool
) -> None:
    """Refuses a value that is in no category, or looks like one of another.

    Raises:
        ValueError: names its first line.
    """
    looks = {_looks(category): category for category in named}
    for value in sorted(first.keys() - set(named), key=first.__getitem__):
        meant = looks.get(_looks(value))
        where = f"{path}, line {first[value]}: column {shown(column)} has {shown(value)}"
        if meant is not None:
            raise ValueError(
                f"{where}, which is not the category {shown(meant)}: they differ in spaces or in "
                "characters that look alike"
            )
        if not other:
            how = ' as ""' if value == "" else ""
            raise ValueError(
                f"{where}, which is not among --categories; name it there{how}, or give --other"
            )


def _looks(text: str) -> str:
    """What a reader sees of a text."""
    return "".join(filter(str.isprintable, unicodedata.normalize("NFKC", text))).strip()


def shown(text: str) -> str:
    """A text in quotes, a few characters of it if it is long."""
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")
