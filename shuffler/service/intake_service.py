"""The service that user devices call: streams of reports in, verdicts out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from shufl.shuffler.callers import Caller
from shufl.shuffler.config import Limits
from shufl.shuffler.service.gate import Gate
from shufl.shuffler.service.intake import Intake
from shufl.shuffler.service.operations import Metrics, Pace
from shufl.shuffler.service.streams import Stream, Streams
from shufl.shuffler.store.open_batches import OpenBatches, Report
from shufl.shuffler.store.slots import Slot
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import MAX_REPORT_BYTES
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

_log = logging.getLogger("shufl.shuffler")

_STREAM_REPORTS = 512  # of one stream, read and not yet answered
_WRITE_BYTES = 2**19  # of a report in pieces, at once
_ENDLESS = ShufflerRefused(Refusal.MALFORMED, "a report that does not end")
_EMPTY_PIECE = ShufflerRefused(Refusal.MALFORMED, "a piece of a report is empty")
_NO_REPORTS = ShufflerRefused(
    Refusal.MALFORMED, "a message has one report for each user that it names, or a piece of one"
)


class IntakeService:
    """What user devices may call."""

    def __init__(
        self,
        gate: Gate,
        intake: Intake,
        batches: OpenBatches,
        writers: ThreadPoolExecutor,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._intake = intake
        self._batches = batches
        self._writers = writers
        self._limits = limits
        self._metrics = metrics
        self._streams = Streams(limits, metrics.streams)
        rate = limits.reports_per_second
        self._pace = None if rate is None else Pace(rate, limits.burst)

    async def Agree(self, request: Any, caller: Caller, context: grpc.aio.ServicerContext) -> Any:
        """Tells what the server gave for a round, and counts who was shown something else."""
        commitment = self._batches.commitment(request.run_id, request.round)
        if request.commitment != commitment:
            self._metrics.disagreements.inc()
            _log.warning(
                "a node was shown another key, model or plan than the shuffler",
                extra={"run": request.run_id, "round": request.round},
            )
        return shuffler_pb2.AgreeReply(commitment=commitment)

    async def Submit(self, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        """Hands the reports of one stream to the intake.

        A stream that has been ended has no place; one whose caller does not even take the end of it
        still counts as that caller's.
        """
        with self._streams.of(caller.name):
            try:
                with self._streams.place(caller.name) as stream:
                    # gRPC cannot end a call whose first write it is held up with.
                    await context.send_initial_metadata(())
                    await self._serve(caller, context, stream)
            except (ShufflerRefused, TimeoutError) as ended:
                # Here, where no more will be written: an abort beside a write can leave the call
                # open.
                await self._gate.end(context, ended)

    async def _serve(
        self, caller: Caller, context: grpc.aio.ServicerContext, stream: Stream
    ) -> None:
        """Reads ahead of the answers, so that many reports share one commit."""
        answers: deque[asyncio.Future[Any]] = deque()
        arrived = asyncio.Event()
        reading = True
        window = asyncio.Semaphore(_STREAM_REPORTS)
        slots = _Slots(self._intake, self._batches)

        async def read() -> None:
            nonlocal reading
            try:
                read = self._gate.read
                while (message := await read(context, caller, stream)) is not grpc.aio.EOF:
                    for report in _reports(message, caller):
                        await window.acquire()
                        if self._pace is not None:
                            delay = self._pace.delay(caller.name, time.monotonic())
                            stream.hold_up(delay)
                            await asyncio.sleep(delay)
                        if message.more:
                            answers.append(await self._in_pieces(report, slots, context, stream))
                        else:
                            answers.append(await self._intake.submit(report))
                        arrived.set()
            finally:
                slots.close()
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
                for verdict, count in Counter(verdicts).items():
                    # First: with the answer the caller may end this call.
                    self._metrics.reports.labels(verdict.name).inc(count)
                if Verdict.ACCEPTED in verdicts:
                    stream.bring()
                else:
                    stream.disappoint()
                try:
                    async with asyncio.timeout(self._limits.idle_seconds):
                        await context.write(shuffler_pb2.SubmitReply(verdicts=verdicts))
                except TimeoutError:
                    raise TimeoutError("answers are not taken") from None
                for _ in verdicts:
                    window.release()
            await reader
        finally:
            reader.cancel()

    async def _in_pieces(
        self, report: Report, slots: _Slots, context: grpc.aio.ServicerContext, stream: Stream
    ) -> asyncio.Future[Any]:
        """Passes the pieces of one report on to the disk, one while the next is received."""
        loop = asyncio.get_running_loop()
        pieces, more = [report.sealed], True
        report = dataclasses.replace(report, sealed=b"")  # it waits for its verdict without them
        slot = await slots.take(report)
        length = held = len(pieces[0])
        written: asyncio.Future[None] = _done(loop, None)
        try:
            while more:
                message = await self._gate.read(context, report.caller, stream)
                if message is grpc.aio.EOF or length > MAX_REPORT_BYTES:
                    raise _ENDLESS
                if not message.sealed:
                    raise _EMPTY_PIECE
                more = message.more
                pieces.append(message.sealed)
                length += len(message.sealed)
                held += len(message.sealed)
                if isinstance(slot, Verdict):
                    pieces.clear()
                    continue
                if slot.verdict is Verdict.ACCEPTED:
                    stream.bring_pieces(len(message.sealed))
                if held >= _WRITE_BYTES or not more:
                    await written
                    written = loop.run_in_executor(self._writers, self._batches.write, slot, pieces)
                    pieces, held = [], 0
            await written
            if isinstance(slot, Slot):
                return await self._intake.submit(dataclasses.replace(report, slot=slot))
            return _done(loop, slot)
        except BaseException:
            written.add_done_callback(lambda _: slots.give_up(slot))  # not while it is written
            raise


def _reports(message: Any, caller: Caller) -> Iterator[Report]:
    """The reports in a message, one by one; of one in pieces, with the first piece.

    Raises:
        ShufflerRefused: they are not of one length, there is none, or more than one in pieces.
    """
    sealed, users = message.sealed, message.users
    if message.more and not sealed:
        raise _EMPTY_PIECE
    if not users or len(sealed) % len(users) or (message.more and len(users) > 1):
        raise _NO_REPORTS
    length = len(sealed) // len(users)
    about = message.run_id, message.round, message.commitment
    for place, user in enumerate(users):
        yield Report(*about, user, sealed[place * length : (place + 1) * length], caller)


class _Slots:
    """Where one stream's long reports are written.

    The next one's slot is asked for while a report is received, so that no report waits until the
    one before it is on disk. What the slot is good for is checked when its report is complete.
    """

    def __init__(self, intake: Intake, batches: OpenBatches) -> None:
        self._intake = intake
        self._batches = batches
        self._next: asyncio.Future[Slot | Verdict] | None = None
        self._round: tuple[str, ...] = ()  # of the next

    async def take(self, report: Report) -> Slot | Verdict:
        """A slot for a report, or why it would not be accepted."""
        round = report.run_id, str(report.round), report.commitment
        if round != self._round:
            self.close()
        slot = await self._wait() if self._next is not None else None
        if not isinstance(slot, Slot):
            self._begin(report)
            slot = await self._wait()
        if isinstance(slot, Slot):
            self._round = round
            self._begin(report)
        return slot

    def close(self) -> None:
        """Gives the next slot back."""
        begun, self._next = self._next, None
        if begun is not None:
            begun.add_done_callback(lambda done: self.give_up(done.result()))

    def give_up(self, slot: Slot | Verdict) -> None:
        """Gives a slot back."""
        if isinstance(slot, Slot):
            self._intake.call(slot.give_up)

    def _begin(self, report: Report) -> None:
        self._next = self._intake.call(self._batches.begin, report)

    async def _wait(self) -> Slot | Verdict:
        assert self._next is not None
        slot = await asyncio.shield(self._next)  # if the stream ends here, `close` gives it up
        self._next = None
        return slot


def _done(loop: asyncio.AbstractEventLoop, result: Any) -> asyncio.Future[Any]:
    """A future with its result."""
    future: asyncio.Future[Any] = loop.create_future()
    future.set_result(result)
    return future
