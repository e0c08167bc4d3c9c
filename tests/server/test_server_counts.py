"""The operator is told of a shuffler whose reports are not as many as they should be."""

import numpy as np

from rounds import make_plan
from shufl.server.plausible_counts import Counts

PLAN = make_plan(
    users=500, check_in_rate=0.5, noise_multiplier=1.0, rounds=2000, shuffler_blankets=40.0,
    accountant="local",
)  # fmt: skip


def reports(random, blankets=40.0):
    return int(random.binomial(500, 0.5) + random.poisson(blankets))


def test_a_shuffler_without_blankets_is_named_and_one_that_is_as_agreed_is_not():
    random, counts, other = np.random.default_rng(7), Counts(PLAN), Counts(PLAN)
    for _ in range(1030):
        counts.add(reports(random), 500)
        assert counts.doubt == ""
    for _ in range(30):
        other.add(reports(random, blankets=0.0), 500)
    assert other.doubt.startswith("released 1")
    assert "fewer than expected" in other.doubt


def test_where_everybody_reports_and_there_is_no_blanket_one_report_more_is_no_alarm():
    counts = Counts(PLAN.replace(check_in_rate=1.0, shuffler_blankets=0.0))
    for more, alarm in ((1, ""), (5, "released 6 reports more than expected")):
        counts.add(500 + more, 500)
        assert counts.doubt.startswith(alarm)
        assert bool(counts.doubt) is bool(alarm)
