"""The budget guard, and what a plan costs before it is run."""

import dataclasses
import functools
from typing import Any

from shufl.accounting.calibration import most_rounds
from shufl.accounting.ledger import Ledger
from shufl.accounting.plan import PrivacyPlan
from shufl.accounting.registry import ACCOUNTANTS, accountants_of_kind, make_accountant
from shufl.protocol.events import Shuffled


class PrivacyBudget:
    """Stops a run before the round that would exceed its plan's budget.

    Every round is the plan's: the accountants compose rounds that are fixed in advance, and are no
    filters for rounds chosen after earlier releases.

    Ask before each round: `spend` records the round in the ledger first, on disk, and composes it
    then; only after it returned may the round be broadcast.
    """

    def __init__(self, plan: PrivacyPlan, ledger: Ledger | None = None) -> None:
        """The rounds already in `ledger` count as spent; without one, none are recorded.

        Raises:
            ValueError: The ledger is one of another plan.
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
        """Tells whether one more round would take ε above the budget; composes nothing."""
        return not self.epsilon_after() <= self.plan.target_epsilon

    def spend(self, round: int | None = None, note: dict[str, Any] | None = None) -> None:
        """Records one round on disk, then composes it.

        Its number is the one after the ledger's last if None. `note` holds plain JSON values, which
        are kept beside it in the ledger; no accountant uses them.

        Raises:
            RuntimeError: It would exceed the budget, or the plan's rounds; or with allocation it
                is not the next one. Nothing was recorded.
            LedgerError: It could not be recorded. Nothing was composed: halt.
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


def rounds_within_budget(plan: PrivacyPlan, accountant: str | None = None) -> int:
    """Returns the most rounds T <= plan.rounds whose ε stays within the plan's budget.

    By bisection on T, independently of the step-by-step guard. ε is that of `accountant`, of the
    plan's own if None.

    Raises:
        ValueError: An unknown accountant.
        dp_accounting.UnsupportedEventError: One that does not price the plan's rounds.
    """
    epsilon_after = functools.partial(
        plan.make_accountant(accountant).epsilon_after, plan.event(), plan.delta
    )
    return most_rounds(epsilon_after, plan.target_epsilon, plan.rounds)


NOT_PRICED = "does not price these rounds"
TOO_FEW_PRESENT = "counts on more users than were present in some rounds"
_MOST_BOUNDED_ROUNDS = 10**6  # a lower bound is composed on a fine grid: 10⁸ rounds take 2 GiB


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
        lower: What ε of the same pair is at least, or None where that is not known or not asked.
        planned: ε of all the rounds that the budget allows, where fewer are spent. It holds even if
            somebody stopped the run because of its results, which no plan has fixed.
    """

    name: str
    epsilon: float | None
    covers: str
    warning: str | None
    lower: float | None = None
    planned: float | None = None


def price(
    event: Shuffled, rounds: int, adjacency: str, delta: float, lower: bool = False
) -> list[EpsilonRow]:
    """Returns ε of some rounds by every accountant of the registry.

    ε is read at `delta`. `lower` asks for lower bounds as well, which takes longer; of 10⁶ rounds
    at most.
    """
    rows = []
    for name, cls in accountants_of_kind(event).items():
        accountant = make_accountant(name, adjacency)
        if not accountant.supports(event):
            rows.append(EpsilonRow(name, None, cls.covers, NOT_PRICED))
            continue
        if rounds:
            accountant.compose(event, rounds)
        epsilon = float(accountant.get_epsilon(delta))
        asked = lower and rounds <= _MOST_BOUNDED_ROUNDS
        least = accountant.epsilon_lower_bound(delta) if asked else None
        notes = [accountant.note(delta)]
        if event.blankets and not cls.counts_on_blankets:
            notes.append("the shuffler's blankets are not counted on")
        note = "; ".join(filter(None, notes)) or None
        rows.append(EpsilonRow(name, epsilon, cls.covers, note, least))
    return rows


def epsilon_table(
    plan: PrivacyPlan, rounds: int, too_few_present: bool = False, lower: bool = False
) -> list[EpsilonRow]:
    """Returns ε after `rounds` rounds of the plan, by every accountant of the registry.

    `lower` is as for `price`. If `too_few_present`, a batch was released with fewer users present
    than the plan's `least_present`: accountants that count on others then have no ε. Of a plan for
    real machines, `covers` also says what is assumed of these.
    """
    about, allowed = (plan.adjacency, plan.delta), rounds_within_budget(plan)
    spent = price(plan.event(), rounds, *about, lower=lower)
    planned = price(plan.event(), allowed, *about) if rounds < allowed else spent
    if plan.window is not None:
        spent = [dataclasses.replace(row, covers=row.covers + ON_MACHINES) for row in spent]
    return [
        dataclasses.replace(row, epsilon=None, warning=TOO_FEW_PRESENT, lower=None)
        if too_few_present and ACCOUNTANTS[row.name].counts_on_others
        else dataclasses.replace(row, planned=None if planned is spent else whole.epsilon)
        for row, whole in zip(spent, planned, strict=True)
    ]
