"""The accountants by name, as the configuration and the tables know them.

To add one: subclass `ShuffleAccountant` in its own module, set `name`, `covers`, `holds_for` and,
if it does not price all of them, `round_kinds`, `participations` and `mechanisms`; list it here,
and its name in `plan.AccountantName`.
"""

from shufl.accounting import adjacency as adjacency_lib
from shufl.accounting.accountants.base import ShuffleAccountant
from shufl.accounting.accountants.blanket import BlanketAccountant
from shufl.accounting.accountants.crowd import CrowdAccountant
from shufl.accounting.accountants.local import LocalAccountant
from shufl.accounting.accountants.pld import PldAccountant
from shufl.accounting.accountants.renyi import CheckInRdpAccountant, Theorem3Accountant
from shufl.accounting.accountants.sums import SumCentralAccountant, SumDistributedAccountant
from shufl.protocol import validation
from shufl.protocol.events import Allocation, Shuffled, Summed

ACCOUNTANTS: dict[str, type[ShuffleAccountant]] = {
    cls.name: cls
    for cls in (
        Theorem3Accountant,
        CheckInRdpAccountant,
        PldAccountant,
        BlanketAccountant,
        CrowdAccountant,
        SumDistributedAccountant,
        SumCentralAccountant,
        LocalAccountant,
    )
}


def accountants_for(event: Shuffled) -> tuple[str, ...]:
    """Returns the names of the accountants that price an event."""
    return tuple(name for name, cls in ACCOUNTANTS.items() if cls().supports(event))


def accountants_of_kind(event: Shuffled) -> dict[str, type[ShuffleAccountant]]:
    """Returns those that price rounds of this kind, reports or sums, by name; not all price it."""
    return {name: cls for name, cls in ACCOUNTANTS.items() if type(event) in cls.round_kinds}


def check_accountant(name: str, event: Shuffled) -> str:
    """Returns `name` if it is an accountant that prices an event.

    Raises:
        ValueError: An unknown accountant, or one that does not price it; names those that do.
    """
    validation.choice("accountant", name, tuple(ACCOUNTANTS))
    if isinstance(event, Summed):
        return validation.choice("accountant of sums", name, accountants_for(event))
    blankets = "with" if event.blankets else "without"
    by = " by allocation" if isinstance(event.participation, Allocation) else ""
    rounds = f"accountant of {event.mechanism.name} rounds{by} {blankets} shuffler blankets"
    return validation.choice(rounds, name, accountants_for(event))


def make_accountant(name: str, adjacency: str = "replace") -> ShuffleAccountant:
    """Returns a fresh accountant of the registry.

    Raises:
        ValueError: An unknown name or adjacency.
    """
    validation.choice("accountant", name, tuple(ACCOUNTANTS))
    return ACCOUNTANTS[name](adjacency_lib.relation_of(adjacency))
