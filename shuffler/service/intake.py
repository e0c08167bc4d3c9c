"""The one way into the store: a bounded queue and the task that empties it.

Everything that reads or changes runs and rounds passes through one queue and is done in its order,
so a report either is before the closing of its round, and in the batch, or after it, and refused.
Reports that wait together are stored with one commit (group commit). The store works in a thread
of its own; the event loop stays free.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from shuffler.store.runs import Report, RunStore
from shuffler.wire.errors import Verdict

__all__ = ["Intake"]

_T = TypeVar("_T")

_QUEUE_REPORTS = 4096
_QUEUE_BYTES = 16 * 2**20
_GROUP_REPORTS = 1024
_GROUP_BYTES = 8 * 2**20


@dataclasses.dataclass(slots=True)
class _Item:
    """A report, or a call on the store."""

    content: Report | Callable[[], Any]
    answer: asyncio.Future[Any]


class Intake:
    """Queues reports and calls for the store, and answers each with a future.

    Memory is bounded: `submit` waits while 16 MiB or 4096 reports are queued. Calls do not wait for
    room; whoever makes them waits for their answers.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store
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

    async def call(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Runs a method of the store after everything that was queued before it."""
        answer: asyncio.Future[_T] = self._put(lambda: function(*arguments))
        return await answer

    def call_soon(self, function: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        """The same, queued before this returns; the answer comes with the future."""
        return self._put(lambda: function(*arguments))

    async def close(self) -> None:
        """Does what is queued, then ends the writer; nothing may be queued afterwards."""
        self._closing = True
        self._filled.set()
        await self._writer
        self._thread.shutdown()

    def _put(self, content: Report | Callable[[], Any]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._items.append(_Item(content, answer))
        self._filled.set()
        return answer

    def _take(self) -> list[_Item]:
        """The next call, or as many of the next reports as one commit may hold."""
        group = [self._items.popleft()]
        size = _size(group[0])
        while (
            isinstance(group[0].content, Report)
            and self._items
            and isinstance(self._items[0].content, Report)
            and len(group) < _GROUP_REPORTS
            and size + _size(self._items[0]) <= _GROUP_BYTES
        ):
            group.append(self._items.popleft())
            size += _size(group[-1])
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
            try:
                results = await loop.run_in_executor(self._thread, self._do, group)
            except Exception as error:
                for item in group:
                    if not item.answer.done():
                        item.answer.set_exception(error)
                continue
            for item, result in zip(group, results, strict=True):
                if not item.answer.done():  # cancelled, if its stream is gone
                    item.answer.set_result(result)

    def _do(self, group: list[_Item]) -> list[Any]:
        first = group[0].content
        if not isinstance(first, Report):
            return [first()]
        return list(self._store.accept([item.content for item in group]))  # type: ignore[misc]


def _size(item: _Item) -> int:
    return len(item.content.sealed) if isinstance(item.content, Report) else 0
