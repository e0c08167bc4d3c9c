"""How much of a shuffler one server may take, by the name of its credential."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shufl.shuffler.store.rounds import Run
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused


@dataclass(frozen=True)
class Quota:
    """The most that one server may have.

    Attributes:
        runs: runs that have not ended.
        open_rounds: open rounds in all of its runs.
        disk_bytes: disk for the batches of its runs; None: as much as there is. A batch takes
            all that could come into it, from its opening until it is destroyed: a server that opens
            rounds until it is refused must not learn how many reports have come.
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

    def check_round(
        self, runs: Mapping[str, Run], run: Run, bytes_of: Callable[[Run], int]
    ) -> None:
        """Refuses the server of this run one more open round, or one that may not fit.

        Args:
            runs: all of them.
            run: the one whose round is to be opened.
            bytes_of: how much a batch of a run takes.
        """
        own = _of(runs, run.owner)
        wanted = bytes_of(run) + sum(each.held * bytes_of(each) for each in own)
        if self.disk_bytes is not None and wanted > self.disk_bytes:
            raise ShufflerRefused(
                Refusal.STORAGE_FULL,
                f"the batches of this server would take {wanted / 1e9:g} GB, and they may take "
                f"{self.disk_bytes / 1e9:g}",
            )
        if sum(each.takes_reports for each in own) >= self.open_rounds:
            raise ShufflerRefused(
                Refusal.TOO_MANY_ROUNDS, f"a server has at most {self.open_rounds} open at once"
            )


def _of(runs: Mapping[str, Run], owner: str) -> list[Run]:
    return [run for run in runs.values() if run.owner == owner]
