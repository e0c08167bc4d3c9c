"""Runs, grids of runs, and their pages: `shufl run`, `shufl experiment` and `shufl report`."""

from __future__ import annotations

from json import JSONDecodeError
from pathlib import Path
from typing import Annotated

import click
import typer
from pydantic_core import from_json

from shufl.cli import options
from shufl.cli.options import check_file, fail, failing
from shufl.learning.your_code import make_importable
from shufl.protocol.console import Console
from shufl.protocol.files import write_whole
from shufl.protocol.validation import ConfigError

_INTERRUPTED = 130  # what a shell expects after Ctrl-C


def run_command(
    config: Annotated[
        str | None,
        typer.Argument(
            help="A TOML file, or the name of one that ships (quickstart, mnist, mnist-private, "
            "mnist-features, histogram)."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="Set section.key=value. An empty value removes the key. Repeatable."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="flower, or vectorised: no messages. Same as --set simulation.engine=…."),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(help="Where the run folder is made. Default: runs.")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="CONNECTION",
            help="Run on real nodes, in the server's folder: the SuperLink of this Flower "
            "connection, on this machine; see docs/deployment.md.",
        ),
    ] = None,
    continue_: Annotated[
        bool,
        typer.Option(
            "--continue",
            help="With --on: go on with the newest run of CONFIG's name in --runs, if there is "
            "one; do nothing if it has ended. For a service, which is started at each boot.",
        ),
    ] = False,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN_FOLDER",
            help="Continue the interrupted run in this folder, with its own configuration. Goes "
            "without CONFIG, --set, --engine and --runs.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Run an experiment until its privacy budget ends.

    By default on Flower and Ray with a real shuffler.
    """
    from shufl.learning.config import load
    from shufl.simulator.engines.ray_cluster import early_ray

    make_importable([Path(config or "").parent, Path.cwd()])
    with failing(ConfigError):  # before torch, Flower and Ray are imported
        if (config is None) == (resume is None):
            raise ConfigError("give either a CONFIG to run or --resume RUN_FOLDER")
        if resume is not None and (set_ or engine or runs):
            raise ConfigError("--resume goes alone: no --set, --engine or --runs")
        if on is not None and engine:
            raise ConfigError("--on goes without --engine: real nodes take part")
        if continue_ and (on is None or config is None):
            raise ConfigError("--continue goes with --on and a CONFIG")
        if json and on is not None:
            raise ConfigError("--json goes without --on: the run folder has a summary.json")
        chosen = [f"simulation.engine={engine}"] if engine else []
        loaded = None if config is None else load(config, [*(set_ or []), *chosen])
    if loaded is not None and on is None:
        click.get_current_context().with_resource(early_ray(loaded))
    from torch import OutOfMemoryError

    from shufl.accounting import LedgerError
    from shufl.results.engine_interface import EngineFailed
    from shufl.results.run import Run
    from shufl.results.run_folder import MetricsError
    from shufl.server import CheckpointError, RoundFailed
    from shufl.shuffler import ShufflerError

    early = (CheckpointError, EngineFailed, LedgerError, MetricsError, RoundFailed, ShufflerError)
    with failing(ConfigError), failing(*early, OSError, OutOfMemoryError, code=1):
        runs = runs or Path("runs")
        if on is not None:
            from shufl.deploy.superlink import go_on, resume_on, run_on

            site = Path("server.toml")
            if loaded is not None:
                stopped_by = (go_on if continue_ else run_on)(on, site, loaded, runs)
            elif resume is not None:
                stopped_by = resume_on(on, site, resume)
        elif loaded is not None:
            run = Run.new(loaded, runs, Console(stderr=json))
        elif resume is not None:
            run = Run.of(resume, Console(stderr=json))
        if on is None:
            stopped_by = run.train().stopped_by
        if json:
            summary = from_json((run.folder / "summary.json").read_bytes())
            options.print_json({"folder": str(run.folder)} | summary)
    if stopped_by == "interrupt":
        raise typer.Exit(_INTERRUPTED)


def experiment_command(
    grid: Annotated[
        str, typer.Argument(help="A TOML file, or the name of one in configs/experiments.")
    ],
    results: Annotated[
        Path, typer.Option(help="Folder of the runs. Finished runs in it are not repeated.")
    ] = Path("results"),
    pages: Annotated[
        Path | None,
        typer.Option(
            help="Folder for table and plot. Runs in a table there are not repeated either. "
            "Default: the experiment's folder in RESULTS."
        ),
    ] = None,
    cpus: Annotated[int, typer.Option(help="Processors for each run.")] = 1,
    json: options.Json = False,
) -> None:
    """Run a grid of configurations and seeds on Ray, and write their table and plot.

    Ray is the one at RAY_ADDRESS, else one of this machine's own. After an interruption the same
    command goes on.
    """
    from shufl.results.engine_interface import EngineFailed
    from shufl.simulator.grid.definition import load_grid
    from shufl.simulator.grid.runner import play_grid
    from shufl.simulator.grid.table import varying_first

    make_importable([Path(grid).parent, Path.cwd()])
    with failing(EngineFailed, OSError, ValueError, code=1), failing(ConfigError):
        try:
            console = Console(stderr=json)
            rows, page, failed = play_grid(*load_grid(grid), results, pages, cpus, console)
        except KeyboardInterrupt:
            fail(RuntimeError("interrupted; the same command goes on"), _INTERRUPTED)
    if json:
        found = varying_first(rows, ["series", "value"])
        options.print_json({"page": str(page), "runs": found, "failed": failed})
    else:
        typer.echo(f"written: {page}")
    if failed:
        runs = len(rows) + len(failed)
        fail(RuntimeError(f"{len(failed)} of {runs} runs failed, see {page}"), 1)


def report_command(
    path: Annotated[
        Path, typer.Argument(help="A run folder, or an experiment's folder in its RESULTS.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="The file. Default: report.html in that folder.")
    ] = None,
) -> None:
    """Write one HTML page: first in plain words, then plots, every ε, ledger, plan, configuration.

    It needs no network: mail it, or open it on a phone.
    """
    from shufl.accounting import LedgerError

    make_importable([Path.cwd()])  # for an experiment's models and datasets
    target = output or path / "report.html"
    with failing(ValueError, LedgerError, OSError):
        if output is not None:
            check_file("--output", output)
        write_whole(target, page_of(path).encode())
    typer.echo(f"written: {target}")


def page_of(folder: Path) -> str:
    """The page of a run folder, or of an experiment's folder in `results`.

    Raises:
        ValueError: it is neither, or something in it is damaged; one line.
        LedgerError: a run's ledger is damaged.
        ConfigError: a grid's configurations are not there any more.
        OSError: something cannot be read.
    """
    from shufl.results.run_page import page_of_run

    try:
        if (folder / "plan.json").is_file():
            return page_of_run(folder)
        if (folder / "grid.json").is_file():
            from shufl.simulator.grid.grid_page import page_of_grid  # it needs torch

            return page_of_grid(folder)
    except (AttributeError, KeyError, TypeError, JSONDecodeError) as error:
        raise ValueError(f"{folder} has a damaged file: {error}") from error
    raise ValueError(
        f"{folder} must be a run folder, which has a plan.json, or the folder of an experiment, "
        "which has a grid.json"
    )
