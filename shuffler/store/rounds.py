"""A run as the shuffler knows it: its plan, and what has become of each of its rounds."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections import Counter

from pydantic import ValidationError

from shufl.protocol.plan import Plan
from shufl.protocol.validation import ConfigError, first_mistake
from shufl.shuffler.store.batch import Batch
from shufl.shuffler.wire.channel import MAX_REPORT_BYTES
from shufl.shuffler.wire.errors import Outcome, malformed
from shufl.shuffler.wire.reports import report_length
from shufl.shuffler.wire.sealing import SEED_PAYLOAD_BYTES, RoundHeader, payload_length, seal

_MAX_PLAN_BYTES = 2**16


@dataclasses.dataclass(slots=True)
class Round:
    """A round of a run.

    Attributes:
        number: counts from 1.
        header: what its reports are bound to.
        public_key: the server's, to which they are sealed.
        batch: its reports; None when they are gone.
        blankets: how many blankets it gets. Never for the server.
        made: how many have been made so far, of the plan's `most_blankets`.
        outcome: how it ended; None before, and for a lost round.
        released: whether a release has begun.
        ends_at: when its window ends, by `time.monotonic`; 0: it has none.
        waits_since: since when the server is waited for: from its opening or the end of its window
            to be closed, then to be released and ended; by the same.
        agreed: names of the nodes that were shown what the shuffler was given.
        senders, absent: as in `Closed`, where the plan has cover.
    """

    number: int
    header: RoundHeader | None = None
    public_key: bytes = b""
    batch: Batch | None = None
    blankets: int = 0
    made: int = 0
    outcome: Outcome | None = None
    released: bool = False
    ends_at: float = 0.0
    waits_since: float = 0.0
    agreed: set[str] = dataclasses.field(default_factory=set)
    senders: int = 0
    absent: tuple[str, ...] = ()

    @property
    def seconds_left(self) -> float:
        """Seconds left of its window."""
        return max(self.ends_at - time.monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether its window has ended."""
        return bool(self.ends_at) and not self.seconds_left

    @property
    def is_open(self) -> bool:
        """Whether it takes reports."""
        return self.batch is not None and self.outcome is None


@dataclasses.dataclass(slots=True)
class Run:
    """A run that has not ended.

    Attributes:
        digest: SHA-256 of its plan, hexadecimal.
        plan: its plan.
        report_bytes: length of every sealed report.
        owner: name of the credential of the server that created it.
        rounds: by number; old ones are forgotten.
        lease: an empty batch for the next round, and when it is given up, by `time.monotonic`.
        without_report: in how many rounds in a row a node has agreed and sent nothing, by name.
    """

    run_id: str
    digest: str
    plan: Plan
    report_bytes: int
    owner: str
    rounds: dict[int, Round] = dataclasses.field(default_factory=dict)
    lease: tuple[Batch, float] | None = None
    without_report: Counter[str] = dataclasses.field(default_factory=Counter)

    @property
    def held(self) -> int:
        """How many batches take room on the disk."""
        return len(self.batches()) + (self.lease is not None)

    @property
    def takes_reports(self) -> bool:
        """Whether a round is open, or about to be."""
        return self.open_round() is not None or self.lease is not None

    def open_round(self) -> Round | None:
        """The one round that takes reports, if any does."""
        return next((round for round in self.rounds.values() if round.is_open), None)

    def batches(self) -> list[Round]:
        """The rounds whose reports are still here."""
        return [round for round in self.rounds.values() if round.batch is not None]

    def dimension_of_sums(self, public_key: bytes) -> int:
        """How many numbers a masked vector has, whose seed is sealed to this key."""
        return (payload_length(self.report_bytes, public_key) - SEED_PAYLOAD_BYTES) // 4

    def check_key(self, public_key: bytes, header: RoundHeader) -> None:
        """Refuses a public key to which this run's reports cannot be sealed."""
        try:
            length = payload_length(self.report_bytes, public_key)
            seal(b"", public_key, header)
        except Exception as error:
            raise malformed(f"the public key is not one to seal reports to: {error}") from error
        if self.plan.mixing == "sum":
            if length <= SEED_PAYLOAD_BYTES or (length - SEED_PAYLOAD_BYTES) % 4:
                raise malformed(f"no vector with its seed has {self.report_bytes} bytes")
            try:
                self.plan.check_dimension(self.dimension_of_sums(public_key))
            except ConfigError as error:
                raise malformed(f"the plan: {error}") from None
        if self.plan.shuffler_blankets and (length == 0 or length % report_length(1)):
            raise malformed(f"no report has {length} bytes, so it can have no blankets")


def parse_run(run_id: str, plan: bytes, report_bytes: int, owner: str) -> Run:
    """The run that a plan, a JSON object, describes; one that does not is refused."""
    if not 1 <= report_bytes <= MAX_REPORT_BYTES:
        raise malformed(f"report_bytes must lie in [1, {MAX_REPORT_BYTES}], got {report_bytes}")
    if len(plan) > _MAX_PLAN_BYTES:
        raise malformed(f"a plan has at most {_MAX_PLAN_BYTES} bytes")
    try:
        fields = Plan.model_validate_json(plan)
    except ValidationError as error:
        raise malformed(f"the plan: {first_mistake(error, Plan)}") from None
    return Run(run_id, hashlib.sha256(plan).hexdigest(), fields, report_bytes, owner)
