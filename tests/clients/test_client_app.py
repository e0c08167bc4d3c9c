"""The Flower ClientApp against a real shuffler: constant replies, refusals, and exact reports."""

import dataclasses
import functools
import time

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from rounds import make_plan
from torch import nn

from accounting import rounds_within_budget
from accounting.mechanisms import SeededRandomness
from clients import ClientSettings, LocalTraining, ReportFailed, RoundRefused, make_client_app
from shuffler import (
    ControlClient,
    Outcome,
    RoundHeader,
    ShufflerProcess,
    decode_report,
    generate_key_pair,
    key_digest,
    model_version,
    open_report,
    report_length,
    sealed_length,
)

USERS, WIDTH = 12, 40
DIMENSION = 2 * WIDTH + 2


def plan(rate):
    return make_plan(
        users=USERS,
        check_in_rate=rate,
        clip_norm=1.0,
        noise_multiplier=2.0,
        rounds=50,
        delta=1 / USERS,
        target_epsilon=3.0,
        minimum_batch=1,
    )


def make_model():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 2)


def records(user):
    return torch.full((1, WIDTH), float(user)), torch.tensor([user % 2])


def load_users():
    return records


def broken_users():
    def fail(user):
        raise ZeroDivisionError("no records")

    return fail


class Round:
    """A run on a real shuffler, and the messages its server would send."""

    def __init__(self, address, credentials, control, run_id, rate=1.0, **changes):
        self.control = control
        self.plan = plan(rate)
        self.settings = ClientSettings(
            run_id=run_id,
            plan=self.plan,
            make_model=make_model,
            load_users=load_users,
            training=LocalTraining(),
            shufflers=((address, credentials),),
            seed=3,
        )
        self.settings = dataclasses.replace(self.settings, **changes)
        self.model = ArrayRecord(make_model().state_dict())
        self.private_key, self.public_key = generate_key_pair()
        self.header = RoundHeader(
            run_id,
            1,
            model_version(array.data for array in self.model.values()),
            self.plan.digest(),
            key_digest(self.public_key),
        )
        self.context = Context(
            run_id=1,
            node_id=7,
            node_config={"partition-id": 1, "num-partitions": 3},
            state=RecordDict(),
            run_config={},
        )

    def open(self):
        length = sealed_length(report_length(DIMENSION))
        self.control.create_run(self.settings.run_id, self.plan.to_json().encode(), length)
        self.control.open_round(self.header.run_id, 1, self.header.model_version, self.public_key)
        return self

    def announce(self, **changes):
        header = dataclasses.replace(self.header, **changes)
        content = RecordDict(
            {
                "model": self.model,
                "round": ConfigRecord({**header.to_dict(), "public_key": self.public_key}),
            }
        )
        return self._deliver(Message(content, dst_node_id=7, message_type="train"))

    def _deliver(self, message):
        return make_client_app(self.settings)(message, self.context)

    def released(self):
        """The server's view: the opened reports, in float64."""
        if self.control.close_round(self.header.run_id, 1) is Outcome.BELOW_MINIMUM:
            return []
        return [
            self.plan.mechanism.unit
            * decode_report(open_report(sealed, self.private_key, self.header), DIMENSION)
            for sealed in self.control.release(self.header.run_id, 1)
        ]


