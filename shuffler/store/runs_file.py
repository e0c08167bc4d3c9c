"""`runs.db`: which runs and rounds there are, and how far each round is."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from shuffler.store.rounds import Round, RoundState, Run, parse_run
from shuffler.store.storage import (
    DamagedFile,
    connect,
    damage,
    delete_database,
    exists,
    storage_errors,
    transaction,
)
from shuffler.wire.errors import Outcome, ShufflerRefused

_FORMAT = 5  # of all files in the directory; another shuffler's are refused
_SCHEMA = f"""
CREATE TABLE runs(
    run_id TEXT PRIMARY KEY, plan BLOB, report_bytes INTEGER NOT NULL, owner TEXT NOT NULL,
    ended INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE rounds(
    run_id TEXT, round INTEGER, model_digest TEXT NOT NULL, state TEXT NOT NULL, outcome INTEGER,
    public_key BLOB NOT NULL, PRIMARY KEY (run_id, round)
) WITHOUT ROWID;
PRAGMA user_version = {_FORMAT};
"""


_RUNS = TypeAdapter(list[tuple[str, bytes, int, str]], config={"strict": True})
_ROUNDS = TypeAdapter(list[tuple[str, int, str, bytes, str, int | None]], config={"strict": True})


class RunsFile:
    """The file. Every change is on disk when its method returns; a full disk is a refusal.

    Opening and reading it raise `ValueError` where it is damaged, of another format or missing
    beside batches, and `OSError` for whatever may pass. Nothing is then changed.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, or makes it where there are no batches either."""
        self._path = path
        with _damage_explained(path):
            self._connection = _connect(path)
        self.close = self._connection.close

    def read(self) -> dict[str, Run]:
        """All runs that have not ended, with their rounds; no batch is opened."""
        with _damage_explained(self._path):
            ask = self._connection.execute
            (version,) = ask("PRAGMA user_version").fetchone()
            if version == 0:
                raise DamagedFile("it has no format number")
            if version != _FORMAT:
                raise ValueError(
                    f"{self._path} has format {version}, this shuffler reads format"
                    f" {_FORMAT}: use the shuffler that made it, or another directory"
                )
            if (found := ask("PRAGMA integrity_check(1)").fetchone()) != ("ok",):
                raise DamagedFile(str(found[0]))
            runs = ask(
                "SELECT run_id, plan, report_bytes, owner FROM runs WHERE NOT ended"
            ).fetchall()
            rounds = ask(
                "SELECT run_id, round, model_digest, public_key, state, outcome FROM rounds"
            ).fetchall()
            try:
                return _parse(runs, rounds)
            except (ShufflerRefused, ValueError, TypeError, KeyError):
                raise DamagedFile("a row does not parse") from None

    def has_ended(self, run_id: str) -> bool:
        """Whether there was such a run, and it has ended."""
        row = self._connection.execute("SELECT ended FROM runs WHERE run_id = ?", (run_id,))
        return bool(row.fetchone() == (1,))

    def add_run(self, run: Run, plan: bytes) -> None:
        """Enters a new run."""
        about = run.run_id, plan, run.report_bytes, run.owner
        self._write(("INSERT INTO runs VALUES (?, ?, ?, ?, 0)", *about))

    def add_round(self, run: Run, round: Round, forgotten: Sequence[int]) -> None:
        """Enters an open round, and drops some old ones."""
        about = run.run_id, round.number, round.model_digest, round.state, round.public_key
        drop = "DELETE FROM rounds WHERE run_id = ? AND round = ?"
        self._write(
            ("INSERT INTO rounds VALUES (?, ?, ?, ?, NULL, ?)", *about),
            *((drop, run.run_id, old) for old in forgotten),
        )

    def move(self, run: Run, round: Round, state: RoundState) -> None:
        """Brings a round to this state, with its outcome; then the entry in memory too."""
        change = "UPDATE rounds SET state = ?, outcome = ? WHERE run_id = ? AND round = ?"
        self._write((change, state, round.outcome, run.run_id, round.number))
        round.state = state

    def end_run(self, run_id: str) -> None:
        """Drops all of a run but its id."""
        self._write(
            ("DELETE FROM rounds WHERE run_id = ?", run_id),
            ("UPDATE runs SET plan = NULL, ended = 1 WHERE run_id = ?", run_id),
        )

    def _write(self, *changes: tuple[Any, ...]) -> None:
        """All of the statements, each with its values, or none of them."""
        with storage_errors(), transaction(self._connection) as rows:
            for statement, *values in changes:
                rows.execute(statement, values)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turns an error that may pass into one line about this file."""
    try:
        yield
    except DamagedFile:
        raise
    except (sqlite3.Error, OSError, MemoryError) as error:
        raise OSError(
            f"{path} cannot be opened: {str(error) or 'out of memory'}. No batch is given up:"
            " start again when the cause is gone"
        ) from error


@contextmanager
def _damage_explained(path: Path) -> Iterator[None]:
    """Turns damage to `runs.db` into one line that says what to do."""
    try:
        with naming(path), damage():
            yield
    except DamagedFile as error:
        found = "".join(c if c.isprintable() else "?" for c in str(error))
        raise ValueError(
            f"{path} is damaged: {found}. Nothing was changed. To start with an empty"
            f" directory move {path.parent} away: all runs in it are then lost"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """Opens `runs.db`, and makes it in a directory that has none.

    It is made under another name first, so that a crash leaves all of it or nothing: one that is
    empty, or missing beside batches, is damaged.
    """
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


def _parse(runs: list[Any], rounds: list[Any]) -> dict[str, Run]:
    found = {row[0]: parse_run(*row) for row in _RUNS.validate_python(runs)}
    for run_id, number, version, public_key, state, outcome in _ROUNDS.validate_python(rounds):
        result = None if outcome is None else Outcome(outcome)
        round = Round(number, version, public_key, RoundState(state), result)
        found[run_id].rounds[number] = round
    return found
