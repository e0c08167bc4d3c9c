"""`shufl calibrate`: plans keep their ε, by accountants that had no part in finding them."""

import itertools
import json
import math
import re

import pytest

from nights import by_night
from rounds import check_in
from run_world import invoke, refused, told
from shufl.accounting import make_accountant
from shufl.learning.config import load
from shufl.learning.from_config import plan_of as plan_of_config
from shufl.protocol import CheckIn, GaussianMechanism, Shuffled
from shufl.protocol.text import rounded_up
from shufl.shuffler import report_length, sealed_length
from shufl.simulator.grid.plans import ranked

SMALL = "-n 1000 --check-in-rate 0.3 --delta 1e-5"
COMPARED = "-n 3000 --target-epsilon 1.5 --delta 1e-6"


def shufl(command):
    return invoke(f"calibrate {command}")


def plan_of(command):
    """The only plan that is found."""
    (found,) = told(f"calibrate {command}")["plans"]
    return found


def scaled(factor):
    return lambda found: found * factor


NOISE_LEFT_OUT = f"{SMALL} --shuffler-blankets 99 --rounds 20 --target-epsilon 15"


@pytest.mark.parametrize(
    ("accountant", "command", "name", "worse"),
    [
        ("rdp", NOISE_LEFT_OUT, "noise_multiplier", scaled(0.997)),
        ("local", NOISE_LEFT_OUT, "noise_multiplier", scaled(0.997)),
        pytest.param(
            *("theorem3", NOISE_LEFT_OUT, "noise_multiplier", scaled(0.997)),
            marks=pytest.mark.slow,
        ),
        # Chords between other places make ε of `blanket` uneven by some tenths of a percent.
        *by_night(("blanket", NOISE_LEFT_OUT, "noise_multiplier", scaled(0.98))),
        ("rdp", f"{SMALL} --noise-multiplier 3 --target-epsilon 2", "rounds", lambda t: t + 1),
        ("rdp", "-n 1000 --delta 1e-5 --noise-multiplier 3 --rounds 100 --target-epsilon 0.6",
         "check_in_rate", scaled(1.003)),
        pytest.param(
            *("blanket", f"{SMALL} --rounds 20 --target-epsilon 2 --noise-multiplier 1"),
            *("shuffler_blankets", scaled(0.997)),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_is_found_is_within_the_target_and_a_little_less_privacy_is_not(
    accountant, command, name, worse
):
    found = plan_of(f"{command} --accountant {accountant}")

    def epsilon(check_in_rate, noise_multiplier, rounds, shuffler_blankets=0.0, **_):
        event = check_in(1000, check_in_rate, noise_multiplier, shuffler_blankets)
        return make_accountant(accountant).compose(event, rounds).get_epsilon(1e-5)

    privacy = found["privacy"]
    assert found["epsilon"] == pytest.approx(epsilon(**privacy), rel=1e-9)
    assert found["epsilon"] <= privacy["target_epsilon"]
    assert epsilon(**privacy | {name: worse(privacy[name])}) > privacy["target_epsilon"]


def test_calibrated_noise_is_printed_as_no_less_than_it_is():
    command = "-n 10 --check-in-rate 1 --delta 1e-5 --rounds 50 --target-epsilon 10"
    command += " --accountant local"
    found = plan_of(command)["privacy"]["noise_multiplier"]
    (printed,) = re.findall(r"│ +1 │ +50 │ +([\d.]+) │ +0 │", shufl(command).stdout)
    assert found <= float(printed) < found * 1.001
    assert f"{found:.4g}" != printed  # the nearest is less


def test_not_one_round_within_the_target_is_a_mistake():
    asked = f"{SMALL} --noise-multiplier 3 --target-epsilon 0.01 --accountant local"
    assert refused(f"calibrate {asked}") == "not one round is within epsilon 0.01"


UNUSED = "the target is not used up: ε is "
ALONE = "-n 1000 --accountant local"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "edge"),
    [
        (f"{ALONE} --check-in-rate 1 --rounds 5 --target-epsilon 9e4", "noise_multiplier = 0.2"),
        (f"{ALONE} --noise-multiplier 9 --rounds 5 --target-epsilon 50", "check_in_rate = 1"),
        ("-n 1000 --noise-multiplier 9 --check-in-rate 1 --rounds 1 --target-epsilon 50",
         "shuffler_blankets = 0.1"),
        (f"{ALONE} --check-in-rate 1 --rounds 5 --mechanism ldp-sgd --target-epsilon 9e4",
         "noise_multiplier = 1.254"),
        (f"{ALONE} --check-in-rate 0.3 --noise-multiplier 1000 --target-epsilon 1e5",
         "rounds = 1000000"),
        ("-n 10000 --check-in-rate 1e-6 --target-epsilon 1 --mixing sum --noise-multiplier 0 "
         "--rounds 1", "central_noise = 1e-06"),
        (f"{ALONE} --check-in-rate 1 --rounds 5 --target-epsilon 9", None),
        (f"{ALONE} --noise-multiplier 2 --rounds 5 --target-epsilon 4", None),
        (f"{ALONE} --noise-multiplier 9 --check-in-rate 1 --target-epsilon 1.2", None),
        *by_night(("-n 1000 --check-in-rate 1 --rounds 1 --target-epsilon 9e4",
                   "noise_multiplier = 0.2, shuffler_blankets = 0.1")),
    ],
)  # fmt: skip
def test_a_target_that_is_not_used_up_is_told_in_one_line(command, edge):
    result = shufl(f"{command} --delta 1e-5 --json")
    (found,) = json.loads(result.stdout)["plans"]
    target = found["privacy"]["target_epsilon"]
    assert found["epsilon"] <= target
    lines = [line for line in result.stderr.splitlines() if "promises little" not in line]
    if edge is None:
        assert not lines
    else:
        assert found["epsilon"] < 0.99 * target
        (line,) = lines
        assert f": {UNUSED}{rounded_up(found['epsilon'])} of " in line
        assert line.endswith(f"and the search goes no further than {edge}")


def test_error_and_bytes_are_those_of_the_users_and_the_blankets():
    command = f"{SMALL} --rounds 20 --target-epsilon 15 --accountant local"
    command += " --shuffler-blankets 150"
    found = plan_of(f"{command} --dimension 10")
    noise = found["privacy"]["noise_multiplier"]
    expected = math.sqrt((noise**2 * (1 + 150 / 300) + 0.7 / 10) / 300)
    assert found["run_error"] == pytest.approx(expected / math.sqrt(20))
    report = sealed_length(report_length(10))
    assert report > 10 * 4
    assert found["shuffler_bytes"] == pytest.approx(450 * report)
    assert found["device_bytes"] == pytest.approx(20 * 0.3 * report)
    covered = plan_of(f"{command} --dimension 10 --cover")
    assert covered["shuffler_bytes"] == pytest.approx(1150 * report)
    assert covered["device_bytes"] == 20 * report
    unknown = plan_of(command)
    assert unknown["device_bytes"] is None and unknown["shuffler_bytes"] is None
    assert shufl(command).stdout.count("–") == 2


@pytest.mark.nightly
def test_noise_and_blankets_of_least_error_reach_the_headline():
    result = shufl("-n 60000 --check-in-rate 0.1 --rounds 5540 --target-epsilon 1 --json")
    assert result.stderr == ""
    (found,) = json.loads(result.stdout)["plans"]
    noise, blankets = (found["privacy"][name] for name in ("noise_multiplier", "shuffler_blankets"))
    event = check_in(60_000, 0.1, noise, blankets)
    assert make_accountant("blanket").compose(event, 5540).get_epsilon(1 / 60_000) <= 1
    assert found["epsilon"] <= 1
    error = noise * math.sqrt((6000 + blankets) / 6000**2)
    assert found["run_error"] == pytest.approx(error / math.sqrt(5540))
    assert error <= 0.0151


@pytest.mark.parametrize(
    "command",
    [
        f"{SMALL} --rounds 20 --target-epsilon 15 --accountant local",
        *by_night(
            f"{SMALL} --rounds 20 --noise-multiplier 1 --target-epsilon 15 --adjacency zero-out"
        ),
        f"{SMALL} --rounds 9 --target-epsilon 15 --accountant local --mechanism ldp-sgd --cover",
        f"{SMALL} --rounds 20 --target-epsilon 1 --mixing sum",
        f"{SMALL} --rounds 20 --target-epsilon 1 --mixing sum --accountant sum-distributed",
        "-n 1000 --check-in-rate 0.25 --noise-multiplier 2 --shuffler-blankets 99 "
        "--target-epsilon 1 --delta 1e-5 --participation allocation",
        "-n 1000 --check-in-rate 1 --rounds 1 --target-epsilon 1 --delta 1e-5 "
        "--mechanism randomised-response --categories 4",
    ],
)
def test_what_is_found_is_the_section_of_a_configuration(command):
    found = plan_of(command)
    of_categories = "categories" in found["privacy"]
    changes = {"privacy": found["privacy"], "data.users": found["users"]}
    config = load("histogram" if of_categories else "quickstart", changes)
    decided, plan, _ = plan_of_config(config)
    assert decided == config  # nothing was open
    assert plan.users == 1000 and plan.section() == found["privacy"]
    assert plan.epsilon() == found["epsilon"] <= plan.target_epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "expected"),
    [
        *by_night(
            ("--rounds 100 --device-megabytes 0.04", {(0.3, 100), (0.1, 100)}),
            ("--device-megabytes 0.04", {(0.3, 100), (0.1, 100), (0.1, 300)}),
            ("", set(itertools.product((1.0, 0.3, 0.1), (100, 300, 1000, 4000)))),
        ),
    ],
    ids=["less", "little", "all"],
)
def test_every_plan_keeps_the_target_and_the_first_has_the_least_error(most, expected):
    result = shufl(f"{COMPARED} --dimension 500 --json {most}")
    assert (result.exit_code, result.stderr) == (0, "")
    plans = json.loads(result.stdout)["plans"]
    found = [plan["privacy"] for plan in plans]
    assert {(plan["check_in_rate"], plan["rounds"]) for plan in found} == expected
    assert min(plan["run_error"] for plan in plans) >= plans[0]["run_error"] / 1.02
    assert plans == ranked(plans[::-1])
    for row, plan in zip(plans, found, strict=True):
        mechanism = GaussianMechanism(noise_multiplier=plan["noise_multiplier"])
        event = Shuffled(3000, CheckIn(plan["check_in_rate"]), mechanism, plan["shuffler_blankets"])
        spent = make_accountant("blanket").compose(event, plan["rounds"]).get_epsilon(1e-6)
        assert 1.5 * 0.98 < spent <= 1.5
        assert row["epsilon"] == pytest.approx(spent, rel=1e-9)
        assert "accuracy" not in row and "learning_rate" not in row


