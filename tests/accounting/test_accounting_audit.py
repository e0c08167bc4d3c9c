"""The audit: ratios against brute force, bounds that hold, claims that fall and that stand."""

import itertools
import math

import attrs
import numpy as np
import pytest
from accounting_oracles import gaussian_delta
from scipy import stats

from nights import by_night
from rounds import check_in, everyone, fixed_size
from shufl.accounting import CrowdAccountant, make_accountant
from shufl.accounting.audit.adversary import AttackedRound, Placement, make_placement
from shufl.accounting.audit.attack import (
    audit_round,
    check_claims,
    clopper_pearson,
    delta_lower_bound,
)
from shufl.protocol import CheckIn, GaussianMechanism, RandomisedResponse, Summed

pytestmark = pytest.mark.slow


def placement_by_hand(others, adjacency):
    """User 1 holds e₁, and under D′ -e₁ or 0."""
    held = np.asarray(others, np.float64)
    first = np.eye(1, held.shape[-1])[0]
    return Placement("by hand", first, -first if adjacency == "replace" else 0.0 * first, held)


def check_claim(accountant, *arguments, **options):
    return check_claims([accountant], *arguments, **options)[0]


COUNTEREXAMPLE = check_in(10, 1.0, 2.0)
SOME_ABSENT = make_placement("absent", "replace", 8)
AT_ONE_PLACE = np.tile([0.6, 0.3], (4, 1))


def density(reports, users, event):
    """The defining mixture: some of the users, in every order, and blankets for the rest."""
    z, total = event.mechanism.noise_multiplier, 0.0
    rate, blankets = event.chance, event.blankets

    own = [[math.prod(stats.norm.pdf(y, x, z)) for x in users] for y in reports]
    blanket = [blankets * math.prod(stats.norm.pdf(y, 0.0, z)) for y in reports]
    for count in range(min(len(reports), len(users)) + 1):
        chance = rate**count * (1 - rate) ** (len(users) - count)
        for heard in itertools.combinations(range(len(reports)), count):
            free = math.prod(blanket[j] for j in range(len(reports)) if j not in heard)
            if chance * free == 0.0:
                continue
            for way in itertools.permutations(range(len(users)), count):
                given = math.prod(own[j][i] for j, i in zip(heard, way, strict=True))
                total += chance * free * given
    return total


@pytest.mark.parametrize("adjacency", ["replace", "zero-out"])
@pytest.mark.parametrize(
    ("event", "others"),
    [
        *((each, AT_ONE_PLACE) for each in (everyone(5, 0.7), check_in(5, 0.6, 0.7))),
        (fixed_size(5, 3, 0.7), AT_ONE_PLACE),
        *((check_in(5, rate, 0.7, 2.0), None) for rate in (0.6, 1.0)),
        (check_in(5, 0.6, 0.7), None),
    ],
)
def test_the_score_is_the_likelihood_ratio_of_the_unordered_reports(event, others, adjacency):
    """Of a user among others at one place, or of a lone one among blankets."""
    placement = make_placement("absent", adjacency, 5)
    if others is not None:
        placement = placement_by_hand(others, adjacency)
    attacked = AttackedRound(event, placement)
    assert attacked.exact
    reports, present = attacked.draw(True, 9, np.random.default_rng(3))
    scores = attacked.score(reports, present)
    for y, there, score in zip(reports, present, scores, strict=True):
        worlds = (np.vstack([own, placement.others]) for own in (placement.first, placement.second))
        first, second = (density(y[there], world, event) for world in worlds)
        assert score == pytest.approx(math.log(first / second), abs=1e-9)


