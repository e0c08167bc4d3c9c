"""The spectral filter: the mean where nobody attacks, and what it leaves out where some do."""

import numpy as np
import pytest

from rounds import make_plan
from shufl.server import Mean, SpectralFilter, aggregate_reports, aggregators
from shufl.shuffler import RoundHeader, encode_report, generate_key_pair, key_digest, seal

REPORTS, DIMENSION, CLIP, NOISE = 400, 100, 0.5, 2.0
PLAN = make_plan(
    users=2 * REPORTS, check_in_rate=0.5, clip_norm=CLIP, noise_multiplier=NOISE, rounds=10,
    delta=1e-3, target_epsilon=10.0, minimum_batch=1,
)  # fmt: skip
SIGNAL = np.zeros(DIMENSION)
SIGNAL[0] = CLIP  # every honest user's update: as far along one direction as it can be


def honest(random, count):
    noise = random.standard_normal((count, DIMENSION))
    return np.stack([PLAN.mechanism.report(SIGNAL, row) for row in noise])


def against(directions, count):
    """The longest reports that the norm test lets by, shared out among some directions."""
    longest = 0.999 * PLAN.mechanism.largest_honest_norm(DIMENSION)
    chosen = np.arange(count) % len(directions)
    return np.rint(longest * np.asarray(directions)[chosen]).astype(np.int16)


def spread(random):
    """Minus the signal in its direction, as long in all other entries together."""
    direction = np.full(DIMENSION, (DIMENSION - 1) ** -0.5)
    direction[0] = -1
    return direction / np.linalg.norm(direction) * random.choice([-1, 1], DIMENSION)


def released(random, *reports):
    return random.permutation(np.concatenate(reports))


def estimate(aggregator, reports):
    made = aggregator(PLAN, DIMENSION)
    for report in reports:
        made.add(report.astype(np.float64))
    return made.result(PLAN.users), made.left_out


def test_without_attackers_it_leaves_out_hardly_any_report_and_is_unbiased():
    """Blankets are among the reports: they change the noise, and not the mean."""
    random = np.random.default_rng(0)
    repetitions, errors, lost = 60, [], 0
    for _ in range(repetitions):
        blankets = honest(random, 40) - np.rint(SIGNAL / PLAN.mechanism.unit(1)).astype(np.int16)
        reports = released(random, honest(random, REPORTS), blankets)
        found, left_out = estimate(SpectralFilter, reports)
        errors.append(found - SIGNAL)
        lost += left_out
        np.testing.assert_allclose(
            found, estimate(Mean, reports)[0], atol=left_out * 12 * NOISE * CLIP / REPORTS + 1e-6
        )
    # Along one direction it is 0.0027 at most; each of a few rounds may look for another.
    share = lost / (repetitions * (REPORTS + 40))
    assert share < 0.005
    deviation = NOISE * CLIP * np.sqrt((REPORTS + 40) / repetitions) / REPORTS
    # Its own share of the signal is lost with a report; 5 standard deviations over 100 entries.
    assert (np.abs(np.mean(errors, axis=0)) < 5 * deviation + 3 * share * CLIP).all()


@pytest.mark.parametrize("attackers", [8, 20, 40])
@pytest.mark.parametrize("directions", [1, 4])
def test_the_longest_reports_along_a_few_directions_are_left_out(attackers, directions):
    random = np.random.default_rng(attackers + directions)
    poisoned = against([spread(random) for _ in range(directions)], attackers)
    users = honest(random, REPORTS - attackers)
    reports = released(random, users, poisoned)
    found, left_out = estimate(SpectralFilter, reports)
    wanted = estimate(Mean, users)[0]
    mean = estimate(Mean, reports)[0]
    assert attackers <= left_out <= attackers + 6
    assert np.linalg.norm(found - wanted) < 0.25 * np.linalg.norm(mean - wanted)


def test_the_filter_cannot_be_turned_against_honest_reports():
    """Attackers opposite to all honest users, who lie as far along their direction as any can."""
    random = np.random.default_rng(5)
    poisoned = against([-SIGNAL / CLIP], 60)
    reports = released(random, honest(random, REPORTS), poisoned)
    _, left_out = estimate(SpectralFilter, reports)
    assert 60 <= left_out <= 60 + 10  # of 400 honest ones


def test_a_shared_part_that_noise_could_explain_stays_in():
    """What the filter does not claim: honest noise about a point just within its limit."""
    random = np.random.default_rng(6)
    hidden = honest(random, 40)
    hidden[:, 1] += int(2 * NOISE * CLIP / PLAN.mechanism.unit(1))
    _, left_out = estimate(SpectralFilter, released(random, honest(random, 360), hidden))
    assert left_out < 20


def test_many_reports_are_filtered_block_by_block(monkeypatch):
    """Blocks of 100: after the first 100 of each 200 the rest, here 150 at the end."""
    monkeypatch.setattr(aggregators, "_MOST_REPORTS", 100)
    random = np.random.default_rng(7)
    poisoned = against([spread(random)], 50)
    reports = released(random, honest(random, 500), poisoned)
    blocks = np.split(reports, [100, 200, 300, 400])
    found, left_out = estimate(SpectralFilter, reports)
    monkeypatch.setattr(aggregators, "_MOST_REPORTS", 1000)
    alone = [estimate(SpectralFilter, block) for block in blocks]
    np.testing.assert_allclose(found, sum(each for each, _ in alone), rtol=1e-5, atol=1e-7)
    assert left_out == sum(count for _, count in alone)
    assert 50 <= left_out <= 60


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_few_reports_have_their_mean(count):
    reports = honest(np.random.default_rng(8), count) if count else []
    found, left_out = estimate(SpectralFilter, reports)
    assert left_out == 0
    assert (found == estimate(Mean, reports)[0]).all()


def test_reports_with_hardly_any_noise_are_no_outliers():
    plan = make_plan(
        users=20, check_in_rate=0.5, noise_multiplier=1e-9, rounds=1, delta=0.02,
        target_epsilon=1e6, minimum_batch=1,
    )  # fmt: skip
    made = SpectralFilter(plan, 3)
    report = plan.mechanism.report(np.array([1.0, 0.0, 0.0]), np.zeros(3))
    for _ in range(10):
        made.add(report.astype(np.float64))
    np.testing.assert_allclose(made.result(20), [1.0, 0.0, 0.0], atol=1e-4)
    assert made.left_out == 0


def test_poisoned_reports_are_rejected_and_counted_by_reason():
    """Sealed as by anyone who holds a credential: numbers that are none, huge ones, a direction."""
    private_key, public_key = generate_key_pair()
    header = RoundHeader("run", 1, "model", PLAN.digest(), key_digest(public_key))
    random = np.random.default_rng(9)
    not_a_number = np.full(DIMENSION, np.nan, dtype=np.float16).tobytes()
    huge = encode_report(np.full(DIMENSION, 2**15 - 1, dtype=np.int16))
    users = honest(random, REPORTS)
    reports = released(random, users, against([spread(random)], 20))
    payloads = [not_a_number, huge, *map(encode_report, reports)]
    batch = [seal(payload, public_key, header) for payload in payloads]
    made = SpectralFilter(PLAN, DIMENSION)
    result = aggregate_reports(batch, private_key, header, made, PLAN.users)
    assert result.reasons == {"too-long": 2, "outlier": made.left_out}
    assert 20 <= made.left_out < 25
    assert result.reports + result.rejected == len(batch)
    assert result.rejected == 2 + made.left_out
