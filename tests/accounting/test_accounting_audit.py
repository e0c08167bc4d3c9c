"""The audit: ratios against brute force, bounds that hold, claims that fall and that stand."""

import itertools
import math

import numpy as np
import pytest
from accounting_oracles import gaussian_delta
from scipy import stats

from accounting import (
    FixedSizeShuffledGaussianDpEvent,
    ShuffledCheckInGaussianDpEvent,
    ShuffledGaussianDpEvent,
    make_accountant,
)
from accounting.audit import (
    audit_round,
    check_claim,
    clopper_pearson,
    delta_lower_bound,
    epsilon_lower_bound,
)
from accounting.audit_placements import (
    AttackedRound,
    Placement,
    make_placement,
    placement_by_hand,
)

COUNTEREXAMPLE = ShuffledCheckInGaussianDpEvent(10, 1.0, 2.0)
SPREAD_OUT = np.array([[0.6, 0.0], [0.0, -1.0], [-0.5, 0.5], [0.6, 0.0]])


def density(reports, users, event):
    """The defining mixture: every subset of users of the right size, every order."""
    k, z = len(reports), event.noise_multiplier

    def one(y, x):
        return stats.multivariate_normal.pdf(y, x, z * z * np.eye(2))

    ways = itertools.permutations(range(len(users)), k)
    return math.fsum(
        math.prod(one(y, users[i]) for y, i in zip(reports, way, strict=True)) for way in ways
    )


@pytest.mark.parametrize(
    "event",
    [
        ShuffledGaussianDpEvent(5, 0.7),
        ShuffledCheckInGaussianDpEvent(5, 0.6, 0.7),
        FixedSizeShuffledGaussianDpEvent(5, 3, 0.7),
    ],
)
@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
def test_the_score_is_the_likelihood_ratio_of_the_unordered_reports(event, adjacency):
    rng = np.random.default_rng(3)
    placement = placement_by_hand(SPREAD_OUT, adjacency)
    attacked = AttackedRound(event, placement)
    assert attacked.exact
    reports, present = attacked.draw(True, 6, rng)
    scores = attacked.score(reports, present)
    for y, there, score in zip(reports, present, scores, strict=True):
        worlds = (np.vstack([own, SPREAD_OUT]) for own in (placement.first, placement.second))
        first, second = (density(y[there], world, event) for world in worlds)
        assert score == pytest.approx(math.log(first / second), abs=1e-9)


def test_draws_have_the_events_counts_places_and_noise():
    rng = np.random.default_rng(4)
    placement = make_placement("opposite", "zero-out", 8)
    reports, present = AttackedRound(ShuffledGaussianDpEvent(8, 0.5), placement).draw(
        True, 40_000, rng
    )
    assert present.all()
    # Each slot holds user 1 an eighth of the time: mean (1 - 7)/8 at every slot.
    np.testing.assert_allclose(reports[:, :, 0].mean(axis=0), -0.75, atol=0.02)
    assert np.var(reports.sum(axis=1)) == pytest.approx(8 * 0.25, rel=0.05)
    fixed = AttackedRound(FixedSizeShuffledGaussianDpEvent(8, 3, 0.5), placement)
    assert (fixed.draw(False, 50, rng)[1].sum(axis=1) == 3).all()
    sampled = AttackedRound(ShuffledCheckInGaussianDpEvent(8, 0.3, 0.5), placement)
    assert sampled.draw(False, 20_000, rng)[1].mean() == pytest.approx(0.3, abs=0.01)


def test_a_round_with_blankets_is_not_attacked_as_one_without():
    event = ShuffledCheckInGaussianDpEvent(8, 0.3, 0.5, 4.0)
    with pytest.raises(ValueError, match=r"^shuffler blankets must be 0, got 4.0$"):
        AttackedRound(event, make_placement("opposite", "zero-out", 8))


def test_clopper_pearson_agrees_with_scipy():
    for k in (0, 1, 17, 49, 50):
        lower, upper = clopper_pearson(k, 50, 0.005)
        expected = stats.binomtest(k, 50).proportion_ci(0.99, "exact")
        assert (lower, upper) == (pytest.approx(expected.low), pytest.approx(expected.high))


