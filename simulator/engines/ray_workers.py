"""Ray workers of the vectorised engine: each holds the records of a shard of the users."""

from __future__ import annotations

import itertools
import logging
import math
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from torch import nn

from simulator.config import ConfigError
from simulator.engines.flower import EngineFailed, path_for_workers
from simulator.engines.vectorised import Blankets, ReportSum, SumReports, users_per_block
from simulator.experiment import Experiment, PartitionedRecords

_CONNECT_SECONDS = 5.0
_START_SECONDS = 120.0
_TRIES = 3  # of a shard's part of a round


@contextmanager
def ray_workers(experiment: Experiment) -> Iterator[SumReports]:
    """Starts `simulation.workers` Ray actors and gives `ReportSum.sum` by all of them.

    On the cluster at RAY_ADDRESS if that is set, else in a Ray of its own that ends with the run.
    A worker has one CPU and, with `simulation.device = "cuda"`, its share of the cluster's GPUs. It
    is sent its users' records when it starts and the model once a round. One that dies is
    replaced, and its part of the round computed anew: nobody has read what it drew, so that the
    round has one release, as its ledger line says.

    Raises:
        EngineFailed: Ray or the workers do not start or fail, one dies in every try of a round, or
            the cluster lacks the GPUs.
    """
    try:
        workers = _start(experiment, experiment.config.simulation.workers)
        yield lambda *what: _sum(workers, *what)
    finally:
        ray.shutdown()


def check_cluster() -> None:
    """Refuses a RAY_ADDRESS where nothing listens; Ray itself would try for minutes.

    Raises:
        ConfigError: nothing does.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdigit():  # none given, or a name that Ray resolves
        return
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"RAY_ADDRESS must name a running cluster, got {address}: {error}"
        ) from error


def _start(experiment: Experiment, number: int) -> list[_Worker]:
    try:
        with path_for_workers():
            options = {} if os.environ.get("RAY_ADDRESS") else {"include_dashboard": False}
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
        needs = needs_of_a_worker(experiment.config.simulation.device, number)
        records = experiment.load_users()
        shards = _shards(experiment, number)
        workers = [_Worker(experiment, records, needs, start, end) for start, end in shards]
        ray.get([worker.actor.__ray_ready__.remote() for worker in workers], timeout=_START_SECONDS)
        return workers
    except GetTimeoutError as error:
        free = ray.available_resources()
        raise EngineFailed(
            f"Ray did not start {number} workers of one CPU and {needs['num_gpus']:g} GPUs each "
            f"within {_START_SECONDS:g} s; {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} "
            "GPUs are free"
        ) from error
    except EngineFailed:
        raise
    except Exception as error:
        raise EngineFailed(f"Ray did not start: {_cause(error)}") from error


def needs_of_a_worker(device: str, number: int) -> dict[str, float]:
    """What each of the workers asks of Ray: of GPUs 1, or 1/k where k workers must share one.

    Raises:
        EngineFailed: the cluster has no GPU.
    """
    if device == "cpu":
        return {"num_cpus": 1, "num_gpus": 0}
    gpus = int(ray.cluster_resources().get("GPU", 0))
    if gpus == 0:
        raise EngineFailed('simulation.device = "cuda" needs GPUs, the Ray cluster has none')
    # Ray counts in 1/10000 and rounds up: six times 1/6 would not fit.
    return {"num_cpus": 1, "num_gpus": 10_000 // math.ceil(number / gpus) / 10_000}


class _Worker:
    """An actor that sums the reports of the users from `start` to before `end`."""

    def __init__(
        self,
        experiment: Experiment,
        records: PartitionedRecords,
        needs: dict[str, float],
        start: int,
        end: int,
    ):
        self.start, self.end = start, end
        own = ray.put(records.of(start, end))
        self._make_actor = lambda: ray.remote(**needs)(ReportSum).remote(experiment, own)
        self.actor = self._make_actor()

    def replace(self) -> None:
        """Puts a new actor in the place of a dead one."""
        self.actor = self._make_actor()


def _shards(experiment: Experiment, number: int) -> list[tuple[int, int]]:
    """The ids at which the shards start and end: whole blocks, as many to each."""
    users, block = experiment.plan.users, users_per_block(experiment)
    blocks = -(-users // block)
    bounds = [min(users, block * (blocks * shard // number)) for shard in range(number + 1)]
    return list(itertools.pairwise(bounds))


def _sum(
    workers: list[_Worker],
    round: int,
    model: nn.Module,
    users: np.ndarray,
    blankets: list[Blankets],
) -> np.ndarray:
    """`ReportSum.sum`, each worker for its own users and its share of the blankets."""
    shared = ray.put(model)
    left = {
        worker: (
            users[np.searchsorted(users, worker.start) : np.searchsorted(users, worker.end)],
            [_share(each, number, len(workers)) for each in blankets],
        )
        for number, worker in enumerate(workers)
    }
    total = 0
    for _ in range(_TRIES):
        parts = {worker: worker.actor.sum.remote(round, shared, *left[worker]) for worker in left}
        for worker, part in parts.items():
            try:
                total = total + ray.get(part)
                del left[worker]
            except RayActorError:
                worker.replace()
            except RayError as error:
                raise EngineFailed(
                    f"round {round}: a Ray worker failed: {_cause(error)}"
                ) from error
        if not left:
            return total
    raise EngineFailed(f"round {round}: a Ray worker died {_TRIES} times")


def _share(blankets: Blankets, number: int, of: int) -> Blankets:
    """The part of some blankets that one of the workers adds."""
    shuffler, first, last = blankets
    count = last - first
    return shuffler, first + count * number // of, first + count * (number + 1) // of


def _cause(error: Exception) -> str:
    """One line; of an exception in a worker that exception, not Ray's account of it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {str(cause).strip().partition(chr(10))[0]}"
