"""The shuffler's benchmarks, small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def played(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_no_report_is_lost_under_a_small_flood():
    numbers = ("--nodes", "20", "--connections", "300", "--calls", "500", "--rest", "0")
    rows = [line.split() for line in played("shuffler_load.py", *numbers).splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        [flood, "20", "0"] for flood in ("none", "connections", "calls")
    ]


def test_moments_are_attacked_in_a_few_rounds():
    rows = played("timing_attacks.py", "--rounds", "4", "--work-until", "5").splitlines()
    attackers = "early close", "closed", "answer", "probe", "arrival", "sending"
    assert [row[:12].strip() for row in rows] == list(attackers)


def test_throughput_is_measured_with_and_without_blankets(tmp_path):
    results = tmp_path / "results.json"
    numbers = ("--payloads", "1000", "--reports", "50", "--rounds", "1", "--json", str(results))
    played("shuffler_throughput.py", *numbers, "--directory", str(tmp_path))
    rows = json.loads(results.read_text())
    assert [(row["payload"], row["sealed"], row["reports"]) for row in rows] == [
        (1000, True, 50),
        (1000, False, 50),
    ]
    assert all(value > 0 for row in rows for name, value in row.items() if name != "sealed")
