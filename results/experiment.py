"""From a configuration to everything a run needs, with every mistake found before any work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import nn

from shufl.accounting import PrivacyPlan, rounds_within_budget
from shufl.learning import STEPS, LocalTraining, evaluate
from shufl.learning.config import Config
from shufl.learning.configured import (
    about_users,
    local_training,
    model_maker,
    plan_of,
    records_loader,
)
from shufl.learning.data.datasets import Dataset, check_task, load_dataset
from shufl.learning.data.features import data_digest, load_records, mapped
from shufl.learning.data.partition import (
    Partition,
    PartitionedRecords,
    load_partition,
)
from shufl.learning.models import MODELS
from shufl.learning.names import FEATURES, FIXED, TASKS
from shufl.learning.own_code import code_digest
from shufl.learning.section import Carried, ConfigError, find, is_carried, readers_code
from shufl.learning.tasks import Form, Task, load_task
from shufl.learning.trained import dimension
from shufl.learning.trial import try_users
from shufl.protocol import shuffler_of
from shufl.server import MakeAggregator, Mean, Optimiser
from shufl.shuffler import usual_sealing

Check = Callable[[Config, int], None]
"""Refuses, by a ConfigError, a configuration whose model has so many parameters."""


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
        code: the digest of the model's own code, which every process must have; empty: any.
    """

    config: Config
    plan: PrivacyPlan
    halting_round: int
    parameters: int
    together: bool = True
    unused: str | None = None
    code: str = ""

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
    def partition(self) -> Partition:
        """Which records belong to which user."""
        return load_partition(self.config.data.dataset, *about_users(self.config))

    @property
    def users_by(self) -> str:
        """Who is one user, for the start of a run; what a partition deals may be of many people."""
        by = self.config.data.users_by
        if self.config.data.partition == "natural":
            return by
        named = load_dataset(self.config.data.dataset).users is not None
        return f"{by}{', not those of the data' * named} (what each gets is taken for one person's)"

    @property
    def shuffler_of(self) -> functools.partial[np.ndarray]:
        """Says to which shuffler, from 0, each of some users reports: that of their node."""
        nodes, shufflers = self.config.simulation.nodes, self.config.shuffler.number
        return functools.partial(_shuffler_of, nodes, shufflers)

    @property
    def crowds(self) -> tuple[int, ...]:
        """How many users report to each shuffler."""
        return _crowds(self.config, self.plan.users)

    @property
    def make_model(self) -> functools.partial[nn.Module]:
        """Builds the initial model; picklable."""
        return model_maker(self.config, self.form, self.code)

    @property
    def form(self) -> Form:
        """What a record is made of."""
        return self.dataset.form(self.config.data.task)

    @property
    def task(self) -> Task:
        """What is learnt."""
        return load_task(self.form.task)

    @property
    def load_users(self) -> functools.partial[PartitionedRecords]:
        """Gives access to users' records; picklable."""
        data = self.config.data
        digest = data_digest(data.dataset, data.features)
        return records_loader(self.config, digest)

    def load_test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The test data, on the device that evaluates."""
        dataset, device = self.dataset, self.config.simulation.device
        return dataset.inputs(dataset.test_features.to(device)), dataset.test_labels.to(device)

    @property
    def local_training(self) -> LocalTraining:
        """The clients' side of training."""
        return local_training(self.config)

    @property
    def make_aggregator(self) -> MakeAggregator:
        """Begins what estimates the mean update of a shuffler's batch."""
        known = {"mean": Mean}
        made: MakeAggregator = find("training.aggregator", self.config.training.aggregator, known)
        return made

    @property
    def optimiser(self) -> Optimiser:
        """The server's optimiser."""
        return optimiser(self.config, self.halting_round)


