"""`runs.db`: which runs and rounds there are, and how far each round is."""

from __future__ import annotations

import dataclasses
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from shufl.shuffler.record import START, entry_hash, make_entry
from shufl.shuffler.store.checks import Anchor
from shufl.shuffler.store.rounds import Round, RoundState, Run, parse_run
from shufl.shuffler.store.storage import (
    DamagedFile,
    check_schema,
    connect,
    damage,
    delete_database,
    exists,
    storage_errors,
    transaction,
)
from shufl.shuffler.wire.errors import Outcome, ShufflerRefused

_log = logging.getLogger("shufl.shuffler")

_SCHEMA = """
CREATE TABLE runs(
    run_id TEXT PRIMARY KEY, plan BLOB, report_bytes INTEGER NOT NULL, owner TEXT NOT NULL,
    last_round INTEGER NOT NULL, ended INTEGER NOT NULL, checksum BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE rounds(
    run_id TEXT, round INTEGER, model_digest TEXT NOT NULL, state TEXT NOT NULL, outcome INTEGER,
    public_key BLOB NOT NULL, checksum BLOB NOT NULL, PRIMARY KEY (run_id, round)
) WITHOUT ROWID;
CREATE TABLE record(number INTEGER PRIMARY KEY, entry TEXT NOT NULL);
CREATE TABLE directory(
    generation INTEGER NOT NULL, lost INTEGER NOT NULL, entries INTEGER NOT NULL,
    head TEXT NOT NULL, anchor BLOB NOT NULL, checksum BLOB NOT NULL
)
"""
_PUT_RUN = "INSERT OR REPLACE INTO runs VALUES (?, ?, ?, ?, ?, ?, ?)"
# As bytes: a damaged text may be none.
_DROP_RUN = "DELETE FROM runs WHERE CAST(run_id AS BLOB) IS CAST(? AS BLOB)"
_DROP_ROUND = (
    "DELETE FROM rounds WHERE CAST(run_id AS BLOB) IS CAST(?1 AS BLOB)"
    " AND CAST(round AS BLOB) IS CAST(?2 AS BLOB)"
)
_ASIDE = "runs.damaged"
_Row = tuple[Any, ...]
_Change = tuple[Any, ...]  # a statement, and its values


