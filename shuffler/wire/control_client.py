"""What the server uses to run rounds, and auditors to fetch the record of them."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc

from shufl.shuffler.credentials import AnyCredentials
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import MAX_REPORT_BYTES
from shufl.shuffler.wire.connection import Connection, Retries, method_of
from shufl.shuffler.wire.errors import (
    Closed,
    Outcome,
    Refusal,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
)

_BLANKET_SECONDS = 3600.0  # for a shuffler to make the blankets of a round
_NOTHING_THERE = {Refusal.UNKNOWN_RUN, Refusal.UNKNOWN_ROUND, Refusal.RUN_ENDED}


class ControlClient(Connection):
    """Runs rounds. For the server only: it needs the server's credentials.

    All methods raise `ShufflerUnavailable` if the shuffler does not answer, and `ShufflerRefused`
    if it refuses: for the reasons named, or `STORAGE_FULL`, `STORAGE_FAILED`, or `NOT_OWNER` where
    another server created the run.
    """

    def __init__(
        self,
        address: str,
        credentials: AnyCredentials,
        timeout: float = 60.0,
        patience: float = 0.0,
    ) -> None:
        """Remembers where the shuffler is; connects with the first call.

        Args:
            address: the shuffler's `HOST:PORT`.
            credentials: a server's.
            timeout: longest wait in seconds for one answer, or one part of a release.
            patience: for how many seconds `close_round`, `release` and `end_run` ask again where
                the shuffler does not answer.

        Raises:
            ValueError: the address is malformed.
        """
        super().__init__(address, credentials, timeout)
        self._patience = patience

    def create_run(self, run_id: str, plan: bytes, report_bytes: int) -> str:
        """Registers a run with its plan; the same call again changes nothing.

        The run's name has 1 to 256 characters.

        Args:
            plan: the JSON of a `shufl.accounting.PrivacyPlan`.
            report_bytes: length of every sealed report in bytes (`sealed_length` of the payload).

        Returns:
            The plan's digest as the shuffler computed it: SHA-256 of `plan`, hexadecimal.

        Raises:
            ShufflerRefused: `MALFORMED`; `RUN_EXISTS` with another plan or length; `RUN_ENDED`;
                `TOO_MANY_RUNS`; `BELOW_FLOOR`, which its operator sets.
        """
        request = shuffler_pb2.CreateRunRequest(run_id=run_id, plan=plan, report_bytes=report_bytes)
        return str(self._call("CreateRun", request).plan_digest)

    def reserve(self, run_id: str) -> None:
        """Books the disk for the next round of a run, for a minute; repeated, for another one.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `ANOTHER_ROUND_OPEN`, `TOO_MANY_ROUNDS`,
                `TOO_MANY_BATCHES`.
        """
        self._call("Reserve", shuffler_pb2.ReserveRequest(run_id=run_id))

    def open_round(self, run_id: str, round: int, model_digest: str, public_key: bytes) -> bytes:
        """Opens a round for reports on the model of this digest, sealed to this key.

        The shuffler begins to make the round's blankets.

        Returns:
            The nonce that the shuffler drew for the round, which its reports are bound to.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `ANOTHER_ROUND_OPEN`,
                `ROUND_NOT_INCREASING`, `TOO_MANY_ROUNDS`, `TOO_MANY_BATCHES`, `BELOW_FLOOR`,
                `MALFORMED`.
        """
        request = shuffler_pb2.OpenRoundRequest(
            run_id=run_id, round=round, model_digest=model_digest, public_key=public_key
        )
        return bytes(self._call("OpenRound", request).nonce)

    def close_round(self, run_id: str, round: int, window: float = 0.0) -> Closed:
        """What became of a round; asking again gives the same answer.

        Waits until it is over, which takes `window` seconds under a plan that has one, and until
        its blankets are made, an hour at most. Under a plan without a window this ends it.

        Returns:
            `RELEASABLE`, or `BELOW_MINIMUM` or `DISCARDED`: then the batch has been destroyed. How
            many reports and blankets there were is not told.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`.
        """
        request = shuffler_pb2.CloseRoundRequest(run_id=run_id, round=round)
        longest = window + max(self.timeout, _BLANKET_SECONDS)
        reply = self._call("CloseRound", request, longest, self._patience)
        try:
            return Closed(Outcome(reply.outcome), reply.senders, tuple(reply.absent))
        except ValueError:
            raise ShufflerError(f"it says that the round ended as {reply.outcome}") from None

    def end_round(self, run_id: str, round: int) -> None:
        """Has the batch of a round destroyed, whatever there is of it; there may be none.

        The server calls it when it has the release, and where it does not want one.
        """
        request = shuffler_pb2.EndRoundRequest(run_id=run_id, round=round)
        self._call_unless_gone("EndRound", request)

    def release(self, run_id: str, round: int) -> Iterator[bytes]:
        """The sealed reports of a closed round in uniformly random order.

        Called again it gives the same reports in the same order, until the round is ended. Where
        the connection breaks it goes on after the report that came last. Nothing is asked before
        the first iteration.

        Raises:
            ShufflerRefused: `ROUND_NOT_CLOSED`, `BELOW_MINIMUM`, `DISCARDED`, `ALREADY_RELEASED`,
                `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`.
            ShufflerUnavailable: what came before is not all.
        """
        retries, done = Retries(time.monotonic() + self._patience), 0
        while True:
            try:
                for sealed in itertools.islice(self._release(run_id, round), done, None):
                    yield sealed
                    done, retries = done + 1, Retries(time.monotonic() + self._patience)
            except ShufflerUnavailable as error:
                retries.wait(error)
            else:
                return

    def _release(self, run_id: str, round: int) -> Iterator[bytes]:
        """The reports that one call brings."""
        request = shuffler_pb2.ReleaseRequest(run_id=run_id, round=round)
        with self.errors():
            call = method_of(self.connected(), "Control", "Release")(request)
        pieces = bytearray()
        try:
            while True:
                with self.errors():
                    chunk = self._next(call)
                if chunk is None:
                    return
                if not (chunk.sealed and all(chunk.sealed)):
                    raise ShufflerError("what it releases is no report")
                if chunk.more or pieces:
                    pieces += b"".join(chunk.sealed)
                    if len(pieces) > MAX_REPORT_BYTES:
                        raise ShufflerError("what it releases is longer than any report")
                    if not chunk.more:
                        yield bytes(pieces)
                        pieces.clear()
                else:
                    yield from chunk.sealed
        finally:
            call.cancel()

    def _next(self, call: Any) -> Any:
        """The next part of a release; None at the end.

        Each part is waited for as long as another answer. A gRPC deadline would limit the whole
        release, which lasts as long as the server takes.
        """
        limit = threading.Timer(self.timeout, call.cancel)
        limit.daemon = True
        limit.start()
        try:
            return next(call, None)
        except grpc.RpcError:
            if call.cancelled():  # here, not by the shuffler
                raise TimeoutError from None
            raise
        finally:
            limit.cancel()

    def end_run(self, run_id: str) -> None:
        """Has everything of a run destroyed; there may be nothing, as of a run without rounds."""
        request = shuffler_pb2.EndRunRequest(run_id=run_id)
        self._call_unless_gone("EndRun", request, self._patience)

    def _call_unless_gone(self, name: str, request: Any, patience: float = 0.0) -> None:
        try:
            self._call(name, request, patience=patience)
        except ShufflerRefused as refused:
            if refused.reason not in _NOTHING_THERE:
                raise

    def _call(
        self, name: str, request: Any, timeout: float | None = None, patience: float = 0.0
    ) -> Any:
        retries: Retries | None = None
        while True:
            method = method_of(self.connected(), "Control", name)
            try:
                with self.errors():
                    return method(request, timeout=timeout or self.timeout)
            except ShufflerUnavailable as error:
                retries = retries or Retries(time.monotonic() + patience)
                retries.wait(error)


class RecordClient(Connection):
    """Fetches the public record. Any certificate of the shuffler's authority will do."""

    def entries(self) -> Iterator[str]:
        """All entries, as JSON, from the first on; `shuffler.public_record.verify` checks them.

        Raises:
            ShufflerUnavailable: if the shuffler does not answer.
        """
        entries, first = method_of(self.connected(), "Record", "Entries"), 0
        while True:
            with self.errors():
                request = shuffler_pb2.EntriesRequest(first=first)
                found = entries(request, timeout=self.timeout).entries
            if not found:
                return
            yield from found
            first += len(found)
