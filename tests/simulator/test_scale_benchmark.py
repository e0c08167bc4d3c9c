"""The benchmark script still runs, with more users than records."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scale.py"


def test_it_measures_rounds_of_the_reports_asked_for():
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    row = script.measure("quickstart", [], users=5_000, reports=200, rounds=2)
    assert row["users"] == 5_000 and abs(row["reports"] - 200) < 7 * 200**0.5
    assert all(value > 0 for value in row.values())
