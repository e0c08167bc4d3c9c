"""A canary through the real client, shuffler and server code: the claims hold, broken parts show.

Seeds are fixed, so the client's noise is too; only the release order and the sealing are random.
"""

import textwrap

import numpy as np
import pytest
from scipy import stats

from rounds import make_plan
from run_world import python_path
from shufl.accounting import make_accountant, mean_update_error
from shufl.accounting.mechanisms import SeededRandomness
from shufl.clients import Node
from shufl.shuffler import ShufflerProcess
from shufl.simulator.canary import canary_rounds, likelihood_score, projections, run_canary

DELTA = 0.3  # large, so that a few hundred rounds can say something


def plan(users, noise, rounds, adjacency="replace", rate=1.0):
    return make_plan(
        users=users,
        check_in_rate=rate,
        clip_norm=0.5,
        noise_multiplier=noise,
        rounds=rounds,
        delta=DELTA,
        target_epsilon=1.0,
        minimum_batch=1,
        adjacency=adjacency,
    )


def epsilon(plan, accountant):
    return make_accountant(accountant, plan.adjacency).compose(plan.event()).get_epsilon(DELTA)


def first_in_order(plan):
    """The adversary of a shuffler that does not shuffle: the canary's report is the first."""
    return lambda round: float(projections(round, plan)[0])


def total(round):
    """The adversary who has only what training uses: the mean, in the canary's direction."""
    return 0.0 if round.aggregate is None else float(round.aggregate.estimate @ [-1.0, 1.0])


class HalvedNoise(SeededRandomness):
    def standard_normal(self, round, users, size):
        return super().standard_normal(round, users, size) / 2


def node_with_halved_noise(settings):
    return Node(settings, HalvedNoise(settings.seed))


@pytest.fixture
def shuffler(memory_path):
    with ShufflerProcess(memory_path / "directory") as process:
        yield process


@pytest.fixture
def shuffler_that_keeps_order(memory_path, tmp_path, monkeypatch):
    """The real process, but the slots that reports are put into count up."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import secrets
            from shufl.shuffler.store.batch import Batch
            honest = Batch.__init__
            def lying(self, *arguments, **named):
                honest(self, *arguments, **named)
                self._free = self._free[::-1].copy()
            Batch.__init__ = lying
            secrets.randbelow = lambda limit: limit - 1  # the last of those that are free
        """)
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    with ShufflerProcess(memory_path / "directory") as process:
        yield process


@pytest.mark.slow
def test_a_correct_client_passes_and_halved_noise_is_caught(shuffler):
    audited = plan(users=1, noise=1.5, rounds=150)
    claim = epsilon(audited, "local")
    score = likelihood_score(audited, "minus")
    correct = run_canary(audited, "minus", shuffler, seed=1)
    assert np.std([projections(r, audited) for r in correct.present]) == pytest.approx(1.5, rel=0.2)
    assert correct.epsilon_lower_bound(score, DELTA) <= claim
    broken = run_canary(audited, "minus", shuffler, 1, node_with_halved_noise)
    assert broken.epsilon_lower_bound(score, DELTA) > claim


ORDERED = plan(users=40, noise=1.0, rounds=200)


@pytest.mark.slow
def test_no_adversary_beats_the_claims_behind_the_real_shuffler(shuffler):
    worlds = run_canary(ORDERED.replace(rounds=50), "minus", shuffler, seed=2)
    assert all(len(each.reports) == each.aggregate.reports == 40 for each in worlds.present)
    claims = {name: epsilon(ORDERED, name) for name in ("rdp", "crowd", "local")}
    for score in (likelihood_score(ORDERED, "minus"), first_in_order(ORDERED), total):
        assert worlds.epsilon_lower_bound(score, DELTA) <= min(claims.values())


@pytest.mark.slow
def test_a_shuffler_that_keeps_the_order_is_caught(shuffler_that_keeps_order):
    audited = plan(users=40, noise=1.1, rounds=200)  # three of eight seeds show it in these rounds
    worlds = run_canary(audited, "minus", shuffler_that_keeps_order, seed=3)
    claim = epsilon(audited, "rdp")
    assert worlds.epsilon_lower_bound(first_in_order(audited), DELTA) > claim
    assert worlds.epsilon_lower_bound(likelihood_score(audited, "minus"), DELTA) <= claim


@pytest.mark.slow
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


@pytest.mark.slow
def test_rounds_with_check_in_and_zero_out_stay_below_every_pairs_claim(shuffler):
    audited = plan(users=2, noise=0.6, rounds=80, adjacency="zero-out", rate=0.6)
    worlds = run_canary(audited, "minus", shuffler, seed=3)
    counts = [len(each.reports) for each in worlds.present]
    assert set(counts) == {0, 1, 2}  # 0: below the minimum, nothing was released
    for score in (likelihood_score(audited, "minus"), total):
        bound = worlds.epsilon_lower_bound(score, 0.1)
        claims = (make_accountant(name, "zero-out") for name in ("crowd", "local"))
        assert bound <= min(each.compose(audited.event()).get_epsilon(0.1) for each in claims)
