"""The accountants by name, as the configuration and the tables know them.

To add one: subclass `ShuffleAccountant` in its own module; set `name` and `holds_for`, and
`round_kinds`, `participations` and `mechanisms` where the defaults do not fit; say in the section
*Guarantee* of its docstring what its ε holds for; list it here, and its name in
`protocol.plan_fields.AccountantName`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping

from shufl.accounting.accountants.base import ShuffleAccountant, relation_of
from shufl.protocol import validation
from shufl.protocol.events import Allocation, Shuffled, Summed

CLASSES: dict[str, str | type[ShuffleAccountant]] = {
    "theorem3": "renyi:Theorem3Accountant",
    "rdp": "renyi:CheckInRdpAccountant",
    "pld": "pld:PldAccountant",
    "blanket": "blanket:BlanketAccountant",
    "crowd": "crowd:CrowdAccountant",
    "sum-distributed": "sums:SumDistributedAccountant",
    "sum-central": "sums:SumCentralAccountant",
    "local": "local:LocalAccountant",
}
"""Where each accountant is, as `module:class` of `accounting.accountants`; or the class itself."""


class _Accountants(Mapping[str, type[ShuffleAccountant]]):
    """Imports the module of a class when the class is first asked for: each takes its time."""

    def __getitem__(self, name: str) -> type[ShuffleAccountant]:
        found = CLASSES[name]
        if isinstance(found, str):
            found = pkgutil.resolve_name(f"shufl.accounting.accountants.{found}")
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(CLASSES)

    def __len__(self) -> int:
        return len(CLASSES)


ACCOUNTANTS: Mapping[str, type[ShuffleAccountant]] = _Accountants()
"""The classes of all accountants by name; a class is imported when it is first looked up."""


def accountants_for(event: Shuffled) -> tuple[str, ...]:
    """Returns which accountants price a round.

    Args:
        event: What the round releases.

    Returns:
        Their names, in the order of the registry.
    """
    return tuple(name for name, cls in ACCOUNTANTS.items() if cls().supports(event))


def accountants_of_kind(event: Shuffled) -> dict[str, type[ShuffleAccountant]]:
    """Returns the accountants of rounds of reports, or of sums, whichever `event` is.

    An accountant among them may still not price the event itself.

    Args:
        event: What a round releases.

    Returns:
        The classes by name.
    """
    return {name: cls for name, cls in ACCOUNTANTS.items() if type(event) in cls.round_kinds}


def check_accountant(name: str, event: Shuffled) -> str:
    """Returns `name` if it is an accountant that prices an event.

    Raises:
        ValueError: The accountant is unknown, or does not price the event; the message names those
            that do.
    """
    if make_accountant(name).supports(event):
        return name
    if isinstance(event, Summed):
        return validation.choice("accountant of sums", name, accountants_for(event))
    blankets = "with" if event.blankets else "without"
    by = " by allocation" if isinstance(event.participation, Allocation) else ""
    rounds = f"accountant of {event.mechanism.name} rounds{by} {blankets} shuffler blankets"
    return validation.choice(rounds, name, accountants_for(event))


def make_accountant(name: str, adjacency: str = "replace") -> ShuffleAccountant:
    """Returns a fresh accountant of the registry.

    Args:
        name: Its name, such as "blanket".
        adjacency: What neighbouring datasets are: "replace" (one user's record is any other one) or
            "zero-out" (one user's report is that of the zero vector).

    Returns:
        The accountant, which has composed nothing yet.

    Raises:
        ValueError: The name or the adjacency is unknown.
    """
    validation.choice("accountant", name, tuple(ACCOUNTANTS))
    return ACCOUNTANTS[name](relation_of(adjacency))
