"""`shufl shuffler`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shuffler_command(
    config: Annotated[Path, typer.Option(help="TOML file; see docs/shuffler.md for the keys.")],
    exit_with_parent: Annotated[
        bool, typer.Option(help="Shut down when standard input ends or the parent is gone.")
    ] = False,
) -> None:
    """Run the shuffler: collect sealed reports, release each batch in random order.

    Certificates say who may do what (`shufl keys`).
    """
    from shufl.shuffler.serving import serve

    serve(config, exit_with_parent)
