"""From a configuration to everything a run needs, with every mistake found before any work."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from shufl.accounting import (
    OpenPlan,
    PrivacyPlan,
    calibrate,
    rounds_within_budget,
    shuffler_of,
    unused_note,
)
from shufl.accounting.plan import Privacy
from shufl.clients import LocalTraining
from shufl.server import Optimiser
from shufl.shuffler import most_parameters
from shufl.simulator.config import Config
from shufl.simulator.data.datasets import Dataset, load_dataset
from shufl.simulator.data.features import data_digest, load_records
from shufl.simulator.data.partition import load_user_records, records_per_user
from shufl.simulator.models import build_model
from shufl.simulator.section import Carried, ConfigError
from shufl.simulator.trial import try_users


@dataclass(frozen=True)
class Experiment:
    """A configuration with every value decided, and what follows from it.

    Attributes:
        config: resolved: n, delta and the minimum batch are numbers.
        plan: the privacy plan.
        halting_round: rounds the budget allows under the plan's accountant, at least 1.
        parameters: number of model parameters d.
        together: whether users' updates may be computed together; see `try_users`.
        unused: why what was searched for does not use up the target, or None.
    """

    config: Config
    plan: PrivacyPlan
    halting_round: int
    parameters: int
    together: bool = True
    unused: str | None = None

    @property
    def seed(self) -> int | None:
        """The seed of coins and noise; None: the operating system's entropy."""
        return None if self.config.seed == "system" else self.config.seed

    @property
    def carried(self) -> list[Carried]:
        """The objects of the reader's program among dataset and model."""
        names = self.config.data.dataset, self.config.model.name
        return [name for name in names if isinstance(name, Carried)]

    @property
    def dataset(self) -> Dataset:
        """The data, mapped to features if there is a map."""
        return load_records(self.config.data.dataset, self.config.data.features)

    @property
    def records(self) -> int:
        """How many records each user has."""
        records = len(self.dataset.train_labels)
        return records_per_user(records, self.plan.users, self.config.data.partition)

    @property
    def shuffler_of(self) -> functools.partial:
        """Says to which shuffler, from 0, each of some users reports: that of their node."""
        nodes, shufflers = self.config.simulation.nodes, self.config.shuffler.number
        return functools.partial(_shuffler_of, nodes, shufflers)

    @property
    def crowds(self) -> tuple[int, ...]:
        """How many users report to each shuffler."""
        return _crowds(self.config)

    @property
    def make_model(self) -> functools.partial:
        """Builds the initial model; picklable."""
        model, dataset = self.config.model, self.dataset
        about = dataset.input_shape, dataset.classes, data_seed(self.config), model.options
        return functools.partial(build_model, model.name, *about)

    @property
    def load_users(self) -> functools.partial:
        """Gives access to users' records; picklable."""
        data = self.config.data
        return functools.partial(
            load_user_records,
            data.dataset,
            data.features,
            self.plan.users,
            data.partition,
            data_seed(self.config),
            data.concentration,
            data_digest(data.dataset, data.features),
        )

    def load_test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The test data, on the device that evaluates."""
        dataset, device = self.dataset, self.config.simulation.device
        return dataset.inputs(dataset.test_features.to(device)), dataset.test_labels.to(device)

    @property
    def local_training(self) -> LocalTraining:
        """The clients' side of training."""
        return local_training(self.config)

    @property
    def optimiser(self) -> Optimiser:
        """The server's optimiser."""
        training = self.config.training
        return Optimiser(
            training.optimiser,
            training.learning_rate,
            training.momentum,
            training.schedule,
            self.halting_round,
            training.averaging,
        )


def prepare(config: Config) -> Experiment:
    """Loads the dataset, computes its features and decides every value.

    Raises:
        ConfigError: values that do not fit together or the data, or a dataset that is not there;
            see also `load_records`.
    """
    dataset = load_dataset(config.data.dataset)
    if config.privacy.categories not in (None, dataset.classes):
        raise ConfigError(
            f"privacy.categories must be {dataset.classes}, the classes of {config.data.dataset}, "
            f"got {config.privacy.categories}"
        )
    config = _resolve(config, dataset)
    config, plan, unused = plan_of(config)
    try:
        records_per_user(len(dataset.train_labels), plan.users, config.data.partition)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    experiment = Experiment(config, plan, halting_round=0, parameters=0)
    parameters = sum(p.numel() for p in experiment.make_model().parameters())
    halting_round = rounds_within_budget(plan)
    if halting_round == 0:
        one = plan.make_accountant().compose(plan.event()).get_epsilon(plan.delta)
        raise ConfigError(
            f"privacy.target_epsilon must be at least {one * 1.001:.4g}, the {plan.accountant} "
            f"epsilon of one round at delta {plan.delta:.4g}, got {plan.target_epsilon:g}"
        )
    return replace(
        experiment,
        halting_round=halting_round,
        parameters=parameters,
        together=try_users(experiment.make_model, experiment.local_training, experiment.records),
        unused=unused,
    )


def check_report_size(config: Config, parameters: int) -> None:
    """Refuses a model whose reports no shuffler takes.

    Raises:
        ConfigError: it has more parameters than a report holds.
    """
    most = most_parameters(config.shuffler.sealing)
    if parameters > most:
        raise ConfigError(
            f"model {config.model.name} has {parameters} parameters; a report holds at most {most}"
        )


def plan_of(config: Config) -> tuple[Config, PrivacyPlan, str | None]:
    """The configuration with what it left open (noise, blankets, minimum batch, δ), and its plan.

    With them comes why the plan does not use up its target, or None. n must be a number.

    Raises:
        ConfigError: a value out of range, or nothing reaches the target.
    """
    try:
        asked = OpenPlan(users=config.data.users, **dict(config.privacy))
        plan = calibrate(asked)
    except ValueError as error:
        of_plan = str(error).partition(" ")[0] in Privacy.model_fields
        raise ConfigError(f"{'privacy.' * of_plan}{error}") from error
    found = dict(plan) | dict(plan.mechanism) | {"mechanism": plan.mechanism.name}
    decided = {key: found[key] for key in Privacy.model_fields if key in found}
    privacy = config.privacy.model_copy(update=decided)
    return config.model_copy(update={"privacy": privacy}), plan, unused_note(asked, plan)


def local_training(config: Config) -> LocalTraining:
    """The clients' side of training."""
    training = config.training
    return LocalTraining(
        training.algorithm,
        training.local_epochs,
        training.local_learning_rate,
        training.local_batch_size,
    )


def _resolve(config: Config, dataset: Dataset) -> Config:
    """Every value that depends on another one, decided."""
    users = config.data.users or len(dataset.train_labels)
    privacy = config.privacy
    data = config.data.model_copy(update={"users": users})
    config = config.model_copy(update={"data": data})
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
    privacy = privacy.model_copy(update={"least_present": least})
    return config.model_copy(update={"privacy": privacy})


def _shuffler_of(nodes: int, shufflers: int, users: np.ndarray) -> np.ndarray:
    return shuffler_of(users % nodes, shufflers)


def _crowds(config: Config) -> tuple[int, ...]:
    """How many of a resolved config's users report to each shuffler."""
    crowds, nodes = [0] * config.shuffler.number, config.simulation.nodes
    for node in range(nodes):
        crowds[shuffler_of(node, len(crowds))] += len(range(node, config.data.users, nodes))
    return tuple(crowds)


def data_seed(config: Config) -> int:
    """Seed of the partition and the initial model, which no privacy rests on."""
    return 0 if config.seed == "system" else config.seed
