"""Runs and rounds: what the shuffler remembers, and the rules by which a round goes on.

A round is open, then closed, then over; or over at once when its batch is below the plan's minimum
or not wanted. How it ended is in the public record before the server is answered. Batches exist in
this process only: when it ends they are lost, and the next one enters that in the record.

Nothing here knows gRPC. Everything is blocking and for one thread.
"""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shufl.protocol.mechanisms import Randomness, SystemRandomness
from shufl.protocol.mechanisms.summed_reports import whole_noise
from shufl.protocol.outcomes import RoundOutcome
from shufl.protocol.plan import Plan
from shufl.shuffler.config import Limits
from shufl.shuffler.store.batch import RESERVE_BYTES, Batch, storage_refusal
from shufl.shuffler.store.open_batches import OpenBatches
from shufl.shuffler.store.operator_minimum import Floor
from shufl.shuffler.store.quota import check_round, check_run
from shufl.shuffler.store.record_file import RecordFile
from shufl.shuffler.store.rounds import Round, Run, parse_run
from shufl.shuffler.store.summed_batch import SummedBatch
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.errors import Closed, Outcome, Refusal, ShufflerRefused, malformed
from shufl.shuffler.wire.sealing import (
    SEALED_BYTES,
    SEED_PAYLOAD_BYTES,
    RoundHeader,
    key_digest,
)

_MAX_NAME = 256  # characters of a run id or a model digest
_MAX_ROUND = 2**63 - 1
_MAX_RUNS = 64  # at once
_MAX_WAITING = 4  # closed batches of a run that the server has not ended
_KEPT_OVER = 8  # finished rounds of a run that are remembered; the latest always is
_NONCE_BYTES = 16
_LEASE_SECONDS = 60.0
_ABSENT_ROUNDS = 3  # without a report, after which a node is named

_OVER = {
    RoundOutcome.RELEASED: Outcome.RELEASABLE,
    RoundOutcome.BELOW_MINIMUM: Outcome.BELOW_MINIMUM,
    RoundOutcome.DISCARDED: Outcome.DISCARDED,
}


