"""The budget guard, and what a plan costs before it is run."""

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any

from dp_accounting import dp_event

from accounting.accountants.base import ShuffleAccountant
from accounting.accountants.renyi import OrderRangeWarning
from accounting.ledger import Ledger, LedgerError
from accounting.plan import PrivacyPlan
from accounting.registry import ACCOUNTANTS, make_accountant


class BudgetExceeded(RuntimeError):
    """The next round would take ε above the budget."""


class PrivacyBudget:
    """Stops a run before the round that would exceed its budget.

    Every round is the same event, fixed when the guard is made: the accountants compose rounds
    that are fixed in advance, and are no filters for rounds chosen after earlier releases.

    Ask before each round: `spend` records the round in the ledger first, on disk, and composes it
    then; only after it returned may the round be broadcast.
    """

    def __init__(
        self,
        accountant: ShuffleAccountant,
        event: Any,
        target_epsilon: float,
        delta: float,
        ledger: Ledger | None = None,
    ) -> None:
        """Makes a guard; the rounds already in `ledger` are composed at once.

        Args:
            accountant: A fresh accountant; the guard owns it from here on.
            event: What every round releases.
            target_epsilon: The budget.
            delta: δ at which ε is read.
            ledger: Where rounds are recorded, or None to record nowhere.

        Raises:
            ValueError: The accountant has composed something already.
            LedgerError: A round in the ledger is another event.
        """
        if not isinstance(accountant.ledger, dp_event.NoOpDpEvent):
            raise ValueError("accountant must be fresh, got one that has composed events")
        self.accountant = accountant
        self.event = event
        self.target_epsilon = target_epsilon
        self.delta = delta
        self.ledger = ledger
        entries = ledger.entries if ledger else ()
        for entry in entries:
            if entry.event != event:
                raise LedgerError(
                    f"every round of the ledger must be {event!r}, "
                    f"got {entry.event!r} in round {entry.round}"
                )
        if entries:
            accountant.compose(event, len(entries))

    @property
    def epsilon(self) -> float:
        """ε spent so far at δ."""
        return float(self.accountant.get_epsilon(self.delta))

    def epsilon_after(self) -> float:
        """Returns ε at δ after one more round; composes nothing."""
        return self.accountant.epsilon_after(self.event, self.delta)

    def would_exceed(self) -> bool:
        """Tells whether one more round would take ε above the budget; composes nothing."""
        return not self.epsilon_after() <= self.target_epsilon

    def spend(self, round: int | None = None, note: dict[str, Any] | None = None) -> None:
        """Records one round on disk, then composes it.

        Args:
            round: Its number; the one after the ledger's last if None.
            note: Plain JSON values kept beside it in the ledger; no accountant uses them.

        Raises:
            BudgetExceeded: It would exceed the budget. Nothing was recorded.
            LedgerError: It could not be recorded. Nothing was composed: halt.
        """
        after = self.epsilon_after()
        if not after <= self.target_epsilon:
            raise BudgetExceeded(
                f"{self.accountant.name}: epsilon would be {after:.6g} at delta {self.delta:g}, "
                f"the budget is {self.target_epsilon:g}"
            )
        if self.ledger is not None:
            number = self.ledger.last_round + 1 if round is None else round
            self.ledger.append_round(number, self.event, note)
        self.accountant.compose(self.event)


def rounds_within_budget(plan: PrivacyPlan, accountant: str | None = None) -> int:
    """Returns the most rounds T <= plan.rounds whose ε stays within the plan's budget.

    By bisection on T, independently of the step-by-step guard.

    Args:
        plan: The plan.
        accountant: Whose ε; the plan's own if None.

    Raises:
        ValueError: An unknown accountant.
        dp_accounting.UnsupportedEventError: One that does not price the plan's rounds.
    """
    pricing, event = plan.make_accountant(accountant), plan.event()
    within, beyond = 0, plan.rounds + 1
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if pricing.epsilon_after(event, plan.delta, middle) <= plan.target_epsilon:
            within = middle
        else:
            beyond = middle
    return within


NOT_PRICED = "does not price these rounds"
TOO_FEW_PRESENT = "counts on more users than were present in some rounds"
_MOST_BOUNDED_ROUNDS = 10**6  # a lower bound is composed on a fine grid: 10⁸ rounds take 2 GiB


@dataclasses.dataclass(frozen=True)
class EpsilonRow:
    """One accountant's answer.

    Attributes:
        name: The accountant.
        epsilon: ε at the plan's δ; None if the accountant does not price what took place.
        covers: What its ε holds for, and on what assumption.
        warning: What limits the number, or None; `NOT_PRICED` if there is no number.
        lower: What ε of the same pair is at least, or None where that is not known or not asked.
    """

    name: str
    epsilon: float | None
    covers: str
    warning: str | None
    lower: float | None = None


def price(
    counts: Iterable[tuple[Any, int]], adjacency: str, delta: float, lower: bool = False
) -> list[EpsilonRow]:
    """Returns ε of composed events by every accountant of the registry.

    An accountant that does not price one of the events, even if it took place 0 times, has no ε.

    Args:
        counts: Events and how often each took place.
        adjacency: "replace" or "zero-out".
        delta: δ at which ε is read.
        lower: Whether to compute lower bounds as well, which takes longer; of 10⁶ rounds at most.
    """
    spent = list(counts)
    rows = []
    for name, cls in ACCOUNTANTS.items():
        accountant = make_accountant(name, adjacency)
        if not all(accountant.supports(event) for event, _ in spent):
            rows.append(EpsilonRow(name, None, cls.covers, NOT_PRICED))
            continue
        for event, count in spent:
            if count:
                accountant.compose(event, count)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", OrderRangeWarning)  # the note says so
            epsilon = float(accountant.get_epsilon(delta))
        asked = lower and sum(count for _, count in spent) <= _MOST_BOUNDED_ROUNDS
        least = accountant.epsilon_lower_bound(delta) if asked else None
        notes = [accountant.note(delta)]
        if not cls.counts_on_blankets and any(_has_blankets(event) for event, _ in spent):
            notes.append("the shuffler's blankets are not counted on")
        note = "; ".join(filter(None, notes)) or None
        rows.append(EpsilonRow(name, epsilon, cls.covers, note, least))
    return rows


def _has_blankets(event: Any) -> bool:
    return bool(getattr(event, "shuffler_blankets", 0.0))


def epsilon_table(
    plan: PrivacyPlan, rounds: int, too_few_present: bool = False
) -> list[EpsilonRow]:
    """Returns ε after `rounds` rounds of the plan, by every accountant of the registry.

    Args:
        plan: The plan.
        rounds: Rounds spent, 0 or more.
        too_few_present: Whether a batch was released with fewer users present than the plan's
            `least_present`: accountants that count on others then have no ε.
    """
    return [
        dataclasses.replace(row, epsilon=None, warning=TOO_FEW_PRESENT)
        if too_few_present and ACCOUNTANTS[row.name].counts_on_others
        else row
        for row in price([(plan.event(), rounds)], plan.adjacency, plan.delta)
    ]
