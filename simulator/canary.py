"""An audit from end to end: a canary's update goes through client, shuffler and server many times.

Each round is real: the clients' `Node` flips coins, computes updates from records, clips, adds
noise and seals; a shuffler process collects and releases; the server's code opens and sums. The
gradients of the model are known. So user 0, the canary, can hold one of two records whose updates
are as far apart as the adjacency allows. An adversary compares what the server has in the two
worlds.
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

from shufl.accounting import PrivacyPlan, accountants_for
from shufl.accounting.audit.adversary import AttackedRound, Placement
from shufl.accounting.audit.attack import AuditResult, ClaimCheck, delta_lower_bound
from shufl.clients import Announcement, ClientSettings, Node, Simulated
from shufl.learning import LocalTraining, UserRecords
from shufl.protocol import validation
from shufl.server import Aggregate, Mean, aggregate_reports
from shufl.server.aggregate import aggregate_sum
from shufl.shuffler import (
    ControlClient,
    Outcome,
    RoundHeader,
    ShufflerProcess,
    generate_key_pair,
    key_digest,
    message_length,
    model_digest,
)

DIMENSION = 2
Record = Literal["plus", "minus", "zero"]
"""The clipped update of a user's record: C (-1, 1)/√2, its negative, or 0."""

Others = Record | Literal["absent"]
"""What all other users hold; `absent`: the server asks the canary alone."""

_PLACES = {"plus": 1.0, "minus": -1.0, "zero": 0.0}  # an update's length along (-1, 1), over C


@dataclass(frozen=True)
class CanaryRound:
    """All that the server has after one round.

    Attributes:
        reports: k reports and blankets in the order of the release, float64 of shape (k, 2). With
            sums it is the one sum, without the noise that the server would add.
        aggregate: their mean, as training would use it; None if nothing was released.
    """

    reports: np.ndarray
    aggregate: Aggregate | None


class _MeanAndReports(Mean):
    """Keeps the reports too, as a curious server would."""

    def __init__(self, plan: PrivacyPlan, dimension: int):
        super().__init__(plan, dimension)
        self.reports: list[np.ndarray] = []

    def add(self, report: np.ndarray) -> None:
        super().add(report)
        self.reports.append(report)


Score = Callable[[CanaryRound], float]
"""The adversary: a high score speaks for the world in which the canary holds "plus"."""

_ROUND_SECONDS = 600.0  # in which a node submits


def projections(round: CanaryRound, plan: PrivacyPlan) -> np.ndarray:
    """Each report's length along the canary's direction, in clip norms: float64 of shape (k,).

    The order is that of the release. Across this direction there is noise only.
    """
    direction = np.array([-1.0, 1.0]) / np.sqrt(2.0)
    return np.asarray(round.reports @ direction / plan.mechanism.clip_norm)


def likelihood_score(plan: PrivacyPlan, others: Others) -> Score:
    """The adversary of the analysis: the likelihood ratio of the unordered reports.

    The likelihood ratio of a sum rises with the sum's length along the canary's direction.
    """
    if plan.mixing == "sum":
        return lambda round: float(projections(round, plan)[0])
    absent = others == "absent"
    held = np.zeros((0, 1)) if absent else np.full((plan.users - 1, 1), _PLACES[others])
    end = _PLACES[_replacement(plan)]
    placement = Placement("canary", np.array([1.0]), np.array([end]), held, absent)
    attacked = AttackedRound(plan.event().composed(1)[0], placement)
    return lambda round: float(attacked.score(projections(round, plan)[None, :, None])[0])


def canary_rounds(
    plan: PrivacyPlan,
    canary: Record,
    others: Others,
    shuffler: ShufflerProcess,
    seed: int,
    make_node: Callable[[ClientSettings], Node] = Node,
) -> Iterator[CanaryRound]:
    """Runs `plan.rounds` independent draws of one round in one of the two worlds.

    Args:
        plan: its budget must allow all rounds.
        canary: what user 0 holds.
        others: what all other users hold.
        shuffler: a running process; it draws blankets and order from a source of its own.
        seed: of the users' coins and noise; it must differ between the two worlds.
        make_node: builds the client's side.

    Yields:
        What the server has after each round.

    Raises:
        ShufflerError: the shuffler does not answer or refuses.
        RoundRefused: the client does not agree to a round.
    """
    run_id = f"canary-{uuid.uuid4()}"
    settings = ClientSettings(
        policy=Simulated(
            run_id=run_id,
            seed=seed,
            halting_round=plan.rounds,
            ledger=lambda node: None,  # its rounds are repetitions of one
            together=True,
        ),
        plan=plan,
        make_model=_make_model,
        load_users=functools.partial(_load_users, canary, others, plan.mechanism.clip_norm),
        training=LocalTraining(),
        shufflers=((shuffler.address, shuffler.submit),),
        sealing="x25519",
    )
    node = make_node(settings)
    model = ArrayRecord(_make_model().state_dict())
    shown = model_digest(_make_model().state_dict())
    users = np.arange(1 if others == "absent" else plan.users)
    unit, of_sums = plan.mechanism.unit(DIMENSION), plan.mixing == "sum"
    with ControlClient(shuffler.address, shuffler.control) as control:
        length = message_length(DIMENSION, plan.mixing)
        digest = control.create_run(run_id, plan.to_json().encode(), length)
        for number in range(1, plan.rounds + 1):
            private_key, public_key = generate_key_pair()
            header = RoundHeader(run_id, number, shown, digest, key_digest(public_key))
            nonce = control.open_round(header.run_id, number, shown, public_key)
            about = {"run_id": run_id, "round": number, "plan_digest": digest}
            about |= {"public_key": public_key, "seconds": _ROUND_SECONDS}
            announced = Announcement.read(about)
            node.take_part(users, node.prepare(announced, model))
            if control.close_round(header.run_id, number).outcome is not Outcome.RELEASABLE:
                yield CanaryRound(np.zeros((0, DIMENSION)), None)
                continue
            batch = replace(header, nonce=nonce), control.release(header.run_id, number)
            if of_sums:
                noise = np.zeros(DIMENSION)
                aggregate = aggregate_sum(batch, private_key, plan, DIMENSION, noise, expected=None)
                reports = aggregate.estimate[None] * (plan.check_in_rate * len(users))
            else:
                mean = _MeanAndReports(plan, DIMENSION)
                aggregate = aggregate_reports(batch, private_key, plan, DIMENSION, mean, len(users))
                reports = unit * np.stack(mean.reports)
            control.end_round(header.run_id, number)
            yield CanaryRound(reports, aggregate)
        control.end_run(run_id)


