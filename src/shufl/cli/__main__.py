"""The `shufl` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
from pathlib import Path
from typing import Annotated

import click
import typer
from click.exceptions import NoArgsIsHelpError

from shufl.cli.shuffler import shuffler_command
from shufl.cli.keys import keys_app
from shufl.cli.account import account_command, compare_command
from shufl.cli.audit import audit_command
from shufl.cli.calibrate import calibrate_command
from shufl.cli.deployment import provision_command, rehearse_command
from shufl.cli.device import device_app
from shufl.cli.doctor import doctor_command
from shufl.cli.experiment import experiment_command
from shufl.cli.histogram import histogram_command
from shufl.cli.node import node_command
from shufl.cli.options import fail, missing_extra, print_error
from shufl.cli.plan import plan_command
from shufl.cli.record import record_app
from shufl.cli.report import report_command
from shufl.cli.status import status_command

_INTERRUPTED = 130  # what a shell expects after Ctrl-C

app = typer.Typer(
    help="Federated learning in the shuffle model of differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root() -> None:
    """Federated learning in the shuffle model of differential privacy."""


@app.command("run")
def run_command(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A TOML file, or the name of one that ships (quickstart, mnist, mnist-private, "
            "mnist-features, histogram)."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Override a setting: section.key=value; empty: leave it out. Repeatable."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="flower, or vectorised: no messages. Same as --set simulation.engine=…."),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Where the run folder is made; runs if left out.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="CONNECTION",
            help="Run on real nodes: the SuperLink of this Flower connection, on this machine; "
            "see docs/deployment.md.",
        ),
    ] = None,
    site: Annotated[Path, typer.Option(help="With --on: the server's file.")] = Path("server.toml"),
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Continue the interrupted run in this folder, with its own configuration. Alone.",
        ),
    ] = None,
) -> None:
    """Run an experiment until its privacy budget ends.

    By default on Flower and Ray with a real shuffler.

    CONFIG is a TOML file, or the name of one that ships with shufl: quickstart, mnist,
    mnist-private, mnist-features or histogram.
    """
    if (config is None) == (resume is None):
        fail(ValueError("give either a CONFIG to run or --resume RUN_FOLDER"))
    if resume is not None and (set_ or engine or runs):
        fail(ValueError("--resume goes alone: no --set, --engine or --runs"))
    if on is not None and engine:
        fail(ValueError("--on goes without --engine: real nodes take part, no simulated ones"))
    chosen = [f"simulation.engine={engine}"] if engine else []
    where = None if on is None else (on, site)
    stopped_by = _run(config, [*(set_ or []), *chosen], runs or Path("runs"), resume, where)
    if stopped_by == "interrupt":
        raise typer.Exit(_INTERRUPTED)


def _run(
    config: str | None,
    overrides: list[str],
    runs: Path,
    resume: Path | None,
    on: tuple[str, Path] | None,
) -> str:
    """Runs or resumes; returns what stopped the run, or ends the command in one line."""
    from shufl.simulator.config import load
    from shufl.simulator.section import ConfigError, make_importable

    make_importable([Path(config or "").parent, Path.cwd()])
    try:  # before torch, Flower and Ray are imported
        loaded = None if config is None else load(config, overrides)
    except ConfigError as error:
        fail(error)
    from torch import OutOfMemoryError

    from shufl.accounting import LedgerError
    from shufl.server import CheckpointError, RoundFailed
    from shufl.shuffler import ShufflerError
    from shufl.simulator.console import Console
    from shufl.simulator.engines import EngineFailed
    from shufl.simulator.records import MetricsError
    from shufl.simulator.run import Run

    ends_early = (
        CheckpointError,
        EngineFailed,
        LedgerError,
        MetricsError,
        RoundFailed,
        ShufflerError,
    )
    try:
        if on is not None:
            from shufl.deploy.submit import resume_on, run_on

            if loaded is not None:
                return run_on(*on, loaded, runs)
            assert resume is not None
            return resume_on(*on, resume)
        if loaded is not None:
            return Run.new(loaded, runs, Console()).train().stopped_by
        assert resume is not None
        return Run.of(resume, Console()).train().stopped_by
    except ConfigError as error:
        fail(error)
    except (*ends_early, OSError, OutOfMemoryError) as error:
        fail(error, 1)


app.command("histogram")(histogram_command)
app.command("experiment")(experiment_command)
app.command("report")(report_command)
app.command("plan")(plan_command)
app.command("account")(account_command)
app.command("calibrate")(calibrate_command)
app.command("compare")(compare_command)
app.command("audit")(audit_command)
app.command("shuffler")(shuffler_command)
app.command("node")(node_command)
app.command("status")(status_command)
app.command("doctor")(doctor_command)
app.command("provision")(provision_command)
app.command("rehearse")(rehearse_command)
app.add_typer(keys_app, name="keys")
app.add_typer(device_app, name="device")
app.add_typer(record_app, name="record")


def main() -> None:
    """Entry point of the `shufl` command."""
    atexit.register(gc.freeze)  # the process ends at once; else Python looks for cycles in torch
    for stream in (sys.stdout, sys.stderr):  # ε and σ need not stop a run where they cannot show
        if isinstance(stream, io.TextIOWrapper):  # None: the shell has closed it
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(standalone_mode=False))
    except NoArgsIsHelpError as error:  # which has shown the help
        sys.exit(error.exit_code)
    except click.ClickException as error:  # an option that there is not, a value of another type
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:  # each command imports what it needs before its work
        print_error(missing_extra(error, f"shufl {sys.argv[1]}"))
        sys.exit(2)
    except OSError as error:  # that no command answers, such as a full disk where it prints to
        print_error(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries once more, and complains
        sys.exit(1)


if __name__ == "__main__":
    main()
