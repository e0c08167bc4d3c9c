"""The service that user devices call: reports in, verdicts out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpc.aio import ServicerContext

from shufl.shuffler.callers import Caller
from shufl.shuffler.service.metrics import Metrics
from shufl.shuffler.store.batch import Piece
from shufl.shuffler.store.open_batches import OpenBatches, Report
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import MOST_TOGETHER
from shufl.shuffler.wire.errors import Verdict, malformed

_log = logging.getLogger("shufl.shuffler")


class IntakeService:
    """What user devices may call."""

    def __init__(self, batches: OpenBatches, metrics: Metrics) -> None:
        self._batches = batches
        self._metrics = metrics
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="reports")

    def stop(self) -> None:
        """Waits until nothing is being written."""
        self._writers.shutdown()

    async def Agree(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
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

    async def Submit(self, request: Any, caller: Caller, context: ServicerContext) -> Any:
        """Puts reports, or a piece of one, into their batch."""
        loop = asyncio.get_running_loop()
        verdicts: list[Any] = await loop.run_in_executor(
            self._writers, self._accept, request, caller
        )
        is_last = request.start + len(request.sealed) >= request.length
        for verdict, count in Counter(verdicts).items():
            if is_last or verdict is Verdict.ACCEPTED:  # each piece of a report may be refused
                self._metrics.reports.labels(verdict.name).inc(count)
        return shuffler_pb2.SubmitReply(verdicts=verdicts)

    def _accept(self, request: Any, caller: Caller) -> list[Verdict]:
        """A verdict on each report; none on a piece while others are missing."""
        verdicts = [self._batches.accept(report) for report in _reports(request, caller)]
        return [verdict for verdict in verdicts if verdict is not None]


def _reports(request: Any, caller: Caller) -> Iterator[Report]:
    """The reports in a request, one by one, or the piece of one.

    Raises:
        ShufflerRefused: there is none, there are too many, or they are not of one length.
    """
    sealed, users = request.sealed, request.users
    if len(users) > MOST_TOGETHER:
        raise malformed(f"a message must have at most {MOST_TOGETHER} reports")
    alone = request.length or request.count > 1
    if not users or len(sealed) % len(users) or (alone and len(users) > 1):
        raise malformed("a message must have a report per user, a piece, or one of many users")
    piece = Piece(request.upload, request.start, request.length) if request.length else None
    about = request.run_id, request.round, request.commitment
    count, step = max(request.count, 1), max(request.step, 1)
    length = len(sealed) // len(users)
    for place, user in enumerate(users):
        of = range(user, user + count * step, step)
        yield Report(*about, of, sealed[place * length : (place + 1) * length], caller, piece)
