"""`shufl account`: what a plan, or a run folder, costs."""

from __future__ import annotations

import functools
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.text import rounded_up
from shufl.protocol.validation import choice
from shufl.results.plots import check_format, draw, style_of
from shufl.results.tables import epsilon_rows, print_epsilons, too_few_present

if TYPE_CHECKING:
    from shufl.accounting.peers.comparisons import Peer
    from shufl.protocol import Shuffled


@options.plan_options(*options.PLAN)
def account_command(
    given: dict[str, Any],
    run: Annotated[Path | None, typer.Argument(help="A run folder, instead of a plan.")] = None,
    accountant: Annotated[
        list[str] | None,
        typer.Option(
            help="Count by this accountant, or by all. Repeatable. Default: blanket, and of a run "
            "folder also the one that halts the run; without blankets, all that price the plan."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw ε against rounds to this file.")
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also show other systems, at one report's ε₀.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Print what a plan costs, or a run folder: ε, and what it holds for."""
    from shufl.accounting import EpsilonRow, LedgerError, epsilon_table, price

    with options.failing(ValueError, OSError, LedgerError):
        if plot is not None:
            check_format("--plot", plot)
            plot = plot.with_suffix(".png") if plot.name and not plot.suffix else plot
            options.check_file("--plot", plot)
        if run is not None:
            shown = "accountant", "plot", "peers", "json"
            options.check_alone("a run folder, which has its plan", *shown)
            if not (run / "ledger.jsonl").is_file():
                raise ValueError(
                    f"{run} must be a run folder, which has a ledger.jsonl; a plan is given by "
                    "options, such as --users"
                )
            from shufl.results.run_folder import read_run  # slow to import

            ledger, records = read_run(run)
            plan, rounds = ledger.plan, len(ledger.entries)
        else:
            plan = options.whole_plan(given)
            rounds = plan.rounds
        event = plan.event()
        names = _accountants(event, accountant, None if run is None else plan.accountant)
        if run is None and plan.accountant not in names:
            plan = plan.model_copy(update={"accountant": names[0]})
        points = [rounds]
        if plot is not None:
            points = sorted({max(1, round(rounds ** (step / 8))) for step in range(9)})
        others = _peers(plan.users, event, points, plan.delta) if peers else []
        if plot is not None or len(names) > 1:
            logging.getLogger("shufl.accounting").info("pricing rounds by %s", ", ".join(names))
        priced = functools.partial(
            price, event, adjacency=plan.adjacency, delta=plan.delta, names=names
        )
        if run is not None:
            too_few = too_few_present(plan, records, rounds)
            table = epsilon_table(plan, rounds, too_few)
            found = [row for row in table if row.name in names]
        else:
            found = priced(rounds)
        curves: dict[str, list[float | None]] = {}
        for point in points if plot is not None else ():
            for row in priced(point):
                curves.setdefault(row.name, []).append(row.epsilon)
    options.warn_of_delta(plan.check_in_rate, rounds, plan.delta)
    rows = epsilon_rows(found)
    theirs = epsilon_rows(EpsilonRow(it.name, it.epsilons[-1], it.covers, None) for it in others)
    curves |= {each.name: [*each.epsilons] for each in others if plot is not None}
    title = f"ε at δ = {rounded_up(plan.delta)}, {plan.adjacency}"
    if json:
        told = {"users": plan.users, "privacy": plan.section(), "rounds": rounds, "epsilon": rows}
        told |= {"peers": theirs} if peers else {}
        told |= {} if plot is None else {"over_rounds": {"rounds": points, "epsilon": curves}}
        options.print_json(told)
    else:
        print_epsilons(Console(), f"{title}, after {rounds} rounds", rows)
        if others:
            print_epsilons(Console(), "other systems, replace", theirs)
    if plot is not None:  # last, so that the table is not lost where the disk is full
        _draw(points, curves, title, plot)
        if not json:
            typer.echo(f"written: {plot}")


def _accountants(event: Shuffled, asked: list[str] | None, halting: str | None) -> list[str]:
    """The accountants to count by; `halting` is that of a run."""
    from shufl.accounting import (
        ACCOUNTANTS,
        accountants_for,
        accountants_of_kind,
        check_accountant,
    )

    if asked == ["all"]:
        return list(accountants_of_kind(event))
    if asked and "all" in asked:
        raise ValueError(f"--accountant all stands alone, got {', '.join(asked)}")
    if asked:
        for name in asked:
            choice("--accountant", name, (*ACCOUNTANTS, "all"))
        return [check_accountant(name, event) for name in asked]
    names = accountants_for(event)
    return [name for name in names if name in ("blanket", halting)] if event.blankets else [*names]


def _peers(users: int, event: Shuffled, points: list[int], delta: float) -> list[Peer]:
    """What other systems say of a plan."""
    from shufl.accounting.peers import comparisons
    from shufl.protocol import CheckIn, GaussianMechanism, LdpSgd, Summed

    mechanism = event.mechanism
    if isinstance(event, Summed) or not isinstance(event.participation, CheckIn):
        raise ValueError("--peers goes with mixing shuffle and participation check-in only")
    if not isinstance(mechanism, GaussianMechanism | LdpSgd):
        raise ValueError(f"--peers must be left out with mechanism {mechanism.name}")
    return comparisons.peers(users, event.chance, mechanism, points, delta)


def _draw(points: list[int], curves: dict[str, list[float | None]], title: str, path: Path) -> None:
    """Plots ε against rounds, one curve for each accountant and each other system."""
    with draw(path) as axes:
        for name, curve in curves.items():
            if any(value is not None and math.isfinite(value) for value in curve):
                axes.plot(points, curve, **style_of(name))
        axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="ε", title=title)
