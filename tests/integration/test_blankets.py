"""Blankets end to end: what one user alone costs, silent nodes, shufflers side by side."""

import json
import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from canary_world import delta_shown
from nights import by_night
from rounds import make_plan
from run_world import LIMIT, json_lines, model_of, only_folder, python_path, shufl
from shufl.accounting import make_accountant
from shufl.accounting.audit.attack import delta_lower_bound
from shufl.cli.__main__ import app
from shufl.learning.config import ConfigError, load
from shufl.protocol.mechanisms import SeededRandomness, seed_of_shuffler
from shufl.results.experiment import prepare
from shufl.results.run import Run
from shufl.shuffler import ShufflerProcess
from shufl.simulator.canary import likelihood_score, projections, run_canary

ALONE = make_plan(
    users=40,
    check_in_rate=1.0,
    clip_norm=0.5,
    noise_multiplier=0.6,
    rounds=150,
    delta=0.1,
    target_epsilon=1.0,
    minimum_batch=1,
    shuffler_blankets=8.0,
    accountant="blanket",
)
EPSILON = 0.5
LIKELIHOOD = likelihood_score(ALONE, "absent")


def claimed(plan=ALONE, name="blanket"):
    accountant = make_accountant(name, plan.adjacency).compose(plan.event())
    return accountant.get_delta(EPSILON)


def shown(plan, shuffler):
    """What a server shows that sends every round to one user alone, by the claimed plan's event."""
    return delta_shown(run_canary(plan, "absent", shuffler, seed=4), LIKELIHOOD, EPSILON)


@pytest.fixture
def shuffler(memory_path):
    about = {"simulation_seed": 9, "start_timeout": LIMIT}
    with ShufflerProcess(memory_path / "directory", **about) as process:
        yield process


@pytest.mark.slow
def test_a_server_that_asks_one_user_alone_stays_below_the_claim(shuffler):
    found = shown(ALONE, shuffler)
    assert 0.3 * claimed() < found <= claimed()
    assert found <= claimed(name="local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("share", "rounds"), [(0.0, 40), pytest.param(0.5, 800, marks=pytest.mark.nightly)]
)
def test_a_shuffler_that_adds_none_or_half_is_caught(shuffler, share, rounds):
    lying = ALONE.replace(rounds=rounds, shuffler_blankets=8.0 * share, accountant="local")
    assert shown(lying, shuffler) > claimed()


@pytest.fixture
def shuffler_that_repeats_blankets(memory_path, tmp_path, monkeypatch):
    """The real process, but every round gets the blankets of the first one again."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            from shufl.protocol.mechanisms import SeededRandomness
            honest = SeededRandomness.blanket_noise
            SeededRandomness.blanket_noise = lambda self, round, numbers, size: honest(
                self, 1, numbers, size
            )
        """)
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    about = {"simulation_seed": 9, "start_timeout": LIMIT}
    with ShufflerProcess(memory_path / "directory", **about) as process:
        yield process


@pytest.mark.slow
def test_a_shuffler_that_adds_the_same_blankets_twice_is_caught(shuffler_that_repeats_blankets):
    """By a server that leaves out what it has seen before."""
    seen = set()

    def first_seen(round):
        fresh = [row for row in projections(round, ALONE).tolist() if row not in seen]
        seen.update(fresh)
        return max(-10.0, min(10.0, sum(fresh)))

    plan = ALONE.replace(rounds=80)
    worlds = run_canary(plan, "absent", shuffler_that_repeats_blankets, seed=4)
    found = delta_lower_bound(*worlds.scores(first_seen), EPSILON, 0.99)
    assert found > claimed()


