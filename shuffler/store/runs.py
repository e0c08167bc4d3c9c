"""Runs and rounds: what the shuffler remembers, and the rules by which a round goes on.

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

import functools
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from shufl.accounting.mechanisms import Randomness, SystemRandomness
from shufl.shuffler.store.floor import Floor
from shufl.shuffler.store.open_batches import OpenBatches
from shufl.shuffler.store.quota import Quota
from shufl.shuffler.store.rounds import Round, RoundState, Run, parse_run
from shufl.shuffler.store.runs_file import RunsFile, naming
from shufl.shuffler.store.slots import file_bytes
from shufl.shuffler.store.spool import RoundSpool, delete_batch
from shufl.shuffler.store.storage import (
    DamagedFile,
    Disk,
    claim_directory,
    exists,
    lock_file,
    storage_errors,
    sync_directory,
)
from shufl.shuffler.wire.channel import MOST_USERS
from shufl.shuffler.wire.errors import Outcome, Refusal, ShufflerRefused

_MAX_NAME = 256  # characters of a run id or a model digest
_MAX_ROUND = 2**63 - 1
_MAX_RUNS = 64  # at once
_MAX_WAITING = 4  # closed batches of a run that were not fetched
_KEPT_OVER = 8  # finished rounds of a run that are remembered; the latest always is
_BYTES_PER_USER = 32  # of the set of those who have reported
_RESERVE_BYTES = 128 * 2**10

_Answer = TypeVar("_Answer")


class RunStore:
    """All runs of one shuffler process, in one directory that only it uses.

    The server calls the methods from `create_run` to `end_run` over the wire: `ControlClient` says
    what they take, answer and refuse.

    Attributes:
        batches: takes in what is handed to open rounds.
    """

    def __init__(
        self,
        directory: Path,
        reserve_bytes: int = _RESERVE_BYTES,
        most_users: int = MOST_USERS,
        randomness: Randomness | None = None,
        generation: Path | None = None,
        floor: Floor | None = None,
        quota: Quota | None = None,
    ) -> None:
        """Opens the directory (made with mode 0700 if missing) and takes up what is in it.

        Args:
            reserve_bytes: free space in bytes that reports may not use, so that rounds can still
                be closed and released when they have filled the disk.
            most_users: for how many users' reports a round makes room here, at most.
            randomness: where the blankets come from; None: from the operating system.
            generation: the file that says how old the directory may be; None: in the directory,
                where it is restored with it.
            floor: what every plan is held to; None: nothing.
            quota: how much one server may take; None: all.

        Raises:
            ValueError: if others may enter the directory, another process uses it or the file
                `generation`, or the two do not belong together. Nothing is then changed.
            OSError: for what may pass; no open or closed batch is then given up.
        """
        self._directory = directory
        self._most_users = most_users
        self._randomness = randomness or SystemRandomness()
        self._floor = floor or Floor()
        self._quota = quota or Quota()
        self._disk = Disk(directory, reserve_bytes)
        self._runs: dict[str, Run] = {}
        self._freeing: set[Future[None]] = set()  # the room of released batches
        self.batches = OpenBatches(self._runs, self._disk, self._randomness)
        with ExitStack() as files:
            files.callback(os.close, claim_directory(directory))
            anchor = generation or directory / "generation"
            if generation is not None:  # a copy of the directory has a lock of its own
                with naming(anchor):
                    lock = lock_file(anchor.with_name(f"{anchor.name}.lock"), str(anchor))
                files.callback(os.close, lock)
            self._file = RunsFile(directory, anchor)
            files.callback(self._file.close)
            files.callback(_close_batches, self._runs)
            self._recover()
            self._files = files.pop_all()

    def create_run(self, run_id: str, plan: bytes, report_bytes: int, owner: str = "") -> str:
        """Registers a run of this server; the same call again changes nothing."""
        self.check_owner(run_id, owner)
        if not 1 <= len(run_id) <= _MAX_NAME:
            raise ShufflerRefused(Refusal.MALFORMED, f"a run id has 1 to {_MAX_NAME} characters")
        run = parse_run(run_id, plan, report_bytes, owner)
        self._floor.check(run.plan)
        known = self._runs.get(run_id)
        if known is None:
            if self._file.has_ended(run_id):
                raise ShufflerRefused(Refusal.RUN_ENDED)
            if len(self._runs) == _MAX_RUNS:
                raise ShufflerRefused(Refusal.TOO_MANY_RUNS)
            self._quota.check_run(self._runs, owner)
            capacity = self._users_of(run) + run.plan.most_blankets
            self._disk.check_length(file_bytes(report_bytes, capacity))
            self._file.add_run(run)
            self._runs[run_id] = run
        elif (known.digest, known.report_bytes) != (run.digest, report_bytes):
            raise ShufflerRefused(Refusal.RUN_EXISTS)
        return run.digest

    def open_round(
        self,
        run_id: str,
        number: int,
        model_digest: str,
        public_key: bytes,
        in_turn: Callable[[Callable[[], Any]], Any] = lambda step: step(),
    ) -> None:
        """Opens a round for reports, and draws the secret number of its blankets.

        Its files are made here, in the caller's thread, which takes long for many users. The steps
        that read and change runs are handed to `in_turn`, which does them in the store's thread.
        """
        about = run_id, number, model_digest, public_key
        run, entry = self._with_room(lambda: in_turn(lambda: self._begin_round(*about)))
        try:
            # The file before the entry: a crash in between leaves a file that nobody names.
            with storage_errors():
                self._with_room(lambda: self._disk.require(self._least_bytes(run)))
                entry.spool = self._open_spool(run, entry)
            in_turn(lambda: self._enter_round(run, entry))
        finally:
            if run.rounds.get(number) is not entry:
                if entry.spool is not None:
                    entry.spool.close()
                with suppress(OSError):
                    delete_batch(_path(self._directory, run, entry))
            run.opening = None

    def _with_room(self, step: Callable[[], _Answer]) -> _Answer:
        """Takes a step; if room is wanting, again once that of released batches is given back."""
        try:
            return step()
        except ShufflerRefused as refused:
            freeing = list(self._freeing)
            if refused.reason is not Refusal.STORAGE_FULL or not freeing:
                raise
        wait(freeing)
        return step()

    def _begin_round(
        self, run_id: str, number: int, model_digest: str, public_key: bytes
    ) -> tuple[Run, Round]:
        """Says whether a round may be opened, and notes that it is being opened."""
        run = self._run(run_id)
        if number > _MAX_ROUND or not 1 <= len(model_digest) <= _MAX_NAME:
            raise ShufflerRefused(
                Refusal.MALFORMED,
                f"a round is below 2**63, a model digest has 1 to {_MAX_NAME} characters",
            )
        entry = Round(number, model_digest, public_key, RoundState.OPEN, None)
        run.check_key(entry)
        self._floor.check(run.plan, number)  # the run may be older than the floor
        if run.open_round() is not None or run.opening is not None:
            raise ShufflerRefused(Refusal.ANOTHER_ROUND_OPEN)
        if run.rounds and number <= max(run.rounds):
            raise ShufflerRefused(Refusal.ROUND_NOT_INCREASING)
        if len(run.in_state(RoundState.CLOSED)) >= _MAX_WAITING:
            raise ShufflerRefused(Refusal.TOO_MANY_BATCHES)
        self._quota.check_round(self._runs, run, self._most_bytes)
        run.opening = entry
        return run, entry

    def _enter_round(self, run: Run, entry: Round) -> None:
        """Enters a round whose files are made, unless its run has ended meanwhile."""
        if self._runs.get(run.run_id) is not run:
            raise ShufflerRefused(Refusal.RUN_ENDED)
        forgotten = run.in_state(RoundState.DONE)[:-_KEPT_OVER]
        self._file.add_round(run, entry, forgotten)
        run.rounds[entry.number] = entry
        for old in forgotten:
            del run.rounds[old]

    def open_rounds(self) -> list[tuple[str, int]]:
        """Run and number of every open round."""
        return [
            (run_id, number)
            for run_id, run in self._runs.items()
            for number in run.in_state(RoundState.OPEN)
        ]

    def close_round(self, run_id: str, number: int, discard: bool = False) -> Outcome:
        """Ends a round's intake; a batch below the plan's minimum or not wanted is destroyed.

        Closing a closed round again answers the same, but destroys a batch that is not wanted and
        was not released. Unless a round is discarded its blankets must have been made.
        """
        run, entry = self._entry(run_id, number)
        before = entry.outcome
        unwanted = discard and entry.state is RoundState.CLOSED
        if entry.state is not RoundState.OPEN and not unwanted:
            if before is None:
                raise ShufflerRefused(Refusal.BATCH_LOST)
            return before
        assert entry.spool is not None
        stored = entry.spool.blankets.stored
        if discard:
            entry.outcome = Outcome.DISCARDED
        elif entry.spool.blankets.made < entry.spool.blankets.work:
            raise ShufflerRefused(Refusal.STORAGE_FAILED, "the round's blankets are not stored")
        elif run.plan.enough_sent(entry.spool.count - stored, stored):
            entry.outcome = Outcome.RELEASABLE
        else:
            entry.outcome = Outcome.BELOW_MINIMUM
        kept = entry.outcome is Outcome.RELEASABLE
        try:
            self._file.move(run, entry, RoundState.CLOSED if kept else RoundState.DONE)
        except ShufflerRefused:
            entry.outcome = before
            raise
        if not kept:
            _destroy(entry)
        return entry.outcome

    def begin_release(self, run_id: str, number: int) -> RoundSpool:
        """Marks the batch as being released, which can happen once, and hands it out.

        Returns:
            The batch, to be read with `next_chunk`.
        """
        run, entry = self._entry(run_id, number)
        if entry.state is RoundState.OPEN:
            raise ShufflerRefused(Refusal.ROUND_NOT_CLOSED)
        if entry.outcome is None:
            raise ShufflerRefused(Refusal.BATCH_LOST)
        if entry.outcome is Outcome.BELOW_MINIMUM:
            raise ShufflerRefused(Refusal.BELOW_MINIMUM)
        if entry.outcome is Outcome.DISCARDED:
            raise ShufflerRefused(Refusal.DISCARDED)
        if entry.state is not RoundState.CLOSED:
            raise ShufflerRefused(Refusal.ALREADY_RELEASED)
        assert entry.spool is not None
        self._file.move(run, entry, RoundState.RELEASING)
        return entry.spool

    def finish_release(
        self,
        run_id: str,
        number: int,
        submit: Callable[[Callable[[], None]], Future[None] | None] = lambda free: free(),
    ) -> None:
        """Destroys a batch that was being released, whether or not all of it was read.

        Its room counts as taken until it has been given back.

        `submit` has another thread call what gives the room back, which takes time; without it this
        thread does.
        """
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        if run is None or entry is None or entry.state is not RoundState.RELEASING:
            return
        if entry.spool is None:  # its run was to be ended, and could not be
            self._file.move(run, entry, RoundState.DONE)
            return
        free = functools.partial(_free, entry, entry.spool)
        with storage_errors():
            entry.spool.delete()
            try:
                self._file.move(run, entry, RoundState.DONE)
            except ShufflerRefused:  # the disk is full, and needs the batch's room
                free()
                self._file.move(run, entry, RoundState.DONE)
            finally:
                freeing = submit(free)
                if freeing is not None:
                    self._freeing.add(freeing)
                    freeing.add_done_callback(self._freeing.discard)

    def end_run(self, run_id: str) -> None:
        """Destroys all batches and the plan of a run; only the used run id is kept."""
        if run_id not in self._runs and self._file.has_ended(run_id):
            return
        # The files first: that also works on a full disk, and makes room for the entry.
        for entry in self._run(run_id).rounds.values():
            _destroy(entry)
        self._file.end_run(run_id)
        del self._runs[run_id]

    def check_owner(self, run_id: str, server: str) -> None:
        """Refuses a server that did not create this run; one that is unknown is nobody's."""
        run = self._runs.get(run_id)
        if run is not None and run.owner != server:
            raise ShufflerRefused(Refusal.NOT_OWNER)

    def record(self, first: int, count: int) -> list[str]:
        """So many entries of the public record, from this one on (`shuffler.record`)."""
        return self._file.record(first, count)

    def close(self) -> None:
        """Closes all files and keeps them for the next start on this directory."""
        self._files.close()

    def _run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            if self._file.has_ended(run_id):
                raise ShufflerRefused(Refusal.RUN_ENDED)
            raise ShufflerRefused(Refusal.BATCH_LOST if self._file.lost else Refusal.UNKNOWN_RUN)
        return run

    def _entry(self, run_id: str, number: int) -> tuple[Run, Round]:
        run = self._run(run_id)
        if number not in run.rounds:
            raise ShufflerRefused(Refusal.UNKNOWN_ROUND)
        return run, run.rounds[number]

    def _users_of(self, run: Run) -> int:
        """For how many users' reports a round of a run makes room here."""
        return min(run.plan.users, self._most_users)

    def _least_bytes(self, run: Run) -> int:
        """How much room a round of a run takes without any report."""
        users = _BYTES_PER_USER * self._users_of(run)
        return users + run.plan.most_blankets * run.report_cost

    def _most_bytes(self, run: Run) -> int:
        """How much room a round of a run takes when all users have reported."""
        users = self._users_of(run)
        return _BYTES_PER_USER * users + (users + run.plan.most_blankets) * run.stored_bytes

    def _open_spool(self, run: Run, entry: Round) -> RoundSpool:
        def draw() -> int:
            return self._randomness.number_of_blankets(entry.number, run.plan.shuffler_blankets)

        path, users = _path(self._directory, run, entry), self._users_of(run)
        return RoundSpool(
            path,
            run.report_bytes,
            users,
            run.plan.most_blankets,
            draw,
            run.plan.cover,
            self._file.checks.of_place(path.stem),
        )

    def _recover(self) -> None:
        """Takes up the runs on disk and deletes what no open or closed round names."""
        self._runs.update(self._file.found)
        entries = [(run, entry) for run in self._runs.values() for entry in run.rounds.values()]
        kept = {
            _path(self._directory, run, entry).stem
            for run, entry in entries
            if entry.state in (RoundState.OPEN, RoundState.CLOSED)
        }
        # The files first: that also works on a full disk, and makes room for the entries.
        for path in self._directory.glob("batch-*"):
            if path.stem not in kept:
                path.unlink(missing_ok=True)
        sync_directory(self._directory)
        for run, entry in entries:
            if entry.state is RoundState.DONE or self._take_up(run, entry):
                continue
            # What cannot be written now, the next start finds again.
            with suppress(ShufflerRefused):
                self._file.move(run, entry, RoundState.DONE)
            entry.state = RoundState.DONE

    def _take_up(self, run: Run, entry: Round) -> bool:
        """Opens the batch of a round again, and says whether it is there.

        Only a batch that is certainly missing or damaged is lost; any other error ends the start.
        """
        if entry.state is RoundState.RELEASING:
            return False
        path = _path(self._directory, run, entry)
        try:
            with naming(path):
                run.check_key(entry)
                if not exists(path):
                    raise DamagedFile("the batch's file is missing")
                entry.spool = self._open_spool(run, entry)
        except (DamagedFile, ShufflerRefused):
            # Lost, and the other rounds go on. The files go before the entry again.
            entry.outcome = None
            with suppress(OSError):
                delete_batch(path)
            return False
        return True


def _path(directory: Path, run: Run, entry: Round) -> Path:
    # Hashed: a run id is a foreign string and no file name.
    return directory / f"batch-{hashlib.sha256(run.run_id.encode()).hexdigest()}-{entry.number}.db"


def _close_batches(runs: dict[str, Run]) -> None:
    for run in runs.values():
        for entry in run.rounds.values():
            if (spool := entry.spool) is not None:
                spool.close()


def _free(entry: Round, spool: RoundSpool) -> None:
    """Gives the room of a deleted batch back, in whatever thread."""
    try:
        spool.free()
    finally:
        entry.spool = None


def _destroy(entry: Round) -> None:
    if (spool := entry.spool) is not None:
        with storage_errors():
            spool.destroy()
        entry.spool = None
