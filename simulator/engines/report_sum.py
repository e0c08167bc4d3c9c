"""The sum of a round's reports, in the process that has the users' records."""

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
from shufl.learning import ModuleState
from shufl.learning.config import Simulation
from shufl.learning.data.partition import PartitionedRecords
from shufl.learning.model_trial import exact_float32
from shufl.learning.parameters import frozen_digest, load_sent
from shufl.learning.your_code import CODE_ERRORS, one_line
from shufl.protocol.mechanisms import LdpSgd, make_randomness, seed_of_shuffler, to_normals
from shufl.results.experiment import ShufflerOf
from shufl.server import RoundFailed
from shufl.simulator.engines import keep_freed_memory
from shufl.simulator.engines.gradient_forms import Clipping, RandomSides
from shufl.simulator.engines.user_gradients import Computation, clipped_sum_of_updates, ready_for

_NUMBERS_AT_ONCE = 2**20  # of noise, to be summed

Blankets = tuple[int, int, int]
"""Blankets of a round: the shuffler's number, the first blanket's, and one past the last's."""

SumReports = Callable[[int, Mapping[str, Any], np.ndarray, list[Blankets]], np.ndarray]
"""The signature of `ReportSum.sum`, which one process plays or several do together."""


@dataclass(frozen=True)
class VectorisedSettings:
    """What computing rounds needs. Small and picklable: it travels to every Ray worker.

    Attributes:
        plan: the privacy plan.
        make_model: builds the model.
        dimension: d, the number of its parameters.
        computation: how users' updates are computed.
        seed: of coins and noise; None takes them from the operating system.
        shuffler_of: gives the shuffler of each user, numbered from 0.
        keys: the engine's keys of the configuration.
        chunk: about how many records are computed at once.
        frozen: the `frozen_digest` of the model.
    """

    plan: PrivacyPlan
    make_model: Callable[[], nn.Module]
    dimension: int
    computation: Computation
    seed: int | None
    shuffler_of: ShufflerOf
    keys: Simulation
    chunk: int
    frozen: str

    @property
    def records_per_block(self) -> int:
        """How many records all users of a block have; those who check in have about `chunk`."""
        return int(self.chunk / self.plan.check_in_rate)


def cut(sizes: np.ndarray, chunk: int) -> np.ndarray:
    """Where to cut users into parts that are computed at once.

    A part has about `chunk` records; most blocks of users with one record each stay whole.

    Args:
        sizes: how many records each user has, int of shape (k,).
        chunk: about how many records are computed at once.
    """
    most = chunk + math.ceil(4 * math.sqrt(chunk))
    return np.flatnonzero(np.diff((sizes.cumsum() - sizes) // most)) + 1


def sizes_to_try(sizes: np.ndarray, users: int, chunk: int) -> np.ndarray:
    """How many records each user of a trial has.

    The trial has as many users as are computed at once, those with the fewest records. Users with
    unequal numbers of records are computed in another way: if the run has such users, the trial
    also has one with the most records, and some that need padding.
    """
    count = min(users, 2 * chunk)
    smallest = np.sort(np.resize(np.sort(sizes), count))
    at_once = np.split(smallest, cut(smallest, chunk))[0]
    if sizes.min() == sizes.max():
        return at_once
    return np.concatenate([[3, 4], at_once, [sizes.max()], [3, 5, 4]])


class ReportSum:
    """Sums blankets, and the reports of users whose records it has.

    With `noise = "aggregate"` the sum has no noise, and therefore no blankets, which are noise
    alone.

    Users are taken in blocks of neighbouring ids. Those of a block who check in have about `chunk`
    records. A block's sum is rounded to the unit of reports, and the rounded sums are added as
    integers. So the total is the same to the bit, whichever process sums which blocks in which
    order. (A client rounds each report; this engine has no single reports. Both rounding errors are
    far below the noise.)
    """

    def __init__(self, settings: VectorisedSettings, records: PartitionedRecords):
        self._plan, self._computation = settings.plan, settings.computation
        self._dimension, device = settings.dimension, settings.keys.device
        self._records = records.to(device)
        # A forward may write to its model, so each thread has a model of its own. On a GPU threads
        # take turns, because memory holds one block's gradients; meanwhile other cores draw noise.
        copies = torch.get_num_threads() if device == "cpu" else 1
        self._models = [
            ready_for(settings.computation.method, settings.make_model(), device)
            for _ in range(copies)
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

        Threads of one core each compute it: torch's own threads would wait for each other after
        every operation.

        Args:
            round: from 1.
            state: the parameters of the round's model, as `sent` gives them.
            users: ids of users who checked in, increasing, shape (k,).
            blankets: which blankets this sum has to add.

        Returns:
            int64 of shape (d,), in units of the plan's mechanism.

        Raises:
            RoundFailed: the model fails.
        """
        total = np.zeros(self._dimension, dtype=np.int64)
        # In this thread OpenMP's threads would copy too, and afterwards keep cores busy waiting.
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
        """Cuts blankets into parts, at least one for each thread."""
        shuffler, first, last = blankets
        share = -(-(last - first) // torch.get_num_threads())
        step = max(1, min(share, _NUMBERS_AT_ONCE // self._dimension))
        return [(shuffler, at, min(at + step, last)) for at in range(first, last, step)]

    def _sum_blankets(self, round: int, blankets: Blankets) -> np.ndarray:
        """The sum of these blankets, as the shuffler's process draws them: int64 of shape (d,)."""
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
        records = self._records.together(users)
        seeds = self._randomness.training_seeds(round, users)
        mechanism = self._plan.mechanism
        clipping = Clipping(mechanism.clip_norm)
        if isinstance(mechanism, LdpSgd):  # of a report only its part along the update
            draws = to_normals(self._randomness.standard_normal(round, users, 2))
            clipping = RandomSides.drawn(mechanism, draws, self._dimension, records.features.device)
        model, state = self._free.get()
        try:
            try:
                total = clipped_sum_of_updates(self._computation, model, records, seeds, clipping)
                return total.cpu()
            finally:
                state.restore()
        except CODE_ERRORS as error:  # of the model
            raise RoundFailed(
                f"round {round}: computing updates failed: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        finally:
            self._free.put((model, state))
