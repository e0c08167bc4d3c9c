"""Whose a node is: `Simulated` or `Deployed`.

Every client has one of the two. No field has a default: a field that is forgotten weakens nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from shufl.accounting import PrivacyPlan
from shufl.clients.device_ledger import DeviceLedger, SimulatedLedger


@dataclass(frozen=True)
class Simulated:
    """The nodes of a simulation, which share the plan's users and sign nothing.

    Attributes:
        run_id: the only run that they take part in.
        seed: of coins and noise; None: they are drawn from the operating system's entropy.
        halting_round: the last round within the budget, which is computed once for all nodes.
        ledger: opens a node's ledger, by the node's number; gives None where none is kept.
        together: whether the model gives the same updates when users' are computed together.
    """

    run_id: str
    seed: int | None
    halting_round: int
    ledger: Callable[[int], SimulatedLedger | None]
    together: bool

    def last_round(self, plan: PrivacyPlan) -> int:
        """The last round within the budget of the plan."""
        return self.halting_round


@dataclass(frozen=True)
class Deployed:
    """One real node. It takes part in any run of its plan, and draws from the system's entropy.

    Attributes:
        number: the node's, from 0, which decides its shuffler.
        users: for how many users it speaks; their ids in its certificate are 0 to `users` - 1.
        device: the device's own ledger, within the limits of its owner.
    """

    number: int
    users: int
    device: DeviceLedger

    run_id: ClassVar[None] = None
    seed: ClassVar[None] = None
    together: ClassVar[bool] = False

    def ledger(self, number: int) -> DeviceLedger:
        """The device's ledger, which is asked before every coin."""
        return self.device

    def last_round(self, plan: PrivacyPlan) -> int:
        """The last round within the budget, by this client's own accountant, not the server's."""
        from shufl.accounting import rounds_within_budget  # a second of imports

        return rounds_within_budget(plan)
