"""Plots of runs, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shufl.protocol.text import rounded_down, rounded_up
from shufl.results.tables import score_axis, scores_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shufl.accounting import PrivacyPlan


def check_format(option: str, path: Path) -> None:
    """Refuses a file whose name ends in no format that plots are written in."""
    from matplotlib.backend_bases import FigureCanvasBase

    allowed = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in allowed:
        raise ValueError(f"{option} must end in one of {', '.join(allowed)}, got {path}")


_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000", "#777")
_MARKERS = "os^DvPX*<"
"""The colour-blind can tell Okabe and Ito's colours apart; markers differ on a grey print."""


@contextmanager
def draw(*paths: Path) -> Iterator[Any]:
    """Gives the axes of a plot in a `with` block; then writes the plot to each path.

    The ending of a path names the format. Lines differ in colour and marker. The legend stands
    below the plot. The label of a logarithmic axis says that it is one.
    """
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # not by pyplot, whose state may be a notebook's
    from matplotlib.ticker import LogFormatter

    from shufl.results.ticks import PlainNumbers

    colours, markers = _COLOURS * len(_MARKERS), list(_MARKERS) * len(_COLOURS)
    styles: Any = {
        "axes.prop_cycle": cycler(color=colours) + cycler(marker=markers),
        "lines.markersize": 5,
        "lines.linewidth": 1.2,
        "text.parse_math": False,  # two dollars in a text of yours are no formula
    }
    with rc_context(styles):
        figure = Figure(figsize=(6, 4.4), layout="constrained")
        axes = figure.subplots()
        axes.grid(alpha=0.3)
        yield axes
        for axis in (axis for each in figure.axes for axis in (each.xaxis, each.yaxis)):
            if axis.get_scale() == "log":
                if isinstance(axis.get_major_formatter(), LogFormatter):  # not labels of its own
                    axis.set_major_formatter(PlainNumbers())
                if isinstance(axis.get_minor_formatter(), LogFormatter):
                    axis.set_minor_formatter(PlainNumbers())
                if label := axis.get_label_text():
                    axis.set_label_text(f"{label}, log scale")
        if any(each.get_legend_handles_labels()[0] for each in figure.axes):
            figure.legend(loc="outside lower center", ncols=2, fontsize="small", handlelength=3.5)
        for path in paths:
            figure.savefig(path, dpi=150)


def style_of(accountant: str) -> dict[str, Any]:
    """A solid line for an ε that holds for every pair, a dashed one for the homogeneous pair alone.

    A name that is no accountant's gets a dotted line.
    """
    from shufl.accounting import ACCOUNTANTS

    if accountant not in ACCOUNTANTS:
        return {"label": accountant, "linestyle": ":"}
    pairs = ACCOUNTANTS[accountant].holds_for
    return {"label": f"{accountant}, {pairs}", "linestyle": "-" if pairs == "every pair" else "--"}


def plot_score_epsilon(rows: list[dict[str, Any]], plan: PrivacyPlan, *paths: Path) -> Figure:
    """The test score against epsilon, one line an accountant, the budget as a vertical line."""
    from shufl.accounting import accountants_for

    evaluated = scores_of(rows)
    label, unit = score_axis(rows[0]["score"]) if rows else ("", 1.0)
    with draw(*paths) as axes:
        for name in accountants_for(plan.event()):
            priced = [
                each for each in evaluated if each[0]["epsilons"][name] not in (None, math.inf)
            ]
            if evaluated and not priced:  # nothing to draw, and matplotlib would not draw it
                continue
            axes.plot(
                [row["epsilons"][name] for row, _ in priced],
                [unit * score for _, score in priced],
                markevery=0.1,  # of the plot's width: every round would hide the line
                **style_of(name),
            )
        axes.axvline(
            plan.target_epsilon, color="grey", linestyle=":", label=f"budget of {plan.accountant}"
        )
        axes.set(
            xscale="log",
            xlabel=f"ε at δ = {rounded_up(plan.delta)} ({plan.adjacency})",
            ylabel=label,
            title=f"n = {plan.users}, γ = {rounded_down(plan.check_in_rate, 6)}, "
            f"z = {rounded_up(plan.mechanism.noise_multiplier, 6)}, "
            f"λ = {rounded_up(plan.shuffler_blankets, 6)}",
        )
    return axes.figure


def plot_rounds(rows: list[dict[str, Any]], path: Path) -> Figure:
    """Reports and the test score, round by round."""
    with draw(path) as axes:
        reports = [row["reports"] for row in rows]
        axes.bar(
            [row["round"] for row in rows], reports, width=1.0, color="#bde", label="reports (left)"
        )
        axes.set(xlabel="round", ylabel="reports")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if evaluated := scores_of(rows):
            name = evaluated[0][0]["score"]
            label, unit = score_axis(name)
            beside = axes.twinx()
            beside.plot(
                [row["round"] for row, _ in evaluated],
                [unit * score for _, score in evaluated],
                color="#d40",
                markevery=0.1,
                label=f"test {name} (right)",
            )
            beside.set(ylabel=label)
    return axes.figure
