"""Trying again what the shuffler is too busy for, or not there for."""

from __future__ import annotations

import random
import time

from shufl.shuffler.wire.errors import Refusal, ShufflerError, ShufflerRefused, ShufflerUnavailable

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 5.0
_random = random.SystemRandom()


class Retries:
    """Waits before one more try: exponential backoff with full jitter, until a moment.

    Every wait is drawn uniformly from zero to a bound that doubles, so that clients who were
    refused together do not come back together.
    """

    def __init__(self, until: float) -> None:
        """Remembers the moment, by `time.monotonic`."""
        self.until = until
        self._bound = _FIRST_SECONDS

    def wait(self, error: ShufflerError) -> None:
        """Waits, or raises the error: where trying again would not help, or there is no time."""
        busy = isinstance(error, ShufflerRefused) and error.reason is Refusal.BUSY
        seconds = _random.uniform(0.0, self._bound)
        if not (busy or isinstance(error, ShufflerUnavailable)):
            raise error
        if time.monotonic() + seconds >= self.until:
            raise error
        self._bound = min(2 * self._bound, _LONGEST_SECONDS)
        time.sleep(seconds)
