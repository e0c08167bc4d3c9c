"""A run as the shuffler knows it: its plan, and how far each of its rounds is."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from enum import StrEnum

from pydantic import ValidationError

from shufl.accounting.plan import Plan
from shufl.accounting.validation import first_mistake
from shufl.shuffler.store.slots import slot_bytes
from shufl.shuffler.store.spool import RoundSpool
from shufl.shuffler.store.storage import PAGE_BYTES
from shufl.shuffler.wire.channel import MAX_REPORT_BYTES
from shufl.shuffler.wire.errors import Outcome, Refusal, ShufflerRefused
from shufl.shuffler.wire.reports import report_length
from shufl.shuffler.wire.sealing import RoundHeader, key_digest, payload_length, seal

_MAX_PLAN_BYTES = 2**20
_OVERHEAD_BYTES = 2 * (PAGE_BYTES + 8)  # of the journal, for the two pages of a report's marks


class RoundState(StrEnum):
    """How far a round is."""

    OPEN = "open"
    CLOSED = "closed"
    RELEASING = "releasing"
    DONE = "done"


@dataclasses.dataclass(slots=True)
class Round:
    """A round of a run.

    Attributes:
        number: counts from 0.
        model_digest: of the model that its reports are computed on.
        public_key: the server's, to which its reports are sealed.
        state: how far it is.
        outcome: what closing it found; None before, and for a lost batch.
        spool: its batch; None when it is gone, or not opened yet.
    """

    number: int
    model_digest: str
    public_key: bytes
    state: RoundState
    outcome: Outcome | None
    spool: RoundSpool | None = None


@dataclasses.dataclass(slots=True)
class Run:
    """A run that has not ended.

    Attributes:
        digest: SHA-256 of its plan, hexadecimal.
        plan: its plan.
        report_bytes: length of every sealed report.
        owner: name of the credential of the server that created it.
        text: the plan's bytes.
        rounds: by number; old ones are forgotten.
        opening: a round whose files are being made.
    """

    run_id: str
    digest: str
    plan: Plan
    report_bytes: int
    owner: str
    text: bytes
    rounds: dict[int, Round] = dataclasses.field(default_factory=dict)
    opening: Round | None = None

    @property
    def stored_bytes(self) -> int:
        """How many bytes of the disk a report, or a blanket, takes at most."""
        return max(slot_bytes(self.report_bytes), PAGE_BYTES)

    @property
    def report_cost(self) -> int:
        """The same while it is being stored."""
        return self.stored_bytes + _OVERHEAD_BYTES

    def open_round(self) -> Round | None:
        """The one round that takes reports, if any does."""
        return next((r for r in self.rounds.values() if r.state is RoundState.OPEN), None)

    def in_state(self, state: RoundState) -> list[int]:
        """The numbers of the rounds in this state, rising."""
        return sorted(number for number, r in self.rounds.items() if r.state is state)

    def header(self, round: Round) -> RoundHeader:
        """What the reports of a round are bound to."""
        return _header(self.run_id, round.number, round.model_digest, self.digest, round.public_key)

    def check_key(self, round: Round) -> None:
        """Refuses a round to whose public key this run's reports cannot be sealed."""
        try:
            length = payload_length(self.report_bytes, round.public_key)
            seal(b"", round.public_key, self.header(round))
        except Exception as error:
            raise _malformed(f"the public key is not one to seal reports to: {error}") from error
        if self.plan.shuffler_blankets and (length == 0 or length % report_length(1)):
            raise _malformed(f"no report has {length} bytes, so it can have no blankets")


@functools.lru_cache(maxsize=256)  # it is asked for with every report
def _header(run_id: str, round: int, model: str, plan: str, public_key: bytes) -> RoundHeader:
    return RoundHeader(run_id, round, model, plan, key_digest(public_key))


def parse_run(run_id: str, plan: bytes, report_bytes: int, owner: str) -> Run:
    """The run that a plan, a JSON object, describes; one that does not is refused."""
    if not 1 <= report_bytes <= MAX_REPORT_BYTES:
        raise _malformed(f"report_bytes must lie in [1, {MAX_REPORT_BYTES}], got {report_bytes}")
    if len(plan) > _MAX_PLAN_BYTES:
        raise _malformed(f"a plan has at most {_MAX_PLAN_BYTES} bytes")
    try:
        fields = Plan.model_validate_json(plan)
    except ValidationError as error:
        raise _malformed(f"the plan: {first_mistake(error, Plan)}") from None
    return Run(run_id, hashlib.sha256(plan).hexdigest(), fields, report_bytes, owner, plan)


def _malformed(detail: str) -> ShufflerRefused:
    return ShufflerRefused(Refusal.MALFORMED, detail)