class RunStore:
    """All runs of one shuffler process, with the record in a directory that only it uses.

    The server calls the methods from `create_run` to `end_run` over the wire: `ControlClient` says
    what they take, answer and refuse.

    Attributes:
        batches: takes in what is handed to open rounds.
    """

    def __init__(
        self,
        directory: Path,
        limits: Limits | None = None,
        randomness: Randomness | None = None,
        floor: Floor | None = None,
        durable: bool = True,
    ) -> None:
        """Opens the directory (made with mode 0700 if missing) and reads the record in it.

        Args:
            limits: how much it takes at once; None: the defaults.
            randomness: where the blankets come from; None: from the operating system.
            floor: what every plan is held to; None: nothing.
            durable: whether the record waits for the disk, and batches take their room at once;
                not in a simulation.

        Raises:
            ValueError: others may enter the directory, another process uses it, or the record is
                damaged.
            OSError: the record cannot be read or written.
        """
        self._directory = directory
        self._limits = limits or Limits()
        self._randomness = randomness or SystemRandomness()
        self._floor = floor or Floor()
        self._durable = durable
        self._runs: dict[str, Run] = {}
        self._ended: set[str] = set()
        self._lacking = 0  # bytes of the last batch, if the disk had no room for it
        self._was_full: bool | None = None  # when the first of the batches that are here was opened
        self._record = RecordFile(directory, durable)
        self.batches = OpenBatches(self._runs, self._randomness)
        try:
            lost: set[tuple[str, int]] = set()
            for line in self._record.read():
                self._read(line, lost)
            for run_id, number in sorted(lost):
                self._record.append(RoundOutcome.LOST, run_id, round=number)
        except (ShufflerRefused, KeyError) as error:
            self._record.close()
            raise ValueError(f"{self._record.path} is another version's: {error}") from None
        except (ValueError, OSError):
            self._record.close()
            raise

    def create_run(self, run_id: str, plan: bytes, report_bytes: int, owner: str = "") -> str:
        """Registers a run of this server; the same call again changes nothing."""
        self.check_owner(run_id, owner)
        if not 1 <= len(run_id) <= _MAX_NAME:
            raise malformed(f"a run id has 1 to {_MAX_NAME} characters")
        run = parse_run(run_id, plan, report_bytes, owner)
        if report_bytes < SEALED_BYTES:  # older records may have such runs
            raise malformed(f"report_bytes must be at least {SEALED_BYTES}, got {report_bytes}")
        if run.plan.mixing == "sum" and (report_bytes - SEED_PAYLOAD_BYTES) % 4:  # of any suite
            what = f"no vector with its seed has {report_bytes} bytes"
            more = "shuffler and server must have the same version of shufl"
            raise malformed(f"{what}: {more}")
        self._floor.check(run.plan)
        if self._durable and run.plan.cover and run.plan.window is None:
            raise malformed("a plan with cover must have a window")
        known = self._runs.get(run_id)
        if known is None:
            if run_id in self._ended:
                raise ShufflerRefused(Refusal.RUN_ENDED)
            if len(self._runs) == _MAX_RUNS:
                raise ShufflerRefused(Refusal.TOO_MANY_RUNS)
            check_run(self._limits, self._runs, owner)
            text = plan.decode()
            self._append("created", run_id, server=owner, plan=text, report_bytes=report_bytes)
            self._runs[run_id] = run
        elif (known.digest, known.report_bytes) != (run.digest, report_bytes):
            raise ShufflerRefused(Refusal.RUN_EXISTS)
        return run.digest

    def reserve(self, run_id: str) -> None:
        """Books the disk for the next round, for a minute."""
        run = self._run(run_id)
        batch = run.lease[0] if run.lease is not None else self._make_batch(run)
        run.lease = batch, time.monotonic() + _LEASE_SECONDS

    def open_round(self, run_id: str, number: int, model_digest: str, public_key: bytes) -> bytes:
        """Opens a round for reports, and draws the secret number of its blankets.

        Returns:
            The nonce that its reports are bound to.
        """
        run = self._run(run_id)
        if number > _MAX_ROUND or not 1 <= len(model_digest) <= _MAX_NAME:
            raise malformed(
                f"a round is below 2**63, a model digest has 1 to {_MAX_NAME} characters"
            )
        nonce = secrets.token_bytes(_NONCE_BYTES)
        header = RoundHeader(
            run_id, number, model_digest, run.digest, key_digest(public_key), nonce
        )
        run.check_key(public_key, header)
        self._floor.check(run.plan, number)  # the run may be older than the floor
        if run.rounds and number <= max(run.rounds):
            raise ShufflerRefused(
                Refusal.ANOTHER_ROUND_OPEN if run.open_round() else Refusal.ROUND_NOT_INCREASING
            )
        self.reserve(run_id)
        self._append("opened", run_id, round=number, commitment=header.commitment)
        assert run.lease is not None
        (batch, _), run.lease = run.lease, None
        blankets = self._randomness.number_of_blankets(number, run.plan.shuffler_blankets)
        if isinstance(batch, SummedBatch):
            dimension = run.dimension_of_sums(public_key)
            batch.begin(dimension, functools.partial(self._noise, run.plan, number, dimension))
        window = run.plan.window if self._durable else None
        now = time.monotonic()
        entry = Round(number, header, public_key, batch, blankets, waits_since=now)
        if window is not None:
            entry.ends_at = entry.waits_since = now + window.seconds
        self._was_full = self.is_full
        run.rounds[number] = entry
        over = [each.number for each in run.rounds.values() if each.batch is None]
        for old in over[:-_KEPT_OVER]:
            del run.rounds[old]
        return nonce

    def close_round(self, run_id: str, number: int) -> Closed:
        """Ends a round's intake; a batch below the plan's minimum is destroyed.

        Refused before its window is over and its blankets are made: fewer of them would hide less.
        """
        run, entry = self._entry(run_id, number)
        if entry.is_open and (entry.seconds_left or entry.made < run.plan.most_blankets):
            raise ShufflerRefused(Refusal.WINDOW_NOT_OVER)
        if entry.batch is not None and entry.outcome is None:
            entry.batch.end()
            sent = entry.batch.senders
            enough = run.plan.enough_sent(sent, entry.batch.count - sent)
            if run.plan.cover:
                entry.senders, entry.absent = sent, self._absent(run, entry)
                enough = enough and run.plan.enough_present(sent)
            if enough:
                entry.outcome, entry.waits_since = Outcome.RELEASABLE, time.monotonic()
            else:
                self._end(run, entry, RoundOutcome.BELOW_MINIMUM)
        if entry.outcome is None:
            raise ShufflerRefused(Refusal.BATCH_LOST)
        return Closed(entry.outcome, entry.senders, entry.absent)

    def seconds_left(self, run_id: str, number: int) -> float | None:
        """Seconds left of a round's window; None if it is not open. Any thread may ask."""
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        return entry.seconds_left if entry is not None and entry.is_open else None

    def release(self, run_id: str, number: int) -> Batch:
        """The batch of a closed round; that it is released is then in the record."""
        _, entry = self._entry(run_id, number)
        if entry.is_open:
            raise ShufflerRefused(Refusal.ROUND_NOT_CLOSED)
        if entry.outcome is None:
            raise ShufflerRefused(Refusal.BATCH_LOST)
        if entry.outcome is not Outcome.RELEASABLE:
            raise ShufflerRefused(Refusal[entry.outcome.name])
        if entry.batch is None:
            raise ShufflerRefused(Refusal.ALREADY_RELEASED)
        if not entry.released:
            self._append(RoundOutcome.RELEASED, run_id, round=number, reports=entry.batch.count)
            entry.released = True
        return entry.batch

    def end_round(self, run_id: str, number: int) -> None:
        """Destroys the batch of a round, if it is still here."""
        run, entry = self._entry(run_id, number)
        if entry.batch is not None:
            ended = RoundOutcome.RELEASED if entry.released else RoundOutcome.DISCARDED
            self._end(run, entry, ended)

    def end_old_rounds(self, seconds: float) -> None:
        """Destroys batches that have waited so long for the server, and leases that are over."""
        now = time.monotonic()
        for run in self._runs.values():
            if run.lease is not None and run.lease[1] < now:
                self._end_lease(run)  # first: it takes no line of the record
        for run in self._runs.values():
            for entry in run.batches():
                if now - entry.waits_since > seconds:
                    self.end_round(run.run_id, entry.number)

    def end_run(self, run_id: str) -> None:
        """Destroys all batches of a run; its id cannot be used again."""
        if run_id in self._ended:
            return
        run = self._run(run_id)
        for entry in run.batches():
            self.end_round(run_id, entry.number)
        self._end_lease(run)
        self._append("ended", run_id)
        del self._runs[run_id]
        self._ended.add(run_id)

    def check_owner(self, run_id: str, server: str) -> None:
        """Refuses a server that did not create this run; one that is unknown is nobody's."""
        run = self._runs.get(run_id)
        if run is not None and run.owner != server:
            raise ShufflerRefused(Refusal.NOT_OWNER)

    @property
    def is_full(self) -> bool:
        """Whether the disk has no room for the record, or for a batch that could not be made.

        Any thread may ask. While rounds have batches the answer stays as it was before the first.
        """
        # A batch takes its room at once, but a file system such as ext4 then needs more blocks to
        # note which parts were written: what is free tells how many reports there are.
        if (was_full := self._was_full) is not None:
            return was_full
        disk = os.statvfs(self._directory)
        free = disk.f_bavail * disk.f_frsize
        return self._durable and free < RESERVE_BYTES + self._lacking

    def record(self, first: int) -> list[str]:
        """The next lines of the public record, from this one on (`shuffler.record`)."""
        return self._record.lines(first)

    def close(self) -> None:
        """Destroys all batches, and lets another process have the directory."""
        for run in self._runs.values():
            self._end_lease(run)
            for entry in run.batches():
                assert entry.batch is not None
                entry.batch.close()
        self._record.close()

    def _read(self, line: dict[str, Any], unended: set[tuple[str, int]]) -> None:
        """Takes up what a line of the record says; `unended` are rounds that are open so far."""
        event, run_id = line["event"], line["run"]
        if event == "created":
            plan = line["plan"].encode()
            self._runs[run_id] = parse_run(run_id, plan, line["report_bytes"], line["server"])
        elif event == "ended":
            del self._runs[run_id]
            self._ended.add(run_id)
        else:
            number, rounds = line["round"], self._runs[run_id].rounds
            rounds[number] = Round(number, outcome=_OVER.get(event))
            if event == "opened":
                unended.add((run_id, number))
            else:
                unended.discard((run_id, number))
            for old in sorted(rounds)[:-_KEPT_OVER]:
                del rounds[old]

    def _make_batch(self, run: Run) -> Batch:
        """An empty batch for the next round of a run, if there may be one."""
        if run.open_round() is not None:
            raise ShufflerRefused(Refusal.ANOTHER_ROUND_OPEN)
        if len(run.batches()) >= _MAX_WAITING:
            raise ShufflerRefused(Refusal.TOO_MANY_BATCHES)
        check_round(self._limits, self._runs, run, self._bytes_of)
        users, slots = min(run.plan.users, self._limits.users), self._slots_of(run)
        kind = SummedBatch if run.plan.mixing == "sum" else Batch
        about = self._directory, run.report_bytes, users, slots, self._limits.uploads
        try:
            batch = kind(*about, allocate=self._durable)
        except ShufflerRefused as error:
            if error.reason is Refusal.STORAGE_FULL:
                self._lacking = self._bytes_of(run)
            raise
        self._lacking = 0
        return batch

    def _noise(self, plan: Plan, round: int, dimension: int) -> Iterator[tuple[slice, np.ndarray]]:
        """The shuffler's own, of a sum, piece by piece."""
        for places, draws in self._randomness.blanket_pieces(round, 0, dimension):
            yield places, whole_noise(draws, plan.central_noise, 1, dimension)

    def _end_lease(self, run: Run) -> None:
        if run.lease is not None:
            run.lease[0].close()
            run.lease = None

    def _absent(self, run: Run, entry: Round) -> tuple[str, ...]:
        """Nodes that have agreed several times, this one too, and brought no report."""
        assert entry.batch is not None
        for name in entry.agreed:
            run.without_report[name] += 1
            if entry.batch.has_of(name):
                run.without_report[name] = 0
        often = (name for name in entry.agreed if run.without_report[name] >= _ABSENT_ROUNDS)
        return tuple(sorted(often))

    def _end(self, run: Run, entry: Round, ended: RoundOutcome) -> None:
        """Destroys a batch; how its round ended is in the record before."""
        assert entry.batch is not None
        if not entry.released:
            self._append(ended, run.run_id, round=entry.number)
        entry.outcome = _OVER[ended]
        entry.batch.close()
        entry.batch = None
        if not any(each.batches() for each in self._runs.values()):
            self._was_full = None

    def _append(self, event: str, run_id: str, **about: str | int) -> None:
        try:
            self._record.append(event, run_id, **about)
        except OSError as error:
            raise storage_refusal(error) from error

    def _run(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            ended = run_id in self._ended
            raise ShufflerRefused(Refusal.RUN_ENDED if ended else Refusal.UNKNOWN_RUN)
        return run

    def _entry(self, run_id: str, number: int) -> tuple[Run, Round]:
        run = self._run(run_id)
        if number not in run.rounds:
            raise ShufflerRefused(Refusal.UNKNOWN_ROUND)
        return run, run.rounds[number]

    def _slots_of(self, run: Run) -> int:
        """How many reports a batch of a run has room for, those on their way too."""
        uploads = self._limits.uploads if run.report_bytes > PIECE_BYTES else 0
        if run.plan.mixing == "sum":
            return max(uploads, 1)
        return min(run.plan.users, self._limits.users) + run.plan.most_blankets + uploads

    def _bytes_of(self, run: Run) -> int:
        """How much of the disk a batch of a run takes."""
        return run.report_bytes * self._slots_of(run)
