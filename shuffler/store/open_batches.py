"""What comes into the batches of open rounds: users' reports, and the shuffler's own blankets."""

from __future__ import annotations

import dataclasses
import functools
import sqlite3
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from shufl.accounting.mechanisms import Randomness
from shufl.shuffler.callers import Caller
from shufl.shuffler.store.rounds import Round, RoundState, Run
from shufl.shuffler.store.slots import Slot
from shufl.shuffler.store.spool import RoundSpool
from shufl.shuffler.store.spool_rows import BlanketsLeft
from shufl.shuffler.store.storage import Disk, storage_errors, storage_verdict
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict
from shufl.shuffler.wire.reports import empty_report, encode_report, report_length
from shufl.shuffler.wire.sealing import payload_length, seal

_BLANKET_BYTES = 2**22  # made at once, at most
_BLANKETS = 256  # the same


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One sealed report as it was submitted.

    Attributes:
        run_id: for which run it was submitted.
        round: for which round.
        commitment: what its sender was shown of the round.
        user: which of the sender's users reports.
        sealed: empty where the report came in pieces.
        caller: who submitted it, and for how many users it speaks.
        slot: where the pieces are.
    """

    run_id: str
    round: int
    commitment: str
    user: int
    sealed: bytes
    caller: Caller
    slot: Slot | None = None


class OpenBatches:
    """Takes reports and blankets into the open rounds of the runs that it is given."""

    def __init__(self, runs: Mapping[str, Run], disk: Disk, randomness: Randomness) -> None:
        self._runs = runs
        self._disk = disk
        self._randomness = randomness

    def commitment(self, run_id: str, number: int) -> str:
        """What everybody is to be shown of an open round (`RoundHeader.commitment`).

        Only looks into dictionaries, so that any thread may ask.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, or `UNKNOWN_ROUND` where it is not open.
        """
        run = self._runs.get(run_id)
        if run is None:
            raise ShufflerRefused(Refusal.UNKNOWN_RUN)
        entry = run.rounds.get(number)
        if entry is None or entry.state is not RoundState.OPEN:
            raise ShufflerRefused(Refusal.UNKNOWN_ROUND, "this round is not open")
        return run.header(entry).commitment

    def accept(self, reports: Sequence[Report]) -> list[Verdict]:
        """Stores what may be stored, with one commit for each round; answers in order.

        An answer `ACCEPTED` means that the report is on disk. A full or failing disk is a verdict,
        not an error, and leaves nothing of the reports concerned.
        """
        verdicts = [self._examine(report) for report in reports]
        groups: dict[str, list[int]] = {}  # a run has one open round
        for index, report in enumerate(reports):
            if verdicts[index] is Verdict.ACCEPTED:
                groups.setdefault(report.run_id, []).append(index)
            elif report.slot is not None:
                report.slot.give_up()
        for run_id, indices in groups.items():
            stored = self._store(run_id, [reports[index] for index in indices])
            for index, verdict in zip(indices, stored, strict=True):
                verdicts[index] = verdict
        return verdicts

    def begin(self, report: Report) -> Slot | Verdict:
        """A slot for a report in pieces, or why it would not be accepted.

        `write` writes the pieces; then `accept` takes the report, or the slot is given up.
        """
        verdict = self._examine(report, whole=False)
        spool = self._spool(report.run_id)
        if verdict is not Verdict.ACCEPTED or spool is None:
            return verdict
        try:
            if spool.has_reported(report.caller.name, report.user):
                return Verdict.DUPLICATE
            if self._disk.room() < 0:
                return Verdict.STORAGE_FULL
            return spool.reserve() or Verdict.ROUND_FULL
        except (sqlite3.Error, OSError) as error:
            return storage_verdict(error)

    def write(self, slot: Slot, pieces: Sequence[bytes]) -> None:
        """Writes the next pieces of a report, in any thread; what goes wrong is its verdict."""
        slot.append(pieces, self._disk)

    def next_blankets(self, run_id: str, number: int) -> Callable[[], list[bytes]] | None:
        """What makes the next blankets of an open round, in any thread.

        None: all are made, or none are wanted, or the round is over.
        """
        spool = self._spool(run_id, number)
        if spool is None or spool.blankets.made == spool.blankets.work:
            return None
        run = self._runs[run_id]
        return functools.partial(
            _make_blankets, run, run.rounds[number], self._randomness, spool.blankets
        )

    def add_blankets(self, run_id: str, number: int, sealed: Sequence[bytes]) -> None:
        """Stores the next blankets of a round; those of a round that is over are dropped.

        What is refused, because the disk is full or fails, is still to be made.
        """
        spool = self._spool(run_id, number)
        if spool is not None:
            with storage_errors():
                self._disk.require(len(sealed) * self._runs[run_id].report_cost)
                spool.add_blankets(sealed)

    def _spool(self, run_id: str, number: int | None = None) -> RoundSpool | None:
        """The batch of a run's open round, if there is one and it has this number."""
        run = self._runs.get(run_id)
        entry = run.open_round() if run is not None else None
        if entry is None or number not in (None, entry.number):
            return None
        return entry.spool

    def _examine(self, report: Report, whole: bool = True) -> Verdict:
        """The verdict on a report by all rules but the batch's own; `whole`: all of it is there."""
        slot, run = report.slot, self._runs.get(report.run_id)
        if run is None:
            return Verdict.UNKNOWN_RUN
        entry = run.rounds.get(report.round)
        if entry is None or entry.state is not RoundState.OPEN:
            return Verdict.ROUND_NOT_OPEN
        if report.commitment != run.header(entry).commitment:
            return Verdict.WRONG_COMMITMENT
        if report.user >= min(report.caller.users, run.plan.users):
            return Verdict.BAD_SENDER
        if slot is not None and slot.verdict is not Verdict.ACCEPTED:
            return slot.verdict
        fits = slot.complete if slot is not None else len(report.sealed) == run.report_bytes
        return Verdict.ACCEPTED if fits or not whole else Verdict.WRONG_LENGTH

    def _store(self, run_id: str, reports: Sequence[Report]) -> list[Verdict]:
        """Stores as many of the reports as the disk has room for."""
        spool = self._spool(run_id)
        assert spool is not None
        room = max(0, self._disk.room() // self._runs[run_id].report_cost)
        rows = [
            (report.caller.name, report.user, report.slot or report.sealed)
            for report in reports[:room]
        ]
        try:
            verdicts = spool.add(rows)
        except (sqlite3.Error, OSError) as error:
            verdicts = [storage_verdict(error)] * len(rows)
        for report in reports[room:]:
            if report.slot is not None:
                report.slot.give_up()
        return verdicts + [Verdict.STORAGE_FULL] * (len(reports) - len(rows))


def _make_blankets(
    run: Run, round: Round, randomness: Randomness, left: BlanketsLeft
) -> list[bytes]:
    """The next of a round's blankets, sealed; in any thread.

    A blanket comes from the same mechanism and the same source of randomness as a user's report,
    and is sealed in the same way, so that nothing in it tells the two apart.
    docs/theory-blanket.md proves what Poisson many of them hide. With cover those beyond the number
    that was drawn are empty, so that there are as many blankets and empty reports in every round,
    and the number of the empty ones tells the server nothing that the others' does not.
    """
    mechanism = run.plan.mechanism
    dimension = payload_length(run.report_bytes, round.public_key) // report_length(1)
    count = max(1, min(_BLANKETS, _BLANKET_BYTES // report_length(dimension)))
    empty = empty_report(dimension)
    zero, header, sealed = np.zeros(dimension), run.header(round), []
    draws = mechanism.draws(dimension)
    for number in range(left.made, min(left.made + count, left.work)):
        (noise,) = randomness.blanket_noise(round.number, np.array([number]), draws)
        report = encode_report(mechanism.report(zero, noise))
        if run.plan.cover and number >= left.drawn:
            report = empty
        sealed.append(seal(report, round.public_key, header))
    return sealed
