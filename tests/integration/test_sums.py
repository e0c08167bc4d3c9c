"""Sums: on real shufflers and nodes, in both engines, end to end, and what each party can see."""

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from canary_world import audited, claimed, node_with_halved_noise
from client_world import DIMENSION, USERS, device_node, wait_for_rounds
from run_world import json_lines, model_of, only_folder, set_options, shufl, trained
from shufl.accounting.audit.attack import delta_lower_bound
from shufl.clients import DeviceLedger, DeviceLimits, Node, ReportFailed
from shufl.clients import client_app as client_app
from shufl.clients import node_round as node_module
from shufl.clients.device_ledger import RoundRefused
from shufl.learning import LocalTraining, local_update
from shufl.learning.config import load
from shufl.learning.parameters import sent
from shufl.protocol.mechanisms import GaussianMechanism, SeededRandomness, seed_of_shuffler
from shufl.protocol.mechanisms.summed_reports import (
    mask,
    signed,
    unit_of_sums,
    whole_noise,
    whole_update,
)
from shufl.protocol.validation import ConfigError
from shufl.results.experiment import prepare
from shufl.shuffler import IntakeClient, ReportOpener, ShufflerProcess, Verdict
from shufl.shuffler.wire.seed_reader import read_seed
from shufl.simulator.canary import canary_rounds, check_end_to_end, likelihood_score, run_canary
from shufl.simulator.engines.flower import FlowerEngine

SUM = {
    "mixing": "sum",
    "cover": True,
    "accountant": "sum-distributed",
    "central_noise": 0.5,
    "target_epsilon": 1e6,
}


@pytest.fixture
def summed_round(make_round):
    return lambda **named: make_round(**named).under(**SUM)


def total_of(round, authority=None):
    """The server's view: the unmasked sum, of how many users, and how many nodes it is of.

    Each must have signed its seed by a certificate of the `authority`, if there is one.
    """
    run_id, number = round.header.run_id, round.header.round
    senders = round.control.close_round(run_id, number).senders
    vector, *seeds = round.control.release(run_id, number)
    opener, total = ReportOpener(round.private_key), np.frombuffer(vector, dtype="<u4").copy()
    for sealed in seeds:
        seed = read_seed(opener.open(sealed, round.header), round.header, authority)
        assert seed.node == (round.settings.shufflers[0][1].name if authority else "")
        total -= mask(seed.seed, round.dimension)
    return signed(total), senders, len(seeds)


def update_of(round, user, seed=0):
    features, labels = round.settings.load_users()(user)
    model = round.settings.make_model()
    return whole_update(local_update(model, features, labels, LocalTraining(), seed), 1.0)


def expected_of(round, randomness, nodes):
    """The sum of the updates of those who check in, and of the noise of all nodes."""
    coins = randomness.check_ins(1, np.arange(USERS), round.plan.check_in_rate)
    whole = sum(update_of(round, user) for user in np.flatnonzero(coins).tolist())
    for users in nodes:
        (draws,) = randomness.standard_normal(1, users[:1], DIMENSION)
        whole = whole + whole_noise(draws, round.plan.mechanism.noise_multiplier, len(users))
    return whole


@pytest.mark.parametrize("central_noise", [0.0, 0.5])
def test_simulated_nodes_add_up_to_the_bit(summed_round, central_noise):
    """Three nodes of four users each; a node that is asked twice is in it once."""
    round = summed_round(rate=0.5).under(central_noise=central_noise).open()
    for node in range(3):
        assert not round.announce(node).has_error()
    with pytest.raises(ReportFailed, match="DUPLICATE"):
        round.announce(1)
    total, senders, nodes = total_of(round)
    assert (senders, nodes) == (USERS, 3)
    of_nodes = [np.arange(node, USERS, 3) for node in range(3)]
    # The shuffler draws its own noise from the entropy of this system.
    away = np.abs(total - expected_of(round, SeededRandomness(3), of_nodes)).max()
    assert (away > 0) == (central_noise > 0)
    assert away <= 8 * central_noise / unit_of_sums(1.0, DIMENSION)


