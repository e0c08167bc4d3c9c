"""A device's own ledger: every round that it was offered, by whom, and what all of them cost.

It is a file on the user's side, which neither Flower nor the server can reach. A round is entered,
on disk, before the user's coin: so whatever is restarted, repeated or given another name, one
round gets one coin, and the owner's limits hold for all runs together.

A server that has seen the releases of one run chooses the plan of the next by them. Bounds for
rounds that are fixed in advance do not hold for that. So each run is charged in full, for all the
rounds that its plan allows, when its first round is offered, and the charges are added up: with
shares δ_k of δ that add up to it, `(Σ ε_k, Σ δ_k)` holds however the next run is chosen
(basic composition is a privacy filter: Rogers, Roth, Ullman and Vadhan 2016, Theorem 5.1).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from shufl import accounting
from shufl.accounting.privacy_plan import PrivacyPlan
from shufl.protocol.mechanisms import new_allocation_key
from shufl.protocol.plan import ON_THEIR_OWN, Plan
from shufl.protocol.plan_fields import AccountantName, Adjacency, CheckInRate
from shufl.protocol.text import rounded_up
from shufl.protocol.validation import Checked, Count, NotNegative, Positive, Probability, read_file
from shufl.shuffler import RoundHeader

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs(
    number INTEGER PRIMARY KEY, run_id TEXT UNIQUE NOT NULL, plan TEXT NOT NULL,
    allotted INTEGER NOT NULL, offered INTEGER NOT NULL, last_round INTEGER NOT NULL,
    latest TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP, checksum TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS rounds(
    run_id TEXT, round INTEGER, commitment TEXT NOT NULL, PRIMARY KEY (run_id, round)
);
CREATE TABLE IF NOT EXISTS allocations(
    run_id TEXT PRIMARY KEY, key BLOB NOT NULL, checksum TEXT NOT NULL
);
"""
_WAIT_SECONDS = 30.0  # for another process that writes


class RoundRefused(ValueError):
    """The announced round is not one this client agrees to; nobody's coin was flipped."""


class DeviceLimits(Checked):
    """What the owner of a device accepts, from all runs together.

    Attributes:
        most_epsilon: the charges of all runs that the device was ever offered add up to no more.
        delta: what the runs' shares of δ add up to.
        accountant: whose ε; `blanket` rests on nobody but this device and the shuffler.
        adjacency: "replace" or "zero-out".
        least_noise: a plan's noise multiplier z is at least this.
        most_check_in_rate: a plan's check-in rate γ is at most this.
        least_work_seconds: a plan's `window.work_until` is at least this. Above 0, a server cannot
            choose a window so short that slow devices report noise alone.
        most_runs: the device takes part in so many runs. Without it, runs whose ε is 0 would make
            its ledger longer, and each offer slower, without end.
        most_rounds: the rounds that all runs together may have are no more.
        plans: digests of the plans that are accepted; any within the limits, if there are none.

    Raises:
        ValueError: a value outside its range, in one line.
    """

    most_epsilon: Positive
    delta: Probability
    accountant: AccountantName = "blanket"
    adjacency: Adjacency = "replace"
    least_noise: NotNegative = 0.0
    most_check_in_rate: CheckInRate = 1.0
    least_work_seconds: NotNegative = 0.0
    most_runs: Count = 100
    most_rounds: Count = 100_000
    plans: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = Field(
        default=(),
        strict=False,
        description="a list of SHA-256 digests, 64 hexadecimal digits each",
    )

    def check(self, plan: PrivacyPlan, runs: Sequence[RunOffered] = ()) -> None:
        """Refuses a plan that the owner does not accept.

        Raises:
            RoundRefused: one line that names the limit, and how the last of the `runs` whose plan
                was accepted differs.
        """
        noise = plan.mechanism.noise_multiplier
        if self.plans and plan.digest() not in self.plans:
            accepted = [run.plan for run in runs if run.plan.digest() in self.plans]
            differs = f" ({plan.differs(accepted[-1], there='before')})" if accepted else ""
            raise RoundRefused(
                f"the device's owner has not accepted the plan {plan.digest()}{differs}; "
                "shufl device accept run.toml shows and accepts it"
            )
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
        work_until = plan.window.work_until if plan.window else 0.0
        if work_until < self.least_work_seconds:
            raise RoundRefused(
                "the device's owner accepts plans that give the work at least "
                f"{self.least_work_seconds:g} s (window.work_until), this one gives {work_until:g}"
            )

    def check_runs(self, runs: list[RunOffered], new: bool) -> None:
        """Refuses runs that are too many, have too many rounds, or cost too much together.

        Their number and their rounds count only where one of them is new.

        Raises:
            RoundRefused: as `charge`; or one line that says what they would be or cost.
        """
        for name, most, count in (
            ("runs", self.most_runs, len(runs)),
            ("rounds over all runs", self.most_rounds, sum(run.allotted for run in runs)),
        ):
            if new and count > most:
                raise RoundRefused(
                    f"the device's owner accepts up to {most} {name}, with this one it would be "
                    f"{count}"
                )
        epsilon = math.fsum(self.charge(run) for run in runs)
        if not epsilon <= self.most_epsilon:
            raise RoundRefused(
                f"the device's owner accepts epsilon up to {self.most_epsilon:g} over all runs, "
                f"with this one it would be {rounded_up(epsilon, 6)}"
            )

    def charge(self, run: RunOffered) -> float:
        """ε of all the rounds that a run may have, at its share of δ: the k-th run has 6δ/(πk)².

        Raises:
            RoundRefused: the owner's accountant has no ε for the run's plan, or counts on users
                whose presence nobody enforces.
        """
        try:
            accounting.check_accountant(self.accountant, run.plan.event())
        except ValueError as error:
            raise RoundRefused(f"the device's owner counts otherwise: {error}") from None
        counts_on_others = accounting.ACCOUNTANTS[self.accountant].counts_on_others
        if counts_on_others and run.plan.accountant in ON_THEIR_OWN:
            raise RoundRefused(
                f"the device's owner counts on other users ({self.accountant}), and nobody "
                f"enforces least_present of a plan with accountant {run.plan.accountant}"
            )
        delta = self.share(run.number)
        return _epsilon(self.accountant, self.adjacency, run.plan, run.allotted, delta)

    def share(self, number: int) -> float:
        """The share of δ that the device's run of this number has, counted from 1."""
        return self.delta * 6.0 / (math.pi * number) ** 2


