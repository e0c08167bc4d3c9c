"""Makes the blankets of open rounds beside the intake of reports, in a thread of their own."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from shufl.shuffler.service.intake import Intake
from shufl.shuffler.store.open_batches import OpenBatches

_log = logging.getLogger("shufl.shuffler")


class BlanketTasks:
    """One task for each round whose blankets are being made.

    A task does the same work whatever the secret number of blankets that are kept, so that whoever
    waits for it learns nothing. How far it is lies on disk: after a restart it goes on from there.
    """

    def __init__(self, intake: Intake, batches: OpenBatches) -> None:
        self._intake = intake
        self._batches = batches
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="blankets")
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def start(self, run_id: str, number: int) -> asyncio.Task[None]:
        """Has the blankets of a round made that are still to be made."""
        key = run_id, number
        if key not in self._tasks:
            task = self._tasks[key] = asyncio.create_task(self._fill(run_id, number))
            task.add_done_callback(lambda done: self._ended(key, done))
        return self._tasks[key]

    async def finish(self, run_id: str, number: int) -> None:
        """Returns when all of a round's blankets are stored, or the round is over.

        Raises:
            ShufflerRefused: if the disk is full or fails; asked again, it tries again.
        """
        await asyncio.shield(self.start(run_id, number))

    async def stop(self) -> None:
        """Ends all tasks; what they have stored stays."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown()

    async def _fill(self, run_id: str, number: int) -> None:
        loop = asyncio.get_running_loop()
        while make := await self._intake.call(self._batches.next_blankets, run_id, number):
            sealed = await loop.run_in_executor(self._thread, make)
            await self._intake.call(self._batches.add_blankets, run_id, number, sealed)

    def _ended(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            about = {"run": key[0], "round": key[1], "reason": str(error)}
            _log.error("a round's blankets are not stored", extra=about)
