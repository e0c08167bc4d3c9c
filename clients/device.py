"""A device's own ledger: every round that it was offered, by whom, and what all of them cost.

It is a file on the user's side, which neither Flower nor the server can reach. A round is entered,
on disk, before the user's coin: so whatever is restarted, repeated or given another name, one
round gets one coin, and the owner's limits hold for all runs together.
"""

from __future__ import annotations

import sqlite3
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from accounting import PrivacyPlan
from accounting.registry import check_accountant, make_accountant
from accounting.validation import Checked, NotNegative, Positive, Probability, Rate, first_mistake
from shuffler import RoundHeader

_SCHEMA = """
CREATE TABLE IF NOT EXISTS plans(digest TEXT PRIMARY KEY, plan TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rounds(
    run_id TEXT, round INTEGER, plan TEXT NOT NULL REFERENCES plans, commitment TEXT NOT NULL,
    offered TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (run_id, round)
);
"""
_WAIT_SECONDS = 30.0  # for another process that writes


class RoundRefused(ValueError):
    """The announced round is not one this client agrees to; nobody's coin was flipped."""


class DeviceLimits(Checked):
    """What the owner of a device accepts, from all runs together.

    Attributes:
        most_epsilon: ε of all rounds that the device was ever offered stays below.
        delta: δ at which it is read.
        accountant: whose ε; `blanket` rests on nobody but this device and the shuffler.
        adjacency: "replace" or "zero-out".
        least_noise: a plan's noise multiplier z is at least this.
        most_check_in_rate: a plan's check-in rate γ is at most this.
        plans: digests of the plans that are accepted; any within the limits, if there are none.

    Raises:
        ValueError: a value outside its range, in one line.
    """

    most_epsilon: Positive
    delta: Probability
    accountant: str = "blanket"
    adjacency: Literal["replace", "zero-out"] = Field("replace", description="replace or zero-out")
    least_noise: NotNegative = 0.0
    most_check_in_rate: Rate = 1.0
    plans: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        (), strict=False, description="a list of SHA-256 digests, 64 hexadecimal digits each"
    )

    @model_validator(mode="after")
    def _known(self) -> DeviceLimits:
        make_accountant(self.accountant, self.adjacency)
        return self

    def check(self, plan: PrivacyPlan) -> None:
        """Refuses a plan that the owner does not accept.

        Raises:
            RoundRefused: one line that names the limit.
        """
        noise = plan.mechanism.noise_multiplier
        if self.plans and plan.digest() not in self.plans:
            raise RoundRefused(f"the device's owner has not accepted the plan {plan.digest()}")
        if noise < self.least_noise:
            raise RoundRefused(
                f"the device's owner accepts noise multipliers of at least {self.least_noise:g}, "
                f"the plan has {noise:g}"
            )
        if plan.check_in_rate > self.most_check_in_rate:
            raise RoundRefused(
                "the device's owner accepts check-in rates of at most "
                f"{self.most_check_in_rate:g}, the plan has {plan.check_in_rate:g}"
            )
        try:
            check_accountant(self.accountant, plan.event())
        except ValueError as error:
            raise RoundRefused(f"the device's owner counts otherwise: {error}") from None

    def epsilon(self, offered: dict[PrivacyPlan, int]) -> float:
        """ε of so many rounds of each plan together, under the owner's accountant."""
        accountant = make_accountant(self.accountant, self.adjacency)
        for plan, rounds in offered.items():
            accountant.compose(plan.event(), rounds)
        return float(accountant.get_epsilon(self.delta))


@dataclass(frozen=True)
class RunOffered:
    """What a device was offered by one run under one plan.

    Attributes:
        run_id: the run's name.
        plan: its plan.
        rounds: how many of its rounds.
        last: when the last of them was, UTC.
    """

    run_id: str
    plan: PrivacyPlan
    rounds: int
    last: str


