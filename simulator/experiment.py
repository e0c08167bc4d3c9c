"""From a configuration to everything a run needs, with every mistake found before any work."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass, replace

import numpy as np
import torch

from accounting import (
    ACCOUNTANTS,
    PrivacyPlan,
    epsilon_of,
    least_noise,
    rounds_within_budget,
)
from clients.settings import LocalTraining
from clients.update import local_update
from server.settings import Optimiser
from simulator.config import Config, ConfigError
from simulator.data.datasets import Dataset, load_dataset
from simulator.data.partition import partition, records_per_user
from simulator.engines.user_gradients import Method, fastest_method
from simulator.models import ModelError, build_model

_LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Experiment:
    """A configuration with every value decided, and what follows from it.

    Attributes:
        config: resolved: n, delta and the minimum batch are numbers.
        plan: the privacy plan.
        halting_round: rounds the budget allows under the plan's accountant, at least 1.
        parameters: number of model parameters d.
        gradients: how users' gradients are computed.
        crowds: how many users report to each shuffler.
    """

    config: Config
    plan: PrivacyPlan
    halting_round: int
    parameters: int
    gradients: Method
    crowds: tuple[int, ...]

    @property
    def seed(self) -> int | None:
        """The seed of coins and noise; None: the operating system's entropy."""
        return None if self.config.seed == "system" else self.config.seed

    @property
    def reproducible(self) -> bool:
        """Whether a round played again from the same model makes the same release, bit for bit.

        On a GPU the order of some of torch's sums is not fixed. On Flower other nodes may be silent
        than before, unless a batch is released with all users or not at all.
        """
        simulation, plan = self.config.simulation, self.plan
        all_or_nothing = (
            ACCOUNTANTS[plan.accountant].counts_on_others and plan.least_present == plan.users
        )
        return (
            self.seed is not None
            and simulation.device == "cpu"
            and (simulation.engine == "vectorised" or all_or_nothing)
        )

    def shuffler_of(self, users: np.ndarray) -> np.ndarray:
        """To which shuffler each of `users` reports, from 0: by its node, as on Flower."""
        return _shuffler_of(self.config, users)

    @property
    def make_model(self) -> functools.partial:
        """Builds the initial model; picklable."""
        return functools.partial(_make_model, self.config)

    @property
    def load_users(self) -> functools.partial:
        """Gives access to users' records; picklable."""
        return functools.partial(load_user_records, self.config)

    @property
    def load_test(self) -> functools.partial:
        """Gives the test data, on the device that evaluates."""
        return functools.partial(
            _load_test, self.config.data.dataset, self.config.simulation.device
        )

    @property
    def local_training(self) -> LocalTraining:
        """The clients' side of training."""
        return _local_training(self.config)

    @property
    def optimiser(self) -> Optimiser:
        """The server's optimiser."""
        training = self.config.training
        return Optimiser(training.optimiser, training.learning_rate, training.momentum)


def prepare(config: Config) -> Experiment:
    """Loads the dataset and decides every value.

    Raises:
        ConfigError: values that do not fit together or the data.
        DatasetError: the dataset is not available.
    """
    dataset = load_dataset(config.data.dataset)
    config = _resolve(config, dataset)
    try:
        config, plan = _plan(config)
        records_per_user(len(dataset.train_labels), plan.users, config.data.partition)
        model = _make_model(config)
    except (ValueError, ModelError) as error:
        raise ConfigError(str(error)) from error
    gradients = _try_gradients(model, dataset, config)
    parameters = sum(p.numel() for p in model.parameters())
    if not plan.mechanism.unit * 2**15 < _LARGEST_FLOAT32:
        raise ConfigError(
            "privacy.clip_norm times the noise must fit float32 numbers, got "
            f"C = {plan.clip_norm:g}, z = {plan.noise_multiplier:g}"
        )
    halting_round = rounds_within_budget(plan)
    if halting_round == 0:
        one = plan.make_accountant().compose(plan.event()).get_epsilon(plan.delta)
        raise ConfigError(
            f"privacy.target_epsilon must be at least {one * 1.001:.4g}, the {plan.accountant} "
            f"epsilon of one round at delta {plan.delta:.4g}, got {plan.target_epsilon:g}"
        )
    return Experiment(config, plan, halting_round, parameters, gradients, _crowds(config))


