"""What a client needs to know before its first round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from shufl.accounting import PrivacyPlan
from shufl.clients.device import DeviceLedger
from shufl.learning.local_training import LocalTraining, UserRecords
from shufl.shuffler import AnyCredentials, Sealing


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