def test_a_deployed_node_sends_one_message_of_all_its_users(summed_round, tmp_path):
    """Also of those who did not check in, whose updates are computed and left out."""
    round = summed_round(rate=0.5).under(central_noise=0.0).deployed(tmp_path / "device.db").open()
    node = device_node(round, randomness=SeededRandomness(5))
    try:
        round.begin(node)
        wait_for_rounds()
    finally:
        node.close()
    total, senders, nodes = total_of(round, round.settings.shufflers[0][1].authority)
    assert (senders, nodes) == (USERS, 1)
    away = total - expected_of(round, SeededRandomness(5), [np.arange(USERS)])
    assert np.abs(away).max() <= 1 * USERS  # a child process may add up in another order


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"noise": 0.005, "accountant": "sum-central"}, "noise_multiplier must be 0 or at"),
        ({"users": 10**12, "least_present": 10**12}, "at most 31 bits"),
    ],
)
def test_a_device_refuses_what_its_whole_numbers_cannot_carry(summed_round, tmp_path, changed, why):
    round = summed_round(rate=0.5).deployed(tmp_path / "device.db")
    given = {name: value for name, value in changed.items() if name != "noise"}
    mechanism = GaussianMechanism(noise_multiplier=changed.get("noise", 2.0))
    round.under(**given, mechanism=mechanism)
    with pytest.raises(ValueError, match=why):
        device_node(round)


@pytest.mark.parametrize("owners", ["blanket", "theorem3", "crowd"])
def test_an_owner_whose_accountant_has_no_price_for_sums_takes_no_part(
    summed_round, tmp_path, owners
):
    limits = DeviceLimits(most_epsilon=1e9, delta=1e-5, accountant=owners)
    ledger = DeviceLedger(tmp_path / "device.db", limits)
    round = summed_round(rate=0.5)
    with pytest.raises(RoundRefused, match="accountant of sums must be 'sum-distributed' or"):
        ledger.check("run", round.plan, 5)
    central = round.plan.replace(accountant="sum-central")
    limits = DeviceLimits(most_epsilon=1e9, delta=1e-5, accountant="sum-distributed")
    with pytest.raises(RoundRefused, match=r"counts on other users .* plan with accountant sum-c"):
        DeviceLedger(tmp_path / "other.db", limits).check("run", central, 5)
    for known in ("sum-distributed", "local"):
        limits = DeviceLimits(most_epsilon=1e9, delta=1e-5, accountant=known)
        DeviceLedger(tmp_path / f"{known}.db", limits).check("run", round.plan, 5)


