"""References that ours cannot exceed: a server that everybody trusts, and no privacy.

`Reference` protects or trains on single records, by Opacus or by plain SGD. `trusted` and
`UserReference` take users.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from shufl.learning import evaluate
from shufl.learning.config import Config
from shufl.learning.data.features import load_records
from shufl.learning.from_config import model_maker
from shufl.learning.model_trial import exact_float32
from shufl.learning.tasks import CLASSIFICATION, Task
from shufl.learning.your_code import your_code
from shufl.protocol.mechanisms import make_randomness
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare_simulation
from shufl.server import Optimiser
from shufl.simulator.engines.gradient_forms import Clipping
from shufl.simulator.engines.report_sum import cut
from shufl.simulator.engines.user_gradients import clipped_sum_of_updates, ready_for


def _scored(
    model: nn.Module,
    average: AveragedModel | None,
    test: tuple[torch.Tensor, torch.Tensor],
    task: Task,
) -> dict[str, Any]:
    """Score and loss, on test records, of the model or of its moving average."""
    metrics = evaluate(model if average is None else average.module, *test, task.measure)
    return {"score_name": task.score, "score": metrics[task.score], "loss": metrics["loss"]}


class Reference:
    """Training with a configuration's data, model and rounds.

    A record is in a round's batch with probability 1/b, where b is the number of equal batches that
    the records make, about 1/γ.
    """

    def __init__(self, config: Config, private: bool):
        """Gets ready, and checks the configuration.

        Args:
            config: of the point.
            private: whether Opacus clips and adds noise. Its ε is for adding or removing a record;
                for replacing one it would be larger. Otherwise nothing is clipped, no noise is
                added, and the batches of 1/γ rounds are all records in random order.

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
        self._optimiser = Optimiser(config.training, privacy.rounds)
        size = -(-records // max(1, round(1 / privacy.check_in_rate)))
        # What Opacus may wrap: model, optimiser, loss and batches.
        self._network: Any = self._model
        self._stepper: Any = self._optimiser.build(self._model)
        self._criterion: Any = nn.CrossEntropyLoss()
        self._loader: Any = DataLoader(
            TensorDataset(torch.arange(records)), batch_size=size, shuffle=True
        )
        # There are fewer than 1/γ if these do not divide the records. Opacus draws at 1/b.
        self._batches = len(self._loader)
        self._promise: dict[str, Any] = {}
        if private:
            with your_code(f"Opacus cannot train model {config.model.name} as configured"):
                self._make_private()

    def train(self) -> dict[str, Any]:
        """Trains; see `Trainer`."""
        data, model, device = self._data, self._model, self._config.simulation.device
        average = self._optimiser.average_of(model)
        drawn = itertools.chain.from_iterable(itertools.repeat(self._loader))
        batches = itertools.islice(drawn, self._config.privacy.rounds)
        for step, (batch,) in enumerate(batches, start=1):
            for group in self._stepper.param_groups:
                group["lr"] = self._optimiser.learning_rate_at(step)
            self._stepper.zero_grad()
            inputs = data.inputs(data.train_features[batch].to(device))
            labels = data.train_labels[batch].to(device)
            self._criterion(self._network(inputs), labels).backward()
            self._stepper.step()
            if average is not None:
                average.update_parameters(model)
        test = data.inputs(data.test_features.to(device)), data.test_labels.to(device)
        scored = _scored(model, average, test, CLASSIFICATION)
        return scored | {"check_in_rate": 1 / self._batches} | self._promise

    def _make_private(self) -> None:
        """Has Opacus clip and add the noise that the target ε needs."""
        from opacus import PrivacyEngine
        from opacus.accountants import PRVAccountant
        from opacus.accountants.utils import get_noise_multiplier

        privacy, rate = self._config.privacy, 1 / self._batches
        noise = get_noise_multiplier(
            target_epsilon=privacy.target_epsilon,
            target_delta=privacy.delta,
            sample_rate=rate,
            steps=privacy.rounds,
            accountant="prv",
        )
        private = PrivacyEngine(accountant="prv").make_private(
            module=self._network,
            optimizer=self._stepper,
            criterion=self._criterion,
            data_loader=self._loader,
            noise_multiplier=noise,
            max_grad_norm=privacy.clip_norm,
            grad_sample_mode="ghost",
        )
        self._network, self._stepper, self._criterion, self._loader = private
        accountant = PRVAccountant()
        accountant.history = [(noise, rate, privacy.rounds)]
        self._promise = {
            "epsilon": {"opacus": float(accountant.get_epsilon(privacy.delta))},
            "delta": privacy.delta,
            "adjacency": "add or remove",
            "accountant": "opacus",
            "noise_multiplier": noise,
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


_GAUSSIAN = {"mechanism": "gaussian", "categories": None, "local_epsilon": None}
_ANY_PLAN = _GAUSSIAN | {
    "accountant": "local", "target_epsilon": 1e9, "noise_multiplier": 1.0,
    "shuffler_blankets": 0.0, "participation": "check-in",
}  # fmt: skip
_CENTRAL = _GAUSSIAN | {
    "mixing": "sum", "cover": True, "accountant": "sum-distributed", "adjacency": "zero-out",
    "noise_multiplier": None, "shuffler_blankets": 0.0, "participation": "check-in",
    "central_noise": None, "least_present": None, "minimum_batch": None,
}  # fmt: skip


def trusted(config: Config) -> Config:
    """The configuration of a run in which all users together add a trusted server's noise.

    Its target ε is for leaving a user out: in a sum that is divided by a fixed number, this is
    zero-out.
    """
    privacy = config.privacy.model_copy(update=_CENTRAL)
    simulation = config.simulation.model_copy(update={"noise": "aggregate", "silent": 0.0})
    shuffler = config.shuffler.model_copy(update={"number": 1})
    own = {"privacy": privacy, "simulation": simulation, "shuffler": shuffler}
    return config.model_copy(update=own)


def as_central(came_to: dict[str, Any], users: int) -> dict[str, Any]:
    """The result of a run of `trusted`, told as a trusted server's; `users` is n."""
    return came_to | {
        "epsilon": {"central": came_to["epsilon"]["sum-distributed"]},
        "adjacency": "add or remove",
        "accountant": "central",
        "noise_multiplier": came_to["noise_multiplier"] * math.sqrt(users),
    }


class UserReference:
    """Training without privacy, with a configuration's users, coins, algorithm and rounds.

    The updates are the same as in our runs, and are summed as they are.
    """

    def __init__(self, config: Config):
        """Gets ready, and checks the configuration.

        Raises:
            ConfigError: as for a run of this configuration.
        """
        # A reference needs a plan, but whatever an accountant says of it is not used.
        privacy = config.privacy.model_copy(update=_ANY_PLAN)
        config = config.model_copy(update={"privacy": privacy})
        self._engine: Any
        self._experiment, self._engine = prepare_simulation(config)
        self._records = self._experiment.load_users().to(config.simulation.device)

    def train(self) -> dict[str, Any]:
        """Trains; see `Trainer`."""
        experiment, plan = self._experiment, self._experiment.plan
        ours = Optimiser(experiment.config.training, plan.rounds)
        device = experiment.config.simulation.device
        model = ready_for(self._engine.gradients, experiment.make_model(), device)
        stepper, average = ours.build(model), ours.average_of(model)
        exact_float32()
        for round in range(1, plan.rounds + 1):
            total = self._sum(round, model)
            estimate = (total / (plan.check_in_rate * plan.users)).astype(np.float32)
            ours.step(stepper, model, estimate, round)
            if average is not None:
                average.update_parameters(model)
        return _scored(model, average, experiment.load_test(), experiment.task)

    def _sum(self, round: int, model: torch.nn.Module) -> np.ndarray:
        """The sum of the updates of those who check in, float64 of shape (d,)."""
        settings, plan = self._engine.settings, self._experiment.plan
        randomness = make_randomness(settings.seed)
        users = randomness.checked_in(round, plan.users, plan.check_in_rate)
        clipping = Clipping(math.inf)
        total = np.zeros(settings.dimension)
        for part in np.split(users, cut(self._records.sizes(users), settings.chunk)):
            if not len(part):
                continue
            records, seeds = self._records.together(part), randomness.training_seeds(round, part)
            total += clipped_sum_of_updates(
                settings.computation, model, records, seeds, clipping
            ).numpy(force=True)
        return total
