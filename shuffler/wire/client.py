"""What user devices and the server use to talk to the shuffler.

A channel is made when it is first used, in the process that uses it: a client object may be made
before a fork or sent to a Ray worker, and each process then has its own connection.

Every wait for the shuffler has a limit. Nothing is retried here. Plaintext goes to a loopback
address only; any other needs credentials.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from shuffler.keys import Credentials
from shuffler.wire import shuffler_pb2, shuffler_pb2_grpc
from shuffler.wire.channel import (
    CHANNEL_OPTIONS,
    MAX_REPORT_BYTES,
    PIECE_BYTES,
    TOKEN_KEY,
    join_address,
    parse_address,
)
from shuffler.wire.errors import Outcome, Refusal, ShufflerRefused, ShufflerUnavailable, Verdict
from shuffler.wire.sealing import RoundHeader

__all__ = ["ControlClient", "IntakeClient"]

_stubs: Any = shuffler_pb2_grpc  # generated without types

_WINDOW_REPORTS = 256  # of one stream, sent and not yet answered
_WINDOW_BYTES = 32 * 2**20
_BLANKET_SECONDS = 3600.0  # for a shuffler to make the blankets of a round


class _Client:
    """One lazily made channel for each process."""

    def __init__(self, address: str, credentials: Credentials | None, timeout: float) -> None:
        host, port, loopback = parse_address(address)
        if port == 0:
            raise ValueError(f"a shuffler's port lies in [1, 65535], got {address!r}")
        if credentials is None and not loopback:
            raise ValueError(f"plaintext only to a loopback address: {address} needs credentials")
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.address = join_address(host, port)
        self.timeout = timeout
        self._credentials = credentials
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._owner = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_channel": None, "_owner": 0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection of this process; the next call makes a new one."""
        if self._channel is not None and self._owner == os.getpid():
            self._channel.close()
        self._channel = None

    def _connected(self) -> grpc.Channel:
        if self._owner != os.getpid():
            # After a fork the lock may be held by a thread that does not exist here.
            self._lock, self._channel, self._owner = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._channel is None:
                if self._credentials is None:
                    self._channel = grpc.insecure_channel(self.address, CHANNEL_OPTIONS)
                else:
                    tls = grpc.ssl_channel_credentials(
                        self._credentials.authority,
                        self._credentials.private_key,
                        self._credentials.certificate,
                    )
                    self._channel = grpc.secure_channel(self.address, tls, CHANNEL_OPTIONS)
            return self._channel

    @contextmanager
    def _errors(self, stall: _Stall | None = None) -> Iterator[None]:
        """Turns gRPC's errors into ours."""
        try:
            yield
        except grpc.RpcError as error:
            details = str(error.details() or error.code().name)
            reason, _, sentence = details.partition(": ")
            if reason in Refusal.__members__:
                raise ShufflerRefused(Refusal(reason), sentence) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED or (stall and stall.expired):
                details = f"nothing within {self.timeout:g} s"
            raise self._unavailable(details) from error

    def _unavailable(self, details: str) -> ShufflerUnavailable:
        return ShufflerUnavailable(f"shuffler at {self.address} does not answer: {details}")


class IntakeClient(_Client):
    """Hands sealed reports in. For user devices and for the nodes that simulate many of them.

    One object per process and stream of reports is meant; several threads may share it.
    """

    def __init__(
        self, address: str, credentials: Credentials | None = None, timeout: float = 60.0
    ) -> None:
        """Remembers where the shuffler is; connects with the first report.

        Args:
            address: the shuffler's `HOST:PORT`.
            credentials: a node's; None: plaintext, to a shuffler that has no TLS.
            timeout: longest wait in seconds for one verdict. A stream of reports may last longer.

        Raises:
            ValueError: if the address is malformed, or not loopback without `credentials`.
        """
        super().__init__(address, credentials, timeout)

    def submit(
        self, header: RoundHeader, reports: Iterable[tuple[int, bytes]]
    ) -> Iterator[Verdict]:
        """Streams reports of one round to the shuffler.

        Nothing is sent before the result is iterated over. `reports` is then read in the caller's
        thread, as far ahead of the verdicts as the window of unanswered reports allows (256, and
        32 MiB or one report), so it can be a generator of any length. It may also be slow: where
        the shuffler has ended a silent stream, the next report begins another, and those without a
        verdict are sent again.

        Args:
            header: the round; the same that the reports were sealed with.
            reports: pairs of the user's number, counted by this sender, and the sealed report.

        Yields:
            One verdict for each report, in order. Only `ACCEPTED` reports are in the batch.

        Raises:
            ShufflerRefused: `NOT_PERMITTED`, or `BUSY` when too many streams are open. Reports
                without a verdict were not taken.
            ShufflerUnavailable: if the shuffler is not there or stops answering. The reports
                without a verdict may or may not be in the batch; submitting them again is harmless.
            ValueError: if a report is longer than any shuffler takes.
        """
        stream = _Reports(self, header)
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
        finally:
            stream.close()


