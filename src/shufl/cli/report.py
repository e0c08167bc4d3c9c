"""`shufl report`: one HTML page of a run, or of an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shufl.cli.options import check_file, fail


def report_command(
    path: Annotated[
        Path, typer.Argument(help="A run folder, or an experiment's folder in its RESULTS.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The file. Default: report.html in that folder.")
    ] = None,
) -> None:
    """Write one HTML page with plots, ε and what it holds for, ledger, plan and configuration.

    It needs no network: mail it, or open it on a phone.
    """
    from shufl.accounting import LedgerError
    from shufl.simulator.html_page import page_of
    from shufl.simulator.section import make_importable

    make_importable([Path.cwd()])  # for an experiment's models and datasets
    target = output or path / "report.html"
    try:
        if output is not None:
            check_file("--output", output)
        text = page_of(path)
        target.write_text(text, encoding="utf-8")
    except (ValueError, LedgerError, OSError) as error:
        fail(error)
    typer.echo(f"written: {target}")
