"""The front: several shufflers ("workers") behind one round, which the server sees as one shuffler.

Each worker has a part of the users, who report there and nowhere else, and permutes its part. The
front closes all parts, compares their sum with the plan's minimum batch, and passes them on as one
batch, interleaved by `merge`: so every order of all reports is equally likely, and the server can
not tell which part one is from.

The front keeps nothing on disk and nothing in memory between two calls. What has become of a round
is what its workers say, and each of them keeps the rules alone: it releases its part once, to a
front, after closing. So a front may die at any moment and start again:

- Parts are released when *all* are closed and their sum is enough. That is asked anew before every
  release; a round that some have closed and others not is closed by closing it again.
- A part that can not be released any more (released, destroyed, lost) takes the others with it:
  what is left of them is destroyed at the next call about the round.
- No report is passed on before every worker has begun its release and sent what comes first.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from shuffler import shuffler_pb2
from shuffler.channel import CHANNEL_OPTIONS, WORKER_KEY
from shuffler.client import ControlClient
from shuffler.config import FrontLimits, FrontWorker
from shuffler.errors import Outcome, Refusal, ShufflerError, ShufflerRefused
from shuffler.gate import Gate
from shuffler.keys import Credentials, Revoked
from shuffler.merge import merge
from shuffler.operations import Metrics
from shuffler.runs import Workers
from shuffler.service import ControlServer

__all__ = ["Front", "FrontServer"]

_log = logging.getLogger("shuffler")

_S = TypeVar("_S")
_T = TypeVar("_T")

# Of several refusals the one that counts: any other first, then these. From the second on the batch
# can never be released.
_RANK = [
    Refusal.ROUND_NOT_CLOSED,
    Refusal.ALREADY_RELEASED,
    Refusal.BELOW_MINIMUM,
    Refusal.UNKNOWN_ROUND,
    Refusal.BATCH_LOST,
    Refusal.DISCARDED,
]
# What closing a round again answers, as a shuffler alone does.
_OUTCOMES = {
    Refusal.ALREADY_RELEASED: Outcome.RELEASABLE,
    Refusal.BELOW_MINIMUM: Outcome.BELOW_MINIMUM,
    Refusal.DISCARDED: Outcome.DISCARDED,
}


class Front:
    """Runs and rounds of several workers, with the methods of `RunStore` that the server needs.

    Everything blocks and is for one thread, except the reading of a batch that `begin_release`
    handed out. The methods raise `ShufflerRefused` with a worker's reason, or
    `WORKER_UNAVAILABLE`: then the same call can be made again.
    """

    def __init__(
        self, workers: Sequence[FrontWorker], credentials: Credentials, worker_seconds: float
    ) -> None:
        """Remembers where the workers are; connects when they are first needed.

        Args:
            workers: all of them.
            credentials: a front's.
            worker_seconds: longest wait for one answer of a worker, or one part of its release.
        """
        self._workers: Workers = [(worker.name, worker.users) for worker in workers]
        self._connect = [
            functools.partial(_WorkerClient, worker, credentials, worker_seconds)
            for worker in workers
        ]
        self._clients = [connect() for connect in self._connect]
        self._threads = ThreadPoolExecutor(len(workers), thread_name_prefix="worker")
        self._releases: dict[tuple[str, int], _MergedBatch] = {}

    def create_run(self, run_id: str, plan: bytes, report_bytes: int, workers: Workers) -> str:
        """Registers a run at all workers; refused if they have not room for the plan's users."""
        if workers:
            raise ShufflerRefused(Refusal.MALFORMED, "a front's workers are in its configuration")
        digests = _all(
            self._ask(lambda c: c.create_part(run_id, plan, report_bytes, self._workers))
        )
        return digests[0]

    def open_round(self, run_id: str, number: int, model_version: str) -> None:
        """Opens a round at all workers. One that opened only at some can be closed, and is lost."""
        _all(self._ask(lambda client: client.open_round(run_id, number, model_version)))

    def close_round(
        self, run_id: str, number: int, discard: bool, below_minimum: bool = False
    ) -> Outcome:
        """Ends the intake everywhere, and destroys all parts if they are too few or not wanted."""
        worst = _worst(self._ask(lambda client: client.close_round(run_id, number, discard)))
        if worst and worst.reason not in (Refusal.UNKNOWN_ROUND, Refusal.BATCH_LOST):
            raise worst
        try:
            self._count_parts(run_id, number)
        except ShufflerRefused as refused:
            if refused.reason not in _OUTCOMES:
                raise
            return _OUTCOMES[refused.reason]
        return Outcome.RELEASABLE

    def count(self, run_id: str, number: int, workers: Workers) -> NoReturn:
        """Refused: a front is no worker."""
        raise ShufflerRefused(Refusal.NOT_PERMITTED, "a front is no worker of a front")

    def begin_release(self, run_id: str, number: int) -> _MergedBatch:
        """Begins the release of all parts; if one can not begin, none is released."""
        counts = self._count_parts(run_id, number)
        clients = [connect() for connect in self._connect]
        streams = [client.release_chunks(run_id, number) for client in clients]
        try:
            firsts = _all(
                self._everywhere(lambda stream: list(itertools.islice(stream, 1)), streams)
            )
        except ShufflerRefused as refused:
            for client in clients:
                client.close()
            self._ask(lambda client: client.destroy(run_id, number, below_minimum=False))
            if refused.reason is Refusal.WORKER_UNAVAILABLE:
                raise ShufflerRefused(Refusal.BATCH_LOST, refused.detail) from refused
            raise
        parts = map(itertools.chain, firsts, streams)
        batch = self._releases[run_id, number] = _MergedBatch(clients, list(parts), counts)
        return batch

    def finish_release(self, run_id: str, number: int) -> None:
        """Ends a release, whether or not all of it was read: the workers destroy what is left."""
        self._releases.pop((run_id, number)).close()

    def end_run(self, run_id: str) -> None:
        """Destroys everything of a run at all workers."""
        found = self._ask(lambda client: client.end_run(run_id))
        # A run that could not be created everywhere is ended where it is.
        _all([each for each in found if not _unknown(each)] or found)

    def close(self) -> None:
        """Closes all connections."""
        for batch in self._releases.values():
            batch.close()
        for client in self._clients:
            client.close()
        self._threads.shutdown()

    def _count_parts(self, run_id: str, number: int) -> list[int]:
        """The number of reports in each part, if all are closed and together enough.

        Otherwise, unless a part is still open, all that is left of the batch is destroyed.
        """
        found = self._ask(lambda client: client.count(run_id, number, self._workers))
        worst = _worst(found)
        if worst is None:
            replies = _all(found)
            if len({reply.plan_digest for reply in replies}) > 1:
                raise ShufflerRefused(Refusal.RUN_EXISTS, "the workers have different plans")
            counts = [int(reply.reports) for reply in replies]
            if sum(counts) >= replies[0].minimum_batch:
                return counts
            worst = ShufflerRefused(
                Refusal.BELOW_MINIMUM, "the batch was below the plan's minimum and is destroyed"
            )
        if worst.reason in _RANK[1:]:
            below = worst.reason is Refusal.BELOW_MINIMUM
            left = [
                client
                for client, reply in zip(self._clients, found, strict=True)
                if not isinstance(reply, ShufflerRefused)
            ]
            _all(self._everywhere(lambda client: client.destroy(run_id, number, below), left))
        raise worst

    def _ask(self, call: Callable[[_WorkerClient], _T]) -> list[_T | ShufflerRefused]:
        return self._everywhere(call, self._clients)

    def _everywhere(
        self, call: Callable[[_S], _T], targets: Sequence[_S]
    ) -> list[_T | ShufflerRefused]:
        """Makes a call on all targets at once; the answers in order, or what was refused."""

        def answer(target: _S) -> _T | ShufflerRefused:
            try:
                return call(target)
            except ShufflerRefused as refused:
                return refused
            except ShufflerError as error:
                return ShufflerRefused(Refusal.WORKER_UNAVAILABLE, str(error))

        return list(self._threads.map(answer, targets))


