"""What one round releases, as an event for accountants: who reports, and what a report is.

A user holds a vector and makes a report of it on its own device, by the round's mechanism. A
shuffler hands the reports over in uniformly random order without their senders. The adversary sees
the shuffled reports, and so how many there are. A value outside its range is a ValueError.
"""

import dataclasses
from typing import Any

import attrs
import dp_accounting

from shufl.protocol import validation
from shufl.protocol.mechanisms import Mechanism


def _users(value: Any) -> int:
    return validation.integer("number of users", value, 1)


def _blankets(value: Any) -> float:
    return validation.real("shuffler blankets", value, "[0, inf)")


def _central_noise(value: Any) -> float:
    return validation.real("central noise", value, "[0, inf)")


@dataclasses.dataclass(frozen=True)
class CheckIn:
    """Each user decides by its own coin to report once.

    The coins are independent of each other and of the data, and only the users see them.

    Attributes:
        rate: γ in (0, 1], the chance to report; with 1 every user reports.
    """

    rate: float

    def __post_init__(self) -> None:
        rate = validation.real("check-in rate", self.rate, "(0, 1]")
        object.__setattr__(self, "rate", rate)


@dataclasses.dataclass(frozen=True)
class FixedSize:
    """Exactly m of n users, drawn uniformly without replacement and in secret, report once each.

    Attributes:
        reports: m in 0..n.
    """

    reports: int

    def __post_init__(self) -> None:
        reports = validation.integer("number of reports", self.reports, 0)
        object.__setattr__(self, "reports", reports)


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Each user reports in exactly one of every b rounds, which it draws uniformly and in secret.

    Rounds 1 to b are the first block, the next b the second, and so on. The draws of different
    users and blocks are independent, of each other and of the data. An accountant takes t such
    rounds for the first t of a run.

    Attributes:
        every: b, at least 1; with 1 every user reports in every round.
    """

    every: int

    def __post_init__(self) -> None:
        every = validation.integer("rounds of a block", self.every, 1, 10**9)
        object.__setattr__(self, "every", every)


def _fits(event: "Shuffled", attribute: Any, participation: "Participation") -> None:
    if isinstance(participation, FixedSize):
        validation.integer("number of reports", participation.reports, 0, event.users)


Participation = CheckIn | FixedSize | Allocation


@attrs.frozen
class Shuffled(dp_accounting.DpEvent):
    """One round of shuffled reports.

    With blankets the shuffler adds M ~ Poisson(λ) reports of noise alone before it shuffles, M
    drawn afresh and told to nobody. Accountants other than `blanket` may ignore them: to add
    independent reports and shuffle again is post-processing.

    Attributes:
        users: n, at least 1: all who may report, not those who do.
        participation: Who of them reports.
        mechanism: What makes a report of a user's vector.
        blankets: λ >= 0, the expected number of the shuffler's blankets.
    """

    users: int = attrs.field(converter=_users)
    participation: Participation = attrs.field(validator=_fits)
    mechanism: Mechanism
    blankets: float = attrs.field(default=0.0, converter=_blankets)

    @property
    def chance(self) -> float:
        """The probability that a given user reports."""
        if isinstance(self.participation, FixedSize):
            return self.participation.reports / self.users
        if isinstance(self.participation, Allocation):
            return 1.0 / self.participation.every
        return self.participation.rate

    def composed(self, count: int) -> tuple["Shuffled", int]:
        """Returns what so many of these rounds are for accountants: a round, and how many of it.

        A block of b rounds by `Allocation` is one round in which every user reports, among the
        blankets of all b: docs/theory/blanket.md, section 9. A block that has begun counts whole.
        """
        if not isinstance(self.participation, Allocation):
            return self, count
        every = self.participation.every
        block = attrs.evolve(self, participation=CheckIn(1.0), blankets=every * self.blankets)
        return block, -(-count // every)


@attrs.frozen
class Summed(Shuffled):
    """One round of which the shuffler hands over the sum of all users' vectors, and no report.

    Every user who is present sends, so that nobody sees who checked in: its update if it checked
    in, otherwise zero, and in both cases with its own noise N(0, (zC)²), z of the mechanism. The
    shuffler adds N(0, (σC)²) to the sum, and the server as much again before it uses it.

    Attributes:
        central_noise: σ >= 0.
    """

    central_noise: float = attrs.field(default=0.0, converter=_central_noise)

    def __attrs_post_init__(self) -> None:
        if self.blankets:
            raise ValueError(f"shuffler blankets of a summed round must be 0, got {self.blankets}")
