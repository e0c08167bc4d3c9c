"""Plots of runs, by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shufl.accounting import PrivacyPlan


def check_format(option: str, path: Path) -> None:
    """Refuses a file whose name ends in no format that plots are written in.

    Raises:
        ValueError: one line.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    allowed = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in allowed:
        raise ValueError(f"{option} must end in one of {', '.join(allowed)}, got {path}")


@contextmanager
def draw(*paths: Path) -> Iterator[Any]:
    """Gives the axes of a plot, which is then written to each path, in the format of its name."""
    from matplotlib.figure import Figure  # a notebook's pyplot is left alone

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    yield axes
    for path in paths:
        figure.savefig(path, dpi=150)


def plot_accuracy_epsilon(rows: list[dict[str, Any]], plan: PrivacyPlan, *paths: Path) -> Figure:
    """Test accuracy against epsilon, one line an accountant, the budget as a vertical line."""
    from shufl.accounting import accountants_for

    evaluated = [row for row in rows if row["accuracy"] is not None]
    with draw(*paths) as axes:
        for name in accountants_for(plan.event()):
            priced = [row for row in evaluated if row["epsilons"][name] is not None]
            axes.plot(
                [row["epsilons"][name] for row in priced],
                [100 * row["accuracy"] for row in priced],
                marker=".",
                label=name,
            )
        axes.axvline(
            plan.target_epsilon, color="grey", linestyle="--", label=f"budget ({plan.accountant})"
        )
        axes.set(
            xscale="log",
            xlabel=f"ε at δ = {plan.delta:.3g} ({plan.adjacency})",
            ylabel="test accuracy (%)",
            title=f"n = {plan.users}, γ = {plan.check_in_rate:g}, "
            f"z = {plan.mechanism.noise_multiplier:g}, λ = {plan.shuffler_blankets:g}",
        )
        axes.legend()
    return axes.figure


def plot_rounds(rows: list[dict[str, Any]], path: Path) -> None:
    """Reports and test accuracy, round by round."""
    with draw(path) as axes:
        numbers = [row["round"] for row in rows]
        axes.bar(
            numbers, [row["reports"] for row in rows], width=1.0, color="#8cf", label="reports"
        )
        axes.set(xlabel="round", ylabel="reports")
        evaluated = [row for row in rows if row["accuracy"] is not None]
        if evaluated:
            beside = axes.twinx()
            beside.plot(
                [row["round"] for row in evaluated],
                [100 * row["accuracy"] for row in evaluated],
                color="#d40",
                marker="." if len(evaluated) < 100 else "",
            )
            beside.set(ylabel="test accuracy (%), the line")
