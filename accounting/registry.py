"""The accountants by name, as the configuration and the tables know them.

To add one: subclass `ShuffleAccountant` in its own module, set `name` and `covers`, list it here.
"""

from accounting import adjacency as adjacency_lib
from accounting import validation
from accounting.accountant_base import ShuffleAccountant
from accounting.clones_accountant import ClonesAccountant
from accounting.local_accountant import LocalAccountant
from accounting.rdp_accountants import CheckInRdpAccountant, Theorem3Accountant

ACCOUNTANTS: dict[str, type[ShuffleAccountant]] = {
    cls.name: cls
    for cls in (
        Theorem3Accountant,
        CheckInRdpAccountant,
        ClonesAccountant,
        LocalAccountant,
    )
}


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
