"""The benchmark script of the command's start still runs."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "start.py"


def test_it_prints_a_row_for_each_command():
    command = [sys.executable, str(SCRIPT), "--repeats", "1", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| `")]
    assert len(rows) == 6
    assert all(float(row.split("|")[2]) > 0 for row in rows)
    for name in ("shufl run quickstart", "plain Flower"):
        (row,) = [line for line in done.stdout.splitlines() if line.startswith(f"| {name} |")]
        round, busy, end = map(float, row.strip("|").split("|")[1:])
        assert 0 < round < end and busy > 0