class RunsFile:
    """The file. Every change is on disk when its method returns; a full disk is a refusal.

    Every row has a checksum. A row that is not what was written is lost, and a file that cannot be
    read at all is put aside and begun anew; what it said is then lost.

    Attributes:
        lost: whether some run is not known any more, since the directory was made.
        checks: those of everything in the directory.
        found: all runs that had not ended when it was opened, with their rounds.
        head: how many entries the record has, and the hash of the last.
    """

    def __init__(self, directory: Path, anchor: Path) -> None:
        """Opens the file, or makes it.

        `anchor` is the file that says how old the directory may be. It is made if both are missing.

        Raises:
            ValueError: directory and anchor are not those that were last used together, one of
                the two is missing, or the format is another.
            OSError: for whatever may pass.
        """
        self._path = directory / "runs.db"
        known = _read_anchor(self._path, anchor)
        self._anchor, self._generation = known or Anchor.create(anchor), 0
        self.checks, self._checks = self._anchor.checks, self._anchor.checks.of_place("runs")
        self.lost, self.head = False, (0, START)
        self.found: dict[str, Run] = {}
        self._connection: sqlite3.Connection | None = None
        self._unanswered: tuple[str, int, str] | None = None
        if known is None or not (exists(self._path) or _batches(directory)):
            self._refuse_empty_directory()
            self._begin_anew()
            return
        try:
            with naming(self._path), damage():
                self._open()
                self._read()
        except DamagedFile as error:
            found = "".join(c if c.isprintable() else "?" for c in str(error))
            _log.error("runs.db is damaged and put aside, all runs are lost: %s", found)
            self.close()
            self.found = {}
            self._begin_anew()

    def close(self) -> None:
        """Closes the file; may be repeated."""
        if self._connection is not None:
            self._connection.close()

    def _open(self) -> None:
        if not exists(self._path):
            raise DamagedFile("it is missing")
        self._connection = connect(self._path)
        try:
            self._connection.text_factory = _text
            check_schema(self._connection, *_SCHEMA.split(";"))
            if (found := self._ask("PRAGMA integrity_check(1)")[0]) != ("ok",):
                raise DamagedFile(str(found[0]))
            rows = self._ask("SELECT * FROM directory")
            # An anchor that was never advanced is in the place of a damaged one: all is lost.
            if len(rows) == 1 and self._anchor.generation and self._anchor.is_another(rows[0][-2]):
                raise ValueError(
                    f"{self._anchor.path} belongs to another directory than {self._path.parent}:"
                    f" name the right one, or {self._how_to_begin_anew}"
                )
            if len(rows) != 1 or not self._is_good("directory", rows[0]):
                raise DamagedFile("its generation is not what was written")
            self._generation, lost, *head = rows[0][:4]
            self.lost, self.head = bool(lost), (head[0], head[1])
            # The directory is one change ahead after a crash between the two.
            if self._generation - self._anchor.generation not in (0, 1):
                ahead = self._generation > self._anchor.generation
                older = self._anchor.path if ahead else self._path.parent
                raise ValueError(
                    f"{older} is older than it was, perhaps a restored backup: {self._path.parent}"
                    f" is at change {self._generation}, {self._anchor.path} at"
                    f" {self._anchor.generation}. Rounds could be released a second time: put back"
                    f" what belongs together, or {self._how_to_begin_anew}"
                )
            self._anchor.advance(self._generation)
        except BaseException:
            self._connection.close()
            raise

    @property
    def _how_to_begin_anew(self) -> str:
        return f"begin without any run: with an empty directory, and {self._anchor.path} moved away"

    def _refuse_empty_directory(self) -> None:
        """Refuses one whose anchor, elsewhere, says that it was not empty."""
        elsewhere = self._anchor.path.parent.resolve() != self._path.parent.resolve()
        if elsewhere and self._anchor.generation and not exists(self._path.parent / _ASIDE):
            raise ValueError(
                f"{self._path.parent} has no runs, and {self._anchor.path} says that it had some:"
                f" put them back (is a disk not mounted?), or {self._how_to_begin_anew}"
            )

    def _begin_anew(self) -> None:
        """Makes an empty file; one that is there, or batches, mean that runs are lost.

        It is made under another name first, so that a crash leaves all of it or nothing.
        """
        directory = self._path.parent
        new, aside = directory / "runs.new", directory / _ASIDE
        existing = exists(self._path)
        delete_database(new)
        lost = existing or _batches(directory) or self._anchor.generation > 0
        first = (self._anchor.generation + 1, int(lost), 0, START, self._anchor.name)
        with closing(connect(new)) as connection, transaction(connection) as rows:
            for statement in _SCHEMA.split(";"):
                rows.execute(statement)
            checked = (*first, self._checks.make("directory", first))
            rows.execute("INSERT INTO directory VALUES (?, ?, ?, ?, ?, ?)", checked)
        if existing:
            delete_database(aside)
            self._path.rename(aside)
        delete_database(self._path)
        new.rename(self._path)
        delete_database(new)
        self._open()

    def _read(self) -> None:
        """Reads runs and rounds.

        A round whose row is damaged is there, and lost. A run whose row is damaged is not there.
        """
        bad: list[_Change] = []
        found = self.found
        last: dict[str, int] = {}
        for row in self._ask("SELECT * FROM runs"):
            run_id, plan, report_bytes, owner, last_round, ended, _ = row
            try:
                good = self._is_good("run", row)
                if good and not ended:
                    found[run_id] = parse_run(run_id, plan, report_bytes, owner)
                    last[run_id] = last_round
            except (ShufflerRefused, ValueError, TypeError):
                good = False
            if not good:
                self.lost = True
                bad.append((_DROP_RUN, run_id))
        for row in self._ask("SELECT * FROM rounds"):
            run_id, number, digest, state, outcome, public_key, _ = row
            if run_id not in found or not self._is_good("round", row):
                bad.append((_DROP_ROUND, run_id, number))
                self.lost = self.lost or run_id not in found
                if run_id in found and isinstance(number, int) and 0 <= number <= last[run_id]:
                    found[run_id].rounds[number] = _lost_round(number)
                continue
            result = None if outcome is None else Outcome(outcome)
            round = Round(number, digest, public_key, RoundState(state), result)
            found[run_id].rounds[number] = round
        for run_id, run in found.items():
            if last[run_id] >= 0:
                run.rounds.setdefault(last[run_id], _lost_round(last[run_id]))
        if bad:
            self._repair(bad)

    def _repair(self, bad: list[_Change]) -> None:
        """Drops the damaged rows, and enters what is known of the rounds that they were."""
        _log.error("rows of runs.db are damaged: what they were of is lost")
        lost = [
            self._insert_round(run, round)
            for run in self.found.values()
            for round in run.rounds.values()
            if round.state is RoundState.DONE and round.outcome is None
        ]
        with suppress(ShufflerRefused):  # what cannot be written now, the next start finds again
            self._write(*bad, *lost)

    def has_ended(self, run_id: str) -> bool:
        """Whether there was such a run, and it has ended."""
        return self._ask("SELECT ended FROM runs WHERE run_id = ?", run_id) == [(1,)]

    def record(self, first: int, count: int) -> list[str]:
        """So many entries of the public record, from this one on."""
        query = "SELECT entry FROM record WHERE number >= ? ORDER BY number LIMIT ?"
        return [entry for (entry,) in self._ask(query, first, count)]

    def add_run(self, run: Run) -> None:
        """Enters a new run."""
        self._write(self._put_run(run, -1))

    def add_round(self, run: Run, round: Round, forgotten: Sequence[int]) -> None:
        """Enters an open round, and drops some old ones."""
        drop = "DELETE FROM rounds WHERE run_id = ? AND round = ?"
        self._write(
            self._put_run(run, round.number),
            self._insert_round(run, round),
            *((drop, run.run_id, old) for old in forgotten),
            event=(run, round, "opened"),
        )

    def move(self, run: Run, round: Round, state: RoundState) -> None:
        """Brings a round to this state, with its outcome; then the entry in memory too."""
        event = None
        if state is RoundState.RELEASING:
            event = (run, round, "released")
        elif state is RoundState.DONE and round.state is not RoundState.RELEASING:
            name = "lost" if round.outcome is None else round.outcome.name
            event = (run, round, name.lower().replace("_", "-"))
        moved = dataclasses.replace(round, state=state)
        self._write(self._insert_round(run, moved), event=event)
        round.state = state

    def end_run(self, run_id: str) -> None:
        """Drops all of a run but its id."""
        values = (run_id, None, 0, "", -1, 1)
        self._write(
            ("DELETE FROM rounds WHERE run_id = ?", run_id),
            self._checked(_PUT_RUN, "run", values),
        )

    def _put_run(self, run: Run, last_round: int) -> _Change:
        values = (run.run_id, run.text, run.report_bytes, run.owner, last_round, 0)
        return self._checked(_PUT_RUN, "run", values)

    def _insert_round(self, run: Run, round: Round) -> _Change:
        outcome = None if round.outcome is None else int(round.outcome)
        values = (run.run_id, round.number, round.model_digest, str(round.state), outcome)
        return self._checked(
            "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?, ?, ?)",
            "round",
            (*values, round.public_key),
        )

    def _checked(self, statement: str, kind: str, values: _Row) -> _Change:
        return (statement, *values, self._checks.make(kind, values))

    def _is_good(self, kind: str, row: _Row) -> bool:
        """Whether a row, whose last value is its checksum, is what was written."""
        return self._checks.verify(row[-1], kind, tuple(row[:-1]))

    def _ask(self, query: str, *values: Any) -> list[_Row]:
        assert self._connection is not None
        return self._connection.execute(query, values).fetchall()

    def _write(self, *changes: _Change, event: tuple[Run, Round, str] | None = None) -> None:
        """All of the statements, each with its values, or none of them; then the anchor.

        Where the anchor cannot be written the change is on disk, but refused. Before the next one
        it is written; if that is the same again, its event is in the record already.
        """
        entries, head = self.head
        about = None if event is None else (event[0].run_id, event[1].number, event[2])
        if event is not None and about != self._unanswered:
            entry = make_entry(entries, head, _about(*event))
            changes = (*changes, ("INSERT INTO record VALUES (?, ?)", entries, entry))
            entries, head = entries + 1, entry_hash(entry)
        directory = (self._generation + 1, int(self.lost), entries, head, self._anchor.name)
        update = (
            "UPDATE directory SET generation=?, lost=?, entries=?, head=?, anchor=?, checksum=?"
        )
        assert self._connection is not None
        with storage_errors():
            self._anchor.advance(self._generation)
            with transaction(self._connection) as rows:
                for statement, *values in (*changes, self._checked(update, "directory", directory)):
                    rows.execute(statement, values)
            self._generation, self.head = self._generation + 1, (entries, head)
            self._unanswered = about
            self._anchor.advance(self._generation)
            self._unanswered = None


