"""`shufl account`, `calibrate` and `compare` as a user calls them."""

import functools
import json
import math
import os
import re
import subprocess
from pathlib import Path

import mpmath as mp
import pytest
from typer.testing import CliRunner

from nights import by_night
from rounds import check_in, make_plan
from run_world import shufl_command
from shufl.accounting import ACCOUNTANTS, Ledger, LocalAccountant, make_accountant
from shufl.cli.__main__ import app
from shufl.protocol import Shuffled
from shufl.protocol.rounding import rounded_up
from shufl.shuffler import report_length, sealed_length

PAPER = "--n 60000 --gamma 0.1 --noise 5 --rounds 5540 --adjacency zero-out"
COMPARED = "compare --n 9 --gamma 1 --noise 5 --rounds 1 --delta 0.1"
SMALL = "--n 1000 --gamma 0.3 --delta 1e-5"


def shufl(command):
    return CliRunner().invoke(app, command.split())


def test_the_papers_setting_by_every_accountant():
    result = shufl(f"account {PAPER} --json")
    assert result.exit_code == 0, result.output
    epsilons = {name: row["epsilon"] for name, row in json.loads(result.stdout).items()}
    assert epsilons["theorem3"] == pytest.approx(9.617, abs=1e-3)
    assert epsilons["rdp"] == pytest.approx(0.06079, rel=1e-3)
    assert 0.0538 < epsilons["crowd"] <= 0.118
    assert epsilons["blanket"] is None  # no --blankets


def test_devices_that_draw_their_rounds():
    """At the same rate: `blanket` costs the same, and `local` less."""
    plan = f"{SMALL.replace('0.3', '0.25')} --noise 2 --blankets 100"
    drawn, coins = (
        json.loads(shufl(f"account {plan} --rounds 40 {how} --json").stdout)
        for how in ("--participation allocation", "")
    )
    priced = {name for name, row in drawn.items() if row["epsilon"] is not None}
    assert priced == {"blanket", "local"}
    assert drawn["blanket"]["epsilon"] == pytest.approx(coins["blanket"]["epsilon"], rel=0.01)
    assert drawn["local"]["epsilon"] < 0.9 * coins["local"]["epsilon"]
    asked = f"calibrate --target-epsilon 1 {plan} --accountant blanket --participation allocation"
    found = json.loads(shufl(f"{asked} --json").stdout)
    assert found["participation"] == "allocation"
    assert found["rounds"] % 4 == 0  # whole blocks


def test_what_is_printed_is_no_less_than_what_was_computed():
    """An ε in four digits is rounded up, a lower bound down."""
    result = json.loads(shufl(f"account {PAPER} --json").stdout)
    table = shufl(f"account {PAPER}").stdout
    below = 0
    for name, row in result.items():
        line = next(line for line in table.splitlines() if f"│ {name} " in line)
        printed = line.split("│")[2].strip()
        if row["epsilon"] is not None:
            assert row["epsilon"] <= float(printed) <= row["epsilon"] * 1.001
            below += float(f"{row['epsilon']:.4g}") < row["epsilon"]
        if row.get("lower_bound"):
            least = float(table.split("at least ")[1].split()[0])
            assert row["lower_bound"] * 0.999 <= least <= row["lower_bound"]
    assert below  # to the nearest digit some would have been less


def small_plan(**changes):
    """Of so few users that every accountant prices it soon."""
    values = {
        "users": 20,
        "check_in_rate": 0.2,
        "noise_multiplier": 2.0,
        "rounds": 9,
        "delta": 1e-4,
        "target_epsilon": 50.0,
        "minimum_batch": 1,
    }
    return make_plan(**values | changes)


