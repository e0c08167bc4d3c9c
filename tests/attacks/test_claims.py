"""The matrix of claims in docs/threat-model.md: one party cheats, and whose ε still holds.

Each attack runs client, shuffler and server. The adversary compares two worlds, in which user 0,
the canary, holds opposite records; what it shows of δ(ε) is a lower bound at 99 %.
"""

import textwrap

import numpy as np
import pytest

from canary_world import delta_shown
from client_world import USERS, Round, reply_content
from rounds import make_plan
from run_world import python_path
from shuffler_world import ShufflerHere, refusal
from shufl.accounting import ACCOUNTANTS, make_accountant
from shufl.clients import Node, RoundRefused
from shufl.protocol.mechanisms import SeededRandomness
from shufl.shuffler import (
    ControlClient,
    Outcome,
    Refusal,
    ReportOpener,
    ShufflerProcess,
    generate_key_pair,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.sealing import ReportRejected
from shufl.simulator.canary import CanaryRound, likelihood_score, projections, run_canary

EPSILON = 0.5
ON_OTHERS = [name for name, each in ACCOUNTANTS.items() if each.counts_on_others]


def plan(users, noise, rounds, **changes):
    about = {"check_in_rate": 1.0, "clip_norm": 0.5, "delta": 0.1, "target_epsilon": 1.0}
    return make_plan(
        users=users, noise_multiplier=noise, rounds=rounds, minimum_batch=1, **about | changes
    )


def sums(users, noise, rounds, **changes):
    return plan(users, noise, rounds, mixing="sum", cover=True, **changes)


def claimed(plan, name):
    """δ(ε) of one round."""
    return make_accountant(name, plan.adjacency).compose(plan.event()).get_delta(EPSILON)


@pytest.fixture
def shuffler():
    with ShufflerHere(simulation_seed=9) as process:
        yield process


class NoNoise(SeededRandomness):
    def standard_normal(self, round, users, size):
        return np.zeros_like(super().standard_normal(round, users, size))


class BesideACheat:
    """The canary's node and that of a cheat, who adds no noise, for users from `honest` on."""

    honest = 1

    def __init__(self, settings):
        self._nodes = Node(settings), Node(settings, NoNoise(settings.policy.seed))

    def prepare(self, announced, model):
        return [node.prepare(announced, model) for node in self._nodes]

    def take_part(self, users, prepared):
        parts = users[: self.honest], users[self.honest :]
        for node, part, round in zip(self._nodes, parts, prepared, strict=True):
            node.take_part(part, round)


class BesideCheats(BesideACheat):
    honest = 2


def without_known(plan, score):
    """Scores what is left of a round when the cheat has taken out what it sent, here -C each."""
    minus = plan.mechanism.clip_norm * np.array([1.0, -1.0]) / np.sqrt(2)

    def of_the_rest(round):
        known = np.linalg.norm(round.reports - minus, axis=1) < 2 * plan.mechanism.unit(2)
        return score(CanaryRound(round.reports[~known], None))

    return of_the_rest


def of_sum(plan, asked, others, noise):
    """Scores the sum of a round, from its mean update: all that a step of the model shows.

    All `asked` users are divided by. The score is the likelihood ratio of a canary at C or -C
    beside `others` at -C, in so much noise.
    """

    def score(round):
        reports = round.aggregate.estimate[None] * asked
        (along,) = projections(CanaryRound(reports, None), plan)
        return 2 * (along + others) / noise**2

    return score


@pytest.mark.slow
def test_users_of_one_node_who_add_no_noise_leave_the_blankets_to_others(shuffler):
    """The others' owner takes its reports out of the batch, which is all that `crowd` counts on."""
    attacked = plan(3, 0.4, 50, shuffler_blankets=4.0, accountant="blanket")
    score = without_known(attacked, likelihood_score(attacked, "absent"))
    worlds = run_canary(attacked, "minus", shuffler, 4, BesideACheat)
    found = delta_shown(worlds, score, EPSILON)
    assert 0.3 * claimed(attacked, "blanket") < found <= claimed(attacked, "blanket")
    assert found <= claimed(attacked, "local")


@pytest.mark.slow
def test_users_who_add_no_noise_are_to_be_taken_off_the_crowd(shuffler):
    """What is claimed of all 20 users is refuted, what is claimed of the two honest is not."""
    attacked, honest = plan(20, 0.8, 40, accountant="crowd"), plan(2, 0.8, 40)
    score = without_known(attacked, likelihood_score(honest, "minus"))
    worlds = run_canary(attacked, "minus", shuffler, 4, BesideCheats)
    found = delta_shown(worlds, score, EPSILON)
    assert claimed(attacked, "pld") < found
    for name in ("theorem3", "rdp", "pld", "crowd"):
        assert found <= claimed(honest, name)


@pytest.mark.slow
@pytest.mark.nightly
def test_users_who_add_no_noise_are_to_be_taken_off_those_of_a_sum(shuffler):
    """The cheat's node sends -C for each of its users; the sum without them is what it looks at."""
    about = {"accountant": "sum-distributed"}
    attacked, honest = sums(20, 0.8, 150, **about), sums(2, 0.8, 150, **about)
    worlds = run_canary(attacked, "minus", shuffler, 4, BesideCheats)
    found = delta_shown(worlds, of_sum(attacked, 20, 19, noise=0.8 * np.sqrt(2)), EPSILON)
    assert claimed(attacked, "sum-distributed") < found <= claimed(honest, "sum-distributed")


@pytest.mark.slow
def test_users_who_add_no_noise_leave_that_of_the_shuffler_in_a_sum(shuffler):
    """The server is one of them, and adds none. What counts on the others' noise is refuted."""
    attacked = sums(20, 0.8, 150, central_noise=1.2, accountant="sum-central")
    worlds = run_canary(attacked, "minus", shuffler, 4, BesideCheats)
    noise = np.hypot(0.8 * np.sqrt(2), 1.2)
    found = delta_shown(worlds, of_sum(attacked, 20, 19, noise=noise), EPSILON)
    assert claimed(attacked, "sum-distributed") < found <= claimed(attacked, "sum-central")


@pytest.mark.slow
def test_a_server_that_asks_one_user_for_a_sum_has_the_shufflers_noise_in_it(shuffler):
    """It adds none of its own; nor does the user."""
    about = {"central_noise": 1.2, "accountant": "sum-central", "least_present": 1}
    attacked = sums(30, 0.0, 150, **about)
    worlds = run_canary(attacked, "absent", shuffler, 4)
    found = delta_shown(worlds, of_sum(attacked, 1, 0, noise=1.2), EPSILON)
    assert 0.2 * claimed(attacked, "sum-central") < found <= claimed(attacked, "sum-central")


@pytest.mark.parametrize("name", ON_OTHERS)
def test_a_server_that_asks_one_node_of_three_gets_nothing(make_round, name):
    """Nor does it if the network keeps the others from hearing of the round."""
    changes = {"mixing": "sum"} if name == "sum-distributed" else {}
    round = make_round(rate=0.5)
    round.under(cover=True, least_present=USERS, accountant=name, **changes).open()
    reply_content(round.announce(node=1))
    about = round.header.run_id, round.header.round
    assert round.control.close_round(*about).outcome is Outcome.BELOW_MINIMUM
    assert refusal(round.control.release, *about) is Refusal.BELOW_MINIMUM


@pytest.fixture
def shuffler_that_singles_out(memory_path, tmp_path, monkeypatch):
    """The real process, but it adds no blankets, and hands over the first sender's report alone."""
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            from shufl.protocol.mechanisms import SystemRandomness
            from shufl.shuffler.store.batch import Batch
            honest = Batch._take
            def lying(self, content):
                taken = self._taken.copy()
                honest(self, content)
                if taken.any():
                    self._taken[:] = taken
            Batch._take = lying
            SystemRandomness.number_of_blankets = lambda self, round, expected: 0
        """)
    )
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path))
    with ShufflerProcess(memory_path / "directory") as process:
        yield process


@pytest.mark.slow
@pytest.mark.nightly
def test_a_shuffler_that_hands_over_one_report_alone_reads_it_in_the_model(
    shuffler_that_singles_out,
):
    """Every node gets the next model, and so may whoever runs the shuffler. `local` is left."""
    attacked = plan(4, 0.8, 80, shuffler_blankets=8.0, accountant="blanket")
    worlds = run_canary(attacked, "minus", shuffler_that_singles_out, seed=4)
    found = delta_shown(worlds, of_sum(attacked, 4, 0, noise=0.8), EPSILON)
    assert claimed(attacked, "blanket") < found <= claimed(attacked, "local")


@pytest.mark.slow
@pytest.mark.nightly
def test_models_show_no_more_than_is_claimed_of_reports(shuffler):
    """By the sum of all reports, which is what a model is made of."""
    attacked = plan(3, 0.6, 100, shuffler_blankets=2.0, accountant="blanket")
    worlds = run_canary(attacked, "minus", shuffler, seed=4)
    found = delta_shown(worlds, of_sum(attacked, 3, 2, noise=0.6 * np.sqrt(5)), EPSILON)
    for name in ("theorem3", "rdp", "pld", "blanket", "crowd", "local"):
        assert 0 < found <= claimed(attacked, name)


@pytest.mark.slow
@pytest.mark.nightly
def test_models_show_no_more_than_is_claimed_of_sums(shuffler):
    """The server's own noise is left out, which leaves them less than they have."""
    attacked = sums(3, 0.6, 150, central_noise=1.2, accountant="sum-central")
    worlds = run_canary(attacked, "minus", shuffler, seed=4)
    noise = np.hypot(0.6 * np.sqrt(3), 1.2)
    found = delta_shown(worlds, of_sum(attacked, 3, 2, noise=noise), EPSILON)
    for name in ("sum-central", "sum-distributed", "local"):
        assert 0 < found <= claimed(attacked, name)


@pytest.mark.parametrize("mixing", ["shuffle", "sum"])
def test_an_authority_that_is_its_own_server_reads_nothing(request, mixing):
    """It signs a certificate in the server's name, releases a round, and opens one of its own."""
    authority = Authority.create()
    server, double = (authority.issue(Role.SERVER, "server") for _ in range(2))
    with (
        ShufflerHere(authority=authority) as shuffler,
        ControlClient(shuffler.address, server) as control,
        ControlClient(shuffler.address, double) as cheat,
    ):
        run = request.node.name
        round = Round(shuffler.address, shuffler.submit, control, run)
        round.under(cover=True, mixing=mixing, accountant="local").open()
        reply_content(round.announce())
        cheat.close_round(run, 1)
        batch = list(cheat.release(run, 1))
        assert batch
        private_key, public_key = generate_key_pair()
        for sealed in batch if mixing == "shuffle" else batch[1:]:
            with pytest.raises(ReportRejected):
                ReportOpener(private_key).open(sealed, round.header)
        cheat.end_round(run, 1)
        cheat.open_round(run, 2, round.header.model_digest, public_key)
        with pytest.raises(RoundRefused, match="the shuffler was given another key, model or plan"):
            round.announce(round=2)
