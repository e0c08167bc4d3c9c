"""How much of a shuffler one server may take, by the name of its credential."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shufl.shuffler.config import Limits
from shufl.shuffler.store.rounds import Run
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused


def check_run(limits: Limits, runs: Mapping[str, Run], owner: str) -> None:
    """Refuses a server one more run."""
    most = limits.runs_per_server
    if len(_of(runs, owner)) >= most:
        why = f"a server has at most {most} that have not ended"
        raise ShufflerRefused(Refusal.TOO_MANY_RUNS, why)


def check_round(
    limits: Limits, runs: Mapping[str, Run], run: Run, bytes_of: Callable[[Run], int]
) -> None:
    """Refuses the server of this run one more open round, or one that may not fit.

    Args:
        limits: the shuffler's.
        runs: all of them.
        run: the one whose round is to be opened.
        bytes_of: how much a batch of a run takes.
    """
    own = _of(runs, run.owner)
    wanted = (bytes_of(run) + sum(each.held * bytes_of(each) for each in own)) / 1e9
    room, most = limits.disk_gigabytes_per_server, limits.open_rounds_per_server
    if room is not None and wanted > room:
        why = f"the batches of this server would take {wanted:g} GB, and they may take {room:g}"
        raise ShufflerRefused(Refusal.STORAGE_FULL, why)
    if sum(each.takes_reports for each in own) >= most:
        why = f"a server has at most {most} open at once"
        raise ShufflerRefused(Refusal.TOO_MANY_ROUNDS, why)


def _of(runs: Mapping[str, Run], owner: str) -> list[Run]:
    return [run for run in runs.values() if run.owner == owner]
