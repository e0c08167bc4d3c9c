"""The vectorised engine: a round as one computation over the users who checked in, no messages.

Plan, coins, clipping, noise, blankets and training are those of the Flower engine. There is no
shuffler, no sealing and no node: what those are for cannot be studied here.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from shufl.accounting import PrivacyPlan
from shufl.accounting.mechanisms import LdpSgd, make_randomness, seed_of_shuffler, to_normals
from shufl.clients import LocalTraining, ModuleState, record_orders
from shufl.server import (
    MOST_INCOMPLETE,
    Aggregate,
    Aggregator,
    Observe,
    PlayedRound,
    RoundFailed,
    RunEnd,
    Training,
    TrainingSettings,
    enough_users,
)
from shufl.simulator.data.partition import PartitionedRecords
from shufl.simulator.engines.base import check_cluster, interrupts
from shufl.simulator.engines.gradient_forms import Clipping, RandomSides
from shufl.simulator.engines.memory import keep_freed_memory
from shufl.simulator.engines.table import VectorisedKeys
from shufl.simulator.engines.user_gradients import (
    Method,
    clipped_sum_of_updates,
    fastest_method,
    ready_for,
)
from shufl.simulator.section import READERS_ERRORS, ConfigError, one_line

if TYPE_CHECKING:
    from shufl.simulator.experiment import Experiment

_SILENCE = 0x5113  # sets the random numbers of who is away apart from others of the same seed
_NUMBERS_AT_ONCE = 2**20  # of noise, to be summed

Blankets = tuple[int, int, int]
"""Some blankets of a round: which shuffler's, and the numbers of the first and behind the last."""

