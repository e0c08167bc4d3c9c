"""The vectorised engine: the same updates, clipping, coins and noise, for many users at once."""

import dataclasses
import math
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nights import by_night
from run_world import invoke, json_lines, summary_of, trained
from shufl.accounting import Ledger, PrivacyBudget
from shufl.learning import local_update
from shufl.learning.config import load
from shufl.learning.data.partition import PartitionedRecords
from shufl.learning.models import mlp
from shufl.learning.parameters import sent
from shufl.protocol.mechanisms import SeededRandomness, clip
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.server import RoundFailed
from shufl.simulator.engines import vectorised
from shufl.simulator.engines.report_sum import ReportSum
from shufl.simulator.engines.vectorised import VectorisedEngine, VectorisedRounds

USERS, RATE, NOISE, CLIP = 60, 0.5, 1.0, 0.3
SETTINGS = [
    "simulation.engine=vectorised", f"data.users={USERS}", f"privacy.check_in_rate={RATE}",
    f"privacy.noise_multiplier={NOISE}", f"privacy.clip_norm={CLIP}", "privacy.rounds=3",
    "privacy.minimum_batch=1", "privacy.target_epsilon=1e9", "privacy.shuffler_blankets=0",
    "model.name=mlp", "seed=5",
]  # fmt: skip


def engine(*overrides):
    """The engine, ready to play the rounds of a small experiment."""
    return VectorisedEngine(prepare(load("quickstart", [*SETTINGS, *overrides])))


def rounds_of(engine):
    return VectorisedRounds(engine.settings, reports_of(engine).sum)


def reports_of(engine):
    return ReportSum(engine.settings, engine.load_users())


def played(engine, round):
    return rounds_of(engine)(round, engine.settings.make_model())


def checked_in(round):
    return np.flatnonzero(SeededRandomness(5).check_ins(round, np.arange(USERS), RATE))


def run_folder(tmp_path, *overrides):
    return trained(load("quickstart", [*SETTINGS, *overrides]), tmp_path)


def largest_rounding(engine, roundings):
    """Of any entry of an estimate whose sum has so many rounded terms: 7 standard deviations."""
    return 2 * engine.settings.plan.mechanism.unit(1) * math.sqrt(roundings) / (USERS * RATE)


def sum_by_hand(engine, users, round):
    """The clipped updates of `users`, one after the other."""
    settings, records, randomness = engine.settings, engine.load_users(), SeededRandomness(5)
    model, clip_norm = settings.make_model().train(), settings.plan.mechanism.clip_norm
    total = np.zeros(settings.dimension)
    seeds = randomness.training_seeds(round, users).tolist()
    for user, seed in zip(users.tolist(), seeds, strict=True):
        total += clip(
            local_update(model, *records(user), settings.computation.training, seed), clip_norm
        )
    return total


