"""`shufl experiment`: a grid of runs, its tables and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shufl.cli.options import fail


def experiment_command(
    grid: Annotated[
        str, typer.Argument(help="A TOML file, or the name of one in configs/experiments.")
    ],
    results: Annotated[
        Path, typer.Option(help="Where the runs are kept; those that are there are not made anew.")
    ] = Path("results"),
    pages: Annotated[
        Path | None,
        typer.Option(
            help="Where table and plot go; runs that the table there has are not made anew either. "
            "Default: the experiment's folder in RESULTS."
        ),
    ] = None,
    cpus: Annotated[int, typer.Option(help="Processors for each run.")] = 1,
) -> None:
    """Run a grid of configurations and seeds on Ray, and write their table and plot.

    Ray is the one at RAY_ADDRESS, else one of this machine's own. After an interruption the same
    command goes on.
    """
    from shufl.simulator.console import Console
    from shufl.simulator.engines import EngineFailed
    from shufl.simulator.grid.runner import play_grid
    from shufl.simulator.section import ConfigError, make_importable

    make_importable([Path(grid).parent, Path.cwd()])
    try:
        rows, page, failed = play_grid(grid, results, pages, cpus, Console())
    except KeyboardInterrupt:
        fail(RuntimeError("interrupted; the same command goes on"), 130)
    except ConfigError as error:
        fail(error)
    except (EngineFailed, OSError, ValueError) as error:
        fail(error, 1)
    typer.echo(f"written: {page}")
    if failed:
        points = len(rows) + len(failed)
        fail(RuntimeError(f"{len(failed)} of {points} points failed, see {page}"), 1)