SumReports = Callable[[int, nn.Module, np.ndarray, list[Blankets]], np.ndarray]
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
        aggregator: makes the estimate of the mean update from the reports' sum.
        seed: of coins and noise; None takes them from the operating system.
        crowds: how many users report to each shuffler.
        shuffler_of: to which shuffler, from 0, each of some users reports.
        keys: the engine's keys of the configuration.
    """

    plan: PrivacyPlan
    make_model: Callable[[], nn.Module]
    dimension: int
    training: LocalTraining
    method: Method
    aggregator: type[Aggregator]
    seed: int | None
    crowds: tuple[int, ...]
    shuffler_of: Callable[[np.ndarray], np.ndarray]
    keys: VectorisedKeys

    @property
    def users_per_block(self) -> int:
        """How many neighbouring ids a block has: about `users_per_chunk` of them check in."""
        return min(int(self.keys.users_per_chunk / self.plan.check_in_rate), self.plan.users)


class VectorisedEngine:
    """Computes rounds in this process, or in several Ray workers.

    On a GPU the order of some of torch's sums is not fixed, so a round is not repeated to the bit.
    """

    nodes = "simulated"

    def __init__(self, experiment: Experiment):
        """Checks that the device, the CPUs or the Ray cluster are there; tries the model."""
        simulation = experiment.config.simulation
        if (address := experiment.config.shuffler.address) is not None:
            raise ConfigError(
                "shuffler.address must be left out with engine vectorised, which has no shuffler, "
                f"got {address}"
            )
        names = VectorisedKeys.model_fields
        keys = VectorisedKeys(**{name: getattr(simulation, name) for name in names})
        _check_machine(keys)
        aggregator = experiment.aggregator
        if not aggregator.takes_sums:
            raise ConfigError(
                "training.aggregator must be one that needs only the sum of the reports with "
                f"engine vectorised, which has no single ones, got {aggregator.__name__}"
            )
        mechanism = experiment.plan.mechanism
        if keys.noise == "report" and isinstance(mechanism, LdpSgd):
            raise ConfigError(
                'simulation.noise must be "aggregate" with engine vectorised and mechanism '
                f'{mechanism.name}, got "{keys.noise}"'
            )
        self.gradients = _method(experiment, keys)
        drawn = "for each report" if keys.noise == "report" else "once a round, for their sum"
        by = "" if keys.workers == 1 else f" by {keys.workers} Ray workers"
        self.description = (
            f"vectorised on {keys.device} in {keys.precision}{by}, noise drawn {drawn}, "
            f"gradients by {self.gradients}"
        )
        self.repeats_releases = keys.device == "cpu"
        self.load_users = experiment.load_users
        self.settings = VectorisedSettings(
            plan=experiment.plan,
            make_model=experiment.make_model,
            dimension=experiment.parameters,
            training=experiment.local_training,
            method=self.gradients,
            aggregator=aggregator,
            seed=experiment.seed,
            crowds=experiment.crowds,
            shuffler_of=experiment.shuffler_of,
            keys=keys,
        )

    def run(
        self,
        training: TrainingSettings,
        observe: Observe,
        stop: threading.Event,
    ) -> RunEnd:
        """Trains in this thread."""
        with self._sum_reports(training.folder) as sum_reports, interrupts(stop):
            play, run = VectorisedRounds(self.settings, sum_reports), Training(training)
            for round in run.rounds():
                if stop.is_set():
                    break
                observe(run.end(round, play(round, run.begin(round))), run.result)
            return run.finish()

    @contextlib.contextmanager
    def _sum_reports(self, folder: Path) -> Iterator[SumReports]:
        """Where reports are summed: in this process, or by Ray workers."""
        if self.settings.keys.workers == 1:
            yield ReportSum(self.settings, self.load_users()).sum
        else:
            from shufl.simulator.engines.ray_workers import ray_workers

            log_file = folder / "ray.log"
            with ray_workers(self.settings, self.load_users(), log_file) as sum_reports:
                yield sum_reports


def _check_machine(keys: VectorisedKeys) -> None:
    """Refuses a device or more Ray workers than there are here, and a cluster that is not there."""
    if keys.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f'simulation.device must be "cpu" here: torch {torch.__version__} finds no CUDA '
            'device, got "cuda"'
        )
    if keys.workers == 1:
        return
    if not os.environ.get("RAY_ADDRESS") and keys.workers > (os.cpu_count() or 1):
        raise ConfigError(
            f"simulation.workers must be at most {os.cpu_count()}, the CPUs here, without a Ray "
            f"cluster at RAY_ADDRESS, got {keys.workers}"
        )
    check_cluster()


def _most_at_once(keys: VectorisedKeys) -> int:
    """The most users whose updates are computed at once: few blocks have more, and are cut."""
    return keys.users_per_chunk + math.ceil(4 * math.sqrt(keys.users_per_chunk))


def _method(experiment: Experiment, keys: VectorisedKeys) -> Method:
    """How users' gradients are computed fastest.

    Raises:
        ConfigError: torch cannot vectorise the model.
    """
    _, input_shape, classes, *_ = experiment.make_model.args
    about = input_shape, classes, experiment.local_training, keys.device, keys.precision
    most = min(_most_at_once(keys), experiment.plan.users)
    try:
        with warnings.catch_warnings():  # of a vmap that is slow, and may not be used
            warnings.simplefilter("ignore", UserWarning)
            return fastest_method(experiment.make_model().train(), *about, most, experiment.records)
    except READERS_ERRORS as error:
        raise ConfigError(
            f"model {experiment.config.model.name} cannot be vectorised over users in "
            f"{keys.precision} on {keys.device} ({one_line(error)}); "
            'simulation.engine = "flower" can run it, on the cpu in float32'
        ) from error


class VectorisedRounds:
    """Plays the rounds of a run: coins, the sum of reports, the mean update."""

    def __init__(self, settings: VectorisedSettings, sum_reports: SumReports):
        self._settings = settings
        self._randomness = make_randomness(settings.seed)
        self._sum_reports = sum_reports
        self._discarded = 0  # rounds in a row

    def __call__(self, round: int, model: nn.Module) -> PlayedRound:
        """One round: coins, blankets, and the mean update of the batches that are large enough."""
        settings, plan = self._settings, self._settings.plan
        users = self._randomness.checked_in(round, plan.users, plan.check_in_rate)
        users, crowds = self._present(round, users)
        shufflers = settings.shuffler_of(users)
        reports = np.bincount(shufflers, minlength=len(crowds))
        blankets = [
            make_randomness(seed_of_shuffler(settings.seed, number)).number_of_blankets(
                round, plan.shuffler_blankets
            )
            for number in range(len(crowds))
        ]
        counted = crowds if plan.cover else reports + blankets
        enough = np.array([enough_users(crowd, plan) for crowd in crowds])
        released = np.flatnonzero(enough & (counted >= plan.minimum_batch)).tolist()
        self._discarded = 0 if enough.any() else self._discarded + 1
        if self._discarded == MOST_INCOMPLETE:
            raise RoundFailed(
                f"{MOST_INCOMPLETE} rounds in a row were discarded: fewer users were there than "
                f"privacy.least_present, which is {plan.least_present}"
            )
        if not released:
            outcome = "below-minimum" if enough.any() else "discarded"
            return PlayedRound(outcome, None, int(crowds.sum()), 0)
        users = users[np.isin(shufflers, released)]
        added = [(number, 0, blankets[number]) for number in released]
        count = len(users) + sum(last for *_, last in added)
        total = self._sum_reports(round, model, users, added).astype(np.float64)
        if settings.keys.noise == "aggregate":
            mechanism, dimension = plan.mechanism, settings.dimension
            scale = mechanism.noise_deviation(dimension) / mechanism.unit(dimension)
            total += scale * self._randomness.summed_noise(round, count, settings.dimension)
        aggregator = settings.aggregator(plan, settings.dimension)
        aggregator.add(total)
        mixed = crowds[released]
        aggregate = Aggregate(aggregator.result(int(mixed.sum())), count, 0, {})
        return PlayedRound("released", aggregate, int(mixed.sum()), int(mixed.min()))

    def _present(self, round: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leaves out users who are away, each with the chance `silent` whatever its coin and data.

        Returns:
            Those of `users`, who checked in, that are there; how many users of each shuffler are.
        """
        settings, silent = self._settings, self._settings.keys.silent
        crowds = np.asarray(settings.crowds)
        if not silent:
            return users, crowds
        random = np.random.default_rng(
            None if settings.seed is None else (settings.seed, round, _SILENCE)
        )
        shufflers = settings.shuffler_of(users)
        there = random.random(len(users)) >= silent
        others = crowds - np.bincount(shufflers, minlength=len(crowds))
        here = np.bincount(shufflers[there], minlength=len(crowds))
        return users[there], here + random.binomial(others, 1 - silent)


