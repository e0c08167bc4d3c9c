"""Deployments: `shufl provision`, `register`, `rehearse`, `doctor`, `metrics`, `status`."""

from __future__ import annotations

import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from shufl.cli import end_in_order, options
from shufl.learning.your_code import make_importable
from shufl.protocol.console import Console
from shufl.protocol.validation import ConfigError

_File = Annotated[Path, typer.Argument(help="The deployment's file; see docs/deployment.md.")]


def provision_command(
    deployment: _File,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the sites. Default: sites, beside the file.")
    ] = None,
    approve: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=KEY",
            help="Sign this key, whose SHA-256 the party has read out. Repeatable. On a terminal "
            "other keys are asked about.",
        ),
    ] = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Forget the key of this name, which may be stolen. Repeatable."
        ),
    ] = None,
    days: Annotated[
        float,
        typer.Option(help="Longest validity of new certificates; each gets a little less."),
    ] = 365,
) -> None:
    """Make one folder for each site of a deployment, and sign the requests that have come.

    Run it again whenever a node is added, a request has come or the run's configuration has
    changed: it writes files again that are out of date, unless somebody has edited them.
    authority/log.jsonl has who signed what, and when.
    """
    from shufl.deploy.deployment import Deployment
    from shufl.deploy.provision import provision
    from shufl.shuffler.keys import check_days

    base = deployment.absolute().parent
    make_importable([base])
    out = out or base / "sites"
    approved = dict(each.partition("=")[::2] for each in approve or ())

    def approves(name: str, key: str) -> bool:
        if name in approved:
            if approved[name].lower() != key:
                raise ConfigError(
                    f"--approve {name}: the party has read out {approved[name] or 'nothing'}, and "
                    f"the key that has come is {key}: it may be another's"
                )
            return True
        question = f"{name}: key {key}. Has the party read out the same?"
        return sys.stdin.isatty() and typer.confirm(question)

    with options.failing(OSError, ValueError):
        plan = Deployment.of_file(deployment)
        if unknown := sorted({*approved} - plan.keys):
            raise ConfigError(
                f"--approve must name one of {', '.join(sorted(plan.keys))}, got {unknown[0]}"
            )
        check_days(days)
        done = provision(plan, base, out, approves, days=days, forget=forget or ())
    for name in done.made:
        typer.echo(f"made    {out / name}: its README.md says what to do there")
    for name in done.signed:
        typer.echo(f"signed  {name}")
    for name, key in done.unapproved.items():
        typer.echo(f"not signed {name}: its key is {key}; --approve {name}=… what the party reads")
    for name, files in done.changed.items():
        typer.echo(f"changed {out / name}: {', '.join(files)}")
    if done.changed:
        typer.echo("send each site what changed; docs/second-run.md says what it does with that")
    for name in done.kept:
        typer.echo(
            f"kept    {out / name}: the deployment's file says otherwise by now, and this one was "
            "changed here, or made by an earlier version; to have it made anew, remove it and run "
            "this again"
        )
    for name, users in done.short.items():
        typer.echo(
            f"too few {name}: its nodes speak for {users} users, and no release is made of so few; "
            "add nodes, or lower data.users or privacy.minimum_batch (and least_present, if set)"
        )
    for name in done.waiting:
        typer.echo(f"waiting for {out / name}")
    for fingerprint in done.to_withdraw:
        typer.echo(f"to withdraw at every shuffler, unless that is done: {fingerprint}")
    for name, end in done.ending.items():
        how = f"there: shufl keys renew keys --name {name}, and {name}.csr comes here"
        typer.echo(f"ending  {name}: its certificate is valid until {end:%F}; {how}")


def rehearse_command(
    deployment: _File,
    folder: Annotated[
        Path | None, typer.Option(help="An empty folder for the sites. Default: a temporary one.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the run folder is made.")] = Path("runs"),
) -> None:
    """Run a whole deployment on this machine: real processes, TLS and node authentication."""
    from shufl.deploy.deployment import Deployment
    from shufl.deploy.rehearse import rehearse
    from shufl.results.engine_interface import EngineFailed
    from shufl.server import RoundFailed

    base = deployment.absolute().parent
    make_importable([base])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_in_order)
    early = options.failing(EngineFailed, RoundFailed, code=1)
    with options.failing(ConfigError, OSError), early:
        plan = Deployment.of_file(deployment)
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--folder must be empty, {folder} is not")
        with tempfile.TemporaryDirectory(prefix="shufl-") as temporary:
            stopped_by = rehearse(plan, base, folder or Path(temporary), runs)
    if stopped_by == "interrupt":
        raise typer.Exit(130)


