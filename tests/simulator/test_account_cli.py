"""`shufl account`, `calibrate` and `compare` as a user calls them."""

import json
import math

import mpmath as mp
import pytest
from scipy.optimize import brentq
from typer.testing import CliRunner

from accounting import (
    ACCOUNTANTS,
    Ledger,
    PrivacyPlan,
    ShuffledCheckInBlanketGaussianDpEvent,
    ShuffledCheckInGaussianDpEvent,
    make_accountant,
    mean_update_error,
)
from simulator.cli import app

PAPER = "--n 60000 --gamma 0.1 --noise 5 --rounds 5540 --adjacency zero-out"
ONE_ROUND = "compare --n 9 --gamma 1 --noise 5 --rounds 1"
SMALL = "--n 1000 --gamma 0.3 --delta 1e-5"


def shufl(command):
    return CliRunner().invoke(app, command.split())


def test_the_papers_setting_by_every_accountant():
    result = shufl(f"account {PAPER} --json")
    assert result.exit_code == 0, result.output
    epsilons = {name: row["epsilon"] for name, row in json.loads(result.stdout).items()}
    assert epsilons["theorem3"] == pytest.approx(9.617, abs=1e-3)
    assert epsilons["rdp"] == pytest.approx(0.06079, rel=1e-3)
    assert 1.0 < epsilons["clones"] < 1.2


def test_a_run_folder_is_priced_by_its_ledger(tmp_path):
    plan = PrivacyPlan(
        users=500,
        check_in_rate=0.2,
        clip_norm=1.0,
        noise_multiplier=2.0,
        rounds=9,
        delta=1e-4,
        target_epsilon=50.0,
        minimum_batch=1,
        adjacency="zero-out",
    )
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        for round in range(1, 8):
            ledger.append_round(round, plan.event())
    rows = json.loads(shufl(f"account {tmp_path} --json").stdout)
    expected = make_accountant("rdp", "zero-out").compose(plan.event(), 7).get_epsilon(1e-4)
    assert rows["rdp"]["epsilon"] == pytest.approx(expected)


@pytest.mark.parametrize("accountant", ["theorem3", "rdp", "clones", "local"])
def test_calibrated_noise_is_within_the_target_and_nearly_least(accountant):
    command = f"calibrate {SMALL} --rounds 20 --target-epsilon 15 --accountant {accountant} --json"
    found = json.loads(shufl(command).stdout)
    assert found["epsilon"] <= 15

    def epsilon(noise):
        event = ShuffledCheckInGaussianDpEvent(1000, 0.3, noise)
        return make_accountant(accountant).compose(event, 20).get_epsilon(1e-5)

    assert epsilon(found["noise"]) <= 15 < epsilon(found["noise"] * 0.997)


def test_calibrated_rounds_are_the_most():
    command = f"calibrate {SMALL} --noise 3 --target-epsilon 2 --accountant rdp --json"
    rounds = json.loads(shufl(command).stdout)["rounds"]
    event = ShuffledCheckInGaussianDpEvent(1000, 0.3, 3.0)

    def epsilon(count):
        return make_accountant("rdp").compose(event, count).get_epsilon(1e-5)

    assert epsilon(rounds) <= 2 < epsilon(rounds + 1)


def test_calibrated_rate_is_nearly_the_largest():
    command = "calibrate --n 1000 --delta 1e-5 --noise 3 --rounds 100 --target-epsilon 0.6"
    rate = json.loads(shufl(f"{command} --accountant rdp --json").stdout)["gamma"]

    def epsilon(gamma):
        event = ShuffledCheckInGaussianDpEvent(1000, gamma, 3.0)
        return make_accountant("rdp").compose(event, 100).get_epsilon(1e-5)

    assert epsilon(rate) <= 0.6 < epsilon(min(1.0, rate * 1.003))


BLANKETS = "--mechanism blanket-gaussian --accountant local"


def test_blankets_are_priced_by_those_who_can_and_the_others_say_they_do_not():
    command = f"account {SMALL} --noise 3 --rounds 20 --mechanism blanket-gaussian --beta 0.4"
    rows = json.loads(shufl(f"{command} --json").stdout)
    assert set(rows) == set(ACCOUNTANTS)
    gaussian = json.loads(shufl(f"account {SMALL} --noise 3 --rounds 20 --json").stdout)
    assert rows["local"] == gaussian["local"]  # which does not count on the blankets
    for name in ("theorem3", "rdp", "pld", "clones"):
        assert rows[name]["epsilon"] is None
        assert rows[name]["warning"] == "not for this mechanism"
    table = shufl(command)
    assert table.exit_code == 0
    assert table.stdout.count("not for this mechanism") == len(
        [name for name, row in rows.items() if row["epsilon"] is None]
    )