@pytest.mark.slow
def test_a_run_folder_is_priced_by_its_ledger(tmp_path):
    plan = small_plan(adjacency="zero-out")
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        for round in range(1, 8):
            ledger.append_round(round)
    rows = json.loads(shufl(f"account {tmp_path} --json").stdout)
    expected = make_accountant("rdp", "zero-out").compose(plan.event(), 7).get_epsilon(1e-4)
    assert rows["rdp"]["epsilon"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_folder_of_which_too_few_may_have_been_there_has_no_epsilon_that_counts_on_them(
    tmp_path,
):
    plan = small_plan(accountant="local")
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        ledger.append_round(1)  # it has no row in metrics.jsonl
    rows = json.loads(shufl(f"account {tmp_path} --json").stdout)
    priced = {name for name, row in rows.items() if row["epsilon"] is not None}
    assert priced == {"local"}
    assert "present" in rows["crowd"]["warning"] and rows["crowd"]["lower_bound"] is None


@pytest.mark.parametrize(
    "command",
    [
        "account --rounds 20 --noise 3",
        "compare --rounds 20 --noise 3",
        "calibrate --rounds 20 --target-epsilon 9 --accountant local",
    ],
)
@pytest.mark.slow
def test_a_delta_too_small_for_a_plan_is_said_to_be_of_the_ideal_mechanism(command):
    command += " --n 1000 --gamma 0.3 --json --delta"
    assert shufl(f"{command} 2e-21").stderr == ""
    result = shufl(f"{command} 1.9e-21")
    assert result.exit_code == 0 and json.loads(result.stdout)
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: so small a delta is of the ideal mechanism only:")
    assert line.endswith("a plan of 20 rounds supports 2e-21 or more, got 1.9e-21")


@pytest.mark.slow
def test_a_full_disk_below_the_output_is_one_line_and_a_closed_pipe_is_quiet():
    command = shufl_command("account", "--help")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
    end, pipe = os.pipe()
    os.close(end)
    done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("flag", "value"), [("--delta", "0.001"), ("--noise", "3.0"), ("--adjacency", "replace")]
)
def test_a_flag_of_a_plan_beside_a_run_folder_is_refused(tmp_path, flag, value):
    Ledger.create(tmp_path / "ledger.jsonl", small_plan(), "run").close()
    result = shufl(f"account {tmp_path} --json {flag} {value}")
    assert result.exit_code == 2 and result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {flag} must be left out with a run folder")
    assert line.endswith(f"got {value}")


@pytest.mark.parametrize(
    "accountant",
    [
        "rdp",
        "local",
        pytest.param("theorem3", marks=pytest.mark.slow),
        *by_night("blanket"),
    ],
)
def test_calibrated_noise_is_within_the_target_and_nearly_least(accountant):
    command = f"calibrate {SMALL} --blankets 99 --rounds 20 --target-epsilon 15 --json"
    found = json.loads(shufl(f"{command} --accountant {accountant}").stdout)
    assert found["epsilon"] <= 15

    def epsilon(noise):
        event = check_in(1000, 0.3, noise, 99.0)
        return make_accountant(accountant).compose(event, 20).get_epsilon(1e-5)

    assert epsilon(found["noise"]) <= 15
    # Chords between other places make ε of `blanket` uneven by some tenths of a percent.
    assert epsilon(found["noise"] * (0.98 if accountant == "blanket" else 0.997)) > 15


def test_calibrated_noise_is_printed_as_no_less_than_it_is():
    command = "calibrate --n 10 --gamma 1 --delta 1e-5 --rounds 50 --target-epsilon 10"
    command += " --accountant local"
    found = json.loads(shufl(f"{command} --json").stdout)["noise"]
    (printed,) = re.findall(r"noise +│ +([\d.]+)", shufl(command).stdout)
    assert found <= float(printed) < found * 1.00001
    assert f"{found:.6g}" != printed  # the nearest is less


def test_calibrated_rounds_are_the_most():
    command = f"calibrate {SMALL} --noise 3 --target-epsilon 2 --accountant rdp --json"
    rounds = json.loads(shufl(command).stdout)["rounds"]
    event = check_in(1000, 0.3, 3.0)

    def epsilon(count):
        return make_accountant("rdp").compose(event, count).get_epsilon(1e-5)

    assert epsilon(rounds) <= 2 < epsilon(rounds + 1)


def test_rounds_of_which_no_more_are_tried_are_warned_of():
    command = f"calibrate {SMALL} --noise 1000 --target-epsilon 1e5 --accountant local --json"
    result = shufl(command)
    assert json.loads(result.stdout)["rounds"] == 10**6
    assert result.stderr.endswith("the search goes no further than rounds = 1000000\n")


def test_a_sum_that_needs_no_noise_says_so():
    sums = "--mixing sum --accountant sum-central --noise 0"
    of_few = "calibrate --n 10000 --gamma 1e-6 --delta 1e-5 --rounds 1 --target-epsilon 1 --json"
    result = shufl(f"{of_few} {sums}")
    assert json.loads(result.stdout)["central-noise"] == 1e-6
    assert "the search goes no further than central-noise = 1e-06\n" in result.stderr


