"""A canary through the real client, shuffler and server code: the claims hold, broken parts show.

Seeds are fixed, so the client's noise is too; only the release order and the sealing are random.
"""

import numpy as np
import pytest
from scipy import stats

from canary_world import delta_shown, node_with_halved_noise
from rounds import make_plan
from shufl.accounting import make_accountant, mean_update_error
from shufl.simulator.canary import canary_rounds, likelihood_score, projections, run_canary

pytestmark = pytest.mark.slow

EPSILON = 0.05  # small, so that a few hundred rounds can say something


def plan(users, noise, rounds, adjacency="replace", rate=1.0):
    return make_plan(
        users=users,
        check_in_rate=rate,
        clip_norm=0.5,
        noise_multiplier=noise,
        rounds=rounds,
        delta=0.3,
        target_epsilon=1.0,
        minimum_batch=1,
        adjacency=adjacency,
    )


def claimed(plan, accountant):
    return make_accountant(accountant, plan.adjacency).compose(plan.event()).get_delta(EPSILON)


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
    audited = plan(users=1, noise=1.5, rounds=160)
    claim = claimed(audited, "local")
    correct = run_canary(audited, "minus", shuffler, seed=1)
    assert np.std([projections(r, audited) for r in correct.present]) == pytest.approx(1.5, rel=0.2)
    assert 0 < likelihood_shown(audited, correct) <= claim
    broken = run_canary(audited, "minus", shuffler, 1, node_with_halved_noise)
    assert likelihood_shown(audited, broken) > claim


# Where the shuffler keeps the order, less than one of 10^7 audits by the first report shows no more
# than this plan claims; where it shuffles, less than one of 10^27 shows more.
ORDERED = plan(users=40, noise=0.9, rounds=160)


def test_no_adversary_beats_the_claims_behind_the_real_shuffler(shuffler):
    worlds = run_canary(ORDERED, "minus", shuffler, seed=2)
    assert all(len(each.reports) == each.aggregate.reports == 40 for each in worlds.present)
    assert first_shown(ORDERED, worlds) <= claimed(ORDERED, "pld")
    assert likelihood_shown(ORDERED, worlds) <= claimed(ORDERED, "pld")


@pytest.mark.nightly
def test_a_shuffler_that_keeps_the_order_is_caught(start_shuffler):
    worlds = run_canary(ORDERED, "minus", start_shuffler(KEEPS_ORDER), seed=3)
    assert first_shown(ORDERED, worlds) > claimed(ORDERED, "pld")
    assert likelihood_shown(ORDERED, worlds) <= claimed(ORDERED, "pld")


def test_reports_hold_an_update_and_its_noise_and_the_mean_is_as_exact_as_stated(shuffler):
    audited = plan(users=40, noise=0.05, rounds=60, rate=0.8)
    audited = audited.replace(accountant="local", target_epsilon=1e300)
    rounds = list(canary_rounds(audited, "minus", "minus", shuffler, seed=4))
    reports = np.concatenate([each.reports for each in rounds]) / audited.mechanism.clip_norm
    along, across = np.array([[-1.0, 1.0], [1.0, 1.0]]) @ reports.T / np.sqrt(2)
    for noise in (along + 1, across):
        assert stats.kstest(noise / 0.05, "norm").pvalue > 1e-4
    mean = np.array([1.0, -1.0]) / np.sqrt(2)
    errors = [each.aggregate.estimate / audited.mechanism.clip_norm - mean for each in rounds]
    expected = mean_update_error(audited, 2)
    assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(expected, rel=0.35)
    assert np.mean(errors, axis=0) == pytest.approx(0.0, abs=5 * expected / np.sqrt(60))


@pytest.mark.nightly
def test_rounds_with_check_in_and_zero_out_stay_below_every_pairs_claim(shuffler):
    audited = plan(users=2, noise=0.4, rounds=120, adjacency="zero-out", rate=0.6)
    worlds = run_canary(audited, "minus", shuffler, seed=3)
    counts = [len(each.reports) for each in worlds.present]
    assert set(counts) == {0, 1, 2}  # 0: below the minimum, nothing was released
    claim = min(claimed(audited, name) for name in ("crowd", "local"))
    assert 0 < likelihood_shown(audited, worlds) <= claim
