"""The rounds at one shuffler: booked, opened, closed, their batches aggregated and destroyed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections.abc import Iterator

import numpy as np

from shufl.protocol.mechanisms import make_randomness
from shufl.protocol.outcomes import RoundOutcome
from shufl.server.aggregate import (
    Aggregate,
    Expected,
    SpoiledBatch,
    aggregate_reports,
    aggregate_sum,
)
from shufl.server.plausible_counts import Counts
from shufl.server.settings import RoundFailed, ServerSettings
from shufl.shuffler import (
    ControlClient,
    Outcome,
    PrivateKey,
    Refusal,
    RoundHeader,
    ShufflerError,
    ShufflerRefused,
    message_length,
)
from shufl.shuffler.wire.errors import Closed

log = logging.getLogger(__name__)

_PASSING = {
    *(Refusal.UNKNOWN_RUN, Refusal.UNKNOWN_ROUND, Refusal.DISCARDED, Refusal.ALREADY_RELEASED),
    *(Refusal.BATCH_LOST, Refusal.STORAGE_FULL, Refusal.STORAGE_FAILED, Refusal.BUSY),
    *(Refusal.TOO_MANY_RUNS, Refusal.TOO_MANY_ROUNDS, Refusal.TOO_MANY_BATCHES),
}
"""Refusals after which other rounds may go well."""


class ShufflerRound:
    """The round under way at one shuffler, which knows of no other shuffler.

    Its steps are `book`, `open`, `close` and `fetch`. An error that may pass goes into `error`, and
    costs the round of this shuffler's users alone; any other is raised. In a simulation all are.

    Attributes:
        number: the shuffler's, from 0.
        client: the server's connection to it.
        error: why the round is lost here; None: it is not.
        closed: what the shuffler says of the round that is over; None: nothing that is believed.
        users: how many of the shuffler's users were present.
        part: what its batch came to; None: it was not released, or is not used.
        spoiled: why a batch that was released is not used; empty: it is.
        counts: whether what it has released so far is what was expected.
    """

    def __init__(self, number: int, settings: ServerSettings, dimension: int):
        """Begins before the first round of a run, or of what is left of it."""
        self._settings, self._policy, self._plan = settings, settings.policy, settings.plan
        address, credentials = settings.shufflers[number]
        self.client = ControlClient(address, credentials, patience=settings.policy.shuffler_seconds)
        self.number, self._dimension, self.counts = number, dimension, Counts(settings.plan)
        self._unended = settings.ledger.last_round  # the shuffler may still hold its batch; 0: none

    @property
    def is_releasable(self) -> bool:
        """Whether the shuffler says that the batch may be fetched."""
        return self.closed is not None and self.closed.outcome is Outcome.RELEASABLE

    @property
    def outcome(self) -> RoundOutcome:
        """How the round ended here."""
        if self.part is not None:
            return RoundOutcome.RELEASED
        if self.closed is None or self.is_releasable:  # what could be fetched is not here
            return RoundOutcome.LOST
        return RoundOutcome[self.closed.outcome.name]

    def book(self) -> None:
        """Has the shuffler, which may be another process by now, book the next round.

        Nothing is spent yet. Called again, it books the round for another minute.
        """
        self.error: ShufflerError | None = None
        self.closed: Closed | None = None
        self.part: Aggregate | None = None
        self.users, self.spoiled, plan = 0, "", self._plan
        length = message_length(self._dimension, plan.mixing, self._settings.sealing)
        with self._losing():
            self.client.create_run(self._settings.run_id, plan.to_json().encode(), length)
            if self._unended:
                self._end_round(self._unended)
            self.client.reserve(self._settings.run_id)

    def open(self, header: RoundHeader, public_key: bytes) -> None:
        """Opens the round. Its reports are bound to the header and to the shuffler's nonce."""
        self._unended, digest = header.round, header.model_digest
        with self._losing():
            nonce = self.client.open_round(header.run_id, header.round, digest, public_key)
            self._header = dataclasses.replace(header, nonce=nonce)

    def close(self, unwanted: bool) -> None:
        """Waits until the shuffler says that the round is over; destroys an unwanted round."""
        run_id, round = self._header.run_id, self._header.round
        window = self._plan.window.seconds if self._plan.window is not None else 0.0
        with self._losing():
            if unwanted:
                self.client.end_round(run_id, round)
            self.closed = self.client.close_round(run_id, round, window)

    def fetch(self, private_key: PrivateKey, answered: int, agreed: dict[str, int]) -> None:
        """Aggregates the batch, if it may be fetched, and has it destroyed.

        Args:
            private_key: opens the round's reports.
            answered: for how many users the nodes speak that have answered.
            agreed: for how many users each node may speak, by name; nothing in a simulation.

        Raises:
            RoundFailed: your aggregator failed.
        """
        self.users = answered
        with self._losing():
            if self._plan.cover and not self._policy.absence_is_fatal:
                self._believe(most=sum(agreed.values()))
            if self.is_releasable:
                self._aggregate(private_key, agreed)
                self._end_round(self._header.round)

    def end_run(self) -> None:
        """Has the shuffler forget the run, which is over.

        Raises:
            ShufflerError: it does not.
        """
        self.client.end_run(self._settings.run_id)

    def _end_round(self, round: int) -> None:
        self.client.end_round(self._settings.run_id, round)
        self._unended = 0

    def _believe(self, most: int) -> None:
        """Takes the shuffler's number of users who sent, if that number is possible.

        Nodes' answers do not tell it: a real node may be killed between sending and answering.
        """
        closed, self.closed, self.users = self.closed, None, 0
        if closed is not None:
            releasable = closed.outcome is Outcome.RELEASABLE
            least = self._plan.fewest_present if releasable else 0
            if not least <= closed.senders <= most:
                raise ShufflerError(
                    f"it says that {closed.senders} users sent; possible are {least} to {most}"
                )
            self.closed, self.users = closed, closed.senders

    def _aggregate(self, private_key: PrivateKey, agreed: dict[str, int]) -> None:
        header, plan, settings = self._header, self._plan, self._settings
        batch = header, self.client.release(header.run_id, header.round)
        try:
            if plan.mixing == "sum":
                # The streams of the shufflers' own draws have other seeds.
                (noise,) = make_randomness(self._policy.seed).blanket_noise(
                    header.round, np.array([self.number]), self._dimension
                )
                simulated = self._policy.absence_is_fatal
                signed = None if simulated else Expected(agreed, self.client.credentials.authority)
                part = aggregate_sum(batch, private_key, plan, self._dimension, noise, signed)
                self.users = part.reports  # what nodes have sealed, whatever the shuffler says
                self.counts.add_sum(part.length, self.users, self._dimension)
            else:
                aggregator = settings.make_aggregator(plan, self._dimension)
                part = aggregate_reports(
                    batch, private_key, plan, self._dimension, aggregator, self.users
                )
                self.counts.add(part.reports + part.rejected, self.users)
            self.part = part
        except SpoiledBatch as error:
            self.spoiled = str(error)
            self.users = error.reports if plan.mixing == "sum" else self.users
        except ShufflerError:
            raise
        except (Exception, SystemExit) as error:  # whatever your aggregator does
            raise RoundFailed(
                f"round {header.round}: the aggregator failed: {type(error).__name__}: {error}"
            ) from error

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Notes a shuffler's error if it may pass, and raises any other."""
        try:
            yield
        except ShufflerError as error:
            refused = isinstance(error, ShufflerRefused) and error.reason not in _PASSING
            if refused or self._policy.absence_is_fatal:
                raise
            self.error = copy.copy(error)  # the frames of this one keep the round's private key
            log.warning("shuffler %d: %s", self.number + 1, self.error)
