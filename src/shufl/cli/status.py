"""`shufl status`: how far a run is, and who is silent."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shufl.cli import options
from shufl.simulator.console import Console
from shufl.simulator.tables import epsilon_text


def status_command(
    folder: Annotated[
        Path | None, typer.Argument(help="A run folder; left out: the newest one under runs.")
    ] = None,
    site: Annotated[
        Path | None,
        typer.Option(help="The server's file; left out: server.toml here, if there is one."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Print rounds, ε and time left of a run, silent nodes, and the shufflers' health."""
    from shufl.deploy.sites import ServerSite, load_site
    from shufl.deploy.status import status_of
    from shufl.simulator.section import ConfigError

    here = Path("server.toml")
    try:
        known = load_site(site or here, ServerSite) if site or here.exists() else None
        status = status_of(folder or _newest(), known)
    except (ConfigError, OSError) as error:
        options.fail(error)
    if json:
        options.print_json(asdict(status))
        return
    console = Console()
    facts = Table(show_header=False)
    left = f", {status.seconds_left / 60:.0f} minutes left" if status.seconds_left else ""
    facts.add_row("run", f"{status.folder}: {status.state}{left}")
    if status.why:
        facts.add_row("stopped by", status.why)
    facts.add_row("rounds", f"{status.rounds} of {status.allowed}")
    spent = epsilon_text(status.epsilon)
    facts.add_row("ε", f"{spent} of {status.target:g} by {status.accountant}")
    if status.accuracy is not None:
        facts.add_row("last test accuracy", f"{100 * status.accuracy:.2f}%")
    for address, trouble in status.shufflers.items():
        facts.add_row(f"shuffler {address}", trouble or "well")
    console.print(facts)
    if not status.nodes:
        console.print("nodes: none known; a simulation has none, nor has a run without a round")
        return
    table = Table("node", "users", "silent for", "because")
    for node in status.nodes:
        seconds, users = node["silent_seconds"], node["users"]
        table.add_row(
            node["name"] or str(node["number"]),
            "" if users is None else str(users),
            f"{seconds:.0f} s" if seconds else "",
            node["trouble"],
        )
    console.print(table)


def _newest() -> Path:
    """The run folder that was made last."""
    from shufl.simulator.section import ConfigError

    found = sorted(Path("runs").glob("*/ledger.jsonl"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError("give a run folder: there is none under runs")
    return found[-1].parent