def _plan(config: Config) -> tuple[Config, PrivacyPlan]:
    """The plan, and the configuration with its noise multiplier, calibrated if it was left out.

    Raises:
        ValueError: a value out of range, or no noise reaches the target.
    """
    values = config.privacy.model_dump()
    given = values.pop("noise_multiplier")
    plan = PrivacyPlan(users=config.data.users, noise_multiplier=given or 1.0, **values)
    if given is None:
        noise = least_noise(
            lambda z: epsilon_of(
                plan.accountant,
                plan.adjacency,
                replace(plan, noise_multiplier=z).event(),
                plan.rounds,
                plan.delta,
            ),
            plan.target_epsilon,
        )
        plan = replace(plan, noise_multiplier=noise)
    privacy = config.privacy.model_copy(update={"noise_multiplier": plan.noise_multiplier})
    return config.model_copy(update={"privacy": privacy}), plan


def _try_gradients(model: torch.nn.Module, dataset: Dataset, config: Config) -> Method:
    """How users' gradients are computed; a model that cannot be trained is found now.

    Raises:
        ConfigError: one update from one blank record fails, or the engine cannot do the model.
    """
    training = _local_training(config)
    blank = dataset.inputs(torch.zeros_like(dataset.train_features[:1]))
    label = torch.zeros(1, dtype=torch.int64)
    try:
        local_update(model.train(), blank, label, training, seed=0)
    except Exception as error:
        raise ConfigError(
            f"model {config.model.name} could not be trained on one record: "
            f"{' '.join(str(error).split())}"
        ) from error
    if config.simulation.engine == "flower":
        return "user by user"
    simulation = config.simulation
    where = simulation.device, simulation.precision
    try:
        return fastest_method(model, dataset.input_shape, dataset.classes, training, *where)
    except Exception as error:
        raise ConfigError(
            f"model {config.model.name} cannot be vectorised over users in {simulation.precision} "
            f"on {simulation.device} ({' '.join(str(error).split())}); "
            'simulation.engine = "flower" can run it, on the cpu in float32'
        ) from error


def _local_training(config: Config) -> LocalTraining:
    training = config.training
    return LocalTraining(
        training.algorithm,
        training.local_epochs,
        training.local_learning_rate,
        training.local_batch_size,
    )


