"""From a released batch to an estimate of the mean update: open, validate, aggregate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shufl.accounting import PrivacyPlan
from shufl.protocol.mechanisms.summed_reports import (
    mask,
    signed,
    steps_of_sums,
    unit_of_sums,
    whole_noise,
)
from shufl.shuffler import (
    PrivateKey,
    RejectReason,
    ReportOpener,
    ReportRejected,
    RoundHeader,
    decode_report,
    empty_report,
)
from shufl.shuffler.wire.seed_reader import read_seed


class Aggregator(Protocol):
    """Makes an estimate of the mean update of one batch's reports; `Mean` is the usual one.

    It may have an attribute `left_out`: how many of the reports that it was given do not count.
    """

    def add(self, report: np.ndarray) -> None:
        """Takes the next report of the release: whole numbers of units, float64 of shape (d,).

        The array is the aggregator's to keep.
        """

    def result(self, users: int) -> np.ndarray:
        """The estimate, float32 of shape (d,); `users` is how many users flipped coins."""


MakeAggregator = Callable[[PrivacyPlan, int], Aggregator]
"""Makes the aggregator of one batch, from the plan and the model's number of parameters."""


class Mean:
    """The estimate of the mean update: the reports' sum over gamma times the users there.

    Dividing by the expected number of users' reports, not the realised one, keeps the estimate
    unbiased whatever the coins, and says nothing of how many reports are blankets. The sum is one
    of integers below 2^53, so it does not depend on the (random) order of the release.

    Attributes:
        total: what was added so far, whole numbers of units of shape (d,).
    """

    def __init__(self, plan: PrivacyPlan, dimension: int):
        """Begins a round of a plan, whose model has `dimension` parameters."""
        self.plan, self.dimension = plan, dimension
        self.total = np.zeros(dimension)

    def add(self, report: np.ndarray) -> None:
        """Adds a report, whole numbers of units of shape (d,), or the sum of several."""
        self.total += report

    def result(self, users: int) -> np.ndarray:
        """The estimate, float32 of shape (d,); `users` is how many users flipped coins."""
        scale = self.plan.mechanism.unit(self.dimension) / (users * self.plan.check_in_rate)
        return (self.total * scale).astype(np.float32)


@dataclass(frozen=True)
class Aggregate:
    """The estimate of the mean update and how many reports it holds.

    Attributes:
        estimate: float32 of shape (d,).
        reports: how many count: users' reports and shufflers' blankets alike, and no empty ones. Of
            a sum, how many users are in it.
        rejected: how many did not open, no honest client could have sent, or do not count.
        reasons: how many of them for which reason (`RejectReason`).
        length: of a sum with all its noise, in clip norms.
    """

    estimate: np.ndarray
    reports: int
    rejected: int
    reasons: dict[str, int]
    length: float = 0.0


@dataclass(frozen=True)
class Expected:
    """Which nodes' messages a shuffler may have, by what the server knows itself.

    Attributes:
        users: for how many users each node speaks, by the name in its certificate.
        authority: PEM of the certificates that have issued the nodes'.
    """

    users: dict[str, int]
    authority: bytes


class SpoiledBatch(RuntimeError):
    """What a shuffler has released is not what honest parties make.

    Attributes:
        reports: of a sum whose length was looked at, how many users are in it.
    """

    def __init__(self, why: str, reports: int = 0):
        super().__init__(why)
        self.reports = reports