class DeviceLedger:
    """The ledger in one file, which may be moved, and used by several processes."""

    def __init__(self, path: Path, limits: DeviceLimits | None = None):
        """Opens the file, or makes it.

        Args:
            path: of the file; its directory exists.
            limits: the owner's; None: none, in simulation only.

        Raises:
            ValueError: the file cannot be used, or is not a device's ledger.
        """
        self.path = path
        self.limits = limits
        try:
            with self._transaction():
                pass
        except sqlite3.Error as error:
            raise ValueError(f"the device's ledger {path} cannot be used: {error}") from None

    def offer(self, header: RoundHeader, plan: PrivacyPlan) -> None:
        """Enters a round, on disk when this returns; then its coins may be flipped.

        Args:
            header: the round, as the shuffler has confirmed it.
            plan: the run's plan, whose digest the header names.

        Raises:
            RoundRefused: the round was offered before, the owner does not accept the plan, the
                owner's budget would be exceeded, or the ledger cannot be written.
        """
        if self.limits is not None:
            self.limits.check(plan)
        about = header.run_id, header.round, header.plan_digest, header.commitment
        try:
            with self._transaction() as rows:
                known = plan.digest(), plan.to_json()
                rows.execute("INSERT OR IGNORE INTO plans VALUES (?, ?)", known)
                rows.execute(
                    "INSERT INTO rounds(run_id, round, plan, commitment) VALUES (?, ?, ?, ?)", about
                )
                if self.limits is not None:
                    self._check_budget(rows, self.limits)
        except sqlite3.IntegrityError:
            raise RoundRefused(
                f"round {header.round} of run {header.run_id} was offered to this device before"
            ) from None
        except sqlite3.Error as error:
            raise RoundRefused(f"the device's ledger cannot be written: {error}") from None

    def offered(self) -> list[RunOffered]:
        """What every run has offered, the latest last."""
        with self._transaction() as rows:
            return _offered(rows)

    def _check_budget(self, rows: sqlite3.Connection, limits: DeviceLimits) -> None:
        try:
            epsilon = limits.epsilon(by_plan(_offered(rows)))
        except ValueError as error:
            raise RoundRefused(f"what the device was offered has no epsilon: {error}") from None
        if not epsilon <= limits.most_epsilon:
            raise RoundRefused(
                f"the device's owner accepts epsilon up to {limits.most_epsilon:g} over all runs, "
                f"with this round it would be {epsilon:.4g}"
            )

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All changes of the block, on disk, or none of them if it fails."""
        connection = sqlite3.connect(self.path, timeout=_WAIT_SECONDS, isolation_level=None)
        with closing(connection):
            connection.execute("PRAGMA synchronous = EXTRA")
            connection.execute("BEGIN IMMEDIATE")
            for statement in _SCHEMA.split(";"):
                connection.execute(statement)
            yield connection
            connection.execute("COMMIT")


def by_plan(offered: list[RunOffered]) -> dict[PrivacyPlan, int]:
    """How many rounds of each plan, whatever the run."""
    rounds: dict[PrivacyPlan, int] = {}
    for run in offered:
        rounds[run.plan] = rounds.get(run.plan, 0) + run.rounds
    return rounds


def load_device(path: Path, create: bool = True) -> DeviceLedger:
    """Opens the ledger that an owner's file names, under the limits in it.

    Args:
        path: a TOML file with the keys of `DeviceLimits`, and `ledger`, the path of the ledger
            relative to this file.
        create: whether a ledger that is missing is made.

    Raises:
        ValueError: one line that says what is wrong.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    ledger = content.pop("ledger", None)
    if not isinstance(ledger, str) or not ledger:
        raise ValueError(f"{path}: ledger must be the path of the device's ledger, got {ledger!r}")
    try:
        limits = DeviceLimits.model_validate(content)
    except ValidationError as error:
        raise ValueError(f"{path}: {first_mistake(error, DeviceLimits)}") from None
    place = path.absolute().parent / ledger
    if not create and not place.exists():
        raise ValueError(f"there is no device's ledger {place}")
    return DeviceLedger(place, limits)


def _offered(rows: sqlite3.Connection) -> list[RunOffered]:
    found = rows.execute(
        "SELECT run_id, plans.plan, count(*), max(offered) FROM rounds JOIN plans"
        " ON rounds.plan = plans.digest GROUP BY run_id, digest ORDER BY max(rounds.rowid)"
    )
    return [
        RunOffered(run_id, PrivacyPlan.from_json(plan), rounds, last)
        for run_id, plan, rounds, last in found
    ]
