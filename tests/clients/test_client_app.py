"""The Flower ClientApp against a real shuffler: constant replies, refusals, and exact reports."""

import functools

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

from client_world import DIMENSION, USERS, WIDTH, make_model, records, reply_content
from shuffler_world import ShufflerHere
from shufl.accounting import rounds_within_budget
from shufl.clients import ReportFailed, RoundRefused, SimulatedLedger, node_round
from shufl.clients import client_app as client_app
from shufl.learning import LocalTraining, local_update
from shufl.learning.user_update import user_updates
from shufl.protocol.mechanisms import SeededRandomness
from shufl.shuffler import IntakeClient, Verdict, generate_key_pair, report_length


@pytest.fixture
def ledger(tmp_path):
    return lambda node: SimulatedLedger(tmp_path / f"node-{node}.db")


def test_each_user_who_checked_in_sent_its_own_clipped_noisy_gradient(make_round):
    round = make_round().open()
    round.announce()
    expected = []
    for user in (1, 4, 7, 10):  # partition 1 of 3
        model, (features, labels) = make_model(), records(user)
        loss = nn.functional.cross_entropy(model(features), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        gradient = torch.cat([g.flatten() for g in gradients])
        gradient = gradient / max(1.0, float(gradient.norm()))
        (noise,) = SeededRandomness(3).standard_normal(1, np.array([user]), DIMENSION)
        expected.append(gradient.numpy() + 2.0 * noise)
    key = functools.partial(sorted, key=lambda report: float(report[0]))
    half_a_unit = round.plan.mechanism.unit(1) / 2
    np.testing.assert_allclose(key(round.released()), key(expected), atol=half_a_unit + 1e-5)


def of_several_sizes(user):
    features, labels = records(user)
    return features.repeat(1 + user % 2, 1), labels.repeat(1 + user % 2)


def of_several_records(user):
    return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(user)), torch.arange(5) % 2


EPOCHS = {"load_users": lambda: of_several_records, "training": LocalTraining("fedavg", 2, 0.5, 2)}


@pytest.mark.parametrize(
    ("changes", "most", "sizes"),
    [({}, 3, [3]), (EPOCHS, 15, [3]), ({"load_users": lambda: of_several_sizes}, 3, [])],
    ids=["gradients", "epochs", "of several sizes"],
)
def test_a_report_is_that_of_its_user_alone_whoever_is_computed_with_it(
    make_round, changes, most, sizes, monkeypatch
):
    """Of four users three at once, as many as have `most` records, and the last alone."""
    together = []

    def counted(model, features, *rest, **named):
        together.append(len(features))
        return user_updates(model, features, *rest, **named)

    monkeypatch.setattr("shufl.learning.node_updates.user_updates", counted)
    monkeypatch.setattr("shufl.learning.node_updates._ALONE", 1)  # few users would not pay
    monkeypatch.setattr("shufl.learning.node_updates._TOGETHER", most)
    round = make_round(**changes).open()
    round.announce()
    assert together == sizes
    settings, mechanism = round.settings, round.plan.mechanism
    users = np.array([1, 4, 7, 10])
    noises = SeededRandomness(3).standard_normal(1, users, DIMENSION)
    seeds = SeededRandomness(3).training_seeds(1, users).tolist()
    model, of_user, expected = settings.make_model().train(), settings.load_users(), []
    for user, noise, seed in zip(users.tolist(), noises, seeds, strict=True):
        update = local_update(model, *of_user(user), settings.training, seed)
        expected.append(mechanism.unit(DIMENSION) * mechanism.report(update, noise))
    key = functools.partial(sorted, key=lambda report: float(report[0]))
    a_unit = mechanism.unit(DIMENSION) * 1.001  # where rounding errors fall on two sides of a half
    np.testing.assert_allclose(key(round.released()), key(expected), rtol=0, atol=a_unit)


def test_the_reply_is_the_same_whether_or_not_anyone_checked_in(make_round):
    everyone = make_round().open()
    with_reports = reply_content(everyone.announce())
    assert len(everyone.released()) == 4
    nobody = make_round(rate=1e-9, run_id="nobody").open()
    without_reports = reply_content(nobody.announce())
    assert nobody.released() == []
    assert with_reports == without_reports == {"acknowledgement": {"received": True}}


@pytest.mark.parametrize("rate", [1e-9, 1.0])
def test_without_the_shuffler_a_round_is_refused_before_any_coin(make_round, rate, monkeypatch):
    monkeypatch.setattr(node_round, "IntakeClient", functools.partial(IntakeClient, timeout=0.1))
    with ShufflerHere() as gone:
        shufflers = ((gone.address, gone.submit),)
    round = make_round(rate=rate, shufflers=shufflers)
    with pytest.raises(RoundRefused, match="the shuffler does not confirm the round"):
        round.announce()


