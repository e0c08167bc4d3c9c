"""How much of a shuffler one server may take, by the name of its credential."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from shuffler.store.rounds import Run
from shuffler.wire.errors import Refusal, ShufflerRefused


@dataclass(frozen=True)
class Quota:
    """The most of one server.

    Attributes:
        runs: that have not ended.
        open_rounds: in all of its runs.
        disk_bytes: that the batches of its runs may take; None: as much as there is.
    """

    runs: int = sys.maxsize
    open_rounds: int = sys.maxsize
    disk_bytes: int | None = None

    def check_run(self, runs: Mapping[str, Run], owner: str) -> None:
        """Refuses a server one more run."""
        if len(_of(runs, owner)) >= self.runs:
            raise ShufflerRefused(
                Refusal.TOO_MANY_RUNS, f"a server has at most {self.runs} that have not ended"
            )

    def check_round(self, runs: Mapping[str, Run], run: Run, least_bytes: int) -> None:
        """Refuses the server of this run one more open round, or one without room to begin with."""
        own = _of(runs, run.owner)
        if self.room(runs, run.owner) < least_bytes:
            raise ShufflerRefused(Refusal.STORAGE_FULL, "this server's batches take all its room")
        taken = [r for r in own if r.opening is not None or r.open_round() is not None]
        if len(taken) >= self.open_rounds:
            raise ShufflerRefused(
                Refusal.TOO_MANY_ROUNDS, f"a server has at most {self.open_rounds} open at once"
            )

    def room(self, runs: Mapping[str, Run], owner: str) -> int:
        """How many bytes the batches of a server may still take."""
        if self.disk_bytes is None:
            return sys.maxsize
        spools = [entry.spool for run in _of(runs, owner) for entry in run.rounds.values()]
        return self.disk_bytes - sum(spool.disk_bytes() for spool in spools if spool is not None)


def _of(runs: Mapping[str, Run], owner: str) -> list[Run]:
    return [run for run in runs.values() if run.owner == owner]