def test_calibrated_rate_is_nearly_the_largest():
    command = "calibrate --n 1000 --delta 1e-5 --noise 3 --rounds 100 --target-epsilon 0.6"
    rate = json.loads(shufl(f"{command} --accountant rdp --json").stdout)["gamma"]

    def epsilon(gamma):
        event = check_in(1000, gamma, 3.0)
        return make_accountant("rdp").compose(event, 100).get_epsilon(1e-5)

    assert epsilon(rate) <= 0.6 < epsilon(min(1.0, rate * 1.003))


def test_who_does_not_price_the_rounds_says_so(fixed_size_only):
    command = f"account {SMALL} --noise 3 --rounds 20"
    rows = json.loads(shufl(f"{command} --json").stdout)
    assert set(rows) == {name for name, cls in ACCOUNTANTS.items() if Shuffled in cls.round_kinds}
    assert rows[fixed_size_only]["epsilon"] is None
    assert rows[fixed_size_only]["warning"] == "does not price these rounds"
    table = shufl(command)
    assert table.exit_code == 0
    assert table.stdout.count("does not price these rounds") == len(
        [name for name, row in rows.items() if row["epsilon"] is None]
    )


@pytest.mark.parametrize(
    "plan",
    ["--n 10 --gamma 1 --noise 5", "--n 1000000000000 --gamma 0.1 --noise 0.001"],
)
@pytest.mark.slow
def test_a_billion_rounds_are_priced(plan):
    result = shufl(f"account {plan} --rounds 1000000000 --delta 0.1 --json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    noise = float(plan.rsplit(maxsplit=1)[1])
    shift = mp.sqrt(10**9) * 2 / mp.mpf(noise)
    local = rows["local"]["epsilon"]
    # ε = μ²/2 + μ x, Φ(-x) = 0.1 to first order: e^ε Φ(-x-μ) is nothing beside it.
    assert local == pytest.approx(float(shift**2 / 2 + shift * mp.mpf("1.2815516")), rel=1e-6)
    for name in ("pld", "crowd"):
        assert 0 < rows[name]["epsilon"] <= local * (1 + 1e-9)
        assert rows[name]["lower_bound"] is None


@pytest.mark.parametrize("rounds", [0, 3])
@pytest.mark.slow
def test_a_run_folder_is_not_priced_by_who_does_not_price_its_rounds(
    tmp_path, rounds, fixed_size_only
):
    plan = small_plan(shuffler_blankets=30.0)
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        for round in range(1, rounds + 1):
            ledger.append_round(round)
    rows = json.loads(shufl(f"account {tmp_path} --json").stdout)
    spent = plan.make_accountant("local").epsilon_after(plan.event(), 1e-4, rounds) if rounds else 0
    assert rows["local"]["epsilon"] == pytest.approx(spent)
    assert rows[fixed_size_only]["epsilon"] is None


UNUSED = "the target is not used up: ε is "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "edge"),
    [
        ("--n 1000 --gamma 1 --rounds 5 --accountant local --target-epsilon 9e4", "noise = 0.2"),
        ("--n 1000 --noise 9 --rounds 5 --accountant local --target-epsilon 50", "gamma = 1"),
        ("--n 1000 --noise 9 --gamma 1 --rounds 1 --accountant blanket --target-epsilon 50",
         "blankets = 0.1"),
        ("--n 1000 --gamma 1 --rounds 5 --accountant local --mechanism ldp-sgd "
         "--target-epsilon 9e4", "noise = 1.254"),
        ("--n 1000 --gamma 1 --rounds 5 --accountant local --target-epsilon 9", None),
        ("--n 1000 --noise 2 --rounds 5 --accountant local --target-epsilon 4", None),
        ("--n 1000 --noise 9 --gamma 1 --accountant local --target-epsilon 0.7", None),
        *by_night(("--n 1000 --gamma 1 --rounds 1 --accountant blanket --target-epsilon 9e4",
                   "noise = 0.2, blankets = 0.1")),
    ],
)  # fmt: skip
def test_a_target_that_is_not_used_up_is_told_in_one_line(command, edge):
    result = shufl(f"calibrate {command} --delta 1e-5 --json")
    found, told = json.loads(result.stdout), result.stderr.splitlines()
    assert found["epsilon"] <= found["target_epsilon"]
    told = [line for line in told if "promises little" not in line]
    if edge is None:
        assert not told
    else:
        assert found["epsilon"] < 0.99 * found["target_epsilon"]
        (line,) = told
        assert line.startswith(f"warning: {UNUSED}{rounded_up(found['epsilon'])} of ")
        assert line.endswith(f"and the search goes no further than {edge}")