@pytest.mark.slow
def test_the_command_attacks_a_users_own_configuration(tmp_path):
    config = blankets_config(tmp_path, rounds=50)
    arguments = ["audit", "--end-to-end", str(config), "--samples", "4", "--epsilon", "0.7"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    checks = json.loads(result.stdout)
    assert set(checks) == {"blanket", "local"}
    event = prepare(load(str(config))).plan.event()
    for name, check in checks.items():
        claim = make_accountant(name, "replace").compose(event).get_delta(0.7)
        assert check["claimed_delta"] == pytest.approx(claim)
        assert (check["placement"], check["violated_for_every_pair"]) == ("absent", False)
        assert check["delta_lower"] == 0  # four rounds show nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.toml"], "nowhere.toml cannot be read"),
        (["quickstart", "--n", "10"], "--n must be left out with --end-to-end"),
        (["quickstart", "--samples", "3"], "samples must be at least 4"),
        (["quickstart", "--confidence", "2"], "confidence must lie"),
        (["quickstart", "--epsilon", "1e9"], "epsilon must lie"),
        (["quickstart", "--seed", str(2**62)], "seed must be"),
    ],
)
def test_a_mistake_in_an_attack_is_one_line(arguments, message):
    result = CliRunner().invoke(app, ["audit", "--end-to-end", *arguments])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line


def test_an_attack_finds_the_reader_s_modules_beside_the_configuration(tmp_path):
    (tmp_path / "my_records.py").write_text("def make():\n    raise ValueError('found it')\n")
    config = blankets_config(tmp_path, rounds=50)
    text = re.sub('dataset = ".*"', 'dataset = "my_records:make"', config.read_text())
    config.write_text(text)
    result = CliRunner().invoke(app, ["audit", "--end-to-end", str(config)])
    assert result.exit_code == 2 and "ValueError (my_records.py, line 2)" in result.stderr


def blankets_config(folder, rounds, users=600, **values):
    """A run of as many rounds as `blanket` allows, `rounds` at most by the budget."""
    accountant = make_accountant("blanket", "replace")
    settings = {"nodes": 3, "number": 1, "blankets": 30.0, **values}
    path = Path(folder) / "blankets.toml"
    text = f"""
        name = "blankets"
        seed = 5
        [privacy]
        check_in_rate = 0.5
        noise_multiplier = 1.0
        shuffler_blankets = {settings["blankets"]}
        accountant = "blanket"
        target_epsilon = TARGET
        delta = 1e-3
        rounds = 1000
        minimum_batch = 5
        [data]
        dataset = "digits"
        users = {users}
        [model]
        name = "logistic-regression"
        [training]
        learning_rate = 1.0
        [simulation]
        nodes = {settings["nodes"]}
        round_timeout = 600.0
        [shuffler]
        number = {settings["number"]}
    """
    path.write_text(textwrap.dedent(text).replace("TARGET", "1e6"))
    event = prepare(load(str(path))).plan.event()
    ends = [accountant.epsilon_after(event, 1e-3, count) for count in (rounds, rounds + 1)]
    path.write_text(textwrap.dedent(text).replace("TARGET", repr(sum(ends) / 2)))
    return path


def rows_and_model(folder):
    return json_lines(folder / "metrics.jsonl"), model_of(folder)


@pytest.mark.slow
def test_a_third_of_the_users_silent_the_run_trains_to_its_budget(tmp_path):
    """`blanket` counts on nobody else; who counts on others has no ε."""
    config = blankets_config(tmp_path, rounds=12)
    silent = ["simulation.engine=vectorised", "simulation.silent=0.33"]
    Run.new(load(str(config), silent), tmp_path / "runs", Console(quiet=True)).train()
    folder = only_folder(tmp_path / "runs")
    rows, _ = rows_and_model(folder)
    summary = json.loads((folder / "summary.json").read_text())
    assert (len(rows), summary["stopped_by"]) == (12, "budget")
    assert summary["accuracy"] > 0.5
    for row in rows:
        assert (row["outcome"], row["smallest_crowd"]) == ("released", row["users_present"])
        assert 300 < row["users_present"] < 500
        assert {name for name, value in row["epsilons"].items() if value is not None} == {
            "blanket",
            "local",
        }
    assert summary["fewest_users_present"] == min(row["users_present"] for row in rows)
    assert summary["epsilon"]["crowd"]["epsilon"] is None
    assert "counts on more users" in summary["epsilon"]["crowd"]["warning"]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
