"""Rounds on Flower: broadcast, close, fetch, aggregate; `Training` does the rest."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from shufl.server.aggregate import Mean, aggregate_reports
from shufl.server.broadcast import Exchange, broadcast
from shufl.server.fleet import Fleet
from shufl.server.settings import (
    MOST_INCOMPLETE,
    NodeFailed,
    RoundFailed,
    RunEnd,
    ServerSettings,
)
from shufl.server.training import Observe, PlayedRound, Training
from shufl.server.words import RoundOutcome
from shufl.shuffler import (
    ControlClient,
    Outcome,
    Refusal,
    RoundHeader,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
    generate_key_pair,
    key_digest,
    model_digest,
    report_length,
    sealed_length,
)

log = logging.getLogger(__name__)


_TRY_AGAIN_SECONDS = 1.0
_LOST = {Refusal.BATCH_LOST, Refusal.STORAGE_FULL, Refusal.STORAGE_FAILED}

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
        self._incomplete = 0  # rounds in a row that lacked nodes
        self._lost = 0  # rounds in a row that a shuffler lost
        self._shufflers = [ControlClient(*shuffler) for shuffler in settings.shufflers]
        self._fleet = Fleet(settings, grid, self._waiting_is_over)
        self._asked: list[int] = []  # in the round that is next, or under way
        self._broken: int | None = settings.ledger.last_round or None
        """A round that may still be open at a shuffler."""

    def run(self) -> RunEnd:
        """Runs until the budget, the plan's last round, or an interrupt.

        Raises:
            NodeFailed: without patience, as soon as a node fails or does not answer.
            RoundFailed: nodes do not get ready, or three rounds in a row lacked nodes.
            ShufflerError: the shuffler does not answer or refuses.
        """
        settings = self.settings
        length = sealed_length(report_length(self._training.dimension), settings.sealing)
        plan = settings.plan.to_json().encode()
        for shuffler in self._shufflers:
            try:
                self._patiently(shuffler.create_run, settings.run_id, plan, length)
            except ShufflerRefused as refused:  # its last round may be over, and not its report
                if refused.reason is not Refusal.RUN_ENDED:
                    raise
        for round in self._training.rounds():
            self._get_ready()
            if self._stop():
                break
            played = self._round(round, self._training.begin(round))
            self._observe(self._training.end(round, played), self._training.result)
        result = self._training.finish()
        if result.stopped_by != "interrupt":  # it may be resumed
            for shuffler in self._shufflers:
                self._patiently(shuffler.end_run, settings.run_id)
        return result

    def _get_ready(self) -> None:
        """Waits, unless the run is stopped, until shufflers and enough nodes are there."""
        if self._broken is not None:
            for shuffler in self._shufflers:
                self._patiently(shuffler.end_round, self.settings.run_id, self._broken)
            self._broken = None
        if not self._stop():
            self._asked = self._fleet.gather()

    def _patiently(self, call: Callable[..., object], *arguments: object) -> None:
        """Calls a shuffler, again and again while it is away and there is patience left."""
        until = time.monotonic() + self.settings.patience
        while True:
            try:
                call(*arguments)
            except ShufflerUnavailable as error:
                if time.monotonic() >= until or self._stop():
                    raise
                log.warning("%s; trying again", error)
                time.sleep(_TRY_AGAIN_SECONDS)
            else:
                return

    def _round(self, round: int, trained: nn.Module) -> PlayedRound:
        """Plays a round; with patience, one that a shuffler loses does not end the run.

        Lost rounds are spent, so three in a row end the run all the same.
        """
        try:
            played = self._play(round, trained)
        except ShufflerError as error:
            passes = isinstance(error, ShufflerUnavailable) or (
                isinstance(error, ShufflerRefused) and error.reason in _LOST
            )
            self._lost += 1
            if not passes or not self.settings.patience or self._lost == MOST_INCOMPLETE:
                raise
            log.error("round %d is lost: %s", round, error)
            self._broken = round
            return PlayedRound("lost", None, users_present=0, smallest_crowd=0)
        self._lost = 0
        return played

    def _play(self, round: int, trained: nn.Module) -> PlayedRound:
        """Opens a round at every shuffler, plays it, and releases where enough users are present.

        A silent node costs nothing where ε counts on no other users: the batch is released with
        whoever answered. Otherwise ε is that of `least_present` users mixing, so that a batch with
        fewer of them is destroyed unseen. So is one whose round an interrupt cut short: it holds
        reports of nodes that are not counted as present, and its mean would be wrong. And so is
        one of a simulation in which a node failed, which ends the run.
        """
        settings, plan = self.settings, self.settings.plan
        simulated = not settings.patience
        model = ArrayRecord(trained.state_dict())
        digest = model_digest(trained.state_dict())
        private_key, public_key = generate_key_pair(settings.sealing)
        header = RoundHeader(settings.run_id, round, digest, plan.digest(), key_digest(public_key))
        nonces = [
            shuffler.open_round(header.run_id, round, digest, public_key)
            for shuffler in self._shufflers
        ]
        seconds = settings.round_timeout
        answers = broadcast(self._grid, self._asked, header, public_key, model, seconds)
        answers.wait(lambda: self._waiting_is_over() or (simulated and bool(answers.errors)))
        failures = [
            f"{self._fleet.name_of(node)}: {why.removeprefix(f'round {round}, ')}"
            for node, why in answers.errors.items()
        ]
        for failure in failures:
            log.error("round %d, %s", round, failure)
        self._fleet.note(answers)
        present = self._fleet.users_of(answers.received)
        enough = {number: plan.enough_present(users) for number, users in present.items()}
        incomplete = bool((simulated and failures) or (self._stop() and answers.waiting))
        outcomes = {}
        for number, shuffler in enumerate(self._shufflers):
            if incomplete or not enough[number]:
                shuffler.end_round(header.run_id, round)
            outcomes[number] = shuffler.close_round(header.run_id, round)
        if simulated and failures and not self._stop():
            raise NodeFailed(f"round {round}, {failures[0]}")
        released = [number for number, each in outcomes.items() if each is Outcome.RELEASABLE]
        self._fail_if_nobody_comes(round, answers, any(enough.values()))
        aggregate, users = None, present.total()
        if released:
            users = sum(present[number] for number in released)
            batches = [
                (
                    dataclasses.replace(header, nonce=nonces[number]),
                    self._shufflers[number].release(header.run_id, round),
                )
                for number in released
            ]
            mean = Mean(plan, self._training.dimension)
            aggregate = aggregate_reports(batches, private_key, mean, users)
            for number in released:
                self._shufflers[number].end_round(header.run_id, round)
        del private_key  # overwritten: nobody can open this round's reports again
        return PlayedRound(
            "released" if released else _OUTCOMES[min(outcomes.values())],
            aggregate,
            silent_nodes=len(self._fleet.known) - len(answers.received),
            users_present=users,
            smallest_crowd=min((present[number] for number in released), default=0),
        )

    def _fail_if_nobody_comes(self, round: int, answers: Exchange, enough: bool) -> None:
        """Ends the run when too few users were present at every shuffler, round after round."""
        self._incomplete = 0 if enough else self._incomplete + 1
        if self._incomplete == MOST_INCOMPLETE and not self._stop():
            reasons = list(answers.errors.values())
            raise RoundFailed(
                f"{MOST_INCOMPLETE} rounds in a row lacked nodes and could not be released, in "
                f"round {round} {len(reasons)} of {len(self._asked)}: "
                f"{reasons[0] if reasons else 'not connected'}"
            )
