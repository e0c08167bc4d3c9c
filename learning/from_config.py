"""Makes the parts of a run that a configuration describes: plan, model, local training."""

from __future__ import annotations

import functools

from shufl.accounting import OpenPlan, PrivacyPlan
from shufl.learning import LocalTraining
from shufl.learning.config import ALGORITHMS, Config
from shufl.learning.models import ModelMaker
from shufl.learning.tasks import Form, loss_of
from shufl.learning.your_code import call_named, find
from shufl.protocol.plan import Window
from shufl.protocol.plan_fields import Privacy
from shufl.protocol.validation import ConfigError
from shufl.shuffler import most_parameters


def check_model_size(config: Config, parameters: int) -> None:
    """Raises a ConfigError if the model has more parameters than a report can hold."""
    most = most_parameters(config.shuffler.sealing, config.privacy.mixing)
    if parameters > most:
        raise ConfigError(
            f"model {config.model.name} has {parameters} parameters; a report holds at most {most}"
        )


def plan_of(config: Config) -> tuple[Config, PrivacyPlan, str | None]:
    """The configuration with its open values filled in, its plan, and the plan's `unused_note`.

    Raises:
        ConfigError: values do not fit each other, or nothing reaches the target.
    """
    assert config.data.users is not None
    try:
        asked = OpenPlan(users=config.data.users, **dict(config.privacy))
        plan, note = _searched(asked) if asked.open else (asked.closed().replace(), None)
        if config.window is not None:
            times = dict(config.window) | {"most_records": config.data.most_records}
            plan = plan.replace(window=Window.model_validate(times))
    except ValueError as error:
        of_plan = str(error).partition(" ")[0] in Privacy.model_fields
        raise ConfigError(f"{'privacy.' * of_plan}{error}") from error
    privacy = config.privacy.model_copy(update=plan.section())
    return config.model_copy(update={"privacy": privacy}), plan, note


def _searched(asked: OpenPlan) -> tuple[PrivacyPlan, str | None]:
    from shufl.accounting import calibrate, unused_note  # a node, which searches nothing, has none

    plan = calibrate(asked)
    return plan, unused_note(asked, plan)


def model_maker(config: Config, form: Form, code: str = "") -> ModelMaker:
    """What builds the initial model, for records of this form; `code` is as for `ModelMaker`."""
    model = config.model
    return ModelMaker(model.name, form, config.data_seed, model.options, code)


def local_training(config: Config) -> LocalTraining:
    """How users compute their updates."""
    training = config.training
    name, own = training.algorithm, None
    if name not in ALGORITHMS:
        find("training.algorithm", name, {})  # a mistake is told now, and not amid a round
        own = functools.partial(call_named, "training.algorithm", name)
    return LocalTraining(
        algorithm=name,
        local_epochs=training.local_epochs,
        local_learning_rate=training.local_learning_rate,
        local_batch_size=training.local_batch_size,
        loss=loss_of(config.data.task or "classification"),
        options=training.algorithm_options,
        own=own,
    )
