"""What one round releases, as an event for accountants: who reports, and what a report is.

A user holds a vector and makes a report of it on its own device, by the round's mechanism. A
shuffler hands the reports over in uniformly random order without their senders. The adversary sees
the shuffled reports, and so their number. A value outside its range is a ConfigError.
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
        rate: γ in (0, 1], the probability that a user reports; with 1 every user reports.

    Raises:
        ConfigError: The rate is outside (0, 1].
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

    Raises:
        ConfigError: `reports` is no whole number, or below 0; above n, the `Shuffled` raises it.
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
        every: b, from 1 to 10^9; with 1 every user reports in every round.

    Raises:
        ConfigError: `every` is outside its range.
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

    With blankets the shuffler adds M ~ Poisson(λ) reports of noise alone before it shuffles. It
    draws M for each round and tells nobody. Accountants other than `blanket` may ignore blankets,
    since adding independent reports and shuffling again is post-processing.

    Attributes:
        users: n, at least 1: all who may report, not those who do.
        participation: Who of them reports.
        mechanism: What makes a report of a user's vector, such as `GaussianMechanism`.
        blankets: λ >= 0, the expected number of the shuffler's blankets.

    Raises:
        ConfigError: A value is outside its range.
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
        """Returns the round that accountants price in the place of this one, and how many of it.

        With `Allocation` a block of b rounds is one round in which every user reports, among the
        blankets of all b rounds: docs/theory/blanket.md, section 9. A block that has begun counts
        whole. Otherwise it is the same round, `count` times.

        Args:
            count: How many rounds.
        """
        if not isinstance(self.participation, Allocation):
            return self, count
        every = self.participation.every
        block = attrs.evolve(self, participation=CheckIn(1.0), blankets=every * self.blankets)
        return block, -(-count // every)


@attrs.frozen
class Summed(Shuffled):
    """One round in which the shuffler hands over the sum of all users' vectors, and no report.

    Every user who is present sends, so that nobody sees who checked in: its update if it checked
    in, otherwise zero, and in both cases with its own noise N(0, (zC)²), z of the mechanism. The
    shuffler adds noise N(0, (σC)²) to the sum. The server adds the same amount again before it uses
    the sum.

    Attributes:
        central_noise: σ >= 0, in clip norms C.

    Raises:
        ConfigError: A value is outside its range.
        ValueError: The round has blankets.
    """

    central_noise: float = attrs.field(default=0.0, converter=_central_noise)

    def __attrs_post_init__(self) -> None:
        if self.blankets:
            raise ValueError(f"shuffler blankets of a summed round must be 0, got {self.blankets}")