def prepare(config: Config, check: Check = lambda config, parameters: None) -> Experiment:
    """Loads the dataset, computes its features and decides every value.

    A search for what the plan leaves open comes last, because it takes time; `check` comes before.

    Raises:
        ConfigError: values that do not fit together or the data, or a dataset that is not there;
            see also `load_records`.
    """
    begin_anew(config)
    dataset = load_dataset(config.data.dataset)
    if config.privacy.categories not in (None, dataset.classes):
        raise ConfigError(
            f"privacy.categories must be {dataset.classes}, the classes of {config.data.dataset}, "
            f"got {config.privacy.categories}"
        )
    config = _resolve(config, dataset)
    find("model", config.model.name, MODELS)  # what is imported may be found only afterwards
    code = "" if is_carried(config.model.name) else code_digest([config.model.name])
    unknown = cast(PrivacyPlan, None)  # nothing before the search asks for it
    experiment = Experiment(config, unknown, halting_round=0, parameters=0, code=code)
    name, model = config.training.optimiser, experiment.make_model()
    parameters = dimension(model)
    check(config, parameters)
    _try_task(experiment)
    _check_options(config)
    _ = experiment.make_aggregator
    nothing = np.zeros(parameters, dtype=np.float32)
    with readers_code(f"training.optimiser_options are none of {name}"):
        own = optimiser(config, 1)
        own.step(own.build(model), model, nothing, 1)
    with readers_code(f"training.averaging cannot be had for model {config.model.name}"):
        if (average := own.average_of(model)) is not None:
            average.update_parameters(model)  # a copy
            average.update_parameters(model)
    most_records = experiment.partition.most_records
    together = try_users(experiment.make_model, experiment.local_training, most_records)
    config, plan, unused = plan_of(config)
    experiment = replace(experiment, config=config, plan=plan)
    _try_aggregator(experiment, parameters)
    halting_round = rounds_within_budget(plan)
    if halting_round == 0:
        one = plan.make_accountant().compose(plan.event()).get_epsilon(plan.delta)
        raise ConfigError(
            f"privacy.target_epsilon must be at least {one * 1.001:.4g}, the {plan.accountant} "
            f"epsilon of one round at delta {plan.delta:.4g}, got {plan.target_epsilon:g}"
        )
    return Experiment(config, plan, halting_round, parameters, together, unused, code)


def _check_options(config: Config) -> None:
    """Refuses options that the algorithm does not take."""
    name = config.training.algorithm
    if config.training.algorithm_options:
        if name == "fedsgd":
            raise ConfigError("training.algorithm_options must be empty for fedsgd")
        step = STEPS.get(name) or find("training.algorithm", name, {})
        with readers_code(f"training.algorithm_options are none of {name}"):
            inspect.signature(step).bind(*[None] * 5, **config.training.algorithm_options)


def begin_anew(config: Config) -> None:
    """Clears cached data, which may have changed since an earlier run.

    Raises:
        ConfigError: a module of the reader's has changed since this process imported it.
    """
    code_digest(config.own_code)
    if config.data.dataset not in FIXED or config.data.features not in (None, *FEATURES):
        for cache in (load_dataset, load_partition, mapped):
            cache.cache_clear()


_NO_METRICS = {
    *("round", "rounds", "epsilon", "epsilons", "outcome", "users_present", "smallest_crowd"),
    *("reports", "rejected", "reasons", "silent_nodes", "score", "seconds", "doubt", "loss"),
    *("engine", "noise", "device", "precision", "gradients", "stopped_by", "delta", "adjacency"),
    *("shuffler_blankets", "least_present", "fewest_users_present", "accountant", "versions"),
    *("target_epsilon", "mixing", "central_noise", "users", "users_by"),
}
"""What else a row of metrics.jsonl and a summary have."""


def _try_task(experiment: Experiment) -> None:
    """Refuses a task of the reader's that does not measure a model on test records."""
    task, name = experiment.task, experiment.form.task
    if name in TASKS:
        return
    dataset = experiment.dataset
    features, labels = dataset.inputs(dataset.test_features[:10]), dataset.test_labels[:10]
    failure = f"data.task {name} cannot measure the model on test records"
    with readers_code(failure, quote=()):
        found = evaluate(experiment.make_model(), features, labels, task.metrics)
        numbers = {str(metric): float(value) for metric, value in found.items()}
    if task.score not in numbers:
        raise ConfigError(
            f"data.task {name} must have its score, {task.score}, among its metrics, got "
            f"{', '.join(numbers)}"
        )
    if taken := _NO_METRICS.intersection(numbers):
        raise ConfigError(f"data.task {name} must name its metric {min(taken)} otherwise")