@pytest.mark.slow
@pytest.mark.nightly
def test_a_plan_that_does_not_use_up_its_target_is_told_in_one_line():
    few = "plan --users 2000 --delta 1e-5 --dimension 10 --device-megabytes 0.0012"
    (line,) = shufl(f"{few} --epsilon 990").stderr.splitlines()
    assert line.startswith(f"warning: γ = 0.1, 100 rounds: {UNUSED}")


@pytest.mark.parametrize(
    ("spent", "rounds", "budget", "allowed"),
    [(3, 9, 50.0, 9), (9, 9, 50.0, 9), (4, 900, 12.0, None), (0, 9, 50.0, 9)],
)
def test_a_run_that_did_not_end_by_itself_has_the_epsilon_of_its_plan_too(
    tmp_path, spent, rounds, budget, allowed
):
    """Whoever stopped it may have chosen the moment by what it showed; so may a crash."""
    plan = small_plan(rounds=rounds, target_epsilon=budget, accountant="local")
    if allowed is None:  # the budget ends it before the plan's rounds
        local = make_accountant("local")
        allowed = max(t for t in range(1, 60) if local.epsilon_after(plan.event(), 1e-4, t) <= 12)
        assert 4 < allowed < 59
    with Ledger.create(tmp_path / "ledger.jsonl", plan, "run") as ledger:
        for round in range(1, spent + 1):
            ledger.append_round(round)
    rows = json.loads(shufl(f"account {tmp_path} --json").stdout)
    shown = shufl(f"account {tmp_path}").stdout
    assert ("ε as planned" in shown) == (spent < allowed)
    at = functools.partial(make_accountant("local").epsilon_after, plan.event(), 1e-4)
    assert rows["local"]["epsilon"] == (at(spent) if spent else 0)
    assert rows["local"].get("planned") == (at(allowed) if spent < allowed else None)
    assert rows["blanket"].get("planned") is None


@pytest.mark.parametrize("command", ["account", "compare"])
@pytest.mark.slow
def test_blankets_reach_the_event_and_change_nothing_for_who_does_not_count_on_them(
    command, monkeypatch
):
    seen, compose = [], LocalAccountant.compose

    def spy(accountant, event, count=1):
        seen.append(event)
        return compose(accountant, event, count)

    monkeypatch.setattr(LocalAccountant, "compose", spy)
    command = f"{command} {SMALL} --noise 3 --rounds 20 --json"
    without = json.loads(shufl(command).stdout)
    assert {event.blankets for event in seen} == {0.0}
    seen.clear()
    blankets = json.loads(shufl(f"{command} --blankets 150").stdout)
    assert set(seen) == {check_in(1000, 0.3, 3.0, 150.0)}
    for name in ("theorem3", "rdp", "pld", "crowd", "local"):
        here, before = (each.get("epsilon", each)[name] for each in (blankets, without))
        if isinstance(here, dict):
            assert "blankets are not counted on" in here["warning"]
            here, before = here["epsilon"], before["epsilon"]
        assert here == before


def test_the_error_of_calibrated_noise_allows_for_the_blankets():
    command = f"calibrate {SMALL} --rounds 20 --target-epsilon 15 --accountant local"
    found = json.loads(shufl(f"{command} --blankets 150 --dimension 10 --json").stdout)
    assert found["blankets"] == 150
    noise = found["noise"]
    event = check_in(1000, 0.3, noise, 150.0)
    assert make_accountant("local").compose(event, 20).get_epsilon(1e-5) == found["epsilon"] <= 15
    expected = math.sqrt((noise**2 * (1 + 150 / 300) + 0.7 / 10) / 300)
    assert found["mean_update_error"] == pytest.approx(expected)
    many = json.loads(shufl(f"{command} --json").stdout)
    assert (many["blankets"], many["noise"]) == (0, noise)
    assert many["mean_update_error"] == pytest.approx(noise / math.sqrt(300))