@pytest.fixture(scope="module", autouse=True)
def flower_task():
    """Messages are made inside a task, as Flower's runtime does."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 7


@pytest.fixture(scope="module")
def shuffler():
    with ShufflerProcess() as process:
        yield process


@pytest.fixture
def make_round(shuffler, request):
    control = ControlClient(shuffler.address, shuffler.control)
    name = request.node.name[:200]
    yield functools.partial(Round, shuffler.address, shuffler.submit, control, run_id=name)
    control.close()


def reply_content(reply):
    assert not reply.has_error()
    return {name: dict(record) for name, record in reply.content.items()}


def test_each_user_who_checked_in_sent_its_own_clipped_noisy_gradient(make_round):
    round = make_round(rate=1.0).open()
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
    half_a_unit = round.plan.mechanism.unit / 2
    np.testing.assert_allclose(key(round.released()), key(expected), atol=half_a_unit + 1e-5)


def test_the_reply_is_the_same_whether_or_not_anyone_checked_in(make_round):
    everyone = make_round(rate=1.0).open()
    with_reports = reply_content(everyone.announce())
    assert len(everyone.released()) == 4
    nobody = make_round(rate=1e-9)
    nobody = Round(
        *nobody.settings.shufflers[0],
        nobody.control,
        nobody.settings.run_id + "-nobody",
        1e-9,
    ).open()
    without_reports = reply_content(nobody.announce())
    assert nobody.released() == []
    assert with_reports == without_reports == {"acknowledgement": {"received": True}}


def test_the_reply_is_the_same_when_the_shuffler_is_gone(make_round):
    with ShufflerProcess() as gone:
        shufflers = ((gone.address, gone.submit),)
    round = make_round(rate=1.0, shufflers=shufflers)
    assert reply_content(round.announce()) == {"acknowledgement": {"received": True}}


def test_a_node_reports_at_its_own_of_several_shufflers(make_round):
    address, credentials, _ = make_round.args
    with ShufflerProcess() as gone:
        elsewhere = (gone.address, gone.submit)
    shufflers = (elsewhere, (address, credentials))
    round = make_round(rate=1.0, shufflers=shufflers).open()  # of partition 1
    round.announce()
    assert len(round.released()) == 4


def test_system_entropy_gives_reports_no_seed_predicts(make_round):
    round = make_round(rate=1.0, seed=None).open()
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
        ({"model_version": "0" * 64}, "the model received is not the one"),
        ({"key_digest": "0" * 64}, "the key received is not the one"),
        ({"round": 0}, "round must be above 0, the last answered, got 0"),
        ({"round": 51}, "where the privacy budget ends, got 51"),
    ],
)
def test_a_round_that_was_not_agreed_is_refused_before_any_coin(make_round, changes, message):
    round = make_round(rate=1.0).open()
    with pytest.raises(RoundRefused, match=message):
        round.announce(**changes)
    assert round.released() == []


def test_the_clients_own_accountant_ends_the_rounds(make_round):
    round = make_round(rate=1.0)
    last = rounds_within_budget(round.plan)
    assert 1 <= last < round.plan.rounds
    with pytest.raises(RoundRefused, match=f"at most {last}, where the privacy budget ends"):
        round.announce(round=last + 1)


def test_a_round_announced_twice_gets_one_answer(make_round):
    round = make_round(rate=1.0).open()
    round.announce()
    with pytest.raises(RoundRefused, match="round must be above 1, the last answered, got 1"):
        round.announce()
    assert len(round.released()) == 4


@pytest.mark.parametrize("rate", [1e-9, 1.0])
@pytest.mark.parametrize("key", [b"", b"short", bytes(32), 7])
def test_a_key_that_nothing_can_be_sealed_to_is_refused_before_any_coin(make_round, key, rate):
    round = make_round(rate=rate)
    round.public_key = key
    with pytest.raises(RoundRefused, match="public key is not one to seal to"):
        round.announce()


@pytest.mark.parametrize("rate", [1e-9, 1.0])
def test_the_reply_waits_for_its_moment_whoever_checked_in(make_round, rate):
    round = make_round(rate=rate, reply_after=1.0)
    started = time.monotonic()
    round.announce()
    assert time.monotonic() - started >= 1.0


def test_a_failing_user_is_named_in_simulation_and_hidden_in_deployment(make_round):
    round = make_round(rate=1.0, load_users=broken_users).open()
    with pytest.raises(ReportFailed, match=r"round 1, user 1: .* ZeroDivisionError: no records"):
        round.announce()
    deployed = make_round(rate=1.0, load_users=broken_users, seed=None)
    deployed.settings = dataclasses.replace(deployed.settings, run_id="deployed")
    deployed.header = dataclasses.replace(deployed.header, run_id="deployed")
    assert reply_content(deployed.announce()) == {"acknowledgement": {"received": True}}
