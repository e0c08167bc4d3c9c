"""Rounds on Flower: broadcast, close, fetch, aggregate; `Training` does the rest."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from accounting import ACCOUNTANTS, PrivacyPlan
from server.aggregate import aggregate_reports
from server.broadcast import Acknowledgements, broadcast, greet, wait_for_nodes
from server.settings import RoundOutcome, RoundRecord, RunResult, ServerSettings
from server.training import PlayedRound, Training
from shuffler import (
    ControlClient,
    Outcome,
    RoundHeader,
    generate_key_pair,
    key_digest,
    model_digest,
    report_length,
    sealed_length,
)

log = logging.getLogger(__name__)

_START_SECONDS = 120.0  # for nodes to connect and load their data, at least
_MOST_INCOMPLETE = 3  # each is spent for nothing

_OUTCOMES: dict[Outcome, RoundOutcome] = {
    Outcome.RELEASABLE: "released",
    Outcome.BELOW_MINIMUM: "below-minimum",
    Outcome.DISCARDED: "discarded",
}


class RoundFailed(RuntimeError):
    """Nodes are missing, so that no round could be released; carries the first node's reason."""


@dataclass(frozen=True)
class NodeUsers:
    """What a node said of itself before the first round.

    Attributes:
        users: for how many users it speaks.
        shuffler: to which shuffler they report.
    """

    users: int
    shuffler: int


def users_of_node(said: dict[str, Any], shufflers: int) -> NodeUsers:
    """Checks what a node said of itself, for which there is only its word.

    Raises:
        RoundFailed: it named no number of users, or none of the shufflers.
    """
    users, shuffler = said.get("users"), said.get("shuffler")
    if type(users) is not int or type(shuffler) is not int or users < 1:
        raise RoundFailed(f"a node must say for how many users it speaks, it said {said}")
    if not 0 <= shuffler < shufflers:
        raise RoundFailed(f"a node reports to shuffler {shuffler} of {shufflers}")
    return NodeUsers(users, shuffler)


def users_present(nodes: Iterable[NodeUsers], shufflers: int) -> Counter[int]:
    """How many users these nodes speak for, by shuffler."""
    present = Counter(dict.fromkeys(range(shufflers), 0))
    for node in nodes:
        present[node.shuffler] += node.users
    return present


def enough_users(users: int, plan: PrivacyPlan) -> bool:
    """Whether a batch may be released where so many users are present."""
    counts_on_others = ACCOUNTANTS[plan.accountant].counts_on_others
    return users >= (plan.least_present if counts_on_others else 1)


