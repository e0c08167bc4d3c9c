"""What a client needs to know before its first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from shufl.accounting import PrivacyPlan
from shufl.clients.algorithms import STEPS, Step, Tensors
from shufl.clients.device import DeviceLedger
from shufl.shuffler import AnyCredentials, Sealing

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""Gives each of r records its loss, from a model's outputs and the labels: shape (r,)."""


def cross_entropy(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of classification: scores of shape (r, classes), int64 labels of shape (r,)."""
    return functional.cross_entropy(scores, labels, reduction="none")


UserRecords = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Gives the records of a user id: features of shape (r, ...) and labels of shape (r, ...)."""


@dataclass(frozen=True)
class LocalTraining:
    """How a user turns records into an update.

    Attributes:
        algorithm: `fedsgd`, one gradient over all records; or the name of one with local epochs.
        local_epochs, local_learning_rate, local_batch_size: of local epochs.
        loss: of the task.
        options: of the algorithm.
        own: the step of an algorithm that is none of `STEPS`.
    """

    algorithm: str = "fedsgd"
    local_epochs: int = 1
    local_learning_rate: float = 0.1
    local_batch_size: int = 32
    loss: Loss = cross_entropy
    options: dict[str, Any] = field(default_factory=dict)
    own: Step | None = None

    def step(
        self, parameters: Tensors, gradients: Tensors, start: Tensors, state: dict[str, Any]
    ) -> tuple[Tensors, dict[str, Any]]:
        """A user's next step in its local epochs; see `Step`."""
        step = self.own or STEPS[self.algorithm]
        return step(parameters, gradients, start, state, self.local_learning_rate, **self.options)


@dataclass(frozen=True)
class ClientSettings:
    """One client's side of a run. Small and picklable: it travels to every process of a Ray worker.

    Attributes:
        run_id: the run this client takes part in; any other is refused. None: any run of the plan.
        plan: the privacy plan this client agreed to; a round under any other is refused.
        make_model: builds the model whose parameters the server broadcasts.
        load_users: gives access to the records of the users on this node.
        shufflers: host:port of the shuffler, and this node's credentials there. Of several
            shufflers side by side: node i submits to the (i mod k)-th of k.
        seed: simulation's seed; None takes coins and noise from the operating system.
        ledger: opens the device's own ledger of a node, by the node's number; it is asked before
            every coin. None: there is none, in simulation only.
        users: for how many users a deployed node speaks, whose ids are 0 to `users` - 1 in its
            certificate. None: in a simulation, where nodes share the plan's users.
        number: a deployed node's, from 0, which decides its shuffler.
        last_round: the last round within the budget. None: the client computes it, as it must where
            it does not trust who says so.
        sealing: the suite of the keys that it seals to. None: any.
        together: whether the model gives the same updates when users' are computed together.
    """

    run_id: str | None
    plan: PrivacyPlan
    make_model: Callable[[], nn.Module]
    load_users: Callable[[], UserRecords]
    training: LocalTraining
    shufflers: tuple[tuple[str, AnyCredentials], ...]
    seed: int | None
    ledger: Callable[[int], DeviceLedger] | None = None
    users: int | None = None
    number: int = 0
    last_round: int | None = None
    sealing: Sealing | None = None
    together: bool = True
