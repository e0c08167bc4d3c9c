"""Calls that are open: not too many of one sender, and none with a credential gone bad."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from shufl.shuffler.callers import Caller
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused


class PerSender:
    """Counts something of each sender, such as its calls."""

    def __init__(self, most: int) -> None:
        """Remembers how many one sender may have."""
        self._most = most
        self._of: Counter[str] = Counter()

    @contextmanager
    def counted(self, sender: str) -> Iterator[bool]:
        """Counts one more for as long as the block lasts, and says whether it may be had."""
        self._of[sender] += 1
        try:
            yield self._of[sender] <= self._most
        finally:
            self._of[sender] -= 1
            if not self._of[sender]:
                del self._of[sender]


class PermittedCalls:
    """The calls whose credential was good when they began."""

    def __init__(self, is_good: Callable[[Caller], bool]) -> None:
        """Remembers what says whether a credential is good by now."""
        self._is_good = is_good
        self._callers: dict[asyncio.Timeout, Caller] = {}

    @asynccontextmanager
    async def of(self, caller: Caller) -> AsyncIterator[None]:
        """A call; it ends with `NOT_PERMITTED` when the caller's credential has gone bad."""
        limit = asyncio.timeout(None)
        self._callers[limit] = caller
        try:
            async with limit:
                yield
        except TimeoutError:
            if limit.expired():
                raise ShufflerRefused(Refusal.NOT_PERMITTED) from None
            raise
        finally:
            del self._callers[limit]

    def end_bad(self) -> None:
        """Ends the calls whose credential has expired or been withdrawn by now."""
        now = asyncio.get_running_loop().time()
        for limit, caller in self._callers.items():
            if not self._is_good(caller) and not limit.expired():
                limit.reschedule(now)
