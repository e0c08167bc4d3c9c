"""The ledger: one durable line per round, on disk before the round is broadcast.

A hash chain of JSON lines (`shufl.protocol.hash_chain`), so that a change anywhere but at the end
is found. The first line holds the run's id and its plan, which says what every round spends, so
that any accountant can price the run again; each further line holds a round.

A crash can only over-count: a last line that was cut short counts as a spent round, though that
round was never broadcast. Continuing a ledger rewrites such a line as a whole one.
"""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from shufl.accounting.privacy_plan import PrivacyPlan
from shufl.protocol import hash_chain, validation

FORMAT = 3
_LOCK_TRIES, _LOCK_SECONDS = 10, 0.01


class LedgerError(RuntimeError):
    """The ledger cannot be read, does not belong to this run, or cannot be written."""


class LedgerEntry(NamedTuple):
    """One spent round.

    Attributes:
        round: Its number; strictly increasing through the ledger.
        interrupted: True if a crash cut the line short.
        note: What else the caller recorded; never read by an accountant.
    """

    round: int
    interrupted: bool
    note: dict[str, Any]


class LedgerContent(NamedTuple):
    """What a ledger file says.

    Attributes:
        entries: The spent rounds, in order.
    """

    run_id: str
    plan: PrivacyPlan
    entries: list[LedgerEntry]


class _Parsed(NamedTuple):
    content: LedgerContent
    whole: int  # bytes of whole lines
    check: str  # of the last whole line
    torn: bool


def _parse(data: bytes, path: Path) -> _Parsed:
    lines, torn = hash_chain.split(data)
    if torn:
        lines.append(torn)
    try:
        header, check = hash_chain.decode(lines[0] if lines else b"", hash_chain.START)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r} is not {FORMAT}")
        plan = PrivacyPlan.from_json(json.dumps(header["plan"]))
        content = LedgerContent(str(header["run_id"]), plan, [])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"ledger {path} has no readable first line: {error}") from None
    whole = len(lines[0])
    last_round = 0
    for number, line in enumerate(lines[1:], start=2):
        try:
            body, check_here = hash_chain.decode(line, check)
            entry = _entry(body, content.plan, last_round)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise LedgerError(f"ledger {path} is damaged at line {number}: {error}") from None
            content.entries.append(_cut_short(line, check, content.plan, last_round))
            return _Parsed(content, whole, check, True)
        content.entries.append(entry)
        check, last_round, whole = check_here, entry.round, whole + len(line)
    return _Parsed(content, whole, check, False)


def _entry(body: dict[str, Any], plan: PrivacyPlan, last_round: int) -> LedgerEntry:
    number = _next_round(plan, body["round"], last_round)
    return LedgerEntry(number, bool(body["interrupted"]), dict(body["note"]))


def _next_round(plan: PrivacyPlan, number: int, last_round: int) -> int:
    """A round's number; with allocation the next one, since ε counts the blocks of rounds."""
    number = validation.integer("round", number, last_round + 1)
    if plan.participation == "allocation" and number > last_round + 1:
        raise ValueError(
            f"round must be {last_round + 1}, the next one, with participation allocation, "
            f"got {number}"
        )
    return number


def _cut_short(line: bytes, check: str, plan: PrivacyPlan, last_round: int) -> LedgerEntry:
    """What a torn last line counts as: itself if only its end is missing, else the next round."""
    try:
        entry = _entry(hash_chain.decode(line + b"\n", check)[0], plan, last_round)
    except (ValueError, KeyError, TypeError):
        return LedgerEntry(last_round + 1, True, {})
    return entry._replace(interrupted=True)


def _lock(descriptor: int) -> None:
    """Takes the lock of a ledger. It tries for a while, since `is_held` takes it for a moment."""
    for left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not left:
                raise
            time.sleep(_LOCK_SECONDS)


