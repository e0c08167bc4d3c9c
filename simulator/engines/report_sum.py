"""The sum of a round's reports, by whoever has the users' records: this process or a Ray worker."""

from __future__ import annotations

import functools
import math
import queue
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from shufl.accounting import PrivacyPlan
from shufl.learning import LocalTraining, ModuleState
from shufl.learning.config import VectorisedKeys
from shufl.learning.data.partition import PartitionedRecords
from shufl.learning.section import READERS_ERRORS, one_line
from shufl.learning.trained import frozen_digest, load_sent
from shufl.learning.trial import exact_float32
from shufl.protocol.mechanisms import LdpSgd, make_randomness, seed_of_shuffler, to_normals
from shufl.server import RoundFailed
from shufl.simulator.engines.gradient_forms import Clipping, RandomSides
from shufl.simulator.engines.memory import keep_freed_memory
from shufl.simulator.engines.user_gradients import Method, clipped_sum_of_updates, ready_for

_NUMBERS_AT_ONCE = 2**20  # of noise, to be summed

Blankets = tuple[int, int, int]
"""Some blankets of a round: which shuffler's, and the numbers of the first and behind the last."""

SumReports = Callable[[int, Mapping[str, Any], np.ndarray, list[Blankets]], np.ndarray]
"""A call with the arguments and the result of `ReportSum.sum`."""


@dataclass(frozen=True)
class VectorisedSettings:
    """What computing rounds needs. Small and picklable: it travels to every Ray worker.

    Attributes:
        plan: the privacy plan.
        make_model: builds the model.
        dimension: d, the number of its parameters.
        training: users' local computation.
        method: how users' gradients are computed.
        seed: of coins and noise; None takes them from the operating system.
        crowds: how many users report to each shuffler.
        shuffler_of: to which shuffler, from 0, each of some users reports.
        keys: the engine's keys of the configuration.
        chunk: about how many records are computed at once.
        frozen: the `frozen_digest` of the model.
    """

    plan: PrivacyPlan
    make_model: Callable[[], nn.Module]
    dimension: int
    training: LocalTraining
    method: Method
    seed: int | None
    crowds: tuple[int, ...]
    shuffler_of: Callable[[np.ndarray], np.ndarray]
    keys: VectorisedKeys
    chunk: int
    frozen: str

    @property
    def records_per_block(self) -> int:
        """How many records a block's users have; about `chunk` of them are of who checks in."""
        return int(self.chunk / self.plan.check_in_rate)


