"""Plans for a target ε: what is found for each check-in rate and rounds, and what that costs."""

from __future__ import annotations

import functools
import itertools
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from shufl.accounting import (
    CalibrationError,
    OpenPlan,
    PrivacyPlan,
    fitted,
    mean_update_error,
    unused_note,
)
from shufl.shuffler import message_length, usual_sealing

RATES = (1.0, 0.3, 0.1)
ROUNDS = (100, 300, 1000, 4000)


def choices(asked: OpenPlan) -> list[OpenPlan]:
    """The plan with each pair of `RATES` and `ROUNDS` in the place of what is open of the two."""
    rates = RATES if asked.check_in_rate is None else (asked.check_in_rate,)
    rounds = ROUNDS if asked.rounds is None else (asked.rounds,)
    pairs = itertools.product(rates, rounds)
    return [asked.replace(check_in_rate=rate, rounds=count) for rate, count in pairs]


def device_bytes(plan: OpenPlan | PrivacyPlan, dimension: int) -> float:
    """What a device sends in the whole run, expected; with sums if it has one user.

    `dimension` is d, the parameters of the model. The plan's check-in rate and rounds are given.
    """
    assert plan.check_in_rate is not None and plan.rounds is not None
    sent = plan.rounds * (1.0 if plan.cover else plan.check_in_rate)
    return sent * _report_bytes(plan, dimension)


def _report_bytes(plan: OpenPlan | PrivacyPlan, dimension: int) -> int:
    """What a report takes, sealed."""
    return message_length(dimension, plan.mixing, usual_sealing(plan.mixing))


def find_plans(
    asked: list[OpenPlan], dimension: int | None, setting: Setting | None
) -> list[dict[str, Any]]:
    """What is found for each of the open plans that can reach its target, by `run_error`.

    Several plans are searched for by as many processes as there are processors.

    Raises:
        CalibrationError: None of them reaches it.
    """
    find = functools.partial(_found, dimension=dimension, setting=setting)
    if len(asked) == 1:
        found = [find(asked[0])]
    else:
        with ProcessPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool:
            found = list(pool.map(find, asked))
    if rows := [row for row in found if not isinstance(row, str)]:
        return sorted(rows, key=lambda row: row["run_error"])
    raise CalibrationError(found[0])


def _found(asked: OpenPlan, dimension: int | None, setting: Setting | None) -> dict[str, Any] | str:
    """What is found, and what it costs; or why nothing is found.

    `mean_update_error` is that of a round, and `run_error` that of the mean of all rounds'
    estimates, if the model stood still. `reports_a_round` counts no empty reports of cover.
    `shuffler_bytes` are those that a shuffler holds in a round, with sums without the seeds. Bytes
    are None if the model's parameters are not known.
    """
    try:
        plan = fitted(asked)
        if not plan.rounds:
            raise CalibrationError(f"not one round is within epsilon {asked.target_epsilon:g}")
    except CalibrationError as error:
        return str(error)
    round_error = mean_update_error(plan, dimension or math.inf)
    run_error = round_error / math.sqrt(plan.rounds)
    users, blankets, of_sums = plan.users, plan.shuffler_blankets, plan.mixing == "sum"
    reports = users if of_sums else users * plan.check_in_rate + blankets
    row = {
        "users": users,
        "privacy": plan.section(),
        "epsilon": plan.epsilon(),
        "unused": unused_note(asked, plan),
        "dimension": dimension,
        "mean_update_error": round_error,
        "run_error": run_error,
        "reports_a_round": reports,
    }
    if dimension is not None:
        held = 1 if of_sums else users + blankets if plan.cover else reports
        row["device_bytes"] = device_bytes(plan, dimension)
        row["shuffler_bytes"] = held * _report_bytes(plan, dimension)
    if setting is not None:
        row["learning_rate"] = learning_rate(run_error, plan.rounds)
        row["accuracy"] = setting.accuracy(run_error)
    return row


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


def learning_rate(run_error: float, rounds: int) -> float:
    """The rate of the first round, for the models of `SETTINGS` with momentum 0.9 and C = 1.

    It is 0.0079/(σ√T) and at most 320/T, where σ is the noise in a coordinate of a round's mean:
    the rule of docs/results/over-learning-rate.md.
    """
    rate = min(320, 0.0079 / run_error) / rounds  # the run's error is σ/√T
    return float(f"{rate:.2g}")
