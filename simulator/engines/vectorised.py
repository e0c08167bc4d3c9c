"""The vectorised engine: a round is one computation over the users who checked in, no messages.

Plan, coins, clipping, noise, blankets and training are the same as in the Flower engine. There is
no shuffler, no sealing and no node, so this engine shows nothing about them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from torch import nn

from shufl.learning.config import Config, Simulation
from shufl.learning.parameters import frozen_digest, sent
from shufl.learning.your_code import CODE_ERRORS, one_line
from shufl.protocol.mechanisms import (
    all_allocated,
    make_randomness,
    seed_of_shuffler,
    simulated_allocation_key,
)
from shufl.protocol.outcomes import RoundOutcome
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import Experiment
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
from shufl.simulator.engines.report_sum import (
    ReportSum,
    SumReports,
    VectorisedSettings,
    sizes_to_try,
)
from shufl.simulator.engines.user_gradients import Computation, Method, fastest_method, usual_chunk

_SILENCE = 0x5113  # makes the draws of absent users independent of all others of the same seed


class VectorisedEngine:
    """Computes rounds in this process, or in several Ray workers.

    On a GPU the order of some of torch's sums is not fixed, so a round is not repeated to the bit.
    """

    nodes = "simulated"

    def __init__(self, experiment: Experiment):
        """Tries the model, and with sums the noise of nodes."""
        keys = experiment.config.simulation
        experiment.plan.check_dimension(experiment.parameters)
        self.gradients, chunk = _method(experiment, keys)
        computation = Computation(self.gradients, experiment.local_training, keys.precision)
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
            computation=computation,
            seed=experiment.seed,
            shuffler_of=experiment.shuffler_of,
            keys=keys,
            chunk=chunk,
            frozen=frozen_digest(experiment.make_model()),
        )

    @staticmethod
    def check(config: Config, parameters: int) -> None:
        """Refuses a plan that this engine cannot play, and a device or Ray workers it lacks."""
        keys, privacy = config.simulation, config.privacy
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
        if keys.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                f'simulation.device must be "cpu" here: torch {torch.__version__} finds no CUDA '
                'device, got "cuda"'
            )
        if keys.workers > 1:
            from shufl.simulator.engines.ray_workers import needs_of_a_worker

            needs_of_a_worker(keys.device, keys.workers)

    def run(self, training: TrainingSettings, observe: Observe, stop: threading.Event) -> RunEnd:
        """Plays all rounds in this thread."""
        with self._sum_reports(training.folder, stop) as sum_reports:
            play, run = VectorisedRounds(self.settings, sum_reports), Training(training)
            for round in run.rounds():
                if stop.is_set():
                    break
                observe(run.end(round, play(round, run.begin(round))), run.result)
            return run.finish()

    def _sum_reports(
        self, folder: Path, stop: threading.Event
    ) -> contextlib.AbstractContextManager[SumReports]:
        """Gives what sums a round's reports: this process, or Ray workers."""
        records = self.load_users()
        if self.settings.keys.workers == 1:
            return contextlib.nullcontext(ReportSum(self.settings, records).sum)
        from shufl.simulator.engines.ray_workers import ray_workers

        return ray_workers(self.settings, records, folder / "ray.log", stop)


def _method(experiment: Experiment, keys: Simulation) -> tuple[Method, int]:
    """The fastest way to compute users' gradients, and how many records it takes at once, about.

    Raises:
        ConfigError: torch cannot vectorise the model.
    """
    sizes, form = np.diff(experiment.partition.starts), experiment.form
    try:
        model = experiment.make_model().train()
        training, chunk = experiment.local_training, keys.records_per_chunk
        chunk = chunk or usual_chunk(model, form, training, keys.device)
        tried = sizes_to_try(sizes, experiment.plan.users, chunk)
        device, precision = keys.device, keys.precision
        with warnings.catch_warnings():  # a slow vmap warns, even if it will not be used
            warnings.simplefilter("ignore", UserWarning)
            return fastest_method(model, form, training, device, precision, tried), chunk
    except CODE_ERRORS as error:
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
        self._crowds = np.array(settings.shuffler_of.crowds(settings.plan.users))
        self._discarded = 0  # rounds in a row

    def __call__(self, round: int, model: nn.Module) -> PlayedRound:
        """Plays a round: coins, blankets, and the mean update over the released batches."""
        settings, plan = self._settings, self._settings.plan
        users, crowds = self._present(round, self._reporting(round))
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
            outcome = RoundOutcome.BELOW_MINIMUM if enough.any() else RoundOutcome.DISCARDED
            return PlayedRound(outcome, None, int(crowds.sum()), 0)
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
        smallest = int(crowds[released].min())
        return PlayedRound(RoundOutcome.RELEASED, aggregate, present, smallest)

    def _noise(self, round: int, senders: int, shufflers: int) -> np.ndarray:
        """The noise in the sum of a round, in units of the mechanism: float64 of shape (d,).

        With `mixing = "sum"` it includes the noise of the shufflers and of the server.
        """
        plan, dimension = self._settings.plan, self._settings.dimension
        mechanism = plan.mechanism
        deviation = mechanism.noise_deviation(dimension) * math.sqrt(senders)
        if plan.mixing == "sum":
            deviation = plan.noise_of_sum(senders, shufflers) * mechanism.clip_norm
        draws = self._randomness.summed_noise(round, 1, dimension)
        return np.asarray(deviation / mechanism.unit(dimension) * draws)

    def _reporting(self, round: int) -> np.ndarray:
        """The ids of the users who check in, or whose allocation has this round, increasing."""
        plan, seed = self._settings.plan, self._settings.seed
        if plan.participation == "check-in":
            return self._randomness.checked_in(round, plan.users, plan.check_in_rate)
        assert seed is not None  # by `prepare_simulation`
        key = simulated_allocation_key(seed)
        return all_allocated(key, round, plan.users, plan.every)

    def _present(self, round: int, users: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leaves out absent users: each is absent with probability `silent`, whatever its data.

        Args:
            round: from 1.
            users: ids of the users who checked in, int of shape (k,).

        Returns:
            The ids among `users` who are present; and each shuffler's number of present users, who
            may or may not have checked in: int of shape (shufflers,).
        """
        settings, silent, crowds = self._settings, self._settings.keys.silent, self._crowds
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