def test_draws_have_the_events_counts_places_and_noise():
    rng = np.random.default_rng(4)
    placement = make_placement("opposite", "zero-out", 8)
    reports, present = AttackedRound(everyone(8, 0.5), placement).draw(True, 40_000, rng)
    assert present.all()
    np.testing.assert_allclose(reports[:, :, 0].mean(axis=0), [1] + 7 * [-1], atol=0.02)
    assert np.var(reports.sum(axis=1)) == pytest.approx(8 * 0.25, rel=0.05)
    fixed = AttackedRound(fixed_size(8, 3, 0.5), placement)
    _, present = fixed.draw(False, 20_000, rng)
    assert (present.sum(axis=1) == 3).all()
    np.testing.assert_allclose(present.mean(axis=0), 3 / 8, atol=0.02)
    sampled = AttackedRound(check_in(8, 0.3, 0.5), placement)
    assert sampled.draw(False, 20_000, rng)[1].mean() == pytest.approx(0.3, abs=0.01)
    blankets = AttackedRound(check_in(8, 0.3, 0.5, 4.0), placement)
    reports, present = blankets.draw(True, 20_000, rng)
    assert present[:, :8].mean() == pytest.approx(0.3, abs=0.01)
    added = present[:, 8:].sum(axis=1)
    assert added.mean() == pytest.approx(4.0, abs=0.1)
    assert added.var() == pytest.approx(4.0, abs=0.25)
    assert reports[:, 8:][present[:, 8:]].mean() == pytest.approx(0.0, abs=0.02)
    absent = AttackedRound(fixed_size(8, 2, 0.5), SOME_ABSENT)
    reports, present = absent.draw(True, 20_000, rng)
    assert present.shape == (20_000, 1)
    assert present.mean() == pytest.approx(2 / 8, abs=0.02)


def test_blankets_hide_a_lone_user():
    """γ = 1. From blankets alone each world differs by χ² = e^{1/z²}/λ, the variance of a mean of
    Poisson many: δ(0), their total variation, is at most the root."""
    rng = np.random.default_rng(16)

    def audited(blankets, method="auto", samples=20_000):
        event = check_in(9, 1.0, 2.0, blankets)
        return audit_round(event, "replace", SOME_ABSENT, 0.0, samples, 0.99, rng, method)

    alone, few, many = audited(0.0), audited(4.0), audited(400.0, samples=3000)
    assert many.delta_lower < math.sqrt(math.exp(1 / 4.0) / 400.0)
    assert many.delta_estimate < few.delta_estimate < alone.delta_estimate
    assert 0.8 * few.delta_estimate < audited(4.0, "events").delta_lower < few.delta_estimate
    assert few.delta_lower > 0.8 * few.delta_estimate


SPREAD = np.random.default_rng(13).normal(size=(39, 2))
SPREAD /= 1.0 + np.linalg.norm(SPREAD, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("event", "placement", "epsilon", "least"),
    [
        (check_in(40, 1.0, 1.0, 20.0), make_placement("antipodal", "replace", 40), 0.0, 0.0),
        (check_in(40, 1.0, 1.0, 20.0), make_placement("equilateral", "replace", 40), 0.0, 0.0),
        (everyone(40, 0.5), placement_by_hand(SPREAD, "replace"), 0.1, 0.05),
    ],
    ids=lambda it: getattr(it, "name", None),
)
def test_many_users_are_attacked_by_events(event, placement, epsilon, least):
    rng = np.random.default_rng(17)
    result = audit_round(event, "replace", placement, epsilon, 4000, rng=rng)
    assert result.method == "events"
    local = make_accountant("local").compose(event).get_delta(epsilon)
    assert least < result.delta_lower < (local / 2 if event.blankets else local)


class Overconfident(CrowdAccountant):
    """Claims of a user alone what holds among others."""

    name = "overconfident"
    counts_on_others = False


class OfMoreNoise(CrowdAccountant):
    """Prices rounds as if they had half as much noise again."""

    def _delta(self, counts, epsilon):
        (event,) = counts
        noise = 1.5 * event.mechanism.noise_multiplier
        more = attrs.evolve(event, mechanism=GaussianMechanism(noise_multiplier=noise))
        return super()._delta({more: 1}, epsilon)


def test_a_claim_that_ignores_blankets_is_attacked_without_them():
    """Among blankets the attack shows 0.10 only, less than is claimed."""
    event = check_in(6, 1.0, 1.0, 3.0)
    wrong = OfMoreNoise(make_accountant("crowd", "zero-out").neighboring_relation)
    right, blanket = (make_accountant(name, "zero-out") for name in ("crowd", "blanket"))
    rng = np.random.default_rng(1)
    checks = check_claims([wrong, right, blanket], event, 0.3, samples=20_000, rng=rng)
    assert [check.violated for check in checks] == [True, False, False]
    assert checks[0].worst == checks[1].worst and checks[0].worst.method == "ratios"
    assert checks[0].worst.delta_lower > 0.2 > checks[2].worst.delta_lower


