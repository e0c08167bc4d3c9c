"""Ray workers of the vectorised engine: each holds the records of a shard of the users."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from shufl.learning.data.partition import Partition, PartitionedRecords
from shufl.learning.your_code import make_importable, one_line
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import EngineFailed
from shufl.simulator.engines.ray_cluster import NO_GPU, nodes_of_ray, running_ray
from shufl.simulator.engines.report_sum import Blankets, ReportSum, SumReports, VectorisedSettings

_START_SECONDS = 600.0
_POLL_SECONDS = 0.5  # between looks at whether an interrupt came
_TRIES = 3  # of a shard's part of a round


@contextmanager
def ray_workers(
    settings: VectorisedSettings, records: PartitionedRecords, log_file: Path, stop: threading.Event
) -> Iterator[SumReports]:
    """Starts `simulation.workers` Ray workers and gives `ReportSum.sum` by all of them together.

    They run on the cluster at RAY_ADDRESS if that is set, else in a Ray of the run's own, which
    ends with it. A worker is an actor with one CPU and, with `simulation.device = "cuda"`, a share
    of the cluster's GPUs. It gets its users' records when it starts, and the model once a round. If
    a worker dies, Ray starts another one, which computes its part of the round anew: nobody has
    read what the dead one drew, so the round has one release, as its ledger line says. Ray's own
    messages go to a log file.

    Raises:
        ConfigError: the cluster can never host all workers at once.
        EngineFailed: Ray or the workers do not start or fail, or one dies in every try of a round.
    """
    ends = shards(records.partition, settings.records_per_block, settings.keys.workers)
    with running_ray(log_file):
        workers = _start(settings, records, ends, stop)

        def sum_reports(
            round: int, state: Mapping[str, Any], users: np.ndarray, blankets: list[Blankets]
        ) -> np.ndarray:
            shared = ray.put(state)
            parts = [
                worker.sum.remote(held, round, shared, *part)
                for (worker, held), part in zip(workers, divide(users, blankets, ends), strict=True)
            ]
            try:
                return functools.reduce(operator.add, map(ray.get, parts))
            except RayActorError as error:
                raise EngineFailed(f"round {round}: a Ray worker died {_TRIES} times") from error
            except RayError as error:
                raise EngineFailed(
                    f"round {round}: a Ray worker failed: {_cause(error)}"
                ) from error

        yield sum_reports


class _Worker:
    """Sums the reports of one shard's users, in a process that Ray may have to start anew."""

    def __init__(self, path: list[str]) -> None:
        make_importable(path)
        self._reports: ReportSum | None = None

    def sum(self, held: list[ray.ObjectRef[Any]], *what: Any) -> np.ndarray:
        """`ReportSum.sum` with these arguments; `held` refers to the settings and the records."""
        if self._reports is None:
            self._reports = ReportSum(*ray.get(held))
        return self._reports.sum(*what)


def _start(
    settings: VectorisedSettings,
    records: PartitionedRecords,
    ends: list[tuple[int, int]],
    stop: threading.Event,
) -> list[tuple[Any, list[Any]]]:
    """Waits until there is a ready worker for each shard; each with references to what it holds."""
    needs: dict[str, Any] = needs_of_a_worker(settings.keys.device, len(ends))
    try:
        make = ray.remote(max_restarts=-1, max_task_retries=_TRIES - 1, **needs)(_Worker).remote
        shared = ray.put(settings)
        workers: list[tuple[Any, list[Any]]] = [
            (make(sys.path), [shared, ray.put(records.of(*shard))]) for shard in ends
        ]
        ready = [worker.__ray_ready__.remote() for worker, _ in workers]
        for _ in range(int(_START_SECONDS / _POLL_SECONDS)):
            done, waiting = ray.wait(ready, num_returns=len(ready), timeout=_POLL_SECONDS)
            if stop.is_set() or not waiting:
                break
        ray.get(done if stop.is_set() else ready, timeout=0)
        return workers
    except GetTimeoutError as error:
        raise EngineFailed(
            f"Ray did not start {len(ends)} workers within {_START_SECONDS:g} s; others may use "
            "its CPUs or GPUs"
        ) from error
    except Exception as error:
        raise EngineFailed(f"Ray did not start: {_cause(error)}") from error


def needs_of_a_worker(device: str, number: int) -> dict[str, float]:
    """What each worker asks of Ray: one CPU; with "cuda" a GPU, or 1/k if k workers must share it.

    Raises:
        ConfigError: the nodes of Ray cannot host this number of workers at once, or no Ray answers.
    """
    nodes, share = nodes_of_ray(), 0.0
    room = [int(node.get("CPU", 0)) for node in nodes]
    if device == "cuda":
        gpus = [int(node.get("GPU", 0)) for node in nodes]
        if not any(gpus):
            raise ConfigError(NO_GPU)
        each = math.ceil(number / sum(gpus))
        # Ray counts GPUs in 1/10000 and rounds up, so that six workers of 1/6 would not fit.
        share = 10_000 // each / 10_000
        room = [min(cpus, each * held) for cpus, held in zip(room, gpus, strict=True)]
    if number > sum(room):
        raise ConfigError(
            f"simulation.workers must be at most {sum(room)}, which have a CPU each"
            f"{' beside a GPU' * bool(share)} on the nodes of Ray, got {number}"
        )
    return {"num_cpus": 1, "num_gpus": share}


def shards(partition: Partition, block: int, number: int) -> list[tuple[int, int]]:
    """Cuts the users into shards of whole blocks, one for each worker.

    Args:
        partition: of the users.
        block: how many records the users of a block have.
        number: of workers.

    Returns:
        For each worker the first of its users' ids, and the one after the last.
    """
    (last,) = partition.before(np.array([partition.users - 1])).tolist()
    blocks = last // block + 1
    places = (block * (blocks * shard // number) for shard in range(number + 1))
    return list(itertools.pairwise(map(partition.user_at, places)))


def divide(
    users: np.ndarray, blankets: list[Blankets], ends: list[tuple[int, int]]
) -> Iterator[tuple[np.ndarray, list[Blankets]]]:
    """Gives each worker its own users, and an equal part of each shuffler's blankets."""
    for number, (start, end) in enumerate(ends):
        part = [
            (
                shuffler,
                first + (last - first) * number // len(ends),
                first + (last - first) * (number + 1) // len(ends),
            )
            for shuffler, first, last in blankets
        ]
        yield users[np.searchsorted(users, start) : np.searchsorted(users, end)], part


def _cause(error: Exception) -> str:
    """One line of an exception; for one in a worker, without Ray's account of it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {one_line(cause)}"
