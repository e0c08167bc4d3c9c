"""The vectorised engine: a round as one computation over the users who checked in, no messages.

Plan, coins, clipping, noise, blankets and training are those of the Flower engine. There is no
shuffler, no sealing and no node: what those are for cannot be studied here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from accounting.mechanisms import make_randomness, seed_of_shuffler
from clients import record_orders
from server import Aggregate, PlayedRound, mean_update
from simulator.engines.user_gradients import clipped_sum_of_updates, ready_for
from simulator.experiment import Experiment, PartitionedRecords

_NUMBERS_AT_ONCE = 2**18  # of noise: they stay in a core's cache
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for what `keep_freed_memory` sets

Blankets = tuple[int, int, int]
"""Some blankets of a round: which shuffler's, and the numbers of the first and behind the last."""

SumReports = Callable[[int, nn.Module, np.ndarray, list[Blankets]], np.ndarray]
"""What `ReportSum.sum` does."""


class VectorisedRounds:
    """Plays the rounds of an experiment: coins, the sum of reports, the mean update."""

    def __init__(self, experiment: Experiment, sum_reports: SumReports):
        self._plan = experiment.plan
        self._dimension = experiment.parameters
        self._seed = experiment.seed
        self._randomness = make_randomness(self._seed)
        self._crowds = experiment.crowds
        self._shuffler_of = experiment.shuffler_of
        self._noise_at_once = experiment.config.simulation.noise == "aggregate"
        self._sum_reports = sum_reports

    def __call__(self, round: int, model: nn.Module) -> PlayedRound:
        """One round: coins, blankets, and the mean update of the batches that are large enough."""
        plan = self._plan
        users = self._randomness.checked_in(round, plan.users, plan.check_in_rate)
        shufflers = self._shuffler_of(users)
        reports = np.bincount(shufflers, minlength=len(self._crowds))
        blankets = [
            make_randomness(seed_of_shuffler(self._seed, number)).number_of_blankets(
                round, plan.shuffler_blankets
            )
            for number in range(len(self._crowds))
        ]
        released = np.flatnonzero(reports + blankets >= plan.minimum_batch).tolist()
        if not released:
            return PlayedRound("below-minimum", None, plan.users, 0)
        users = users[np.isin(shufflers, released)]
        added = [(number, 0, blankets[number]) for number in released]
        count = len(users) + sum(last for *_, last in added)
        total = self._sum_reports(round, model, users, added).astype(np.float64)
        if self._noise_at_once:
            scale = plan.noise_multiplier * plan.clip_norm / plan.mechanism.unit
            total += scale * self._randomness.summed_noise(round, count, self._dimension)
        crowds = [self._crowds[number] for number in released]
        estimate = mean_update(total, plan, sum(crowds))
        return PlayedRound(
            "released", Aggregate(estimate, count, 0, {}), plan.users, smallest_crowd=min(crowds)
        )