def test_a_claim_that_needs_the_others_falls_where_they_are_absent():
    event = check_in(300, 1.0, 2.0)
    rng = np.random.default_rng(18)
    relation = make_accountant("local").neighboring_relation
    claims = [Overconfident(relation), make_accountant("crowd"), make_accountant("local")]
    refuted, honest, local = check_claims(claims, event, 0.3, ["absent", "opposite"], 2000, rng=rng)
    assert refuted.violated and refuted.worst.placement == "absent"
    assert [result.placement for result in honest.results] == ["opposite"]
    assert not honest.violated
    assert not local.violated and len(local.results) == 2
    assert local.worst.delta_estimate == pytest.approx(local.claimed_delta, abs=0.02)


def test_the_claim_of_a_device_that_flips_coins_is_met_by_a_lone_user():
    """`local` prices a coin of the device's own at γ times the report: no more, and hardly less."""
    rng = np.random.default_rng(19)
    claims = [make_accountant("local")]
    (local,) = check_claims(claims, check_in(5, 0.4, 2.0), 0.3, ["absent"], 20_000, rng=rng)
    assert not local.violated
    assert local.claimed_delta == pytest.approx(0.4 * float(gaussian_delta(1.0, 0.3)), rel=1e-3)
    assert 0.9 * local.claimed_delta < local.worst.delta_lower


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
    about = everyone(1, 1.0), "zero-out", placement, 0.5, 2000, 0.9, rng, method
    results = [audit_round(*about) for _ in range(200)]
    assert sum(result.delta_lower > truth for result in results) <= 32
    assert np.mean([result.delta_lower for result in results]) > 0.5 * truth
    assert np.mean([result.delta_estimate for result in results]) == pytest.approx(truth, rel=0.05)


def test_equal_worlds_show_nothing_and_a_worse_reverse_direction_is_found():
    rng = np.random.default_rng(7)
    same = rng.normal(size=(2, 2000))
    assert delta_lower_bound(*same, 0.1, 0.99) < 0.01
    silent, sometimes = np.zeros(2000), (rng.random(2000) < 0.3).astype(float)
    for first, second in ((sometimes, silent), (silent, -sometimes)):
        assert 0.2 < delta_lower_bound(first, second, 1.0, 0.99) < 0.3


@pytest.mark.parametrize(
    ("name", "method", "least", "estimate"),
    [
        ("opposite", "auto", 0.015, 0.0172),
        ("opposite", "events", 0.0030, 0.0172),
        ("homogeneous", "auto", 0.0, 0.0030),
    ],
)
def test_the_zero_out_counterexample_is_found(name, method, least, estimate):
    placement, rng = make_placement(name, "zero-out", 10), np.random.default_rng(8)
    about = COUNTEREXAMPLE, "zero-out", placement, 0.3, 100_000, 0.99, rng
    result = audit_round(*about, method=method)
    assert result.method == {"auto": "ratios"}.get(method, method)
    assert least < result.delta_lower < estimate * 1.02
    if method == "auto":
        assert result.delta_estimate == pytest.approx(estimate, rel=0.06)


@pytest.mark.parametrize(
    ("accountant", "violated"),
    [("rdp", True), ("theorem3", True), ("crowd", False), ("local", False)],
)
def test_claims_of_the_homogeneous_pair_fall_for_every_pair_and_the_others_stand(
    accountant, violated
):
    rng = np.random.default_rng(10)
    fresh = make_accountant(accountant, "zero-out")
    check = check_claim(fresh, COUNTEREXAMPLE, 0.3, samples=8000, rng=rng)
    assert check.violated is violated
    assert check.worst.placement == ("absent" if accountant == "local" else "opposite")
    assert (check.covers, check.holds_for) == (fresh.covers, fresh.holds_for)
    again = check_claim(fresh, COUNTEREXAMPLE, 0.3, ["homogeneous"], samples=8000, rng=rng)
    assert not again.violated
    assert again.claimed_delta == check.claimed_delta


