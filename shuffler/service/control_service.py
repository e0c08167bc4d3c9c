"""What the server calls, runs, rounds and the release of a batch; and the record, for everybody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from grpc.aio import ServicerContext

from shufl.shuffler.callers import Caller
from shufl.shuffler.config import Limits
from shufl.shuffler.service.metrics import Metrics
from shufl.shuffler.store.batch import Batch
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.errors import Closed

# Log lines name runs and rounds: no senders, no counts, no contents, nothing for each report.
_log = logging.getLogger("shufl.shuffler")

_CHUNK_BYTES = 2**19
_T = TypeVar("_T")


class ControlService:
    """What the server may call, who has been admitted, and what everybody may.

    Attributes:
        releases: those in progress; each is done when its release has ended.
    """

    def __init__(self, store: RunStore, limits: Limits, metrics: Metrics) -> None:
        self.releases: set[asyncio.Future[None]] = set()
        self._store = store
        self._limits = limits
        self._metrics = metrics
        self._rounds: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._blankets = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blankets")
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="release")

    def call(self, function: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Runs a method of the store, in its turn."""
        return asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def stop(self) -> None:
        """Destroys all batches, when nothing else is being done; no blanket is waited for."""
        self._thread.shutdown()
        self._readers.shutdown()
        self._store.close()
        self._blankets.shutdown(cancel_futures=True)

    async def CreateRun(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Registers a run and its plan."""
        digest = await self.call(
            self._store.create_run, request.run_id, request.plan, request.report_bytes, caller.name
        )
        _log.info("run created", extra={"run": request.run_id})
        return shuffler_pb2.CreateRunReply(plan_digest=digest)

    async def Reserve(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Books the disk for the next round of a run."""
        await self._check_owner(request, caller)
        await self.call(self._store.reserve, request.run_id)
        return shuffler_pb2.ReserveReply()

    async def OpenRound(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Opens a round for reports."""
        about = request.run_id, request.round
        await self._check_owner(request, caller)
        opening = *about, request.model_digest, request.public_key
        nonce = await self.call(self._store.open_round, *opening)
        self._play(*about)
        _log.info("round opened", extra=_about(request))
        return shuffler_pb2.OpenRoundReply(nonce=nonce)

    async def CloseRound(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Answers when a round is over."""
        await self._check_owner(request, caller)
        about = request.run_id, request.round
        if await self.call(self._store.seconds_left, *about) is not None:  # it is open
            playing = self._play(*about)
            await asyncio.wait([playing])  # which goes on where the caller has gone
            with suppress(asyncio.CancelledError):  # by `EndRound` or `EndRun`
                playing.result()
        closed = await self._close(*about)
        return shuffler_pb2.CloseRoundReply(
            outcome=closed.outcome.name, senders=closed.senders, absent=closed.absent
        )

    def _play(self, run_id: str, number: int) -> asyncio.Task[None]:
        """Has a round's blankets made, and a round with a window closed at its end.

        Started again, it goes on. The same work is done whatever the secret number of blankets that
        are kept, so that whoever waits for it learns nothing.
        """
        key = run_id, number
        if key not in self._rounds:
            task = self._rounds[key] = asyncio.create_task(self._play_in_time(*key))
            task.add_done_callback(lambda done: self._played(key, done))
        return self._rounds[key]

    async def _play_in_time(self, run_id: str, number: int) -> None:
        loop, make = asyncio.get_running_loop(), self._store.batches.make_blankets
        has_window = bool(self._store.seconds_left(run_id, number))
        while await loop.run_in_executor(self._blankets, make, run_id, number):
            pass  # some at a time, in turn with other rounds
        while left := self._store.seconds_left(run_id, number):
            await asyncio.sleep(left)
        if has_window:
            await self._close(run_id, number)

    def _played(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._rounds[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            about = {"run": key[0], "round": key[1], "reason": str(error)}
            _log.error("a round cannot be closed", extra=about)  # whoever asks is told, too

    async def _close(self, run_id: str, number: int) -> Closed:
        closed, is_new = await self.call(self._close_once, run_id, number)
        if is_new:
            outcome = closed.outcome.name
            self._metrics.rounds.labels(outcome).inc()
            _log.info("round closed", extra={"run": run_id, "round": number, "outcome": outcome})
        return closed

    def _close_once(self, run_id: str, number: int) -> tuple[Closed, bool]:
        """What became of a round, and whether this has closed it."""
        was_open = self._store.seconds_left(run_id, number) is not None
        return self._store.close_round(run_id, number), was_open

    async def Release(self, request: Any, caller: Caller, context: ServicerContext) -> None:
        """Sends a closed batch."""
        await self._check_owner(request, caller)
        ended = asyncio.get_running_loop().create_future()
        self.releases.add(ended)
        try:
            await context.send_initial_metadata(())
            batch = await self.call(self._store.release, request.run_id, request.round)
            async with aclosing(self._chunks(batch)) as chunks:
                async for chunk in chunks:
                    async with asyncio.timeout(self._limits.idle_seconds):
                        await context.write(chunk)
        except TimeoutError:
            _log.warning("a release is not read", extra=_about(request))
            raise TimeoutError("the release is not read") from None
        finally:
            self.releases.discard(ended)
            ended.set_result(None)
        self._metrics.releases.inc()
        _log.info("batch released", extra=_about(request))

    async def _chunks(self, batch: Batch) -> AsyncGenerator[Any]:
        """The parts of a batch, each read while the one before it is sent."""
        loop, chunks = asyncio.get_running_loop(), batch.chunks(_CHUNK_BYTES)
        reading = loop.run_in_executor(self._readers, _next, chunks)
        try:
            while (chunk := await reading).sealed:
                reading = loop.run_in_executor(self._readers, _next, chunks)
                yield chunk
        finally:
            reading.cancel()
            # Where it has failed meanwhile, asyncio would log that nobody looked.
            await asyncio.gather(reading, return_exceptions=True)

    async def EndRound(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Destroys the batch of a round."""
        await self._check_owner(request, caller)
        await self.call(self._store.end_round, request.run_id, request.round)
        _log.info("round ended", extra=_about(request))
        if (playing := self._rounds.get((request.run_id, request.round))) is not None:
            playing.cancel()
        return shuffler_pb2.EndRoundReply()

    async def EndRun(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Destroys all batches of a run."""
        await self._check_owner(request, caller)
        await self.call(self._store.end_run, request.run_id)
        _log.info("run ended", extra={"run": request.run_id})
        for (run_id, _), playing in self._rounds.items():
            if run_id == request.run_id:
                playing.cancel()
        return shuffler_pb2.EndRunReply()

    async def Entries(self, request: Any, context: ServicerContext) -> Any:
        """Gives the next entries of the public record, to whoever can connect."""
        entries = await self.call(self._store.record, request.first)
        return shuffler_pb2.EntriesReply(entries=entries)

    async def _check_owner(self, request: Any, caller: Caller) -> None:
        await self.call(self._store.check_owner, request.run_id, caller.name)


def _about(request: Any) -> dict[str, Any]:
    return {"run": request.run_id, "round": request.round}


def _next(chunks: Iterator[tuple[list[bytes], bool]]) -> Any:
    sealed, more = next(chunks, ([], False))
    return shuffler_pb2.ReleaseChunk(sealed=sealed, more=more)