ALGORITHMS = {
    "fedsgd": [],
    "fedavg": [
        "training.algorithm=fedavg", "training.local_epochs=2", "training.local_batch_size=9",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overrides", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_round_is_the_one_computed_by_hand_whatever_the_chunk(overrides, device):
    of, users = engine(*overrides, f"simulation.device={device}"), checked_in(2)
    settings = of.settings
    total = sum_by_hand(of, users, 2)
    total += NOISE * CLIP * SeededRandomness(5).standard_normal(2, users, settings.dimension).sum(0)
    for size in (1, 7, 1000):
        of.settings = dataclasses.replace(settings, chunk=size)
        round = played(of, 2)
        assert (round.outcome, round.aggregate.reports) == ("released", len(users))
        before = of.load_users().before(users)
        blocks = np.unique(before // of.settings.records_per_block).size
        np.testing.assert_allclose(
            round.aggregate.estimate,
            total / (USERS * RATE),
            rtol=1e-4,
            atol=1e-6 + largest_rounding(of, blocks),
        )


def allow_less_than_float32():
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.allow_tf32 = True


def error_of_a_sum(device, precision, model="mlp", meanwhile=lambda: None):
    """Relative to one computed by hand on the CPU.

    There is hardly any noise in the plan, so that rounding to its unit does not hide the error.
    """
    of = engine(
        "simulation.noise=aggregate", "privacy.noise_multiplier=1e-3", f"model.name={model}",
        f"simulation.device={device}", f"simulation.precision={precision}",
    )  # fmt: skip
    expected, reports = sum_by_hand(of, checked_in(2), 2), reports_of(of)
    meanwhile()
    total = reports.sum(2, sent(of.settings.make_model()), checked_in(2), [])
    error = total * of.settings.plan.mechanism.unit(1) - expected
    return np.linalg.norm(error) / np.linalg.norm(expected)


def test_a_sum_in_bfloat16_is_near_the_one_computed_by_hand(device):
    assert error_of_a_sum(device, "float32") < 1e-4 < error_of_a_sum(device, "bfloat16") < 0.05


def convolution(input_shape, classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, classes))


@pytest.mark.parametrize("model", ["mlp", "test_vectorised:convolution"])
@pytest.mark.slow
def test_float32_means_float32_whatever_was_allowed_before(model, device):
    allow_less_than_float32()
    assert error_of_a_sum(device, "float32", model, allow_less_than_float32) < 1e-4
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cudnn.allow_tf32


def test_records_are_fetched_where_they_are():
    """Real ones on "meta", where a mixture of devices is an error."""
    records = engine().load_users()
    with FakeTensorMode(allow_non_fake_inputs=True):
        features, labels, sizes = records.to("meta").together(np.arange(3))
    assert (features.device.type, labels.device.type) == ("meta", "meta")
    assert (features.shape, labels.shape) == ((71, 1, 8, 8), (71,))
    assert sizes.tolist() == [23, 24, 24]


def test_a_round_is_not_taken_for_reproducible_on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vectorised, "fastest_method", lambda *about: "vmap")  # it would go there
    assert engine().repeats_releases
    assert not engine("simulation.device=cuda").repeats_releases


class Busy(nn.Linear):
    """Cannot be used by two threads at once; it keeps something until its forward is done."""

    at_work: ClassVar[set[int]] = set()

    def __init__(self, input_shape, classes):
        super().__init__(64, classes)

    def forward(self, records):
        if id(self) in self.at_work:
            raise RuntimeError("another thread uses this model")
        self.at_work.add(id(self))
        scores = super().forward(records.flatten(1))
        os.sched_yield()
        self.at_work.discard(id(self))
        return scores


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [4, *by_night(19)])
def test_no_two_threads_use_a_model_at_once(rounds):
    busy = engine(f"model.name={__name__}:Busy", "simulation.records_per_chunk=1")
    reports = reports_of(busy)
    for round in range(1, rounds + 1):
        reports.sum(round, sent(busy.settings.make_model()), np.arange(USERS), [])


def failed_run(tmp_path, model):
    """The line by which `shufl run` with a model of this file ends."""
    given = [f"--set={each}" for each in (*SETTINGS, f"model.name={__name__}:{model.__name__}")]
    result = invoke("run", "quickstart", "--runs", tmp_path, *given)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 1, line
    return line


class TooLarge(nn.Linear):
    """Does not fit into memory for many digits, though for as many records of a trial."""

    def __init__(self, input_shape, classes):
        super().__init__(64, classes)

    def forward(self, records):
        if len(records) > 100 and records.amin() >= -1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB.")
        return super().forward(records.flatten(1))


@pytest.mark.slow
def test_memory_that_runs_out_is_one_line(tmp_path):
    what = "OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB."
    where = f"({Path(__file__).name}, line {TooLarge.forward.__code__.co_firstlineno + 2})"
    said = failed_run(tmp_path, TooLarge)
    assert said == f"error: round 1: computing updates failed: {what} {where}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["5", "system"])