def test_of_plans_of_nearly_equal_error_what_costs_a_device_least_is_first():
    about = [(1.0, 9), (1.019, 5), (1.021, 1), (1.03, 8), (2.0, 1)]
    rows = [{"run_error": error, "device_bytes": sent} for error, sent in about]
    order = [(row["run_error"], row["device_bytes"]) for row in ranked(rows[::-1])]
    assert order == [(1.019, 5), (1.0, 9), (1.021, 1), (1.03, 8), (2.0, 1)]


@pytest.mark.nightly
@pytest.mark.parametrize("dataset", ["mnist", "fashion-mnist"])
def test_the_configuration_written_is_the_first_plan(tmp_path, dataset):
    path = tmp_path / "plan.toml"
    result = shufl(f"{COMPARED} --dataset {dataset} --write {path} --device-megabytes 80")
    assert result.exit_code == 0, result.output
    assert "–: with more error than was ever tried" in result.stdout
    assert re.search(r"┃accuracy┃$", result.stdout, re.M)
    config = load(str(path))
    about = config.name, config.data.dataset, config.data.users
    assert about == (f"{dataset}-plan", dataset, 3000)
    assert (config.privacy.target_epsilon, config.privacy.delta) == (1.5, 1e-6)
    assert (config.privacy.accountant, config.privacy.check_in_rate) == ("blanket", 1.0)
    assert config.privacy.rounds == 1000 and config.privacy.shuffler_blankets > 100
    assert "95.4 MB" not in result.stdout and "79.5 MB" in result.stdout
    privacy, crowd = config.privacy, 3000 + config.privacy.shuffler_blankets
    sigma = privacy.noise_multiplier * math.sqrt(crowd) / 3000
    assert config.training.learning_rate == pytest.approx(2.5e-4 / sigma, rel=0.05)