@functools.lru_cache(maxsize=2**16)  # each offer asks for all runs
def _epsilon(
    accountant: str, adjacency: str, plan: PrivacyPlan, rounds: int, delta: float
) -> float:
    pricing = accounting.make_accountant(accountant, adjacency)
    return float(pricing.epsilon_after(plan.event(), delta, rounds))


@dataclass(frozen=True)
class RunOffered:
    """What a device was offered by one run.

    Attributes:
        number: counts the device's runs, from 1.
        allotted: how many rounds the run may have; it is charged for all of them.
        offered: how many rounds it has offered.
        last_round: the number of the last one.
        latest: when that was offered, UTC.
    """

    number: int
    run_id: str
    plan: PrivacyPlan
    allotted: int
    offered: int = 0
    last_round: int = 0
    latest: str = ""

    def checksum(self, plan: str) -> str:
        """SHA-256 of what the ledger counts on, hexadecimal, with the plan as it is written."""
        about = self.number, self.run_id, plan, self.allotted, self.offered, self.last_round
        return hashlib.sha256(repr(about).encode()).hexdigest()


class SimulatedLedger:
    """The ledger of a simulated device, in one file, which several processes may use.

    It forgets no round while the machine runs. Nobody limits it, and nothing waits for the disk.
    """

    _is_owned = False

    def __init__(self, path: Path, create: bool = True):
        """Opens the file, whose directory exists; `create` says whether a missing one is made.

        Raises:
            ValueError: the file cannot be used, or is lost, or is not a device's ledger.
        """
        self.path = path
        begun = _begun(path)
        try:
            if create and not begun.exists():
                os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
                with self._rows("rw") as rows:
                    rows.executescript(_SCHEMA)
                if self._is_owned:
                    begun.touch(0o600)
            if begun.exists() and (not path.exists() or not path.stat().st_size):
                raise ValueError(
                    f"the device's ledger {path} is lost, and with it what its users were charged; "
                    f"whoever has set that right (docs/recovery.md) removes {begun}"
                )
            if create:  # undoes what a process that was killed has left, which no reader may do
                with self._rows("rw") as rows:
                    rows.execute("SELECT * FROM runs")
            self.offered()
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None

    def offer(self, header: RoundHeader, plan: PrivacyPlan, rounds: int) -> None:
        """Enters a round, on disk when this returns; then its coins may be flipped.

        The header is that of the round as the shuffler has confirmed it, and names the digest of
        `plan`.

        Args:
            rounds: how many rounds the run may have; the number given with its first round counts.

        Raises:
            RoundRefused: the round, or a later one, was offered before, the run has another plan or
                no round left, or the owner's limits do not allow it.
            ValueError: the ledger cannot be used.
        """
        with self._rows("rw") as rows:
            rows.execute("BEGIN IMMEDIATE")
            run = self._accepted(_read(rows), header.run_id, plan, rounds)
            if header.plan_digest != plan.digest():
                raise RoundRefused(f"run {run.run_id} was offered under another plan")
            if header.round <= run.last_round:
                raise RoundRefused(
                    f"round must be above {run.last_round}, the last that run {run.run_id} offered "
                    f"to this device, got {header.round}"
                )
            if header.round > run.allotted:
                raise RoundRefused(f"run {run.run_id} has had its {run.allotted} rounds")
            if plan.participation == "allocation":
                if not run.offered:
                    key = new_allocation_key()
                    values = run.run_id, key, _checksum_of_key(run.run_id, key)
                    rows.execute("INSERT INTO allocations VALUES (?, ?, ?)", values)
                self._allocation_key(rows, run.run_id)
            run = dataclasses.replace(run, offered=run.offered + 1, last_round=header.round)
            text = plan.to_json()
            rows.execute(
                "INSERT OR REPLACE INTO runs"
                "(number, run_id, plan, allotted, offered, last_round, checksum) VALUES"
                " (:number, :run_id, :plan, :allotted, :offered, :last_round, :checksum)",
                vars(run) | {"plan": text, "checksum": run.checksum(text)},
            )
            rows.execute(
                "INSERT INTO rounds VALUES (?, ?, ?)", (run.run_id, header.round, header.commitment)
            )
            rows.execute("COMMIT")

    def check(self, run_id: str, plan: PrivacyPlan, rounds: int) -> None:
        """Refuses a run if none of its rounds would be accepted; enters nothing.

        Raises:
            RoundRefused, ValueError: as `offer`.
        """
        self._accepted(self.offered(), run_id, plan, rounds)

    def _accepted(
        self, runs: list[RunOffered], run_id: str, plan: PrivacyPlan, rounds: int
    ) -> RunOffered:
        """The run, known or new, if the owner accepts it.

        Raises:
            RoundRefused: it has another plan, or the owner's limits do not allow it.
        """
        known = {run.run_id: run for run in runs}
        new = RunOffered(len(runs) + 1, run_id, plan, rounds)
        run = known.setdefault(run_id, new)
        if run.plan != plan:
            differs = plan.differs(run.plan, there="then")
            raise RoundRefused(f"run {run_id} was offered under another plan ({differs})")
        self._ask_owner(plan, list(known.values()), new=run is new)
        return run

    def _ask_owner(self, plan: PrivacyPlan, runs: list[RunOffered], new: bool) -> None:
        """Asks the device's owner whether to accept a plan and all runs; a simulation has none."""

    def offered(self) -> list[RunOffered]:
        """What every run has offered, the first run first.

        Raises:
            ValueError: the ledger cannot be read, or is damaged.
        """
        with self._rows("ro") as rows:
            return _read(rows)

    def commitments(self) -> list[tuple[str, int, str]]:
        """Run, number and commitment of every round that was offered.

        Raises:
            ValueError: the ledger cannot be read.
        """
        with self._rows("ro") as rows:
            return rows.execute("SELECT run_id, round, commitment FROM rounds").fetchall()

    def allocation_key(self, run_id: str) -> bytes:
        """Returns the secret from which follows in which rounds of a run the device's users report.

        It was drawn, and was on disk, before the run's first round: `allocated` makes the draws.

        Raises:
            ValueError: the ledger cannot be read, or has none for this run.
        """
        with self._rows("ro") as rows:
            return self._allocation_key(rows, run_id)

    def _allocation_key(self, rows: sqlite3.Connection, run_id: str) -> bytes:
        found = rows.execute("SELECT key, checksum FROM allocations WHERE run_id = ?", (run_id,))
        for key, checksum in found.fetchall():
            if checksum == _checksum_of_key(run_id, key):
                return bytes(key)
        raise ValueError(f"{self.path}: the draws of run {run_id} are missing or damaged")

    @contextmanager
    def _rows(self, mode: Literal["ro", "rw"]) -> Iterator[sqlite3.Connection]:
        """The file, for reading or writing; what is not committed is not there."""
        try:
            with closing(
                sqlite3.connect(
                    f"{self.path.absolute().as_uri()}?mode={mode}",
                    uri=True,
                    timeout=_WAIT_SECONDS,
                    isolation_level=None,
                )
            ) as connection:
                level = "EXTRA" if self._is_owned else "OFF"
                connection.execute(f"PRAGMA synchronous = {level}")
                yield connection
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise ValueError(f"the device's ledger {self.path} cannot be used: {error}") from None


