"""Plays the points of a grid on Ray, as many at once as there are processors."""

from __future__ import annotations

import datetime
import fcntl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shufl.learning.data.datasets import load_dataset
from shufl.learning.section import ConfigError, make_importable, one_line
from shufl.protocol import validation
from shufl.protocol.console import Console
from shufl.results.interrupts import interrupts
from shufl.results.tables import score_text
from shufl.simulator.engines.base import check_cpus, running_ray
from shufl.simulator.grid.page import finished, keep_grid, write_page
from shufl.simulator.grid.points import check, play, read_result, rests_on
from shufl.simulator.grid.rows import take_over_rows
from shufl.simulator.grid.settings import Point, load_grid

_POLL_SECONDS = 0.5  # between looks at whether an interrupt came


def play_grid(
    source: str, results: Path, pages: Path | None, cpus: int, console: Console
) -> tuple[list[dict[str, Any]], Path, dict[str, str]]:
    """Plays a grid, or goes on with it, and writes its table and its page.

    `pages` is where table and page go, and whose table spares points; None: the grid's folder.

    Returns:
        What each finished point came to; the page; why points failed, by what they are called.

    Raises:
        ConfigError: as `play_points`; or another process is at work in the folder.
        EngineFailed, KeyboardInterrupt: as `play_points`.
    """
    validation.integer("cpus", cpus, 1)
    name, settings = load_grid(source)
    points = settings.points()
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
        keep_grid(settings, folder, failed)
        try:
            play_points(points, folder, cpus, console, failed)
        finally:
            keep_grid(settings, folder, failed)
            done = finished(points, folder)
            if failed or done:  # else an older page stays
                page = write_page(name, settings, points, folder, pages or folder, failed)
    return [result for _, result in done], page, failed


def play_points(
    points: list[Point],
    folder: Path,
    cpus: int,
    console: Console,
    failed: dict[str, str],
) -> None:
    """Plays those that have no result yet, once all of them are known to be playable.

    Each point has a folder in `folder` and as many CPUs, and threads of torch, as `cpus`. The
    console gets a line of each finished point, and `failed` says why points failed, by what they
    are called; the others are finished.

    Raises:
        ConfigError: the configuration of one of them is wrong, or no node of Ray has the CPUs and
            GPUs that a run needs; none has been played.
        EngineFailed: Ray does not start.
        KeyboardInterrupt: SIGINT or SIGTERM came; what was at work is ended.
    """
    load_dataset.cache_clear()
    waiting = [point for point in points if not _is_there(point, folder)]
    console.print(f"{len(points)} runs, {len(points) - len(waiting)} of them already there")
    if not waiting:
        return
    import ray

    stop = threading.Event()
    with interrupts(stop), running_ray(folder / "ray.log"):
        check_cpus("--cpus", cpus, max(map(_gpus, waiting)))

        def begin(task: Callable[..., None], point: Point, *arguments: Any) -> Any:
            needs: dict[str, Any] = {"num_cpus": cpus, "num_gpus": _gpus(point)}
            needs["name"] = task.__name__  # that of the process, for who looks
            remote = ray.remote(max_retries=0, **needs)(_at_path).remote
            return remote(sys.path, sys.argv, task, point, *arguments)

        def ended(at_work: dict[Any, Point]) -> Iterator[tuple[Any, Point]]:
            while at_work:
                done, _ = ray.wait(list(at_work), timeout=_POLL_SECONDS)
                if stop.is_set():
                    raise KeyboardInterrupt
                yield from ((each, at_work.pop(each)) for each in done)

        alike = {point.apart_from_seed: point for point in reversed(waiting)}
        for done, point in ended({begin(check, point): point for point in alike.values()}):
            _refuse_mistake(done, point)
        begun = time.monotonic()
        at_work = {begin(play, point, folder / point.key, cpus): point for point in waiting}
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


def _is_there(point: Point, folder: Path) -> bool:
    """Whether a point has a result, of the reader's code and data as they are now."""
    result = read_result(folder / point.key)
    return result is not None and result["rests_on"] == rests_on(point)


def _at_path(
    path: list[str], command: list[str], task: Callable[..., None], *arguments: Any
) -> None:
    """The task, in a process that finds the reader's modules and knows the command as this one."""
    sys.argv[:] = command  # instead of Ray's, for `provenance`
    make_importable(path)
    task(*arguments)


def _refuse_mistake(done: Any, point: Point) -> None:
    """Raises a ConfigError of a task of `check`; whatever else ended it will end `play` too."""
    import ray

    try:
        ray.get(done)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, ConfigError):
            raise ConfigError(f"{point}: {one_line(cause)}") from None


def _outcome(done: Any, point: Point, folder: Path, failed: dict[str, str]) -> str:
    """What has become of a point, whose task `done` is."""
    import ray

    try:
        ray.get(done)
        result = read_result(folder / point.key) or {}
        name, score = result["score_name"], result["score"]
        return f"{name} {score_text(name, score)} in {result['seconds']:.0f} s"
    except Exception as error:  # whatever the run raised, or Ray of a worker that died
        failed[str(point)] = one_line(getattr(error, "cause", None) or error)[:300]
        return f"failed: {failed[str(point)]}"


def _gpus(point: Point) -> int:
    return int(point.config.simulation.device == "cuda")
