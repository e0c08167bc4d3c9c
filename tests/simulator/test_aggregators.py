"""An aggregator of one's own: what it is given, and what it must make of that."""

import numpy as np
import pytest

from shufl.learning.config import load
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.server import Aggregate, Mean
from shufl.server.rounds import _mean_of


class Nothing:
    """Makes no estimate."""

    def __init__(self, plan, dimension):
        self.dimension = dimension

    def add(self, report):
        pass

    def result(self, users):
        return np.zeros(self.dimension)


class Median(Nothing):
    """Of few reports, and without a base class."""

    def __init__(self, plan, dimension):
        self.reports, self.plan = [np.zeros(dimension)], plan

    def add(self, report):
        self.reports.append(report)

    def result(self, users):
        unit = self.plan.mechanism.unit(len(self.reports[0]))
        return (unit * np.median(self.reports, axis=0)).astype(np.float32)


def loud(plan, dimension):
    raise ValueError("no reports\nplease")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("median", "training.aggregator must be mean, or module:callable, got"),
        ("nowhere:filter", "training.aggregator nowhere:filter could not be imported"),
        ("test_aggregators:loud", "loud cannot aggregate reports: no reports please"),
        ("test_aggregators:Nothing",
         r"shape (650,) and type float32 (also of no reports), got (650,) and float64"),
    ],
)  # fmt: skip
def test_one_that_cannot_be_used_is_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        prepare(load("quickstart", {"training.aggregator": name}))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_estimates_of_several_shufflers_count_by_their_users():
    plan = prepare(load("quickstart")).plan
    reports = np.random.default_rng(1).integers(-99, 99, (9, 5)).astype(float)

    def estimate(some, users):
        mean = Mean(plan, 5)
        for report in some:
            mean.add(report)
        return Aggregate(mean.result(users), len(some), 1, {"too-long": 1})

    parts = [(estimate(reports[:3], 20), 20), (estimate(reports[3:], 50), 50)]
    together = _mean_of(parts)
    np.testing.assert_allclose(together.estimate, estimate(reports, 70).estimate, rtol=1e-6)
    assert together.estimate.dtype == np.float32
    assert (together.reports, together.reasons) == (9, {"too-long": 2})
