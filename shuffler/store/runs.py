"""Runs, rounds and their batches: what the shuffler remembers, and the rules it holds.

A round goes open → closed → releasing → done, or is done before it is released when its batch is
below the plan's minimum or not wanted; each step is on disk before it is answered. After a crash at
any point the same directory can be opened again: runs, open and closed rounds, and every
acknowledged report are there. A crash *while releasing* loses that batch. It is never released
twice: two releases would be two random orders of the same reports, and a server that saw half of
one could match it with the other.

Nothing here knows gRPC. Everything is blocking and for one thread, except the reading of a batch
that `begin_release` handed out.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from accounting.mechanisms import Randomness, SystemRandomness, most_blankets
from shuffler.store.blankets import BlanketMaker
from shuffler.store.runs_file import Round, RoundState, Run, RunsFile, naming, parse_run
from shuffler.store.spool import RoundSpool, Slot, file_bytes, slot_bytes
from shuffler.store.storage import (
    PAGE_BYTES,
    DamagedFile,
    claim_directory,
    delete_database,
    exists,
    storage_errors,
    storage_refusal,
    sync_directory,
)
from shuffler.wire.channel import MOST_USERS
from shuffler.wire.errors import Outcome, Refusal, ShufflerRefused, Verdict
from shuffler.wire.reports import report_length
from shuffler.wire.sealing import RoundHeader, key_digest, payload_length, seal

__all__ = ["Draft", "Report", "RunStore"]

_MAX_NAME = 256  # characters of a run id or a model version
_MAX_ROUND = 2**63 - 1
_MAX_RUNS = 64  # at once
_MAX_WAITING = 4  # closed batches of a run that were not fetched
_KEPT_OVER = 8  # finished rounds of a run that are remembered; the latest always is
_RESERVE_BYTES = 128 * 2**10
_OVERHEAD_BYTES = 2 * (PAGE_BYTES + 8)  # of the journal, for the two pages of a report's marks


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One sealed report as submitted: its round, whose it is, and its opaque bytes.

    Attributes:
        sender: the credential that it came with; empty where there are none.
        user: which of the sender's users.
        users: how many users the sender has.
        sealed: the report, unless it came in pieces.
        draft: where the pieces are.
    """

    run_id: str
    round: int
    model_version: str
    plan_digest: str
    key_digest: str
    sender: str
    user: int
    users: int
    sealed: bytes
    draft: Draft | None = None


class Draft:
    """A long report that arrives in pieces, on its way to the disk.

    Attributes:
        slot: where it is written.
        verdict: why it can not be accepted any more; None while it can.
    """

    def __init__(
        self, spool: RoundSpool, slot: Slot, length: int, room: Callable[[int], bool]
    ) -> None:
        self.slot = slot
        self.verdict: Verdict | None = None
        self._spool = spool
        self._left = length
        self._room = room

    @property
    def complete(self) -> bool:
        """Whether all of the report is there."""
        return not self._left

    def write(self, pieces: Sequence[bytes]) -> None:
        """Appends pieces, in any thread; what goes wrong is the draft's verdict."""
        if self.verdict is not None:
            return
        length = sum(map(len, pieces))
        self._left -= length
        if self._left < 0:
            self.verdict = Verdict.WRONG_LENGTH
        elif not self._room(length):
            self.verdict = Verdict.STORAGE_FULL
        else:
            try:
                self.slot.append(pieces)
            except OSError as error:
                self.verdict = _storage_verdict(error)

    def give_up(self) -> None:
        """Gives its place back. In the store's thread, like everything else of the store."""
        self._spool.give_up(self.slot)


