"""Streams of reports: how many there may be, and what one must bring to stay.

A stream keeps its place by what it brings: reports that are accepted, or pieces of one that may
still be. One that brings nothing for `idle_seconds` is ended. Where all places are taken, a new
stream gets the place of the one that has brought nothing for longest, if that is long enough. An
honest node loses nothing by it, because it begins another stream with its next report.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prometheus_client import Gauge

from shufl.shuffler.config import Limits
from shufl.shuffler.service.calls import PerSender
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused

_GRACE_SECONDS = 10.0  # a stream that brings nothing keeps its place, though others want it
_GRACE = 1 / 6  # of `idle_seconds`, if that is shorter
_MOST_BARREN = 10_000


class Stream:
    """One stream, by what it has brought.

    Attributes:
        since: when it brought something last, or began.
        barren: whether it has brought nothing yet.
    """

    def __init__(self, idle_seconds: float) -> None:
        self.since = _now()
        self.barren = True
        self._idle_seconds = idle_seconds
        self._until = self.since + idle_seconds
        self._piece_bytes: int | None = 0
        self._reading: asyncio.Timeout | None = None

    def bring(self) -> None:
        """Notes that a report was accepted."""
        self._piece_bytes = 0
        self._bring()

    def disappoint(self) -> None:
        """Notes that a report was refused: until one is accepted, pieces no longer count."""
        self._piece_bytes = None

    def bring_pieces(self, length: int) -> None:
        """Notes so many bytes of a report that may still be accepted."""
        if self._piece_bytes is not None:
            self._piece_bytes += length
            if self._piece_bytes >= PIECE_BYTES:
                self._piece_bytes = 0
                self._bring()

    def patience(self) -> asyncio.Timeout:
        """How long its next message is waited for."""
        self._reading = asyncio.timeout_at(self._until)
        return self._reading

    def end(self) -> None:
        """Ends it, once its answers are given, as one that has been idle for too long."""
        self._until = -math.inf
        if self._reading is not None:
            with suppress(RuntimeError):  # nothing is waited for now
                self._reading.reschedule(_now())

    def _bring(self) -> None:
        self.barren = False
        self.since = _now()
        if self._until > 0:  # else it is being ended
            self._until = self.since + self._idle_seconds


class Streams:
    """All streams. An ended one has no place, but counts as its sender's until it is gone."""

    def __init__(self, limits: Limits, gauge: Gauge) -> None:
        """Remembers the limits, and where the number of streams is shown."""
        self._limits = limits
        self._gauge = gauge
        self._grace = min(_GRACE_SECONDS, limits.idle_seconds * _GRACE)
        self._of = PerSender(limits.streams_per_sender)
        self._placed: set[Stream] = set()
        self._barren: dict[str, float] = {}  # until when whose streams have brought nothing

    @contextmanager
    def of(self, sender: str) -> Iterator[None]:
        """A stream of this sender, until its end has been taken."""
        with self._of.counted(sender) as allowed:
            if not allowed:
                raise ShufflerRefused(Refusal.BUSY)
            yield

    @contextmanager
    def place(self, sender: str) -> Iterator[Stream]:
        """A place for a stream.

        Raises:
            ShufflerRefused: `BUSY`.
        """
        self._make_room(sender)
        stream = Stream(self._limits.idle_seconds)
        self._placed.add(stream)
        self._gauge.set(len(self._placed))
        try:
            yield stream
        except ShufflerRefused as refused:
            if refused.reason is Refusal.IDLE and stream.barren:
                self._note_barren(sender)
            raise
        finally:
            self._leave(stream)

    def _make_room(self, sender: str) -> None:
        """Makes sure of a free place; half are not for senders that brought nothing of late."""
        most = self._limits.streams
        if 2 * len(self._placed) >= most and self._barren.get(sender, 0.0) > _now():
            raise ShufflerRefused(Refusal.BUSY)
        if len(self._placed) < most:
            return
        idlest = min(self._placed, key=lambda stream: stream.since)
        if _now() - idlest.since < self._grace:
            raise ShufflerRefused(Refusal.BUSY)
        self._leave(idlest)
        idlest.end()

    def _leave(self, stream: Stream) -> None:
        self._placed.discard(stream)
        self._gauge.set(len(self._placed))

    def _note_barren(self, sender: str) -> None:
        if len(self._barren) >= _MOST_BARREN:
            self._barren = {name: until for name, until in self._barren.items() if until > _now()}
        self._barren[sender] = _now() + self._limits.idle_seconds


def _now() -> float:
    return asyncio.get_running_loop().time()
