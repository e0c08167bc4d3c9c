"""The references for users: a server that everybody trusts sums their updates; and no privacy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from shufl.learning import evaluate
from shufl.learning.config import Config
from shufl.learning.trial import exact_float32
from shufl.protocol.mechanisms import make_randomness
from shufl.results.engine import engine_of
from shufl.results.experiment import optimiser, prepare
from shufl.simulator.engines.gradient_forms import Clipping
from shufl.simulator.engines.report_sum import cut
from shufl.simulator.engines.user_gradients import clipped_sum_of_updates, ready_for

_GAUSSIAN = {"mechanism": "gaussian", "categories": None, "local_epsilon": None}
_ANY_PLAN = _GAUSSIAN | {
    **{"accountant": "local", "target_epsilon": 1e9, "noise_multiplier": 1.0},
    **{"shuffler_blankets": 0.0, "participation": "check-in"},
}
_CENTRAL = _GAUSSIAN | {
    **{"mixing": "sum", "cover": True, "accountant": "sum-distributed", "adjacency": "zero-out"},
    **{"noise_multiplier": None, "shuffler_blankets": 0.0, "participation": "check-in"},
    **{"central_noise": None, "least_present": None, "minimum_batch": None},
}


def trusted(config: Config) -> Config:
    """A run whose sum has the noise of a trusted server with the target ε, by all users together.

    To leave a user out of a sum that is divided by a fixed number is zero-out.
    """
    privacy = config.privacy.model_copy(update=_CENTRAL)
    simulation = config.simulation.model_copy(update={"noise": "aggregate", "silent": 0.0})
    shuffler = config.shuffler.model_copy(update={"number": 1})
    own = {"privacy": privacy, "simulation": simulation, "shuffler": shuffler}
    return config.model_copy(update=own)


def as_central(came_to: dict[str, Any], users: int) -> dict[str, Any]:
    """What came of such a run of so many users, in the words of a trusted server."""
    return came_to | {
        "epsilon": {"central": came_to["epsilon"]["sum-distributed"]},
        "adjacency": "add or remove",
        "accountant": "central",
        "noise_multiplier": came_to["noise_multiplier"] * math.sqrt(users),
    }


class UserReference:
    """Training without privacy, with a configuration's users, coins, algorithm and rounds.

    The updates are those of our runs, and are summed as they are. Making one is the check of it.
    """

    def __init__(self, config: Config):
        """Gets ready.

        Raises:
            ConfigError: as for a run of this configuration.
        """
        # What our accountants say of the plan is nothing to a reference.
        privacy = config.privacy.model_copy(update=_ANY_PLAN)
        self._experiment = experiment = prepare(config.model_copy(update={"privacy": privacy}))
        self._engine = engine_of("vectorised")(experiment)
        self._records = experiment.load_users().to(config.simulation.device)

    def train(self) -> dict[str, Any]:
        """Trains, and tells what came of it."""
        experiment, plan = self._experiment, self._experiment.plan
        ours = optimiser(experiment.config, plan.rounds)
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
        task, trained = experiment.task, model if average is None else average.module
        metrics = evaluate(trained, *experiment.load_test(), task.measure)
        return {
            "score_name": task.score,
            "score": metrics[task.score],
            "loss": metrics["loss"],
        }

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
            features, labels, sizes = self._records.together(part)
            seeds = randomness.training_seeds(round, part)
            given = features, labels, sizes, settings.training, seeds, clipping
            total += clipped_sum_of_updates(
                settings.method, model, *given, settings.keys.precision
            ).numpy(force=True)
        return total