class RoundLoop:
    """One run on the server, its rounds played by Flower nodes and the shufflers.

    Several shufflers do not know of each other: each has the reports of its own users' nodes, adds
    its own blankets, and is closed and read alone.
    """

    def __init__(
        self,
        settings: ServerSettings,
        grid: Grid,
        observe: Callable[[RoundRecord], None],
        stop: Callable[[], bool],
        shuffler_gone: Callable[[], bool],
    ):
        self.settings = settings
        self._grid = grid
        self._observe = observe
        self._stop = stop
        self._waiting_is_over = lambda: stop() or shuffler_gone()
        self._training = Training(settings)
        self._incomplete = 0  # rounds in a row that lacked nodes
        self._shufflers = [ControlClient(*shuffler) for shuffler in settings.shufflers]
        self._nodes: dict[int, NodeUsers] = {}

    def run(self) -> RunResult:
        """Runs until the budget, the plan's last round, or an interrupt.

        Raises:
            RoundFailed: nodes do not get ready, or three rounds in a row lacked nodes.
            ShufflerError: the shuffler does not answer or refuses.
            TimeoutError: the nodes did not connect.
        """
        settings = self.settings
        length = sealed_length(report_length(self._training.dimension), settings.sealing)
        for shuffler in self._shufflers:
            shuffler.create_run(settings.run_id, settings.plan.to_json().encode(), length)
        self._nodes = self._ready_nodes()
        result = self._training.run(self._round, self._observe, self._stop)
        if result.stopped_by != "interrupt":  # it may be resumed
            for shuffler in self._shufflers:
                shuffler.end_run(settings.run_id)
        return result

    def _ready_nodes(self) -> dict[int, NodeUsers]:
        """The nodes by id, once all of them have loaded their data and agreed to the plan."""
        settings = self.settings
        timeout = max(_START_SECONDS, settings.round_timeout)
        nodes = wait_for_nodes(self._grid, settings.nodes, timeout, self._stop)
        about = {"run_id": settings.run_id, "plan_digest": settings.plan.digest()}
        answers = greet(self._grid, nodes, about, timeout, self._stop)
        if len(answers.received) < len(nodes) and not self._stop():
            missing = len(nodes) - len(answers.received)
            raise RoundFailed(
                f"{missing} of {len(nodes)} nodes did not get ready: "
                f"{_first_reason(answers, timeout)}"
            )
        shufflers = len(self._shufflers)
        known = {node: users_of_node(said, shufflers) for node, said in answers.received.items()}
        if (users := sum(node.users for node in known.values())) > settings.plan.users:
            raise RoundFailed(
                f"the nodes speak for {users} users, the plan has {settings.plan.users}"
            )
        return known

    def _round(self, round: int, trained: nn.Module) -> PlayedRound:
        """Opens a round at every shuffler, plays it, and releases where enough users are present.

        A silent node costs nothing where ε counts on no other users: the batch is released with
        whoever answered. Otherwise ε is that of `least_present` users mixing, so that a batch with
        fewer of them is destroyed unseen. So is one whose round an interrupt cut short: it holds
        reports of nodes that are not counted as present, and its mean would be wrong.
        """
        settings, plan = self.settings, self.settings.plan
        model = ArrayRecord(trained.state_dict())
        digest = model_digest(trained.state_dict())
        private_key, public_key = generate_key_pair(settings.sealing)
        header = RoundHeader(settings.run_id, round, digest, plan.digest(), key_digest(public_key))
        for shuffler in self._shufflers:
            shuffler.open_round(header.run_id, round, digest, public_key)
        asked, timeout = list(self._nodes), settings.round_timeout
        answers = broadcast(
            self._grid, asked, header, public_key, model, timeout, self._waiting_is_over
        )
        for reason in answers.errors:
            log.error("round %d: a node failed: %s", round, reason)
        answered = (self._nodes[node] for node in answers.received)
        present = users_present(answered, len(self._shufflers))
        enough = {number: enough_users(users, plan) for number, users in present.items()}
        cut_short = self._stop() and len(answers.received) < len(self._nodes)
        outcomes = {
            number: shuffler.close_round(
                header.run_id, round, discard=cut_short or not enough[number]
            )
            for number, shuffler in enumerate(self._shufflers)
        }
        released = [number for number, each in outcomes.items() if each is Outcome.RELEASABLE]
        self._fail_if_nobody_comes(round, answers, any(enough.values()))
        aggregate = None
        if released:
            users = sum(present[number] for number in released)
            batches = (self._shufflers[number].release(header.run_id, round) for number in released)
            aggregate = aggregate_reports(
                itertools.chain.from_iterable(batches),
                private_key,
                header,
                settings.aggregator(plan, self._training.dimension),
                users,
            )
        del private_key  # overwritten: nobody can open this round's reports again
        return PlayedRound(
            "released" if released else _OUTCOMES[min(outcomes.values())],
            aggregate,
            silent_nodes=len(self._nodes) - len(answers.received),
            users_present=present.total(),
            smallest_crowd=min((present[number] for number in released), default=0),
        )

    def _fail_if_nobody_comes(self, round: int, answers: Acknowledgements, enough: bool) -> None:
        """Ends the run when too few users were present at every shuffler, round after round."""
        self._incomplete = 0 if enough else self._incomplete + 1
        if self._incomplete == _MOST_INCOMPLETE and not self._stop():
            raise RoundFailed(
                f"{_MOST_INCOMPLETE} rounds in a row lacked nodes and could not be released, in "
                f"round {round} {len(self._nodes) - len(answers.received)} of {len(self._nodes)}: "
                f"{_first_reason(answers, self.settings.round_timeout)}"
            )


def _first_reason(answers: Acknowledgements, timeout: float) -> str:
    return answers.errors[0] if answers.errors else f"no answer within {timeout:g} s"
