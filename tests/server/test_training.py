"""Training goes on after a crash: what is played again, what is lost, and that all is paid for."""

import numpy as np
import pytest
import torch
from torch import nn

from rounds import make_plan
from server_world import optimiser_of
from shufl.accounting import Ledger
from shufl.learning.tasks import CLASSIFICATION
from shufl.protocol.outcomes import RoundOutcome
from shufl.server import (
    Aggregate,
    PlayedRound,
    RoundFailed,
    Training,
    TrainingSettings,
    load_checkpoint,
)

PLAN = make_plan(users=50, check_in_rate=0.5, noise_multiplier=2.0, rounds=20)


class Crash(Exception):
    pass


class Engine:
    """Releases what depends on round and model; crashes once in the rounds told."""

    def __init__(self, crash_in=(), discard=()):
        self.played = []
        self._crash_in, self._discard = set(crash_in), set(discard)

    def __call__(self, round, model):
        self.played.append(round)
        if round in self._crash_in:
            self._crash_in.remove(round)
            raise Crash
        if round in self._discard:
            self._discard.remove(round)
            return PlayedRound(RoundOutcome.DISCARDED, None, PLAN.users, 0)
        draw = np.random.default_rng(round).normal(size=2)
        estimate = draw + model.weight.detach().numpy().ravel()
        aggregate = Aggregate(estimate.astype(np.float32), 25, 0, {})
        return PlayedRound(RoundOutcome.RELEASED, aggregate, PLAN.users, PLAN.users)


def make_model():
    torch.manual_seed(0)
    return nn.Linear(2, 1, bias=False)


def train(
    folder, engine, reproducible, stop=lambda rounds: False, observe=lambda round: None,
    make_model=make_model,
):  # fmt: skip
    """Trains from the folder's checkpoint, if there is one; returns the result and the rounds."""
    path, checkpoint = folder / "ledger.jsonl", folder / "checkpoint.pt"
    with Ledger.open(path, PLAN) if path.exists() else Ledger.create(path, PLAN, "run") as ledger:
        settings = TrainingSettings(
            plan=PLAN, ledger=ledger, make_model=make_model,
            load_test=lambda: (torch.ones(1, 2), torch.zeros(1, dtype=torch.int64)),
            task=CLASSIFICATION,
            optimiser=optimiser_of(optimiser="adam"), folder=folder, evaluate_every=1,
            checkpoint_every=5, origin={}, reproducible=reproducible,
            checkpoint=load_checkpoint(checkpoint) if checkpoint.exists() else None,
        )  # fmt: skip
        rounds, training = [], Training(settings)
        for round in training.rounds():
            if stop(len(rounds)):
                break
            record = training.end(round, engine(round, training.begin(round)))
            observe(record.round)
            rounds.append(record.round)
        return training.finish(), rounds


class FailsInEvaluation(nn.Linear):
    """Raises at the evaluations told, numbered from 1."""

    def __init__(self, error, at):
        super().__init__(2, 1, bias=False)
        self.evaluations, self.error, self.at = [], error, at

    def forward(self, records):
        self.evaluations.append(1)
        if len(self.evaluations) == self.at:
            raise self.error
        return super().forward(records)

    def __deepcopy__(self, memo):
        return self


def crashed(folder, engine, reproducible):
    with pytest.raises(Crash):
        train(folder, engine, reproducible)


def spent(folder):
    return [entry.round for entry in Ledger.read(folder / "ledger.jsonl").entries]


def model(folder):
    return torch.load(folder / "model.pt", weights_only=True)["weight"]


@pytest.fixture
def uninterrupted(tmp_path):
    folder = tmp_path / "uninterrupted"
    folder.mkdir()
    result, _ = train(folder, Engine(), True)
    return result, model(folder)


@pytest.mark.parametrize("crashes", [(1,), (8,), (5, 8), (20, 8)])
def test_a_reproducible_run_ends_as_if_it_had_not_crashed(tmp_path, uninterrupted, crashes):
    engine = Engine(crashes)
    for _ in crashes:
        crashed(tmp_path, engine, True)
    result, _ = train(tmp_path, engine, True)
    assert result == uninterrupted[0]
    assert torch.equal(model(tmp_path), uninterrupted[1])
    assert spent(tmp_path) == list(range(1, 21))


@pytest.mark.parametrize(("at", "saved"), [(7, 5), (21, 20)])
@pytest.mark.parametrize("error", [ValueError("it breaks"), SystemExit(0)])
def test_a_model_that_fails_in_evaluation_ends_the_run_in_order(tmp_path, error, at, saved):
    failing = FailsInEvaluation(error, at)
    with pytest.raises(RoundFailed, match=f"could not be evaluated: {type(error).__name__}: "):
        train(tmp_path, Engine(), True, make_model=lambda: failing)
    assert load_checkpoint(tmp_path / "checkpoint.pt").round == saved
    assert train(tmp_path, Engine(), True)[0].rounds == 20


def test_a_round_is_in_the_checkpoint_only_once_it_was_observed(tmp_path, uninterrupted):
    def crash(round):
        if round == 5:  # one with a checkpoint
            raise Crash

    with pytest.raises(Crash):
        train(tmp_path, Engine(), True, observe=crash)
    result, records = train(tmp_path, Engine(), True)
    assert records == list(range(1, 21)) and result == uninterrupted[0]


def test_without_a_seed_no_spent_round_is_played_again(tmp_path, uninterrupted):
    engine = Engine((8, 13))
    crashed(tmp_path, engine, False)
    crashed(tmp_path, engine, False)
    result, records = train(tmp_path, engine, False)
    assert engine.played == list(range(1, 21))
    assert records == list(range(14, 21))
    assert result.rounds == 20
    assert spent(tmp_path) == list(range(1, 21))


def test_a_round_is_not_played_again_from_another_model(tmp_path):
    """Round 7 gave no result the first time: its replay does, so 8 and 9 had another model."""
    engine = Engine({9}, {7})
    crashed(tmp_path, engine, True)
    _, records = train(tmp_path, engine, True)
    assert records == [6, 7, *range(10, 21)]
    assert spent(tmp_path) == list(range(1, 21))


def test_a_ledger_line_cut_short_is_a_lost_round(tmp_path):
    engine = Engine({8})
    crashed(tmp_path, engine, True)
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_bytes(ledger.read_bytes()[:-100])
    _, records = train(tmp_path, engine, True)
    assert records == [6, 7, *range(9, 21)]
    assert spent(tmp_path) == list(range(1, 21))


def test_an_interrupt_amid_replayed_rounds_loses_nothing(tmp_path, uninterrupted):
    engine = Engine({9})
    crashed(tmp_path, engine, True)
    result, records = train(tmp_path, engine, True, stop=lambda rounds: rounds == 2)
    assert (records, result.stopped_by, result.rounds) == ([6, 7], "interrupt", 9)
    result, records = train(tmp_path, engine, True)
    assert records == list(range(8, 21)) and result == uninterrupted[0]
    assert torch.equal(model(tmp_path), uninterrupted[1])