def _worst(found: Sequence[object]) -> ShufflerRefused | None:
    """The refusal that counts, if there is any."""
    refusals = [each for each in found if isinstance(each, ShufflerRefused)]
    return min(refusals, key=_rank, default=None)


def _rank(refused: ShufflerRefused) -> int:
    return _RANK.index(refused.reason) if refused.reason in _RANK else -1


def _all(found: Sequence[_T | ShufflerRefused]) -> list[_T]:
    """The answers, if nothing was refused."""
    worst = _worst(found)
    if worst is not None:
        raise worst
    return [each for each in found if not isinstance(each, ShufflerRefused)]


def _unknown(answer: object) -> bool:
    return isinstance(answer, ShufflerRefused) and answer.reason is Refusal.UNKNOWN_RUN


class _MergedBatch:
    """The parts of a round as one batch in uniformly random order.

    Memory: one message for each part, and what its connection receives ahead (a fixed window).
    """

    def __init__(
        self,
        clients: Sequence[_WorkerClient],
        parts: Sequence[Iterable[Any]],
        counts: Sequence[int],
    ) -> None:
        self._clients = clients
        self._reports = merge([_reports(iter(part)) for part in parts], counts)
        self._pieces: Iterator[tuple[bytes, bool]] = iter(())  # of a long report, not yet passed on

    def next_chunk(self, limit: int) -> tuple[list[bytes], bool]:
        """The next reports of at most `limit` bytes in all, or a piece of one; see `RoundSpool`.

        Raises:
            ShufflerRefused: `BATCH_LOST` if a worker breaks off.
        """
        try:
            # All of a report before the next one's part is drawn.
            for piece, more in self._pieces:
                return [piece], more
            reports: list[bytes] = []
            length = 0
            for report in self._reports:
                piece, more = next(report)
                if more:
                    self._pieces = report
                    return [piece], True
                reports.append(piece)
                length += len(piece)
                if length + len(piece) > limit:  # they are all of one length
                    break
            return reports, False
        except (ShufflerError, ValueError) as error:
            # For the operator: the server must not learn whose reports it has not got.
            _log.error("a worker broke off its release", extra={"reason": str(error)})
            raise ShufflerRefused(Refusal.BATCH_LOST, "a worker broke off its release") from error

    def close(self) -> None:
        """Breaks off what is still being released; from any thread."""
        for client in self._clients:
            client.close()


