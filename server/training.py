"""Training under a budget: guard, ledger, a round by some engine, step, evaluate, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from accounting import Ledger, PrivacyBudget
from server.aggregate import Aggregate
from server.checkpoint import save_atomically, save_checkpoint
from server.evaluate import Evaluation, evaluate
from server.settings import RoundOutcome, RoundRecord, RunResult, StoppedBy, TrainingSettings


@dataclass(frozen=True)
class PlayedRound:
    """What an engine made of a round.

    Attributes:
        outcome: as in `RoundRecord`.
        aggregate: of a released round, else None.
        silent_nodes: as in `RoundRecord`.
    """

    outcome: RoundOutcome
    aggregate: Aggregate | None = None
    silent_nodes: int = 0


class Training:
    """Model, optimiser and budget of one run, whichever engine plays its rounds."""

    def __init__(self, settings: TrainingSettings):
        self.settings = settings
        self.model = settings.make_model()
        self.dimension = sum(p.numel() for p in self.model.parameters())
        self._event = settings.plan.event()
        self._optimiser = settings.optimiser.build(self.model)
        self._test = settings.load_test()
        plan = settings.plan
        self._budget = PrivacyBudget(
            plan.make_accountant(),
            plan.target_epsilon,
            plan.delta,
            Ledger.create(settings.folder / "ledger.jsonl", plan, settings.run_id),
        )

    def run(
        self,
        play: Callable[[int, nn.Module], PlayedRound],
        observe: Callable[[RoundRecord], None],
        stop: Callable[[], bool],
    ) -> RunResult:
        """Plays rounds until the budget, the plan's last round, or an interrupt.

        Args:
            play: one round, from its number and the model, which it leaves as it is; called when
                the round is in the ledger, on disk.
            observe: called after every round.
            stop: asked before every round.
        """
        round = 0
        stopped_by: StoppedBy = "rounds"
        while round < self.settings.plan.rounds:
            if stop():
                stopped_by = "interrupt"
                break
            if self._budget.would_exceed(self._event):
                stopped_by = "budget"
                break
            round += 1
            observe(self._round(round, play))
        final = self._evaluate()
        self._save(round)
        save_atomically(self.settings.folder / "model.pt", self.model.state_dict())
        return RunResult(round, stopped_by, self._budget.epsilon, final.accuracy, final.loss)

    def _round(self, round: int, play: Callable[[int, nn.Module], PlayedRound]) -> RoundRecord:
        started = time.monotonic()
        self._budget.spend(self._event, round)  # on disk before anybody works on it
        played = play(round, self.model)
        aggregate = played.aggregate
        if aggregate is not None:
            self._step(aggregate)
        result = self._evaluate() if round % self.settings.evaluate_every == 0 else None
        if round % self.settings.checkpoint_every == 0:
            self._save(round)
        return RoundRecord(
            round=round,
            epsilon=self._budget.epsilon,
            outcome=played.outcome,
            reports=aggregate.reports if aggregate else 0,
            rejected=aggregate.rejected if aggregate else 0,
            reasons=aggregate.reasons if aggregate else {},
            silent_nodes=played.silent_nodes,
            accuracy=result.accuracy if result else None,
            loss=result.loss if result else None,
            seconds=time.monotonic() - started,
        )

    def _step(self, aggregate: Aggregate) -> None:
        """One optimiser step, with the estimate in the gradients' place."""
        gradient = torch.from_numpy(aggregate.estimate)
        offset = 0
        for parameter in self.model.parameters():
            part = gradient[offset : offset + parameter.numel()]
            parameter.grad = part.view_as(parameter).clone()
            offset += parameter.numel()
        self._optimiser.step()

    def _evaluate(self) -> Evaluation:
        return evaluate(self.model, *self._test)

    def _save(self, round: int) -> None:
        save_checkpoint(
            self.settings.folder / "checkpoint.pt",
            self.model,
            self._optimiser,
            round,
            self.settings.run_id,
        )