@pytest.mark.parametrize("engine", ["vectorised", *by_night("flower")])
def test_users_whose_shuffler_releases_nothing_are_not_present(tmp_path, engine):
    """Nodes 0 and 2 report to one shuffler, node 1 to another, which gets fewer than it needs."""
    settings = {
        "data.users": 300, "simulation.engine": engine, "simulation.nodes": 3,
        "shuffler.number": 2, "privacy.check_in_rate": 1, "privacy.minimum_batch": 150,
        "privacy.accountant": "crowd", "privacy.shuffler_blankets": 0, "privacy.rounds": 1,
    }  # fmt: skip
    if engine == "vectorised":
        chosen = ["{}={}".format(*each) for each in settings.items()]
        Run.new(load("quickstart", chosen), tmp_path, Console(quiet=True)).train()
    else:
        chosen = [part for each in settings.items() for part in ("--set", "{}={}".format(*each))]
        result = shufl("run", "quickstart", *chosen, "--runs", tmp_path)
        assert result.returncode == 0, result.stderr
    ((row,), _) = rows_and_model(only_folder(tmp_path))
    assert (row["outcome"], row["reports"]) == ("released", 200)
    assert (row["users_present"], row["smallest_crowd"]) == (200, 200)


@pytest.mark.slow
@pytest.mark.nightly  # by day: one shuffler in test_run.py, two without Flower in tests/server
@pytest.mark.usefixtures("shared_ray")
def test_both_engines_add_the_same_blankets_to_the_same_coins(tmp_path):
    """With two shufflers side by side each adds its own, and nobody merges anything."""
    number = 2
    config = blankets_config(tmp_path, rounds=3, nodes=4, number=number)
    found = {}
    result = shufl("run", config, "--runs", tmp_path / "flower")
    assert result.returncode == 0, result.stderr
    vectorised = load(str(config), ["simulation.engine=vectorised"])
    Run.new(vectorised, tmp_path / "vectorised", Console(quiet=True)).train()
    for engine in ("flower", "vectorised"):
        found[engine] = rows_and_model(only_folder(tmp_path / engine))
    _, model = found["flower"]
    expected = []
    for round in (1, 2, 3):
        coins = SeededRandomness(5).check_ins(round, np.arange(600), 0.5).sum()
        seeds = [seed_of_shuffler(5, shuffler) for shuffler in range(number)]
        added = [SeededRandomness(seed).number_of_blankets(round, 30.0) for seed in seeds]
        expected.append(coins + sum(added))
    for each, _ in found.values():
        assert [row["reports"] for row in each] == expected
        assert {row["smallest_crowd"] for row in each} == {600 // number}
        assert {row["users_present"] for row in each} == {600}
    unit = prepare(load(str(config))).plan.mechanism.unit(1)
    for name, value in found["vectorised"][1].items():
        # Rounding of some 330 reports a round, each within half a unit, in three rounds.
        assert torch.allclose(value, model[name], atol=10 * unit * np.sqrt(330) / 300, rtol=0)
    logs = [path.name for path in only_folder(tmp_path / "flower").glob("shuffler*.log")]
    assert len(logs) == number


def test_accountants_that_count_on_others_are_priced_at_the_smallest_crowd(tmp_path):
    config = blankets_config(tmp_path, rounds=3, users=601, nodes=5, number=2)
    experiment = prepare(load(str(config)))
    assert experiment.crowds == (361, 240)
    assert experiment.plan.least_present == 240
    assert experiment.plan.event().users == 240
    assert np.bincount(experiment.shuffler_of(np.arange(601))).tolist() == [361, 240]
    with pytest.raises(ConfigError, match=r"at most 240, the users of the smallest shuffler"):
        prepare(load(str(config), ["privacy.least_present=241"]))
