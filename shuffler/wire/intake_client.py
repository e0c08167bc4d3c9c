"""What user devices use to hand sealed reports in.

Where the shuffler has ended a stream that brought nothing, is busy or is not there for a moment,
another is begun, and reports without a verdict are sent again.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any

from shufl.shuffler.keys import AnyCredentials
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import MAX_REPORT_BYTES, MOST_TOGETHER, PIECE_BYTES
from shufl.shuffler.wire.connection import Answers, Connection
from shufl.shuffler.wire.errors import (
    Refusal,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.wire.retries import Retries
from shufl.shuffler.wire.sealing import RoundHeader
from shufl.shuffler.wire.stub import Stub

_WINDOW_BYTES = 32 * 2**20
_HELD_SECONDS = 0.02  # a report waits so long for others of its message
_SEND: Any = object()


class IntakeClient(Connection):
    """Hands sealed reports in. For user devices and for the nodes that simulate many of them.

    One object per process and stream of reports is meant; several threads may share it.

    Attributes:
        counts: what has become of the reports so far: how many got each verdict, by its name, and
            `LOST`, those that were given up without one.
    """

    def __init__(self, address: str, credentials: AnyCredentials, timeout: float = 60.0) -> None:
        """Remembers where the shuffler is; connects with the first report.

        The credentials are a node's; `timeout` is the longest wait in seconds for one verdict. A
        stream of reports may last longer.

        Raises:
            ValueError: the address is malformed.
        """
        super().__init__(address, credentials, timeout)
        self.counts: Counter[str] = Counter()

    def agree(self, header: RoundHeader) -> tuple[RoundHeader, float] | None:
        """Finds out whether the shuffler was given what a header says of an open round.

        The shuffler counts a header other than its own.

        Returns:
            The header with the shuffler's nonce, for which reports are sealed, and when the round's
            window ends, by `time.monotonic` (under a plan without one: now). None: the shuffler was
            given something else.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `UNKNOWN_ROUND`, `NOT_PERMITTED`; or `BUSY`, for as long
                as `timeout`.
            ShufflerUnavailable: if the shuffler has not answered for as long.
        """
        request = shuffler_pb2.AgreeRequest(
            run_id=header.run_id, round=header.round, commitment=header.commitment
        )
        retries = Retries(time.monotonic() + self.timeout)
        while True:
            asked = time.monotonic()
            try:
                with self.errors():
                    stub = Stub("Intake", self.connected())
                    reply = stub.Agree(request, timeout=self.timeout)
                if reply.commitment != header.commitment:
                    return None
                confirmed = dataclasses.replace(header, nonce=reply.nonce)
                return confirmed, asked + reply.seconds_left
            except ShufflerError as error:
                retries.wait(error)

    def submit(
        self,
        header: RoundHeader,
        reports: Iterable[tuple[int | range, bytes]],
        *,
        deadline: float | None = None,
    ) -> Iterator[Verdict]:
        """Streams reports of one round to the shuffler.

        Nothing is sent before the result is iterated over. `reports` is then read in the caller's
        thread, as far ahead of the verdicts as the window of unanswered reports allows (256, and
        32 MiB or one report), so it can be a generator of any length. It may also be slow: where
        the shuffler has ended a stream that brought nothing, the next report begins another. Where
        the shuffler is busy or not there, another is begun after a random wait. Reports without a
        verdict are then sent again; one that turns out to be in the batch since the first time is
        `ACCEPTED`.

        Args:
            reports: pairs of the user's number, counted by this sender, and the sealed report; with
                sums the numbers of all users of a message, and the message.
            deadline: seconds from the first iteration until the round is over; then trying ends.
                Left out: not known; it tries for `timeout` seconds to get each verdict.

        Yields:
            One verdict for each report, in order. Only `ACCEPTED` reports are in the batch.

        Raises:
            ShufflerRefused: `NOT_PERMITTED`, or `BUSY` until the deadline. Reports without a
                verdict count as lost.
            ShufflerUnavailable: if the shuffler is not there until the deadline. Reports without a
                verdict count as lost, though they may be in the batch; submitting them again is
                harmless.
            ValueError: if a report is longer than any shuffler takes, or the deadline not positive.
        """
        if deadline is not None and not deadline > 0:
            raise ValueError(f"deadline must be positive, got {deadline}")
        stream = _Reports(self, header, deadline)
        try:
            for user, sealed in reports:
                if len(sealed) > MAX_REPORT_BYTES:
                    raise ValueError(
                        f"a sealed report has at most {MAX_REPORT_BYTES} bytes, got {len(sealed)}"
                    )
                while stream.must_wait(len(sealed)):
                    yield stream.verdict()
                stream.send(user, sealed)
            stream.end()
            while stream.waiting:
                yield stream.verdict()
        except ShufflerError:
            self._count("LOST", len(stream.waiting))
            raise
        finally:
            stream.close()

    def _count(self, what: str, more: int = 1) -> None:
        """Adds to the counts."""
        with self._lock:
            self.counts[what] += more


class _Reports:
    """The reports of one `submit`, over one call or several.

    Before the shuffler ends a call with `IDLE` it answers every report that it has read, and with
    `BUSY` it reads none. So those without a verdict are not in the batch, and are sent again over
    the next call. Where the connection was lost they may be in it, and are sent again all the same.

    Attributes:
        waiting: user, or users, and report, of those without a verdict.
    """

    def __init__(self, client: IntakeClient, header: RoundHeader, deadline: float | None) -> None:
        self.waiting: deque[tuple[int | range, bytes]] = deque()
        self._bytes = 0  # of them
        self._doubtful = 0  # of them, the first ones: may be in the batch already
        self._client = client
        self._patience = client.timeout if deadline is None else deadline
        self._until = None if deadline is None else time.monotonic() + deadline
        self._about: dict[str, Any] = {
            "run_id": header.run_id,
            "round": header.round,
            "commitment": header.commitment,
        }
        self._answers: Answers | None = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._verdicts: deque[int] = deque()  # received and not yet passed on
        self._all_sent = False

    def must_wait(self, length: int) -> bool:
        """Whether the next verdict comes before a report of this length may be sent."""
        full = len(self.waiting) >= MOST_TOGETHER or self._bytes + length > _WINDOW_BYTES
        return bool(self.waiting) and (full or self._ended())

    def send(self, user: int | range, sealed: bytes) -> None:
        """Sends one report more."""
        if not self.waiting and self._ended():
            self._receive(self._retries())  # no verdict is due, so this is why it has ended
        if self._answers is None:
            self._open()
        self.waiting.append((user, sealed))
        self._bytes += len(sealed)
        self._requests.put((user, sealed))

    def end(self) -> None:
        """There are no more reports."""
        self._all_sent = True
        self._requests.put(None)

    def verdict(self) -> Verdict:
        """The next; waits for it, over as many calls as there is time for."""
        retries = self._retries()
        while not self._verdicts:
            self._receive(retries)
        verdict = Verdict(self._verdicts.popleft())
        self._bytes -= len(self.waiting.popleft()[1])
        if self._doubtful:
            self._doubtful -= 1
            if verdict is Verdict.DUPLICATE:
                verdict = Verdict.ACCEPTED
        self._client._count(verdict.name)
        return verdict

    def close(self) -> None:
        """Ends the call."""
        self._requests.put(None)
        if self._answers is not None:
            self._answers.close()

    def _ended(self) -> bool:
        return self._answers is not None and bool(self._answers.call.done())

    def _open(self) -> None:
        """Begins a call, with the reports that wait."""
        self._requests = queue.SimpleQueue()
        stub = Stub("Intake", self._client.connected())
        with self._client.errors():
            self._answers = Answers(stub.Submit(_messages(self._requests, self._about)))
        for report in self.waiting:
            self._requests.put(report)
        if self._all_sent:
            self._requests.put(None)

    def _retries(self) -> Retries:
        return Retries(self._until or time.monotonic() + self._patience)

    def _receive(self, retries: Retries) -> None:
        """Takes the next verdicts; where the call has ended, begins another as long as may be."""
        try:
            with self._client.errors(self._patience):
                if self._answers is None:
                    self._open()
                assert self._answers is not None
                self._requests.put(_SEND)
                until = min(time.monotonic() + self._client.timeout, retries.until)
                reply = self._answers.next(until)
                if reply is None:
                    raise EOFError("it ended the stream early")
            self._verdicts.extend(reply.verdicts)
        except ShufflerError as error:
            if isinstance(error, ShufflerUnavailable):
                self._doubtful = len(self.waiting)
            self.close()
            self._answers = None
            if not (isinstance(error, ShufflerRefused) and error.reason is Refusal.IDLE):
                retries.wait(error)


def _messages(items: queue.SimpleQueue[Any], about: dict[str, Any]) -> Iterator[Any]:
    """The messages of one call: in one as many reports as fit and come within a moment.

    `items` are pairs of user, or users, and sealed report; `_SEND`, where no more will come before
    those that are here are sent; None at the end. `about` is what a message says of the round.
    """
    held: list[tuple[int, bytes]] = []
    until = 0.0
    while True:
        try:
            item = items.get(timeout=max(until - time.monotonic(), 0.0) if held else None)
        except queue.Empty:
            item = _SEND
        if held and not _fits(item, held):
            users, reports = zip(*held, strict=True)
            yield shuffler_pb2.SubmitRequest(users=users, sealed=b"".join(reports), **about)
            held = []
        if item is None:
            return
        if item is _SEND:
            continue
        user, sealed = item
        if isinstance(user, range) or len(sealed) > PIECE_BYTES:
            yield from _pieces(user, sealed, about)
            continue
        if not held:
            until = time.monotonic() + _HELD_SECONDS
        held.append(item)


def _fits(item: Any, held: list[tuple[int, bytes]]) -> bool:
    """Whether the next item is a report that fits into one message with these."""
    length = len(held[0][1])
    if item is None or item is _SEND or isinstance(item[0], range) or len(item[1]) != length:
        return False
    return length * (len(held) + 1) <= PIECE_BYTES


def _pieces(user: int | range, sealed: bytes, about: dict[str, Any]) -> Iterator[Any]:
    """The messages of one long report, or one of several users; the first says what it is."""
    first = {**about, "users": [user]}
    if isinstance(user, range):
        first |= {"users": [user.start], "count": len(user), "step": user.step}
    for start in range(0, len(sealed), PIECE_BYTES):
        end = start + PIECE_BYTES
        piece, more = sealed[start:end], end < len(sealed)
        yield shuffler_pb2.SubmitRequest(sealed=piece, more=more, **first)
        first = {}
