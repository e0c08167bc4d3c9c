"""Finds plans for a target ε at several check-in rates and rounds, and says what they cost."""

from __future__ import annotations

import functools
import itertools
import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from shufl.accounting import CalibrationError, OpenPlan, fitted, mean_update_error, unused_note
from shufl.learning.config import dumps, load, read_named
from shufl.shuffler import message_length, usual_sealing

RATES = (1.0, 0.3, 0.1)
ROUNDS = (100, 300, 1000, 4000)
_NEARLY_EQUAL = 1.02  # times the least error: no run shows the difference


def candidates(
    asked: OpenPlan, dimension: int | None, device_megabytes: float | None
) -> list[OpenPlan]:
    """The plans to search for: the one that is asked for, or several to compare.

    Plans are compared if the noise is open and the check-in rate or the rounds are open too. Then
    `RATES` and `ROUNDS` take the places of these two.

    Args:
        asked: the plan with what it leaves open.
        dimension: d, the number of the model's parameters; None: not known.
        device_megabytes: the most that a device sends in the run. Default: any number.

    Raises:
        ValueError: no plan is left, or plans are compared and `dimension` is None.
    """
    if len(asked.open) == 1 or {"rounds", "check_in_rate"}.isdisjoint(asked.open):
        if device_megabytes is not None:
            raise ValueError("--device-megabytes goes with plans that are compared")
        return [asked]
    if dimension is None:
        raise ValueError(
            "give either --dataset or --dimension, the model's parameters: plans are compared "
            "where check-in rate or rounds are left out beside the noise"
        )
    report = message_length(dimension, asked.mixing, usual_sealing(asked.mixing))
    rates = RATES if asked.check_in_rate is None else (asked.check_in_rate,)
    pairs = list(itertools.product(rates, ROUNDS if asked.rounds is None else (asked.rounds,)))
    sent = [rounds * (1.0 if asked.cover else rate) * report / 1e6 for rate, rounds in pairs]
    most = math.inf if device_megabytes is None else device_megabytes
    if not min(sent) <= most:
        raise ValueError(
            f"--device-megabytes must be at least {min(sent)}, which the plan of least traffic "
            f"takes, got {device_megabytes}"
        )
    return [
        asked.replace(check_in_rate=rate, rounds=rounds)
        for (rate, rounds), megabytes in zip(pairs, sent, strict=True)
        if megabytes <= most
    ]


def find_plans(
    asked: list[OpenPlan], dimension: int | None, setting: Setting | None
) -> list[dict[str, Any]]:
    """What is found for each plan that can reach its target, in the order of `ranked`.

    One process for each processor searches, if there are several plans.

    Args:
        asked: the plans with what they leave open.
        dimension: d, the number of the model's parameters; None: not known.
        setting: what runs with a dataset have reached, for the expected accuracy.

    Raises:
        CalibrationError: no plan reaches its target.
    """
    find = functools.partial(_found, dimension=dimension, setting=setting)
    if len(asked) == 1:
        found = [find(asked[0])]
    else:
        with ProcessPoolExecutor(min(len(asked), os.cpu_count() or 1)) as pool:
            found = list(pool.map(find, asked))
    if rows := [row for row in found if not isinstance(row, str)]:
        return ranked(rows)
    raise CalibrationError(found[0])


