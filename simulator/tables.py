"""Accountants' answers, as JSON, tables and plots show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from accounting import EpsilonRow


def epsilon_rows(rows: Iterable[EpsilonRow]) -> dict[str, dict[str, Any]]:
    """Each accountant's ε, and what it holds for, as plain values by the accountant's name."""
    return {
        row.name: {"epsilon": row.epsilon, "covers": row.covers, "warning": row.warning}
        for row in rows
    }


def print_epsilons(
    console: Console, title: str, rows: dict[str, dict[str, Any]], halting: str = ""
) -> None:
    """Prints the table of `epsilon_rows`, and with it a `lower_bound` where there is one."""
    table = Table(title=title, title_justify="left")
    table.add_column("accountant")
    table.add_column("ε", justify="right")
    table.add_column("holds for")
    for name, row in rows.items():
        holds_for, warning = row["covers"], row["warning"]
        if row["epsilon"] is None:  # all there is to say is why
            holds_for = warning or ""
        elif warning:
            holds_for += f" ({warning})"
        if row.get("lower_bound"):
            holds_for += f"; at least {row['lower_bound']:.4g} for this pair"
        mark = " (halts)" if name == halting else ""
        table.add_row(name + mark, epsilon_text(row["epsilon"]), holds_for)
    console.print(table)


def epsilon_text(epsilon: float | None) -> str:
    """An ε, or a dash for an accountant that does not price the mechanism."""
    return "–" if epsilon is None else f"{epsilon:.4g}"


@contextmanager
def draw(*paths: Path) -> Iterator[Any]:
    """Gives the axes of a plot, which is then written to each path, in the format of its name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    axes.grid(alpha=0.3)
    yield axes
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
