"""What a client needs to know before its first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from accounting import PrivacyPlan
from shuffler import Credentials

UserRecords = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Gives the records of a user id: features of shape (r, ...) and int64 labels of shape (r,)."""


@dataclass(frozen=True)
class LocalTraining:
    """How a user turns records into an update.

    Attributes:
        algorithm: `fedsgd` (one gradient over all records) or `fedavg` (local epochs of SGD).
        local_epochs, local_learning_rate, local_batch_size: for `fedavg` only.
    """

    algorithm: Literal["fedsgd", "fedavg"] = "fedsgd"
    local_epochs: int = 1
    local_learning_rate: float = 0.1
    local_batch_size: int = 32


@dataclass(frozen=True)
class ClientSettings:
    """One client's side of a run. Small and picklable: it travels to every process of a Ray worker.

    Attributes:
        run_id: the run this client takes part in; any other is refused.
        plan: the privacy plan this client agreed to; a round under any other is refused.
        make_model: builds the model whose parameters the server broadcasts.
        load_users: gives access to the records of the users on this node.
        training: local computation.
        shufflers: host:port of the shuffler, and this node's credentials there; None only for one
            without TLS. Of several shufflers side by side: node i submits to the (i mod k)-th of k.
        seed: simulation's seed; None takes coins and noise from the operating system.
        reply_after: seconds from a message to its acknowledgement. Work takes longer for those who
            checked in, so outside simulation set it above the longest local work, or the moment of
            the reply tells the server who did.
    """

    run_id: str
    plan: PrivacyPlan
    make_model: Callable[[], nn.Module]
    load_users: Callable[[], UserRecords]
    training: LocalTraining
    shufflers: tuple[tuple[str, Credentials | None], ...]
    seed: int | None
    reply_after: float = 0.0
