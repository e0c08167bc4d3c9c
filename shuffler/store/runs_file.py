"""`runs.db`: which runs and rounds there are, and how far each round is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from accounting.mechanisms import GaussianMechanism
from shuffler.store.spool import RoundSpool
from shuffler.store.storage import (
    DamagedFile,
    connect,
    damage,
    delete_database,
    exists,
    storage_errors,
    transaction,
)
from shuffler.wire.channel import MAX_REPORT_BYTES
from shuffler.wire.errors import Outcome, Refusal, ShufflerRefused

__all__ = ["Round", "RoundState", "Run", "RunsFile", "naming", "parse_run"]

_T = TypeVar("_T")

_MAX_BLANKETS = 1e7  # in expectation
_MAX_NUMBER = 1e100  # of a plan: so that products of two are finite
_MAX_PLAN_BYTES = 2**20
_FORMAT = 3  # of all files in the directory; another shuffler's are refused
_SCHEMA = f"""
CREATE TABLE runs(
    run_id TEXT PRIMARY KEY, plan BLOB, report_bytes INTEGER NOT NULL, ended INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE rounds(
    run_id TEXT, round INTEGER, model_version TEXT NOT NULL, state TEXT NOT NULL, outcome INTEGER,
    public_key BLOB NOT NULL, PRIMARY KEY (run_id, round)
) WITHOUT ROWID;
PRAGMA user_version = {_FORMAT};
"""


class RoundState(StrEnum):
    """How far a round is."""

    OPEN = "open"
    CLOSED = "closed"
    RELEASING = "releasing"
    DONE = "done"


@dataclasses.dataclass(slots=True)
class Round:
    """A round of a run.

    Attributes:
        number: from 1.
        model_version: of the model that it is about.
        public_key: the server's, to which its reports are sealed.
        state: how far it is.
        outcome: of closing; None before, and for a lost batch.
        spool: its batch; None when it is gone, or not opened yet.
    """

    number: int
    model_version: str
    public_key: bytes
    state: RoundState
    outcome: Outcome | None
    spool: RoundSpool | None


@dataclasses.dataclass(slots=True)
class Run:
    """A run that has not ended.

    Attributes:
        digest: of its plan.
        users, minimum_batch: as in its plan.
        blankets: how many of them a round gets in expectation.
        mechanism: what makes a blanket; None without blankets.
        report_bytes: length of every sealed report.
        rounds: by number; old ones are forgotten.
    """

    digest: str
    users: int
    minimum_batch: int
    blankets: float
    mechanism: GaussianMechanism | None
    report_bytes: int
    rounds: dict[int, Round] = dataclasses.field(default_factory=dict)

    def open_round(self) -> Round | None:
        """The one round that takes reports, if any does."""
        return next((r for r in self.rounds.values() if r.state is RoundState.OPEN), None)


class RunsFile:
    """The file. Every change is on disk when its method returns.

    Methods that change it raise `ShufflerRefused` for a full or failing disk.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it where there are no batches either.

        Raises:
            DamagedFile: if it is no database, or missing beside batches.
            OSError: if it can not be opened or made.
        """
        self._path = path
        with naming(path):
            self._connection = _connect(path)

    def close(self) -> None:
        """Closes it."""
        self._connection.close()

    def read(self) -> dict[str, Run]:
        """All runs that have not ended, with their rounds; no batch is opened.

        Raises:
            ValueError: if the file is of another format.
            DamagedFile: if it is damaged.
        """
        with naming(self._path), damage():
            return self._read()

    def _read(self) -> dict[str, Run]:
        (version,) = self._connection.execute("PRAGMA user_version").fetchone()
        if version == 0:
            raise DamagedFile("it has no format number")
        if version != _FORMAT:
            raise ValueError(
                f"{self._path} has format {version}, this shuffler reads format"
                f" {_FORMAT}: use the shuffler that made it, or another directory"
            )
        if (found := self._connection.execute("PRAGMA integrity_check(1)").fetchone()) != ("ok",):
            raise DamagedFile(str(found[0]))
        runs = self._connection.execute(
            "SELECT run_id, plan, report_bytes FROM runs WHERE NOT ended"
        ).fetchall()
        rounds = self._connection.execute(
            "SELECT run_id, round, model_version, state, outcome, public_key FROM rounds"
        ).fetchall()
        found_runs: dict[str, Run] = {}
        try:
            for run_id, plan, report_bytes in runs:
                found_runs[_typed(run_id, str)] = parse_run(
                    _typed(plan, bytes), _typed(report_bytes, int)
                )
            for run_id, number, model_version, state, outcome, public_key in rounds:
                found_runs[run_id].rounds[number] = Round(
                    _typed(number, int),
                    _typed(model_version, str),
                    _typed(public_key, bytes),
                    RoundState(state),
                    None if outcome is None else Outcome(outcome),
                    None,
                )
        except (ShufflerRefused, ValueError, TypeError, KeyError):
            raise DamagedFile("a row does not parse") from None
        return found_runs

    def has_ended(self, run_id: str) -> bool:
        """Whether there was such a run, and it has ended."""
        row = self._connection.execute("SELECT ended FROM runs WHERE run_id = ?", (run_id,))
        return bool(row.fetchone() == (1,))

    def add_run(self, run_id: str, plan: bytes, report_bytes: int) -> None:
        """Enters a new run."""
        with self._durably() as rows:
            rows.execute("INSERT INTO runs VALUES (?, ?, ?, 0)", (run_id, plan, report_bytes))

    def add_round(self, run_id: str, round: Round, forgotten: Sequence[int]) -> None:
        """Enters an open round, and drops some old ones."""
        with self._durably() as rows:
            rows.execute(
                "INSERT INTO rounds VALUES (?, ?, ?, ?, NULL, ?)",
                (run_id, round.number, round.model_version, round.state, round.public_key),
            )
            rows.executemany(
                "DELETE FROM rounds WHERE run_id = ? AND round = ?",
                [(run_id, old) for old in forgotten],
            )

    def move(self, run_id: str, round: Round, state: RoundState) -> None:
        """Brings a round to this state, with its outcome; then the entry in memory too."""
        with self._durably() as rows:
            rows.execute(
                "UPDATE rounds SET state = ?, outcome = ? WHERE run_id = ? AND round = ?",
                (state, round.outcome, run_id, round.number),
            )
        round.state = state

    def end_run(self, run_id: str) -> None:
        """Drops all of a run but its id."""
        with self._durably() as rows:
            rows.execute("DELETE FROM rounds WHERE run_id = ?", (run_id,))
            rows.execute("UPDATE runs SET plan = NULL, ended = 1 WHERE run_id = ?", (run_id,))

    @contextmanager
    def _durably(self) -> Iterator[sqlite3.Connection]:
        """A transaction on runs.db; a full or failing disk becomes a refusal."""
        with storage_errors(), transaction(self._connection) as rows:
            yield rows


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns an error that may pass into one line about this file."""
    try:
        yield
    except DamagedFile:
        raise
    except (sqlite3.Error, OSError, MemoryError) as error:
        raise OSError(
            f"{path} can not be opened: {str(error) or 'out of memory'}. No batch is given up:"
            " start again when the cause is gone"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Opens `runs.db`, and makes it in a directory that has none.

    It is made under another name first, so that a crash leaves all of it or nothing: one that is
    empty, or missing beside batches, is damaged.
    """
    with damage():
        if not exists(path):
            if any(path.parent.glob("batch-*")):
                raise DamagedFile("it is missing, and there are batches")
            new = path.with_suffix(".new")
            delete_database(new)
            with closing(connect(new)) as connection, transaction(connection) as rows:
                for statement in _SCHEMA.split(";"):
                    rows.execute(statement)
            new.rename(path)
            delete_database(new)
        return connect(path)


def _typed(value: Any, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise TypeError
    return value


def parse_run(plan: bytes, report_bytes: int) -> Run:
    """The run that a plan describes."""
    if not 1 <= report_bytes <= MAX_REPORT_BYTES:
        _refuse(
            Refusal.MALFORMED,
            f"report_bytes must lie in [1, {MAX_REPORT_BYTES}], got {report_bytes}",
        )
    if len(plan) > _MAX_PLAN_BYTES:
        _refuse(Refusal.MALFORMED, f"a plan has at most {_MAX_PLAN_BYTES} bytes")
    try:
        fields = json.loads(plan)
    except (ValueError, RecursionError):
        _refuse(Refusal.MALFORMED, "the plan is not JSON")
    if not isinstance(fields, dict):
        _refuse(Refusal.MALFORMED, "the plan is not a JSON object")
    users, minimum = fields.get("users"), fields.get("minimum_batch")
    if type(users) is not int or type(minimum) is not int or not 1 <= minimum <= users:
        _refuse(
            Refusal.MALFORMED,
            f"the plan needs integers users >= minimum_batch >= 1, got {users!r} and {minimum!r}",
        )
    blankets, mechanism = _blankets(fields)
    digest = hashlib.sha256(plan).hexdigest()
    return Run(digest, users, minimum, blankets, mechanism, report_bytes)


def _blankets(fields: dict[str, Any]) -> tuple[float, GaussianMechanism | None]:
    """How many blankets a round of a plan gets in expectation, and what makes them."""

    def number(name: str, most: float) -> float:
        value: Any = fields.get(name)
        if type(value) not in (int, float) or not 0 < value <= most:
            _refuse(Refusal.MALFORMED, f"the plan's {name} must lie in (0, {most:g}]")
        return float(value)

    if fields.get("shuffler_blankets", 0) == 0:
        return 0.0, None
    expected = number("shuffler_blankets", _MAX_BLANKETS)
    mechanism = GaussianMechanism(
        number("clip_norm", _MAX_NUMBER), number("noise_multiplier", _MAX_NUMBER)
    )
    if not mechanism.unit > 0:
        _refuse(Refusal.MALFORMED, "the plan's clip_norm is too small for blankets")
    return expected, mechanism


def _refuse(reason: Refusal, detail: str) -> NoReturn:
    raise ShufflerRefused(reason, detail)
