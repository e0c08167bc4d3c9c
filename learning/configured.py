"""What a configuration says, as parts of a run: plan, model, records, local training."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shufl.accounting import OpenPlan, PrivacyPlan, calibrate, unused_note
from shufl.learning import LocalTraining, Step
from shufl.learning.config import Config
from shufl.learning.data.partition import PartitionedRecords, load_user_records
from shufl.learning.models import build_model
from shufl.learning.names import ALGORITHMS, Scheme
from shufl.learning.section import ConfigError, find
from shufl.learning.tasks import Form, loss_of
from shufl.protocol.plan import Privacy, Window
from shufl.shuffler import most_parameters


def check_model_size(config: Config, parameters: int) -> None:
    """Refuses a model of which no report holds all parameters.

    Raises:
        ConfigError: It has too many.
    """
    most = most_parameters(config.shuffler.sealing, config.privacy.mixing)
    if parameters > most:
        raise ConfigError(
            f"model {config.model.name} has {parameters} parameters; a report holds at most {most}"
        )


def plan_of(config: Config) -> tuple[Config, PrivacyPlan, str | None]:
    """The configuration with its open values filled in, its plan, and the plan's `unused_note`."""
    assert config.data.users is not None
    try:
        asked = OpenPlan(users=config.data.users, **dict(config.privacy))
        plan = calibrate(asked)
        if config.window is not None:
            about = dict(config.window) | {"most_records": config.data.most_records}
            plan = plan.replace(window=Window.model_validate(about))
    except ValueError as error:
        of_plan = str(error).partition(" ")[0] in Privacy.model_fields
        raise ConfigError(f"{'privacy.' * of_plan}{error}") from error
    found = dict(plan) | dict(plan.mechanism) | {"mechanism": plan.mechanism.name}
    decided = {key: found[key] for key in Privacy.model_fields if key in found}
    privacy = config.privacy.model_copy(update=decided)
    return config.model_copy(update={"privacy": privacy}), plan, unused_note(asked, plan)


def model_maker(config: Config, form: Form, code: str = "") -> functools.partial[nn.Module]:
    """Builds the initial model for such records; picklable. `code` is as for `build_model`."""
    about = form, config.data_seed, config.model.options, code
    return functools.partial(build_model, config.model.name, *about)


def records_loader(config: Config, digest: str) -> functools.partial[PartitionedRecords]:
    """Gives access to the users' records; picklable."""
    data = config.data
    return functools.partial(
        load_user_records, data.dataset, data.features, *about_users(config), digest
    )


def about_users(config: Config) -> tuple[int, Scheme, int, float, int | None]:
    """What says which of a dataset's records are whose."""
    data = config.data
    assert data.users is not None and data.partition is not None
    return data.users, data.partition, config.data_seed, data.concentration, data.most_records


def local_training(config: Config) -> LocalTraining:
    """The clients' side of training."""
    training = config.training
    return LocalTraining(
        training.algorithm,
        training.local_epochs,
        training.local_learning_rate,
        training.local_batch_size,
        loss_of(config.data.task or "classification"),
        training.algorithm_options,
        None if training.algorithm in ALGORITHMS else _own_step(training.algorithm),
    )


def _own_step(name: str) -> Step:
    """The reader's step, which every process imports when it is first asked for."""
    find("training.algorithm", name, {})
    return functools.partial(_step, name)


def _step(name: str, *given: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    made: tuple[dict[str, Any], dict[str, Any]] = find("training.algorithm", name, {})(
        *given, **options
    )
    return made
