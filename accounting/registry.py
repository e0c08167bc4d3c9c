"""The accountants by name, as the configuration and the tables know them.

To add one: subclass `ShuffleAccountant` in its own module, set `name`, `covers` and, if they are
not the Gaussian ones, `events`; list it here. Of those that price a mechanism the first in the list
is its default.
"""

from accounting import adjacency as adjacency_lib
from accounting import validation
from accounting.accountant_base import ShuffleAccountant
from accounting.blanket_accountant import BlanketAccountant
from accounting.clones_accountant import ClonesAccountant
from accounting.events import MECHANISMS
from accounting.local_accountant import LocalAccountant
from accounting.pld_accountant import PldAccountant
from accounting.rdp_accountants import CheckInRdpAccountant, Theorem3Accountant

ACCOUNTANTS: dict[str, type[ShuffleAccountant]] = {
    cls.name: cls
    for cls in (
        Theorem3Accountant,
        CheckInRdpAccountant,
        PldAccountant,
        ClonesAccountant,
        BlanketAccountant,
        LocalAccountant,
    )
}


def accountants_for(mechanism: str) -> tuple[str, ...]:
    """Returns the names of the accountants that price a mechanism's rounds, its default first.

    Raises:
        ValueError: An unknown mechanism.
    """
    event_type = MECHANISMS[validation.choice("mechanism", mechanism, tuple(MECHANISMS))]
    return tuple(name for name, cls in ACCOUNTANTS.items() if event_type in cls.events)


def check_accountant(name: str, mechanism: str) -> str:
    """Returns `name` if it is an accountant that prices a mechanism's rounds.

    Raises:
        ValueError: An unknown accountant or mechanism, or one that does not price it; names those
            that do.
    """
    validation.choice("accountant", name, tuple(ACCOUNTANTS))
    return validation.choice(
        f"accountant for mechanism {mechanism}", name, accountants_for(mechanism)
    )


def make_accountant(name: str, adjacency: str = "replace") -> ShuffleAccountant:
    """Returns a fresh accountant of the registry.

    Args:
        name: A key of `ACCOUNTANTS`.
        adjacency: "replace" or "zero-out".

    Raises:
        ValueError: An unknown name or adjacency.
    """
    validation.choice("accountant", name, tuple(ACCOUNTANTS))
    return ACCOUNTANTS[name](adjacency_lib.relation_of(adjacency))
