"""The `shufl` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from typing import Any

if __name__ == "__main__":
    from shufl.cli import hear_signals

    hear_signals()

import click
import typer
from click.exceptions import NoArgsIsHelpError
from typer.core import TyperGroup

from shufl.cli.options import missing_extra, print_error

_COMMANDS = {
    "run": "experiment:run_command",
    "histogram": "histogram:histogram_command",
    "experiment": "experiment:experiment_command",
    "report": "experiment:report_command",
    "plan": "plan:plan_command",
    "account": "account:account_command",
    "calibrate": "calibrate:calibrate_command",
    "compare": "account:compare_command",
    "audit": "audit:audit_command",
    "shuffler": "shuffler:shuffler_command",
    "node": "deployment:node_command",
    "status": "deployment:status_command",
    "doctor": "deployment:doctor_command",
    "metrics": "deployment:metrics_command",
    "provision": "deployment:provision_command",
    "register": "deployment:register_command",
    "rehearse": "deployment:rehearse_command",
    "keys": "shuffler:keys_app",
    "device": "device:device_app",
    "record": "shuffler:record_app",
}
"""Where each command is. Only the module of the one that was given is imported."""


class _Commands(Mapping[str, click.Command]):
    """Imports a command, or a group of commands, when it is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        found = pkgutil.resolve_name(f"shufl.cli.{_COMMANDS[name]}")
        if not isinstance(found, typer.Typer):
            function, found = found, typer.Typer(add_completion=False)
            found.command()(function)
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(_COMMANDS)

    def __len__(self) -> int:
        return len(_COMMANDS)


class _Group(TyperGroup):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = _Commands()  # type: ignore[assignment]  # nobody changes it


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does, too
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _shufl() -> None:
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
