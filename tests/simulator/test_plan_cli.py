"""`shufl plan`: plans that keep their ε, by an accountant that had no part in finding them."""

import itertools
import json
import math
import re

import pytest
from typer.testing import CliRunner

from nights import by_night
from shufl.accounting import make_accountant
from shufl.cli.__main__ import app
from shufl.learning.config import load
from shufl.protocol import CheckIn, GaussianMechanism, Shuffled

ASKED = ["plan", "--users", "3000", "--epsilon", "1.5", "--delta", "1e-6"]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (["--device-megabytes", 0.04], {(0.3, 100), (0.1, 100), (0.1, 300)}),
        *by_night(([], set(itertools.product((1.0, 0.3, 0.1), (100, 300, 1000, 4000))))),
    ],
    ids=["little", "all"],
)
def test_every_plan_keeps_the_target_and_the_first_has_the_least_error(most, expected):
    result = invoke(*ASKED, "--dimension", 500, "--json", *most)
    assert (result.exit_code, result.stderr) == (0, "")
    plans = json.loads(result.stdout)["plans"]
    assert {(plan["check_in_rate"], plan["rounds"]) for plan in plans} == expected
    errors = [plan["run_error"] for plan in plans]
    assert errors == sorted(errors)
    for plan in plans:
        mechanism = GaussianMechanism(noise_multiplier=plan["noise_multiplier"])
        event = Shuffled(3000, CheckIn(plan["check_in_rate"]), mechanism, plan["shuffler_blankets"])
        spent = make_accountant("blanket").compose(event, plan["rounds"]).get_epsilon(1e-6)
        assert 1.5 * 0.98 < spent <= 1.5
        assert plan["epsilon"] == pytest.approx(spent, rel=1e-9)
        assert plan["accuracy"] is None and plan["learning_rate"] is None


# By day the configuration that is written with --cover, below.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist"])
def test_the_configuration_written_is_the_first_plan(tmp_path, dataset):
    path = tmp_path / "plan.toml"
    result = invoke(*ASKED, "--dataset", dataset, "--write", path, "--device-megabytes", 80)
    assert result.exit_code == 0, result.output
    assert "–: with more error than was ever tried" in result.stdout
    assert re.search(r"┃ +accuracy ┃$", result.stdout, re.M)
    config = load(str(path))
    assert (config.name, config.data.dataset, config.data.users) == (
        f"{dataset}-plan",
        dataset,
        3000,
    )
    assert (config.privacy.target_epsilon, config.privacy.delta) == (1.5, 1e-6)
    assert (config.privacy.accountant, config.privacy.check_in_rate) == ("blanket", 1.0)
    assert config.privacy.rounds == 1000 and config.privacy.shuffler_blankets > 100
    assert "95.4 MB" not in result.stdout and "79.5 MB" in result.stdout
    privacy, crowd = config.privacy, 3000 + config.privacy.shuffler_blankets
    sigma = privacy.noise_multiplier * math.sqrt(crowd) / 3000
    assert config.training.learning_rate == pytest.approx(2.5e-4 / sigma, rel=0.05)


@pytest.mark.slow
def test_a_small_model_of_ones_own_has_its_traffic_in_kilobytes_and_no_accuracy():
    result = invoke(*ASKED, "--dimension", 62, "--device-megabytes", 0.003)
    assert result.exit_code == 0, result.output
    assert "accuracy" not in result.stdout
    least = 62 * 2 * 10  # bytes: 16-bit integers, and ten reports expected at γ = 0.1 in 100 rounds
    sizes = map(float, re.findall(r"│ +([\d.]+) kB │ +[\d.]+ [kM]B │$", result.stdout, re.M))
    assert [1e3 * size > least for size in sizes] == [True]


@pytest.mark.slow
@pytest.mark.nightly
def test_with_cover_every_user_sends_in_every_round(tmp_path):
    path, megabytes = tmp_path / "plan.toml", 100 * 39_700 * 2 / 1e6
    asked = [*ASKED, "--dataset", "mnist", "--device-megabytes", 1.01 * megabytes, "--cover"]
    result = invoke(*asked, "--json", "--write", path)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["cover"] is True
    assert [plan["rounds"] for plan in told["plans"]] == [100] * 3  # 300 are too many at any rate
    assert [plan["check_in_rate"] for plan in told["plans"]] == [1.0, 0.3, 0.1]
    length = told["plans"][0]["device_bytes"] / 100
    assert 2 * 39_700 < length < 2 * 39_700 + 200
    for plan in told["plans"]:
        assert plan["device_bytes"] == 100 * length
        stored = (3000 + plan["shuffler_blankets"]) * length
        assert plan["shuffler_bytes"] == pytest.approx(stored)
    config, first = load(str(path)), told["plans"][0]
    assert (config.name, config.data.dataset, config.data.users) == ("mnist-plan", "mnist", 3000)
    for name in ("check_in_rate", "rounds", "noise_multiplier", "shuffler_blankets"):
        assert getattr(config.privacy, name) == first[name]
    assert (config.privacy.target_epsilon, config.privacy.delta) == (1.5, 1e-6)
    assert config.privacy.accountant == "blanket" and config.privacy.cover


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "imagenet"], "--dataset must be one of mnist, fashion-mnist, got imagenet"),
        ([], "give either --dataset or --dimension, the model's parameters"),
        (["--dimension", 33_554_401], "--dimension must be at most 33554400, as a report holds"),
        (["--dimension", 5, "--write", "x.toml"], "--write needs --dataset"),
        (
            ["--dimension", 5, "--device-megabytes", "nan"],
            "--device-megabytes must be at least 0.000",
        ),
        (
            ["--dimension", 500, "--device-megabytes", "0.01"],
            "--device-megabytes must be at least 0.0106",
        ),
        (
            ["--dataset", "mnist", "--write", "x.toml", "--users", 60001],
            "data.users must lie in [1, 60000] (60000 training records, ",
        ),
        (["--dataset", "mnist", "--write", "nodir/x.toml"], "--write must be a file in a folder"),
        (["--dataset", "mnist", "--write", "."], "--write must be a file in a folder"),
        (["--users", 0, "--dimension", 5], "--users must be a whole number from 1 to 10^12, got 0"),
        (["--dimension", 5, "--delta", "2"], "--delta must be a number in (0, 1), got 2.0"),
    ],
)
def test_a_mistake_in_what_is_asked_is_one_line(arguments, message):
    result = invoke(*ASKED, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}") and len(result.stderr.splitlines()) == 1
