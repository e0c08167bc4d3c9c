"""Rounds on Flower: broadcast, close, fetch, aggregate; `Training` does the rest."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from shufl.learning.parameters import frozen_digest, sent
from shufl.protocol.outcomes import RoundOutcome
from shufl.server.aggregate import Aggregate
from shufl.server.broadcast import Exchange, broadcast
from shufl.server.connected_nodes import Fleet
from shufl.server.settings import MOST_IN_VAIN, NodeFailed, RoundFailed, RunEnd, ServerSettings
from shufl.server.shuffler_round import ShufflerRound
from shufl.server.training import Observe, PlayedRound, Training
from shufl.shuffler import (
    RoundHeader,
    ShufflerError,
    generate_key_pair,
    key_digest,
    model_digest,
)

log = logging.getLogger(__name__)

_MOST_NAMES = 5  # of nodes, in a line of the log
_TRY_AGAIN_SECONDS = 1.0
_TELL_SECONDS = 5.0  # after which the operator is told which shuffler is waited for
_FIRST = (RoundOutcome.RELEASED, RoundOutcome.LOST, RoundOutcome.BELOW_MINIMUM)
"""Outcomes at one shuffler that are the whole round's, if none before it occurs at another."""


class RoundLoop:
    """One run on the server, its rounds played by Flower nodes and the shufflers.

    Several shufflers do not know of each other: each has the reports of its own users' nodes, adds
    its own blankets, and is closed and read alone.

    Attributes:
        parts: the round under way at each shuffler.
    """

    def __init__(
        self, settings: ServerSettings, grid: Grid, observe: Observe, stop: Callable[[], bool]
    ):
        """Begins a run, or goes on with one.

        `observe` is called after every round. `stop` is polled: when it turns true, the round is
        closed early in a simulation, and the run ends.
        """
        self.settings, self._policy = settings, settings.policy
        self._grid, self._observe, self._stop = grid, observe, stop
        self._training = Training(settings)
        self._in_vain = 0  # rounds in a row that were not released
        self.parts = [
            ShufflerRound(number, settings, self._training.dimension)
            for number in range(len(settings.shufflers))
        ]
        self._away: set[int] = set()  # shufflers that did not hold the last round
        frozen = frozen_digest(self._training.model)
        self._fleet = Fleet(settings, grid, self._waiting_is_over, frozen)

    def run(self) -> RunEnd:
        """Runs until the budget, the plan's last round, or an interrupt.

        Raises:
            NodeFailed: in a simulation, as soon as a node fails or does not answer.
            RoundFailed: nodes do not get ready, or three rounds in a row were not released.
            ShufflerError: in a simulation, a shuffler does not answer or refuses; else none answers
                for as long as the run waits, or one refuses for good.
        """
        for round in self._training.rounds():
            nodes, parts = self._get_ready()
            if self._stop():
                break
            played = self._play(round, self._training.begin(round), nodes, parts)
            self._observe(self._training.end(round, played), self._training.result)
        result = self._training.finish()
        if result.stopped_by != "interrupt":  # it may be resumed
            for each in self.parts:
                try:
                    each.end_run()
                except ShufflerError as error:
                    if self._policy.absence_is_fatal:
                        raise
                    log.warning("the run is not ended: %s", error)
        return result

    def _waiting_is_over(self) -> bool:
        return self._stop() or self._policy.shufflers_gone()

    def _get_ready(self) -> tuple[list[int], list[ShufflerRound]]:
        """Waits for nodes, and for a shuffler that has room for them; nothing is spent yet.

        Returns:
            The nodes, and the shufflers that have booked the round.
        """
        until = time.monotonic() + self._policy.patience
        while not self._stop():
            nodes = self._fleet.gather(until)
            enough = self._fleet.with_enough(nodes)
            # If no shuffler has enough users, all are asked, so that a dead one is noticed.
            parts = [each for each in self.parts if not enough or each.number in enough]
            self._book(parts)
            ready = [each for each in parts if each.error is None]
            if ready or self._waiting_is_over():
                self._policy.tell("")
                return nodes, ready
            error = self._tell(parts)
            if time.monotonic() > until:
                raise error
        return [], []

    def _book(self, parts: Sequence[ShufflerRound]) -> None:
        """Has shufflers book the next round; does not wait for those that missed the last one."""
        begun = time.monotonic()
        until = begun + self._policy.shuffler_seconds
        while True:
            _at_each(parts, ShufflerRound.book)  # again: a booking holds for a minute
            away = {each.number for each in parts if each.error}
            if not away - self._away or time.monotonic() > until or self._waiting_is_over():
                self._away = away
                return
            if time.monotonic() > begun + _TELL_SECONDS:
                self._tell(parts)
            time.sleep(_TRY_AGAIN_SECONDS)

    def _tell(self, parts: Sequence[ShufflerRound]) -> ShufflerError:
        """Tells the operator why a shuffler has not booked the round; gives the error."""
        error = next(each.error for each in parts if each.error)
        self._policy.tell(f"waiting for shufflers: {error}")
        return error

    def _play(
        self, round: int, trained: nn.Module, nodes: list[int], parts: Sequence[ShufflerRound]
    ) -> PlayedRound:
        """Opens a round at every shuffler that has booked it, plays it, and fetches what there is.

        If ε counts on no other users, a silent node costs nothing: the batch is released with the
        reports that came. Otherwise ε counts on `least_present` users, and a batch of fewer is
        destroyed unseen. A shuffler that fails loses the round of its own users alone.
        """
        settings, state = self.settings, sent(trained)
        private_key, public_key = generate_key_pair(settings.sealing)
        header = RoundHeader(
            run_id=settings.run_id,
            round=round,
            model_digest=model_digest(state),
            plan_digest=settings.plan.digest(),
            key_digest=key_digest(public_key),
        )
        _at_each(parts, lambda each: each.open(header, public_key))
        opened = [each for each in parts if each.error is None]
        numbers = {each.number for each in opened}
        asked = [node for node in nodes if self._fleet.shuffler_of(node) in numbers]
        seconds, model = self._policy.round_timeout, ArrayRecord(state)
        answers = broadcast(self._grid, asked, header, public_key, model, seconds)
        self._close(opened, answers)
        self._note(round, opened, answers)
        answered = self._fleet.users_of(answers.received)
        for each in opened:
            each.fetch(private_key, answered[each.number], self._fleet.agreed_at(each.number))
        del private_key  # overwritten: nobody can open this round's reports again
        return self._together(round, parts, answers)

    def _close(self, parts: Sequence[ShufflerRound], answers: Exchange) -> None:
        """Waits until the shufflers say that the round is over; meanwhile hears the nodes.

        A simulated round has no window, and is over when all nodes have answered. One that an
        interrupt cuts short is destroyed as a whole: it holds reports of nodes that are not counted
        as present, and its mean would be wrong. So is one in which a node failed, which ends the
        run.
        """
        unwanted: set[int] = set()
        if self._policy.absence_is_fatal:
            answers.wait(lambda: self._waiting_is_over() or bool(answers.errors))
            cut_short = bool(answers.errors or (self._stop() and answers.waiting))
            there = self._fleet.users_of(answers.received).items()
            enough = self.settings.plan.enough_present
            unwanted = {number for number, users in there if cut_short or not enough(users)}
        _at_each(parts, lambda each: each.close(each.number in unwanted), answers.wait)
        answers.hear()

    def _note(self, round: int, parts: Sequence[ShufflerRound], answers: Exchange) -> None:
        """Remembers and tells which nodes have failed.

        Raises:
            NodeFailed: in a simulation, one has.
        """
        closed = [each.closed for each in parts if each.closed is not None]
        self._fleet.note(answers, absent={name for each in closed for name in each.absent})
        told = errors_told(round, answers.errors, self._fleet.name_of)
        for line in told:
            log.error("%s", line)
        if told and self._policy.absence_is_fatal and not self._stop():
            raise NodeFailed(told[0])

    def _together(
        self, round: int, parts: Sequence[ShufflerRound], answers: Exchange
    ) -> PlayedRound:
        """What a round came to at all shufflers."""
        outcomes = {each.outcome for each in parts}
        outcome = next((each for each in _FIRST if each in outcomes), RoundOutcome.DISCARDED)
        released = [(each, each.part) for each in parts if each.part is not None]
        spoiled = {each.number: each.spoiled for each in parts if each.spoiled}
        if released or not spoiled:  # whoever spoils sums spends rounds, and ends no run
            reasons = [*answers.errors.values(), *(each.error for each in parts if each.error)]
            self._fail_if_in_vain(round, outcome, reasons)
        doubts = [f"round {round}, shuffler {n + 1}: {why}" for n, why in spoiled.items()]
        doubts += [
            f"shuffler {each.number + 1} {each.counts.doubt}"
            for each in self.parts
            if each.counts.doubt
        ]
        for doubt in doubts:
            log.warning("%s", doubt)
        return PlayedRound(
            outcome=outcome,
            aggregate=_mean_of([(part, each.users) for each, part in released]),
            users_present=sum(
                each.users for each in parts if each.part is not None or not released
            ),
            smallest_crowd=min((each.users for each in parts if each.is_releasable), default=0),
            silent_nodes=len(self._fleet.known) - len(answers.received),
            doubt="; ".join(doubts),
        )

    def _fail_if_in_vain(
        self, round: int, outcome: RoundOutcome, reasons: Sequence[object]
    ) -> None:
        """Ends a run on real machines after several rounds in a row without a release."""
        self._in_vain = 0 if outcome is RoundOutcome.RELEASED else self._in_vain + 1
        fatal = self._policy.absence_is_fatal
        if self._in_vain == MOST_IN_VAIN and not fatal and not self._stop():
            raise RoundFailed(
                f"{MOST_IN_VAIN} rounds in a row were not released, round {round} is {outcome}: "
                f"{reasons[0] if reasons else 'too few users sent'}"
            )


def _at_each(
    parts: Sequence[ShufflerRound],
    step: Callable[[ShufflerRound], None],
    meanwhile: Callable[[Callable[[], bool]], None] = lambda done: None,
) -> None:
    """Takes a step at each shuffler, none of which waits for another.

    `meanwhile` gets a function that says whether all of them are done.
    """
    with ThreadPoolExecutor(len(parts) or 1) as pool:
        steps = [pool.submit(step, each) for each in parts]
        meanwhile(lambda: all(each.done() for each in steps))
    for each in steps:
        each.result()


def _mean_of(parts: Sequence[tuple[Aggregate, int]]) -> Aggregate | None:
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
