"""The `shufl` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import atexit
import gc
import importlib.metadata
import io
import itertools
import logging
import os
import pkgutil
import sys
from typing import Annotated, Any

if __name__ == "__main__":
    from shufl.cli import hear_signals

    hear_signals()

import click
import typer
from click.exceptions import NoArgsIsHelpError
from typer.core import TyperGroup

from shufl.cli.options import missing_extra, print_error

_COMMANDS = {
    "Train and measure": {
        "run": "shufl.cli.experiment:run_command",
        "experiment": "shufl.cli.experiment:experiment_command",
        "report": "shufl.cli.experiment:report_command",
        "histogram": "shufl.cli.histogram:histogram_command",
    },
    "Plan and account": {
        "account": "shufl.cli.account:account_command",
        "calibrate": "shufl.cli.calibrate:calibrate_command",
        "audit": "shufl.cli.audit:audit_command",
    },
    "Deploy": {
        "rehearse": "shufl.cli.deployment:rehearse_command",
        "provision": "shufl.cli.deployment:provision_command",
        "keys": "shufl.cli.shuffler:keys_app",
        "shuffler": "shufl.cli.shuffler:shuffler_command",
        "node": "shufl.cli.node:node_command",
        "register": "shufl.cli.deployment:register_command",
    },
    "Operate": {
        "status": "shufl.cli.deployment:status_command",
        "doctor": "shufl.cli.deployment:doctor_command",
        "metrics": "shufl.cli.deployment:metrics_command",
        "device": "shufl.cli.device:device_app",
        "record": "shufl.cli.shuffler:record_app",
    },
}
"""By group, where each command is. Only the module of the one that was given is imported."""


class _Group(TyperGroup):
    """The group of all commands, each of which is imported when it is looked up."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        names = itertools.chain(*_COMMANDS.values())
        self.commands = dict.fromkeys(names, click.Command(None))  # the names are used

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        group = next((group for group, names in _COMMANDS.items() if cmd_name in names), None)
        if group is None:
            return None
        found = pkgutil.resolve_name(_COMMANDS[group][cmd_name])
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command()(function)
        command = typer.main.get_command(found)
        command.name = cmd_name
        command.rich_help_panel = group  # type: ignore[attr-defined]  # of Typer's commands
        return command


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does, too
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"shufl {importlib.metadata.version('shufl')}")
        raise typer.Exit


@app.callback()
def _shufl(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Federated learning in the shuffle model of differential privacy."""


def main() -> None:
    """Plays the command, whose signals are heard."""
    said, shown = logging.getLogger("shufl.accounting"), logging.StreamHandler()
    said.addHandler(shown)  # a search takes its time
    said.setLevel(logging.INFO)
    atexit.register(gc.freeze)  # the process ends at once; else Python looks for cycles in torch
    for stream in (sys.stdout, sys.stderr):  # ε and σ need not stop a run where they cannot show
        if isinstance(stream, io.TextIOWrapper):  # None: the shell has closed it
            stream.reconfigure(errors="replace")
    try:
        sys.exit(app(standalone_mode=False))
    except NoArgsIsHelpError as error:  # which has shown the help
        sys.exit(error.exit_code)
    except click.Abort:  # the end of the input at a question
        sys.exit(130)
    except click.ClickException as error:  # an unknown option, a value of the wrong type
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:  # each command imports what it needs before its work
        print_error(missing_extra(error, f"shufl {sys.argv[1]}"))
        sys.exit(2)
    except OSError as error:  # that no command answers, such as a full disk where it prints to
        print_error(error)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries once more, and complains
        sys.exit(1)
    finally:
        said.removeHandler(shown)


if __name__ == "__main__":
    main()
