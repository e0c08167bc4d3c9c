"""The service that user devices call: streams of reports in, verdicts out."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from shuffler.config import Limits
from shuffler.keys import Caller, Role
from shuffler.service.gate import IDLE, NOT_PERMITTED, UNREADABLE, Gate, abort
from shuffler.service.intake import Intake
from shuffler.service.operations import Metrics, Pace
from shuffler.store.runs import Draft, Report, RunStore
from shuffler.wire import shuffler_pb2, shuffler_pb2_grpc
from shuffler.wire.channel import MAX_REPORT_BYTES
from shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

__all__ = ["IntakeService"]

_STREAM_REPORTS = 512  # of one stream, read and not yet answered
_WRITE_BYTES = 2**19  # of a report in pieces, at once
_ENDLESS = ShufflerRefused(Refusal.MALFORMED, "a report that does not end")
_EMPTY_PIECE = ShufflerRefused(Refusal.MALFORMED, "a piece of a report is empty")


class _StreamEnded(Exception):
    """Ends a stream of reports: what was refused, or in words what took too long."""

    def __init__(self, refused: ShufflerRefused | str) -> None:
        super().__init__(str(refused))
        self.refused = refused


class IntakeService(shuffler_pb2_grpc.IntakeServicer):
    """What user devices may call."""

    def __init__(
        self,
        gate: Gate,
        intake: Intake,
        store: RunStore,
        writers: ThreadPoolExecutor,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._intake = intake
        self._store = store
        self._writers = writers
        self._limits = limits
        self._metrics = metrics
        self._streams = 0
        self._streams_of: Counter[str] = Counter()
        rate = limits.reports_per_second
        self._pace = None if rate is None else Pace(rate, limits.burst)

    async def Submit(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        """Hands the reports of one stream to the intake.

        A stream that has been ended is nobody's; one whose caller does not even take the end of it
        still counts as that caller's.
        """
        caller = await self._gate.admit(context, Role.NODE)
        if (
            self._streams >= self._limits.streams
            or self._streams_of[caller.name] >= self._limits.streams_per_sender
        ):
            busy = ShufflerRefused(Refusal.BUSY, "too many streams at once")
            await abort(context, busy, self._metrics)
        self._streams_of[caller.name] += 1
        try:
            # gRPC can not end a call whose first write it is held up with.
            await context.send_initial_metadata(())
            await self._counted(caller, context)
        except _StreamEnded as ended:
            # Here, where no more will be written: an abort beside a write can leave the call open.
            await abort(context, ended.refused, self._metrics)
        finally:
            self._streams_of[caller.name] -= 1
            if not self._streams_of[caller.name]:
                del self._streams_of[caller.name]

    async def _counted(self, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        self._streams += 1
        self._metrics.streams.inc()
        try:
            await self._serve(caller, context)
        finally:
            self._metrics.streams.dec()
            self._streams -= 1

    async def _serve(self, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        """Reads ahead of the answers, so that many reports share one commit."""
        answers: deque[asyncio.Future[Any]] = deque()
        arrived = asyncio.Event()
        reading = True
        window = asyncio.Semaphore(_STREAM_REPORTS)
        drafts = _Drafts(self._intake, self._store)

        async def read() -> None:
            nonlocal reading
            try:
                while (message := await self._read(context, caller)) is not grpc.aio.EOF:
                    await window.acquire()
                    if self._pace is not None:
                        await asyncio.sleep(self._pace.delay(caller.name, time.monotonic()))
                    if message.more and not message.sealed:
                        raise _StreamEnded(_EMPTY_PIECE)
                    report = _report(message, caller)
                    if message.more:
                        answers.append(await self._in_pieces(report, drafts, caller, context))
                    else:
                        answers.append(await self._intake.submit(report))
                    arrived.set()
            finally:
                drafts.close()
                reading = False
                arrived.set()

        reader = asyncio.create_task(read())
        try:
            while answers or reading:
                if not answers:
                    arrived.clear()
                    await arrived.wait()
                    continue
                verdicts = [await answers.popleft()]
                while answers and answers[0].done():
                    verdicts.append(answers.popleft().result())
                for verdict in verdicts:  # first: with the answer the caller may end this call
                    self._metrics.reports.labels(verdict.name).inc()
                await self._write(context, shuffler_pb2.SubmitReply(verdicts=verdicts))
                for _ in verdicts:
                    window.release()
            await reader
        finally:
            reader.cancel()

    async def _read(self, context: grpc.aio.ServicerContext, caller: Caller) -> Any:
        """The next message; ends a stream that is silent for too long or not admitted any more."""
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                message = await context.read()
        except TimeoutError:
            raise _StreamEnded(IDLE) from None
        if message is None:
            raise _StreamEnded(UNREADABLE)
        if message is not grpc.aio.EOF and not self._gate.still_admits(caller):
            raise _StreamEnded(NOT_PERMITTED)
        return message

    async def _write(self, context: grpc.aio.ServicerContext, reply: Any) -> None:
        """Answers; ends a stream whose caller does not take its answers."""
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                await context.write(reply)
        except TimeoutError:
            raise _StreamEnded("answers are not taken") from None

    async def _in_pieces(
        self, report: Report, drafts: _Drafts, caller: Caller, context: grpc.aio.ServicerContext
    ) -> asyncio.Future[Any]:
        """Passes the pieces of one report on to the disk, one while the next is received."""
        draft = await drafts.take(report)
        loop = asyncio.get_running_loop()
        pieces, more = [report.sealed], True
        length = held = len(report.sealed)
        written: asyncio.Future[None] = loop.create_future()
        written.set_result(None)
        try:
            while more:
                message = await self._read(context, caller)
                if message is grpc.aio.EOF or length > MAX_REPORT_BYTES:
                    raise _StreamEnded(_ENDLESS)
                if not message.sealed:
                    raise _StreamEnded(_EMPTY_PIECE)
                more = message.more
                pieces.append(message.sealed)
                length += len(message.sealed)
                held += len(message.sealed)
                if isinstance(draft, Verdict):
                    pieces.clear()
                elif held >= _WRITE_BYTES or not more:
                    await written
                    written = loop.run_in_executor(self._writers, draft.write, pieces)
                    pieces, held = [], 0
            await written
            if isinstance(draft, Draft):
                return await self._intake.submit(
                    dataclasses.replace(report, sealed=b"", draft=draft)
                )
            answer: asyncio.Future[Any] = loop.create_future()
            answer.set_result(draft)
            return answer
        except BaseException:
            written.add_done_callback(lambda _: drafts.give_up(draft))  # not while it is written
            raise


class _Drafts:
    """Where one stream's long reports are written.

    The next one's place is asked for while a report is received, so that no report waits until the
    one before it is on disk. What the place is good for is checked when its report is complete.
    """

    def __init__(self, intake: Intake, store: RunStore) -> None:
        self._intake = intake
        self._store = store
        self._next: asyncio.Future[Draft | Verdict] | None = None
        self._round: tuple[str, ...] = ()  # of the next

    async def take(self, report: Report) -> Draft | Verdict:
        """A place for a report, or why it would not be accepted."""
        round = report.run_id, str(report.round), report.model_version, report.plan_digest
        if round != self._round:
            self.close()
        draft = await self._wait() if self._next is not None else None
        if not isinstance(draft, Draft):
            self._begin(report)
            draft = await self._wait()
        if isinstance(draft, Draft):
            self._round = round
            self._begin(report)
        return draft

    def close(self) -> None:
        """Gives the next place back."""
        begun, self._next = self._next, None
        if begun is not None:
            begun.add_done_callback(lambda done: self.give_up(done.result()))

    def give_up(self, draft: Draft | Verdict) -> None:
        """Gives a place back."""
        if isinstance(draft, Draft):
            self._intake.call_soon(draft.give_up)

    def _begin(self, report: Report) -> None:
        self._next = self._intake.call_soon(self._store.begin, report)

    async def _wait(self) -> Draft | Verdict:
        assert self._next is not None
        draft = await asyncio.shield(self._next)  # if the stream ends here, `close` gives it up
        self._next = None
        return draft


def _report(request: Any, caller: Caller) -> Report:
    return Report(
        request.run_id,
        request.round,
        request.model_version,
        request.plan_digest,
        request.key_digest,
        caller.name,
        request.user,
        caller.users,
        request.sealed,
    )
