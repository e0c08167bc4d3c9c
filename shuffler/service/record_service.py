"""The service that anybody may call: the public record of rounds."""

from __future__ import annotations

from typing import Any

import grpc

from shufl.shuffler.service.intake import Intake
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire import shuffler_pb2

_ENTRIES = 500  # in one answer; one entry has at most some kilobytes, by the length of a run's name


class RecordService:
    """What whoever can connect may ask."""

    def __init__(self, intake: Intake, store: RunStore) -> None:
        self._intake = intake
        self._store = store

    async def Entries(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Gives the next entries."""
        first = min(request.first, 2**62)
        entries = await self._intake.call(self._store.record, first, _ENTRIES)
        return shuffler_pb2.EntriesReply(entries=entries)
