"""From a configuration to everything a run needs, with every mistake found before any work."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from shufl.accounting import PrivacyPlan, rounds_within_budget
from shufl.learning import STEPS, LocalTraining, evaluate
from shufl.learning.code_digest import code_digest
from shufl.learning.config import FEATURES, FIXED, TASKS, Config
from shufl.learning.data.datasets import Dataset, check_task, load_dataset
from shufl.learning.data.features import data_digest, load_records, mapped
from shufl.learning.data.partition import Partition, PartitionedRecords, load_partition, load_users
from shufl.learning.from_config import local_training, model_maker, plan_of
from shufl.learning.model_trial import try_users
from shufl.learning.models import MODELS, ModelMaker
from shufl.learning.parameters import dimension
from shufl.learning.tasks import Form, Task, load_task
from shufl.learning.your_code import Carried, find, is_carried, your_code
from shufl.protocol import shuffler_of
from shufl.protocol.validation import ConfigError
from shufl.results.engine_interface import Engine, engine_of
from shufl.server import MakeAggregator, Mean, Optimiser
from shufl.shuffler import usual_sealing

Check = Callable[[Config, int], None]
"""Takes a configuration and d, its model's number of parameters; refuses by a ConfigError."""


@dataclass(frozen=True)
class ShufflerOf:
    """Says to which shuffler, numbered from 0, a user reports: the one of its node. Picklable."""

    nodes: int
    shufflers: int

    def __call__(self, users: np.ndarray) -> np.ndarray:
        """The shufflers of users, by their ids: int of shape (k,) for both."""
        return shuffler_of(users % self.nodes, self.shufflers)

    def crowds(self, users: int) -> tuple[int, ...]:
        """How many users report to each shuffler, of users with the ids 0 to `users` - 1."""
        crowds = [0] * self.shufflers
        for node in range(self.nodes):
            crowds[shuffler_of(node, self.shufflers)] += len(range(node, users, self.nodes))
        return tuple(crowds)


