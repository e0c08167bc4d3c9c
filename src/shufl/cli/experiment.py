"""`shufl experiment`: a grid of runs, its tables and its plot."""

from __future__ import annotations

import fcntl
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
    from shufl.simulator.grid.page import finished, keep_grid, write_page
    from shufl.simulator.grid.rows import take_over_rows
    from shufl.simulator.grid.runner import play_points
    from shufl.simulator.grid.settings import load_grid
    from shufl.simulator.section import ConfigError, make_importable

    make_importable([Path(grid).parent, Path.cwd()])
    try:
        if cpus < 1:
            raise ConfigError(f"--cpus must be at least 1, got {cpus}")
        name, settings = load_grid(grid)
        points = settings.points()
        folder = results.absolute() / name
        folder.mkdir(parents=True, exist_ok=True)
    except (ConfigError, OSError) as error:
        fail(error)
    try:
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                fail(ConfigError(f"another shufl experiment is at work in {folder}"))
            if pages is not None:
                take_over_rows(pages / f"{name}.csv", points, folder)
            failed: dict[str, str] = {}
            keep_grid(settings, folder, failed)
            try:
                play_points(points, folder, cpus, Console(), failed)
            finally:
                keep_grid(settings, folder, failed)
                if failed or finished(points, folder):  # else an older page stays
                    page = write_page(name, settings, points, folder, pages or folder, failed)
    except KeyboardInterrupt:
        fail(RuntimeError("interrupted; the same command goes on"), 130)
    except ConfigError as error:
        fail(error)
    except (EngineFailed, OSError, ValueError) as error:
        fail(error, 1)
    typer.echo(f"written: {page}")
    if failed:
        fail(RuntimeError(f"{len(failed)} of {len(points)} points failed, see {page}"), 1)
