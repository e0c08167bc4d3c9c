"""The server's side of sums: unmasked to the bit, with its own noise, or found to be spoiled."""

import dataclasses
import math

import numpy as np
import pytest

from rounds import make_plan, words
from shufl.protocol.mechanisms import SeededRandomness
from shufl.protocol.mechanisms.summed_reports import (
    masked,
    new_seed,
    steps_of_sums,
    unit_of_sums,
    whole_noise,
    whole_update,
)
from shufl.server.aggregate import SpoiledBatch, aggregate_sum
from shufl.shuffler import RoundHeader, generate_key_pair, key_digest, seal
from shufl.shuffler.wire.node_seeds import seal_seed

PLAN = make_plan(
    users=50, check_in_rate=0.2, clip_norm=0.5, noise_multiplier=0.4, mixing="sum", cover=True,
    central_noise=0.7, accountant="sum-central",
)  # fmt: skip
PRIVATE, PUBLIC = generate_key_pair()
HEADER = RoundHeader("run", 3, "version", PLAN.digest(), key_digest(PUBLIC))
DIMENSION = 40
DRAWS = SeededRandomness(8).standard_normal(3, np.arange(1), DIMENSION)[0]
SERVERS = whole_noise(DRAWS, 0.7, 1)


def released(vectors, header=HEADER, key=PUBLIC, more=0, users=5):
    """What an honest shuffler hands over of vectors of so many users each, and noise of its own."""
    seeds = [new_seed() for _ in vectors]
    hidden = [masked(each, seed) for each, seed in zip(vectors, seeds, strict=True)]
    total = sum(np.frombuffer(each, dtype="<u4") for each in hidden) + np.uint32(more)
    return [
        total.astype("<u4").tobytes(),
        *sorted(seal_seed(seed, users, key, header) for seed in seeds),
    ]


def aggregate(parts, noise=DRAWS):
    return aggregate_sum((HEADER, iter(parts)), PRIVATE, PLAN, DIMENSION, noise, None)


@pytest.fixture
def vectors():
    random = np.random.default_rng(1)
    updates = [whole_update(random.standard_normal(DIMENSION), 0.5) for _ in range(10)]
    draws = words(10, DIMENSION)
    return [u + whole_noise(w, 0.4, 5) for u, w in zip(updates, draws, strict=True)]


def test_the_sum_is_that_of_what_nodes_and_server_have_added(vectors):
    """So is the length by which a missing noise is found: it tells no more than the model does."""
    result = aggregate(released(vectors))
    whole = sum(vectors) + SERVERS
    unit = unit_of_sums(0.5, DIMENSION)
    assert (result.estimate == (whole * (unit / 10.0)).astype(np.float32)).all()
    assert (result.reports, result.rejected) == (50, 0)
    length = np.linalg.norm(whole.astype(float)) / steps_of_sums(1.0, DIMENSION)
    assert result.length == pytest.approx(length)
    fewer = aggregate(released(vectors[:5], more=sum(vectors[5:]).astype(np.uint32)))
    np.testing.assert_allclose(fewer.estimate, 2 * result.estimate, rtol=1e-6)
    assert fewer.reports == 25


def test_a_sum_that_no_honest_users_make_is_spoiled(vectors):
    good = released(vectors)
    other_round = dataclasses.replace(HEADER, round=4)
    for spoiled, why in (
        ([], "must have 160 bytes, got 0"),
        ([good[0][:-4], *good[1:]], "must have 160 bytes, got 156"),
        ([good[0] + bytes(4), *good[1:]], "must have 160 bytes, got 164"),
        ([*good, good[1]], "a seed does not open: REPLAYED"),
        ([*good, b"nothing"], "a seed does not open"),
        ([*good, seal(bytes(32), PUBLIC, HEADER)], "not of version 2: nodes and server must have"),
        ([*good, seal(b"\3" + bytes(884), PUBLIC, HEADER)], "not of version 2"),
        ([*good, seal_seed(bytes(32), 0, PUBLIC, HEADER)], "stands for no user"),
        ([*good, seal_seed(bytes(32), 1, PUBLIC, HEADER)], "more users than the plan has, 50"),
        ([*good, seal_seed(bytes(32), 10**9, PUBLIC, HEADER)], "for more users than the plan has"),
        (good[:-1], "times as long as one of honest users"),
        (good[:1], "must stand for at least 1 users, got 0"),
        (released(vectors, header=other_round), "a seed does not open"),
        (released(vectors, key=generate_key_pair()[1]), "a seed does not open"),
        (released([*vectors[1:], np.full(DIMENSION, 10_000)]), "times as long"),
        (released(vectors, more=2**31), "times as long"),
    ):
        with pytest.raises(SpoiledBatch, match=why):
            aggregate(spoiled)
    assert aggregate(good)


def test_honest_sums_are_as_long_as_is_allowed_for_hardly_ever():
    """All updates alike, and all of them in; then noise alone."""
    limit = steps_of_sums(PLAN.longest_sum(50, DIMENSION), DIMENSION)
    same = whole_update(np.ones(DIMENSION), 0.5)
    assert 10 * np.linalg.norm(same) < limit
    multiplier = math.hypot(0.4 * math.sqrt(50), 0.7)
    noises = [whole_noise(each, multiplier, 1) for each in words(2000, DIMENSION)]
    assert max(np.linalg.norm(each) for each in noises) < 0.6 * limit
    assert limit < steps_of_sums(50 + 10 * 3, DIMENSION)


def test_whether_a_sum_is_refused_depends_on_the_servers_noise_too():
    """Else a shuffler, which knows its own, would put the sum next to the edge and see the rest."""
    edge = steps_of_sums(PLAN.longest_sum(50, DIMENSION), DIMENSION)
    vector = np.zeros(DIMENSION, dtype=np.int64)
    vector[0] = int(edge)
    refused = 0
    for draws in words(60, DIMENSION):
        try:
            aggregate(released([vector], users=50), noise=draws)
        except SpoiledBatch:
            refused += 1
    assert 0 < refused < 60
