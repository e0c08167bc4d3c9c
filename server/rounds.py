"""Rounds on Flower: broadcast, close, fetch, aggregate; `Training` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch import nn

from server.aggregate import Aggregate, aggregate_reports
from server.broadcast import Acknowledgements, broadcast, greet, wait_for_nodes
from server.settings import RoundOutcome, RoundRecord, RunResult, ServerSettings
from server.training import PlayedRound, Training
from shuffler import (
    ControlClient,
    Outcome,
    PrivateKey,
    RoundHeader,
    generate_key_pair,
    model_version,
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


class RoundLoop:
    """One run on the server, its rounds played by Flower nodes and the shuffler."""

    def __init__(
        self,
        settings: ServerSettings,
        grid: Grid,
        observe: Callable[[RoundRecord], None],
        stop: Callable[[], bool],
    ):
        self.settings = settings
        self._grid = grid
        self._observe = observe
        self._stop = stop
        self._training = Training(settings)
        self._incomplete = 0  # rounds in a row that lacked nodes
        self._control = ControlClient(settings.shuffler_address, settings.shuffler_credentials)

    def run(self) -> RunResult:
        """Runs until the budget, the plan's last round, or an interrupt.

        Raises:
            RoundFailed: nodes do not get ready, or three rounds in a row lacked nodes.
            ShufflerError: the shuffler does not answer or refuses.
            TimeoutError: the nodes did not connect.
        """
        settings = self.settings
        self._control.create_run(
            settings.run_id,
            settings.plan.to_json().encode(),
            sealed_length(report_length(self._training.dimension), settings.sealing),
        )
        nodes = self._ready_nodes()
        result = self._training.run(
            lambda round, model: self._round(round, model, nodes), self._observe, self._stop
        )
        self._control.end_run(settings.run_id)
        return result

    def _ready_nodes(self) -> list[int]:
        """The nodes, once all of them have loaded their data and agreed to the plan."""
        settings = self.settings
        timeout = max(_START_SECONDS, settings.round_timeout)
        nodes = wait_for_nodes(self._grid, settings.nodes, timeout, self._stop)
        header = RoundHeader(settings.run_id, 0, "", settings.plan.digest())
        answers = greet(self._grid, nodes, header, timeout, self._stop)
        if answers.received < len(nodes) and not self._stop():
            missing = len(nodes) - answers.received
            raise RoundFailed(
                f"{missing} of {len(nodes)} nodes did not get ready: "
                f"{_first_reason(answers, timeout)}"
            )
        return nodes

    def _round(self, round: int, trained: nn.Module, nodes: list[int]) -> PlayedRound:
        model = ArrayRecord(trained.state_dict())
        header = RoundHeader(
            self.settings.run_id, round, _version(model), self.settings.plan.digest()
        )
        private_key, public_key = generate_key_pair(self.settings.sealing)
        self._control.open_round(header.run_id, header.round, header.model_version)
        answers = broadcast(
            self._grid,
            nodes,
            header,
            public_key,
            model,
            self.settings.round_timeout,
            self._stop,
        )
        for reason in answers.errors:
            log.error("round %d: a node failed: %s", round, reason)
        complete = answers.received == len(nodes)
        # Epsilon is that of n users mixing: with a node missing, nothing may be released.
        outcome = self._control.close_round(header.run_id, header.round, discard=not complete)
        self._incomplete = 0 if complete else self._incomplete + 1
        if self._incomplete == _MOST_INCOMPLETE and not self._stop():
            raise RoundFailed(
                f"{_MOST_INCOMPLETE} rounds in a row lacked nodes and could not be released, in "
                f"round {round} {len(nodes) - answers.received} of {len(nodes)}: "
                f"{_first_reason(answers, self.settings.round_timeout)}"
            )
        aggregate = None
        if outcome is Outcome.RELEASABLE:
            aggregate = self._collect(header, private_key)
        del private_key  # overwritten: nobody can open this round's reports again
        return PlayedRound(_OUTCOMES[outcome], aggregate, len(nodes) - answers.received)

    def _collect(self, header: RoundHeader, private_key: PrivateKey) -> Aggregate:
        """The aggregate of the released batch."""
        return aggregate_reports(
            self._control.release(header.run_id, header.round),
            private_key,
            header,
            self.settings.plan,
            self._training.dimension,
        )


def _version(model: ArrayRecord) -> str:
    return model_version(array.data for array in model.values())


def _first_reason(answers: Acknowledgements, timeout: float) -> str:
    return answers.errors[0] if answers.errors else f"no answer within {timeout:g} s"
