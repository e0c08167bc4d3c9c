"""Blankets end to end: what one user alone costs, silent nodes, shufflers side by side."""

import numpy as np
import pytest

from canary_world import audited, claimed, delta_shown
from run_world import json_lines, refused, summary_of, told, trained
from shufl.accounting import make_accountant
from shufl.accounting.audit.attack import delta_lower_bound
from shufl.learning.config import dumps, load
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.simulator.canary import likelihood_score, projections, run_canary

ALONE = audited(
    users=40, noise_multiplier=0.6, rounds=150, shuffler_blankets=8.0, accountant="blanket"
)
EPSILON = 0.5
LIKELIHOOD = likelihood_score(ALONE, "absent")


def shown(plan, shuffler):
    """What a server shows that sends every round to one user alone, by the claimed plan's event."""
    return delta_shown(run_canary(plan, "absent", shuffler, seed=4), LIKELIHOOD, EPSILON)


@pytest.mark.nightly
def test_a_server_that_asks_one_user_alone_stays_below_the_claim(shuffler):
    found, claim = shown(ALONE, shuffler), claimed(ALONE, "blanket", EPSILON)
    assert 0.3 * claim < found <= claim
    assert found <= claimed(ALONE, "local", EPSILON)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "rounds"), [(0.0, 40), pytest.param(0.5, 800, marks=pytest.mark.nightly)]
)
def test_a_shuffler_that_adds_none_or_half_is_caught(shuffler, share, rounds):
    lying = ALONE.replace(rounds=rounds, shuffler_blankets=8.0 * share, accountant="local")
    assert shown(lying, shuffler) > claimed(ALONE, "blanket", EPSILON)


REPEATS_BLANKETS = """
from shufl.protocol.mechanisms import SeededRandomness
honest = SeededRandomness.blanket_noise
SeededRandomness.blanket_noise = lambda self, round, numbers, size: honest(self, 1, numbers, size)
"""
"""Every round gets the blankets of the first one again."""


@pytest.mark.nightly
def test_a_shuffler_that_adds_the_same_blankets_twice_is_caught(start_shuffler):
    """By a server that leaves out what it has seen before."""
    seen = set()

    def first_seen(round):
        fresh = [row for row in projections(round, ALONE).tolist() if row not in seen]
        seen.update(fresh)
        return max(-10.0, min(10.0, sum(fresh)))

    plan = ALONE.replace(rounds=80)
    worlds = run_canary(plan, "absent", start_shuffler(REPEATS_BLANKETS), seed=4)
    found = delta_lower_bound(*worlds.scores(first_seen), EPSILON, 0.99)
    assert found > claimed(ALONE, "blanket", EPSILON)


@pytest.mark.slow
def test_the_command_attacks_the_plan_of_a_configuration():
    checks = told("audit --end-to-end quickstart --samples 4 --epsilon 0.7")
    assert set(checks) == {"blanket", "local"}
    plan = prepare(load("quickstart")).plan
    for name, check in checks.items():
        assert check["claimed_delta"] == pytest.approx(claimed(plan, name, 0.7))
        assert (check["placement"], check["violated_for_every_pair"]) == ("absent", False)
        assert check["delta_lower"] == 0  # four rounds show nothing


def test_an_attack_finds_your_modules_beside_the_configuration(tmp_path):
    (tmp_path / "my_records.py").write_text("def make():\n    raise ValueError('found it')\n")
    config = tmp_path / "own.toml"
    chosen = load("quickstart", ["data.dataset=my_records:make"])
    config.write_text(dumps(chosen))
    assert "ValueError (my_records.py, line 2)" in refused("audit --end-to-end", config)


SETTINGS = (
    "seed=5", "privacy.accountant=blanket", "privacy.shuffler_blankets=30", "privacy.delta=1e-3",
    "privacy.rounds=1000", "privacy.minimum_batch=5", "privacy.target_epsilon=1e6",
    "data.users=600", "simulation.nodes=3",
)  # fmt: skip


@pytest.mark.slow
def test_a_third_of_the_users_silent_the_run_trains_to_its_budget(tmp_path):
    """`blanket` counts on nobody else; who counts on others has no ε."""
    settings = [*SETTINGS, "simulation.engine=vectorised", "simulation.silent=0.33"]
    event = prepare(load("quickstart", settings)).plan.event()
    ends = [make_accountant("blanket").epsilon_after(event, 1e-3, rounds) for rounds in (12, 13)]
    settings.append(f"privacy.target_epsilon={sum(ends) / 2}")
    folder = trained(load("quickstart", settings), tmp_path / "runs")
    rows = json_lines(folder / "metrics.jsonl")
    summary = summary_of(folder)
    assert (len(rows), summary["stopped_by"]) == (12, "budget")
    assert summary["accuracy"] > 0.5
    for row in rows:
        assert (row["outcome"], row["smallest_crowd"]) == ("released", row["users_present"])
        assert 300 < row["users_present"] < 500
        priced = {name for name, value in row["epsilons"].items() if value is not None}
        assert priced == {"blanket", "local"}
    assert summary["fewest_users_present"] == min(row["users_present"] for row in rows)
    assert summary["epsilon"]["crowd"]["epsilon"] is None
    assert "counts on more users" in summary["epsilon"]["crowd"]["warning"]


@pytest.mark.slow
def test_users_whose_shuffler_releases_nothing_are_not_present(tmp_path):
    """Nodes 0 and 2 report to one shuffler, node 1 to another, which gets fewer than it needs."""
    settings = {
        "data.users": 300, "simulation.engine": "vectorised", "simulation.nodes": 3,
        "shuffler.number": 2, "privacy.check_in_rate": 1, "privacy.minimum_batch": 150,
        "privacy.accountant": "crowd", "privacy.shuffler_blankets": 0, "privacy.rounds": 1,
    }  # fmt: skip
    chosen = [f"{key}={value}" for key, value in settings.items()]
    (row,) = json_lines(trained(load("quickstart", chosen), tmp_path) / "metrics.jsonl")
    assert (row["outcome"], row["reports"]) == ("released", 200)
    assert (row["users_present"], row["smallest_crowd"]) == (200, 200)


def test_accountants_that_count_on_others_are_priced_at_the_smallest_crowd():
    settings = [*SETTINGS, "data.users=601", "simulation.nodes=5", "shuffler.number=2"]
    experiment = prepare(load("quickstart", settings))
    assert experiment.shuffler_of.crowds(601) == (361, 240)
    assert experiment.plan.least_present == 240
    assert experiment.plan.event().users == 240
    assert np.bincount(experiment.shuffler_of(np.arange(601))).tolist() == [361, 240]
    with pytest.raises(ConfigError, match=r"at most 240, the users of the smallest shuffler"):
        prepare(load("quickstart", [*settings, "privacy.least_present=241"]))
