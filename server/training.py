"""Training under a budget: guard, ledger, a round by some engine, step, evaluate, checkpoint.

An interrupted run goes on from its checkpoint. Rounds in the ledger after it are spent, and their
outputs may be known. Such a round is played again, at no further cost, only where that makes the
release it made before: coins and noise are functions of the seed, and the model is the one it was
played with, by the digest in its ledger line. Whoever has the first release learns nothing from
the second. Any other such round is lost: spent, without a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shufl.accounting import PrivacyBudget
from shufl.server.aggregate import Aggregate
from shufl.server.checkpoint import Checkpoint, tensor_bytes
from shufl.server.checkpoint_file import save_atomically
from shufl.server.evaluation import Evaluation, evaluate
from shufl.server.settings import RoundFailed, RunResult, TrainingSettings
from shufl.server.words import RoundOutcome, RoundRecord, StoppedBy
from shufl.shuffler import model_digest

_MODEL = "model_digest"  # of the model a round was played with, in its ledger line


@dataclass(frozen=True)
class PlayedRound:
    """What an engine made of a round.

    Attributes:
        aggregate: of a released round, else None.
        outcome, users_present, smallest_crowd, silent_nodes: as in `RoundRecord`.
    """

    outcome: RoundOutcome
    aggregate: Aggregate | None
    users_present: int
    smallest_crowd: int
    silent_nodes: int = 0


class Training:
    """Model, optimiser and budget of one run, whichever engine plays its rounds."""

    def __init__(self, settings: TrainingSettings):
        self.settings = settings
        self.model = settings.make_model()
        self.dimension = sum(p.numel() for p in self.model.parameters())
        self._optimiser = settings.optimiser.build(self.model)
        self._average = settings.optimiser.average_of(self.model)
        self._test = settings.load_test()
        self._budget = PrivacyBudget(settings.plan, settings.ledger)
        self._spent_before = {entry.round: entry.note for entry in settings.ledger.entries}
        self._first = 1
        if settings.checkpoint is None:
            self._save(0)
        else:
            self.model.load_state_dict(settings.checkpoint.model)
            self._optimiser.load_state_dict(settings.checkpoint.optimiser)
            if self._average is not None:
                self._average.load_state_dict(settings.checkpoint.average or {})
            self._first = settings.checkpoint.round + 1

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
            stop: asked before every round that the budget allows; nothing of it is spent yet.

        Raises:
            RoundFailed: the model cannot be evaluated.
        """
        stopped_by: StoppedBy = "rounds"
        done = self._first - 1
        while done < self.settings.plan.rounds:
            spent = done < self.settings.ledger.last_round
            if not spent and self._budget.would_exceed():
                stopped_by = "budget"
                break
            if stop():
                stopped_by = "interrupt"
                break
            done += 1
            if not spent or self._would_release_the_same(done):
                observe(self._round(done, play, spent))
                # Last: a crash before has the round played again, and observed, or lost.
                if done % self.settings.checkpoint_every == 0:
                    self._save(done)
        self._save(done)  # first: the model may fail
        final = self._evaluate()
        final_model = tensor_bytes(self._result.state_dict())
        save_atomically(self.settings.folder / "model.pt", final_model)
        rounds = self.settings.ledger.last_round
        return RunResult(rounds, stopped_by, self._budget.epsilon, final.accuracy, final.loss)

    def _would_release_the_same(self, round: int) -> bool:
        """Whether a spent round, played again now, gives what it gave."""
        before = self._spent_before.get(round, {}).get(_MODEL)
        return self.settings.reproducible and before == self._model_digest()

    def _model_digest(self) -> str:
        return model_digest(self.model.state_dict())

    def _round(
        self, round: int, play: Callable[[int, nn.Module], PlayedRound], spent: bool
    ) -> RoundRecord:
        started = time.monotonic()
        if not spent:  # on disk before anybody works on it
            self._budget.spend(round, {_MODEL: self._model_digest()})
        played = play(round, self.model)
        aggregate = played.aggregate
        if aggregate is not None:
            self._step(aggregate, round)
        result = self._evaluate() if round % self.settings.evaluate_every == 0 else None
        return RoundRecord(
            round=round,
            epsilon=self._budget.epsilon,
            outcome=played.outcome,
            users_present=played.users_present,
            smallest_crowd=played.smallest_crowd,
            reports=aggregate.reports if aggregate else 0,
            rejected=aggregate.rejected if aggregate else 0,
            reasons=aggregate.reasons if aggregate else {},
            silent_nodes=played.silent_nodes,
            accuracy=result.accuracy if result else None,
            loss=result.loss if result else None,
            seconds=time.monotonic() - started,
        )

    @property
    def _result(self) -> nn.Module:
        """What is evaluated and saved: the model, or its average."""
        return self.model if self._average is None else self._average.module

    def _step(self, aggregate: Aggregate, round: int) -> None:
        """One optimiser step, with the estimate in the gradients' place."""
        for group in self._optimiser.param_groups:
            group["lr"] = self.settings.optimiser.learning_rate_at(round)
        gradient = torch.from_numpy(aggregate.estimate)
        offset = 0
        for parameter in self.model.parameters():
            part = gradient[offset : offset + parameter.numel()]
            parameter.grad = part.view_as(parameter).clone()
            offset += parameter.numel()
        self._optimiser.step()
        if self._average is not None:
            self._average.update_parameters(self.model)

    def _evaluate(self) -> Evaluation:
        try:
            return evaluate(self._result, *self._test)
        except (Exception, SystemExit) as error:  # whatever the model does, sys.exit() with it
            raise RoundFailed(
                f"the model could not be evaluated: {type(error).__name__}: {error}"
            ) from error

    def _save(self, round: int) -> None:
        settings = self.settings
        Checkpoint(
            settings.run_id,
            settings.origin,
            round,
            self.model.state_dict(),
            self._optimiser.state_dict(),
            None if self._average is None else self._average.state_dict(),
        ).save(settings.folder / "checkpoint.pt")
