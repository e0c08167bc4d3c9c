"""The load test, small: `make load` is the whole of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "shuffler_load.py"


@pytest.mark.slow
def test_no_report_is_lost_under_a_small_flood():
    numbers = ("--nodes", "20", "--connections", "300", "--calls", "500", "--rest", "0")
    done = subprocess.run([sys.executable, str(SCRIPT), *numbers], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        [flood, "20", "0"] for flood in ("none", "connections", "calls")
    ]