class DeviceLedger(SimulatedLedger):
    """The ledger of a real device: rounds are on disk before a coin, and its owner limits them.

    Its file is made once: a second file, `.begun`, then says so, since a lost ledger that began
    again would forget what it charged.
    """

    _is_owned = True

    def __init__(self, path: Path, limits: DeviceLimits, create: bool = True):
        """Opens the file under an owner's limits, as `SimulatedLedger` does."""
        self.limits = limits
        super().__init__(path, create)

    def _ask_owner(self, plan: PrivacyPlan, runs: list[RunOffered], new: bool) -> None:
        self.limits.check(plan, runs)
        self.limits.check_runs(runs, new)


def _checksum_of_key(run_id: str, key: bytes) -> str:
    return hashlib.sha256(repr((run_id, key)).encode()).hexdigest()


def _begun(path: Path) -> Path:
    return path.with_name(f"{path.name}.begun")


def runs_of(path: Path, limits: DeviceLimits) -> list[RunOffered]:
    """The runs that a ledger has, or none where it has not been begun.

    Raises:
        ValueError: as for `DeviceLedger`.
    """
    there = path.exists() or _begun(path).exists()
    return DeviceLedger(path, limits, create=False).offered() if there else []


def load_device(path: Path, create: bool = True) -> DeviceLedger:
    """Opens the ledger that an owner's file names, under the limits in it.

    The TOML file has the keys of `DeviceLimits`, and `ledger`, the path of the ledger relative to
    this file. `create` says whether a ledger that is missing is made.

    Raises:
        ValueError: one line that says what is wrong.
    """
    ledger, limits = read_device(path)
    return DeviceLedger(ledger, limits, create)


