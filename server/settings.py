"""What the server needs before its first round, and what it hands out after each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from shufl.accounting import Ledger, PrivacyPlan
from shufl.learning.tasks import Task
from shufl.protocol.outcomes import StoppedBy
from shufl.server.aggregate import MakeAggregator
from shufl.server.checkpoint import Checkpoint
from shufl.server.optimiser import Optimiser
from shufl.server.policy import Deployed, Simulated
from shufl.shuffler import AnyCredentials, Sealing


class RoundFailed(RuntimeError):
    """Rounds cannot go on: nodes are missing, or the model fails; carries the first reason."""


class NodeFailed(RoundFailed):
    """A simulated node failed or did not answer: none of them is honestly silent."""


MOST_IN_VAIN = 3
"""Rounds in a row that are spent for nothing, after which a run ends."""


@dataclass(frozen=True)
class TrainingSettings:
    """What training needs, whichever engine plays the rounds.

    Attributes:
        ledger: open, of this plan; its run id is that of the run.
        make_model: builds the initial model.
        load_test: gives public test data, features and labels of shape (r, ...).
        task: what is learnt: it measures a model.
        optimiser: the server's step.
        folder: an existing folder for checkpoints and the final model.
        evaluate_every, checkpoint_every: in rounds; the end of the run always does both.
        origin: as in `Checkpoint`.
        reproducible: whether a round played again from the same model makes the same release:
            coins and noise are functions of a seed, and sums of their terms.
        checkpoint: where an interrupted run goes on, None for a new one.
    """

    plan: PrivacyPlan
    ledger: Ledger
    make_model: Callable[[], nn.Module]
    load_test: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    task: Task
    optimiser: Optimiser
    folder: Path
    evaluate_every: int
    checkpoint_every: int
    origin: dict[str, str]
    reproducible: bool
    checkpoint: Checkpoint | None

    @property
    def run_id(self) -> str:
        """The run's name in its ledger, checkpoints and messages."""
        return self.ledger.run_id


@dataclass(frozen=True)
class ServerSettings(TrainingSettings):
    """The server's side of a run on Flower.

    Attributes:
        policy: whether nodes and shufflers are simulated or real.
        shufflers: host:port of each shuffler, and a server's credentials there.
        sealing: the suite that reports are sealed with.
        make_aggregator: begins what estimates the mean update of a shuffler's batch.
    """

    policy: Simulated | Deployed
    shufflers: tuple[tuple[str, AnyCredentials], ...]
    sealing: Sealing
    make_aggregator: MakeAggregator


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Attributes:
        rounds: rounds spent.
        stopped_by: `budget`, `rounds` (the plan's last), `on_round` or `interrupt`.
        metrics: numbers of the final model on the test data, by name.
    """

    rounds: int
    stopped_by: StoppedBy
    metrics: dict[str, float]
