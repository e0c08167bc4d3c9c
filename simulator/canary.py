"""A canary in the pipeline: its update goes through client, shuffler and server many times.

Each round is a real one: the clients' `Worker` flips coins, computes updates from records, clips,
adds noise and seals; a shuffler process collects and releases; the server's code opens and sums.
The model is one whose gradients are known, so that user 0, the canary, holds either of two records
as far apart as the adjacency allows. What the server then has is compared between the two worlds.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from flwr.app import ArrayRecord
from torch import nn

from accounting import PrivacyPlan
from accounting.audit import epsilon_lower_bound
from accounting.audit_placements import AttackedRound, Placement
from clients import ClientSettings, LocalTraining
from clients.settings import UserRecords
from clients.worker import Worker
from server import Aggregate, aggregate_reports
from shuffler import (
    ControlClient,
    Outcome,
    RoundHeader,
    ShufflerProcess,
    decode_report,
    generate_key_pair,
    model_version,
    open_report,
    report_length,
    sealed_length,
)

DIMENSION = 2
Record = Literal["plus", "minus", "zero"]
"""A user's clipped update: C (-1, 1)/√2, its negative, or 0."""

_PLACES = {"plus": 1.0, "minus": -1.0, "zero": 0.0}  # of an update, in clip norms


@dataclass(frozen=True)
class CanaryRound:
    """All that the server has after one round.

    Attributes:
        reports: in the order of the release, float32 of shape (k, 2); k is 0 if nothing was
            released.
        aggregate: their sum as training would use it; None if nothing was released.
    """

    reports: np.ndarray
    aggregate: Aggregate | None


Score = Callable[[CanaryRound], float]
"""The adversary: high speaks for the world in which the canary holds "plus"."""


def projections(round: CanaryRound, plan: PrivacyPlan) -> np.ndarray:
    """Each report along the canary's direction, in clip norms, shape (k,), in release order.

    The other direction holds noise only. These are the reports of a placement in one dimension:
    "plus" at 1, "minus" at -1, "zero" at 0.
    """
    direction = np.array([-1.0, 1.0]) / np.sqrt(2.0)
    return np.asarray(round.reports.astype(np.float64) @ direction / plan.clip_norm)


def likelihood_score(plan: PrivacyPlan, others: Record) -> Score:
    """The adversary of the analysis: the likelihood ratio of the unordered reports."""
    placement = Placement(
        "canary",
        np.array([1.0]),
        np.array([_PLACES[_replacement(plan)]]),
        np.full((plan.users - 1, 1), _PLACES[others]),
    )
    attacked = AttackedRound(plan.event(), placement)
    return lambda round: float(attacked.score(projections(round, plan)[None, :, None])[0])


def canary_rounds(
    plan: PrivacyPlan,
    canary: Record,
    others: Record,
    shuffler: ShufflerProcess,
    seed: int,
    make_worker: Callable[[ClientSettings], Worker] = Worker,
) -> Iterator[CanaryRound]:
    """Runs `plan.rounds` rounds in one of the two worlds.

    The model does not change between rounds: they are independent draws of one round.

    Args:
        plan: of a mechanism whose single round is audited; its budget must allow all rounds.
        canary: what user 0 holds.
        others: what all other users hold.
        shuffler: a running one.
        seed: of coins and noise; the two worlds need different ones.
        make_worker: builds the client's side.

    Raises:
        ShufflerError: the shuffler does not answer or refuses.
        RoundRefused: the client does not agree to a round.
    """
    settings = ClientSettings(
        run_id=f"canary-{uuid.uuid4()}",
        plan=plan,
        make_model=_make_model,
        load_users=functools.partial(_load_users, canary, others, plan.clip_norm),
        training=LocalTraining(),
        shufflers=((shuffler.address, shuffler.submit),),
        seed=seed,
    )
    worker = make_worker(settings)
    model = ArrayRecord(_make_model().state_dict())
    version = model_version(array.data for array in model.values())
    users = np.arange(plan.users)
    with ControlClient(shuffler.address, shuffler.control) as control:
        length = sealed_length(report_length(DIMENSION))
        digest = control.create_run(settings.run_id, plan.to_json().encode(), length)
        for number in range(1, plan.rounds + 1):
            header = RoundHeader(settings.run_id, number, version, digest)
            private_key, public_key = generate_key_pair()
            control.open_round(header.run_id, number, version)
            worker.check(header, model, public_key, answered=number - 1)
            worker.take_part(users, header, model, public_key)
            if control.close_round(header.run_id, number) is not Outcome.RELEASABLE:
                yield CanaryRound(np.zeros((0, DIMENSION), np.float32), None)
                continue
            release = list(control.release(header.run_id, number))
            opened = [
                decode_report(open_report(sealed, private_key, header), DIMENSION)
                for sealed in release
            ]
            aggregate = aggregate_reports(release, private_key, header, plan, DIMENSION)
            yield CanaryRound(np.stack(opened), aggregate)
        control.end_run(settings.run_id)


@dataclass(frozen=True)
class CanaryWorlds:
    """The same plan run with the canary's record and with its replacement.

    Attributes:
        plan: what was run.
        present: rounds with the canary at "plus".
        replaced: rounds with it at "minus" (replace) or "zero" (zero-out).
    """

    plan: PrivacyPlan
    present: tuple[CanaryRound, ...]
    replaced: tuple[CanaryRound, ...]

    def epsilon_lower_bound(self, score: Score, delta: float, confidence: float = 0.99) -> float:
        """A lower confidence bound of one round's ε at `delta`, by this adversary.

        The first half of the rounds chooses the threshold, the second half is counted (Clopper and
        Pearson). A bound above what an accountant states for one round refutes it.

        Raises:
            ValueError: a value outside its range.
        """
        present = [score(each) for each in self.present]
        replaced = [score(each) for each in self.replaced]
        return epsilon_lower_bound(present, replaced, delta, confidence)


def run_canary(
    plan: PrivacyPlan,
    others: Record,
    shuffler: ShufflerProcess,
    seed: int,
    make_worker: Callable[[ClientSettings], Worker] = Worker,
) -> CanaryWorlds:
    """Runs both worlds; see `canary_rounds`. One round is audited, `plan.rounds` is how often.

    The budget does not end the rounds: they are repetitions of one, not a training run.
    """
    plan = replace(plan, target_epsilon=1e300, accountant="local")
    other = _replacement(plan)
    present = canary_rounds(plan, "plus", others, shuffler, 2 * seed, make_worker)
    replaced = canary_rounds(plan, other, others, shuffler, 2 * seed + 1, make_worker)
    return CanaryWorlds(plan, tuple(present), tuple(replaced))


def _replacement(plan: PrivacyPlan) -> Record:
    return "minus" if plan.adjacency == "replace" else "zero"


def _make_model() -> nn.Module:
    """Two logits of one feature, weights 0: the gradient for label 0 is feature/2 (-1, 1)."""
    model = nn.Linear(1, DIMENSION, bias=False)
    nn.init.zeros_(model.weight)
    return model


def _load_users(canary: Record, others: Record, clip_norm: float) -> UserRecords:
    def records(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Twice the clip norm over the gradient of one unit: clipping has something to do.
        feature = 2.0 * np.sqrt(2.0) * clip_norm * _PLACES[canary if user == 0 else others]
        return torch.full((1, 1), feature), torch.tensor([0])

    return records