def test_reports_and_bytes_of_a_round_are_those_of_the_users_and_the_blankets():
    command = f"calibrate {SMALL} --rounds 20 --target-epsilon 15 --accountant local --json"
    found = json.loads(shufl(f"{command} --blankets 150 --dimension 10").stdout)
    assert found["reports_a_round"] == pytest.approx(1000 * 0.3 + 150)
    report = sealed_length(report_length(10))
    assert report > 10 * 4
    assert found["bytes_a_round"] == pytest.approx(450 * report)
    assert json.loads(shufl(command).stdout)["bytes_a_round"] is None


@pytest.mark.slow
def test_calibrated_blankets_are_nearly_the_fewest_and_the_table_names_them():
    command = f"calibrate {SMALL} --rounds 20 --target-epsilon 2 --accountant blanket --noise 1"
    found = json.loads(shufl(f"{command} --json").stdout)
    assert "blankets for ε ≤ 2" in shufl(command).stdout

    def epsilon(blankets):
        event = check_in(1000, 0.3, 1.0, blankets)
        return make_accountant("blanket").compose(event, 20).get_epsilon(1e-5)

    assert found["noise"] == 1.0
    assert epsilon(found["blankets"]) == found["epsilon"] <= 2 < epsilon(found["blankets"] * 0.997)


@pytest.mark.slow
def test_noise_and_blankets_of_least_error_reach_the_headline():
    command = "calibrate --n 60000 --gamma 0.1 --rounds 5540 --target-epsilon 1"
    result = shufl(f"{command} --accountant blanket --json")
    assert result.stderr == ""
    found = json.loads(result.stdout)
    noise, blankets = found["noise"], found["blankets"]
    event = check_in(60_000, 0.1, noise, blankets)
    assert make_accountant("blanket").compose(event, 5540).get_epsilon(1 / 60_000) <= 1
    assert found["epsilon"] <= 1
    error = noise * math.sqrt((6000 + blankets) / 6000**2)
    assert found["mean_update_error"] == pytest.approx(error)
    assert error <= 0.0151


@pytest.mark.parametrize("command", ["account", "calibrate --target-epsilon 20"])
@pytest.mark.slow
def test_a_delta_not_far_below_the_chance_to_take_part_is_warned_of(command):
    command = f"{command} --n 1000 --gamma 0.001 --rounds 5"  # the chance is 0.005
    noise = " --noise 20" if command.startswith("account") else " --accountant local"
    near = shufl(f"{command}{noise} --delta 6e-4")
    assert near.exit_code == 0
    (line,) = near.stderr.splitlines()
    assert line.startswith("warning: delta = 0.0006 promises little: a run that publishes all ")
    assert "with probability 0.12 satisfies it at any epsilon" in line
    assert shufl(f"{command}{noise} --delta 4e-4").stderr == ""


def test_calibration_by_an_accountant_that_does_not_price_the_rounds_is_one_line():
    command = f"calibrate {SMALL} --rounds 2 --target-epsilon 1 --mechanism ldp-sgd"
    result = shufl(f"{command} --accountant theorem3")
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "accountant of ldp-sgd rounds without shuffler blankets must be" in line
    assert line.endswith("got 'theorem3'")


