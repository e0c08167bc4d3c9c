"""Makes the blankets of open rounds beside the intake of reports, in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from shufl.shuffler.store.open_batches import OpenBatches

_log = logging.getLogger("shufl.shuffler")


class BlanketTasks:
    """One task for each round whose blankets are being made.

    A task does the same work whatever the secret number of blankets that are kept, so that whoever
    waits for it learns nothing.
    """

    def __init__(self, batches: OpenBatches) -> None:
        self._batches = batches
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blankets")
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def start(self, run_id: str, number: int) -> asyncio.Task[None]:
        """Has the blankets of a round made that are still to be made.

        Returns:
            A task that ends when all are made, or the round is over; with `ShufflerRefused` if the
            disk is full or fails. Started again, it goes on.
        """
        key = run_id, number
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(self._make(*key))
            task.add_done_callback(lambda done: self._ended(key, done))
        return self._tasks[key]

    def stop(self) -> None:
        """Waits until none is being made; the batches are destroyed before."""
        self._thread.shutdown(cancel_futures=True)

    async def _make(self, run_id: str, number: int) -> None:
        """A part after the other, in turn with other rounds."""
        loop, make = asyncio.get_running_loop(), self._batches.make_blankets
        while await loop.run_in_executor(self._thread, make, run_id, number):
            pass

    def _ended(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            about = {"run": key[0], "round": key[1], "reason": str(error)}
            _log.error("a round's blankets are not made", extra=about)