class ReportSum:
    """Sums reports of users whose records it has, and blankets.

    With `noise = "aggregate"` it leaves out the noise, and so all of the blankets, which are noise.

    Users are taken in blocks of neighbouring ids, each of about `users_per_chunk` who checked in,
    and the blocks' sums are rounded to the unit of reports and added as integers: whoever sums
    which blocks, in whatever order, the sum of all is the same to the bit. (A client rounds each
    report, which this engine never has; both errors are far below the noise.)
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
        self._free: queue.SimpleQueue[tuple[nn.Module, ModuleState]] = queue.SimpleQueue()
        self._seed = settings.seed
        self._randomness = make_randomness(self._seed)
        self._noise_in_reports = settings.keys.noise == "report"
        self._block = settings.users_per_block
        self._most_at_once = _most_at_once(settings.keys)
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

        Raises:
            RoundFailed: the model fails.
        """
        total = np.zeros(self._dimension, dtype=np.int64)
        # Not in this thread: its OpenMP threads would copy too, and then wait on busy cores.
        loads = self._threads.map(lambda own: own.load_state_dict(model.state_dict()), self._models)
        self._free = queue.SimpleQueue()
        for own, _ in zip(self._models, loads, strict=True):
            self._free.put((own, ModuleState(own)))
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
        for at in range(0, len(users), self._most_at_once):
            total += self._sum_of_updates(round, users[at : at + self._most_at_once])
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
        features, labels = self._records(users)
        orders = self._orders(round, users, labels.shape[1])
        mechanism = self._plan.mechanism
        clipping = Clipping(mechanism.clip_norm)
        if isinstance(mechanism, LdpSgd):  # `noise = "aggregate"` adds all the rest
            draws = to_normals(self._randomness.standard_normal(round, users, 2))
            clipping = RandomSides.drawn(mechanism, draws, self._dimension, features.device)
        given = features, labels, self._training, orders, clipping, self._precision
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

    def _orders(self, round: int, users: np.ndarray, records: int) -> torch.Tensor | None:
        """The order of each user's records in its local epochs, as `local_update` has it."""
        if self._training.algorithm == "fedsgd":
            return None
        seeds = self._randomness.training_seeds(round, users)
        return record_orders(seeds, self._training.local_epochs, records)
