"""`shufl device`: what a device was offered and what it cost; what a further run would cost."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shufl.cli import options
from shufl.protocol.console import Console
from shufl.protocol.text import rounded_up
from shufl.protocol.validation import ConfigError
from shufl.results.tables import epsilon_text

device_app = options.group("A device's own ledger: what it was offered, and its owner's limits.")


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


@device_app.command("accept")
def accept_command(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="NEW_RUN_TOML",
            help="The next run's run.toml. A node.toml beside it is taken too, but for its data.",
        ),
    ],
    folder: Annotated[Path, typer.Argument(help="The node's folder.")] = Path(),
    yes: Annotated[bool, typer.Option("--yes", help="Accept it without a question.")] = False,
) -> None:
    """Accept the plan of a further run: show what changes and what it costs, ask, and write it.

    Writes run.toml, plans and most_epsilon in device.toml, and node.toml. The owner's other limits
    stay; a plan that they refuse is not accepted.
    """
    from shufl.deploy.acceptance import acceptance

    with options.failing(ValueError, code=1), options.failing(ConfigError, OSError):
        accepts = acceptance(run, folder)
    table = Table("key", "now", "then", title="what changes", title_justify="left")
    for key, (now, then) in sorted(accepts.differing.items()):
        table.add_row(key, repr(now), repr(then))
    limits = accepts.limits
    Console().print(table)
    typer.echo(
        f"ε of the run: {epsilon_text(accepts.charge)} by {limits.accountant} ({limits.adjacency}),"
        f" δ = {rounded_up(accepts.delta)}"
    )
    typer.echo(
        f"ε of all runs together with it: {epsilon_text(accepts.total)}; most_epsilon is "
        f"{limits.most_epsilon:g} now and {accepts.accepted.most_epsilon:g} then"
    )
    if not yes and not (sys.stdin.isatty() and typer.confirm("Does the owner accept this?")):
        options.fail(ConfigError("nothing is written; without a terminal --yes accepts it"), 1)
    with options.failing(OSError, code=1):
        accepts.write()
    names = ", ".join(path.name for path in accepts.files)
    typer.echo(f"written {names}" if names else "accepted before; nothing is written")
    prefix = folder.absolute().name
    typer.echo(
        f"It holds from the node's next start: sudo systemctl restart {prefix}-node. From then on "
        "this node takes no part in a run of another plan, also in one that is under way."
    )
