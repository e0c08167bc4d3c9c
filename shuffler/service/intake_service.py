"""The service that user devices call: streams of reports in, verdicts out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from shufl.shuffler.callers import Caller
from shufl.shuffler.config import Limits
from shufl.shuffler.service.gate import Gate
from shufl.shuffler.service.operations import Metrics
from shufl.shuffler.service.streams import Stream, Streams
from shufl.shuffler.store.batch import Slot
from shufl.shuffler.store.open_batches import OpenBatches, Report
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import MAX_REPORT_BYTES, MOST_TOGETHER
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, Verdict

_log = logging.getLogger("shufl.shuffler")

_WRITE_BYTES = 2**19  # of a report in pieces, at once
_ENDLESS = ShufflerRefused(Refusal.MALFORMED, "a report that does not end")
_EMPTY_PIECE = ShufflerRefused(Refusal.MALFORMED, "a piece of a report is empty")
_NO_REPORTS = ShufflerRefused(
    Refusal.MALFORMED, "a message must have a report per user, a piece, or a report of many users"
)
_TOO_MANY = ShufflerRefused(
    Refusal.MALFORMED, f"a message must have at most {MOST_TOGETHER} reports"
)


class IntakeService:
    """What user devices may call."""

    def __init__(self, gate: Gate, batches: OpenBatches, limits: Limits, metrics: Metrics) -> None:
        self._gate = gate
        self._batches = batches
        self._limits = limits
        self._metrics = metrics
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reports")
        self._streams = Streams(limits, metrics.streams)

    def stop(self) -> None:
        """Waits until nothing is being written."""
        self._writers.shutdown()

    async def Agree(self, request: Any, caller: Caller, context: grpc.aio.ServicerContext) -> Any:
        """Tells what the server gave for a round, and counts who was shown something else."""
        shown = request.commitment
        header, left = self._batches.agree(request.run_id, request.round, shown, caller.name)
        commitment = dataclasses.replace(header, nonce=b"").commitment
        if shown != commitment:
            self._metrics.disagreements.inc()
            _log.warning(
                "a node was shown another key, model or plan than the shuffler",
                extra={"run": request.run_id, "round": request.round},
            )
        return shuffler_pb2.AgreeReply(commitment=commitment, nonce=header.nonce, seconds_left=left)

    async def Submit(self, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        """Puts the reports of one stream into their batch.

        An ended stream has no place, but counts as its caller's until the caller has taken the end.
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
        loop = asyncio.get_running_loop()
        verdicts: list[Any]
        while (message := await self._gate.read(context, caller, stream)) is not grpc.aio.EOF:
            reports = list(_reports(message, caller))
            if message.more:
                verdicts = [await self._in_pieces(reports[0], context, stream)]
            else:
                verdicts = await loop.run_in_executor(self._writers, self._accept, reports)
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

    def _accept(self, reports: list[Report]) -> list[Verdict]:
        return [self._batches.accept(report) for report in reports]

    async def _in_pieces(
        self, report: Report, context: grpc.aio.ServicerContext, stream: Stream
    ) -> Verdict:
        """Passes the pieces of one report on to its batch."""
        loop, slot = asyncio.get_running_loop(), self._batches.begin(report)
        writing: asyncio.Future[bool] = loop.create_future()
        writing.set_result(True)
        pieces, more = [report.sealed], True
        length = held = len(report.sealed)
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
                if isinstance(slot, Slot) and (held >= _WRITE_BYTES or not more):
                    if await asyncio.shield(writing):  # the one before
                        stream.bring_pieces(held)
                    writing = loop.run_in_executor(self._writers, slot.append, pieces)
                if isinstance(slot, Verdict) or held >= _WRITE_BYTES:
                    pieces, held = [], 0
            await asyncio.shield(writing)
        except BaseException:
            if isinstance(slot, Slot):  # not while it is written
                writing.add_done_callback(lambda _: slot.give_up())
            raise
        return self._batches.accept(report, slot) if isinstance(slot, Slot) else slot


def _reports(message: Any, caller: Caller) -> Iterator[Report]:
    """The reports in a message, one by one; of one in pieces, with the first piece.

    Raises:
        ShufflerRefused: they are not of one length, there is none, more than one in pieces, or too
            many.
    """
    sealed, users = message.sealed, message.users
    if message.more and not sealed:
        raise _EMPTY_PIECE
    one = message.more or message.count > 1
    if len(users) > MOST_TOGETHER:
        raise _TOO_MANY
    if not users or len(sealed) % len(users) or (one and len(users) > 1):
        raise _NO_REPORTS
    length = len(sealed) // len(users)
    about = message.run_id, message.round, message.commitment
    count, step = max(message.count, 1), max(message.step, 1)
    for place, user in enumerate(users):
        of = range(user, user + count * step, step)
        yield Report(*about, of, sealed[place * length : (place + 1) * length], caller)
