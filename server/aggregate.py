"""From a released batch to the mean update: open, validate, sum / (n gamma)."""

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

_LOG_FALSE_REJECT = math.log(1e12)  # an honest report is rejected with probability below 1e-12


@dataclass(frozen=True)
class Aggregate:
    """The estimate of the mean update and how many reports it holds.

    Attributes:
        estimate: sum of the reports / (n gamma), float32 of shape (d,).
        reports: how many were summed.
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
) -> Aggregate:
    """Opens, validates and sums a batch; memory does not grow with the batch.

    Dividing by the expected number of reports, n*gamma, not the realised one, keeps the estimate
    unbiased whatever the coins. The sum is taken in 64-bit integers, in a unit finer than float32
    resolves here, so that the model does not depend on the (random) order of the release.

    Args:
        sealed_reports: the release.
        private_key: the round's key.
        header: the round's header; a report sealed under another does not open.
        plan: for n, gamma, C and z.
        dimension: d, the number of model parameters.
    """
    limit = largest_honest_norm(plan, dimension)
    unit = unit_of_sums(plan, dimension)
    total = np.zeros(dimension, dtype=np.int64)
    opener = ReportOpener(private_key, header)
    reports = 0
    reasons: Counter[str] = Counter()
    for sealed in sealed_reports:
        try:
            report = decode_report(opener.open(sealed), dimension)
        except ReportRejected as rejected:
            reasons[rejected.reason] += 1
            continue
        report = report.astype(np.float64)
        norm = math.sqrt(report @ report)
        if not norm <= limit:  # also catches NaN
            finite = np.isfinite(report).all()
            reasons[RejectReason.TOO_LONG if finite else RejectReason.NOT_FINITE] += 1
            continue
        total += np.rint(report / unit).astype(np.int64)
        reports += 1
    scale = unit / expected_updates(plan)
    return Aggregate((total * scale).astype(np.float32), reports, reasons.total(), dict(reasons))


def unit_of_sums(plan: PrivacyPlan, dimension: int) -> float:
    """A power of two, in which a sum of all users' honest reports fits 64-bit integers.

    Sums of integers do not depend on the order of their terms, nor on who added which.
    """
    return 2.0 ** math.ceil(math.log2(largest_honest_norm(plan, dimension) * plan.users) - 62)


def expected_updates(plan: PrivacyPlan) -> float:
    """How many reports of a round carry an update on average: n*gamma."""
    return plan.users * plan.check_in_rate


def largest_honest_norm(plan: PrivacyPlan, dimension: int) -> float:
    """A norm that an honest report exceeds with probability below 1e-12.

    C + zC (sqrt(d) + sqrt(2 log 1e12)): the norm of N(0, I_d) is 1-Lipschitz, so it exceeds its
    mean (at most sqrt(d)) by t with probability at most exp(-t^2/2).
    """
    noise_norm = math.sqrt(dimension) + math.sqrt(2 * _LOG_FALSE_REJECT)
    return plan.clip_norm * (1 + plan.noise_multiplier * noise_norm)
