"""The one way into the store: a bounded queue and the task that empties it.

Everything that reads or changes runs and rounds passes through one queue and is done in its order,
so a report either is before the closing of its round, and in the batch, or after it, and refused.
Reports that wait together are stored with one commit (group commit). The store works in a thread
of its own; the event loop stays free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shufl.shuffler.store.open_batches import OpenBatches, Report
from shufl.shuffler.wire.errors import Verdict

_T = TypeVar("_T")
_Item = tuple[Report | Callable[[], Any], asyncio.Future[Any]]  # with its answer

_QUEUE_REPORTS = 4096
_QUEUE_BYTES = 16 * 2**20
_GROUP_REPORTS = 1024
_GROUP_BYTES = 8 * 2**20


class Intake:
    """Queues reports and calls for the store, and answers each with a future.

    Memory is bounded: `submit` waits while 16 MiB or 4096 reports are queued. Calls do not wait for
    room; whoever makes them waits for their answers.
    """

    def __init__(self, batches: OpenBatches) -> None:
        self._batches = batches
        self._items: deque[_Item] = deque()
        self._bytes = 0
        self._filled = asyncio.Event()
        self._emptied = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")
        self._writer = asyncio.create_task(self._write())

    async def submit(self, report: Report) -> asyncio.Future[Verdict]:
        """Queues a report, once there is room; its verdict comes with the future."""
        size = len(report.sealed)
        while self._items and (
            len(self._items) >= _QUEUE_REPORTS or self._bytes + size > _QUEUE_BYTES
        ):
            self._emptied.clear()
            await self._emptied.wait()
        self._bytes += size
        return self._put(report)

    def call(self, function: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """Runs a method of the store after everything that was queued before it."""
        return self._put(lambda: function(*arguments))

    async def close(self) -> None:
        """Does what is queued, then ends the writer; nothing may be queued afterwards."""
        self._closing = True
        self._filled.set()
        await self._writer
        self._thread.shutdown()

    def _put(self, content: Report | Callable[[], Any]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._items.append((content, answer))
        self._filled.set()
        return answer

    def _take(self) -> list[_Item]:
        """The next call, or as many of the next reports as one commit may hold."""
        group, size = [self._items.popleft()], 0
        while isinstance(group[-1][0], Report):
            size += len(group[-1][0].sealed)
            following = self._items[0][0] if self._items else None
            if (
                not isinstance(following, Report)
                or len(group) == _GROUP_REPORTS
                or size + len(following.sealed) > _GROUP_BYTES
            ):
                break
            group.append(self._items.popleft())
        self._bytes -= size
        self._emptied.set()
        return group

    async def _write(self) -> None:
        while self._items or not self._closing:
            if not self._items:
                self._filled.clear()
                await self._filled.wait()
                continue
            group = self._take()
            loop = asyncio.get_running_loop()
            results = await loop.run_in_executor(self._thread, self._do, group)
            for (_, answer), result in zip(group, results, strict=True):
                if answer.done():  # cancelled, if its stream is gone
                    continue
                if isinstance(result, Exception):
                    answer.set_exception(result)
                else:
                    answer.set_result(result)

    def _do(self, group: list[_Item]) -> list[Any]:
        """Does what is asked; what goes wrong is each one's result."""
        first = group[0][0]
        try:
            if not isinstance(first, Report):
                return [first()]
            return list(self._batches.accept([report for report, _ in group]))  # type: ignore[misc]
        except Exception as error:
            return [error] * len(group)
