"""`shufl device`: what a device was offered, by whom, and what it cost its owner."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.text import rounded_up
from shufl.results.tables import epsilon_text

device_app = options.group("A device's own ledger: what it was offered, and its owner's limits.")


@device_app.callback()
def _root() -> None:
    """Has `status` be named, though it is the only command."""


@device_app.command("status")
def status_command(
    device: Annotated[Path, typer.Argument(help="The owner's TOML file: ledger and limits.")],
    json: options.Json = False,
) -> None:
    """Print what was spent, for which run, and what is left of the owner's budget."""
    from shufl.clients.device_ledger import load_device

    with options.failing(ValueError):
        ledger = load_device(device, create=False)
        limits, offered = ledger.limits, ledger.offered()
        charges = [limits.charge(run) for run in offered]
    total = math.fsum(charges)
    if json:
        runs = [
            {
                "run": run.run_id,
                "plan": run.plan.digest(),
                "rounds": run.offered,
                "allotted": run.allotted,
                "latest": run.latest,
                "epsilon": charge,
            }
            for run, charge in zip(offered, charges, strict=True)
        ]
        options.print_json({"runs": runs, "epsilon": total, "limits": dict(limits)})
        return
    title = f"offered to this device, ε by {limits.accountant}, "
    title += f"δ = {rounded_up(limits.delta)} in all"
    table = Table("run", "plan", "latest, UTC", title=title, title_justify="left")
    for column in ("rounds", "of at most", "ε charged"):
        table.add_column(column, justify="right")
    for run, charge in zip(offered, charges, strict=True):
        digest, counts = run.plan.digest()[:12], (str(run.offered), str(run.allotted))
        table.add_row(run.run_id, digest, run.latest, *counts, epsilon_text(charge))
    Console().print(table)
    typer.echo(
        f"ε of all runs together: {epsilon_text(total)} of at most {limits.most_epsilon:g} "
        f"({limits.adjacency})"
    )