def ranked(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plans, least `run_error` first; of nearly equal ones, first what costs a device least."""
    left, order = sorted(rows, key=lambda row: row["run_error"]), []
    while left:
        near = [row for row in left if row["run_error"] <= _NEARLY_EQUAL * left[0]["run_error"]]
        left = left[len(near) :]
        order += sorted(near, key=lambda row: row["device_bytes"] or 0.0)
    return order


def _found(asked: OpenPlan, dimension: int | None, setting: Setting | None) -> dict[str, Any] | str:
    """What is found, and what it costs; or why nothing is found.

    `run_error` is the error of the mean of all rounds' estimates, if the model stood still.
    `device_bytes` is what a device sends in the whole run; with sums, a device of one user.
    `shuffler_bytes` is what a shuffler holds in a round; with sums, without the seeds. Both are
    None if `dimension` is.
    """
    try:
        plan = fitted(asked)
        if not plan.rounds:
            raise CalibrationError(f"not one round is within epsilon {asked.target_epsilon:g}")
    except CalibrationError as error:
        return str(error)
    run_error = mean_update_error(plan, dimension or math.inf) / math.sqrt(plan.rounds)
    sent = held = None
    if dimension is not None:
        report = message_length(dimension, plan.mixing, usual_sealing(plan.mixing))
        share = 1.0 if plan.cover else plan.check_in_rate  # of the users, who send in a round
        sent = plan.rounds * share * report
        messages = plan.users * share + plan.shuffler_blankets
        held = report * (1.0 if plan.mixing == "sum" else messages)
    unused = unused_note(asked, plan)
    row = {
        "users": plan.users,
        "privacy": plan.section(),
        "epsilon": plan.epsilon(),
        "unused": unused and f"{plan.rounds} rounds at γ = {plan.check_in_rate:g}: {unused}",
        "dimension": dimension,
        "run_error": run_error,
        "device_bytes": sent,
        "shuffler_bytes": held,
    }
    if setting is not None:
        row["learning_rate"] = learning_rate(run_error, plan.rounds)
        row["accuracy"] = setting.accuracy(run_error)
    return row


@dataclass(frozen=True)
class Setting:
    """A dataset with a model that is known to suit it, and what runs with them have reached.

    Attributes:
        dataset: its name.
        reached: pairs of `run_error` and accuracy, the least error first.
        config: the name of a configuration that ships with shufl.
        dimension: d, the number of the model's parameters.
        records: how many the training set has.
    """

    dataset: str
    reached: list[tuple[float, float]]
    config: str = "mnist-features"
    dimension: int = 39_700
    records: int = 60_000

    def configuration(self, row: dict[str, Any]) -> str:
        """The configuration of a plan that `find_plans` found, as TOML."""
        about = {"name": f"{self.dataset}-plan", "data.dataset": self.dataset}
        rate = {"training.learning_rate": row["learning_rate"]}
        return with_plan(self.config, row, **about, **rate)

    def accuracy(self, run_error: float) -> float | None:
        """The expected accuracy, along lines in the logarithm of the error.

        For a smaller error than was tried it is the best accuracy; for a larger one it is None.
        """
        errors, accuracies = zip(*self.reached, strict=True)
        if run_error > errors[-1]:
            return None
        return float(np.interp(math.log(run_error), np.log(errors), accuracies))


def with_plan(source: str, row: dict[str, Any], **changes: Any) -> str:
    """A configuration with the plan of a row of `find_plans`, as TOML."""
    found = {"privacy": row["privacy"], "data.users": row["users"]}
    return dumps(load(source, found | changes))


def measured(source: str, users: int | None) -> dict[str, Any]:
    """What a plan takes from a configuration of yours: n, the clip norm, and d, the model's size.

    Its section `[privacy]` may be missing.

    Args:
        source: as for `load`.
        users: n. Default: as many as the configuration says.

    Raises:
        ConfigError: as for `prepare`.
    """
    from shufl.results.experiment import prepare  # which needs torch

    clip_norm = read_named(source).get("privacy", {}).get("clip_norm", 1.0)
    plan = {"clip_norm": clip_norm, "check_in_rate": 1.0, "rounds": 1, "noise_multiplier": 1.0}
    changes = {"privacy": plan | {"target_epsilon": 1e9}, "data.users": users or ""}
    found = prepare(load(source, changes))
    return {"users": found.plan.users, "clip_norm": clip_norm, "dimension": found.parameters}


_REACHED = (
    # run_error, accuracy on MNIST, accuracy on Fashion-MNIST
    (7.620e-5, 0.9846, None),
    (1.088e-4, 0.9818, 0.8759),
    (1.992e-4, 0.9777, 0.8621),
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
(on MNIST after 4 000 rounds too), the largest those of `theorem3` and `local` after 100. What was
reached in between lies within 0.001 of the lines.
"""

_MNIST = [(error, mnist) for error, mnist, _ in _REACHED]
_FASHION = [(error, fashion) for error, _, fashion in _REACHED if fashion]
SETTINGS = {"mnist": Setting("mnist", _MNIST), "fashion-mnist": Setting("fashion-mnist", _FASHION)}
"""By dataset."""


def learning_rate(run_error: float, rounds: int) -> float:
    """The rate of the first round, for the models of `SETTINGS` with momentum 0.9 and C = 1.

    It is 0.0079/(σ√T) and at most 320/T, where σ is the noise in a coordinate of a round's mean:
    the rule of docs/results/over-learning-rate.md.
    """
    rate = min(320, 0.0079 / run_error) / rounds  # the run's error is σ/√T
    return float(f"{rate:.2g}")
