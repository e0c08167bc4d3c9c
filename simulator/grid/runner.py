"""Plays the points of a grid on Ray, as many at once as there are processors."""

from __future__ import annotations

import datetime
import threading
import time
from pathlib import Path
from typing import Any

from simulator.console import Console
from simulator.engines.base import EngineFailed, interrupts, start_ray
from simulator.grid.points import play, read_result
from simulator.grid.settings import Point
from simulator.section import one_line

_POLL_SECONDS = 0.5  # between looks at whether an interrupt came


def play_points(
    points: list[Point],
    folder: Path,
    cpus: int,
    command: str,
    console: Console,
    failed: dict[str, str],
) -> None:
    """Plays those that have no result yet.

    Args:
        points: of a grid.
        folder: has a folder for each point.
        cpus: of each point, and torch's threads.
        command: that all this is part of.
        console: where each finished point gets a line.
        failed: gets why points failed, by what they are called; the others are finished.

    Raises:
        EngineFailed: Ray does not start, or has fewer processors or GPUs than a point needs.
        KeyboardInterrupt: SIGINT or SIGTERM came; what was at work is ended.
    """
    waiting = [point for point in points if read_result(folder / point.key) is None]
    console.print(f"{len(points)} points, {len(points) - len(waiting)} of them already there")
    if not waiting:
        return
    import ray

    start_ray()
    begun, stop = time.monotonic(), threading.Event()
    try:
        there = ray.cluster_resources()
        for what, needed in (("CPU", cpus), ("GPU", max(map(_gpus, waiting)))):
            if needed > there.get(what, 0):
                raise EngineFailed(
                    f"a point needs {needed:g} {what}s, and Ray has {there.get(what, 0):g}"
                )
        task = ray.remote(max_retries=0, num_cpus=cpus)(play)
        at_work = {
            task.options(num_gpus=_gpus(point)).remote(
                point, folder / point.key, cpus, command
            ): point
            for point in waiting
        }
        with interrupts(stop):
            while at_work:
                done, _ = ray.wait(list(at_work), timeout=_POLL_SECONDS)
                if stop.is_set():
                    raise KeyboardInterrupt
                for each in done:
                    point = at_work.pop(each)
                    said = _outcome(each, point, folder, failed)
                    finished = len(waiting) - len(at_work)
                    left = (time.monotonic() - begun) / finished * len(at_work)
                    console.print(
                        f"{finished}/{len(waiting)}  {point}: {said}; "
                        f"{datetime.timedelta(seconds=round(left))} left",
                        soft_wrap=True,
                        highlight=False,
                    )
    finally:
        ray.shutdown()


def _outcome(done: Any, point: Point, folder: Path, failed: dict[str, str]) -> str:
    """What has become of a point, whose task `done` is."""
    import ray

    try:
        ray.get(done)
        result = read_result(folder / point.key) or {}
        return f"accuracy {result['accuracy']:.2%} in {result['seconds']:.0f} s"
    except Exception as error:  # whatever the run raised, or Ray of a worker that died
        failed[str(point)] = _reason(error)
        return f"failed: {failed[str(point)]}"


def _gpus(point: Point) -> float:
    return 1.0 if point.config.simulation.device == "cuda" else 0.0


def _reason(error: Any) -> str:
    """What a task raised, in one line, without Ray's traceback."""
    return one_line(getattr(error, "cause", None) or error)[:300]
