"""From a released batch to an estimate of the mean update: open, validate, aggregate."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from accounting import PrivacyPlan
from shuffler import (
    PrivateKey,
    RejectReason,
    ReportOpener,
    ReportRejected,
    RoundHeader,
    decode_report,
    empty_report,
)


class Aggregator(ABC):
    """Makes the estimate of the mean update from a round's reports; `AGGREGATORS` names them.

    The Flower engine adds the reports one by one. The vectorised engine never has a single report:
    it adds the sum of all of them at once. It therefore refuses every aggregator that does not say
    `takes_sums`, for example a trimmed mean, which must see each report.

    Attributes:
        takes_sums: whether the result depends on nothing but the sum of the reports.
    """

    takes_sums: ClassVar[bool] = False

    def __init__(self, plan: PrivacyPlan, dimension: int):
        """Begins a round.

        Args:
            plan: the privacy plan; reports are in units of its mechanism.
            dimension: d, the number of model parameters.
        """
        self.plan = plan
        self.dimension = dimension

    @abstractmethod
    def add(self, report: np.ndarray) -> None:
        """Adds a report, whole numbers of units of shape (d,), or the sum of several."""

    @abstractmethod
    def result(self, users: int) -> np.ndarray:
        """The estimate of the mean update, float32 of shape (d,).

        Args:
            users: how many users were present, that is, flipped their coins.
        """


class Mean(Aggregator):
    """The reports' sum over gamma times the users present.

    Dividing by the expected number of users' reports, not the realised one, keeps the estimate
    unbiased whatever the coins, and says nothing of how many reports are blankets. The sum is one
    of integers below 2^53, so it does not depend on the (random) order of the release, nor on how
    the batch was divided.
    """

    takes_sums = True

    def __init__(self, plan: PrivacyPlan, dimension: int):
        super().__init__(plan, dimension)
        self._total = np.zeros(dimension)

    def add(self, report: np.ndarray) -> None:
        """Adds to the sum."""
        self._total += report

    def result(self, users: int) -> np.ndarray:
        """The sum, divided."""
        scale = self.plan.mechanism.unit / (users * self.plan.check_in_rate)
        return (self._total * scale).astype(np.float32)


AGGREGATORS: dict[str, type[Aggregator]] = {"mean": Mean}


@dataclass(frozen=True)
class Aggregate:
    """The estimate of the mean update and how many reports it holds.

    Attributes:
        estimate: an `Aggregator`'s result, float32 of shape (d,).
        reports: how many were summed: users' reports and shufflers' blankets alike, and no empty
            ones.
        rejected: how many did not open or no honest client could have sent.
        reasons: how many of them for which reason (`RejectReason`).
    """

    estimate: np.ndarray
    reports: int
    rejected: int
    reasons: dict[str, int]


def aggregate_reports(
    sealed_reports: Iterable[bytes],
    private_key: PrivateKey,
    header: RoundHeader,
    aggregator: Aggregator,
    users: int,
) -> Aggregate:
    """Opens, validates and aggregates a batch, one report after the other.

    Args:
        sealed_reports: the release.
        private_key: the round's key.
        header: the round's header; a report sealed under another does not open.
        aggregator: of this round alone.
        users: how many users were present, as in `Aggregator.result`.
    """
    dimension = aggregator.dimension
    empty = empty_report(dimension) if aggregator.plan.cover else None
    limit = aggregator.plan.mechanism.largest_honest_norm(dimension)
    opener = ReportOpener(private_key, header)
    reports = 0
    reasons: Counter[str] = Counter()
    for sealed in sealed_reports:
        try:
            payload = opener.open(sealed)
            if payload == empty:
                continue
            report = decode_report(payload, dimension).astype(np.float64)
        except ReportRejected as rejected:
            reasons[rejected.reason] += 1
            continue
        if math.sqrt(report @ report) > limit:
            reasons[RejectReason.TOO_LONG] += 1
            continue
        aggregator.add(report)
        reports += 1
    return Aggregate(aggregator.result(users), reports, reasons.total(), dict(reasons))