class _Reports:
    """The reports of one `submit`, over one call, or several where the shuffler ends a silent one.

    Before the shuffler ends a call with `IDLE` it answers every report that it has read. So those
    without a verdict are not in the batch, and are sent again over the next call.

    Attributes:
        waiting: user and report, of those without a verdict.
    """

    def __init__(self, client: IntakeClient, header: RoundHeader) -> None:
        self.waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0  # of them
        self._client = client
        self._header = header
        self._call: Any = None
        self._verdicts: deque[int] = deque()  # received and not yet passed on
        self._all_sent = False

    def must_wait(self, length: int) -> bool:
        """Whether the next verdict comes before a report of this length may be sent."""
        full = len(self.waiting) >= _WINDOW_REPORTS or self._bytes + length > _WINDOW_BYTES
        return bool(self.waiting) and (full or self._call.done())

    def send(self, user: int, sealed: bytes) -> None:
        if self._call is None:
            self._open()
        elif not self.waiting and self._call.done():
            self._replace(self._replies.get())  # no verdict is due, so this is the end
        self.waiting.append((user, sealed))
        self._bytes += len(sealed)
        self._put(user, sealed)

    def end(self) -> None:
        """There are no more reports."""
        self._all_sent = True
        if self._call is not None:
            self._requests.put(None)

    def verdict(self) -> Verdict:
        """The next; waits for it, over as many calls as fit in the client's `timeout`."""
        ends = time.monotonic() + self._client.timeout
        while not self._verdicts:
            try:
                reply = self._replies.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                raise self._client._unavailable(
                    f"nothing within {self._client.timeout:g} s"
                ) from None
            if isinstance(reply, shuffler_pb2.SubmitReply):
                self._verdicts.extend(reply.verdicts)
            else:
                self._replace(reply)
        self._bytes -= len(self.waiting.popleft()[1])
        return Verdict(self._verdicts.popleft())

    def close(self) -> None:
        if self._call is not None:
            self._requests.put(None)
            self._call.cancel()

    def _open(self) -> None:
        """Begins a call, with the reports that wait."""
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stub = _stubs.IntakeStub(self._client._connected())
        with self._client._errors():
            self._call = stub.Submit(iter(self._requests.get, None))
        threading.Thread(target=_read, args=(self._call, self._replies), daemon=True).start()
        for user, sealed in self.waiting:
            self._put(user, sealed)
        if self._all_sent:
            self._requests.put(None)

    def _replace(self, end: grpc.RpcError | None) -> None:
        """Begins another call if this one was ended for silence; raises for any other end."""
        try:
            with self._client._errors():
                if end is None:
                    raise self._client._unavailable("it ended the stream early")
                raise end
        except ShufflerRefused as refused:
            if refused.reason is not Refusal.IDLE:
                raise
        self._requests.put(None)
        self._open()

    def _put(self, user: int, sealed: bytes) -> None:
        for request in _requests(self._header, user, sealed):
            self._requests.put(request)


def _read(call: Any, replies: queue.SimpleQueue[Any]) -> None:
    """Takes replies as they come, and the end, so that the call is known to be over when it is."""
    try:
        for reply in call:
            replies.put(reply)
        replies.put(None)
    except grpc.RpcError as error:
        replies.put(error)


