"""Calls that are open: not too many of one sender, and none with a credential gone bad."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from shufl.shuffler.callers import Caller
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused

_ALWAYS = 2


class CallCount:
    """Counts open calls, and says who may have another.

    Half of all calls go to whoever asks first, up to a limit for each sender. While they are taken,
    a sender that is no server may have two calls at once. So if there are four calls for each node,
    as `shufl provision` sees to, nodes that hold on to their calls keep no other node out, however
    many work together.
    """

    def __init__(self, most: int, most_of_sender: int) -> None:
        """Remembers how many calls there may be at once, and how many of one sender."""
        self._shared = most // 2
        self._most_of_sender = most_of_sender
        self._of: Counter[str] = Counter()

    @contextmanager
    def counted(self, sender: str, is_server: bool) -> Iterator[bool]:
        """Whether the sender may have one more call; if so, it counts until the block ends."""
        most = self._most_of_sender
        if not is_server and self._of.total() >= self._shared:
            most = min(most, _ALWAYS)
        if self._of[sender] >= most:
            yield False
            return
        self._of[sender] += 1
        try:
            yield True
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
