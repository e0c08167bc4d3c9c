"""Training under a budget: guard, ledger, a round by some engine, step, evaluate, checkpoint.

An interrupted run goes on from its checkpoint. Rounds in the ledger after it are spent, and their
outputs may be known. Such a round is played again, at no further cost, only where that makes the
release it made before: coins and noise are functions of the seed, and the model is the one it was
played with, by the digest in its ledger line. Whoever has the first release learns nothing from
the second. Any other such round is lost: spent, without a result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from shufl.accounting import PrivacyBudget
from shufl.learning.parameters import dimension, load_sent, sent
from shufl.learning.tasks import evaluate
from shufl.protocol.files import write_whole
from shufl.protocol.outcomes import BEGUN, RoundOutcome, RoundRecord, StoppedBy
from shufl.server.aggregate import Aggregate
from shufl.server.checkpoint import Checkpoint, tensor_bytes
from shufl.server.settings import RoundFailed, RunEnd, TrainingSettings
from shufl.shuffler import model_digest

_MODEL = "model_digest"  # of the model a round was played with, in its ledger line


Observe = Callable[[RoundRecord, nn.Module], None]
"""Is called after every round, with the model that is evaluated."""


@dataclass(frozen=True)
class PlayedRound:
    """What an engine made of a round.

    Attributes:
        aggregate: of a released round, else None.
        outcome, users_present, smallest_crowd, silent_nodes, doubt: as in `RoundRecord`.
    """

    outcome: RoundOutcome
    aggregate: Aggregate | None
    users_present: int
    smallest_crowd: int
    silent_nodes: int = 0
    doubt: str = ""


class Training:
    """Model, optimiser and budget of one run, whichever engine plays its rounds."""

    def __init__(self, settings: TrainingSettings):
        self.settings = settings
        self.model = settings.make_model()
        self.dimension = dimension(self.model)
        self._optimiser = settings.optimiser.build(self.model)
        self._average = settings.optimiser.average_of(self.model)
        self._test = settings.load_test()
        self._budget = PrivacyBudget(settings.plan, settings.ledger)
        self._spent_before = {entry.round: entry.note for entry in settings.ledger.entries}
        self._done = 0
        self._stopped_by: StoppedBy = "interrupt"  # until `rounds` ends by itself
        if settings.checkpoint is None:
            self._save()
        else:
            load_sent(self.model, settings.checkpoint.model)
            self._optimiser.load_state_dict(settings.checkpoint.optimiser)
            if self._average is not None:
                load_sent(self._average, settings.checkpoint.average or {})
            self._done = settings.checkpoint.round

    def rounds(self) -> Iterator[int]:
        """Gives the rounds to be played, until the budget or the plan's last; stop where you like.

        Nothing of a round is spent when it is given: `begin` spends it, and `end` ends it. Spent
        rounds that cannot be played again are left out.
        """
        while self._done < self.settings.plan.rounds:
            round = self._done + 1
            spent = round <= self.settings.ledger.last_round
            if not spent and self._budget.would_exceed():
                self._stopped_by = "budget"
                return
            lost = spent and not self._would_release_the_same(round)
            if not lost:
                yield round
            self._done = round
            # Last: a crash before has the round played again, and observed, or lost.
            if not lost and round % self.settings.checkpoint_every == 0:
                self._save()
        self._stopped_by = "rounds"

    def finish(self) -> RunEnd:
        """Saves and evaluates what training came to.

        Raises:
            RoundFailed: the model cannot be evaluated.
        """
        self._save()  # first: the model may fail
        final = self._evaluate()
        write_whole(self.settings.folder / "model.pt", tensor_bytes(sent(self.result)))
        rounds = self.settings.ledger.last_round
        return RunEnd(rounds, self._stopped_by, final)

    def _would_release_the_same(self, round: int) -> bool:
        """Whether a spent round, played again now, gives what it gave."""
        before = self._spent_before.get(round, {}).get(_MODEL)
        return self.settings.reproducible and before == self._model_digest()

    def _model_digest(self) -> str:
        return model_digest(sent(self.model))

    def begin(self, round: int) -> nn.Module:
        """Spends a round, on disk before anybody works on it; gives the model, to be left as is."""
        self._started = time.monotonic()
        if round > self.settings.ledger.last_round:
            # The ledger of a run that a seed reproduces is the same each time.
            begun = {} if self.settings.reproducible else {BEGUN: time.time()}
            self._budget.spend(round, {_MODEL: self._model_digest(), **begun})
        return self.model

    def end(self, round: int, played: PlayedRound) -> RoundRecord:
        """Takes the step of a round that was begun and played.

        Raises:
            RoundFailed: the model cannot be evaluated.
        """
        aggregate = played.aggregate
        if aggregate is not None:
            self.settings.optimiser.step(self._optimiser, self.model, aggregate.estimate, round)
            if self._average is not None:
                self._average.update_parameters(self.model)
        result = self._evaluate() if round % self.settings.evaluate_every == 0 else {}
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
            score=self.settings.task.score,
            metrics={self.settings.task.score: None, "loss": None, **result},
            seconds=time.monotonic() - self._started,
            doubt=played.doubt,
        )

    @property
    def result(self) -> nn.Module:
        """What is evaluated and saved: the model, or its average."""
        return self.model if self._average is None else self._average.module

    def _evaluate(self) -> dict[str, float]:
        try:
            return evaluate(self.result, *self._test, self.settings.task.measure)
        except (Exception, SystemExit) as error:  # whatever the model does, sys.exit() with it
            raise RoundFailed(
                f"the model could not be evaluated: {type(error).__name__}: {error}"
            ) from error

    def _save(self) -> None:
        settings = self.settings
        Checkpoint(
            settings.run_id,
            settings.origin,
            self._done,
            sent(self.model),
            self._optimiser.state_dict(),
            None if self._average is None else sent(self._average),
        ).save(settings.folder / "checkpoint.pt")
