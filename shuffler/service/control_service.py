"""The service that the server calls: runs, rounds and the release of a batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import grpc

from shufl.shuffler.callers import Caller
from shufl.shuffler.config import Limits
from shufl.shuffler.service.blanket_tasks import BlanketTasks
from shufl.shuffler.service.intake import Intake
from shufl.shuffler.service.operations import Metrics
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.store.spool import RoundSpool
from shufl.shuffler.wire import shuffler_pb2

# Log lines name runs and rounds: no senders, no counts, no contents, nothing for each report.
_log = logging.getLogger("shufl.shuffler")

_CHUNK_BYTES = 2**19


class ControlService:
    """What the server may call; whoever calls has been admitted.

    Attributes:
        releases: those in progress; each is done when its release has ended.
        openers: make the files of rounds.
    """

    def __init__(
        self,
        intake: Intake,
        store: RunStore,
        blankets: BlanketTasks,
        readers: ThreadPoolExecutor,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.releases: set[asyncio.Future[None]] = set()
        self.openers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="open")
        self._opening: dict[str, asyncio.Lock] = {}  # of one server one round at a time
        self._blankets = blankets
        self._intake = intake
        self._store = store
        self._readers = readers
        self._limits = limits
        self._metrics = metrics

    async def CreateRun(
        self, request: Any, caller: Caller, context: grpc.aio.ServicerContext
    ) -> Any:
        """Registers a run and its plan."""
        digest = await self._intake.call(
            self._store.create_run, request.run_id, request.plan, request.report_bytes, caller.name
        )
        _log.info("run created", extra={"run": request.run_id})
        return shuffler_pb2.CreateRunReply(plan_digest=digest)

    async def OpenRound(
        self, request: Any, caller: Caller, context: grpc.aio.ServicerContext
    ) -> Any:
        """Opens a round for reports."""
        about = request.run_id, request.round
        await self._check_owner(request, caller)
        loop = asyncio.get_running_loop()

        async def call(step: Callable[[], Any]) -> Any:
            return await self._intake.call(step)

        def in_turn(step: Callable[[], Any]) -> Any:
            return asyncio.run_coroutine_threadsafe(call(step), loop).result()

        opening = *about, request.model_digest, request.public_key, in_turn
        async with self._opening.setdefault(caller.name, asyncio.Lock()):
            opened = loop.run_in_executor(self.openers, self._store.open_round, *opening)
            await asyncio.shield(opened)
        self._blankets.start(*about)
        _log.info("round opened", extra=_about(request))
        return shuffler_pb2.OpenRoundReply()

    async def CloseRound(
        self, request: Any, caller: Caller, context: grpc.aio.ServicerContext
    ) -> Any:
        """Ends a round's intake, when its blankets are made."""
        about = request.run_id, request.round
        await self._check_owner(request, caller)
        if not request.discard:
            await self._blankets.finish(*about)
        outcome = await self._intake.call(self._store.close_round, *about, request.discard)
        self._metrics.rounds.labels(outcome.name).inc()
        _log.info("round closed", extra={**_about(request), "outcome": outcome.name})
        return shuffler_pb2.CloseRoundReply(outcome=outcome.name)

    async def Release(
        self, request: Any, caller: Caller, context: grpc.aio.ServicerContext
    ) -> None:
        """Sends a closed batch, once."""
        await self._check_owner(request, caller)
        begun: list[RoundSpool] = []

        def begin() -> None:
            begun.append(self._store.begin_release(request.run_id, request.round))

        def finish() -> None:
            if begun:
                about = request.run_id, request.round
                self._store.finish_release(*about, self._readers.submit)

        ended = asyncio.get_running_loop().create_future()
        self.releases.add(ended)
        try:
            await context.send_initial_metadata(())
            await self._intake.call(begin)
            async with aclosing(self._chunks(begun[0])) as chunks:
                async for chunk in chunks:
                    async with asyncio.timeout(self._limits.release_idle_seconds):
                        await context.write(chunk)
        except TimeoutError:
            _log.warning("batch lost: its release is not read", extra=_about(request))
            raise TimeoutError("the release is not read") from None
        finally:
            # Whatever has become of this call: what it began is over, and the batch gone.
            try:
                await asyncio.shield(self._intake.call(finish))
            finally:
                self.releases.discard(ended)
                ended.set_result(None)
        self._metrics.releases.inc()
        _log.info("batch released", extra=_about(request))

    async def _chunks(self, spool: RoundSpool) -> AsyncGenerator[Any]:
        """The parts of a batch, each read while the one before it is sent."""
        loop = asyncio.get_running_loop()
        reading = loop.run_in_executor(self._readers, _next, spool)
        try:
            while (chunk := await reading).sealed:
                reading = loop.run_in_executor(self._readers, _next, spool)
                yield chunk
        finally:
            reading.cancel()
            # Where it has failed meanwhile, asyncio would log that nobody looked.
            await asyncio.gather(reading, return_exceptions=True)

    async def EndRun(self, request: Any, caller: Caller, context: grpc.aio.ServicerContext) -> Any:
        """Destroys all batches and the plan of a run."""
        await self._check_owner(request, caller)
        await self._intake.call(self._store.end_run, request.run_id)
        _log.info("run ended", extra={"run": request.run_id})
        return shuffler_pb2.EndRunReply()

    async def _check_owner(self, request: Any, caller: Caller) -> None:
        await self._intake.call(self._store.check_owner, request.run_id, caller.name)


def _about(request: Any) -> dict[str, Any]:
    return {"run": request.run_id, "round": request.round}


def _next(spool: RoundSpool) -> Any:
    sealed, more = spool.next_chunk(_CHUNK_BYTES)
    return shuffler_pb2.ReleaseChunk(sealed=sealed, more=more)