@pytest.mark.nightly
def test_a_plan_of_those_compared_that_does_not_use_up_its_target_is_told_in_one_line():
    few = "-n 2000 --delta 1e-5 --dimension 10 --device-megabytes 0.0012"
    (line,) = shufl(f"{few} --target-epsilon 990").stderr.splitlines()
    assert line.startswith(f"warning: 100 rounds at γ = 0.1: {UNUSED}")


DRAFT = """
name = "wards"
model.name = "logistic-regression"
training.learning_rate = 0.3
[data.dataset]
file = "visits.csv"
user = "patient"
label = "ill"
categories = { ill = ["no", "yes"], ward = ["A", "B"] }
"""


@pytest.mark.slow
@pytest.mark.parametrize(("section", "clip_norm"), [("", 1.0), ("[privacy]\nclip_norm = 0.5", 0.5)])
def test_a_configuration_of_ones_own_gets_the_plan_and_stays_as_it_is(tmp_path, section, clip_norm):
    rows = [f"p{n},{n},{'AB'[n % 2]},{'yes' if n % 3 else 'no'}" for n in range(50)]
    (tmp_path / "visits.csv").write_text("\n".join(["patient,age,ward,ill", *rows]))
    draft, path = tmp_path / "draft.toml", tmp_path / "made" / "plan.toml"
    path.parent.mkdir()
    draft.write_text(DRAFT + section)
    plan = "--target-epsilon 9 --delta 1e-4 --accountant local --check-in-rate 1 --rounds 5"
    found = shufl(f"--config {draft} {plan} --json --write {path}")
    assert found.exit_code == 0, found.stderr
    (row,) = json.loads(found.stdout)["plans"]
    assert (row["users"], row["dimension"]) == (40, 2 * (3 + 1))  # ten are for testing
    config = load(str(path))
    assert config.privacy.model_dump(exclude_none=True) == row["privacy"]
    assert config.privacy.clip_norm == clip_norm and config.data.users == 40
    assert config.training.learning_rate == 0.3
    assert config.data.dataset.file == str(tmp_path / "visits.csv")
    for wrong, said in (
        ("--users 41", "--users must lie in [1, 40]"),
        (f"--write {path}", "--write must be a new file"),
        ("--dimension 8", "give either --dataset or --dimension, the model's parameters, or --con"),
    ):
        assert said in refused(f"calibrate --config {draft} {plan} {wrong}")