def cut(sizes: np.ndarray, chunk: int) -> np.ndarray:
    """Where to cut users with these `sizes` into parts that are computed at once.

    Most blocks of users with one record each stay whole.
    """
    most = chunk + math.ceil(4 * math.sqrt(chunk))
    return np.flatnonzero(np.diff((sizes.cumsum() - sizes) // most)) + 1


def sizes_to_try(sizes: np.ndarray, users: int, chunk: int) -> np.ndarray:
    """How many records users have in a trial, of as many users as are ever computed at once.

    Users of unequal size are computed another way than equal ones: then the trial has the smallest,
    the largest, and some that need padding.
    """
    count = min(users, 2 * chunk)
    smallest = np.sort(np.resize(np.sort(sizes), count))
    at_once = np.split(smallest, cut(smallest, chunk))[0]
    if sizes.min() == sizes.max():
        return at_once
    return np.concatenate([[3, 4], at_once, [sizes.max()], [3, 5, 4]])


class ReportSum:
    """Sums reports of users whose records it has, and blankets.

    With `noise = "aggregate"` it leaves out the noise, and so all of the blankets, which are noise.

    Users are taken in blocks of neighbouring ids, each with about `chunk` records of
    those who checked in. The blocks' sums are rounded to the unit of reports and added as integers:
    whoever sums which blocks, in whatever order, the sum of all is the same to the bit. (A client
    rounds each report, which this engine never has; both errors are far below the noise.)
    """

    def __init__(self, settings: VectorisedSettings, records: PartitionedRecords):
        self._plan, self._training = settings.plan, settings.training
        self._method, self._dimension = settings.method, settings.dimension
        device, self._precision = settings.keys.device, settings.keys.precision
        self._records = records.to(device)
        # A forward may write to its model, so no two threads use one at a time. On a GPU they take
        # turns: memory holds one block's gradients, and the other cores draw.
        copies = torch.get_num_threads() if device == "cpu" else 1
        self._models = [
            ready_for(self._method, settings.make_model(), device) for _ in range(copies)
        ]
        if (own := frozen_digest(self._models[0])) != settings.frozen:  # on another machine
            raise RoundFailed(
                f"a worker's frozen parameters must be {settings.frozen[:12]}, got {own[:12]}"
            )
        self._free: queue.SimpleQueue[tuple[nn.Module, ModuleState]] = queue.SimpleQueue()
        self._seed = settings.seed
        self._randomness = make_randomness(self._seed)
        self._noise_in_reports = settings.keys.noise == "report"
        self._block, self._chunk = settings.records_per_block, settings.chunk
        keep_freed_memory()
        self._threads = ThreadPoolExecutor(
            torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
        )

    def sum(
        self, round: int, state: Mapping[str, Any], users: np.ndarray, blankets: list[Blankets]
    ) -> np.ndarray:
        """The sum of the reports of `users`, and of blankets.

        Threads of one core each are faster than torch's own, which wait for each other after
        every operation.

        Args:
            round: from 1.
            state: what `sent` gives of the round's model.
            users: ids of users who checked in, increasing, shape (k,).
            blankets: which ones are this sum's to add.

        Returns:
            int64 of shape (d,), in units of the plan's mechanism.

        Raises:
            RoundFailed: the model fails.
        """
        total = np.zeros(self._dimension, dtype=np.int64)
        # Not in this thread: its OpenMP threads would copy too, and then wait on busy cores.
        loads = self._threads.map(lambda own: load_sent(own, state), self._models)
        self._free = queue.SimpleQueue()
        for own, _ in zip(self._models, loads, strict=True):
            self._free.put((own, ModuleState(own)))
        exact_float32()
        block_of = self._records.before(users) // self._block
        blocks = np.split(users, np.flatnonzero(np.diff(block_of)) + 1) if len(users) else []
        for part in self._threads.map(functools.partial(self._sum_block, round), blocks):
            total += part
        if self._noise_in_reports:
            parts = [part for each in blankets for part in self._parts(each)]
            for part in self._threads.map(functools.partial(self._sum_blankets, round), parts):
                total += part
        return total

    def _parts(self, blankets: Blankets) -> list[Blankets]:
        """The same blankets in parts, one for each thread or more."""
        shuffler, first, last = blankets
        share = -(-(last - first) // torch.get_num_threads())
        step = max(1, min(share, _NUMBERS_AT_ONCE // self._dimension))
        return [(shuffler, at, min(at + step, last)) for at in range(first, last, step)]

    def _sum_blankets(self, round: int, blankets: Blankets) -> np.ndarray:
        """The sum of these blankets, which are those the shuffler's process makes: int64 (d,)."""
        shuffler, first, last = blankets
        randomness = make_randomness(seed_of_shuffler(self._seed, shuffler))
        zero = np.zeros(self._dimension)
        total = np.zeros(self._dimension, dtype=np.int64)
        for noise in randomness.blanket_noise(round, np.arange(first, last), self._dimension):
            total += self._plan.mechanism.report(zero, noise)
        return total

    def _sum_block(self, round: int, users: np.ndarray) -> np.ndarray:
        """The sum of the reports of one block's users, int64 of shape (d,)."""
        total = torch.zeros(self._dimension)
        for part in np.split(users, cut(self._records.sizes(users), self._chunk)):
            total += self._sum_of_updates(round, part)
        if self._noise_in_reports:
            noise = np.zeros(self._dimension)
            scale = self._plan.mechanism.noise_deviation(self._dimension)
            size = max(1, _NUMBERS_AT_ONCE // self._dimension)
            for part in np.split(users, range(size, len(users), size)):
                draws = self._randomness.standard_normal(round, part, self._dimension)
                noise += to_normals(draws).sum(0)
            total = total + torch.from_numpy(scale * noise)
        units = np.divide(total.numpy(), self._plan.mechanism.unit(self._dimension), dtype=float)
        return np.rint(units, out=units).astype(np.int64)

    def _sum_of_updates(self, round: int, users: np.ndarray) -> torch.Tensor:
        """The sum of these users' clipped updates, float32 of shape (d,)."""
        features, labels, sizes = self._records.together(users)
        seeds = self._randomness.training_seeds(round, users)
        mechanism = self._plan.mechanism
        clipping = Clipping(mechanism.clip_norm)
        if isinstance(mechanism, LdpSgd):  # `noise = "aggregate"` adds all the rest
            draws = to_normals(self._randomness.standard_normal(round, users, 2))
            clipping = RandomSides.drawn(mechanism, draws, self._dimension, features.device)
        given = features, labels, sizes, self._training, seeds, clipping, self._precision
        model, state = self._free.get()
        try:
            try:
                return clipped_sum_of_updates(self._method, model, *given).cpu()
            finally:
                state.restore()
        except READERS_ERRORS as error:  # of the model
            raise RoundFailed(
                f"round {round}: computing updates failed: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        finally:
            self._free.put((model, state))
