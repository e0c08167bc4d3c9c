"""What comes into the batches of open rounds: users' reports, and the shuffler's own blankets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from shufl.accounting.mechanisms import Randomness
from shufl.shuffler.callers import Caller
from shufl.shuffler.store.batch import Batch, Slot, storage_refusal
from shufl.shuffler.store.rounds import Round, Run
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict
from shufl.shuffler.wire.reports import empty_report, encode_report, report_length
from shufl.shuffler.wire.sealing import RoundHeader, payload_length, seal

_TOGETHER = 2**21  # numbers of blankets whose noise is drawn at once, at most


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One sealed report as it was submitted.

    Attributes:
        run_id: for which run it was submitted.
        round: for which round.
        commitment: that of the header that it was sealed for.
        user: which of the sender's users reports.
        sealed: the report; of one in pieces the first.
        caller: who submitted it, and for how many users it speaks.
    """

    run_id: str
    round: int
    commitment: str
    user: int
    sealed: bytes
    caller: Caller


class OpenBatches:
    """Takes reports and blankets into the open rounds of some runs. Any thread may use it."""

    def __init__(self, runs: Mapping[str, Run], randomness: Randomness) -> None:
        self._runs = runs
        self._randomness = randomness

    def header(self, run_id: str, number: int) -> RoundHeader:
        """What reports of an open round are bound to.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, or `UNKNOWN_ROUND` where it is not open.
        """
        entry = self._open_round(run_id, number)
        if entry is None or entry.header is None:
            if run_id not in self._runs:
                raise ShufflerRefused(Refusal.UNKNOWN_RUN)
            raise ShufflerRefused(Refusal.UNKNOWN_ROUND, "this round is not open")
        return entry.header

    def accept(self, report: Report, slot: Slot | None = None) -> Verdict:
        """Takes a report, or says why not; `slot`: where the pieces of one are, then given back."""
        batch, users, verdict = self._examine(report)
        if batch is not None:
            return batch.add(report.caller.name, report.user, users, slot or report.sealed)
        if slot is not None:
            slot.give_up()
        return verdict

    def begin(self, report: Report) -> Slot | Verdict:
        """Where to write a report in pieces, before `accept`; or why it would not be accepted."""
        batch, _, verdict = self._examine(report)
        return batch.reserve(report.caller.name, report.user) if batch is not None else verdict

    def make_blankets(self, run_id: str, number: int) -> bool:
        """Makes some of the reports of a round's own, and puts them into its batch.

        A blanket comes from the same mechanism and the same source of randomness as a user's
        report, and is sealed in the same way, so that nothing in it tells the two apart.
        docs/theory-blanket.md proves what Poisson many of them hide. Always as many are made as
        there may be. Those beyond the number that was drawn are empty reports under a plan with
        cover, so that their number in a batch tells nothing; without it they are thrown away.

        Returns:
            Whether more are to be made.

        Raises:
            ShufflerRefused: the disk is full or fails; called again, it goes on.
        """
        entry = self._open_round(run_id, number)
        if entry is None or entry.batch is None or entry.header is None:
            return False
        run, batch, header = self._runs[run_id], entry.batch, entry.header
        plan, mechanism = run.plan, run.plan.mechanism
        if entry.made == plan.most_blankets:
            return False
        dimension = payload_length(run.report_bytes, entry.public_key) // report_length(1)
        draws = mechanism.draws(dimension)
        empty, zero = empty_report(dimension), np.zeros(dimension)
        together = max(1, _TOGETHER // draws)
        numbers = np.arange(entry.made, min(entry.made + together, plan.most_blankets))
        noises = self._randomness.blanket_noise(number, numbers, draws)
        for own, noise in zip(numbers.tolist(), noises, strict=True):
            drawn = own < entry.blankets
            report = encode_report(mechanism.report(zero, noise))
            if plan.cover and not drawn:
                report = empty
            sealed = seal(report, entry.public_key, header)
            try:
                if not batch.add_own(sealed, keep=drawn or plan.cover):
                    return False
            except OSError as error:
                raise storage_refusal(error) from error
            entry.made += 1
        return True

    def _open_round(self, run_id: str, number: int) -> Round | None:
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        return entry if entry is not None and entry.is_open else None

    def _examine(self, report: Report) -> tuple[Batch | None, int, Verdict]:
        """The batch for a report and how many users its sender has, or why there is none."""
        entry, run = self._open_round(report.run_id, report.round), self._runs.get(report.run_id)
        batch = entry.batch if entry is not None else None  # once: another thread may close it
        if run is None:
            return None, 0, Verdict.UNKNOWN_RUN
        if entry is None or entry.header is None or batch is None:
            return None, 0, Verdict.ROUND_NOT_OPEN
        if report.commitment != entry.header.commitment:
            return None, 0, Verdict.WRONG_COMMITMENT
        users = min(report.caller.users, run.plan.users)
        if report.user >= users:
            return None, 0, Verdict.BAD_SENDER
        return batch, users, Verdict.ACCEPTED
