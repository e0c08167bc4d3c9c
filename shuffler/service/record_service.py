"""The service that whoever can connect may call: the public record of rounds."""

from __future__ import annotations

from typing import Any

import grpc

from shufl.shuffler.service.control_service import ControlService
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire import shuffler_pb2


class RecordService:
    """What whoever can connect may ask."""

    def __init__(self, control: ControlService, store: RunStore) -> None:
        self._control = control
        self._store = store

    async def Entries(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Gives the next entries."""
        entries = await self._control.call(self._store.record, request.first)
        return shuffler_pb2.EntriesReply(entries=entries)