@dataclass(frozen=True)
class CanaryWorlds:
    """The same plan run with the canary's record and with its replacement.

    Attributes:
        present: rounds with the canary at "plus".
        replaced: rounds with it at "minus" (replace) or "zero" (zero-out).
    """

    plan: PrivacyPlan
    present: tuple[CanaryRound, ...]
    replaced: tuple[CanaryRound, ...]

    def by_blocks(self, rounds: int) -> CanaryWorlds:
        """The same worlds with every `rounds` rounds in a row joined into one."""
        joined = [
            tuple(
                CanaryRound(np.concatenate([each.reports for each in world[i : i + rounds]]), None)
                for i in range(0, len(world), rounds)
            )
            for world in (self.present, self.replaced)
        ]
        return CanaryWorlds(self.plan, *joined)

    def scores(self, score: Score) -> tuple[list[float], list[float]]:
        """The adversary's scores of the rounds of either world."""
        return [score(each) for each in self.present], [score(each) for each in self.replaced]


def run_canary(
    plan: PrivacyPlan,
    others: Others,
    shuffler: ShufflerProcess,
    seed: int,
    make_node: Callable[[ClientSettings], Node] = Node,
) -> CanaryWorlds:
    """Plays one round `plan.rounds` times in each of the two worlds; see `canary_rounds`.

    The budget does not end the rounds: they are repetitions of one, not a training run.
    """
    accountant = "sum-distributed" if plan.mixing == "sum" else "local"
    plan = plan.replace(target_epsilon=1e300, accountant=accountant)
    other = _replacement(plan)
    present = canary_rounds(plan, "plus", others, shuffler, 2 * seed, make_node)
    replaced = canary_rounds(plan, other, others, shuffler, 2 * seed + 1, make_node)
    return CanaryWorlds(plan, tuple(present), tuple(replaced))


def check_end_to_end(
    plan: PrivacyPlan, epsilon: float, rounds: int, confidence: float, seed: int
) -> list[ClaimCheck]:
    """Attacks a plan through client, shuffler and server, by a server that asks one user alone.

    With sums the server asks all users, and only one of them has a record.

    Args:
        plan: the plan under attack.
        epsilon: where δ(ε) is attacked, in [0, 700].
        rounds: how many rounds are played in each of the two worlds, at least 4; with allocation,
            how many blocks of rounds.
        confidence: the probability that no correct claim is found violated, in (0, 1).
        seed: of coins and noise.

    Returns:
        A check for each accountant that makes a claim against this attack.

    Raises:
        ValueError: a value outside its range.
        ShufflerError: the shuffler does not start, does not answer or refuses.
    """
    validation.integer("samples", rounds, 4)
    validation.real("epsilon", epsilon, "[0, 700]")
    validation.real("confidence", confidence, "(0, 1)")
    validation.integer("seed", seed, 0, 2**62 - 1)
    event, of_sums = plan.event(), plan.mixing == "sum"
    others: Others = "zero" if of_sums else "absent"
    claims = [
        accountant
        for accountant in map(plan.make_accountant, accountants_for(event))
        if of_sums or not accountant.counts_on_others
    ]
    score = likelihood_score(plan, others)
    with ShufflerProcess() as shuffler:
        block = plan.every if plan.participation == "allocation" else 1
        repeated = plan.replace(rounds=rounds * block, minimum_batch=1)
        worlds = run_canary(repeated, others, shuffler, seed)
    worlds = worlds.by_blocks(block) if block > 1 else worlds
    lower = delta_lower_bound(*worlds.scores(score), epsilon, confidence)
    found = AuditResult(others, lower, lower, "events")
    checks = []
    for each in claims:
        claimed = float(each.compose(event).get_delta(epsilon))
        checks.append(ClaimCheck(each.name, each.covers, each.holds_for, claimed, (found,)))
    return checks


def _replacement(plan: PrivacyPlan) -> Record:
    return "minus" if plan.adjacency == "replace" else "zero"


def _make_model() -> nn.Module:
    """Two logits of one feature, weights 0: the gradient for label 0 is feature/2 (-1, 1)."""
    model = nn.Linear(1, DIMENSION, bias=False)
    nn.init.zeros_(model.weight)
    return model


def _load_users(canary: Record, others: Others, clip_norm: float) -> UserRecords:
    def records(user: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Twice the clip norm over the gradient of one unit: clipping has something to do.
        place = _PLACES[canary if user == 0 else others]
        feature = 2.0 * np.sqrt(2.0) * clip_norm * place
        return torch.full((1, 1), feature), torch.tensor([0])

    return records