@pytest.mark.parametrize("method", ["auto", "events"])
def test_the_bound_is_above_the_truth_no_more_often_than_stated(method):
    """One user is the Gaussian mechanism. 200 audits at 90%: above 32 has probability 0.004."""
    rng = np.random.default_rng(5)
    truth = float(gaussian_delta(1.0, 0.5))
    placement = make_placement("homogeneous", "zero-out", 1)
    arguments = (
        ShuffledGaussianDpEvent(1, 1.0),
        "zero-out",
        placement,
        0.5,
        2000,
        0.9,
        rng,
        method,
    )
    results = [audit_round(*arguments) for _ in range(200)]
    assert sum(result.delta_lower > truth for result in results) <= 32
    assert np.mean([result.delta_lower for result in results]) > 0.5 * truth
    assert np.mean([result.delta_estimate for result in results]) == pytest.approx(truth, rel=0.05)


def test_the_empirical_epsilon_is_above_the_truth_no_more_often_than_stated():
    rng = np.random.default_rng(6)
    truth = make_accountant("local", "zero-out").compose(ShuffledGaussianDpEvent(1, 1.0))
    epsilon = truth.get_epsilon(0.1)
    bounds = [
        epsilon_lower_bound(rng.normal(1.0, 1.0, 1000), rng.normal(0.0, 1.0, 1000), 0.1, 0.9)
        for _ in range(200)
    ]
    assert sum(bound > epsilon for bound in bounds) <= 32
    assert np.mean(bounds) > 0.3 * epsilon


def test_equal_worlds_show_nothing_and_a_worse_reverse_direction_is_found():
    rng = np.random.default_rng(7)
    same = rng.normal(size=(2, 2000))
    assert delta_lower_bound(*same, 0.1, 0.99) < 0.01
    silent, sometimes = np.zeros(2000), (rng.random(2000) < 0.3).astype(float)
    for first, second in ((sometimes, silent), (silent, -sometimes)):
        assert 0.2 < delta_lower_bound(first, second, 1.0, 0.99) < 0.3


def test_the_zero_out_counterexample_is_found():
    rng = np.random.default_rng(8)
    at = {
        name: audit_round(
            COUNTEREXAMPLE,
            "zero-out",
            make_placement(name, "zero-out", 10),
            0.3,
            100_000,
            0.99,
            rng,
        )
        for name in ("homogeneous", "opposite")
    }
    assert at["opposite"].delta_estimate == pytest.approx(0.0172, abs=5e-4)
    assert at["homogeneous"].delta_estimate == pytest.approx(0.0030, abs=2e-4)
    assert 0.015 < at["opposite"].delta_lower < 0.0172


def test_the_counterexample_is_found_by_events_alone():
    placement = make_placement("opposite", "zero-out", 10)
    rng = np.random.default_rng(9)
    result = audit_round(
        COUNTEREXAMPLE, "zero-out", placement, 0.3, 100_000, 0.99, rng, method="events"
    )
    assert result.method == "events"
    assert 0.0030 < result.delta_lower < 0.0175


@pytest.mark.parametrize(
    ("accountant", "violated"),
    [("rdp", True), ("theorem3", True), ("clones", False), ("local", False)],
)
def test_claims_of_the_homogeneous_pair_fall_for_every_pair_and_the_others_stand(
    accountant, violated
):
    rng = np.random.default_rng(10)
    fresh = make_accountant(accountant, "zero-out")
    check = check_claim(fresh, COUNTEREXAMPLE, 0.3, samples=20_000, rng=rng)
    assert check.violated is violated
    assert check.worst.placement == "opposite"
    assert check.covers == fresh.covers
    again = check_claim(fresh, COUNTEREXAMPLE, 0.3, ["homogeneous"], samples=20_000, rng=rng)
    assert not again.violated
    assert again.claimed_delta == check.claimed_delta


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_check_in_is_not_flagged_where_a_claim_holds(adjacency, epsilon):
    rng = np.random.default_rng(11)
    event = ShuffledCheckInGaussianDpEvent(12, 0.4, 1.5)
    for name in ("clones", "local"):
        check = check_claim(make_accountant(name, adjacency), event, epsilon, samples=4000, rng=rng)
        assert not check.violated
    pair = check_claim(
        make_accountant("rdp", adjacency), event, epsilon, ["homogeneous"], 20_000, rng=rng
    )
    assert not pair.violated