def _reports(chunks: Iterator[Any]) -> Iterator[Iterator[tuple[bytes, bool]]]:
    """Each report of a release as pairs of a piece and whether more follow; to be used in order."""
    for chunk in chunks:
        if chunk.more:
            yield _pieces(chunk, chunks)
        else:
            for sealed in chunk.sealed:
                yield iter([(sealed, False)])


def _pieces(chunk: Any, chunks: Iterator[Any]) -> Iterator[tuple[bytes, bool]]:
    yield chunk.sealed[0], True
    for following in chunks:
        yield following.sealed[0], following.more
        if not following.more:
            return
    raise ValueError("a report has no end")


class _WorkerClient(ControlClient):
    """What a front asks of a worker, beside what a server asks of a shuffler."""

    _options = (
        *CHANNEL_OPTIONS,
        # A release is received hardly further ahead than it is read, and no more if that is slow.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 2**16),
    )

    def __init__(self, worker: FrontWorker, credentials: Credentials, timeout: float) -> None:
        super().__init__(worker.address, credentials, timeout)
        self._metadata = ((WORKER_KEY, worker.name),)  # another worker there refuses the call

    def create_part(self, run_id: str, plan: bytes, report_bytes: int, workers: Workers) -> str:
        request = shuffler_pb2.CreateRunRequest(
            run_id=run_id, plan=plan, report_bytes=report_bytes, workers=_messages(workers)
        )
        return str(self._call("CreateRun", request).plan_digest)

    def count(self, run_id: str, round: int, workers: Workers) -> Any:
        request = shuffler_pb2.CountRequest(run_id=run_id, round=round, workers=_messages(workers))
        return self._call("Count", request)

    def destroy(self, run_id: str, round: int, below_minimum: bool) -> None:
        request = shuffler_pb2.CloseRoundRequest(
            run_id=run_id, round=round, discard=not below_minimum, below_minimum=below_minimum
        )
        self._call("CloseRound", request)


def _messages(workers: Workers) -> list[Any]:
    return [shuffler_pb2.Worker(name=name, users=users) for name, users in workers]


class _Thread:
    """Calls the front's methods one after the other, as `Intake` does with a store's."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="front")

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        await self.call(self._front.close)
        self._thread.shutdown()


class FrontServer(ControlServer):
    """The front's gRPC server. Use inside one running event loop."""

    def __init__(
        self,
        workers: Sequence[FrontWorker],
        credentials: Credentials,
        revoked: Revoked,
        limits: FrontLimits,
        metrics: Metrics,
    ) -> None:
        """Prepares the server; nothing listens yet.

        Args:
            workers: all of the front's workers.
            credentials: the front's, for both its sides: it serves the server and calls workers.
            revoked: whose calls are refused, also on connections that are open.
            limits: how long things may take.
            metrics: what is counted.
        """
        front = Front(workers, credentials, limits.worker_seconds)
        gate = Gate(None, revoked, metrics)
        super().__init__(front, _Thread(front), gate, credentials, limits, metrics)
