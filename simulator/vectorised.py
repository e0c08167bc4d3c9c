"""The vectorised engine: a round as one computation over the users who checked in, no messages.

Plan, coins, clipping, noise and training are those of the Flower engine. There is no shuffler, no
sealing and no node: what those are for cannot be studied here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn

from clients import make_randomness
from server import Aggregate, PlayedRound, expected_updates
from simulator.experiment import Experiment
from simulator.user_gradients import clipped_sum_of_updates

_NOISE_PARTS = 16  # summed apart; fixed, so that the sum does not depend on the number of threads


class VectorisedRounds:
    """Plays the rounds of an experiment."""

    def __init__(self, experiment: Experiment):
        self._plan = experiment.plan
        self._training = experiment.local_training
        self._method = experiment.gradients
        self._dimension = experiment.parameters
        self._records = experiment.load_users()
        self._randomness = make_randomness(experiment.seed)
        self._noise = experiment.config.simulation.noise
        self._users_per_chunk = experiment.config.simulation.users_per_chunk

    def __call__(self, round: int, model: nn.Module) -> PlayedRound:
        """One round: coins, and unless too few checked in, the mean update with its noise."""
        plan = self._plan
        coins = self._randomness.check_ins(round, np.arange(plan.users), plan.check_in_rate)
        users = np.flatnonzero(coins)
        if len(users) < plan.minimum_batch:
            return PlayedRound("below-minimum")
        total = self._sum_of_updates(round, model, users)
        total += plan.noise_multiplier * plan.clip_norm * self._sum_of_noise(round, users)
        estimate = (total / expected_updates(plan)).astype(np.float32)
        return PlayedRound("released", Aggregate(estimate, len(users), 0, {}))

    def _sum_of_updates(self, round: int, model: nn.Module, users: np.ndarray) -> np.ndarray:
        """Clipped updates of those of `users` who send no blanket, float64 of shape (d,)."""
        users = self._without_blankets(round, users)
        model.train()

        def part(chunk: np.ndarray) -> np.ndarray:
            features, labels = self._records(chunk)
            orders = self._orders(round, chunk, labels.shape[1])
            return clipped_sum_of_updates(
                self._method, model, features, labels, self._training, orders, self._plan.clip_norm
            ).numpy()

        starts = range(0, len(users), self._users_per_chunk)
        chunks = [users[start : start + self._users_per_chunk] for start in starts]
        return self._sum(part, chunks)

    def _without_blankets(self, round: int, users: np.ndarray) -> np.ndarray:
        probability = self._plan.blanket_probability
        if probability == 0:
            return users
        return users[[not self._randomness.blanket(round, user, probability) for user in users]]

    def _orders(self, round: int, users: np.ndarray, records: int) -> torch.Tensor | None:
        """Each user's orders of its records in its local epochs, as `local_update` draws them."""
        if self._training.algorithm == "fedsgd":
            return None
        orders = torch.empty(self._training.local_epochs, len(users), records, dtype=torch.int64)
        generator = torch.Generator()
        for place, user in enumerate(users.tolist()):
            generator.manual_seed(self._randomness.training_seed(round, user))
            for epoch in range(self._training.local_epochs):
                torch.randperm(records, generator=generator, out=orders[epoch, place])
        return orders

    def _sum_of_noise(self, round: int, users: np.ndarray) -> np.ndarray:
        """The sum of one N(0, I) for each of `users`, float64 of shape (d,)."""
        if self._noise == "aggregate":
            return self._randomness.summed_noise(round, len(users), self._dimension)

        def part(users: np.ndarray) -> np.ndarray:
            total = np.zeros(self._dimension)
            for user in users.tolist():
                total += self._randomness.standard_normal(round, user, self._dimension)
            return total

        return self._sum(part, np.array_split(users, _NOISE_PARTS))

    def _sum(
        self, part: Callable[[np.ndarray], np.ndarray], users: Iterable[np.ndarray]
    ) -> np.ndarray:
        """The sum of the parts, float64 of shape (d,); one thread of one core each at a time.

        Faster than torch's own threads, which wait for each other after every operation. The order
        of the sum is that of the parts, whatever the number of threads.
        """
        total = np.zeros(self._dimension)
        with ThreadPoolExecutor(
            torch.get_num_threads(), initializer=torch.set_num_threads, initargs=(1,)
        ) as threads:
            for one in threads.map(part, users):
                total += one
        return total