@pytest.mark.parametrize(
    "plan",
    ["--n 10 --gamma 1 --noise 5", "--n 1000000000000 --gamma 0.1 --noise 0.001"],
)
def test_a_billion_rounds_are_priced(plan):
    result = shufl(f"account {plan} --rounds 1000000000 --delta 0.1 --json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    noise = float(plan.rsplit(maxsplit=1)[1])
    shift = mp.sqrt(10**9) * 2 / mp.mpf(noise)
    local = rows["local"]["epsilon"]
    # ε = μ²/2 + μ x, Φ(-x) = 0.1 to first order: e^ε Φ(-x-μ) is nothing beside it.
    assert local == pytest.approx(float(shift**2 / 2 + shift * mp.mpf("1.2815516")), rel=1e-6)
    for name in ("pld", "clones"):
        assert 0 < rows[name]["epsilon"] <= local * (1 + 1e-9)
        assert rows[name]["lower_bound"] is None


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_run_folder_of_both_mechanisms_is_priced_by_those_who_price_both(tmp_path, rounds):
    plan = PrivacyPlan(
        users=500,
        check_in_rate=0.2,
        clip_norm=1.0,
        noise_multiplier=2.0,
        rounds=9,
        delta=1e-4,
        target_epsilon=50.0,
        minimum_batch=1,
        mechanism="blanket-gaussian",
        blanket_probability=0.3,
        accountant="local",
    )
    plain = ShuffledCheckInGaussianDpEvent(500, 0.2, 2.0)
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        for round in range(1, rounds + 1):
            ledger.append_round(round, plain if round == 2 else plan.event())
    rows = json.loads(shufl(f"account {tmp_path} --json").stdout)
    spent = make_accountant("local").epsilon_after(plain, 1e-4, rounds) if rounds else 0.0
    assert rows["local"]["epsilon"] == pytest.approx(spent)
    assert all(rows[name]["epsilon"] is None for name in ("theorem3", "rdp", "pld", "clones"))


def test_noise_is_calibrated_with_blankets_and_their_error_is_stated():
    command = f"calibrate {SMALL} --rounds 20 --target-epsilon 15 {BLANKETS} --beta 0.4"
    found = json.loads(shufl(f"{command} --dimension 10 --json").stdout)
    assert (found["mechanism"], found["beta"]) == ("blanket-gaussian", 0.4)
    noise = found["noise"]
    event = ShuffledCheckInBlanketGaussianDpEvent(1000, 0.3, noise, 0.4)
    assert make_accountant("local").compose(event, 20).get_epsilon(1e-5) == found["epsilon"] <= 15
    sampling = (1 - 0.4) * (1 - 0.3 * (1 - 0.4)) / 10
    expected = math.sqrt((noise**2 + sampling) / (1000 * 0.3)) / (1 - 0.4)
    assert found["mean_update_error"] == pytest.approx(expected)
    many = json.loads(shufl(f"{command} --json").stdout)
    assert many["mean_update_error"] == pytest.approx(noise / (1 - 0.4) / math.sqrt(1000 * 0.3))


FEW = "calibrate --mechanism blanket-gaussian --n 50 --gamma 0.5 --rounds 2 --delta 1e-4 --json"


def test_noise_and_blankets_left_out_are_those_of_least_error():
    command = f"{FEW} --target-epsilon 3 --dimension 50"
    found = json.loads(shufl(command).stdout)
    assert found["accountant"] == "blanket"
    event = ShuffledCheckInBlanketGaussianDpEvent(50, 0.5, found["noise"], found["beta"])
    assert make_accountant("blanket").compose(event, 2).get_epsilon(1e-4) <= 3
    for beta in (0.7 * found["beta"], 0.5 + 0.5 * found["beta"]):

        def excess(noise, beta=beta):
            error = mean_update_error(50, 0.5, noise, beta, dimension=50)
            return error - found["mean_update_error"] / 1.002

        event = ShuffledCheckInBlanketGaussianDpEvent(50, 0.5, brentq(excess, 1e-6, 50), beta)
        assert make_accountant("blanket").compose(event, 2).get_epsilon(1e-4) > 3


def test_blankets_left_out_at_a_given_noise_are_the_fewest():
    command = f"{FEW} --noise 1.5 --target-epsilon 1.5"
    beta = json.loads(shufl(command).stdout)["beta"]

    def epsilon(beta):
        event = ShuffledCheckInBlanketGaussianDpEvent(50, 0.5, 1.5, beta)
        return make_accountant("blanket").compose(event, 2).get_epsilon(1e-4)

    assert epsilon(beta) <= 1.5 < epsilon(beta * 0.995)
    table = shufl(command.replace("--json", ""))
    assert "beta for ε ≤ 1.5" in table.stdout and "blanket-gaussian" in table.stdout


def test_compare_leaves_out_who_does_not_price_the_mechanism(tmp_path):
    command = f"compare {SMALL} --noise 3 --rounds 50 --mechanism blanket-gaussian --beta 0.4"
    result = json.loads(shufl(f"{command} --plot {tmp_path}/curves.png --json").stdout)
    for name in ("theorem3", "rdp", "pld", "clones"):
        assert set(result["epsilon"][name]) == {None}
    for name in ("blanket", "local"):
        assert all(value > 0 for value in result["epsilon"][name])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = shufl(command)
    assert table.exit_code == 0 and "–" in table.stdout and "nan" not in table.stdout


def test_compare_is_the_accountants_against_rounds(tmp_path):
    command = f"compare {SMALL} --noise 3 --rounds 50 --plot {tmp_path}/curves.png --json"
    result = json.loads(shufl(command).stdout)
    assert result["rounds"][0] == 1 and result["rounds"][-1] == 50
    event = ShuffledCheckInGaussianDpEvent(1000, 0.3, 3.0)
    for name in ("theorem3", "rdp", "clones", "local"):
        curve = result["epsilon"][name]
        assert curve == sorted(curve)
        composed = make_accountant(name).compose(event, 50).get_epsilon(1e-5)
        assert math.isclose(curve[-1], composed)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_compare_shows_other_systems_with_what_they_cover():
    command = f"compare {SMALL} --noise 3 --rounds 50 --peers"
    result = json.loads(shufl(f"{command} --json").stdout)
    assert list(result["peers"]) == ["girgis", "clones-2021", "rr-strong", "rr-weak", "central"]
    for peer in result["peers"].values():
        assert len(peer["epsilon"]) == len(result["rounds"])
        assert "report" in peer["covers"] or "trusted server" in peer["covers"]
    shown = shufl(command).stdout
    assert "no guarantee for this one" in shown and "rr-weak: shuffled binary" in shown
    assert "peers" not in json.loads(shufl(f"compare {SMALL} --noise 3 --rounds 2 --json").stdout)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("account --gamma 0.1 --noise 5 --rounds 10", "--n is missing"),
        ("account --n 100 --noise 5 --rounds 10", "--gamma is missing"),
        ("account --n 100 --gamma 1.5 --noise 5 --rounds 10", "must lie in (0, 1], got 1.5"),
        ("account --n 100 --gamma 0.5 --noise 5 --rounds 0", "--rounds must lie in [1, 10^9]"),
        ("account --n 1 --gamma 0.5 --noise 5 --rounds 1", '"1/n" with n > 1, got 1/n'),
        (
            "account --n 9 --gamma 1 --noise 5 --rounds 1 --adjacency x",
            "must be replace or",
        ),
        ("account nowhere", "cannot read ledger"),
        ("calibrate --target-epsilon 1 --n 9 --gamma 1", "leave out exactly one of"),
        ("calibrate --target-epsilon 0 --n 9 --gamma 1 --noise 1", "must lie in (0, inf), got 0"),
        ("calibrate --target-epsilon inf --n 9 --gamma 1 --noise 1", "lie in (0, inf), got inf"),
        ("calibrate --target-epsilon nan --n 9 --gamma 1 --noise 1", "lie in (0, inf), got nan"),
        ("account --n 1000000000001 --gamma 1 --noise 5 --rounds 1", "--n must lie in [1, 10^12]"),
        ("account --n 9 --gamma 1 --noise 1e200 --rounds 1", "0 or lie in [0.001, 10^6], got 1e"),
        ("account --n 9 --gamma 1 --noise nan --rounds 1", "0 or lie in [0.001, 10^6], got nan"),
        ("compare --n 9 --gamma 1 --noise 0.05 --rounds 1 --peers", "ε₀ must be at most 700"),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --accountant x",
            "accountant must be",
        ),
        ("account --n 9 --gamma 1 --noise 5 --rounds 1 --beta 0.5", "--beta is for --mechanism"),
        ("account --n 9 --gamma 1 --noise 5 --rounds 1 --mechanism x", "--mechanism must be gaus"),
        (f"{ONE_ROUND} --mechanism blanket-gaussian", "--beta is missing"),
        (f"{ONE_ROUND} --mechanism blanket-gaussian --beta 1", "must lie in (0, 1), got 1.0"),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --beta 0.5 "
            "--mechanism blanket-gaussian --accountant theorem3",
            "'local', got 'theorem3'",
        ),
        (
            f"calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --beta 0.5 {BLANKETS} "
            "--rounds 3",
            "or --beta, or --noise and --beta",
        ),
        (
            f"calibrate --target-epsilon 1 --n 9 --gamma 1 {BLANKETS}",
            "or --beta, or --noise and --beta",
        ),
        ("calibrate --target-epsilon 1 --n 9 --gamma 1 --beta 0.5 --noise 1", "--beta is for"),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --dimension 0",
            "--dimension must lie in",
        ),
    ],
)
def test_a_mistake_is_one_line(command, message):
    result = shufl(command)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