def test_system_entropy_gives_reports_no_seed_predicts(make_round, ledger):
    round = make_round(seed=None, ledger=ledger).open()
    round.announce()
    reports = round.released()
    assert len(reports) == 4
    for report in reports:
        for noise in SeededRandomness(3).standard_normal(1, np.arange(USERS), DIMENSION):
            # With this user's seeded noise taken off, only the clipped update would be left, and
            # what rounding adds: half a unit of 7.6e-4 in each of 82 entries.
            assert np.linalg.norm(report - 2.0 * noise) > 1.005


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "another"}, "run must be .*, got another"),
        ({"plan_digest": "0" * 64}, "privacy plan must be .*, got 0000"),
        ({"public_key": generate_key_pair()[1]}, "another key, model or plan for this round"),
        ({"public_key": 7}, "the round's announcement is malformed"),
        ({"more": 7}, "the round's announcement is malformed"),
        ({"round": 0}, "round must lie in 1 to [0-9]*, where the privacy budget ends, got 0"),
        ({"round": 2}, "the shuffler does not confirm the round: UNKNOWN_ROUND"),
        ({"round": 51}, "where the privacy budget ends, got 51"),
    ],
)
def test_a_round_that_was_not_agreed_is_refused_before_any_coin(make_round, changes, message):
    round = make_round().open()
    with pytest.raises(RoundRefused, match=message):
        round.announce(**changes)
    assert round.released() == []


def test_a_plan_that_is_another_is_refused_by_the_keys_that_differ(make_round):
    """The server, which has said its plan, is told them; what it says has no room for more."""
    round = make_round()
    own, other = round.plan, round.plan.replace(rounds=49, shuffler_blankets=7.0)
    digests = f"privacy plan must be {own.digest()[:12]}, got {other.digest()[:12]}"
    about = {"run_id": round.header.run_id, "plan_digest": other.digest()}
    keys = "privacy.rounds: 50 at the node, 49 at the server; "
    keys += "privacy.shuffler_blankets: 0.0 at the node, 7.0 at the server"
    for plan, told in (
        (other.to_json(), f"{digests}: {keys}"),
        ("", digests),
        ('{"users":', digests),
        ("{" * 4097, "the run's announcement is malformed"),
    ):
        with pytest.raises(RoundRefused) as refused:
            round.deliver("query", {"round": ConfigRecord(about | {"plan": plan})}, 1)
        assert str(refused.value) == told


def test_the_clients_own_accountant_ends_the_rounds(make_round, tmp_path):
    """Of a real node; that of a simulation is told."""
    round = make_round().deployed(tmp_path / "device.db")
    last = rounds_within_budget(round.plan)
    assert 1 <= last < round.plan.rounds
    with pytest.raises(RoundRefused, match=f"in 1 to {last}, where the privacy budget ends"):
        round.announce(round=last + 1)


@pytest.mark.parametrize("rate", [1e-9, 1.0])
@pytest.mark.parametrize("key", [b"", b"short", bytes(32)])
def test_a_key_that_nothing_can_be_sealed_to_is_refused_before_any_coin(make_round, key, rate):
    round = make_round(rate=rate)
    round.public_key = key
    with pytest.raises(RoundRefused, match="public key is not one to seal to"):
        round.announce()


@pytest.mark.parametrize("suite", ["x25519", "mlkem768-x25519"])
def test_a_node_seals_to_keys_of_its_own_suite_alone(make_round, suite):
    """Else a server could choose one that a later quantum computer opens."""
    round = make_round(sealing=suite).open()  # whose key is of x25519
    if suite == "x25519":
        assert not round.announce().has_error()
        return
    with pytest.raises(RoundRefused, match=f"the round's public key must be one of {suite}"):
        round.announce()


def without_records_of_7(user):
    if user == 7:
        raise ZeroDivisionError("no records")
    return records(user)


def test_a_user_that_fails_is_named(make_round):
    round = make_round(load_users=lambda: without_records_of_7).open()
    with pytest.raises(ReportFailed, match=r"round 1, user 7: .* ZeroDivisionError: no records"):
        round.announce()


def test_a_report_that_is_lost_is_told(make_round):
    """Somebody has reported as user 4 before."""
    round = make_round().open()
    ((address, credentials),) = round.settings.shufflers
    with IntakeClient(address, credentials) as intake:
        sealed = round.seal(bytes(report_length(round.dimension)))
        assert list(intake.submit(round.header, [(4, sealed)])) == [Verdict.ACCEPTED]
    with pytest.raises(ReportFailed, match=r"^round 1: a report was rejected: DUPLICATE$"):
        round.announce()


def test_a_process_keeps_the_node_of_its_last_run_and_closes_the_one_before(make_round):
    rounds = [make_round(run_id=name).open() for name in ("one", "other")]
    for round in rounds:
        round.announce()
        (kept,) = client_app._nodes.values()
        assert kept.settings.policy == round.settings.policy
        if round is rounds[0]:
            first = kept._intakes[0].connected()
    with pytest.raises(ValueError, match="closed channel"):
        first.unary_unary("/any/call")(b"")
