"""The budget guard, and what a plan costs before it is run."""

import dataclasses
from collections.abc import Collection
from typing import Any

from shufl.accounting.ledger import Ledger
from shufl.accounting.privacy_plan import PrivacyPlan, rounds_within_budget
from shufl.accounting.registry import ACCOUNTANTS, accountants_of_kind, make_accountant
from shufl.protocol.events import Shuffled


class PrivacyBudget:
    """Stops a run before the round that would exceed its plan's budget.

    Every round is the plan's: the accountants compose rounds that are fixed in advance, and are no
    filters for rounds chosen after earlier releases.

    Call `spend` before each round. It first records the round in the ledger, on disk, and then
    composes it. Broadcast the round only after `spend` has returned.

    Attributes:
        plan: The plan of all rounds.
        ledger: Where rounds are recorded; None if nowhere.
        accountant: The plan's accountant, which has composed the rounds that are spent.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger | None = None) -> None:
        """The rounds that a ledger already holds count as spent.

        Args:
            plan: The plan of all rounds.
            ledger: Where to record rounds; None records nothing.

        Raises:
            ValueError: The ledger belongs to another plan.
        """
        if ledger is not None and ledger.plan != plan:
            raise ValueError(
                f"the ledger must be of plan {plan.digest()[:12]}, got {ledger.plan.digest()[:12]}"
            )
        self.plan = plan
        self.ledger = ledger
        self.accountant = plan.make_accountant()
        self._spent = len(ledger.entries) if ledger is not None else 0
        if self._spent:
            self.accountant.compose(plan.event(), self._spent)

    @property
    def epsilon(self) -> float:
        """ε spent so far at δ."""
        return float(self.accountant.get_epsilon(self.plan.delta))

    def epsilon_after(self) -> float:
        """Returns ε at δ after one more round; composes nothing."""
        return self.accountant.epsilon_after(self.plan.event(), self.plan.delta)

    def would_exceed(self) -> bool:
        """Returns whether one more round would take ε above the budget; composes nothing."""
        return not self.epsilon_after() <= self.plan.target_epsilon

    def spend(self, round: int | None = None, note: dict[str, Any] | None = None) -> None:
        """Records one round on disk, then composes it.

        Args:
            round: Its number, above the ledger's last; the next one if None.
            note: Plain JSON values to keep beside it in the ledger. No accountant uses them.

        Raises:
            RuntimeError: The round would exceed the budget or the plan's number of rounds; or it is
                not the next one, in a plan with allocation. Nothing was recorded.
            LedgerError: The round could not be recorded. Nothing was composed: halt.
        """
        if self._spent >= self.plan.rounds or self.would_exceed():
            raise RuntimeError("one more round would exceed the plan's budget or its rounds")
        number = self._spent + 1 if self.ledger is None else self.ledger.last_round + 1
        if self.plan.participation == "allocation" and round not in (None, number):
            raise RuntimeError(f"round must be {number}, the next one of its block, got {round}")
        if self.ledger is not None:
            self.ledger.append_round(number if round is None else round, note)
        self.accountant.compose(self.plan.event())
        self._spent += 1


NOT_PRICED = "does not price these rounds"
TOO_FEW_PRESENT = "counts on more users than were present in some rounds"

ON_MACHINES = (
    "; on real machines it also assumes that in each round at most one user of a node makes the "
    "process that computes updates crash or hang"
)
"""What ε of a plan with a window assumes beside its accountant's own assumptions."""


@dataclasses.dataclass(frozen=True)
class EpsilonRow:
    """One accountant's answer.

    Attributes:
        name: The accountant.
        epsilon: ε at the plan's δ; None if the accountant does not price what took place.
        covers: What its ε holds for, and on what assumption.
        warning: What limits the number, or None; `NOT_PRICED` if there is no number.
        planned: ε of all the rounds that the budget allows, where fewer are spent. It holds even if
            somebody stopped the run because of its results, which no plan has fixed.
    """

    name: str
    epsilon: float | None
    covers: str
    warning: str | None
    planned: float | None = None


def price(
    event: Shuffled,
    rounds: int,
    adjacency: str,
    delta: float,
    names: Collection[str] | None = None,
) -> list[EpsilonRow]:
    """Returns the ε of some rounds by several accountants.

    Args:
        event: What each round releases.
        rounds: How many there are.
        adjacency: "replace" or "zero-out".
        delta: δ in [0, 1].
        names: The accountants to ask; all of the registry if None.
    """
    rows = []
    for name, cls in accountants_of_kind(event).items():
        if names is not None and name not in names:
            continue
        accountant = make_accountant(name, adjacency)
        if not accountant.supports(event):
            rows.append(EpsilonRow(name, None, cls.covers, NOT_PRICED))
            continue
        if rounds:
            accountant.compose(event, rounds)
        epsilon = float(accountant.get_epsilon(delta))
        notes = [accountant.note(delta)]
        if event.blankets and not cls.counts_on_blankets:
            notes.append("the shuffler's blankets are not counted on")
        note = "; ".join(filter(None, notes)) or None
        rows.append(EpsilonRow(name, epsilon, cls.covers, note))
    return rows


def epsilon_table(
    plan: PrivacyPlan, rounds: int, too_few_present: bool = False
) -> list[EpsilonRow]:
    """Returns ε after some rounds of the plan, by every accountant of the registry.

    For a plan of real machines, `covers` also says what is assumed of the machines.

    Args:
        plan: The plan.
        rounds: How many of its rounds took place.
        too_few_present: Whether a batch was released while fewer users were present than the plan's
            `least_present`. Accountants that count on others have no ε then.
    """
    event, adjacency, delta = plan.event(), plan.adjacency, plan.delta
    allowed = rounds_within_budget(plan)
    spent = price(event, rounds, adjacency, delta)
    planned = price(event, allowed, adjacency, delta) if rounds < allowed else spent
    if plan.window is not None:
        spent = [dataclasses.replace(row, covers=row.covers + ON_MACHINES) for row in spent]
    return [
        dataclasses.replace(row, epsilon=None, warning=TOO_FEW_PRESENT)
        if too_few_present and ACCOUNTANTS[row.name].counts_on_others
        else dataclasses.replace(row, planned=None if planned is spent else whole.epsilon)
        for row, whole in zip(spent, planned, strict=True)
    ]
