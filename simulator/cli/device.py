"""`shufl device`: what a device was offered, by whom, and what it cost its owner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from simulator.cli import options

device_app = typer.Typer(
    help="A device's own ledger: what it was offered, and its owner's limits.",
    no_args_is_help=True,
)


@device_app.callback()
def _root() -> None:
    """A device's own ledger: what it was offered, and its owner's limits."""


@device_app.command("status")
def status_command(
    device: Annotated[Path, typer.Argument(help="The owner's TOML file: ledger and limits.")],
    json: options.Json = False,
) -> None:
    """Print what was spent, for which run, and what is left of the owner's budget."""
    from clients.device import by_plan, load_device

    try:
        ledger = load_device(device, create=False)
        limits, offered = ledger.limits, ledger.offered()
        assert limits is not None
        spent = [limits.epsilon({run.plan: run.rounds}) for run in offered]
        total = limits.epsilon(by_plan(offered))
    except ValueError as error:
        options.fail(error)
    if json:
        runs = [
            {"run": run.run_id, "plan": run.plan.digest(), "rounds": run.rounds, "last": run.last}
            | {"epsilon": epsilon}
            for run, epsilon in zip(offered, spent, strict=True)
        ]
        options.print_json({"runs": runs, "epsilon": total, "limits": dict(limits)})
        return
    table = Table(
        title=f"offered to this device, ε by {limits.accountant} at δ = {limits.delta:.4g}",
        title_justify="left",
    )
    for column in ("run", "plan", "last offered, UTC"):
        table.add_column(column)
    for column in ("rounds", "ε of this run alone"):
        table.add_column(column, justify="right")
    for run, epsilon in zip(offered, spent, strict=True):
        digest = run.plan.digest()[:12]
        table.add_row(run.run_id, digest, run.last, str(run.rounds), f"{epsilon:.4g}")
    Console().print(table)
    most = f"{limits.most_epsilon:g} ({limits.adjacency})"
    typer.echo(f"ε of all runs together: {total:.4g} of at most {most}")
