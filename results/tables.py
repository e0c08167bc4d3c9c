"""Scores and accountants' ε, as JSON and tables show them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.table import Table

from shufl.protocol.console import Console
from shufl.protocol.outcomes import RoundOutcome
from shufl.protocol.text import rounded_up

if TYPE_CHECKING:
    from shufl.accounting import EpsilonRow, PrivacyPlan


STOPPED = {
    "budget": "privacy budget: one more round would exceed it",
    "rounds": "all planned rounds done",
    "on_round": "stopped by on_round",
    "interrupt": "interrupted",
}
"""Why a run ended, by `stopped_by`."""

_SHARES = {"accuracy", "macro_f1"}
"""Metrics that are shown in percent."""


def score_text(name: str, value: float, digits: int = 2) -> str:
    """A metric's value as text; a percentage has `digits` digits after the point."""
    return f"{value:.{digits}%}" if name in _SHARES else f"{value:.4g}"


def score_axis(name: str) -> tuple[str, float]:
    """A metric's label on a plot's axis, and the factor of its values there."""
    return (f"test {name} (%)", 100.0) if name in _SHARES else (f"test {name}", 1.0)


def scores_of(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """The rows of evaluated rounds whose score is a finite number, each with its score."""
    scored = ((row, row[row["score"]]) for row in rows)
    return [(row, score) for row, score in scored if score is not None and math.isfinite(score)]


def last_doubt(rows: list[dict[str, Any]]) -> str:
    """The last doubt that a round's row states, for the run's operator to look into; "" if none.

    A later round without a doubt does not take it back.
    """
    return next((row["doubt"] for row in reversed(rows) if row["doubt"]), "")


# The server may have received part of a lost round.
_MAY_BE_KNOWN = {RoundOutcome.RELEASED, RoundOutcome.LOST}


def too_few_present(plan: PrivacyPlan, rows: list[dict[str, Any]], rounds: int) -> bool:
    """Whether one of the first `rounds` rounds may have been released with too few users.

    Accountants that count on other users price at least `least_present` of them, as the plan says.
    If such an accountant halts the run, a batch of fewer users is destroyed; otherwise it is
    released. A round without a row in metrics.jsonl may have been released with fewer.
    """
    if plan.make_accountant().counts_on_others:
        return False
    return len(rows) < rounds or any(
        row["outcome"] in _MAY_BE_KNOWN and row["smallest_crowd"] < plan.least_present
        for row in rows
    )


def epsilon_rows(rows: Iterable[EpsilonRow]) -> dict[str, dict[str, Any]]:
    """Each accountant's ε, and what it holds for, as plain values by the accountant's name."""
    return {
        row.name: {"epsilon": row.epsilon, "covers": row.covers, "warning": row.warning}
        | ({} if row.planned is None else {"planned": row.planned})
        for row in rows
    }


AS_PLANNED = (
    "Fewer rounds are spent than the budget allows. If a person stopped the run after a look at "
    "it, state ε as planned: the moment was chosen by the data."
)


def epsilon_cells(rows: dict[str, dict[str, Any]], halting: str = "") -> list[list[str]]:
    """The table of `epsilon_rows`, its heads first; a run that was stopped has ε as planned too."""
    stopped = any("planned" in row for row in rows.values())
    cells = [["accountant", *(["ε so far", "ε as planned"] if stopped else ["ε"]), "holds for"]]
    for name, row in rows.items():
        epsilons = [row["epsilon"], row.get("planned")] if stopped else [row["epsilon"]]
        mark = " (halts)" if name == halting else ""
        cells.append([name + mark, *map(epsilon_text, epsilons), holds_for(row)])
    return cells


def for_every_pair(epsilons: dict[str, float | None]) -> str | None:
    """The name of the accountant with the least ε that holds for every pair; None if none does."""
    from shufl.accounting import ACCOUNTANTS

    every = {name for name, each in ACCOUNTANTS.items() if each.holds_for == "every pair"}
    every |= {"opacus", "central"}  # of the references `central` and `central-users`
    given = {name: value for name, value in epsilons.items() if value is not None}
    return min(every.intersection(given), key=lambda name: given[name], default=None)


def print_epsilons(
    console: Console, title: str, rows: dict[str, dict[str, Any]], halting: str = ""
) -> None:
    """Prints the table of `epsilon_rows`; `halting` is the accountant that halts the run."""
    table = Table(title=title, title_justify="left")
    heads, *cells = epsilon_cells(rows, halting)
    for head in heads:
        table.add_column(head, justify="right" if head.startswith("ε") else "left")
    for row in cells:
        table.add_row(*row)
    console.print(table)
    if "ε as planned" in heads:
        console.print(AS_PLANNED, highlight=False)


def holds_for(row: dict[str, Any]) -> str:
    """What an ε of `epsilon_rows` holds for, or why there is none."""
    if row["epsilon"] is None:
        return row["warning"] or ""
    text: str = row["covers"]
    if row["warning"]:
        text += f" ({row['warning']})"
    return text


def epsilon_text(epsilon: float | None) -> str:
    """Four digits of an ε, rounded up; a dash if the accountant does not price it."""
    return "–" if epsilon is None else rounded_up(epsilon)