SETTINGS = (
    "seed=5", "privacy.mixing=sum", "privacy.cover=true", "privacy.check_in_rate=0.5",
    "privacy.noise_multiplier=0.2", "privacy.central_noise=2", "privacy.shuffler_blankets=0",
    "privacy.accountant=sum-distributed", "privacy.target_epsilon=1e6", "privacy.delta=1e-3",
    "privacy.rounds=2", "privacy.minimum_batch=1", "data.users=300", "simulation.nodes=4",
    "shuffler.number=2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_run_on_flower_ends_with_the_model_that_whole_numbers_say(tmp_path):
    """Every coin, update and noise made again here: of nodes, of two shufflers, and the server."""
    result = shufl("run", "quickstart", *set_options(*SETTINGS), "--runs", tmp_path / "flower")
    assert result.returncode == 0, result.stderr
    experiment = prepare(load("quickstart", SETTINGS))
    assert experiment.config.shuffler.sealing == "mlkem768-x25519"
    said = prepare(load("quickstart", [*SETTINGS, "shuffler.sealing=x25519"]))
    assert said.config.shuffler.sealing == "x25519"
    assert "no report can be looked at, and one cheating node can spoil a round" in result.stdout
    folder = only_folder(tmp_path / "flower")
    rows = json_lines(folder / "metrics.jsonl")
    assert [(row["outcome"], row["users_present"]) for row in rows] == [("released", 300)] * 2
    model, users_of = experiment.make_model(), experiment.load_users()
    d, optimiser = experiment.parameters, experiment.optimiser
    stepper, randomness = optimiser.build(model), SeededRandomness(5)
    for number in (1, 2):
        coins = randomness.check_ins(number, np.arange(300), 0.5)
        estimates = []
        for shuffler in (0, 1):
            drawn = [SeededRandomness(5), SeededRandomness(seed_of_shuffler(5, shuffler))]
            whole = np.zeros(d, dtype=np.int64)
            for place, of in zip((shuffler, 0), drawn, strict=True):
                (draws,) = of.blanket_noise(number, np.array([place]), d)
                whole += whole_noise(draws, 2.0, 1)
            for first in (shuffler, shuffler + 2):
                users = np.arange(first, 300, 4)
                (draws,) = randomness.standard_normal(number, users[:1], d)
                whole += whole_noise(draws, 0.2, len(users))
                for user in users[coins[users]].tolist():
                    update = local_update(model, *users_of(user), experiment.local_training, 0)
                    whole += whole_update(update, 1.0)
            estimates.append((whole * (unit_of_sums(1.0, d) / 75)).astype(np.float32))
        estimate = np.average(estimates, axis=0, weights=[150, 150]).astype(np.float32)
        optimiser.step(stepper, model, estimate, number)
    ended = model_of(folder)
    for name, tensor in sent(model).items():
        torch.testing.assert_close(ended[name], tensor, rtol=0, atol=3e-3)  # a unit of a few users
    # The noise of each user, of both shufflers, and of the server once for each of them.
    assert experiment.plan.noise_of_sum(300, 2) == pytest.approx(np.sqrt(300 * 0.04 + 4 * 4.0))


@pytest.mark.slow
def test_the_vectorised_engine_adds_noise_of_that_size(tmp_path):
    """Without updates to speak of: a clip norm far below the noise."""
    chosen = "simulation.engine=vectorised", "simulation.noise=aggregate", "privacy.rounds=1"
    vectorised = load("quickstart", [*SETTINGS, *chosen, "privacy.clip_norm=1e-6"])
    experiment = prepare(vectorised)
    before = sent(experiment.make_model())
    after = model_of(trained(vectorised, tmp_path / "runs"))
    moved = torch.cat([(before[name] - after[name]).ravel() for name in before]).numpy()
    noise = experiment.plan.noise_of_sum(300, 2) / (0.5 * 300)
    assert moved.std() / 1e-6 == pytest.approx(noise, rel=0.15)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["privacy.cover=false"], "cover must be true with mixing sum, got false"),
        (["privacy.mechanism=ldp-sgd", "privacy.noise_multiplier=2"],
         "mechanism must be gaussian with mixing sum"),
        (["privacy.shuffler_blankets=5"], "shuffler_blankets must be 0 with mixing sum"),
        (["privacy.participation=allocation"], "participation must be check-in"),
        (["privacy.accountant=blanket"], "accountant of sums must be"),
        (["privacy.accountant=theorem3"], "accountant of sums must be"),
        (["training.aggregator=statistics:median"], "training.aggregator must be mean"),
        (["privacy.mixing=shuffle"], "central_noise must be 0 without mixing sum, got 2"),
        (["privacy.noise_multiplier=0.001"], r"noise_multiplier must be 0 or at least 0\.00725"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_sums_is_refused_in_one_line(changes, why):
    with pytest.raises(ConfigError, match=why) as refused:
        FlowerEngine(prepare(load("quickstart", [*SETTINGS, *changes])))
    assert "\n" not in str(refused.value)


def of_sums(**changes):
    """12 users on one node, of whom one has a record; without noise of the shuffler's."""
    given = {"mixing": "sum", "cover": True, "accountant": "sum-distributed", "clip_norm": 1.0}
    given |= {"noise_multiplier": 0.2, "check_in_rate": 0.5, "rounds": 300}
    return audited(users=12, **given | changes)


@pytest.mark.nightly
def test_an_audit_through_the_system_refutes_no_claim_on_sums():
    for changes in ({}, {"central_noise": 1.2, "accountant": "sum-central"}):
        checks = check_end_to_end(of_sums(**changes), 0.1, 300, 0.999999, 1)
        assert {check.accountant for check in checks} >= {"sum-distributed", "local"}
        for check in checks:
            assert not check.violated
            assert check.worst.delta_lower < check.claimed_delta


@pytest.mark.nightly  # by day test_canary.py finds missing noise, of reports
@pytest.mark.parametrize(("make_node", "violated"), [(node_with_halved_noise, True), (Node, False)])
def test_an_audit_through_the_system_finds_missing_noise(make_node, violated):
    plan = of_sums(adjacency="zero-out", noise_multiplier=0.15, check_in_rate=1.0, rounds=200)
    claim = claimed(plan, plan.accountant, 0.5)
    score = likelihood_score(plan, "zero")
    with ShufflerProcess() as shuffler:
        worlds = run_canary(plan, "zero", shuffler, 4, make_node)
    found = delta_lower_bound(*worlds.scores(score), 0.5, 0.999)
    assert (found > claim) == violated


@pytest.mark.nightly
def test_noise_of_those_who_checked_in_alone_shows_in_the_variance(monkeypatch):
    """By 150 rounds and two coordinates; with cover every user's noise is in a sum."""
    plan = of_sums(rounds=150)
    expected = 0.2**2 * 12

    class Saving(Node):
        def _message(self, users, updates, round):
            there = max(int(self._coins(users, round, 0).sum()), 1)
            with monkeypatch.context() as less:
                less.setattr(node_module, "whole_noise", lambda w, z, _: whole_noise(w, z, there))
                return super()._message(users, updates, round)

    with ShufflerProcess() as shuffler:
        for kind, honest in ((Node, True), (Saving, False)):
            rounds = canary_rounds(plan, "zero", "zero", shuffler, 5, kind)
            values = np.stack([each.reports[0] for each in rounds])
            off = len(values) * 2 * np.mean(values**2) / expected
            low, high = stats.chi2.interval(1 - 1e-6, 2 * len(values))
            assert (low < off < high) == honest


@pytest.mark.slow
def test_a_seed_that_is_used_again_shows_the_shuffler_the_difference_of_two_messages(
    summed_round, monkeypatch
):
    """A fresh seed for each message: what is left of two of them is as large as can be."""
    sent = []
    monkeypatch.setattr(IntakeClient, "submit", lambda self, header, reports, **_: keep(reports))

    def keep(reports):
        sent.extend(message for _, message in reports)
        return iter([Verdict.ACCEPTED])

    for seeds, hidden in ((None, True), (lambda: bytes(32), False)):
        sent.clear()
        if seeds is not None:
            monkeypatch.setattr(node_module, "new_seed", seeds)
        round = summed_round(rate=1.0).under(central_noise=0.0)
        run_id = f"{round.header.run_id}{hidden}"
        policy = dataclasses.replace(round.settings.policy, run_id=run_id)
        round.settings = dataclasses.replace(round.settings, policy=policy)
        round.header = dataclasses.replace(round.header, run_id=run_id)
        round.open()
        client_app._nodes.clear()
        for _ in range(2):
            round.announce(0)
            round.next(round.model)
        first, second = (np.frombuffer(each[: 4 * DIMENSION], dtype="<u4") for each in sent)
        left = np.abs(signed(first - second))
        assert (np.median(left) > 2**26) == hidden
