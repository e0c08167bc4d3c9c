"""Aggregation: sum / (n gamma) in any order; what no honest client could send is left out."""

import dataclasses

import numpy as np
import pytest

from accounting import PrivacyPlan
from server import aggregate_reports
from server.aggregate import largest_honest_norm
from shuffler import RoundHeader, encode_report, generate_key_pair, seal

PLAN = PrivacyPlan(
    users=50,
    check_in_rate=0.2,
    clip_norm=0.5,
    noise_multiplier=2.0,
    rounds=10,
    delta=0.02,
    target_epsilon=10.0,
    minimum_batch=1,
)
HEADER = RoundHeader("run", 3, "version", PLAN.digest())
DIMENSION = 40
PRIVATE, PUBLIC = generate_key_pair()


def sealed(reports, header=HEADER, key=PUBLIC):
    return [seal(encode_report(report), key, header) for report in reports]


def aggregate(batch, plan=PLAN):
    return aggregate_reports(batch, PRIVATE, HEADER, plan, DIMENSION)


@pytest.fixture
def reports():
    return np.random.default_rng(0).normal(0, 1.0, (12, DIMENSION)).astype(np.float32)


def test_the_estimate_is_the_sum_over_n_gamma(reports):
    result = aggregate(sealed(reports))
    assert (result.reports, result.rejected) == (12, 0)
    np.testing.assert_allclose(result.estimate, reports.astype(float).sum(0) / 10, atol=1e-6)


def test_the_estimate_does_not_depend_on_the_release_order(reports):
    batch = sealed(reports)
    first = aggregate(batch).estimate
    for seed in range(20):
        order = np.random.default_rng(seed).permutation(len(batch))
        assert (aggregate([batch[i] for i in order]).estimate == first).all()


def test_an_empty_batch_is_zero():
    result = aggregate([])
    assert (result.reports, result.rejected) == (0, 0)
    assert (result.estimate == 0).all()


def test_bad_reports_are_counted_and_left_out(reports):
    other_round = dataclasses.replace(HEADER, round=4)
    other_key = generate_key_pair()[1]
    infinite, nan, huge = reports[:3].copy()
    infinite[0], nan[0], huge[0] = np.inf, np.nan, 1e6
    good = sealed(reports)
    flipped = bytearray(good[0])
    flipped[-1] ^= 1
    bad = [
        *sealed([infinite, nan, huge]),
        *sealed(reports[:1], header=other_round),
        *sealed(reports[:1], key=other_key),
        *sealed([reports[0][:-1]]),
        bytes(flipped),
        good[0][:-1],
        b"",
    ]
    result = aggregate(bad + good + good[:2])  # two are there twice
    assert (result.reports, result.rejected) == (12, len(bad) + 2)
    assert result.reasons == {
        "not-finite": 2,
        "too-long": 1,
        "not-opened": 5,
        "wrong-length": 1,
        "replayed": 2,
    }
    assert (result.estimate == aggregate(good).estimate).all()


def test_honest_reports_pass_the_norm_limit():
    rng = np.random.default_rng(1)
    limit = largest_honest_norm(PLAN, DIMENSION)
    noise = rng.normal(0, 1.0, (100_000, DIMENSION))
    noise[:, 0] += PLAN.clip_norm
    norms = np.linalg.norm(noise, axis=1)
    assert norms.max() < limit < 3 * norms.max()
