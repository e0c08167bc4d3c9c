"""`python -m shufl.shuffler`."""

import sys

import click
import typer

from shufl.accounting.lines import one_line
from shufl.shuffler.cli import shuffler_command


def main() -> int:
    """Runs the command; a usage error is one line on standard error and exit code 2."""
    app = typer.Typer(add_completion=False)
    app.command()(shuffler_command)
    command = typer.main.get_command(app)
    try:
        return command.main(prog_name="python -m shufl.shuffler", standalone_mode=False) or 0
    except click.ClickException as error:
        click.echo(f"shuffler: {one_line(error.format_message())}", err=True)
        return 2
    except click.Abort:
        return 130


if __name__ == "__main__":
    sys.exit(main())
