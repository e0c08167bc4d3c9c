"""What can go wrong between the parties, and what the shuffler answers to one report."""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from typing import NamedTuple


class Verdict(IntEnum):
    """The shuffler's answer to one report; the numbers are those of `shuffler.proto`.

    Only `ACCEPTED` means that the report is in the round's batch. `DUPLICATE` means that an earlier
    report of the same user is in the round's batch: a sender also gets it if it submits again
    because the answer to the first attempt was lost.
    """

    ACCEPTED = 1
    UNKNOWN_RUN = 2
    ROUND_NOT_OPEN = 3
    DUPLICATE = 4
    WRONG_LENGTH = 5
    WRONG_COMMITMENT = 6
    BAD_SENDER = 7
    ROUND_FULL = 8
    STORAGE_FULL = 9
    STORAGE_FAILED = 10


class Outcome(IntEnum):
    """What closing a round came to; the numbers are those of `shuffler.proto`.

    It is not how the round ended (`RoundOutcome`): a batch that is `RELEASABLE` has still to be
    fetched, and may be discarded or lost before.
    """

    RELEASABLE = 1
    BELOW_MINIMUM = 2
    DISCARDED = 3


class Closed(NamedTuple):
    """What the shuffler tells of a round that is over.

    Attributes:
        senders: how many users sent, under a plan with cover; else, and where the round was ended
            before, 0.
        absent: under a plan with cover, names of the nodes that agreed to this round and brought no
            report in it, nor in at least the last two rounds before that they agreed to.
    """

    outcome: Outcome
    senders: int = 0
    absent: tuple[str, ...] = ()


class Refusal(Enum):
    """Why a call was refused: its name for programs, its value for people."""

    NOT_PERMITTED = "not with this certificate"
    BUSY = "too many calls at once"
    IDLE = "nothing came for too long"
    NOT_OWNER = "this run belongs to another server"
    MALFORMED = "not a message of this protocol"
    UNKNOWN_RUN = "no such run"
    RUN_EXISTS = "this run has another plan or report length"
    RUN_ENDED = "this run has ended and its id cannot be used again"
    UNKNOWN_ROUND = "this round was never opened, or is long since over"
    ROUND_NOT_INCREASING = "this round does not follow the last one"
    ANOTHER_ROUND_OPEN = "close the open round first"
    ROUND_NOT_CLOSED = "close the round first"
    WINDOW_NOT_OVER = "the window is not over, or blankets are still being made"
    BELOW_FLOOR = "less private than this shuffler's operator allows"
    BELOW_MINIMUM = "the batch was below the plan's minimum and is destroyed"
    DISCARDED = "the batch was destroyed before it was released"
    ALREADY_RELEASED = "this batch was released once, and is destroyed"
    BATCH_LOST = "the shuffler ended while it held the batch, which is lost"
    TOO_MANY_RUNS = "too many runs have not ended"
    TOO_MANY_ROUNDS = "too many rounds of this server are open"
    TOO_MANY_BATCHES = "end one of the closed rounds first"
    STORAGE_FULL = "the shuffler's disk is full"
    STORAGE_FAILED = "the shuffler's disk fails"


class ShufflerError(Exception):
    """Base of everything the client stubs raise about the shuffler."""


class ShufflerUnavailable(ShufflerError):
    """The shuffler does not answer; what became of unanswered reports is unknown.

    Submitting those again is harmless: a report that had been stored is answered `DUPLICATE`.
    """


class ShufflerRefused(ShufflerError):
    """The shuffler answered, and refused.

    Attributes:
        reason: which rule (`Refusal`), for programs.
        detail: one sentence for people.
    """

    def __init__(self, reason: Refusal, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail or reason.value
        super().__init__(f"{reason.name}: {self.detail}")

    def __reduce__(self) -> tuple[type[ShufflerRefused], tuple[Refusal, str]]:
        return (type(self), (self.reason, self.detail))


def malformed(detail: str) -> ShufflerRefused:
    """The refusal of a call that is not what this protocol allows, with one sentence on why."""
    return ShufflerRefused(Refusal.MALFORMED, detail)


class RejectReason(StrEnum):
    """Why the server left a released report out."""

    NOT_OPENED = "not-opened"
    REPLAYED = "replayed"
    WRONG_LENGTH = "wrong-length"
    TOO_LONG = "too-long"
    LEFT_OUT = "left-out"  # by the aggregator


class ReportRejected(Exception):
    """A released report that must not be aggregated.

    Attributes:
        reason: which rule, to be counted.
    """

    def __init__(self, reason: RejectReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