@pytest.mark.parametrize("epsilon, delta", [(0.0, 0.07919), (0.1, 0.0413), (0.5, 5.94e-4)])
def test_the_homogeneous_pairs_known_values_are_nearly_reached(epsilon, delta):
    """n = 7, σ = 2: the design's reference values, from 4·10⁶ draws and by FFT."""
    placement = make_placement("homogeneous", "zero-out", 7)
    arguments = (ShuffledGaussianDpEvent(7, 2.0), "zero-out", placement, epsilon)
    result = audit_round(*arguments, 200_000, rng=np.random.default_rng(15))
    assert result.delta_estimate == pytest.approx(delta, rel=0.06)
    assert 0.7 * delta < result.delta_lower < delta


def test_many_users_at_different_places_are_attacked_with_events():
    rng = np.random.default_rng(13)
    others = rng.normal(size=(39, 2))
    others /= 1.0 + np.linalg.norm(others, axis=1, keepdims=True)
    placement = placement_by_hand(others, "replace")
    result = audit_round(ShuffledGaussianDpEvent(40, 0.5), "replace", placement, 0.1, 4000, rng=rng)
    assert result.method == "events"
    local = make_accountant("local").compose(ShuffledGaussianDpEvent(40, 0.5))
    assert 0.05 < result.delta_lower < local.get_delta(0.1)


def test_reports_too_far_apart_for_floating_point_give_a_score():
    placement = make_placement("antipodal", "replace", 6)
    event = ShuffledGaussianDpEvent(6, 1e-3)
    result = audit_round(event, "replace", placement, 0.1, 2000, rng=np.random.default_rng(14))
    assert 0.95 < result.delta_lower <= 1.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_placement("nowhere", "replace", 3), "placement must be"),
        (lambda: make_placement("opposite", "add", 3), "adjacency must be"),
        (lambda: placement_by_hand([[2.0]], "replace"), "records must lie in the unit ball"),
        (lambda: placement_by_hand([[np.nan]], "replace"), "records must lie in the unit ball"),
        (lambda: placement_by_hand([1.0], "replace"), "must have shape"),
        (lambda: Placement("x", [1.0], [0.0, 0.0], [[0.0]]), "two vectors of one length"),
        (lambda: audit(event=ShuffledGaussianDpEvent(4, 1.0)), "placement must be of 4 users"),
        (lambda: audit(event=ShuffledGaussianDpEvent(3, 0.0)), "noise multiplier must be above"),
        (lambda: audit(event="round"), "event must be one of"),
        (lambda: audit(adjacency="zero-out"), "second record must be 0"),
        (lambda: audit(epsilon=-0.1), "epsilon must lie"),
        (lambda: audit(samples=1), "samples must be at least 2"),
        (lambda: audit(confidence=1.0), "confidence must lie"),
        (lambda: audit(method="luck"), "method must be"),
        (lambda: epsilon_lower_bound([1.0], [1.0], 0.1, 0.9), "at least 2 finite numbers"),
        (lambda: epsilon_lower_bound([1.0, np.nan], [1.0, 1.0], 0.1, 0.9), "finite numbers"),
        (lambda: epsilon_lower_bound([1.0, 2.0], [1.0, 1.0], 1.0, 0.9), "delta must lie"),
        (lambda: check_claim(spent(), COUNTEREXAMPLE, 0.1), "must have spent nothing"),
        (lambda: check_claim(make_accountant("local"), COUNTEREXAMPLE, 0.1, []), "at least one"),
    ],
)
def test_wrong_values_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def audit(**changes):
    arguments = {
        "event": ShuffledGaussianDpEvent(3, 1.0),
        "adjacency": "replace",
        "placement": make_placement("homogeneous", "replace", 3),
        "epsilon": 0.1,
        "samples": 10,
    }
    return audit_round(**{**arguments, **changes})


def spent():
    return make_accountant("local").compose(COUNTEREXAMPLE)
