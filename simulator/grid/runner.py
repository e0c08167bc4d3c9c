"""Plays the points of a grid on Ray, as many at once as there are processors."""

from __future__ import annotations

import datetime
import fcntl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shufl.learning.data.datasets import load_dataset
from shufl.learning.your_code import Carried, make_importable, one_line
from shufl.protocol import validation
from shufl.protocol.console import Console
from shufl.protocol.validation import ConfigError
from shufl.results.interrupts import interrupts
from shufl.results.tables import score_text
from shufl.simulator.engines.ray_cluster import check_cpus, running_ray
from shufl.simulator.grid.definition import Grid, Point
from shufl.simulator.grid.grid_page import finished, keep_grid, write_page
from shufl.simulator.grid.grid_points import check, play, read_result, rests_on
from shufl.simulator.grid.table import take_over_rows

_POLL_SECONDS = 0.5  # between looks at whether an interrupt came


def play_grid(
    name: str,
    grid: Grid,
    results: Path,
    pages: Path | None,
    cpus: int,
    console: Console,
    objects: Mapping[str, Carried] = MappingProxyType({}),
) -> tuple[list[tuple[Point, dict[str, Any]]], Path, dict[str, str]]:
    """Plays a grid, or goes on with it, and writes its table and its page.

    Args:
        name: of the grid.
        grid: what is played.
        results: the folder in which the grid has its own.
        pages: the folder for table and page. Points that a table there has are not played again.
            None: the grid's own folder.
        cpus: of each run; see `play_points`.
        console: for progress.
        objects: of your program, by the keys that they stand for; see `given_objects`.

    Returns:
        The finished points, each with its result; the page; why points failed, by their names.

    Raises:
        ConfigError: as `play_points`; or another process is at work in the folder.
        EngineFailed, KeyboardInterrupt: as `play_points`.
    """
    validation.integer("cpus", cpus, 1)
    points = grid.points(objects)
    folder = results.absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another shufl experiment is at work in {folder}") from None
        if pages is not None:
            take_over_rows(pages / f"{name}.csv", points, folder)
        keep_grid(grid, folder, failed)
        try:
            play_points(points, folder, cpus, console, failed)
        finally:
            keep_grid(grid, folder, failed)
            done = finished(points, folder)
            if failed or done:  # else an older page stays
                page = write_page(name, grid, points, folder, pages or folder, failed)
    return done, page, failed


def play_points(
    points: list[Point], folder: Path, cpus: int, console: Console, failed: dict[str, str]
) -> None:
    """Checks all points that have no result yet, and then plays them.

    Args:
        points: of the grid.
        folder: each point has a folder in it.
        cpus: how many CPUs, and threads of torch, each run has.
        console: gets a line for each finished point.
        failed: gets the reason for each point that failed, by the point's name.

    Raises:
        ConfigError: the configuration of a point is wrong, or no node of Ray has the CPUs and GPUs
            that a run needs. No point has been played.
        EngineFailed: Ray does not start.
        KeyboardInterrupt: SIGINT or SIGTERM came; the runs at work are ended.
    """
    load_dataset.cache_clear()
    rests = {point.key: rests_on(point) for point in points}
    waiting = [point for point in points if _rested_on(point, folder) != rests[point.key]]
    console.print(f"{len(points)} runs, {len(points) - len(waiting)} of them already there")
    if not waiting:
        return
    import ray

    stop = threading.Event()
    with interrupts(stop), running_ray(folder / "ray.log"):
        check_cpus("--cpus", cpus, max(map(_gpus, waiting)))

        def begin(task: Callable[..., None], point: Point, *arguments: Any) -> Any:
            needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": _gpus(point)}
            needs["name"] = task.__name__  # tools show it as the process's name
            remote = ray.remote(max_retries=0, **needs)(_at_path).remote
            return remote(sys.path, sys.argv, task, point, *arguments)

        def ended(at_work: dict[Any, Point]) -> Iterator[tuple[Any, Point]]:
            while at_work:
                done, _ = ray.wait(list(at_work), timeout=_POLL_SECONDS)
                if stop.is_set():
                    raise KeyboardInterrupt
                yield from ((each, at_work.pop(each)) for each in done)

        for carried in {name for point in waiting for name in point.own_code}:
            if isinstance(carried, Carried):
                carried.put_in_ray()
        alike = {point.apart_from_seed: point for point in reversed(waiting)}
        for done, point in ended({begin(check, point): point for point in alike.values()}):
            _refuse_mistake(done, point)
        begun = time.monotonic()
        at_work = {
            begin(play, point, folder / point.key, cpus, rests[point.key]): point
            for point in waiting
        }
        for done, point in ended(at_work):
            said = _outcome(done, point, folder, failed)
            finished = len(waiting) - len(at_work)
            left = (time.monotonic() - begun) / finished * len(at_work)
            console.print(
                f"{finished}/{len(waiting)}  {point}: {said}; "
                f"{datetime.timedelta(seconds=round(left))} left",
                soft_wrap=True,
                highlight=False,
            )


def _rested_on(point: Point, folder: Path) -> str | None:
    """What of your code and data a point's result was made with; None: it has no result."""
    result = read_result(folder / point.key)
    return None if result is None else result["rests_on"]


def _at_path(
    path: list[str], command: list[str], task: Callable[..., None], *arguments: Any
) -> None:
    """Does the task in another process, which finds your modules and knows the command."""
    sys.argv[:] = command  # instead of Ray's, for `provenance`
    make_importable(path)
    task(*arguments)


def _refuse_mistake(done: Any, point: Point) -> None:
    """Raises the ConfigError of a task of `check`; any other error will be told by `play`."""
    import ray

    try:
        ray.get(done)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{point}: {one_line(cause)}") from None


def _outcome(done: Any, point: Point, folder: Path, failed: dict[str, str]) -> str:
    """What has become of a point, in words; `done` is its finished task."""
    import ray

    try:
        ray.get(done)
        result = read_result(folder / point.key) or {}
        name, score = result["score_name"], result["score"]
        return f"{name} {score_text(name, score)} in {result['seconds']:.0f} s"
    except Exception as error:  # the run may raise anything, and Ray tells of a worker that died
        failed[str(point)] = one_line(getattr(error, "cause", None) or error)[:300]
        return f"failed: {failed[str(point)]}"


def _gpus(point: Point) -> int:
    return int(point.config.simulation.device == "cuda")