def _try_aggregator(experiment: Experiment, parameters: int) -> None:
    """Refuses an aggregator that makes no estimate of three reports, or of none."""
    name, plan = experiment.config.training.aggregator, experiment.plan
    if plan.mixing == "sum" and name != "mean":
        raise ConfigError(
            "training.aggregator must be mean with privacy.mixing sum, where the server sees no "
            f"report, got {name}"
        )
    make = experiment.make_aggregator
    with readers_code(f"training.aggregator {name} cannot aggregate reports"):
        estimates = []
        for reports in ((), (0.0, 1.0, -1.0)):
            aggregator = make(plan, parameters)
            for report in reports:
                aggregator.add(np.full(parameters, report))
            estimates.append(aggregator.result(plan.users))
    for estimate in estimates:
        got = f"{type(estimate).__name__}"
        if isinstance(estimate, np.ndarray):
            got = f"{estimate.shape} and {estimate.dtype}"
        if got != f"({parameters},) and float32":
            raise ConfigError(
                f"training.aggregator {name} must make an array of shape ({parameters},) and type "
                f"float32 (also of no reports), got {got}"
            )


def optimiser(config: Config, rounds: int) -> Optimiser:
    """The server's optimiser, for so many rounds."""
    training = config.training
    return Optimiser(
        training.optimiser,
        training.learning_rate,
        training.optimiser_options,
        training.schedule,
        rounds,
        training.averaging,
    )


def _resolve(config: Config, dataset: Dataset) -> Config:
    """Every value that depends on another one, decided."""
    privacy, owners = config.privacy, dataset.users
    task = dataset.form(config.data.task).task
    if task != dataset.task_name:
        check_task(config.data.dataset, dataset, task)
    load_task(task)
    scheme = config.data.partition or ("iid" if owners is None else "natural")
    natural = owners is not None and scheme == "natural"
    everybody = len(dataset.train_labels if owners is None or not natural else owners.unique())
    users = config.data.users or everybody
    data = config.data.model_copy(update={"users": users, "partition": scheme, "task": task})
    config = config.model_copy(update={"data": data})
    partition = load_partition(data.dataset, *about_users(config))  # or refuses
    if config.window is not None and data.most_records is None:
        data = data.model_copy(update={"most_records": partition.most_records})
        config = config.model_copy(update={"data": data})
    if config.shuffler.number > min(config.simulation.nodes, users):
        raise ConfigError(
            "shuffler.number must be at most the number of nodes and of users, "
            f"{min(config.simulation.nodes, users)}, got {config.shuffler.number}"
        )
    smallest = min(_crowds(config, users))
    least = privacy.least_present or smallest
    if least > smallest:
        raise ConfigError(
            f"privacy.least_present must be at most {smallest}, the users of the smallest "
            f"shuffler, got {least}"
        )
    privacy = privacy.model_copy(update={"least_present": least})
    shuffler = config.shuffler
    if "sealing" not in shuffler.model_fields_set:
        shuffler = shuffler.model_copy(update={"sealing": usual_sealing(privacy.mixing)})
    return config.model_copy(update={"privacy": privacy, "shuffler": shuffler})


def _shuffler_of(nodes: int, shufflers: int, users: np.ndarray) -> np.ndarray:
    return shuffler_of(users % nodes, shufflers)


def _crowds(config: Config, users: int) -> tuple[int, ...]:
    """How many of the users report to each shuffler."""
    crowds, nodes = [0] * config.shuffler.number, config.simulation.nodes
    for node in range(nodes):
        crowds[shuffler_of(node, len(crowds))] += len(range(node, users, nodes))
    return tuple(crowds)
