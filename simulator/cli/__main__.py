"""The `shufl` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from shuffler.cli import keys_command, shuffler_command
from simulator.cli.account import account_command, calibrate_command, compare_command
from simulator.cli.audit import audit_command

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
        typer.Argument(help="A TOML file, or the name of one that ships (quickstart, mnist)."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a setting: section.key=value. Repeatable."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="flower, or vectorised: no messages. Same as --set simulation.engine=…."),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Where the run folder is made; runs if left out.")
    ] = None,
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

    CONFIG is a TOML file, or the name of one that ships with shufl: quickstart, mnist.
    """
    if (config is None) == (resume is None):
        _fail(ValueError("give either a CONFIG to run or --resume RUN_FOLDER"), 2)
    if resume is not None and (set_ or engine or runs):
        _fail(ValueError("--resume goes alone: no --set, --engine or --runs"), 2)
    # For models named module:callable. Our own folder first: in an editable install it is not on
    # the path, and a folder of the user's named `server` would hide ours.
    sys.path += [str(Path(__file__).resolve().parents[2]), str(Path.cwd())]
    from rich.console import Console
    from torch import OutOfMemoryError

    from accounting import LedgerError, OrderRangeWarning
    from server import CheckpointError, RoundFailed
    from shuffler import ShufflerError
    from simulator.config import ConfigError, load
    from simulator.data.datasets import DatasetError
    from simulator.engines.flower import EngineFailed
    from simulator.records import MetricsError

    # The closing table carries these; here they would cut through the progress bar.
    warnings.simplefilter("ignore", OrderRangeWarning)
    try:
        if config is not None:
            chosen = [f"simulation.engine={engine}"] if engine else []
            loaded = load(config, [*(set_ or []), *chosen])
        from simulator.run import resume_run, run

        if resume is None:
            result = run(loaded, runs or Path("runs"), Console())
        else:
            result = resume_run(resume, Console())
    except (ConfigError, DatasetError) as error:
        _fail(error, 2)
    except (
        CheckpointError,
        EngineFailed,
        LedgerError,
        MetricsError,
        OSError,
        OutOfMemoryError,
        RoundFailed,
        ShufflerError,
    ) as error:
        _fail(error, 1)
    if result.stopped_by == "interrupt":
        raise typer.Exit(_INTERRUPTED)


app.command("account")(account_command)
app.command("calibrate")(calibrate_command)
app.command("compare")(compare_command)
app.command("audit")(audit_command)
app.command("shuffler")(shuffler_command)
app.command("keys")(keys_command)


def _fail(error: BaseException, code: int) -> NoReturn:
    """One line on standard error, then exit."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the `shufl` command."""
    for stream in (sys.stdout, sys.stderr):  # ε and σ need not stop a run where they cannot show
        stream.reconfigure(errors="replace")
    app()


if __name__ == "__main__":
    main()
