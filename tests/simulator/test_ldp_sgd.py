"""LDP-SGD in a run: the vectorised engine's sums, and both engines end to end."""

import math

import numpy as np
import pytest

from nights import by_night
from run_world import only_folder, shufl, summary_of
from shufl.learning import local_update
from shufl.learning.config import load
from shufl.protocol.mechanisms import SeededRandomness, clip
from shufl.results.experiment import prepare
from shufl.simulator.engines.report_sum import ReportSum
from shufl.simulator.engines.vectorised import VectorisedEngine, VectorisedRounds

USERS, RATE, CLIP = 80, 0.5, 0.3
SETTINGS = [
    "simulation.engine=vectorised", "simulation.noise=aggregate", "privacy.mechanism=ldp-sgd",
    f"data.users={USERS}", f"privacy.check_in_rate={RATE}", "privacy.noise_multiplier=1.4",
    f"privacy.clip_norm={CLIP}", "privacy.rounds=200", "privacy.minimum_batch=1",
    "privacy.accountant=blanket", "privacy.target_epsilon=1e9", "privacy.shuffler_blankets=6",
    "seed=5",
]  # fmt: skip


@pytest.mark.slow
def test_the_sum_of_reports_has_the_law_of_one_made_of_single_reports(device):
    """Against reports that the mechanism itself makes of the same users' updates."""
    experiment = prepare(load("quickstart", [*SETTINGS, f"simulation.device={device}"]))
    engine = VectorisedEngine(experiment)
    play = VectorisedRounds(engine.settings, ReportSum(engine.settings, engine.load_users()).sum)
    model, records = engine.settings.make_model().train(), engine.load_users()
    mechanism, dimension = experiment.plan.mechanism, experiment.parameters
    updates = np.stack([
        clip(local_update(model, *records(user), engine.settings.computation.training, 0), CLIP)
        for user in range(USERS)
    ])  # fmt: skip
    coins, random = SeededRandomness(5), np.random.default_rng(1)
    ours, theirs = [], []
    for round in range(1, 121):
        users = coins.checked_in(round, USERS, RATE)
        found = play(round, engine.settings.make_model()).aggregate
        held = [updates[user] for user in users] + [np.zeros(dimension)] * (
            found.reports - len(users)
        )
        draws = random.normal(size=(len(held), mechanism.draws(dimension)))
        made = sum(mechanism.report(*each).astype(float) for each in zip(held, draws, strict=True))
        expected = updates[users].sum(0)
        ours.append(found.estimate * (USERS * RATE) - expected)
        theirs.append(made * mechanism.unit(dimension) - expected)
    deviation = mechanism.noise_deviation(dimension) * math.sqrt(USERS * RATE + 6)
    along = updates.mean(0) / np.linalg.norm(updates.mean(0))
    for residuals in (np.array(ours) / deviation, np.array(theirs) / deviation):
        assert abs((residuals @ along).mean()) * math.sqrt(120) < 4.5  # unbiased
        assert np.mean(residuals**2) == pytest.approx(1.0, rel=0.05)
        assert np.var(residuals @ along) == pytest.approx(1.0, rel=0.5)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize(
    ("engine", "noise"), [("vectorised", "aggregate"), *by_night(("flower", "report"))]
)
def test_a_run_learns_and_keeps_its_budget(tmp_path, engine, noise):
    finished = shufl(
        "run", "quickstart", "--runs", tmp_path, "--set", f"simulation.engine={engine}",
        "--set", "simulation.nodes=3", "--set", f"simulation.noise={noise}",
        "--set", "privacy.noise_multiplier=",
        "--set", "privacy.mechanism=ldp-sgd", "--set", "privacy.accountant=blanket",
        "--set", "privacy.shuffler_blankets=least-error", "--set", "privacy.rounds=4",
        "--set", "privacy.target_epsilon=8", "--set", "training.evaluate_every=2",
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    assert "ldp-sgd of ε₀ = " in finished.stdout
    summary = summary_of(only_folder(tmp_path))
    assert summary["rounds"] == 4
    assert 7.8 < summary["epsilon"]["blanket"]["epsilon"] <= 8.0
    assert summary["epsilon"]["pld"]["epsilon"] is None
    assert summary["accuracy"] > 0.3
