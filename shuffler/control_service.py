"""The service that the server calls: runs, rounds and the release of a batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc

from shuffler import shuffler_pb2, shuffler_pb2_grpc
from shuffler.config import FrontLimits, Limits
from shuffler.errors import Outcome, ShufflerRefused
from shuffler.gate import Gate, abort
from shuffler.keys import Role
from shuffler.operations import Metrics
from shuffler.runs import Workers

__all__ = ["Calls", "ControlService", "Rounds"]

# Log lines name runs and rounds: no senders, no counts, no contents, nothing for each report.
_log = logging.getLogger("shuffler")

_CHUNK_BYTES = 2**19


class _Batch(Protocol):
    def next_chunk(self, limit: int) -> tuple[list[bytes], bool]: ...


class Rounds(Protocol):
    """Runs and rounds: a shuffler's own (`RunStore`), or those of a front's workers (`Front`)."""

    def create_run(self, run_id: str, plan: bytes, length: int, workers: Workers, /) -> str:
        """See `RunStore.create_run`."""

    def open_round(self, run_id: str, number: int, model_version: str, /) -> None:
        """See `RunStore.open_round`."""

    def close_round(
        self, run_id: str, number: int, discard: bool, below_minimum: bool, /
    ) -> Outcome:
        """See `RunStore.close_round`."""

    def count(self, run_id: str, number: int, workers: Workers, /) -> tuple[int, int, str]:
        """See `RunStore.count`."""

    def begin_release(self, run_id: str, number: int, /) -> _Batch:
        """See `RunStore.begin_release`."""

    def finish_release(self, run_id: str, number: int, /) -> None:
        """See `RunStore.finish_release`."""

    def end_run(self, run_id: str, /) -> None:
        """See `RunStore.end_run`."""


class Calls(Protocol):
    """Calls functions in a thread, in order: each after all that were given before."""

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises."""

    async def close(self) -> None:
        """Returns when all has been called."""


class ControlService(shuffler_pb2_grpc.ControlServicer):
    """What the server may call; at a worker, the front."""

    def __init__(
        self,
        gate: Gate,
        calls: Calls,
        rounds: Rounds,
        readers: ThreadPoolExecutor,
        limits: Limits | FrontLimits,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._calls = calls
        self._rounds = rounds
        self._readers = readers
        self._limits = limits
        self._metrics = metrics
        self.releases: set[object] = set()  # those in progress

    async def CreateRun(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Registers a run and its plan."""
        await self._gate.admit(context, Role.SERVER)
        digest = await self._call(
            context,
            self._rounds.create_run,
            request.run_id,
            request.plan,
            request.report_bytes,
            _workers(request),
        )
        _log.info("run created", extra={"run": request.run_id})
        return shuffler_pb2.CreateRunReply(plan_digest=digest)

    async def OpenRound(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Opens a round for reports."""
        await self._gate.admit(context, Role.SERVER)
        await self._call(
            context, self._rounds.open_round, request.run_id, request.round, request.model_version
        )
        _log.info("round opened", extra=_about(request))
        return shuffler_pb2.OpenRoundReply()

    async def CloseRound(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Ends a round's intake."""
        await self._gate.admit(context, Role.SERVER)
        outcome = await self._call(
            context,
            self._rounds.close_round,
            request.run_id,
            request.round,
            request.discard,
            request.below_minimum,
        )
        name = shuffler_pb2.Outcome.Name(outcome)
        self._metrics.rounds.labels(name).inc()
        _log.info("round closed", extra={**_about(request), "outcome": name})
        return shuffler_pb2.CloseRoundReply(outcome=name)

    async def Release(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Sends a closed batch, once."""
        await self._gate.admit(context, Role.SERVER)
        release = object()
        self.releases.add(release)
        ended: ShufflerRefused | str | None = None
        try:
            await context.send_initial_metadata(())
            await self._release(request, context)
        except ShufflerRefused as refused:
            ended = refused
        except TimeoutError:
            _log.warning("batch lost: its release is not read", extra=_about(request))
            ended = "the release is not read"
        finally:
            self.releases.discard(release)
        if ended is not None:
            await abort(context, ended, self._metrics)
        self._metrics.releases.inc()
        _log.info("batch released", extra=_about(request))

    async def _release(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Sends a batch; raises `TimeoutError` when its caller does not read."""
        begun: list[_Batch] = []

        def begin() -> None:
            begun.append(self._rounds.begin_release(request.run_id, request.round))

        def finish() -> None:
            if begun:
                self._rounds.finish_release(request.run_id, request.round)

        loop = asyncio.get_running_loop()
        try:
            await self._calls.call(begin)
            while True:
                sealed, more = await loop.run_in_executor(
                    self._readers, begun[0].next_chunk, _CHUNK_BYTES
                )
                if not sealed:
                    break
                async with asyncio.timeout(self._limits.release_idle_seconds):
                    await context.write(shuffler_pb2.ReleaseChunk(sealed=sealed, more=more))
        finally:
            # Whatever has become of this call: what it began is over, and the batch gone.
            await asyncio.shield(asyncio.ensure_future(self._calls.call(finish)))

    async def EndRun(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Destroys all batches and the plan of a run."""
        await self._gate.admit(context, Role.SERVER)
        await self._call(context, self._rounds.end_run, request.run_id)
        _log.info("run ended", extra={"run": request.run_id})
        return shuffler_pb2.EndRunReply()

    async def Count(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Tells a front, and nobody else, how many reports are in its part."""
        await self._gate.admit(context, Role.FRONT)
        reports, minimum_batch, digest = await self._call(
            context, self._rounds.count, request.run_id, request.round, _workers(request)
        )
        return shuffler_pb2.CountReply(
            reports=reports, minimum_batch=minimum_batch, plan_digest=digest
        )

    async def _call(
        self, context: grpc.aio.ServicerContext, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            return await self._calls.call(function, *arguments)
        except ShufflerRefused as refused:
            await abort(context, refused, self._metrics)


def _about(request: Any) -> dict[str, Any]:
    return {"run": request.run_id, "round": request.round}


def _workers(request: Any) -> Workers:
    return [(worker.name, worker.users) for worker in request.workers]
