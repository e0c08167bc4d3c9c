"""The references for users: a server that everybody trusts sums their updates; and no privacy."""

from __future__ import annotations

import math
from typing import Any

import dp_accounting
import numpy as np
import torch
from dp_accounting import pld

from shufl.accounting import PrivacyPlan
from shufl.accounting.mechanisms import make_randomness
from shufl.server import evaluate
from shufl.simulator.config import Config
from shufl.simulator.engines import engine_of
from shufl.simulator.engines.gradient_forms import Clipping
from shufl.simulator.engines.report_sum import cut
from shufl.simulator.engines.user_gradients import clipped_sum_of_updates, ready_for
from shufl.simulator.experiment import optimiser, prepare
from shufl.simulator.section import ConfigError
from shufl.simulator.trial import exact_float32

_ANY_PLAN = {
    **{"accountant": "local", "target_epsilon": 1e9, "noise_multiplier": 1.0},
    **{"shuffler_blankets": 0.0, "participation": "check-in"},
}
_LEAST_NOISE, _MOST_NOISE = 0.25, 1024.0
_NOISE_KEY = 0xCE47  # sets the server's noise apart from all else of the same seed


def _least_noise(plan: PrivacyPlan, target: float) -> tuple[float, float]:
    """The least noise multiplier whose ε of adding or removing a user is the target, and its ε."""

    def rounds(noise: float) -> dp_accounting.DpEvent:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        one = dp_accounting.PoissonSampledDpEvent(plan.check_in_rate, gaussian)
        return dp_accounting.SelfComposedDpEvent(one, plan.rounds)

    def epsilon(noise: float) -> float:
        return float(pld.PLDAccountant().compose(rounds(noise)).get_epsilon(plan.delta))

    if epsilon(_MOST_NOISE) > target:
        raise ConfigError(
            f"privacy.target_epsilon must be at least {epsilon(_MOST_NOISE):.3g} with trainer "
            f"central-users and noise of {_MOST_NOISE:g} times the clip norm, got {target:g}"
        )
    upper = _MOST_NOISE  # from above, because the law of little noise takes long to compute
    while epsilon(upper / 2) <= target:
        upper /= 2
        if upper < _LEAST_NOISE:
            return upper, epsilon(upper)
    bracket = dp_accounting.ExplicitBracketInterval(upper / 2, upper)
    noise = dp_accounting.calibrate_dp_mechanism(
        pld.PLDAccountant, rounds, target, plan.delta, bracket, tol=1e-4 * upper
    )
    return noise, epsilon(noise)


class UserReference:
    """Training with a configuration's users, coins, algorithm, C and rounds.

    The updates are those of our runs. With `private` they are clipped, and the server adds one
    Gaussian noise to their sum; else they are summed as they are. Making one is the check of it.
    """

    def __init__(self, config: Config, private: bool):
        """Gets ready; finds the noise by which adding or removing a user has the target ε.

        Raises:
            ConfigError: as for a run of this configuration.
        """
        # What our accountants say of the plan is nothing to a reference.
        privacy = config.privacy.model_copy(update=_ANY_PLAN)
        self._experiment = experiment = prepare(config.model_copy(update={"privacy": privacy}))
        self._engine = engine_of("vectorised")(experiment)
        self._records = experiment.load_users().to(config.simulation.device)
        self._promise: dict[str, Any] = {}
        self._noise, self._private = 0.0, private
        if private:
            plan = experiment.plan
            self._noise, epsilon = _least_noise(plan, config.privacy.target_epsilon)
            self._promise = {
                **{"epsilon": {"central": epsilon}, "delta": plan.delta},
                **{"adjacency": "add or remove", "accountant": "central"},
                "noise_multiplier": self._noise,
            }

    def train(self) -> dict[str, Any]:
        """Trains, and tells what came of it."""
        experiment, plan = self._experiment, self._experiment.plan
        ours = optimiser(experiment.config, plan.rounds)
        device = experiment.config.simulation.device
        model = ready_for(self._engine.gradients, experiment.make_model(), device)
        stepper, average = ours.build(model), ours.average_of(model)
        random = np.random.default_rng(
            None if experiment.seed is None else [_NOISE_KEY, experiment.seed]
        )
        exact_float32()
        for round in range(1, plan.rounds + 1):
            total = self._sum(round, model)
            scale = self._noise * plan.mechanism.clip_norm
            total += scale * random.standard_normal(total.size)
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
            **self._promise,
        }

    def _sum(self, round: int, model: torch.nn.Module) -> np.ndarray:
        """The sum of the updates of those who check in, float64 of shape (d,)."""
        settings, plan = self._engine.settings, self._experiment.plan
        randomness = make_randomness(settings.seed)
        users = randomness.checked_in(round, plan.users, plan.check_in_rate)
        clipping = Clipping(plan.mechanism.clip_norm if self._private else math.inf)
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
