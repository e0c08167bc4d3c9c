"""Which check-in rate, rounds, noise and blankets a target ε leaves to choose among."""

from __future__ import annotations

import functools
import itertools
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from shufl.accounting import (
    CalibrationError,
    OpenPlan,
    fitted,
    mean_update_error,
    unused_note,
)
from shufl.shuffler import message_length, usual_sealing

RATES = (1.0, 0.3, 0.1)
ROUNDS = (100, 300, 1000, 4000)


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        budget: with check-in rate, rounds, noise and blankets open.
        dimension: d, the parameters of the model.
        device_megabytes: the most that a device may send in the whole run, expected; or None.
    """

    budget: OpenPlan
    dimension: int
    device_megabytes: float | None = None

    @property
    def report_bytes(self) -> int:
        """What a report takes, sealed."""
        mixing = self.budget.mixing
        return message_length(self.dimension, mixing, usual_sealing(mixing))

    def device_bytes(self, rate: float, rounds: int) -> float:
        """What a device sends in the whole run, expected."""
        return (1.0 if self.budget.cover else rate) * rounds * self.report_bytes

    def pairs(self) -> list[tuple[float, int]]:
        """Those of `RATES` and `ROUNDS` in which a device sends no more than it may."""
        most = math.inf if self.device_megabytes is None else 1e6 * self.device_megabytes
        pairs = itertools.product(RATES, ROUNDS)
        return [pair for pair in pairs if self.device_bytes(*pair) <= most]


@dataclass(frozen=True)
class Plan:
    """An answer: a check-in rate and rounds, with the noise and blankets of least error.

    Attributes:
        check_in_rate, rounds, noise_multiplier, shuffler_blankets, central_noise: γ, T, z, λ, σ.
        epsilon: what the plan's accountant says of them.
        unused: why it is not the target, or None.
        round_error: `shufl.accounting.mean_update_error` of a round.
        run_error: that of the mean of all rounds' estimates, if the model stood still.
        reports_a_round: nγ + λ, expected, without the empty ones of cover; with sums n.
        device_bytes: what a device sends in the whole run, expected; with sums if it has one user.
        shuffler_bytes: what a shuffler holds in a round, expected; with sums without the seeds.
    """

    check_in_rate: float
    rounds: int
    noise_multiplier: float
    shuffler_blankets: float
    central_noise: float
    epsilon: float
    unused: str | None
    round_error: float
    run_error: float
    reports_a_round: float
    device_bytes: float
    shuffler_bytes: float


def find_plans(question: Question) -> list[Plan]:
    """A plan for each of the question's pairs that reaches the target, by `run_error`."""
    pairs = question.pairs()
    with ProcessPoolExecutor(min(len(pairs), os.cpu_count() or 1)) as pool:
        found = pool.map(functools.partial(_plan, question), pairs)
        return sorted(filter(None, found), key=lambda plan: plan.run_error)


def _plan(question: Question, pair: tuple[float, int]) -> Plan | None:
    rate, rounds = pair
    asked = question.budget.replace(check_in_rate=rate, rounds=rounds)
    try:
        found = fitted(asked)
    except CalibrationError:
        return None
    blankets, of_sums = found.shuffler_blankets, asked.mixing == "sum"
    error = mean_update_error(found, question.dimension)
    sent = asked.users * (1.0 if asked.cover else rate) + blankets
    return Plan(
        check_in_rate=rate,
        rounds=rounds,
        noise_multiplier=found.mechanism.noise_multiplier,
        central_noise=found.central_noise,
        shuffler_blankets=blankets,
        epsilon=found.epsilon(),
        unused=unused_note(asked, found),
        round_error=error,
        run_error=error / math.sqrt(rounds),
        reports_a_round=asked.users if of_sums else asked.users * rate + blankets,
        device_bytes=question.device_bytes(rate, rounds),
        shuffler_bytes=question.report_bytes if of_sums else sent * question.report_bytes,
    )


@dataclass(frozen=True)
class Setting:
    """A dataset with a model that is known to suit it, and what runs with them have reached.

    Attributes:
        reached: pairs of `run_error` and accuracy.
        config: that ships with shufl.
        dimension: of its model.
        records: in its training set.
    """

    reached: list[tuple[float, float]]
    config: str = "mnist-features"
    dimension: int = 39_700
    records: int = 60_000

    def accuracy(self, run_error: float) -> float | None:
        """What is to be expected, along a line in log error.

        With less error than was tried it is the best there was; with more it is not known.
        """
        errors, accuracies = zip(*self.reached, strict=True)
        if run_error > errors[-1]:
            return None
        return float(np.interp(math.log(run_error), np.log(errors), accuracies))


_REACHED = (
    # run_error, accuracy on MNIST, accuracy on Fashion-MNIST
    (7.620e-5, 0.9846, None),
    (1.032e-4, 0.9830, None),
    (1.088e-4, 0.9818, 0.8759),
    (1.601e-4, 0.9794, 0.8674),
    (1.819e-4, 0.9783, 0.8644),
    (1.992e-4, 0.9777, 0.8621),
    (2.271e-4, 0.9767, 0.8579),
    (2.638e-4, 0.9752, 0.8529),
    (3.227e-4, 0.9736, 0.8459),
    (4.272e-4, 0.9702, 0.8359),
    (6.212e-4, 0.9639, 0.8223),
    (7.507e-4, 0.9625, 0.8148),
    (1.010e-3, 0.9561, 0.8024),
    (4.903e-3, 0.7752, 0.6109),
    (8.831e-3, 0.5693, 0.4982),
    (1.629e-2, 0.3805, 0.3702),
    (3.046e-2, 0.2531, 0.2524),
)
"""Means over the seeds in docs/results, with 60 000 users of one record each.

Most are of `blanket` after 1 000 rounds; the least errors are those of participation
(on MNIST after 4 000 rounds too), the largest those of `theorem3` and `local` after 100.
"""

SETTINGS = {
    "mnist": Setting([(error, mnist) for error, mnist, _ in _REACHED]),
    "fashion-mnist": Setting([(error, other) for error, _, other in _REACHED if other]),
}
"""By dataset."""


def learning_rate(plan: Plan) -> float:
    """The rate of the first round, for the models of `SETTINGS` with momentum 0.9 and C = 1.

    It is 0.0079/(σ√T) and at most 320/T, where σ is the noise in a coordinate of a round's mean:
    the rule of docs/results/over-learning-rate.md.
    """
    rate = min(320, 0.0079 / plan.run_error) / plan.rounds  # the run's error is σ/√T
    return float(f"{rate:.2g}")


def as_dict(plan: Plan, setting: Setting | None) -> dict[str, Any]:
    """A plan's values, with learning rate and accuracy to be expected where a dataset is named."""
    return asdict(plan) | {
        "learning_rate": None if setting is None else learning_rate(plan),
        "accuracy": None if setting is None else setting.accuracy(plan.run_error),
    }
