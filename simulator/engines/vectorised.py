"""The vectorised engine: a round as one computation over the users who checked in, no messages.

Plan, coins, clipping, noise, blankets and training are those of the Flower engine. There is no
shuffler, no sealing and no node: what those are for cannot be studied here.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from shufl.learning.config import VectorisedKeys
from shufl.learning.section import READERS_ERRORS, ConfigError, one_line
from shufl.learning.trained import frozen_digest, sent
from shufl.protocol.mechanisms import (
    all_allocated,
    make_randomness,
    seed_of_shuffler,
    simulated_allocation_key,
)
from shufl.server import (
    MOST_IN_VAIN,
    Aggregate,
    Mean,
    Observe,
    PlayedRound,
    RoundFailed,
    RunEnd,
    Training,
    TrainingSettings,
)
from shufl.simulator.engines.base import check_draws
from shufl.simulator.engines.report_sum import (
    ReportSum,
    SumReports,
    VectorisedSettings,
    sizes_to_try,
)
from shufl.simulator.engines.user_gradients import Method, fastest_method, usual_chunk

if TYPE_CHECKING:
    from shufl.learning.config import Config
    from shufl.results.experiment import Experiment

_SILENCE = 0x5113  # sets the random numbers of who is away apart from others of the same seed


class VectorisedEngine:
    """Computes rounds in this process, or in several Ray workers.

    On a GPU the order of some of torch's sums is not fixed, so a round is not repeated to the bit.
    """

    nodes = "simulated"

    def __init__(self, experiment: Experiment):
        """Checks that the device, the CPUs or the Ray cluster are there; tries the model."""
        keys = experiment.config.simulation
        self.check(experiment.config, experiment.parameters)
        experiment.plan.check_dimension(experiment.parameters)
        self.gradients, chunk = _method(experiment, keys)
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
            seed=experiment.seed,
            crowds=experiment.crowds,
            shuffler_of=experiment.shuffler_of,
            keys=keys,
            chunk=chunk,
            frozen=frozen_digest(experiment.make_model()),
        )

    @staticmethod
    def check(config: Config, parameters: int) -> None:
        """Checks the device, the Ray workers, and what this engine cannot do."""
        keys, privacy = config.simulation, config.privacy
        check_draws(config)
        if (aggregator := config.training.aggregator) != "mean":
            raise ConfigError(
                "training.aggregator must be mean with engine vectorised, which has the sum of a "
                f"round's reports alone, got {aggregator}"
            )
        of_sums = privacy.mixing == "sum"
        if keys.noise == "report" and (of_sums or privacy.mechanism == "ldp-sgd"):
            what = "privacy.mixing sum" if of_sums else f"mechanism {privacy.mechanism}"
            raise ConfigError(
                f'simulation.noise must be "aggregate" with engine vectorised and {what}, '
                f'got "{keys.noise}"'
            )
        _check_machine(keys)

    def run(
        self,
        training: TrainingSettings,
        observe: Observe,
        stop: threading.Event,
    ) -> RunEnd:
        """Trains in this thread."""
        with self._sum_reports(training.folder, stop) as sum_reports:
            play, run = VectorisedRounds(self.settings, sum_reports), Training(training)
            for round in run.rounds():
                if stop.is_set():
                    break
                observe(run.end(round, play(round, run.begin(round))), run.result)
            return run.finish()

    @contextlib.contextmanager
    def _sum_reports(self, folder: Path, stop: threading.Event) -> Iterator[SumReports]:
        """Where reports are summed: in this process, or by Ray workers."""
        if self.settings.keys.workers == 1:
            yield ReportSum(self.settings, self.load_users()).sum
        else:
            from shufl.simulator.engines.ray_workers import ray_workers

            given = self.settings, self.load_users(), folder / "ray.log", stop
            with ray_workers(*given) as sum_reports:
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
    from shufl.simulator.engines.ray_workers import needs_of_a_worker

    needs_of_a_worker(keys.device, keys.workers)


def _method(experiment: Experiment, keys: VectorisedKeys) -> tuple[Method, int]:
    """How users' gradients are computed fastest, and of about how many records at once.

    Raises:
        ConfigError: torch cannot vectorise the model.
    """
    sizes, form = np.diff(experiment.partition.starts), experiment.form
    try:
        model = experiment.make_model().train()
        training, chunk = experiment.local_training, keys.records_per_chunk
        chunk = chunk or usual_chunk(model, form, training, keys.device)
        tried = sizes_to_try(sizes, experiment.plan.users, chunk)
        about = form, training, keys.device, keys.precision, tried
        with warnings.catch_warnings():  # of a vmap that is slow, and may not be used
            warnings.simplefilter("ignore", UserWarning)
            return fastest_method(model, *about), chunk
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
        users = self._reporting(round)
        users, crowds = self._present(round, users)
        shufflers = settings.shuffler_of(users)
        reports = np.bincount(shufflers, minlength=len(crowds))
        blankets = [
            make_randomness(seed_of_shuffler(settings.seed, number)).number_of_blankets(
                round, plan.shuffler_blankets
            )
            for number in range(len(crowds))
        ]
        enough = np.array(list(map(plan.enough_present, crowds)))
        senders = crowds if plan.cover else reports
        released = np.flatnonzero(enough & plan.enough_sent(senders, np.array(blankets))).tolist()
        self._discarded = 0 if enough.any() else self._discarded + 1
        if self._discarded == MOST_IN_VAIN:
            raise RoundFailed(
                f"{MOST_IN_VAIN} rounds in a row were discarded: fewer users were there than "
                f"privacy.least_present, which is {plan.least_present}"
            )
        if not released:
            present = int(crowds.sum())
            return PlayedRound("below-minimum" if enough.any() else "discarded", None, present, 0)
        users = users[np.isin(shufflers, released)]
        added = [(number, 0, blankets[number]) for number in released]
        present = int(crowds[released].sum())
        count = len(users) + sum(last for *_, last in added)
        if plan.mixing == "sum":
            count = present  # everybody sends
        total = self._sum_reports(round, sent(model), users, added).astype(np.float64)
        if settings.keys.noise == "aggregate":
            total += self._noise(round, count, len(released))
        mean = Mean(plan, settings.dimension)
        mean.add(total)
        aggregate = Aggregate(mean.result(present), count, 0, {})
        return PlayedRound("released", aggregate, present, int(crowds[released].min()))

    def _noise(self, round: int, senders: int, shufflers: int) -> np.ndarray:
        """The noise of the reports' sum, in their units; with sums also shufflers' and server's."""
        plan, dimension = self._settings.plan, self._settings.dimension
        mechanism = plan.mechanism
        deviation = mechanism.noise_deviation(dimension) * math.sqrt(senders)
        if plan.mixing == "sum":
            deviation = plan.noise_of_sum(senders, shufflers) * mechanism.clip_norm
        draws = self._randomness.summed_noise(round, 1, dimension)
        return np.asarray(deviation / mechanism.unit(dimension) * draws)

    def _reporting(self, round: int) -> np.ndarray:
        """The users who check in, or who drew this round, increasing."""
        plan, seed = self._settings.plan, self._settings.seed
        if plan.participation == "check-in":
            return self._randomness.checked_in(round, plan.users, plan.check_in_rate)
        assert seed is not None  # by `check_draws`
        key = simulated_allocation_key(seed)
        return all_allocated(key, round, plan.users, plan.every)

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
