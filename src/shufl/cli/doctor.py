"""`shufl doctor`: whether a site of a deployment can do its part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shufl.cli import options


def doctor_command(
    folder: Annotated[Path, typer.Argument(help="A site's folder.")] = Path(),
    json: options.Json = False,
) -> None:
    """Look at versions, disk, keys, plan, data, limits, ports and clock of a site.

    Exits with 1 if anything is wrong, and says what mends it.
    """
    from shufl.deploy.doctor import examine
    from shufl.simulator.section import make_importable

    make_importable([folder])
    try:
        findings = examine(folder)
    except (OSError, ValueError) as error:
        options.fail(error)
    if json:
        options.print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            typer.echo(f"{'problem' if finding.trouble else 'ok':8}{finding.what}", nl=False)
            typer.echo(f": {finding.trouble}\n        {finding.fix}" if finding.trouble else "")
    if any(finding.trouble for finding in findings):
        raise typer.Exit(1)
