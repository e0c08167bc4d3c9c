"""The `shufl` command. Heavy imports happen inside the commands that need them."""

from __future__ import annotations

import atexit
import gc
import io
import logging
import os
import sys

if __name__ == "__main__":
    from shufl.cli import hear_signals

    hear_signals()

import click
import typer
from click.exceptions import NoArgsIsHelpError

from shufl.cli.account import account_command, compare_command
from shufl.cli.audit import audit_command
from shufl.cli.calibrate import calibrate_command
from shufl.cli.deployment import (
    doctor_command,
    metrics_command,
    node_command,
    provision_command,
    register_command,
    rehearse_command,
    status_command,
)
from shufl.cli.device import device_app
from shufl.cli.experiment import experiment_command, report_command, run_command
from shufl.cli.histogram import histogram_command
from shufl.cli.options import missing_extra, print_error
from shufl.cli.plan import plan_command
from shufl.cli.shuffler import keys_app, record_app, shuffler_command

app = typer.Typer(
    help="Federated learning in the shuffle model of differential privacy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=False,  # click does, too
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run_command)
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
app.command("metrics")(metrics_command)
app.command("provision")(provision_command)
app.command("register")(register_command)
app.command("rehearse")(rehearse_command)
app.add_typer(keys_app, name="keys")
app.add_typer(device_app, name="device")
app.add_typer(record_app, name="record")


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