@pytest.mark.parametrize("noise", ["report", "aggregate"])
def test_the_noise_of_the_sum_has_variance_k_times_that_of_a_report(seed, noise):
    """Everybody checks in, so the updates are known with the system's entropy too."""
    of = engine(f"simulation.noise={noise}", f"seed={seed}", "privacy.check_in_rate=1.0")
    rounds, model = rounds_of(of), of.settings.make_model()
    updates = sum_by_hand(of, np.arange(USERS), 1)
    draws = [
        (rounds(round, model).aggregate.estimate.astype(float) * USERS - updates)
        / (NOISE * CLIP * math.sqrt(USERS))
        for round in (1, 2)
    ]
    assert stats.kstest(np.concatenate(draws), "norm").pvalue > 1e-7
    assert abs(np.corrcoef(*draws)[0, 1]) < 6 / math.sqrt(of.settings.dimension)


def test_the_least_clip_norm_is_as_exact_as_another():
    of = engine(
        "simulation.noise=aggregate", "privacy.clip_norm=1e-18", "privacy.noise_multiplier=1e-9",
        "privacy.target_epsilon=1e30",
    )  # fmt: skip
    aggregate = played(of, 1).aggregate
    expected = sum_by_hand(of, checked_in(1), 1) / (USERS * RATE)
    atol = 1e-24 + largest_rounding(of, 1)  # one block
    np.testing.assert_allclose(aggregate.estimate, expected, rtol=1e-4, atol=atol)


def test_only_users_who_checked_in_are_touched(monkeypatch):
    fetch, seen = PartitionedRecords.together, []

    def spy(records, users):
        seen.extend(users.tolist())
        return fetch(records, users)

    monkeypatch.setattr(PartitionedRecords, "together", spy)
    played(engine("simulation.records_per_chunk=9"), 3)
    assert sorted(seen) == checked_in(3).tolist()