class RunStore:
    """All runs of one shuffler process, in one directory that only it uses."""

    def __init__(
        self,
        directory: Path,
        reserve_bytes: int = _RESERVE_BYTES,
        most_users: int = MOST_USERS,
        randomness: Randomness | None = None,
    ) -> None:
        """Opens the directory (made with mode 0700 if missing) and takes up what is in it.

        Args:
            directory: where `runs.db` and one file for each batch are kept.
            reserve_bytes: free space in bytes that reports may not use, so that rounds can still
                be closed and released when they have filled the disk.
            most_users: for how many users' reports a round makes room here, at most.
            randomness: where the blankets come from; None: from the operating system.

        Raises:
            ValueError: if others may enter the directory, another process uses it, or `runs.db` is
                damaged or of another format. Nothing is then changed.
            OSError: if a file can not be made or used; no open or closed batch is then given up.
            sqlite3.Error: if `runs.db` can not be read or written.
        """
        self._directory = directory
        self._reserve = reserve_bytes
        self._most_users = most_users
        self._randomness = randomness or SystemRandomness()
        self._lock = claim_directory(directory)
        self._runs: dict[str, Run] = {}
        runs = directory / "runs.db"
        try:
            self._file = RunsFile(runs)
            try:
                self._recover()
            except BaseException:
                self._close_files()
                raise
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, DamagedFile):
                found = "".join(c if c.isprintable() else "?" for c in str(error))
                raise ValueError(
                    f"{runs} is damaged: {found}. Nothing was changed. To start with an empty"
                    f" directory move {directory} away: all runs in it are then lost"
                ) from error
            raise

    def create_run(self, run_id: str, plan: bytes, report_bytes: int) -> str:
        """Registers a run; the same call again changes nothing.

        Args:
            run_id: the run's name, not used before.
            plan: the privacy plan, a JSON object with integers `users` ≥ `minimum_batch` ≥ 1; and
                with positive `shuffler_blankets`, `clip_norm` and `noise_multiplier`.
            report_bytes: the length of every *sealed* report in bytes.

        Returns:
            The plan's digest: SHA-256 of its bytes, lower-case hexadecimal.

        Raises:
            ShufflerRefused: `MALFORMED`, `RUN_EXISTS` (other content), `RUN_ENDED`,
                `TOO_MANY_RUNS`, storage.
        """
        if not 1 <= len(run_id) <= _MAX_NAME:
            _refuse(Refusal.MALFORMED, f"a run id has 1 to {_MAX_NAME} characters")
        run = parse_run(plan, report_bytes)
        known = self._runs.get(run_id)
        if known is None:
            if self._file.has_ended(run_id):
                _refuse(Refusal.RUN_ENDED, "this run has ended and its id can not be used again")
            if len(self._runs) == _MAX_RUNS:
                _refuse(Refusal.TOO_MANY_RUNS, f"{_MAX_RUNS} runs have not ended")
            self._try_length(file_bytes(report_bytes, sum(self._room_for(run))))
            self._file.add_run(run_id, plan, report_bytes)
            self._runs[run_id] = run
        elif (known.digest, known.report_bytes) != (run.digest, report_bytes):
            _refuse(Refusal.RUN_EXISTS, "this run has another plan or report length")
        return run.digest

    def open_round(self, run_id: str, number: int, model_version: str, public_key: bytes) -> None:
        """Opens a round for reports, and draws the secret number of its blankets.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `ANOTHER_ROUND_OPEN`,
                `ROUND_NOT_INCREASING`, `TOO_MANY_BATCHES`, `MALFORMED`, or storage.
        """
        run = self._run(run_id)
        if number > _MAX_ROUND or not 1 <= len(model_version) <= _MAX_NAME:
            _refuse(
                Refusal.MALFORMED,
                f"a round is below 2**63, a model version has 1 to {_MAX_NAME} characters",
            )
        entry = Round(number, model_version, public_key, RoundState.OPEN, None, None)
        _check_key(run_id, run, entry)
        if run.open_round() is not None:
            _refuse(Refusal.ANOTHER_ROUND_OPEN, "close the open round first")
        if run.rounds and number <= max(run.rounds):
            _refuse(Refusal.ROUND_NOT_INCREASING, f"round {number} does not follow the last one")
        waiting = [r for r in run.rounds.values() if r.state is RoundState.CLOSED]
        if len(waiting) >= _MAX_WAITING:
            _refuse(
                Refusal.TOO_MANY_BATCHES, f"fetch one of the {_MAX_WAITING} closed rounds first"
            )
        over = sorted(r.number for r in run.rounds.values() if r.state is RoundState.DONE)
        forgotten = over[:-_KEPT_OVER]
        path = self._path(run_id, number)
        try:
            # The file before the entry: a crash in between leaves a file that nobody names.
            with storage_errors():
                self._make_sure_of_room(run, most_blankets(run.blankets))
                entry.spool = self._open_spool(path, run, number)
            self._file.add_round(run_id, entry, forgotten)
        except ShufflerRefused:
            if entry.spool is not None:
                entry.spool.close()
            with suppress(OSError):
                path.with_suffix(".reports").unlink(missing_ok=True)
                delete_database(path)
            raise
        run.rounds[number] = entry
        for old in forgotten:
            del run.rounds[old]

    def accept(self, reports: Sequence[Report]) -> list[Verdict]:
        """Stores what may be stored, with one commit for each round; answers in order.

        An answer `ACCEPTED` means that the report is on disk. A full or failing disk is a verdict,
        not an error, and leaves nothing of the reports concerned.
        """
        verdicts = [self._examine(report) for report in reports]
        batches: dict[tuple[str, int], list[int]] = {}
        for index, report in enumerate(reports):
            if verdicts[index] is Verdict.ACCEPTED:
                batches.setdefault((report.run_id, report.round), []).append(index)
            elif report.draft is not None:
                report.draft.give_up()
        for (run_id, number), indices in batches.items():
            run = self._runs[run_id]
            group = [reports[index] for index in indices]
            for index, verdict in zip(
                indices, self._store(run, run.rounds[number], group), strict=True
            ):
                verdicts[index] = verdict
        return verdicts

    def begin(self, report: Report) -> Draft | Verdict:
        """Prepares for a report in pieces, or says why it would not be accepted.

        The draft's pieces are written with its own method; it is then accepted (or not) by
        `accept`, as the `draft` of a report.
        """
        verdict = self._examine(report, whole=False)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        run = self._runs[report.run_id]
        spool = run.rounds[report.round].spool
        assert spool is not None
        try:
            if spool.has_reported(report.sender, report.user):
                return Verdict.DUPLICATE
            slot = spool.reserve()
            if slot is None:
                return Verdict.ROUND_FULL
            return Draft(spool, slot, run.report_bytes, self._has_room)
        except (sqlite3.Error, OSError) as error:
            return _storage_verdict(error)

    def blankets_of(self, run_id: str, number: int) -> BlanketMaker | None:
        """What makes the blankets of an open round; None where all are made, or none are wanted."""
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        if run is None or entry is None or entry.state is not RoundState.OPEN:
            return None
        assert entry.spool is not None
        left = entry.spool.blankets
        if run.mechanism is None or left.made == left.work:
            return None
        return BlanketMaker(
            _header(run_id, run, entry),
            entry.public_key,
            run.mechanism,
            payload_length(run.report_bytes, entry.public_key) // report_length(1),
            self._randomness,
            left.made,
            left.work,
        )

    def add_blankets(self, run_id: str, number: int, sealed: Sequence[bytes]) -> None:
        """Stores the next blankets of a round; those of a round that is over are dropped.

        Raises:
            ShufflerRefused: storage; then they are still to be made.
        """
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        if run is None or entry is None or entry.state is not RoundState.OPEN:
            return
        assert entry.spool is not None
        with storage_errors():
            self._make_sure_of_room(run, len(sealed))
            entry.spool.add_blankets(sealed)

    def open_rounds(self) -> list[tuple[str, int]]:
        """Run and number of every open round."""
        opened = ((run_id, run.open_round()) for run_id, run in self._runs.items())
        return [(run_id, entry.number) for run_id, entry in opened if entry is not None]

    def close_round(self, run_id: str, number: int, discard: bool = False) -> Outcome:
        """Ends a round's intake; a batch below the plan's minimum or not wanted is destroyed.

        Closing a closed round again answers the same, but destroys a batch that is not wanted and
        was not released.

        Args:
            run_id: the run.
            number: the round; unless it is discarded its blankets must have been made.
            discard: whether to destroy the batch unseen, whatever its size.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`, or storage.
        """
        run, entry = self._entry(run_id, number)
        before = entry.outcome
        if entry.state is not RoundState.OPEN and not (
            discard and entry.state is RoundState.CLOSED
        ):
            if before is None:
                _refuse(
                    Refusal.BATCH_LOST, "the batch's file was missing or damaged after a restart"
                )
            return before
        assert entry.spool is not None
        if not discard and entry.spool.blankets.made < entry.spool.blankets.work:
            _refuse(Refusal.STORAGE_FAILED, "the round's blankets are not stored")
        if discard:
            entry.outcome = Outcome.DISCARDED
        elif entry.spool.count >= run.minimum_batch:
            entry.outcome = Outcome.RELEASABLE
        else:
            entry.outcome = Outcome.BELOW_MINIMUM
        kept = entry.outcome is Outcome.RELEASABLE
        try:
            self._file.move(run_id, entry, RoundState.CLOSED if kept else RoundState.DONE)
        except ShufflerRefused:
            entry.outcome = before
            raise
        if not kept:
            self._destroy(entry)
        return entry.outcome

    def begin_release(self, run_id: str, number: int) -> RoundSpool:
        """Marks the batch as being released, which can happen once, and hands it out.

        Returns:
            The batch, to be read with `next_chunk`.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `ROUND_NOT_CLOSED`,
                `BELOW_MINIMUM`, `DISCARDED`, `ALREADY_RELEASED`, `BATCH_LOST`, or storage.
        """
        _, entry = self._entry(run_id, number)
        if entry.state is RoundState.OPEN:
            _refuse(Refusal.ROUND_NOT_CLOSED, "close the round first")
        if entry.outcome is None:
            _refuse(Refusal.BATCH_LOST, "the batch's file was missing or damaged after a restart")
        if entry.outcome is Outcome.BELOW_MINIMUM:
            _refuse(
                Refusal.BELOW_MINIMUM, "the batch was below the plan's minimum and is destroyed"
            )
        if entry.outcome is Outcome.DISCARDED:
            _refuse(Refusal.DISCARDED, "the batch was destroyed when the round was closed")
        if entry.state is not RoundState.CLOSED:
            _refuse(Refusal.ALREADY_RELEASED, "a batch is released once")
        assert entry.spool is not None
        self._file.move(run_id, entry, RoundState.RELEASING)
        return entry.spool

    def finish_release(self, run_id: str, number: int) -> None:
        """Destroys a batch that was being released, whether or not all of it was read."""
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        if entry is None or entry.state is not RoundState.RELEASING:
            return
        self._destroy(entry)
        self._file.move(run_id, entry, RoundState.DONE)

    def end_run(self, run_id: str) -> None:
        """Destroys all batches and the plan of a run; only the used run id is kept.

        Ending an ended run changes nothing.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, or storage.
        """
        run = self._runs.get(run_id)
        if run is None:
            if self._file.has_ended(run_id):
                return
            _refuse(Refusal.UNKNOWN_RUN, "no such run")
        # The files first: that also works on a full disk, and makes room for the entry.
        for entry in run.rounds.values():
            self._destroy(entry)
        self._file.end_run(run_id)
        del self._runs[run_id]

    def close(self) -> None:
        """Closes all files and keeps them for the next start on this directory."""
        self._close_files()
        os.close(self._lock)

    def _close_files(self) -> None:
        for run in self._runs.values():
            for entry in run.rounds.values():
                if entry.spool is not None:
                    entry.spool.close()
        self._file.close()

    def _examine(self, report: Report, whole: bool = True) -> Verdict:
        run = self._runs.get(report.run_id)
        if run is None:
            return Verdict.UNKNOWN_RUN
        if report.plan_digest != run.digest:
            return Verdict.WRONG_PLAN
        entry = run.rounds.get(report.round)
        if entry is None or entry.state is not RoundState.OPEN:
            return Verdict.ROUND_NOT_OPEN
        if report.model_version != entry.model_version:
            return Verdict.WRONG_MODEL_VERSION
        if report.key_digest != key_digest(entry.public_key):
            return Verdict.WRONG_KEY
        if report.user >= min(report.users, run.users):
            return Verdict.BAD_SENDER
        if report.draft is not None:
            if report.draft.verdict is not None:
                return report.draft.verdict
            return Verdict.ACCEPTED if report.draft.complete else Verdict.WRONG_LENGTH
        if whole and len(report.sealed) != run.report_bytes:
            return Verdict.WRONG_LENGTH
        return Verdict.ACCEPTED

    def _store(self, run: Run, entry: Round, reports: list[Report]) -> list[Verdict]:
        """Stores as many of the reports as the disk has room for."""
        assert entry.spool is not None
        room = max(0, self._room() // _cost(run))
        rows = [
            (report.sender, report.user, report.draft.slot if report.draft else report.sealed)
            for report in reports[:room]
        ]
        try:
            verdicts = entry.spool.add(rows)
        except (sqlite3.Error, OSError) as error:
            verdicts = [_storage_verdict(error)] * len(rows)
        for report in reports[room:]:
            if report.draft is not None:
                report.draft.give_up()
        return verdicts + [Verdict.STORAGE_FULL] * (len(reports) - len(rows))

    def _room_for(self, run: Run) -> tuple[int, int]:
        """For how many users' reports, and how many blankets, a round of a run makes room here."""
        return min(run.users, self._most_users), most_blankets(run.blankets)

    def _open_spool(self, path: Path, run: Run, number: int) -> RoundSpool:
        def draw() -> int:
            return self._randomness.number_of_blankets(number, run.blankets)

        return RoundSpool(path, run.report_bytes, *self._room_for(run), draw)

    def _try_length(self, length: int) -> None:
        """Refuses a round's file of so many bytes if the file system does not allow it."""
        probe = self._directory / "batch-probe"  # left by a crash, it goes with the next start
        with storage_errors(), probe.open("wb") as file:
            try:
                file.truncate(length)
            except OSError as error:
                if error.errno not in (errno.EFBIG, errno.EINVAL):
                    raise
                _refuse(
                    Refusal.MALFORMED,
                    f"a round's file would have {length} bytes (2 x users x report), more than the"
                    " spool's file system allows",
                )
            finally:
                probe.unlink()

    def _room(self) -> int:
        """Bytes that reports may still take of the disk."""
        disk = os.statvfs(self._directory)
        return disk.f_bavail * disk.f_frsize - self._reserve

    def _make_sure_of_room(self, run: Run, reports: int) -> None:
        """Raises the error of a full disk where there is no room for so many."""
        if self._room() < reports * _cost(run):
            raise OSError(errno.ENOSPC, "no room for blankets")

    def _has_room(self, length: int) -> bool:
        return self._room() >= length + PAGE_BYTES

    def _run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            if self._file.has_ended(run_id):
                _refuse(Refusal.RUN_ENDED, "this run has ended")
            _refuse(Refusal.UNKNOWN_RUN, "no such run")
        return run

    def _entry(self, run_id: str, number: int) -> tuple[Run, Round]:
        run = self._run(run_id)
        entry = run.rounds.get(number)
        if entry is None:
            _refuse(
                Refusal.UNKNOWN_ROUND, f"round {number} was never opened, or is long since over"
            )
        return run, entry

    def _destroy(self, entry: Round) -> None:
        if entry.spool is not None:
            with storage_errors():
                entry.spool.destroy()
            entry.spool = None

    def _path(self, run_id: str, number: int) -> Path:
        # Hashed: a run id is a foreign string and no file name.
        return self._directory / f"batch-{hashlib.sha256(run_id.encode()).hexdigest()}-{number}.db"

    def _recover(self) -> None:
        """Takes up the runs on disk and deletes what no open or closed round names.

        Only a batch that is certainly missing or damaged is lost; any other error ends the start.
        """
        self._runs = self._file.read()
        entries = {
            self._path(run_id, entry.number): (run_id, entry)
            for run_id, run in self._runs.items()
            for entry in run.rounds.values()
            if entry.state is not RoundState.DONE
        }
        # The files first: that also works on a full disk, and makes room for the entries.
        kept = [path for path, (_, r) in entries.items() if r.state is not RoundState.RELEASING]
        names = {path.name for path in kept} | {path.with_suffix(".reports").name for path in kept}
        for path in self._directory.glob("batch-*"):
            if path.name.removesuffix("-journal") not in names:
                path.unlink(missing_ok=True)
        sync_directory(self._directory)
        for path, (run_id, entry) in entries.items():
            if entry.state is not RoundState.RELEASING:
                try:
                    run = self._runs[run_id]
                    with naming(path):
                        _check_key(run_id, run, entry)
                        if not exists(path):
                            raise DamagedFile("the batch's file is missing")
                        entry.spool = self._open_spool(path, run, entry.number)
                    continue
                except (DamagedFile, ShufflerRefused):
                    # Lost, and the other rounds go on. The files go before the entry again.
                    entry.outcome = None
                    with suppress(OSError):
                        path.with_suffix(".reports").unlink(missing_ok=True)
                        delete_database(path)
            # What can not be written now, the next start finds again.
            with suppress(ShufflerRefused):
                self._file.move(run_id, entry, RoundState.DONE)
            entry.state = RoundState.DONE


def _cost(run: Run) -> int:
    """Bytes of the disk that a report, or a blanket, takes at most."""
    return max(slot_bytes(run.report_bytes), PAGE_BYTES) + _OVERHEAD_BYTES


def _header(run_id: str, run: Run, round: Round) -> RoundHeader:
    digest = key_digest(round.public_key)
    return RoundHeader(run_id, round.number, round.model_version, run.digest, digest)


def _check_key(run_id: str, run: Run, round: Round) -> None:
    """Refuses a public key to which this run's reports can not be sealed."""
    try:
        length = payload_length(run.report_bytes, round.public_key)
        seal(b"", round.public_key, _header(run_id, run, round))
    except Exception as error:
        _refuse(Refusal.MALFORMED, f"the public key is not one to seal reports to: {error}")
    if run.mechanism is not None and (length == 0 or length % report_length(1)):
        _refuse(Refusal.MALFORMED, f"no report has {length} bytes, so it can have no blankets")


def _storage_verdict(error: sqlite3.Error | OSError) -> Verdict:
    full = storage_refusal(error) is Refusal.STORAGE_FULL
    return Verdict.STORAGE_FULL if full else Verdict.STORAGE_FAILED


def _refuse(reason: Refusal, detail: str) -> NoReturn:
    raise ShufflerRefused(reason, detail)