def aggregate_sum(
    batch: tuple[RoundHeader, Iterable[bytes]],
    private_key: PrivateKey,
    plan: PrivacyPlan,
    dimension: int,
    noise: np.ndarray,
    expected: Expected | None,
) -> Aggregate:
    """Unmasks the sum that a shuffler released, adds the server's own noise, and scales it.

    The shuffler is not believed: how many users are in the sum is what the nodes have sealed. The
    noise is added modulo 2^32, before anything else is done with the sum, so that whatever vector
    the shuffler has made up, the result is a function of some users' sum and the noise.

    `noise` are draws of a `Randomness`, of shape (d,). `expected` is None in a simulation, where
    nodes sign nothing.

    Raises:
        SpoiledBatch: there is no vector of d numbers, a seed does not open or is not one of an
            expected node, the seeds stand for fewer users than the plan asks for or more than it
            has, or the sum is longer than one of honest users is.
    """
    header, parts = batch[0], iter(batch[1])
    vector = next(parts, b"")
    if len(vector) != 4 * dimension:
        raise SpoiledBatch(f"a sum must have {4 * dimension} bytes, got {len(vector)}")
    total = np.frombuffer(vector, dtype="<u4").astype(np.uint32)
    users, opener = 0, ReportOpener(private_key)
    left, authority = (dict(expected.users), expected.authority) if expected else ({}, None)
    try:
        for sealed in parts:
            seed = read_seed(opener.open(sealed, header), header, authority)
            if expected and seed.users > (most := left.pop(seed.node, 0)):
                raise SpoiledBatch(
                    f"a seed of {seed.node} stands for {seed.users} users, {most} are allowed"
                )
            users += seed.users
            if users > plan.users:  # also ends a release without end
                raise SpoiledBatch(f"seeds stand for more users than the plan has, {plan.users}")
            total -= mask(seed.seed, dimension)
    except ReportRejected as rejected:
        raise SpoiledBatch(f"a seed does not open: {rejected.reason.name}") from None
    except ValueError as error:
        raise SpoiledBatch(f"a seed is refused: {error}") from None
    if users < plan.fewest_present:
        raise SpoiledBatch(
            f"seeds must stand for at least {plan.fewest_present} users, got {users}"
        )
    total += whole_noise(noise, plan.central_noise, 1).astype(np.uint32)
    whole = signed(total)
    # Of the sum with all its noise: everybody sees by the model whether it was refused.
    length = math.sqrt(np.einsum("i,i->", *[whole.astype(np.float64)] * 2))
    if length > (most_steps := steps_of_sums(plan.longest_sum(users, dimension), dimension)):
        raise SpoiledBatch(
            f"the sum is {length / most_steps:.3g} times as long as one of honest users",
            users,
        )
    unit = unit_of_sums(plan.mechanism.clip_norm, dimension)
    estimate = (whole * (unit / (users * plan.check_in_rate))).astype(np.float32)
    return Aggregate(estimate, users, 0, {}, length / steps_of_sums(1.0, dimension))


def aggregate_reports(
    batch: tuple[RoundHeader, Iterable[bytes]],
    private_key: PrivateKey,
    plan: PrivacyPlan,
    dimension: int,
    aggregator: Aggregator,
    users: int,
) -> Aggregate:
    """Opens, validates and aggregates a shuffler's batch, one report after the other.

    A report that was sealed under another header than its batch's does not open. `aggregator` is of
    this round alone, and `users` is how many were present.

    Raises:
        SpoiledBatch: a batch has more reports than the plan has users and blankets.
        ValueError: the aggregator has left more out than it was given.
        Exception: what the aggregator raises.
    """
    empty = empty_report(dimension) if plan.cover else None
    limit = plan.mechanism.largest_honest_norm(dimension)
    opener, header, reports = ReportOpener(private_key), batch[0], 0
    reasons: Counter[str] = Counter()
    most = plan.users + plan.most_blankets
    for number, sealed in enumerate(batch[1]):
        if number == most:
            raise SpoiledBatch(f"a batch must have at most {most} reports, and has more")
        try:
            payload = opener.open(sealed, header)
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
    if left_out := getattr(aggregator, "left_out", 0):
        if not 0 < left_out <= reports:
            raise ValueError(f"left_out must lie in 0 to {reports}, the reports, got {left_out}")
        reasons[RejectReason.LEFT_OUT] += left_out
    return Aggregate(estimate, reports - left_out, reasons.total(), dict(reasons))
