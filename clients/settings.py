"""What a client needs to know before its first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shufl.accounting import PrivacyPlan
from shufl.clients.policy import Deployed, Simulated
from shufl.learning.local_training import LocalTraining, UserRecords
from shufl.shuffler import AnyCredentials, Sealing


@dataclass(frozen=True)
class ClientSettings:
    """One client's side of a run. Small and picklable: it travels to every process of a Ray worker.

    Attributes:
        policy: whether its nodes are simulated or one is real.
        plan: the privacy plan this client agreed to; a round under any other is refused.
        make_model: builds the model whose parameters the server broadcasts.
        load_users: gives access to the records of the users on this node.
        shufflers: host:port of the shuffler, and this node's credentials there. Of several
            shufflers side by side: node i submits to the (i mod k)-th of k.
        sealing: the suite of the keys that it seals to; a round with a key of another is refused.
    """

    policy: Simulated | Deployed
    plan: PrivacyPlan
    make_model: Callable[[], nn.Module]
    load_users: Callable[[], UserRecords]
    training: LocalTraining
    shufflers: tuple[tuple[str, AnyCredentials], ...]
    sealing: Sealing
