"""`shufl account` as a user calls it."""

import functools
import json
import math
import os
import re
import subprocess
from pathlib import Path

import mpmath as mp
import pytest

from nights import by_night
from rounds import check_in, make_plan
from run_world import invoke, shufl_command, told
from shufl.accounting import ACCOUNTANTS, Ledger, make_accountant
from shufl.learning.config import load
from shufl.learning.from_config import plan_of
from shufl.protocol import Shuffled

PAPER = "-n 60000 --check-in-rate 0.1 --noise-multiplier 5 --rounds 5540 --adjacency zero-out"
SMALL = "-n 1000 --check-in-rate 0.3 --delta 1e-5"


def rows_of(command):
    """What each accountant says."""
    return told(command)["epsilon"]


def test_the_help_says_what_each_value_may_be():
    shown = " ".join(invoke("account --help").stdout.replace("│", " ").split())
    for words in (
        "in a round: a number in [1e-12, 1].",
        "clip norms: a number in [1e-12, 10^6].",
        'δ: "1/n" or a number in (0, 1). Default: 1/n.',
        "neighbours: one of replace, zero-out. Default: replace.",
    ):
        assert words in shown
    assert "least-error" not in shown  # which an option cannot say


def test_what_is_printed_is_no_less_than_what_was_computed():
    """An ε in four digits is rounded up."""
    result = rows_of(f"account {PAPER}")
    table = invoke(f"account {PAPER}").stdout
    below = 0
    for name, row in result.items():
        line = next(line for line in table.splitlines() if f"│ {name} " in line)
        printed = line.split("│")[2].strip()
        if row["epsilon"] is not None:
            assert row["epsilon"] <= float(printed) <= row["epsilon"] * 1.001
            below += float(f"{row['epsilon']:.4g}") < row["epsilon"]
    assert below  # to the nearest digit some would have been less


def small_plan(**changes):
    """Of so few users that every accountant prices it soon."""
    values = {
        "users": 20, "check_in_rate": 0.2, "noise_multiplier": 2.0, "rounds": 9,
        "delta": 1e-4, "target_epsilon": 50.0, "minimum_batch": 1,
    }  # fmt: skip
    return make_plan(**values | changes)


def run_folder(folder, plan, rounds):
    """What a run of this plan that has played so many rounds leaves, but for its metrics."""
    with Ledger.create(folder / "ledger.jsonl", plan, "run") as ledger:
        for round in range(1, rounds + 1):
            ledger.append_round(round)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        "calibrate --rounds 20 --target-epsilon 9 --accountant local",
        *by_night("account --rounds 20 --noise-multiplier 3"),
    ],
)
@pytest.mark.slow
def test_a_delta_too_small_for_a_plan_is_said_to_be_of_the_ideal_mechanism(command):
    command += " -n 1000 --check-in-rate 0.3 --json --delta"
    assert invoke(f"{command} 2e-21").stderr == ""
    result = invoke(f"{command} 1.9e-21")
    assert result.exit_code == 0 and json.loads(result.stdout)
    (line,) = result.stderr.splitlines()
    assert line.startswith("warning: delta = 1.9e-21 is smaller than rounding allows: 20 rounds")
    assert "support 2e-21 or more" in line


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