def doctor_command(
    folder: Annotated[Path, typer.Argument(help="A site's folder.")] = Path(),
    json: options.Json = False,
) -> None:
    """Look at versions, disk, keys, plan, data, limits, ports and clock of a site.

    Exits with 1 if anything is wrong, and says what mends it.
    """
    from shufl.deploy.doctor import examine

    with options.failing(OSError, ValueError):
        findings = examine(folder)
    if json:
        options.print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{'problem' if finding.trouble else 'ok':8}{finding.what}", nl=False)
            typer.echo(f": {finding.trouble}\n        {finding.fix}" if finding.trouble else "")
    if any(finding.trouble for finding in findings):
        raise typer.Exit(1)


def metrics_command(
    folder: Annotated[Path, typer.Argument(help="A site's folder.")] = Path(),
) -> None:
    """Print what a site's operator watches, for Prometheus: run, budget, nodes, certificates, disk.

    Run it every few minutes for the textfile collector of Prometheus' node exporter.
    """
    from shufl.deploy.metrics import metrics_of

    with options.failing(OSError, ValueError):
        typer.echo(metrics_of(folder.absolute()), nl=False)


def register_command() -> None:
    """Register the nodes in the authority's folder nodes at Flower's SuperLink, and no others.

    Run it in the server's folder, and again whenever nodes has changed, also while a run goes on.
    """
    from shufl.deploy.superlink import register
    from shufl.results.engine_interface import EngineFailed

    with options.failing(ConfigError, OSError), options.failing(EngineFailed, code=1):
        for line in register(Path("server.toml")):
            typer.echo(line)


def status_command(
    folder: Annotated[
        Path | None, typer.Argument(help="A run folder. Default: the newest one under runs.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Print rounds, ε and time left of a run, and silent nodes.

    In the server's folder, which has server.toml, it also asks the shufflers for their health.
    """
    from shufl.deploy.run_status import newest_run, status_of
    from shufl.deploy.server_site import ServerSite
    from shufl.deploy.site_files import load_site
    from shufl.results.tables import epsilon_text, score_text

    here = Path("server.toml")
    with options.failing(ConfigError, OSError):
        known = load_site(here, ServerSite) if here.exists() else None
        if (run := folder or newest_run(Path("runs"))) is None:
            raise ConfigError("give a run folder: there is none under runs")
        status = status_of(run, known)
    if json:
        options.print_json(asdict(status))
        return
    console = Console()
    facts = Table(show_header=False)
    left = f", {status.seconds_left / 60:.0f} minutes left" if status.seconds_left else ""
    facts.add_row("run", f"{status.folder}: {status.state}{left}")
    if status.why:
        facts.add_row("stopped by", status.why)
    if status.waits_for:
        facts.add_row("waits", f"{status.waits_seconds:.0f} s, {status.waits_for}")
    facts.add_row("rounds", f"{status.rounds} of {status.allowed}")
    spent = epsilon_text(status.epsilon)
    facts.add_row("ε", f"{spent} of {status.target:g} by {status.accountant}")
    if status.score is not None:
        name = status.score_name
        facts.add_row(f"last test {name}", score_text(name, status.score))
    for address, trouble in status.shufflers.items():
        facts.add_row(f"shuffler {address}", trouble or "answers")
    if status.doubt:
        facts.add_row("doubtful", status.doubt)
    console.print(facts)
    if not status.nodes:
        console.print("nodes: none known; a simulation has none, nor has a run without a round")
        return
    table = Table("node", "at Flower", "users", "certificate until", "silent for", "because")
    for node in status.nodes:
        seconds, users = node["silent_seconds"], node["users"]
        table.add_row(
            node["name"] or str(node["number"]),
            "" if node["flower"] is None else str(node["flower"]),
            "" if users is None else str(users),
            node["until"],
            f"{seconds:.0f} s" if seconds else "",
            node["trouble"],
        )
    console.print(table)
