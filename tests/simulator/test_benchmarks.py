"""The scripts of `benchmarks/` still run, and attacks of poisoned reports do what they are for."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import poisoning
import scale
from nights import by_night

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
POISONED = [
    "privacy.rounds=2", "data.users=200", "privacy.minimum_batch=1",
    "privacy.target_epsilon=1000", "privacy.shuffler_blankets=10",
]  # fmt: skip


def lines_of(script, *arguments):
    wide = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(SCRIPTS)}
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=wide)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_rounds_of_more_users_than_records_have_the_reports_asked_for():
    row = scale.measure("quickstart", [], users=5_000, reports=200, rounds=2)
    assert row["users"] == 5_000 and abs(row["reports"] - 200) < 7 * 200**0.5
    assert all(value > 0 for value in row.values())


@pytest.mark.nightly
def test_the_time_of_accountants_has_a_row_for_each_thing_asked_for():
    small = "--users=300", "--rounds=5", "--guarded=4", "--order=10"
    lines = lines_of("accounting_speed.py", *small, "--only=theorem3,partitions")
    for label in ("theorem3, n = 300", "theorem3, n = 1e+09", "Theorem 1, order 10"):
        assert any(label in line for line in lines)


@pytest.mark.nightly
def test_a_plan_that_is_a_little_safer_is_never_dearer():
    asked = "--plans=20", "--only", "blanket", "local", "--seed=3"
    shown = "\n".join(lines_of("accounting_order.py", *asked))
    rises = re.findall(r"│ (blanket|local) +│ (\w+) +│ ([\d.e-]+) +│", shown)
    assert len(rises) == 7
    assert all(float(rise) <= 1e-3 for _, _, rise in rises), shown


@pytest.mark.nightly
def test_the_start_of_commands_has_a_row_for_each():
    lines = lines_of("start.py", "--repeats=1", "--rounds=1")
    rows = [line for line in lines if line.startswith("| `")]
    assert len(rows) == 6
    assert all(float(row.split("|")[2]) > 0 for row in rows)
    for name in ("shufl run quickstart", "plain Flower"):
        (row,) = [line for line in lines if line.startswith(f"| {name} |")]
        round, busy, end = map(float, row.strip("|").split("|")[1:])
        assert 0 < round < end and busy > 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "model", [[], ["--set=model.name=transformer:vision", "--set=model.options={width=32,depth=1}"]]
)
def test_the_vectorised_engine_has_a_row_for_each_path(model):
    lines = lines_of(
        "vectorised.py", "quickstart", "--rounds=1", "--flower-rounds=0", "--set=data.users=60",
        "--set=privacy.minimum_batch=1", "--only=vectorised, aggregate", *model,
    )  # fmt: skip
    for label in ("plain, a batch a core", "vectorised, aggregate noise"):
        (row,) = [line for line in lines if label in line]
        median, share, megabytes = (float(row.split("│")[column]) for column in (3, 6, 7))
        assert median > 0 and 0 < share < 100 and 50 < megabytes < 50_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attack", "aggregator", "least", "most"),
    [
        ("huge", "mean", 0.1, 0.3),
        ("hidden", "spectral-filter", 0, 0.15),
        ("longest", "spectral-filter", 0.1, 0.3),
        *by_night(("none", "spectral-filter", 0, 0.02), ("opposite", "spectral-filter", 0, 0.02)),
    ],
)
def test_a_poisoned_run_leaves_out_what_it_should(attack, aggregator, least, most):
    """A fifth of the users attack, of whom half report: a fifth of the reports, blankets aside."""
    case = poisoning.Case(attack, 0.2, aggregator, seed=1)
    of, accuracy, left_out = poisoning.run_case("quickstart", POISONED, case)
    assert of == case and 0 <= accuracy <= 1
    assert least <= left_out <= most