@pytest.mark.slow
def test_who_does_not_price_the_rounds_says_so(tmp_path, fixed_size_only):
    """In tables, in plots, and of run folders."""
    command = f"account {SMALL} --noise-multiplier 3 --rounds 20 --accountant all"
    found = told(command, "--plot", tmp_path / "curves.png")
    rows, curves = found["epsilon"], found["over_rounds"]["epsilon"]
    assert set(rows) == {name for name, cls in ACCOUNTANTS.items() if Shuffled in cls.round_kinds}
    assert rows[fixed_size_only]["epsilon"] is None
    assert rows[fixed_size_only]["warning"] == "does not price these rounds"
    assert set(curves[fixed_size_only]) == {None} and all(value > 0 for value in curves["local"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = invoke(command)
    unpriced = [name for name, row in rows.items() if row["epsilon"] is None]
    assert table.exit_code == 0 and "–" in table.stdout and "nan" not in table.stdout
    assert table.stdout.count("does not price these rounds") == len(unpriced)
    folder = run_folder(tmp_path, small_plan(shuffler_blankets=30.0), 3)
    rows = rows_of(f"account {folder} --accountant all")
    assert rows[fixed_size_only]["epsilon"] is None and rows["local"]["epsilon"] > 0


@pytest.mark.parametrize(
    "plan",
    [
        "-n 10 --check-in-rate 1 --noise-multiplier 5",
        *by_night("-n 1000000000000 --check-in-rate 0.1 --noise-multiplier 0.001"),
    ],
)
@pytest.mark.slow
def test_a_billion_rounds_are_priced(plan):
    rows = rows_of(f"account {plan} --rounds 1000000000 --delta 0.1")
    noise = float(plan.rsplit(maxsplit=1)[1])
    shift = mp.sqrt(10**9) * 2 / mp.mpf(noise)
    local = rows["local"]["epsilon"]
    # ε = μ²/2 + μ x, Φ(-x) = 0.1 to first order: e^ε Φ(-x-μ) is nothing beside it.
    assert local == pytest.approx(float(shift**2 / 2 + shift * mp.mpf("1.2815516")), rel=1e-6)
    for name in ("pld", "crowd"):
        assert 0 < rows[name]["epsilon"] <= local * (1 + 1e-9)


@pytest.mark.parametrize(
    ("spent", "rounds", "budget", "allowed"),
    [(9, 9, 50.0, 9), (4, 900, 5.0, None), *by_night((3, 9, 50.0, 9), (0, 9, 50.0, 9))],
)
def test_a_run_that_did_not_end_by_itself_has_the_epsilon_of_its_plan_too(
    tmp_path, spent, rounds, budget, allowed
):
    """Whoever stopped it may have chosen the moment by what it showed; so may a crash."""
    about = {"rounds": rounds, "target_epsilon": budget, "accountant": "local"}
    plan, local = small_plan(adjacency="zero-out", **about), make_accountant("local", "zero-out")
    if allowed is None:  # the budget ends it before the plan's rounds
        allowed = max(t for t in range(1, 60) if local.epsilon_after(plan.event(), 1e-4, t) <= 5)
        assert 4 < allowed < 59
    folder = run_folder(tmp_path, plan, spent)
    rows, shown = rows_of(f"account {folder}"), invoke(f"account {folder}").stdout
    assert ("ε as planned" in shown) == (spent < allowed)
    at = functools.partial(local.epsilon_after, plan.event(), 1e-4)
    assert rows["local"]["epsilon"] == (at(spent) if spent else 0)
    assert rows["local"].get("planned") == (at(allowed) if spent < allowed else None)


@pytest.mark.slow
def test_blanket_counts_where_nothing_else_is_asked_for(tmp_path):
    """Of a run beside the accountant that halts it."""
    plan = small_plan(shuffler_blankets=30.0, accountant="local")
    run_folder(tmp_path, plan, 1)
    command = f"account {SMALL} --noise-multiplier 3 --rounds 20 --shuffler-blankets 150"
    assert rows_of(command).keys() == {"blanket"}
    assert rows_of(f"{command} --accountant pld --accountant local").keys() == {"pld", "local"}
    assert rows_of(f"account {tmp_path}").keys() == {"blanket", "local"}
    assert rows_of(f"account {tmp_path} --accountant crowd").keys() == {"crowd"}


@pytest.mark.parametrize(
    ("values", "counted"),
    [
        ("--noise-multiplier 3 --shuffler-blankets 150", "blanket"),
        ("--noise-multiplier 3 --accountant rdp", "rdp"),
        ("--mixing sum --central-noise 9", "sum-central"),
        ("--mechanism ldp-sgd --noise-multiplier 2 --shuffler-blankets 50", "blanket"),
        ("--mechanism randomised-response --categories 3 --local-epsilon 1 --accountant local",
         "local"),
    ],
)  # fmt: skip
def test_what_is_priced_is_the_section_of_a_configuration(values, counted):
    found = told(f"account {SMALL} --rounds 1 {values}")
    name = "histogram" if "categories" in found["privacy"] else "quickstart"
    privacy = found["privacy"] | {"target_epsilon": 99.0}
    config = load(name, {"privacy": privacy, "data.users": found["users"]})
    _, plan, _ = plan_of(config)
    assert plan.accountant == counted and (plan.users, plan.rounds) == (1000, 1)
    assert plan.epsilon() == found["epsilon"][counted]["epsilon"]


@pytest.mark.parametrize("command", ["account", "calibrate --target-epsilon 20"])
@pytest.mark.slow
def test_a_delta_not_far_below_the_chance_to_take_part_is_warned_of(command):
    command = f"{command} -n 1000 --check-in-rate 0.001 --rounds 5"  # the chance is 0.005
    noise = " --noise-multiplier 20" if command.startswith("account") else " --accountant local"
    near = invoke(f"{command}{noise} --delta 6e-4")
    assert near.exit_code == 0
    (line,) = near.stderr.splitlines()
    assert line.startswith("warning: delta = 0.0006 promises little: a run that publishes all ")
    assert "with probability 0.12 satisfies it at any epsilon" in line
    assert invoke(f"{command}{noise} --delta 4e-4").stderr == ""


@pytest.mark.parametrize("of_run", [False, True])
def test_a_plot_is_the_accountants_against_rounds(tmp_path, of_run):
    plan = small_plan(users=1000, check_in_rate=0.3, noise_multiplier=3.0, delta=1e-5, rounds=50)
    what = f"{SMALL} --noise-multiplier 3 --rounds 50"
    what = run_folder(tmp_path, plan, 50) if of_run else what
    names = "theorem3", "rdp", "local"
    command = f"account {what} --plot {tmp_path}/curves.png"
    command += "".join(f" --accountant {name}" for name in names)
    result = told(command)["over_rounds"]
    assert result["rounds"][0] == 1 and result["rounds"][-1] == 50
    event = check_in(1000, 0.3, 3.0)
    for name in names:
        curve = result["epsilon"][name]
        assert curve == sorted(curve)
        composed = make_accountant(name).compose(event, 50).get_epsilon(1e-5)
        assert math.isclose(curve[-1], composed)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_other_systems_are_shown_with_what_they_cover(tmp_path):
    command = f"account {SMALL} --noise-multiplier 3 --rounds 50 --accountant local"
    found = told(command, "--peers", "--plot", tmp_path / "curves.png")
    names = ["girgis", "clones-2021", "clones-2022", "rr-strong", "rr-weak", "central"]
    assert list(found["peers"]) == names
    over = found["over_rounds"]
    for name, peer in found["peers"].items():
        assert peer["epsilon"] == over["epsilon"][name][-1]
        assert len(over["epsilon"][name]) == len(over["rounds"])
        assert "report" in peer["covers"] or "trusted server" in peer["covers"]
    shown = invoke(f"{command} --peers").stdout
    assert "other systems, replace" in shown and re.search(r"│ rr-weak +│ .*shuffled bi", shown)
    assert "peers" not in told(command)
