"""`shufl account` and `compare`: ε by every accountant on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.rounding import rounded_up
from shufl.results.plots import check_format, draw, style_of
from shufl.results.tables import epsilon_rows, epsilon_text, print_epsilons, too_few_present


def account_command(
    run: Annotated[Path | None, typer.Argument(help="A run folder, instead of a plan.")] = None,
    n: options.Users = None,
    gamma: options.Rate = None,
    noise: options.Noise = None,
    rounds: options.Rounds = None,
    delta: options.Delta = "1/n",
    adjacency: options.Adjacency = "replace",
    blankets: options.Blankets = 0.0,
    mechanism: options.Mechanism = "gaussian",
    participation: options.Participation = "check-in",
    mixing: options.Mixing = "shuffle",
    central_noise: options.CentralNoise = None,
    json: options.Json = False,
) -> None:
    """Print ε by every accountant, for a plan given by flags or for a run folder."""
    from shufl.accounting import LedgerError, epsilon_table, price

    with options.failing(ValueError, LedgerError):
        if run is not None:
            options.check_alone("a run folder, which has its plan", "json")
            from shufl.results.rows import read_run  # slow to import

            ledger, records = read_run(run)
            plan, count = ledger.plan, len(ledger.entries)
            too_few = too_few_present(plan, records, count)
            found = epsilon_table(plan, count, too_few, lower=True)
        else:
            given = n, gamma, noise, rounds, delta, adjacency, blankets, mechanism
            plan = options.whole_plan(*given, participation, mixing, central_noise)
            count = plan.rounds
            found = price(plan.event(), count, plan.adjacency, plan.delta, lower=True)
    options.warn_of_delta(plan, count)
    rows = epsilon_rows(found)
    for row in found:
        rows[row.name]["lower_bound"] = row.lower
    if json:
        options.print_json(rows)
    else:
        print_epsilons(Console(), f"ε at δ = {rounded_up(plan.delta)}, {plan.adjacency}", rows)


def compare_command(
    n: options.Users = None,
    gamma: options.Rate = None,
    noise: options.Noise = None,
    rounds: options.Rounds = None,
    delta: options.Delta = "1/n",
    adjacency: options.Adjacency = "replace",
    blankets: options.Blankets = 0.0,
    mechanism: options.Mechanism = "gaussian",
    participation: options.Participation = "check-in",
    mixing: options.Mixing = "shuffle",
    central_noise: options.CentralNoise = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Also draw ε against rounds to this file.")
    ] = None,
    peers: Annotated[
        bool,
        typer.Option("--peers", help="Also show other systems, at one report's ε₀ (replace only)."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Print, and plot, ε against rounds by every accountant side by side."""
    from shufl.accounting import price
    from shufl.accounting.peers import comparisons
    from shufl.protocol import RandomisedResponse

    with options.failing(ValueError, OSError):
        given = n, gamma, noise, rounds, delta, adjacency, blankets, mechanism
        plan = options.whole_plan(*given, participation, mixing, central_noise)
        event, last, at = plan.event(), plan.rounds, plan.delta
        assert not isinstance(event.mechanism, RandomisedResponse)  # --mechanism has it not
        if peers and participation != "check-in":
            raise ValueError(f"--peers must be left out with --participation {participation}")
        if peers and mixing != "shuffle":
            raise ValueError(f"--peers must be left out with --mixing {mixing}")
        if plot is not None:
            options.check_file("--plot", plot)
            check_format("--plot", plot)
        points = sorted({max(1, round(last ** (step / 8))) for step in range(9)})
        curves: dict[str, list[float | None]] = {}
        for point in points:
            for row in price(event, point, adjacency, at):
                curves.setdefault(row.name, []).append(row.epsilon)
        others = (
            comparisons.peers(plan.users, event.chance, event.mechanism, points, at)
            if peers
            else []
        )
    options.warn_of_delta(plan, last)
    theirs: dict[str, list[float | None]] = {peer.name: [*peer.epsilons] for peer in others}
    if json:
        told = {p.name: {"epsilon": theirs[p.name], "covers": p.covers} for p in others}
        options.print_json(
            {"rounds": points, "epsilon": curves} | ({"peers": told} if peers else {})
        )
    else:
        _print_curves(points, curves, f"ε against rounds at δ = {rounded_up(at)}, {plan.adjacency}")
        if others:
            title = "other systems, replace; see below what each covers"
            _print_curves(points, theirs, title)
            for peer in others:
                typer.echo(f"{peer.name}: {peer.covers}")
    if plot is not None:  # last, so that the table is not lost where the disk is full
        _draw(points, curves | theirs, f"δ = {rounded_up(at)}, {adjacency}", plot)


def _print_curves(points: list[int], curves: dict[str, list[float | None]], title: str) -> None:
    """ε at each number of rounds, a column for each accountant or other system."""
    table = Table(title=title, title_justify="left")
    for column in ("rounds", *curves):
        table.add_column(column, justify="right")
    for index, point in enumerate(points):
        table.add_row(str(point), *(epsilon_text(curve[index]) for curve in curves.values()))
    Console().print(table)


def _draw(points: list[int], curves: dict[str, list[float | None]], title: str, path: Path) -> None:
    """Plots ε against rounds, one curve for each accountant and each other system."""
    with draw(path) as axes:
        for name, curve in curves.items():
            if any(value is not None and math.isfinite(value) for value in curve):
                axes.plot(points, curve, **style_of(name))
        axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="ε", title=title)