def read_device(path: Path) -> tuple[Path, DeviceLimits]:
    """The ledger's path and the limits that an owner's file has, as for `load_device`.

    Raises:
        ValueError: one line that says what is wrong.
    """
    content = read_file(path)
    ledger = content.pop("ledger", None)
    if not isinstance(ledger, str) or not ledger or "\0" in ledger:
        raise ValueError(f"{path}: ledger must be the path of the device's ledger, got {ledger!r}")
    return path.absolute().parent / ledger, DeviceLimits.checked(path, content)


def _read(rows: sqlite3.Connection) -> list[RunOffered]:
    """All runs, in order.

    Raises:
        ValueError: they are not what was written.
    """
    (sound,) = rows.execute("PRAGMA integrity_check(runs)").fetchone()  # not of all the rounds
    found = rows.execute(
        "SELECT number, run_id, plan, allotted, offered, last_round, latest, checksum FROM runs"
        " ORDER BY number"
    ).fetchall()
    runs: list[RunOffered] = []
    for number, run_id, text, allotted, offered, last_round, latest, checksum in found:
        # It was priced when it was offered: to do so again would import the accountants.
        plan = PrivacyPlan.model_construct(**dict(Plan.from_json(text)))
        run = RunOffered(number, run_id, plan, allotted, offered, last_round, latest)
        runs.append(run)
        if number != len(runs) or run.checksum(text) != checksum:
            sound = f"what is said of run {len(runs)} is not what was written"
    if sound != "ok":
        raise ValueError(f"the device's ledger is damaged: {sound}")
    return runs
