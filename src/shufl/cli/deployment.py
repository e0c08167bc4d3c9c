"""`shufl provision` and `shufl rehearse`: a deployment's folders, and all of it on one machine."""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from shufl.cli.options import fail

_File = Annotated[Path, typer.Argument(help="The deployment's file; see docs/deployment.md.")]


def provision_command(
    deployment: _File,
    out: Annotated[
        Path | None, typer.Option(help="Where the folders go; left out: sites, beside the file.")
    ] = None,
) -> None:
    """Make one folder for each site of a deployment, and sign the requests that have come.

    Run it again whenever a node is added or a request has come: what is there stays as it is.
    """
    from shufl.deploy.plan import load_deployment
    from shufl.deploy.provision import provision
    from shufl.simulator.section import ConfigError, make_importable

    base = deployment.absolute().parent
    make_importable([base])
    out = out or base / "sites"
    try:
        done = provision(load_deployment(deployment), base, out)
    except (ConfigError, OSError) as error:
        fail(error)
    for name in done.made:
        typer.echo(f"made    {out / name}: its README.md says what to do there")
    for name in done.signed:
        typer.echo(f"signed  {name}")
    for name in done.kept:
        typer.echo(f"kept    {out / name}: the deployment's file says otherwise by now")
    for name in done.waiting:
        typer.echo(f"waiting for {out / name}")


def rehearse_command(
    deployment: _File,
    folder: Annotated[
        Path | None, typer.Option(help="An empty folder for the sites. Default: a temporary one.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the run folder is made.")] = Path("runs"),
    kill_node: Annotated[
        bool, typer.Option(help="Kill the last node after two rounds, and bring it back.")
    ] = False,
) -> None:
    """Run a whole deployment on this machine: real processes, TLS and node authentication."""
    from shufl.server import RoundFailed
    from shufl.deploy.plan import load_deployment
    from shufl.deploy.rehearse import rehearse
    from shufl.simulator.engines import EngineFailed
    from shufl.simulator.section import ConfigError, make_importable

    base = deployment.absolute().parent
    make_importable([base])
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what was started is stopped
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        plan = load_deployment(deployment)
        if folder is not None and folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"--folder must be empty, {folder} is not")
        with tempfile.TemporaryDirectory(prefix="shufl-") as temporary:
            stopped_by = rehearse(plan, base, folder or Path(temporary), runs, kill_node)
    except (ConfigError, OSError) as error:
        fail(error)
    except (EngineFailed, RoundFailed) as error:
        fail(error, 1)
    if stopped_by == "interrupt":
        raise typer.Exit(130)