class FailsLater(nn.Linear):
    """Raises in training once it is told to."""

    error = None

    def __init__(self, input_shape, classes):
        super().__init__(64, classes)

    def forward(self, records):
        if self.training and self.error is not None:
            raise self.error
        return super().forward(records.flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize("error", [ValueError("it\nbreaks"), SystemExit(0)])
def test_a_model_that_fails_in_a_later_round_ends_the_run_in_one_line(tmp_path, monkeypatch, error):
    spend = PrivacyBudget.spend

    def arm(self, round, note):
        if round == 2:
            monkeypatch.setattr(FailsLater, "error", error)
        spend(self, round, note)

    monkeypatch.setattr(PrivacyBudget, "spend", arm)
    said = failed_run(tmp_path, FailsLater)
    assert said.startswith(f"error: round 2: computing updates failed: {type(error).__name__}: it")


@pytest.mark.slow
def test_rounds_without_check_ins_are_spent_and_leave_the_model(tmp_path):
    folder = run_folder(tmp_path, "privacy.check_in_rate=1e-3")
    rows = json_lines(folder / "metrics.jsonl")
    assert [(row["outcome"], row["reports"]) for row in rows] == [("below-minimum", 0)] * 3
    assert len(Ledger.read(folder / "ledger.jsonl").entries) == 3
    final = torch.load(folder / "model.pt", weights_only=True)
    start = prepare(load(str(folder / "config.toml"))).make_model().state_dict()
    assert all(torch.equal(start[name], final[name]) for name in start)


def with_layer_twice(input_shape, classes):
    square = nn.Linear(64, 64)
    return nn.Sequential(nn.Flatten(), square, nn.ReLU(), square, nn.Linear(64, classes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gradients"),
    [("mlp", "book-keeping"), (f"{__name__}:with_layer_twice", "vmap")],
    ids=["mlp", "twice"],
)
def test_how_a_run_was_computed_is_in_its_record(tmp_path, model, gradients):
    how = {"noise": "aggregate", "precision": "bfloat16"}
    sets = [f"simulation.{key}={value}" for key, value in how.items()]
    folder = run_folder(tmp_path, f"model.name={model}", *sets)
    how |= {"engine": "vectorised", "device": "cpu"}
    assert summary_of(folder).items() >= (how | {"gradients": gradients}).items()
    simulation = load(str(folder / "config.toml")).simulation
    assert simulation.model_dump().items() >= how.items()


def test_a_round_is_in_the_ledger_before_it_is_computed(tmp_path, monkeypatch):
    spent = []
    play = VectorisedRounds.__call__

    def spy(rounds, round, model):
        (ledger,) = tmp_path.glob("*/ledger.jsonl")
        spent.append(Ledger.read(ledger).entries[-1].round)
        return play(rounds, round, model)

    monkeypatch.setattr(VectorisedRounds, "__call__", spy)
    run_folder(tmp_path)
    assert spent == [1, 2, 3]


class WithNoise(nn.Sequential):
    """Its own kind of dropout, by torch's generator."""

    def __init__(self, input_shape, classes):
        super().__init__(mlp(input_shape, classes))

    def forward(self, records):
        scores = super().forward(records)
        return scores * torch.rand_like(scores) if self.training else scores


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(
            [f"model.name={__name__}:WithNoise"],
            f"model {__name__}:WithNoise cannot be vectorised over users .*random",
            marks=pytest.mark.slow,
        ),
        (["simulation.engine=flower", "simulation.noise=aggregate"],
         "simulation.noise must be report for engine flower.* got 'aggregate'"),
        (["simulation.engine=flower", "simulation.device=cuda"],
         "simulation.device must be cpu for engine flower, got 'cuda'"),
        (["simulation.engine=flower", "simulation.precision=bfloat16"],
         "simulation.precision must be float32 for engine flower, got 'bfloat16'"),
        (["privacy.mechanism=ldp-sgd", "privacy.noise_multiplier=1.4"],
         'simulation.noise must be "aggregate".*ldp-sgd, got'),
        (["training.aggregator=test_aggregators:Median"],
         "must be mean with engine vectorised, which has the sum"),
        (["simulation.precision=float16"], "precision must be one of float32, bfloat16, got"),
        (["simulation.records_per_chunk=0"], "simulation.records_per_chunk must be a whole number"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_one_line_before_any_work(tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message) as error:
        run_folder(tmp_path, *overrides)
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_silent_users_are_left_out_whatever_their_coins():
    plan = ["privacy.accountant=blanket", "privacy.shuffler_blankets=4"]
    full, silent = (engine(*plan, f"simulation.silent={share}") for share in (0, 0.3))
    model = full.settings.make_model()
    numbers = range(1, 41)
    all_there, some = ([rounds_of(e)(n, model) for n in numbers] for e in (full, silent))
    present = np.array([each.users_present for each in some])
    assert all(each.smallest_crowd == each.users_present for each in some)
    assert abs(present.mean() - 0.7 * USERS) < 5 * np.sqrt(0.21 * USERS / 40)
    assert len(set(present.tolist())) > 10
    away = [
        one.aggregate.reports - two.aggregate.reports
        for one, two in zip(all_there, some, strict=True)
    ]
    checked_in_and_away = 0.3 * RATE * USERS
    assert min(away) >= 0
    assert abs(np.mean(away) - checked_in_and_away) < 5 * np.sqrt(checked_in_and_away / 40)
    again = played(silent, 3)
    assert again.users_present == some[2].users_present
    assert np.array_equal(again.aggregate.estimate, some[2].aggregate.estimate)


def test_too_few_users_for_the_accountant_end_a_run():
    many = rounds_of(few := engine("simulation.silent=0.3"))
    model = few.settings.make_model()
    assert [many(number, model).outcome for number in (1, 2)] == ["discarded"] * 2
    with pytest.raises(RoundFailed, match="3 rounds in a row were discarded: fewer users were"):
        many(3, model)
    least = engine("simulation.silent=0.3", "privacy.least_present=10")
    assert played(least, 1).outcome == "released"
