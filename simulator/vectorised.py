"""The vectorised engine: a round as one computation over the users who checked in, no messages.

Plan, coins, clipping, noise and training are those of the Flower engine. There is no shuffler, no
sealing and no node: what those are for cannot be studied here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from clients import LocalTraining, make_randomness
from server import Aggregate, PlayedRound, expected_updates
from simulator.config import ConfigError
from simulator.experiment import Experiment

_NOISE_PARTS = 16  # summed apart; fixed, so that the sum does not depend on the number of threads

Tensors = dict[str, torch.Tensor]
"""Parameters by name, or one such tensor for each of k users: shape (k, ...)."""


class VectorisedRounds:
    """Plays the rounds of an experiment."""

    def __init__(self, experiment: Experiment):
        self._plan = experiment.plan
        self._training = experiment.local_training
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
            own = copy.deepcopy(model)  # functional_call exchanges a model's parameters meanwhile
            updates = user_updates(own, features, labels, self._training, orders)
            return clipped_sum(updates, self._plan.clip_norm).numpy()

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


def check_model(experiment: Experiment) -> None:
    """Tries two users' updates on blank records.

    Raises:
        ConfigError: the model cannot be vectorised over users.
    """
    model, training = experiment.make_model(), experiment.local_training
    features, labels = (torch.zeros_like(part[:2, None]) for part in experiment.load_test())
    orders = torch.zeros(1, *labels.shape, dtype=torch.int64)
    try:
        user_updates(copy.deepcopy(model.train()), features, labels, training, orders)
    except Exception as error:
        raise ConfigError(
            f"model {experiment.config.model.name} cannot be vectorised over users "
            f'({" ".join(str(error).split())}); simulation.engine = "flower" can run it'
        ) from error


def user_updates(
    model: nn.Module,
    features: torch.Tensor,
    labels: torch.Tensor,
    training: LocalTraining,
    orders: torch.Tensor | None = None,
) -> Tensors:
    """`clients.local_update` of k users at once; `model` keeps its parameters.

    Args:
        model: the round's model.
        features: shape (k, r, ...), r records of each of k users.
        labels: int64 of shape (k, r).
        training: one gradient, or local epochs.
        orders: for local epochs: the records' order by epoch and user, int64 of shape (e, k, r).

    Returns:
        float32 of shape (k, ...) for every parameter.

    Raises:
        RuntimeError: the model draws random numbers, or torch cannot vectorise it.
    """
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: Tensors, records: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional_call(model, parameters, (records,)), targets)

    if training.algorithm == "fedsgd":
        return vmap(grad(loss), in_dims=(None, 0, 0))(start, features, labels)
    gradients = vmap(grad(loss))
    everyone = torch.arange(len(labels))[:, None]
    local = {name: value.expand(len(labels), *value.shape) for name, value in start.items()}
    for order in orders:
        for batch in order.split(training.local_batch_size, dim=1):
            steps = gradients(local, features[everyone, batch], labels[everyone, batch])
            local = {
                name: value - training.local_learning_rate * steps[name]
                for name, value in local.items()
            }
    return {name: start[name] - value for name, value in local.items()}


def clipped_sum(updates: Tensors, clip_norm: float) -> torch.Tensor:
    """The sum over users of `clients.clip`, which makes an update with a NaN or infinity zero.

    Args:
        updates: float32 of shape (k, ...) for every parameter.
        clip_norm: C.

    Returns:
        float64 of shape (d,).
    """
    flat = [update.flatten(1) for update in updates.values()]
    # In float64 no square of a finite float32 overflows: a norm is finite if its update is.
    parts = [torch.linalg.vector_norm(update, dim=1, dtype=torch.float64) for update in flat]
    norms = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    finite = norms.isfinite()
    if not finite.all():
        flat, norms = [update[finite] for update in flat], norms[finite]
    scales = (clip_norm / norms).clamp(max=1.0).float()  # of a zero update: C / 0 = inf, so 1
    return torch.cat([scales @ update for update in flat]).double()
