"""The references from above: DP-SGD by Opacus, whose server everybody trusts, and no privacy."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shufl.learning import evaluate
from shufl.learning.config import Config
from shufl.learning.configured import model_maker
from shufl.learning.data.features import load_records
from shufl.learning.section import ConfigError, readers_code
from shufl.learning.tasks import CLASSIFICATION
from shufl.results.experiment import optimiser


class Reference:
    """Training with a configuration's data, model and rounds; making one is the check of it.

    A record is in a round's batch with probability 1/b, where b is the number of equal batches that
    the records make, about 1/γ.
    """

    def __init__(self, config: Config, private: bool):
        """Gets ready.

        Args:
            private: by Opacus, where ε is that of adding or removing a record; that of replacing
                one would be larger. Otherwise nothing is clipped, no noise is added, and the
                batches of 1/γ rounds are all records in random order.

        Raises:
            ConfigError: Opacus is not installed or cannot train the model, δ is left to the users'
                number, or there are fewer users than records.
        """
        self._config = config
        privacy = config.privacy
        torch.manual_seed(config.data_seed)
        self._data = load_records(config.data.dataset, config.data.features)
        records = len(self._data.train_labels)
        if private:
            _check(config, records, self._data.users is not None)
        form = self._data.form(config.data.task)
        if form.task != "classification":
            raise ConfigError(
                f"data.task must be classification with trainer {'central' if private else 'plain'}"
                f", got {form.task}"
            )
        self._model = model_maker(config, form)().to(config.simulation.device).train()
        self._optimiser = optimiser(config, privacy.rounds)
        size = -(-records // max(1, round(1 / privacy.check_in_rate)))
        loader = DataLoader(TensorDataset(torch.arange(records)), batch_size=size, shuffle=True)
        # Fewer than 1/γ, where they do not divide the records; Opacus draws by these.
        self._batches = len(loader)
        stepper = self._optimiser.build(self._model)
        self._learner: Any = self._model, stepper, nn.CrossEntropyLoss(), loader
        self._promise: dict[str, Any] = {}
        if private:
            with readers_code(f"Opacus cannot train model {config.model.name} as configured"):
                self._learner, self._promise = _with_opacus(config, self._batches, *self._learner)

    def train(self) -> dict[str, Any]:
        """Trains, and tells what came of it."""
        config, data, model = self._config, self._data, self._model
        privacy, device = config.privacy, config.simulation.device
        average = self._optimiser.average_of(model)
        network, stepper, criterion, loader = self._learner
        drawn = itertools.chain.from_iterable(itertools.repeat(loader))
        for step, (batch,) in enumerate(itertools.islice(drawn, privacy.rounds), start=1):
            for group in stepper.param_groups:
                group["lr"] = self._optimiser.learning_rate_at(step)
            stepper.zero_grad()
            inputs = data.inputs(data.train_features[batch].to(device))
            criterion(network(inputs), data.train_labels[batch].to(device)).backward()
            stepper.step()
            if average is not None:
                average.update_parameters(model)
        test = data.inputs(data.test_features.to(device)), data.test_labels.to(device)
        trained = model if average is None else average.module
        metrics = evaluate(trained, *test, CLASSIFICATION.measure)
        return {
            "score_name": CLASSIFICATION.score,
            "score": metrics[CLASSIFICATION.score],
            "loss": metrics["loss"],
            "check_in_rate": 1 / self._batches,
            **self._promise,
        }


def _check(config: Config, records: int, owned: bool) -> None:
    """Refuses a configuration that central training cannot be compared with."""
    if config.privacy.delta == "1/n":
        raise ConfigError('privacy.delta must be a number with trainer central, got "1/n"')
    users = config.data.users
    if owned:
        raise ConfigError(
            "trainer central protects single records, and this dataset says whose they are: take "
            "trainer central-users"
        )
    if users is not None and users < records and config.data.partition != "repeated":
        raise ConfigError(
            "data.users must be left out with trainer central, which protects single records: a "
            f"user of several would be protected less than by us; got {users} for {records} records"
        )
    if importlib.util.find_spec("opacus") is None:
        raise ConfigError("trainer central needs Opacus: pip install opacus")


def _with_opacus(
    config: Config,
    batches: int,
    model: nn.Module,
    stepper: torch.optim.Optimizer,
    criterion: nn.Module,
    loader: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What Opacus makes of model, optimiser, loss and loader, and what that promises."""
    from opacus import PrivacyEngine
    from opacus.accountants import PRVAccountant
    from opacus.accountants.utils import get_noise_multiplier

    privacy = config.privacy
    noise = get_noise_multiplier(
        target_epsilon=privacy.target_epsilon,
        target_delta=privacy.delta,
        sample_rate=1 / batches,
        steps=privacy.rounds,
        accountant="prv",
    )
    learner = PrivacyEngine(accountant="prv").make_private(
        module=model,
        optimizer=stepper,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=noise,
        max_grad_norm=privacy.clip_norm,
        grad_sample_mode="ghost",
    )
    accountant = PRVAccountant()
    accountant.history = [(noise, 1 / batches, privacy.rounds)]
    epsilon = float(accountant.get_epsilon(privacy.delta))
    return learner, {
        **{"epsilon": {"opacus": epsilon}, "delta": privacy.delta},
        **{"adjacency": "add or remove", "accountant": "opacus", "noise_multiplier": noise},
    }
