"""From a released batch to an estimate of the mean update: open, validate, aggregate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shufl.server.aggregators import Aggregator
from shufl.shuffler import (
    PrivateKey,
    RejectReason,
    ReportOpener,
    ReportRejected,
    RoundHeader,
    decode_report,
    empty_report,
)


@dataclass(frozen=True)
class Aggregate:
    """The estimate of the mean update and how many reports it holds.

    Attributes:
        estimate: an `Aggregator`'s result, float32 of shape (d,).
        reports: how many were summed: users' reports and shufflers' blankets alike, and no empty
            ones.
        rejected: how many did not open, no honest client could have sent, or the aggregator left
            out.
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
        # Not by BLAS, whose threads would wait for each other: the nodes' processes have the cores.
        if math.sqrt(np.einsum("i,i->", report, report)) > limit:
            reasons[RejectReason.TOO_LONG] += 1
            continue
        aggregator.add(report)
        reports += 1
    estimate = aggregator.result(users)
    if aggregator.left_out:
        reasons[RejectReason.OUTLIER] = aggregator.left_out
    kept = reports - aggregator.left_out
    return Aggregate(estimate, kept, reasons.total(), dict(reasons))
