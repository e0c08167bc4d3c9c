"""From a released batch to the mean update: open, validate, sum, divide by the expected number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from accounting import PrivacyPlan
from shuffler import (
    PrivateKey,
    RejectReason,
    ReportOpener,
    ReportRejected,
    RoundHeader,
    decode_report,
)


@dataclass(frozen=True)
class Aggregate:
    """The estimate of the mean update and how many reports it holds.

    Attributes:
        estimate: `mean_update` of the reports' sum, float32 of shape (d,).
        reports: how many were summed: users' reports and shufflers' blankets alike.
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
    plan: PrivacyPlan,
    dimension: int,
    users: int,
) -> Aggregate:
    """Opens, validates and sums a batch; memory does not grow with the batch.

    Reports are integers, and so is their sum: the model does not depend on the (random) order of
    the release, nor on how the batch was divided.

    Args:
        sealed_reports: the release.
        private_key: the round's key.
        header: the round's header; a report sealed under another does not open.
        plan: for gamma, C and z.
        dimension: d, the number of model parameters.
        users: how many users were present, as in `mean_update`.
    """
    limit = plan.mechanism.largest_honest_norm(dimension)
    total = np.zeros(dimension, dtype=np.int64)
    opener = ReportOpener(private_key, header)
    reports = 0
    reasons: Counter[str] = Counter()
    for sealed in sealed_reports:
        try:
            report = decode_report(opener.open(sealed), dimension).astype(np.float64)
        except ReportRejected as rejected:
            reasons[rejected.reason] += 1
            continue
        if math.sqrt(report @ report) > limit:
            reasons[RejectReason.TOO_LONG] += 1
            continue
        total += report.astype(np.int64)
        reports += 1
    return Aggregate(mean_update(total, plan, users), reports, reasons.total(), dict(reasons))


def mean_update(total: np.ndarray, plan: PrivacyPlan, users: int) -> np.ndarray:
    """The estimate of the mean update: the reports' sum over gamma times the users present.

    Dividing by the expected number of users' reports, not the realised one, keeps the estimate
    unbiased whatever the coins, and says nothing of how many reports are blankets.

    Args:
        total: sum of the reports in units of `plan.mechanism.unit`, shape (d,).
        plan: the privacy plan.
        users: how many users were present, that is, flipped their coins.

    Returns:
        float32 of shape (d,).
    """
    scale = plan.mechanism.unit / (users * plan.check_in_rate)
    return (total * scale).astype(np.float32)
