"""Rounds on Flower: broadcast, close, fetch, aggregate; `Training` does the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from shufl.learning.trained import frozen_digest, sent
from shufl.protocol.mechanisms import make_randomness
from shufl.protocol.outcomes import RoundOutcome
from shufl.server.aggregate import (
    Aggregate,
    Expected,
    SpoiledBatch,
    aggregate_reports,
    aggregate_sum,
)
from shufl.server.broadcast import Exchange, broadcast
from shufl.server.counts import Counts
from shufl.server.fleet import START_SECONDS, Fleet
from shufl.server.settings import (
    MOST_IN_VAIN,
    NodeFailed,
    RoundFailed,
    RunEnd,
    ServerSettings,
)
from shufl.server.training import Observe, PlayedRound, Training
from shufl.shuffler import (
    ControlClient,
    Outcome,
    PrivateKey,
    Refusal,
    RoundHeader,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    generate_key_pair,
    key_digest,
    message_length,
    model_digest,
)
from shufl.shuffler.wire.connection import Retries
from shufl.shuffler.wire.errors import Closed

_T = TypeVar("_T")
log = logging.getLogger(__name__)

_MOST_NAMES = 5  # of nodes, in a line of the log
_SHUFFLER_SECONDS = 60.0  # for a shuffler that is away to come back within a round
_TRY_AGAIN_SECONDS = 1.0
_PASSING = {
    *(Refusal.UNKNOWN_RUN, Refusal.UNKNOWN_ROUND, Refusal.DISCARDED, Refusal.ALREADY_RELEASED),
    *(Refusal.BATCH_LOST, Refusal.STORAGE_FULL, Refusal.STORAGE_FAILED, Refusal.BUSY),
    *(Refusal.TOO_MANY_RUNS, Refusal.TOO_MANY_ROUNDS, Refusal.TOO_MANY_BATCHES),
}
"""Refusals after which other rounds may go well."""

_OUTCOMES: dict[Outcome, RoundOutcome] = {
    Outcome.RELEASABLE: "released",
    Outcome.BELOW_MINIMUM: "below-minimum",
    Outcome.DISCARDED: "discarded",
}


class RoundLoop:
    """One run on the server, its rounds played by Flower nodes and the shufflers.

    Several shufflers do not know of each other: each has the reports of its own users' nodes, adds
    its own blankets, and is closed and read alone.
    """

    def __init__(
        self,
        settings: ServerSettings,
        grid: Grid,
        observe: Observe,
        stop: Callable[[], bool],
        shuffler_gone: Callable[[], bool],
    ):
        self.settings = settings
        self._grid = grid
        self._observe = observe
        self._stop = stop
        self._waiting_is_over: Callable[[], bool] = lambda: stop() or shuffler_gone()
        self._training = Training(settings)
        self._patient = bool(settings.patience)
        self._counts = Counts(settings.plan)
        self._randomness = make_randomness(settings.seed)
        self._in_vain = 0  # rounds in a row that were not released
        self._shufflers = [ControlClient(*shuffler) for shuffler in settings.shufflers]
        frozen = frozen_digest(self._training.model)
        self._fleet = Fleet(settings, grid, self._waiting_is_over, frozen)
        self._away: set[int] = set()  # shufflers that did not hold the last round
        self._ready: dict[int, set[int]] = {}
        """Nodes of the next round, or of the one under way, by the shuffler that has booked it."""
        last = settings.ledger.last_round
        self._unended = dict.fromkeys(range(len(self._shufflers)), last) if last else {}
        """The round of which a shuffler may still hold a batch."""

    def run(self) -> RunEnd:
        """Runs until the budget, the plan's last round, or an interrupt.

        Raises:
            NodeFailed: without patience, as soon as a node fails or does not answer.
            RoundFailed: nodes do not get ready, or three rounds in a row were not released.
            ShufflerError: without patience, a shuffler does not answer or refuses; with it, none
                answers for that long, or one refuses for good.
        """
        settings = self.settings
        for round in self._training.rounds():
            self._get_ready()
            if self._stop():
                break
            played = self._play(round, self._training.begin(round))
            self._observe(self._training.end(round, played), self._training.result)
        result = self._training.finish()
        if result.stopped_by != "interrupt":  # it may be resumed
            for shuffler in self._shufflers:
                try:
                    self._again(shuffler.end_run, settings.run_id)
                except ShufflerError as error:
                    if not self._patient:
                        raise
                    log.warning("the run is not ended: %s", error)
        return result

    def _get_ready(self) -> None:
        """Waits for nodes, and for a shuffler that has room for them; nothing is spent yet."""
        settings = self.settings
        wait = settings.patience or max(START_SECONDS, settings.round_timeout)
        until = time.monotonic() + wait
        while not self._stop():
            nodes = self._fleet.gather(until)
            everyone = list(range(len(self._shufflers)))  # so that one that is gone is found out
            numbers = self._fleet.with_enough(nodes) or everyone
            failed = self._reserve(numbers)
            self._ready = {number: set() for number in numbers if number not in failed}
            for node in nodes:
                if (number := self._fleet.known[node].shuffler) in self._ready:
                    self._ready[number].add(node)
            if self._ready or self._waiting_is_over():
                return
            error = next(iter(failed.values()))
            if time.monotonic() > until:
                raise error
            settings.tell(f"waiting for shufflers: {error}")

    def _reserve(self, numbers: list[int]) -> dict[int, ShufflerError]:
        """Has these shufflers book the next round; returns which did not, and why.

        It does not wait for one that did not hold the last round.
        """
        until = time.monotonic() + _SHUFFLER_SECONDS
        while True:
            failed: dict[int, ShufflerError] = {}
            self._at_each(numbers, self._book, failed)  # also those that have: another minute
            away = set(failed)
            if not away - self._away or time.monotonic() > until or self._waiting_is_over():
                self._away = away
                return failed
            time.sleep(_TRY_AGAIN_SECONDS)

    def _book(self, number: int) -> None:
        """Has a shuffler, which may be another process by now, book the next round."""
        settings, shuffler = self.settings, self._shufflers[number]
        about = self._training.dimension, settings.plan.mixing, settings.sealing
        length = message_length(*about)
        shuffler.create_run(settings.run_id, settings.plan.to_json().encode(), length)
        if number in self._unended:
            shuffler.end_round(settings.run_id, self._unended[number])
            del self._unended[number]
        shuffler.reserve(settings.run_id)

    def _at_each(
        self,
        numbers: list[int],
        call: Callable[[int], _T],
        failed: dict[int, ShufflerError],
        meanwhile: Callable[[Callable[[], bool]], None] = lambda done: None,
    ) -> dict[int, _T]:
        """What a call gives at each of these shufflers, none of which waits for another.

        Errors that may pass go into `failed`. `meanwhile` gets a function: whether all are done.
        """
        results = {}
        with ThreadPoolExecutor(len(numbers) or 1) as pool:
            calls = {number: pool.submit(call, number) for number in numbers}
            meanwhile(lambda: all(each.done() for each in calls.values()))
        for number, each in calls.items():
            with self._passing(number, failed):
                results[number] = each.result()
        return results

    @contextlib.contextmanager
    def _passing(self, number: int, failed: dict[int, ShufflerError]) -> Iterator[None]:
        """With patience, notes a shuffler's error if it may pass; raises any other."""
        try:
            yield
        except ShufflerError as error:
            refused = isinstance(error, ShufflerRefused) and error.reason not in _PASSING
            if refused or not self._patient:
                raise
            log.warning("shuffler %d: %s", number + 1, error)
            failed[number] = error

    def _play(self, round: int, trained: nn.Module) -> PlayedRound:
        """Opens a round at every shuffler that has booked it, plays it, and fetches what there is.

        A silent node costs nothing where ε counts on no other users: the batch is released with
        whoever sent. Otherwise ε is that of `least_present` users mixing, so that a batch with
        fewer of them is destroyed unseen. What one shuffler loses is lost for its users alone.

        In a simulation, a round that an interrupt cuts short is destroyed as a whole: it holds
        reports of nodes that are not counted as present, and its mean would be wrong. So is one in
        which a node failed, which ends the run.
        """
        settings, plan = self.settings, self.settings.plan
        model, digest = ArrayRecord(sent(trained)), model_digest(sent(trained))
        private_key, public_key = generate_key_pair(settings.sealing)
        header = RoundHeader(settings.run_id, round, digest, plan.digest(), key_digest(public_key))
        lost: dict[int, ShufflerError] = {}

        def open_at(number: int) -> bytes:
            self._unended[number] = round
            return self._shufflers[number].open_round(header.run_id, round, digest, public_key)

        nonces = self._at_each(list(self._ready), open_at, lost)
        nodes = sorted(node for number in nonces for node in self._ready[number])
        seconds = settings.round_timeout
        answers = broadcast(self._grid, nodes, header, public_key, model, seconds)
        closed = self._close(round, list(nonces), answers, lost)
        absent = {name for each in closed.values() for name in each.absent}
        self._fleet.note(answers, absent)
        for line in errors_told(round, answers.errors, self._fleet.name_of):
            log.error("%s", line)
        if not self._patient and answers.errors and not self._stop():
            node, why = next(iter(answers.errors.items()))
            raise NodeFailed(f"round {round}, {self._why(round, node, why)}")
        there = self._fleet.users_of(answers.received)
        if plan.cover and self._patient:
            there = Counter({number: each.senders for number, each in closed.items()})
            for number in self._untrue(closed, lost):
                del closed[number], there[number]
        parts: dict[int, Aggregate] = {}
        fetched: list[int] = []
        doubts: list[str] = []
        for number, each in closed.items():
            if each.outcome is Outcome.RELEASABLE:
                with self._passing(number, lost):
                    own = dataclasses.replace(header, nonce=nonces[number])
                    part = self._fetch(number, own, private_key, there[number])
                    fetched.append(number)
                    if isinstance(part, Aggregate):
                        parts[number] = part
                    else:
                        doubts.append(f"round {round}, shuffler {number + 1}: {part}")
                        log.warning("%s", doubts[-1])
                    if plan.mixing == "sum":  # what nodes have sealed, not what a shuffler says
                        there[number] = part.reports
        del private_key  # overwritten: nobody can open this round's reports again
        outcomes = [_OUTCOMES[each.outcome] for each in closed.values()]
        outcome: RoundOutcome = (
            "released" if parts else "lost" if lost or fetched else min(outcomes)
        )
        if parts or not fetched:  # whoever spoils sums spends rounds, and ends no run
            self._fail_if_in_vain(round, outcome, [*answers.errors.values(), *lost.values()])
        users = sum(there[number] for number in parts) or there.total()
        silent = len(self._fleet.known) - len(answers.received)
        releasable = [number for number, it in closed.items() if it.outcome is Outcome.RELEASABLE]
        smallest = min((there[number] for number in releasable), default=0)
        aggregate = _together([(part, there[number]) for number, part in parts.items()])
        for number, part in parts.items():
            if plan.mixing == "shuffle":
                self._counts.add(number, part.reports + part.rejected, there[number])
            else:
                self._counts.add_sum(number, part.length, there[number], self._training.dimension)
        if doubt := self._counts.doubt:
            log.warning("%s", doubt)
            doubts.append(doubt)
        return PlayedRound(outcome, aggregate, users, smallest, silent, "; ".join(doubts))

    def _untrue(self, closed: dict[int, Closed], lost: dict[int, ShufflerError]) -> Iterator[int]:
        """Shufflers that say that fewer users sent than a release takes, or more than may."""
        for number, each in [*closed.items()]:
            releasable, most = each.outcome is Outcome.RELEASABLE, self._fleet.most_at(number)
            least = self.settings.plan.fewest_present if releasable else 0
            if not least <= each.senders <= most:
                lost[number] = ShufflerError(
                    f"it says that {each.senders} users sent; possible are {least} to {most}"
                )
                log.warning("shuffler %d: %s", number + 1, lost[number])
                yield number

    def _close(
        self, round: int, numbers: list[int], answers: Exchange, lost: dict[int, ShufflerError]
    ) -> dict[int, Closed]:
        """What became of a round at each of these shufflers, which say when it is over.

        Meanwhile the nodes' answers are heard. A simulated round has no window, and is over when
        all of them are there.
        """
        settings, plan = self.settings, self.settings.plan
        unwanted: set[int] = set()
        if not self._patient:
            answers.wait(lambda: self._waiting_is_over() or bool(answers.errors))
            cut_short = bool(answers.errors or (self._stop() and answers.waiting))
            there = self._fleet.users_of(answers.received)
            unwanted = {
                each for each in numbers if cut_short or not plan.enough_present(there[each])
            }
        window = plan.window.seconds if plan.window is not None else 0.0

        def close_at(number: int) -> Closed:
            shuffler = self._shufflers[number]
            if number in unwanted:
                shuffler.end_round(settings.run_id, round)
            return self._again(shuffler.close_round, settings.run_id, round, window)

        closed = self._at_each(numbers, close_at, lost, answers.wait)
        answers.hear()
        return closed

    def _fetch(
        self, number: int, header: RoundHeader, private_key: PrivateKey, users: int
    ) -> Aggregate | SpoiledBatch:
        """Aggregates a shuffler's batch and has it destroyed; returns why it is not used if so."""
        shuffler, settings = self._shufflers[number], self.settings
        about = settings.plan, self._training.dimension
        patience = _SHUFFLER_SECONDS if self._patient else 0.0
        batch = header, shuffler.release(header.run_id, header.round, patience)
        aggregate: Aggregate | SpoiledBatch
        try:
            if settings.plan.mixing == "sum":
                # The streams of the shufflers' own draws have other seeds.
                (noise,) = self._randomness.blanket_noise(
                    header.round, np.array([number]), self._training.dimension
                )
                expected: Expected | None = None
                if settings.agreed is not None:
                    authority = shuffler.credentials.authority
                    expected = Expected(self._fleet.expected_at(number), authority)
                aggregate = aggregate_sum(batch, private_key, *about, noise, expected)
            else:
                own = settings.make_aggregator(*about)
                aggregate = aggregate_reports([batch], private_key, *about, own, users)
        except SpoiledBatch as spoiled:
            aggregate = spoiled
        except ShufflerError:
            raise
        except (Exception, SystemExit) as error:  # whatever the reader's aggregator does
            raise RoundFailed(
                f"round {header.round}: the aggregator failed: {type(error).__name__}: {error}"
            ) from error
        with self._passing(number, {}):
            shuffler.end_round(header.run_id, header.round)
            del self._unended[number]
        return aggregate

    def _again(self, call: Callable[..., _T], *arguments: object) -> _T:
        """Calls a shuffler; with patience, for a minute while it is away."""
        retries: Retries | None = None
        while True:
            try:
                return call(*arguments)
            except ShufflerUnavailable as error:
                seconds = _SHUFFLER_SECONDS if self._patient else 0.0
                retries = retries or Retries(time.monotonic() + seconds)
                retries.wait(error)

    def _why(self, round: int, node: int, reason: str) -> str:
        return f"{self._fleet.name_of(node)}: {reason.removeprefix(f'round {round}, ')}"

    def _fail_if_in_vain(self, round: int, outcome: RoundOutcome, reasons: list[object]) -> None:
        """Ends the run, with patience, when no round is released any more."""
        self._in_vain = 0 if outcome == "released" else self._in_vain + 1
        if self._patient and self._in_vain == MOST_IN_VAIN and not self._stop():
            why = f": {reasons[0]}" if reasons else ": too few users sent"
            raise RoundFailed(
                f"{MOST_IN_VAIN} rounds in a row were not released, round {round} is {outcome}{why}"
            )


def _together(parts: list[tuple[Aggregate, int]]) -> Aggregate | None:
    """What several shufflers released, each estimate weighed by how many users were there."""
    if not parts:
        return None
    aggregates, users = zip(*parts, strict=True)
    estimate = aggregates[0].estimate
    if len(parts) > 1:
        estimates = np.stack([each.estimate for each in aggregates])
        estimate = np.average(estimates, axis=0, weights=users).astype(np.float32)
    reasons = sum((Counter(each.reasons) for each in aggregates), Counter[str]())
    reports = sum(each.reports for each in aggregates)
    return Aggregate(estimate, reports, reasons.total(), dict(reasons))


def errors_told(round: int, errors: dict[int, str], name_of: Callable[[int], str]) -> list[str]:
    """A line for each reason why nodes failed in a round, however many have it."""
    failed: dict[str, list[str]] = {}
    for node, why in errors.items():
        failed.setdefault(why.removeprefix(f"round {round}, "), []).append(name_of(node))
    lines = []
    for reason, names in failed.items():
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        lines.append(f"round {round}, {', '.join(names[:_MOST_NAMES])}{more}: {reason}")
    return lines