def test_compare_leaves_out_who_does_not_price_the_rounds(tmp_path, fixed_size_only):
    command = f"compare {SMALL} --noise 3 --rounds 50"
    result = json.loads(shufl(f"{command} --plot {tmp_path}/curves.png --json").stdout)
    assert set(result["epsilon"][fixed_size_only]) == {None}
    assert all(value > 0 for value in result["epsilon"]["local"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = shufl(command)
    assert table.exit_code == 0 and "–" in table.stdout and "nan" not in table.stdout


def test_compare_is_the_accountants_against_rounds(tmp_path):
    command = f"compare {SMALL} --noise 3 --rounds 50 --plot {tmp_path}/curves.png --json"
    result = json.loads(shufl(command).stdout)
    assert result["rounds"][0] == 1 and result["rounds"][-1] == 50
    event = check_in(1000, 0.3, 3.0)
    for name in ("theorem3", "rdp", "crowd", "local"):
        curve = result["epsilon"][name]
        assert curve == sorted(curve)
        composed = make_accountant(name).compose(event, 50).get_epsilon(1e-5)
        assert math.isclose(curve[-1], composed)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_compare_shows_other_systems_with_what_they_cover():
    command = f"compare {SMALL} --noise 3 --rounds 50 --peers"
    result = json.loads(shufl(f"{command} --json").stdout)
    names = ["girgis", "clones-2021", "clones-2022", "rr-strong", "rr-weak", "central"]
    assert list(result["peers"]) == names
    for peer in result["peers"].values():
        assert len(peer["epsilon"]) == len(result["rounds"])
        assert "report" in peer["covers"] or "trusted server" in peer["covers"]
    shown = shufl(command).stdout
    assert "see below what each covers" in shown and "rr-weak: shuffled binary" in shown
    assert "peers" not in json.loads(shufl(f"compare {SMALL} --noise 3 --rounds 2 --json").stdout)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("account --gamma 0.1 --noise 5 --rounds 10", "--n is missing"),
        ("account --n 100 --noise 5 --rounds 10", "--gamma is missing"),
        (
            "account --n 100 --gamma 1.5 --noise 5 --rounds 10",
            "--gamma must be a number in [1e-12, 1], got 1.5",
        ),
        (
            "account --n 100 --gamma 0.5 --noise 5 --rounds 0",
            "--rounds must be a whole number from 1 to 10^9, got 0",
        ),
        (
            "account --n 1 --gamma 0.5 --noise 5 --rounds 1",
            "--delta must be a number when there is one user",
        ),
        (
            "account --n 9 --gamma 1 --noise 5 --rounds 1 --adjacency x",
            "--adjacency must be one of replace, zero-out, got 'x'",
        ),
        ("account nowhere", "cannot read ledger"),
        ("calibrate --target-epsilon 1 --n 9 --gamma 1", "leave out exactly one of"),
        (
            "calibrate --target-epsilon 0 --n 9 --gamma 1 --noise 1",
            "--target-epsilon must be a number above 0, got 0",
        ),
        (
            "calibrate --target-epsilon inf --n 9 --gamma 1 --noise 1",
            "above 0, got inf",
        ),
        (
            "calibrate --target-epsilon nan --n 9 --gamma 1 --noise 1",
            "above 0, got nan",
        ),
        (
            "account --n 1000000000001 --gamma 1 --noise 5 --rounds 1",
            "--n must be a whole number from 1 to 10^12, got 1000000000001",
        ),
        (
            "account --n 9 --gamma 1 --noise 1e200 --rounds 1",
            "--noise must be a number in [1e-12, 10^6], got 1e",
        ),
        (
            "account --n 9 --gamma 1 --noise nan --rounds 1",
            "a number in [1e-12, 10^6], got nan",
        ),
        ("compare --n 9 --gamma 1 --noise 0.05 --rounds 1 --peers", "ε₀ must lie in (0, 700]"),
        (
            f"{COMPARED} --blankets 5 --participation allocation --peers",
            "--peers must be left out with --participation allocation",
        ),
        (
            "account --n 9 --gamma 0.3 --noise 5 --rounds 1 --participation allocation",
            "--gamma must be one in a whole number up to 10^9, such as 0.25 or 0.1, with "
            "participation allocation, got 0.3",
        ),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --accountant x",
            "accountant must be",
        ),
        (
            "account --n 9 --gamma 1 --noise 5 --rounds 1 --blankets -1",
            "--blankets must be a number from 0 to 10^7, got -1",
        ),
        (
            "compare --n 9 --gamma 1 --noise 5 --rounds 1 --blankets inf",
            "a number from 0 to 10^7, got inf",
        ),
        (f"{COMPARED} --plot nodir/x.png", "--plot must be a file in a folder that is there and"),
        (f"{COMPARED} --plot .", "--plot must be a file in a folder that is there and may be"),
        (f"{COMPARED} --plot x.txt", "--plot must end in one of "),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --blankets nan",
            "a number from 0 to 10^7, got nan",
        ),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --noise 1 --rounds 3",
            "leave out exactly one of --noise, --rounds and --gamma",
        ),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --blankets 3 --accountant crowd",
            "leave out exactly one of --noise, --rounds and --gamma",
        ),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --accountant blanket",
            "or --blankets, or --noise and --blankets",
        ),
        (
            "calibrate --target-epsilon 1 --n 9 --gamma 1 --rounds 2 --blankets 0 "
            "--accountant blanket",
            "--blankets must be above 0 with --accountant blanket, got 0",
        ),
    ],
)
def test_a_mistake_is_one_line(command, message):
    result = shufl(command)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ") and message in line