@dataclass(frozen=True)
class Experiment:
    """A configuration with every value decided, and what was found on the way.

    Attributes:
        config: resolved: n, delta and the minimum batch are numbers.
        plan: the privacy plan.
        halting_round: how many rounds the budget allows by the plan's accountant, at least 1.
        parameters: d, the number of the model's trained parameters.
        dataset: the data, mapped to features if there is a map.
        partition: which records belong to which user.
        form: what a record is made of.
        task: what is learnt.
        make_model: builds the initial model; picklable.
        local_training: how users compute their updates.
        make_aggregator: makes an aggregator, which estimates the mean update of one shuffler's
            batch.
        together: whether users' updates may be computed together; see `try_users`.
        unused: why the plan that a search found does not use up its target; None: it does, or
            nothing was searched for.
    """

    config: Config
    plan: PrivacyPlan
    halting_round: int
    parameters: int
    dataset: Dataset
    partition: Partition
    form: Form
    task: Task
    make_model: ModelMaker
    local_training: LocalTraining
    make_aggregator: MakeAggregator
    together: bool
    unused: str | None

    @property
    def seed(self) -> int | None:
        """The seed of coins and noise; None: the operating system's entropy."""
        return None if self.config.seed == "system" else self.config.seed

    @property
    def carried(self) -> list[Carried]:
        """The objects of your program that stand for names in the configuration."""
        return [name for name in self.config.own_code if isinstance(name, Carried)]

    @property
    def users_by(self) -> str:
        """Who counts as one user, for the start of a run."""
        by = self.config.data.users_by
        if self.config.data.partition == "natural":
            return by
        named = self.dataset.users is not None  # a dealt user has records of many people
        return f"{by}{', not those of the data' * named} (what each gets is taken for one person's)"

    @property
    def shuffler_of(self) -> ShufflerOf:
        """Says to which shuffler users report."""
        return ShufflerOf(self.config.simulation.nodes, self.config.shuffler.number)

    @property
    def load_users(self) -> Callable[[], PartitionedRecords]:
        """Gives access to the users' records; picklable."""
        data = self.config.data
        digest = data_digest(data.dataset, data.features)
        return functools.partial(load_users, data, self.config.data_seed, digest)

    def load_test(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The test data, on the device that evaluates."""
        dataset, device = self.dataset, self.config.simulation.device
        return dataset.inputs(dataset.test_features.to(device)), dataset.test_labels.to(device)

    @property
    def optimiser(self) -> Optimiser:
        """The server's optimiser."""
        return Optimiser(self.config.training, self.halting_round)


def prepare(
    config: Config, check: Check = lambda config, parameters: None, real_nodes: bool = False
) -> Experiment:
    """Loads the dataset, computes its features and decides every value.

    Args:
        config: of the run.
        check: refuses what an engine cannot run. It is called before a search for what the plan
            leaves open, which takes time. Default: nothing is refused.
        real_nodes: whether nodes have records of their own, so that there may be more users than
            the dataset has records for.

    Raises:
        ConfigError: values do not fit each other or the data, or the dataset is not there; see also
            `load_records`.
    """
    begin_anew(config)
    dataset = load_dataset(config.data.dataset)
    if config.privacy.categories not in (None, dataset.classes):
        raise ConfigError(
            f"privacy.categories must be {dataset.classes}, the classes of {config.data.dataset}, "
            f"got {config.privacy.categories}"
        )
    config, partition = _resolve(config, dataset, real_nodes)
    name, data = config.model.name, config.data
    find("model", name, MODELS)  # its import may make other modules importable
    code = "" if is_carried(name) else code_digest([name])
    dataset = load_records(data.dataset, data.features)
    form = dataset.form(data.task)
    make_model = model_maker(config, form, code)
    model = make_model()
    parameters = dimension(model)
    check(config, parameters)
    task = load_task(form.task)
    if form.task not in TASKS:
        _try_task(form.task, task, make_model, dataset)
    _check_options(config)
    aggregator = config.training.aggregator
    make_aggregator: MakeAggregator = find("training.aggregator", aggregator, {"mean": Mean})
    _try_optimiser(config, model, parameters)
    training = local_training(config)
    together = try_users(make_model, training, partition.most_records)
    config, plan, unused = plan_of(config)
    _try_aggregator(aggregator, make_aggregator, plan, parameters)
    halting_round = rounds_within_budget(plan)
    if halting_round == 0:
        one = plan.make_accountant().compose(plan.event()).get_epsilon(plan.delta)
        raise ConfigError(
            f"privacy.target_epsilon must be at least {one * 1.001:.4g}, the {plan.accountant} "
            f"epsilon of one round at delta {plan.delta:.4g}, got {plan.target_epsilon:g}"
        )
    return Experiment(
        config=config,
        plan=plan,
        halting_round=halting_round,
        parameters=parameters,
        dataset=dataset,
        partition=partition,
        form=form,
        task=task,
        make_model=make_model,
        local_training=training,
        make_aggregator=make_aggregator,
        together=together,
        unused=unused,
    )


def prepare_simulation(config: Config) -> tuple[Experiment, Engine]:
    """An experiment that the engine of its configuration has checked, and the engine.

    Raises:
        ConfigError: as `prepare`; or the engine cannot run it, or not on this machine.
    """
    if config.privacy.participation == "allocation" and config.seed == "system":
        raise ConfigError(
            "seed must be a number with privacy.participation allocation, so that a "
            'run which is resumed has the same draws, got "system"'
        )
    make_engine = engine_of(config.simulation.engine)
    experiment = prepare(config, make_engine.check)
    return experiment, make_engine(experiment)


def initial_model(config: Config) -> nn.Module:
    """The model of a run before its first round; `config` has every value decided."""
    form = load_records(config.data.dataset, config.data.features).form(config.data.task)
    return model_maker(config, form)()


def _check_options(config: Config) -> None:
    """Refuses options that the algorithm does not take."""
    name, options = config.training.algorithm, config.training.algorithm_options
    if not options:
        return
    if name == "fedsgd":
        raise ConfigError("training.algorithm_options must be empty for fedsgd")
    step = find("training.algorithm", name, STEPS)
    with your_code(f"training.algorithm_options are none of {name}"):
        inspect.signature(step).bind(*[None] * 5, **options)


def begin_anew(config: Config) -> None:
    """Clears cached data, which may have changed since an earlier run.

    Raises:
        ConfigError: a module of yours has changed since this process imported it.
    """
    code_digest(config.own_code)
    if config.data.dataset not in FIXED or config.data.features not in (None, *FEATURES):
        for cache in (load_dataset, load_partition, mapped):
            cache.cache_clear()


_NO_METRICS = {
    "round", "rounds", "epsilon", "epsilons", "outcome", "users_present", "smallest_crowd",
    "reports", "rejected", "reasons", "silent_nodes", "score", "seconds", "doubt", "loss", "engine",
    "noise", "device", "precision", "gradients", "stopped_by", "delta", "adjacency", "users",
    "shuffler_blankets", "least_present", "fewest_users_present", "accountant", "versions",
    "target_epsilon", "mixing", "central_noise", "users_by", "records", "test_records", "constant",
}  # fmt: skip
"""Names that a task's metrics must not have: metrics.jsonl and summaries use them."""


def _try_task(name: str, task: Task, make_model: ModelMaker, dataset: Dataset) -> None:
    """Refuses a task of yours whose metrics fail on test records, or have the wrong names."""
    features, labels = dataset.inputs(dataset.test_features[:10]), dataset.test_labels[:10]
    failure = f"data.task {name} cannot measure the model on test records"
    with your_code(failure, quote=()):
        found = evaluate(make_model(), features, labels, task.metrics)
        numbers = {str(metric): float(value) for metric, value in found.items()}
        if task.constant is not None:
            float(task.constant(labels))
    if task.score not in numbers:
        raise ConfigError(
            f"data.task {name} must have its score, {task.score}, among its metrics, got "
            f"{', '.join(numbers)}"
        )
    if taken := _NO_METRICS.intersection(numbers):
        raise ConfigError(f"data.task {name} must name its metric {min(taken)} otherwise")


def _try_optimiser(config: Config, model: nn.Module, parameters: int) -> None:
    """Refuses options that the optimiser does not take, and a model that cannot be averaged."""
    nothing = np.zeros(parameters, dtype=np.float32)
    own = Optimiser(config.training, 1)
    with your_code(f"training.optimiser_options are none of {config.training.optimiser}"):
        own.step(own.build(model), model, nothing, 1)
    with your_code(f"training.averaging cannot be had for model {config.model.name}"):
        if (average := own.average_of(model)) is not None:
            average.update_parameters(model)  # the first call copies, the second one averages
            average.update_parameters(model)


def _try_aggregator(name: str, make: MakeAggregator, plan: PrivacyPlan, parameters: int) -> None:
    """Refuses an aggregator that makes no estimate from three reports, or from no report."""
    if plan.mixing == "sum" and name != "mean":
        raise ConfigError(
            "training.aggregator must be mean with privacy.mixing sum, where the server sees no "
            f"report, got {name}"
        )
    with your_code(f"training.aggregator {name} cannot aggregate reports"):
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


def _resolve(config: Config, dataset: Dataset, real_nodes: bool) -> tuple[Config, Partition]:
    """Decides every value that depends on another one, and which records belong to which user."""
    privacy, shuffler, owners = config.privacy, config.shuffler, dataset.users
    task = dataset.form(config.data.task).task
    if task != dataset.task_name:
        check_task(config.data.dataset, dataset, task)
    load_task(task)
    scheme = config.data.partition or ("iid" if owners is None else "natural")
    natural = owners if scheme == "natural" else None
    there = len(dataset.train_labels if natural is None else natural.unique())
    users = config.data.users or there
    data = config.data.model_copy(update={"users": users, "partition": scheme, "task": task})
    dealt = min(users, there) if real_nodes else users
    partition = load_partition(data.model_copy(update={"users": dealt}), config.data_seed)
    if config.window is not None and data.most_records is None:
        data = data.model_copy(update={"most_records": partition.most_records})
    if shuffler.number > min(config.simulation.nodes, users):
        raise ConfigError(
            "shuffler.number must be at most the number of nodes and of users, "
            f"{min(config.simulation.nodes, users)}, got {shuffler.number}"
        )
    smallest = min(ShufflerOf(config.simulation.nodes, shuffler.number).crowds(users))
    least = privacy.least_present or smallest
    if least > smallest:
        raise ConfigError(
            f"privacy.least_present must be at most {smallest}, the users of the smallest "
            f"shuffler, got {least}"
        )
    privacy = privacy.model_copy(update={"least_present": least})
    if "sealing" not in shuffler.model_fields_set:
        shuffler = shuffler.model_copy(update={"sealing": usual_sealing(privacy.mixing)})
    decided = {"data": data, "privacy": privacy, "shuffler": shuffler}
    return config.model_copy(update=decided), partition