@pytest.mark.parametrize(("adjacency", "epsilon"), [("replace", 0.0), ("zero-out", 0.5)])
def test_check_in_is_not_flagged_where_a_claim_holds(adjacency, epsilon):
    rng = np.random.default_rng(11)
    event = check_in(12, 0.4, 1.5)
    for name in ("crowd", "local"):
        check = check_claim(make_accountant(name, adjacency), event, epsilon, samples=4000, rng=rng)
        assert not check.violated
    pair = check_claim(
        make_accountant("rdp", adjacency), event, epsilon, ["homogeneous"], 20_000, rng=rng
    )
    assert not pair.violated


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [(0.5, 5.94e-4), *by_night((0.0, 0.07919), (0.1, 0.0413))],
)
def test_the_homogeneous_pairs_known_values_are_nearly_reached(epsilon, delta):
    """n = 7, σ = 2: the design's reference values, from 4·10⁶ draws and by FFT."""
    placement = make_placement("homogeneous", "zero-out", 7)
    arguments = (everyone(7, 2.0), "zero-out", placement, epsilon)
    result = audit_round(*arguments, 200_000, rng=np.random.default_rng(15))
    assert result.delta_estimate == pytest.approx(delta, rel=0.06)
    assert 0.7 * delta < result.delta_lower < delta


def test_reports_too_far_apart_for_floating_point_give_a_score():
    placement = make_placement("antipodal", "replace", 6)
    event = everyone(6, 1e-3)
    result = audit_round(event, "replace", placement, 0.1, 2000, rng=np.random.default_rng(14))
    assert 0.95 < result.delta_lower <= 1.0


SUM = Summed(3, CheckIn(1.0), everyone(3, 1.0).mechanism, central_noise=1.0)
RESPONSE = RandomisedResponse(categories=2, local_epsilon=1.0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_placement("nowhere", "replace", 3), "placement must be"),
        (lambda: make_placement("opposite", "add", 3), "adjacency must be"),
        (lambda: placement_by_hand([[2.0]], "replace"), "records must lie in the unit ball"),
        (lambda: placement_by_hand([[np.nan]], "replace"), "records must lie in the unit ball"),
        (lambda: Placement("x", [1.0], [0.0], [1.0]), "must have shape"),
        (lambda: Placement("x", [1.0], [0.0, 0.0], [[0.0]]), "two vectors of one length"),
        (lambda: audit(event=everyone(4, 1.0)), "placement must be of 4 users"),
        (lambda: audit(event=everyone(3, 0.0)), "noise multiplier must be above"),
        (lambda: audit(event=attrs.evolve(fixed_size(3, 2, 1.0), blankets=1.0)), "got fixed size"),
        (lambda: audit(event=SUM), "mixing shuffle, got gaussian and sum"),
        (
            lambda: audit(event=attrs.evolve(everyone(3, 1.0), mechanism=RESPONSE)),
            "mechanism must be gaussian, .* got randomised-response",
        ),
        (lambda: audit(adjacency="zero-out"), "second record must be 0"),
        (lambda: audit(epsilon=-0.1), "epsilon must lie"),
        (lambda: audit(samples=1), "samples must be at least 2"),
        (lambda: audit(confidence=1.0), "confidence must lie"),
        (lambda: audit(method="luck"), "method must be"),
        (lambda: delta_lower_bound([1.0], [1.0], 0.1, 0.9), "at least 2 finite numbers"),
        (lambda: delta_lower_bound([1.0, np.nan], [1.0, 1.0], 0.1, 0.9), "finite numbers"),
        (lambda: check_claim(spent(), COUNTEREXAMPLE, 0.1), "must have spent nothing"),
        (lambda: check_claim(make_accountant("local"), COUNTEREXAMPLE, 0.1, []), "at least one"),
        (
            lambda: check_claim(make_accountant("rdp"), COUNTEREXAMPLE, 0.1, ["absent"]),
            "must not be absent only: rdp counts on the other users",
        ),
        (lambda: check_claims([], COUNTEREXAMPLE, 0.1), "must be of one adjacency, got 0"),
    ],
)
def test_wrong_values_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def audit(**changes):
    arguments = {
        "event": everyone(3, 1.0),
        "adjacency": "replace",
        "placement": make_placement("homogeneous", "replace", 3),
        "epsilon": 0.1,
        "samples": 10,
    }
    return audit_round(**{**arguments, **changes})


def spent():
    return make_accountant("local").compose(COUNTEREXAMPLE)