class ControlClient(_Client):
    """Runs rounds. For the server only: it needs the server's credentials."""

    def __init__(self, address: str, credentials: Credentials | str, timeout: float = 60.0) -> None:
        """Remembers where the shuffler is; connects with the first call.

        Args:
            address: the shuffler's `HOST:PORT`.
            credentials: a server's; or, in plaintext, the control token that the shuffler was
                started with.
            timeout: longest wait in seconds for one answer, or one part of a release.

        Raises:
            ValueError: if the address is malformed, or not loopback in plaintext, or the token is
                no text that a header may carry.
        """
        token = credentials if isinstance(credentials, str) else None
        super().__init__(address, None if isinstance(credentials, str) else credentials, timeout)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("a control token is printable ASCII")
        self._metadata = ((TOKEN_KEY, f"Bearer {token}"),) if token is not None else ()

    def create_run(self, run_id: str, plan: bytes, report_bytes: int) -> str:
        """Registers a run with its plan; the same call again changes nothing.

        Args:
            run_id: the run's name, 1 to 256 characters.
            plan: the privacy plan, a JSON object with `users`, `minimum_batch` and
                `shuffler_blankets`; with blankets also `clip_norm` and `noise_multiplier`.
            report_bytes: length of every sealed report in bytes (`sealed_length` of the payload).

        Returns:
            The plan's digest as the shuffler computed it: SHA-256 of `plan`, hexadecimal.

        Raises:
            ShufflerRefused: `MALFORMED`; `RUN_EXISTS` with another plan or length; `RUN_ENDED`.
            ShufflerUnavailable: if the shuffler does not answer.
        """
        request = shuffler_pb2.CreateRunRequest(run_id=run_id, plan=plan, report_bytes=report_bytes)
        return str(self._call("CreateRun", request).plan_digest)

    def open_round(self, run_id: str, round: int, model_version: str, public_key: bytes) -> None:
        """Opens a round for reports on this model version, sealed to this key.

        The shuffler begins to make the round's blankets.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `ANOTHER_ROUND_OPEN`,
                `ROUND_NOT_INCREASING`, `MALFORMED`, `STORAGE_FULL`.
            ShufflerUnavailable: if the shuffler does not answer.
        """
        request = shuffler_pb2.OpenRoundRequest(
            run_id=run_id, round=round, model_version=model_version, public_key=public_key
        )
        self._call("OpenRound", request)

    def close_round(self, run_id: str, round: int, discard: bool = False) -> Outcome:
        """Ends the round's intake; asking again gives the same answer.

        Waits until the round's blankets are made, an hour at most.

        Args:
            run_id: the run.
            round: the open round.
            discard: whether to destroy the batch unseen, whatever its size; also one that is
                closed and not yet released.

        Returns:
            `RELEASABLE`, or `BELOW_MINIMUM` or `DISCARDED`: then the batch has been destroyed. How
            many reports and blankets there were is not told.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`,
                `STORAGE_FULL`.
            ShufflerUnavailable: if the shuffler does not answer.
        """
        request = shuffler_pb2.CloseRoundRequest(run_id=run_id, round=round, discard=discard)
        patience = None if discard else max(self.timeout, _BLANKET_SECONDS)
        return Outcome(self._call("CloseRound", request, patience).outcome)

    def release(self, run_id: str, round: int) -> Iterator[bytes]:
        """The sealed reports of a closed round in uniformly random order.

        The shuffler gives a batch out once and destroys it at the end of this call, also when the
        call is broken off: then the rest is lost. Nothing is asked before the first iteration.

        Raises:
            ShufflerRefused: `ROUND_NOT_CLOSED`, `BELOW_MINIMUM`, `DISCARDED`, `ALREADY_RELEASED`,
                `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`, `STORAGE_FULL`.
            ShufflerUnavailable: if the shuffler does not answer; the batch may then be incomplete.
        """
        stub = _stubs.ControlStub(self._connected())
        request = shuffler_pb2.ReleaseRequest(run_id=run_id, round=round)
        with self._errors():
            call = stub.Release(request, metadata=self._metadata)
        stall = _Stall(call, self.timeout)
        pieces: list[bytes] = []
        try:
            while True:
                with self._errors(stall):
                    chunk = stall.next()
                if chunk is None:
                    return
                if chunk.more or pieces:
                    pieces += chunk.sealed
                    if not chunk.more:
                        yield b"".join(pieces)
                        pieces.clear()
                else:
                    yield from chunk.sealed
        finally:
            stall.stop()
            call.cancel()

    def end_run(self, run_id: str) -> None:
        """Destroys everything of a run; repeating it changes nothing.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`.
            ShufflerUnavailable: if the shuffler does not answer.
        """
        self._call("EndRun", shuffler_pb2.EndRunRequest(run_id=run_id))

    def _call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        method = getattr(_stubs.ControlStub(self._connected()), name)
        with self._errors():
            return method(request, timeout=timeout or self.timeout, metadata=self._metadata)


class _Stall:
    """Ends a streaming call when one answer takes too long.

    A gRPC deadline would limit the whole stream, which may last as long as the training of all its
    users.
    """

    def __init__(self, call: Any, timeout: float) -> None:
        self.expired = False
        self._call = call
        self._timeout = timeout
        self._since: float | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def next(self) -> Any:
        """The next answer; None at the end of the stream."""
        self._since = time.monotonic()
        try:
            return next(self._call, None)
        finally:
            self._since = None

    def stop(self) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(1.0, self._timeout / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > self._timeout:
                self.expired = True
                self._call.cancel()
                return


def _requests(header: RoundHeader, user: int, sealed: bytes) -> Iterator[Any]:
    """The messages that carry one report."""
    yield shuffler_pb2.SubmitRequest(
        run_id=header.run_id,
        round=header.round,
        model_version=header.model_version,
        plan_digest=header.plan_digest,
        key_digest=header.key_digest,
        user=user,
        sealed=sealed[:PIECE_BYTES],
        more=len(sealed) > PIECE_BYTES,
    )
    for start in range(PIECE_BYTES, len(sealed), PIECE_BYTES):
        end = start + PIECE_BYTES
        yield shuffler_pb2.SubmitRequest(sealed=sealed[start:end], more=end < len(sealed))