class ReportSum:
    """Sums reports of users whose records it has, and blankets.

    With `noise = "aggregate"` without the noise, so that nothing is left of the blankets.

    Users are taken in blocks of neighbouring ids, each of about `users_per_chunk` who checked in,
    and the blocks' sums are rounded to the unit of reports and added as integers: whoever sums
    which blocks, in whatever order, the sum of all is the same to the bit. (A client rounds each
    report, which this engine never has; both errors are far below the noise.)
    """

    def __init__(self, experiment: Experiment, records: PartitionedRecords):
        self._plan = experiment.plan
        self._training = experiment.local_training
        self._method = experiment.gradients
        self._dimension = experiment.parameters
        simulation = experiment.config.simulation
        self._device, self._precision = simulation.device, simulation.precision
        # On a GPU threads take turns: memory holds one block's gradients, the other cores draw.
        self._turn = contextlib.nullcontext() if self._device == "cpu" else threading.Lock()
        self._records = records.to(self._device)
        self._model = ready_for(self._method, experiment.make_model(), self._device)
        self._seed = experiment.seed
        self._randomness = make_randomness(self._seed)
        self._noise_in_reports = simulation.noise == "report"
        self._block = users_per_block(experiment)
        keep_freed_memory()
        self._threads = ThreadPoolExecutor(
            torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
        )

    def sum(
        self, round: int, model: nn.Module, users: np.ndarray, blankets: list[Blankets]
    ) -> np.ndarray:
        """The sum of the reports of `users`, and of blankets.

        Threads of one core each are faster than torch's own, which wait for each other after
        every operation.

        Args:
            round: from 1.
            model: the round's, which stays as it is.
            users: ids of users who checked in, increasing, shape (k,).
            blankets: which ones are this sum's to add.

        Returns:
            int64 of shape (d,), in units of the plan's mechanism.
        """
        total = np.zeros(self._dimension, dtype=np.int64)
        # Not in this thread: its OpenMP threads would copy too, and then wait on busy cores.
        self._threads.submit(self._model.load_state_dict, model.state_dict()).result()
        # Else float32 sums might be of 10 bits, and longer than their norms by as much (TF32).
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        blocks = np.split(users, np.flatnonzero(np.diff(users // self._block)) + 1)
        for part in self._threads.map(functools.partial(self._sum_block, round), blocks):
            total += part
        if self._noise_in_reports:
            parts = [part for each in blankets for part in self._parts(each)]
            for part in self._threads.map(functools.partial(self._sum_blankets, round), parts):
                total += part
        return total

    def _parts(self, blankets: Blankets) -> list[Blankets]:
        """The same blankets in parts whose noise stays in a core's cache."""
        shuffler, first, last = blankets
        step = max(1, _NUMBERS_AT_ONCE // self._dimension)
        return [(shuffler, at, min(at + step, last)) for at in range(first, last, step)]

    def _sum_blankets(self, round: int, blankets: Blankets) -> np.ndarray:
        """The same reports as the shuffler's process makes, int64 of shape (d,)."""
        shuffler, first, last = blankets
        randomness = make_randomness(seed_of_shuffler(self._seed, shuffler))
        zero = np.zeros(self._dimension)
        total = np.zeros(self._dimension, dtype=np.int64)
        for noise in randomness.blanket_noise(round, np.arange(first, last), self._dimension):
            total += self._plan.mechanism.report(zero, noise)
        return total

    def _sum_block(self, round: int, users: np.ndarray) -> np.ndarray:
        """Of one block, int64 of shape (d,)."""
        total = torch.zeros(self._dimension)
        if len(users):
            features, labels = self._records(users)
            orders = self._orders(round, users, labels.shape[1])
            given = features, labels, self._training, orders, self._plan.clip_norm, self._precision
            with self._turn:
                total = clipped_sum_of_updates(self._method, self._model, *given).cpu()
        if self._noise_in_reports:
            noise = np.zeros(self._dimension)
            scale = self._plan.noise_multiplier * self._plan.clip_norm
            size = max(1, _NUMBERS_AT_ONCE // self._dimension)
            for part in np.split(users, range(size, len(users), size)):
                noise += self._randomness.standard_normal(round, part, self._dimension).sum(0)
            total = total + torch.from_numpy(scale * noise)
        units = np.divide(total.numpy(), self._plan.mechanism.unit, dtype=float)
        return np.rint(units, out=units).astype(np.int64)

    def _orders(self, round: int, users: np.ndarray, records: int) -> torch.Tensor | None:
        """Each user's orders of its records in its local epochs, those of `local_update`."""
        if self._training.algorithm == "fedsgd":
            return None
        seeds = self._randomness.training_seeds(round, users)
        return record_orders(seeds, self._training.local_epochs, records)


def keep_freed_memory() -> None:
    """Has glibc keep up to 1 GiB of a thread's freed memory, for this process to take again.

    Every block takes what the one before has freed. Given back to the kernel in between, it would
    come as fresh pages, which took some tenth of a CNN's round. Tensors of 32 MiB and more are
    still given back.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**25)  # the most that all versions take
        mallopt(_TRIM_THRESHOLD, 2**30)


def users_per_block(experiment: Experiment) -> int:
    """Neighbouring ids of which about `users_per_chunk` check in."""
    return int(experiment.config.simulation.users_per_chunk / experiment.plan.check_in_rate)
