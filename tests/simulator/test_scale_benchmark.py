"""The benchmark script still runs, with more users than records."""

import scale


def test_it_measures_rounds_of_the_reports_asked_for():
    row = scale.measure("quickstart", [], users=5_000, reports=200, rounds=2)
    assert row["users"] == 5_000 and abs(row["reports"] - 200) < 7 * 200**0.5
    assert all(value > 0 for value in row.values())
