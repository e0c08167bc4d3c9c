"""A run on a real shuffler, and the messages that its server would send to a node."""

from __future__ import annotations

import dataclasses

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from rounds import make_plan
from shufl.clients import ClientSettings, LocalTraining, make_client_app
from shufl.shuffler import (
    Outcome,
    ReportOpener,
    RoundHeader,
    decode_report,
    generate_key_pair,
    key_digest,
    model_digest,
    report_length,
    seal,
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
        if user == 7:
            raise ZeroDivisionError("no records")
        return records(user)

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
        model = self.settings.make_model()
        self.dimension = sum(values.numel() for values in model.parameters())
        self.model = ArrayRecord(model.state_dict())
        self.private_key, self.public_key = generate_key_pair()
        self.header = RoundHeader(
            run_id,
            1,
            model_digest(model.state_dict()),
            self.plan.digest(),
            key_digest(self.public_key),
        )

    def under(self, **changes):
        """The same round under a plan that differs."""
        self.plan = self.plan.replace(**changes)
        self.settings = dataclasses.replace(self.settings, plan=self.plan)
        self.header = dataclasses.replace(self.header, plan_digest=self.plan.digest())
        return self

    def seal(self, payload):
        return seal(payload, self.public_key, self.header)

    def open(self):
        length = sealed_length(report_length(self.dimension))
        self.control.create_run(self.settings.run_id, self.plan.to_json().encode(), length)
        about = self.header.run_id, 1, self.header.model_digest, self.public_key
        self.header = dataclasses.replace(self.header, nonce=self.control.open_round(*about))
        return self

    def announce(self, node=1, model=None, **changes):
        """What the node answers to the round, and to the changes that it is shown."""
        about = {
            "run_id": self.header.run_id,
            "round": self.header.round,
            "plan_digest": self.header.plan_digest,
            "public_key": self.public_key,
            "seconds": 60.0,
        }
        shown = {"model": model or self.model, "round": ConfigRecord(about | changes)}
        return self.deliver("train", shown, node)

    def greet(self, node=1):
        """What the node answers before the first round."""
        about = {"run_id": self.header.run_id, "plan_digest": self.header.plan_digest}
        return self.deliver("query", {"round": ConfigRecord(about)}, node)

    def deliver(self, kind, content, node):
        message = Message(RecordDict(content), dst_node_id=7, message_type=kind)
        context = Context(
            run_id=1,
            node_id=7,
            node_config={"partition-id": node, "num-partitions": 3},
            state=RecordDict(),
            run_config={},
        )
        return make_client_app(self.settings)(message, context)

    def released(self):
        """The server's view: the opened reports, in float64."""
        if self.control.close_round(self.header.run_id, 1) is Outcome.BELOW_MINIMUM:
            return []
        opener = ReportOpener(self.private_key)
        return [
            self.plan.mechanism.unit(1)
            * decode_report(opener.open(sealed, self.header), self.dimension)
            for sealed in self.control.release(self.header.run_id, 1)
        ]


def reply_content(reply):
    """What a node answered, if it is no error."""
    assert not reply.has_error()
    return {name: dict(record) for name, record in reply.content.items()}


def begin_flower_task():
    """Messages are made inside a task, as Flower's runtime does."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 7
