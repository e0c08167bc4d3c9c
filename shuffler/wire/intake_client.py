"""What user devices use to hand sealed reports in.

Short reports travel together, and a long one in pieces. Some calls are under way at once. What the
shuffler was too busy for, or not there for, is sent again.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import MOST_TOGETHER, PIECE_BYTES
from shufl.shuffler.wire.connection import Connection, Retries, method_of
from shufl.shuffler.wire.errors import (
    Refusal,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.wire.sealing import RoundHeader

_MOST_CALLS = 8  # at once; half as many after each that fails, since the way may be a slow one


class IntakeClient(Connection):
    """Hands sealed reports in. For user devices and for the nodes that simulate many of them.

    One object per process is meant; several threads may share it.
    """

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
                    agree = method_of(self.connected(), "Intake", "Agree")
                    reply = agree(request, timeout=self.timeout)
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
        """Hands in reports of one round.

        Nothing is sent before the result is iterated over. `reports` is then read in the caller's
        thread, a few MB ahead of the verdicts, so it can be a generator of any length. A short
        report is sent at once where nothing is under way, and else with those that follow. What the
        shuffler was too busy or not there for is sent again after a random wait; a report that
        turns out to be in the batch since the first time is `ACCEPTED`.

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
        """
        submission = _Submission(self, header, deadline)
        try:
            yield from submission.verdicts(reports)
        finally:
            submission.cancel()


@dataclasses.dataclass
class _Message:
    """What is sent at once: short reports of several users, or one report.

    Attributes:
        users: whose reports they are; with sums, all users of the one message.
        sealed: the reports, one after the other.
        upload: a random number that the pieces of a long report share, however often they are sent.
        verdicts: the shuffler's, so far.
        unanswered: how many of its calls have no answer yet.
        doubtful: whether some of it may be in the batch although the shuffler has not said so.
    """

    users: Sequence[int | range]
    sealed: bytes
    upload: int = dataclasses.field(default_factory=lambda: secrets.randbits(64))
    verdicts: list[int] = dataclasses.field(default_factory=list)
    doubtful: bool = False

    def __post_init__(self) -> None:
        self.unanswered = max(-(-len(self.sealed) // PIECE_BYTES), 1)

    def result(self) -> list[Verdict]:
        """The verdict on each of its reports.

        A long report may have several: a piece that is sent again, because its answer was lost, may
        come when the others have completed the report, or when the round is over.
        """
        taken = {Verdict.ACCEPTED, Verdict.DUPLICATE} if self.doubtful else {Verdict.ACCEPTED}
        verdicts = [
            Verdict.ACCEPTED if verdict in taken else Verdict(verdict) for verdict in self.verdicts
        ]
        if len(self.users) == 1 and Verdict.ACCEPTED in verdicts:
            return [Verdict.ACCEPTED]
        return verdicts[: len(self.users)]

    def requests(self, header: RoundHeader) -> Iterator[Any]:
        """What its calls say: one, or one for each piece of a long report."""
        about: dict[str, Any] = {"users": self.users}
        if isinstance(several := self.users[0], range):
            about = {"users": [several.start], "count": len(several), "step": several.step}
        if len(self.sealed) > PIECE_BYTES:
            about |= {"length": len(self.sealed), "upload": self.upload}
        about |= {"run_id": header.run_id, "round": header.round, "commitment": header.commitment}
        for start in range(0, max(len(self.sealed), 1), PIECE_BYTES):
            piece = self.sealed[start : start + PIECE_BYTES]
            yield shuffler_pb2.SubmitRequest(sealed=piece, start=start, **about)


class _Submission:
    """The reports of one `submit`, and the calls that are under way with them."""

    def __init__(self, client: IntakeClient, header: RoundHeader, deadline: float | None) -> None:
        self._client = client
        self._header = header
        self._patience = client.timeout if deadline is None else deadline
        self._until = None if deadline is None else time.monotonic() + deadline
        self._most_calls = _MOST_CALLS
        self._calls: deque[tuple[_Message, Any, Any]] = deque()  # with request and future answer

    def verdicts(self, reports: Iterable[tuple[int | range, bytes]]) -> Iterator[Verdict]:
        """Sends the reports; a verdict on each, in order."""
        for message in self._messages(reports):
            for request in message.requests(self._header):
                while len(self._calls) >= self._most_calls or self._first_is_answered():
                    yield from self._answered()
                self._calls.append((message, request, self._call(request)))
        while self._calls:
            yield from self._answered()

    def _first_is_answered(self) -> bool:
        return bool(self._calls) and bool(self._calls[0][-1].done())

    def cancel(self) -> None:
        """Ends the calls that are under way."""
        for _, _, call in self._calls:
            call.cancel()

    def _messages(self, reports: Iterable[tuple[int | range, bytes]]) -> Iterator[_Message]:
        """Puts short reports together for as long as calls are under way and there is room."""
        users: list[int | range] = []
        held: list[bytes] = []
        for user, sealed in reports:
            length = len(sealed)
            alone = isinstance(user, range) or length > PIECE_BYTES
            room = len(held) < MOST_TOGETHER and length * (len(held) + 1) <= PIECE_BYTES
            if held and (alone or not room or length != len(held[0])):
                yield _Message(users, b"".join(held))
                users, held = [], []
            users.append(user)
            held.append(sealed)
            if alone or all(call.done() for *_, call in self._calls):
                yield _Message(users, b"".join(held))
                users, held = [], []
        if held:
            yield _Message(users, b"".join(held))

    def _call(self, request: Any) -> Any:
        """Begins a call; its answer, in future."""
        left = self._client.timeout
        if self._until is not None:
            left = min(left, self._until - time.monotonic())
        with self._client.errors():
            submit = method_of(self._client.connected(), "Intake", "Submit")
            return submit.future(request, timeout=max(left, 0.0))

    def _answered(self) -> list[Verdict]:
        """Waits for the oldest call; if it was its message's last, the verdicts on that."""
        message, request, call = self._calls.popleft()
        self._take(message, request, call)
        message.unanswered -= 1
        if message.unanswered:
            return []
        retries = self._retries()
        while len(message.verdicts) < len(message.users):
            # The shuffler has given up pieces of a long report, for others.
            retries.wait(ShufflerRefused(Refusal.BUSY))
            message.verdicts.clear()
            for request in message.requests(self._header):
                self._take(message, request, self._call(request))
                if message.verdicts:
                    break  # the other pieces were still there
        return message.result()

    def _take(self, message: _Message, request: Any, call: Any) -> None:
        """Waits for the answer to a call, which is made again for as long as may be."""
        retries = self._retries()
        while True:
            try:
                with self._client.errors(self._patience):
                    message.verdicts += call.result().verdicts
                return
            except ShufflerError as error:
                message.doubtful |= isinstance(error, ShufflerUnavailable)
                self._most_calls = max(self._most_calls // 2, 1)
                retries.wait(error)
                call = self._call(request)

    def _retries(self) -> Retries:
        return Retries(self._until or time.monotonic() + self._patience)
