"""What the server uses to run rounds at the shuffler and to fetch their batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from shufl.shuffler.keys import Credentials
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.connection import Answers, Connection
from shufl.shuffler.wire.errors import Outcome, Refusal, ShufflerRefused
from shufl.shuffler.wire.stub import Stub

_BLANKET_SECONDS = 3600.0  # for a shuffler to make the blankets of a round
_NOTHING_THERE = {Refusal.UNKNOWN_RUN, Refusal.UNKNOWN_ROUND, Refusal.RUN_ENDED}


class ControlClient(Connection):
    """Runs rounds. For the server only: it needs the server's credentials.

    All methods raise `ShufflerUnavailable` if the shuffler does not answer, and `ShufflerRefused`
    if it refuses: for the reasons named, or `STORAGE_FULL`, `STORAGE_FAILED`, or `NOT_OWNER` where
    another server created the run.
    """

    def __init__(self, address: str, credentials: Credentials, timeout: float = 60.0) -> None:
        """Remembers where the shuffler is; connects with the first call.

        The credentials are a server's; `timeout` is the longest wait in seconds for one answer, or
        one part of a release.

        Raises:
            ValueError: the address is malformed.
        """
        super().__init__(address, credentials, timeout)

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

    def close_round(self, run_id: str, round: int) -> Outcome:
        """Ends the round's intake; asking again gives the same answer.

        Waits until the round's blankets are made, an hour at most.

        Returns:
            `RELEASABLE`, or `BELOW_MINIMUM` or `DISCARDED`: then the batch has been destroyed. How
            many reports and blankets there were is not told.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`.
        """
        request = shuffler_pb2.CloseRoundRequest(run_id=run_id, round=round)
        patience = max(self.timeout, _BLANKET_SECONDS)
        return Outcome(self._call("CloseRound", request, patience).outcome)

    def end_round(self, run_id: str, round: int) -> None:
        """Has the batch of a round destroyed, whatever there is of it; there may be none.

        The server calls it when it has the release, and where it does not want one.
        """
        try:
            self._call("EndRound", shuffler_pb2.EndRoundRequest(run_id=run_id, round=round))
        except ShufflerRefused as refused:
            if refused.reason not in _NOTHING_THERE:
                raise

    def release(self, run_id: str, round: int) -> Iterator[bytes]:
        """The sealed reports of a closed round in uniformly random order.

        Called again it gives the same reports in the same order, until the round is ended. Nothing
        is asked before the first iteration.

        Raises:
            ShufflerRefused: `ROUND_NOT_CLOSED`, `BELOW_MINIMUM`, `DISCARDED`, `ALREADY_RELEASED`,
                `UNKNOWN_RUN`, `RUN_ENDED`, `UNKNOWN_ROUND`, `BATCH_LOST`.
            ShufflerUnavailable: what came before is not all.
        """
        stub = Stub("Control", self.connected())
        request = shuffler_pb2.ReleaseRequest(run_id=run_id, round=round)
        with self.errors():
            answers = Answers(stub.Release(request), ahead=1)
        pieces: list[bytes] = []
        try:
            while True:
                with self.errors():
                    chunk = answers.next(time.monotonic() + self.timeout)
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
            answers.close()

    def end_run(self, run_id: str) -> None:
        """Destroys everything of a run; repeating it changes nothing.

        Raises:
            ShufflerRefused: `UNKNOWN_RUN`.
        """
        self._call("EndRun", shuffler_pb2.EndRunRequest(run_id=run_id))

    def _call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        method = getattr(Stub("Control", self.connected()), name)
        with self.errors():
            return method(request, timeout=timeout or self.timeout)