class Ledger:
    """An open ledger, held by one process at a time.

    Use `Ledger.create` for a new run, `Ledger.open` to continue one, `Ledger.read` to look.
    """

    def __init__(self, path: Path, descriptor: int, content: LedgerContent, check: str) -> None:
        self.path = path
        self._descriptor = descriptor
        self._content = content
        self._check = check
        self._failed = False

    @classmethod
    def create(cls, path: str | os.PathLike[str], plan: PrivacyPlan, run_id: str) -> "Ledger":
        """Starts a ledger. When it returns, the first line and the file's name are on disk.

        Args:
            path: The file, which must not exist.
            plan: What every round of the run spends.
            run_id: The run's id.

        Returns:
            The open ledger, which no other process can open.

        Raises:
            LedgerError: The file exists, or cannot be written.
        """
        path = Path(path)
        header = {"format": FORMAT, "plan": json.loads(plan.to_json()), "run_id": run_id}
        line, check = hash_chain.encode(header, hash_chain.START)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            with contextlib.ExitStack() as undo:
                undo.callback(path.unlink, missing_ok=True)
                undo.callback(os.close, descriptor)
                _lock(descriptor)
                hash_chain.append(descriptor, line)
                hash_chain.sync_directory(path.parent)
                undo.pop_all()
        except FileExistsError:
            raise LedgerError(f"ledger {path} exists already: open it to continue") from None
        except OSError as error:
            raise LedgerError(f"cannot create ledger {path}: {error.strerror}") from error
        return cls(path, descriptor, LedgerContent(run_id, plan, []), check)

    @classmethod
    def open(cls, path: str | os.PathLike[str], plan: PrivacyPlan | None = None) -> "Ledger":
        """Continues a ledger. A line that a crash cut short is rewritten, so that it still counts.

        Args:
            path: The file.
            plan: The plan that the ledger must have been made for; any if None.

        Returns:
            The open ledger, which no other process can open.

        Raises:
            LedgerError: The file does not exist, is damaged, belongs to another plan, or is in use
                by another process.
        """
        path = Path(path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, descriptor)
                _lock(descriptor)
                parsed = _parse(path.read_bytes(), path)
                if plan is not None and parsed.content.plan != plan:
                    raise LedgerError(
                        f"ledger {path} belongs to plan {parsed.content.plan.digest()[:12]}, "
                        f"not {plan.digest()[:12]}: {plan.differs(parsed.content.plan)}"
                    )
                ledger = cls(path, descriptor, parsed.content, parsed.check)
                if parsed.torn:
                    ledger._repair(parsed.content.entries[-1], parsed.whole)
                undo.pop_all()
        except BlockingIOError:
            raise LedgerError(f"ledger {path} is in use by another process") from None
        except OSError as error:
            raise LedgerError(f"cannot open ledger {path}: {error.strerror}") from error
        return ledger

    @staticmethod
    def is_held(path: str | os.PathLike[str]) -> bool:
        """Returns whether a process holds the ledger. Changes nothing.

        Args:
            path: The file; if there is none, nobody holds it.
        """
        try:
            with Path(path).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    @staticmethod
    def read(path: str | os.PathLike[str]) -> LedgerContent:
        """Returns what a ledger says. Changes nothing.

        Args:
            path: The file.

        Returns:
            The run's id, its plan and its spent rounds; a line that was cut short counts as spent.

        Raises:
            LedgerError: The file does not exist, or is damaged anywhere but at its end.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise LedgerError(f"cannot read ledger {path}: {error.strerror}") from error
        return _parse(data, path).content

    @property
    def plan(self) -> PrivacyPlan:
        """The plan in the first line."""
        return self._content.plan

    @property
    def run_id(self) -> str:
        """The run's id in the first line."""
        return self._content.run_id

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        """The spent rounds, in order."""
        return tuple(self._content.entries)

    @property
    def last_round(self) -> int:
        """The number of the last spent round, 0 if there is none."""
        return self._content.entries[-1].round if self._content.entries else 0

    def append_round(self, round: int, note: dict[str, Any] | None = None) -> None:
        """Records that a round is spent. When it returns, the line is on disk.

        Args:
            round: The round's number, above `last_round`.
            note: Plain JSON values for the reader. No accountant uses them.

        Raises:
            ValueError: The number does not increase, or leaves out a round of a plan with
                allocation.
            LedgerError: The line is not on disk, for instance because the disk is full. The caller
                must not broadcast the round and must halt; this ledger takes no further rounds.
        """
        number = _next_round(self.plan, round, self.last_round)
        entry = LedgerEntry(number, False, note or {})
        if self._failed:
            raise LedgerError(f"ledger {self.path} failed or was closed: it takes no more rounds")
        line, check = hash_chain.encode(entry._asdict(), self._check)
        try:
            hash_chain.append(self._descriptor, line)
        except OSError as error:
            self._failed = True
            left = "nothing of it was kept"
            if hasattr(error, "__notes__"):
                left = "part of it may be on disk and will count as spent"
            raise LedgerError(
                f"cannot record round {number} in {self.path}: {error.strerror}; "
                f"{left}; halt, do not broadcast"
            ) from error
        self._check = check
        self._content.entries.append(entry)

    def _repair(self, entry: LedgerEntry, start: int) -> None:
        """Writes a torn line anew in its own place: if that fails too, its remains still count."""
        line, check = hash_chain.encode(entry._asdict(), self._check)
        os.lseek(self._descriptor, start, os.SEEK_SET)
        hash_chain.write_all(self._descriptor, line)
        os.ftruncate(self._descriptor, start + len(line))
        os.fsync(self._descriptor)
        self._check = check

    def close(self) -> None:
        """Closes the file and lets another process have it; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._failed = True

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