class PartitionedRecords:
    """Maps a user id to its records: features as model input, labels.

    Ids of shape (k,) are mapped to the records of all of them, shapes (k, r, ...) and (k, r): every
    partition gives each user the same number r.
    """

    def __init__(self, dataset: Dataset, parts: np.ndarray, first: int = 0):
        self._dataset = dataset
        self._parts = parts  # of the users from `first` on
        self._first = first

    def __call__(self, users: int | np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Their records."""
        index = torch.from_numpy(self._parts[users - self._first])
        index = index.to(self._dataset.train_labels.device)
        features, labels = (
            of.index_select(0, index.flatten()).unflatten(0, index.shape)
            for of in (self._dataset.train_features, self._dataset.train_labels)
        )
        return self._dataset.inputs(features), labels

    def to(self, device: str) -> PartitionedRecords:
        """The same with the records on this device."""
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features.to(device),
            train_labels=self._dataset.train_labels.to(device),
        )
        return PartitionedRecords(dataset, self._parts, self._first)

    def of(self, first: int, last: int) -> PartitionedRecords:
        """The same for the users from `first` to before `last`, holding nobody else's records."""
        parts = self._parts[first - self._first : last - self._first]
        held, index = np.unique(parts, return_inverse=True)
        dataset = replace(
            self._dataset,
            train_features=self._dataset.train_features[held],
            train_labels=self._dataset.train_labels[held],
            test_features=self._dataset.test_features[:0],
            test_labels=self._dataset.test_labels[:0],
        )
        return PartitionedRecords(dataset, index.reshape(parts.shape), first)


def load_user_records(config: Config) -> PartitionedRecords:
    """The records of all users, from a resolved config."""
    dataset = load_dataset(config.data.dataset)
    parts = partition(
        dataset.train_labels.numpy(),
        config.data.users,
        config.data.partition,
        _data_seed(config),
        config.data.concentration,
    )
    return PartitionedRecords(dataset, parts)


def _resolve(config: Config, dataset: Dataset) -> Config:
    """Every value that depends on another one, decided."""
    users = config.data.users or len(dataset.train_labels)
    privacy = config.privacy
    if privacy.delta == "1/n" and users == 1:
        raise ConfigError('privacy.delta must be a number when there is one user, got "1/n"')
    delta = 1 / users if privacy.delta == "1/n" else privacy.delta
    config = config.model_copy(update={"data": config.data.model_copy(update={"users": users})})
    if config.shuffler.number > min(config.simulation.nodes, users):
        raise ConfigError(
            "shuffler.number must be at most the number of nodes and of users, "
            f"{min(config.simulation.nodes, users)}, got {config.shuffler.number}"
        )
    least = privacy.least_present or min(_crowds(config))
    if least > min(_crowds(config)):
        raise ConfigError(
            f"privacy.least_present must be at most {min(_crowds(config))}, the users of the "
            f"smallest shuffler, got {least}"
        )
    expected = least * privacy.check_in_rate + privacy.shuffler_blankets
    minimum = privacy.minimum_batch or min(users, max(1, int(expected / 2)))
    on_flower = config.simulation.engine == "flower"
    if on_flower and config.simulation.nodes > users:
        raise ConfigError(
            f"simulation.nodes must be at most the number of users, {users}, "
            f"got {config.simulation.nodes}"
        )
    if on_flower and config.simulation.cpus_per_node > (os.cpu_count() or 1):
        raise ConfigError(
            f"simulation.cpus_per_node must be at most {os.cpu_count()}, the CPUs here, "
            f"got {config.simulation.cpus_per_node:g}"
        )
    here = not on_flower and not os.environ.get("RAY_ADDRESS")
    if here and config.simulation.workers > (os.cpu_count() or 1):
        raise ConfigError(
            f"simulation.workers must be at most {os.cpu_count()}, the CPUs here, without a Ray "
            f"cluster at RAY_ADDRESS, got {config.simulation.workers}"
        )
    if config.simulation.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f'simulation.device must be "cpu" here: torch {torch.__version__} finds no CUDA '
            'device, got "cuda"'
        )
    decided = {"delta": delta, "minimum_batch": minimum, "least_present": least}
    return config.model_copy(update={"privacy": privacy.model_copy(update=decided)})


def _shuffler_of(config: Config, users: np.ndarray) -> np.ndarray:
    return users % config.simulation.nodes % config.shuffler.number


def _crowds(config: Config) -> tuple[int, ...]:
    """How many of a resolved config's users report to each shuffler."""
    crowds = [0] * config.shuffler.number
    for node in range(config.simulation.nodes):
        crowds[node % len(crowds)] += len(range(node, config.data.users, config.simulation.nodes))
    return tuple(crowds)


def _data_seed(config: Config) -> int:
    """Seed of the partition and the initial model, which no privacy rests on."""
    return 0 if config.seed == "system" else config.seed


def _make_model(config: Config) -> torch.nn.Module:
    dataset = load_dataset(config.data.dataset)
    return build_model(
        config.model.name,
        dataset.input_shape,
        dataset.classes,
        _data_seed(config),
        config.model.options,
    )


def _load_test(name: str, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    dataset = load_dataset(name)
    return dataset.inputs(dataset.test_features.to(device)), dataset.test_labels.to(device)