def _about(run: Run, round: Round, event: str) -> dict[str, Any]:
    """What the public record says of a round."""
    reports = round.spool.count if event == "released" and round.spool is not None else None
    return {
        "run": run.run_id,
        "round": round.number,
        "event": event,
        "plan": run.digest,
        "commitment": run.header(round).commitment if round.public_key else "",
        "reports": reports,
    }


def _lost_round(number: int) -> Round:
    """A round of which nothing is known but that it was there."""
    return Round(number, "", b"", RoundState.DONE, None)


def _batches(directory: Path) -> bool:
    return any(directory.glob("batch-*"))


def _text(data: bytes) -> str | bytes:
    """A text of the file, or the bytes of a damaged one, which then has no right checksum."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _read_anchor(runs: Path, path: Path) -> Anchor | None:
    """The anchor; None where a new one is needed, because it is damaged or all is new.

    Raises:
        ValueError: there is none, but runs that it would anchor.
    """
    try:
        with naming(path):
            if exists(path):
                return Anchor(path)
    except DamagedFile:
        _log.error("the file with the directory's generation is damaged: all runs are lost")
        return None
    if exists(runs):
        raise ValueError(
            f"{path} is missing, and {runs.parent} has runs that it belongs to: put it back, or use"
            " an empty directory"
        )
    return None


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
