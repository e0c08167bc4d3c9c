"""A canary through the real client, shuffler and server code: the claims hold, broken parts show.

Seeds are fixed, so the client's noise is too; only the release order and the sealing are random.
"""

import numpy as np
import pytest
from scipy import stats

from canary_world import audited, claimed, delta_shown, node_with_halved_noise
from shufl.accounting import mean_update_error
from shufl.simulator.canary import canary_rounds, likelihood_score, projections, run_canary

pytestmark = pytest.mark.slow

EPSILON = 0.05  # small, so that a few hundred rounds can say something


def likelihood_shown(plan, worlds):
    return delta_shown(worlds, likelihood_score(plan, "minus"), EPSILON)


def first_shown(plan, worlds):
    """By the adversary of a shuffler that does not shuffle: the canary's report is the first."""

    def log_ratio(round):
        return 2 * projections(round, plan)[0] / plan.mechanism.noise_multiplier**2

    return delta_shown(worlds, log_ratio, EPSILON)


KEEPS_ORDER = """
import secrets
from shufl.shuffler.store.batch import Batch
honest = Batch.__init__
def lying(self, *arguments, **named):
    honest(self, *arguments, **named)
    self._free = self._free[::-1].copy()
Batch.__init__ = lying
secrets.randbelow = lambda limit: limit - 1  # the last of those that are free
"""
"""The slots that reports are put into count up."""


def test_a_correct_client_passes_and_halved_noise_is_caught(shuffler):
    plan = audited(users=1, noise_multiplier=1.0, rounds=80)
    claim = claimed(plan, "local", EPSILON)
    correct = run_canary(plan, "minus", shuffler, seed=1)
    assert np.std([projections(r, plan) for r in correct.present]) == pytest.approx(1.0, rel=0.2)
    assert 0 < likelihood_shown(plan, correct) <= claim
    broken = run_canary(plan, "minus", shuffler, 1, node_with_halved_noise)
    assert likelihood_shown(plan, broken) > claim


# Where the shuffler keeps the order, less than one of 10^7 audits by the first report shows no more
# than this plan claims; where it shuffles, less than one of 10^27 shows more.
ORDERED = audited(users=40, noise_multiplier=0.9, rounds=160)


def test_no_adversary_beats_the_claims_behind_the_real_shuffler(shuffler):
    worlds = run_canary(ORDERED.replace(rounds=50), "minus", shuffler, seed=2)
    assert all(len(each.reports) == each.aggregate.reports == 40 for each in worlds.present)
    assert first_shown(ORDERED, worlds) <= claimed(ORDERED, "pld", EPSILON)
    assert likelihood_shown(ORDERED, worlds) <= claimed(ORDERED, "pld", EPSILON)


@pytest.mark.nightly
def test_a_shuffler_that_keeps_the_order_is_caught(start_shuffler):
    worlds = run_canary(ORDERED, "minus", start_shuffler(KEEPS_ORDER), seed=3)
    assert first_shown(ORDERED, worlds) > claimed(ORDERED, "pld", EPSILON)
    assert likelihood_shown(ORDERED, worlds) <= claimed(ORDERED, "pld", EPSILON)


def test_reports_hold_an_update_and_its_noise_and_the_mean_is_as_exact_as_stated(shuffler):
    about = {"check_in_rate": 0.8, "noise_multiplier": 0.05, "accountant": "local"}
    plan = audited(users=40, rounds=60, **about)
    rounds = list(canary_rounds(plan, "minus", "minus", shuffler, seed=4))
    reports = np.concatenate([each.reports for each in rounds]) / plan.mechanism.clip_norm
    along, across = np.array([[-1.0, 1.0], [1.0, 1.0]]) @ reports.T / np.sqrt(2)
    for noise in (along + 1, across):
        assert stats.kstest(noise / 0.05, "norm").pvalue > 1e-4
    mean = np.array([1.0, -1.0]) / np.sqrt(2)
    errors = [each.aggregate.estimate / plan.mechanism.clip_norm - mean for each in rounds]
    expected = mean_update_error(plan, 2)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(expected, rel=0.35)
    assert np.mean(errors, axis=0) == pytest.approx(0.0, abs=5 * expected / np.sqrt(60))


@pytest.mark.nightly
def test_rounds_with_check_in_and_zero_out_stay_below_every_pairs_claim(shuffler):
    about = {"check_in_rate": 0.6, "noise_multiplier": 0.4, "adjacency": "zero-out"}
    plan = audited(users=2, rounds=120, **about)
    worlds = run_canary(plan, "minus", shuffler, seed=3)
    counts = [len(each.reports) for each in worlds.present]
    assert set(counts) == {0, 1, 2}  # 0: below the minimum, nothing was released
    claim = min(claimed(plan, name, EPSILON) for name in ("crowd", "local"))
    assert 0 < likelihood_shown(plan, worlds) <= claim
