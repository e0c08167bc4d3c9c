"""Aggregation: sum / (n gamma) in any order; what no honest client could send is left out."""

import dataclasses

import numpy as np
import pytest

from rounds import make_plan
from shufl.server import Mean, aggregate_reports
from shufl.shuffler import RoundHeader, encode_report, generate_key_pair, key_digest, seal

PLAN = make_plan(users=50, check_in_rate=0.2, clip_norm=0.5, noise_multiplier=2.0)
PRIVATE, PUBLIC = generate_key_pair()
HEADER = RoundHeader("run", 3, "version", PLAN.digest(), key_digest(PUBLIC))
DIMENSION = 40


def sealed(reports, header=HEADER, key=PUBLIC):
    return [seal(encode_report(report), key, header) for report in reports]


def aggregate(batch, users=50):
    return aggregate_reports(
        (HEADER, batch), PRIVATE, PLAN, DIMENSION, Mean(PLAN, DIMENSION), users
    )


@pytest.fixture
def reports():
    noise = np.random.default_rng(0).standard_normal((12, DIMENSION))
    return np.stack([PLAN.mechanism.report(np.zeros(DIMENSION), row) for row in noise])


def test_the_estimate_is_the_sum_over_n_gamma(reports):
    result = aggregate(sealed(reports))
    assert (result.reports, result.rejected) == (12, 0)
    mean = PLAN.mechanism.unit(1) * reports.astype(float).sum(0) / 10
    np.testing.assert_allclose(result.estimate, mean, rtol=1e-6)


def test_the_sum_is_divided_by_the_users_who_were_present(reports):
    batch = sealed(reports)
    all_there, a_third = aggregate(batch).estimate, aggregate(batch, users=17).estimate
    np.testing.assert_allclose(a_third, all_there * 50 / 17, rtol=1e-6)


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
    huge = np.full(DIMENSION, 32767, np.int16)
    good = sealed(reports)
    flipped = bytearray(good[0])
    flipped[-1] ^= 1
    bad = [
        *sealed([huge, -huge]),
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
        "too-long": 2,
        "not-opened": 5,
        "wrong-length": 1,
        "replayed": 2,
    }
    assert (result.estimate == aggregate(good).estimate).all()


def test_a_report_counts_in_the_batch_of_its_own_shuffler_alone_and_once(reports):
    """Two shufflers drew two nonces for one round; the key is the same."""
    headers = [dataclasses.replace(HEADER, nonce=bytes([number]) * 16) for number in (1, 2)]
    halves = [
        sealed(half, header)
        for half, header in zip((reports[:5], reports[5:]), headers, strict=True)
    ]
    expected = aggregate(sealed(reports[5:])).estimate
    for extra, reasons in (([], {}), (halves[0], {"not-opened": 5}), (halves[1], {"replayed": 7})):
        batch, mean = (headers[1], [*halves[1], *extra]), Mean(PLAN, DIMENSION)
        result = aggregate_reports(batch, PRIVATE, PLAN, DIMENSION, mean, 50)
        assert (result.reports, result.reasons) == (7, reasons)
        assert (result.estimate == expected).all()
