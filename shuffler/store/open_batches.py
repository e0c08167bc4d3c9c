"""What comes into the batches of open rounds: users' reports, and the shuffler's own blankets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shufl.protocol.mechanisms import Randomness
from shufl.shuffler.callers import Caller
from shufl.shuffler.store.batch import Piece
from shufl.shuffler.store.blankets import make_blankets
from shufl.shuffler.store.rounds import Round, Run
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict
from shufl.shuffler.wire.sealing import RoundHeader


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """One sealed report as it was submitted.

    Attributes:
        run_id: for which run it was submitted.
        round: for which round.
        commitment: that of the header that it was sealed for.
        users: which of the sender's users report: one, or with sums several together.
        sealed: the report, or a piece of it.
        caller: who submitted it, and for how many users it speaks.
        piece: which piece of a long report it is; None: it is whole.
    """

    run_id: str
    round: int
    commitment: str
    users: range
    sealed: bytes
    caller: Caller
    piece: Piece | None = None


class OpenBatches:
    """Takes reports and blankets into the open rounds of some runs. Any thread may use it."""

    def __init__(self, runs: Mapping[str, Run], randomness: Randomness) -> None:
        self._runs = runs
        self._randomness = randomness

    def agree(self, run_id: str, number: int, shown: str, node: str) -> tuple[RoundHeader, float]:
        """What reports of an open round are bound to, and how many seconds its window has left.

        Remembers that this node was `shown` the commitment of what the shuffler was given, if so.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, or `UNKNOWN_ROUND` where it is not open.
        """
        entry = self._open_round(run_id, number)
        if entry is None or entry.header is None or entry.is_over:
            if run_id not in self._runs:
                raise ShufflerRefused(Refusal.UNKNOWN_RUN)
            raise ShufflerRefused(Refusal.UNKNOWN_ROUND, "this round is not open")
        if shown == dataclasses.replace(entry.header, nonce=b"").commitment:
            entry.agreed.add(node)
        return entry.header, entry.seconds_left

    def accept(self, report: Report) -> Verdict | None:
        """Takes a report, or a piece of one, or says why not; None while pieces are missing.

        Raises:
            ShufflerRefused: `BUSY`: too many long reports are on their way.
        """
        entry, run = self._open_round(report.run_id, report.round), self._runs.get(report.run_id)
        batch = entry.batch if entry is not None else None  # once: another thread may close it
        if run is None:
            return Verdict.UNKNOWN_RUN
        if entry is None or entry.header is None or batch is None or entry.is_over:
            return Verdict.ROUND_NOT_OPEN
        if report.commitment != entry.header.commitment:
            return Verdict.WRONG_COMMITMENT
        caller, users = report.caller, report.users
        most = min(caller.users, run.plan.users)
        if users[-1] >= most or (users[1:2] and run.plan.mixing != "sum"):
            return Verdict.BAD_SENDER
        return batch.add(caller.name, users, most, report.sealed, report.piece)

    def make_blankets(self, run_id: str, number: int) -> bool:
        """Makes some of the reports of a round's own: `make_blankets` of `shuffler.store.blankets`.

        Returns:
            Whether more are to be made.

        Raises:
            ShufflerRefused: the disk is full or fails; called again, it goes on.
        """
        entry = self._open_round(run_id, number)
        if entry is None:
            return False
        return make_blankets(self._runs[run_id], entry, number, self._randomness)

    def _open_round(self, run_id: str, number: int) -> Round | None:
        run = self._runs.get(run_id)
        entry = run.rounds.get(number) if run is not None else None
        return entry if entry is not None and entry.is_open else None
