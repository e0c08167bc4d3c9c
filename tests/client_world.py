"""A run on a real shuffler, and the messages that its server would send to a node."""

import dataclasses
import threading

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

from rounds import make_plan
from shufl.accounting import rounds_within_budget
from shufl.clients import (
    Announcement,
    ClientSettings,
    Deployed,
    DeviceLedger,
    DeviceLimits,
    Simulated,
    make_client_app,
)
from shufl.clients.deployed_node import Clock, DeviceNode
from shufl.learning import LocalTraining
from shufl.learning.parameters import dimension, sent
from shufl.protocol.plan import Window
from shufl.shuffler import (
    Outcome,
    ReportOpener,
    RoundHeader,
    decode_report,
    generate_key_pair,
    key_digest,
    message_length,
    model_digest,
    seal,
)

USERS, WIDTH = 12, 40
DIMENSION = 2 * WIDTH + 2


def plan(rate):
    budget = {"rounds": 50, "delta": 1 / USERS, "target_epsilon": 3.0}
    return make_plan(users=USERS, check_in_rate=rate, noise_multiplier=2.0, **budget)


def make_model():
    torch.manual_seed(0)
    return nn.Linear(WIDTH, 2)


def records(user):
    return torch.full((1, WIDTH), float(user)), torch.tensor([user % 2])


def load_users():
    return records


WINDOW = Window(
    work_until=900.0, send_after=901.0, send_spread=0.0, grace=900.0, answer_every=0.05,
    query_every=0.05, most_records=3,
)  # fmt: skip
"""Of rounds that end in time on the slowest machine; with a `PromptClock` nothing waits for it."""


class PromptClock(Clock):
    """Does not wait, and notes for what moments it would have.

    The shuffler of a simulation knows no window, and says that a round's is over. By this clock it
    has just begun.
    """

    def __init__(self):
        self.moments = []

    def now(self):
        return super().now() - WINDOW.seconds

    def wait(self, until, over):
        self.moments.append(until)
        return over.is_set()


class Round:
    """A run on a real shuffler, and the messages its server would send."""

    def __init__(self, address, credentials, control, run_id, rate=1.0, **changes):
        self.control = control
        self.plan = plan(rate)
        self.settings = ClientSettings(
            policy=Simulated(
                run_id=run_id, seed=3, halting_round=0, ledger=lambda node: None, together=True
            ),
            plan=self.plan,
            make_model=make_model,
            load_users=load_users,
            training=LocalTraining(),
            shufflers=((address, credentials),),
            sealing="x25519",
        )
        self.change(halting_round=rounds_within_budget(self.plan))
        self.change(**changes)
        model = self.settings.make_model()
        self.dimension = dimension(model)
        self.model = ArrayRecord(sent(model))
        self.private_key, self.public_key = generate_key_pair()
        self.header = RoundHeader(
            run_id,
            1,
            model_digest(sent(model)),
            self.plan.digest(),
            key_digest(self.public_key),
        )

    def change(self, **changes):
        """Changes settings, or what the policy among them says."""
        policy = self.settings.policy
        names = [field.name for field in dataclasses.fields(policy) if field.name in changes]
        policy = dataclasses.replace(policy, **{name: changes.pop(name) for name in names})
        self.settings = dataclasses.replace(self.settings, **{"policy": policy} | changes)

    def under(self, **changes):
        """The same round under a plan that differs."""
        self.plan = self.plan.replace(**changes)
        self.change(plan=self.plan)
        if isinstance(self.settings.policy, Simulated):
            self.change(halting_round=rounds_within_budget(self.plan))
        self.header = dataclasses.replace(self.header, plan_digest=self.plan.digest())
        return self

    def seal(self, payload):
        return seal(payload, self.public_key, self.header)

    def open(self):
        length = message_length(self.dimension, self.plan.mixing)
        self.control.create_run(self.header.run_id, self.plan.to_json().encode(), length)
        self._open_round()
        return self

    def _open_round(self):
        run_id, number, digest = self.header.run_id, self.header.round, self.header.model_digest
        nonce = self.control.open_round(run_id, number, digest, self.public_key)
        self.header = dataclasses.replace(self.header, nonce=nonce)

    def deployed(self, place, users=USERS, window=WINDOW, **changes):
        """The same round for a real machine, whose ledger is at `place`, and of all users."""
        self.under(cover=True, users=users, least_present=users, window=window)
        ledger = DeviceLedger(place, DeviceLimits(most_epsilon=1e9, delta=1e-5, accountant="local"))
        self.change(policy=Deployed(number=0, users=users, device=ledger))
        self.change(**changes)
        return self

    def begin(self, node, model=None):
        """Has a deployed node take part in the round; returns what it was prepared for."""
        announced = Announcement(**self._about())
        prepared = node.prepare(announced, model or self.model)
        node.take_part(np.arange(self.settings.policy.users), prepared)
        return prepared

    def show(self, state):
        """Broadcasts other parameters."""
        self.model = ArrayRecord(state)
        self.header = dataclasses.replace(self.header, model_digest=model_digest(state))

    def next(self, model):
        """Gives this round up, and opens the next one."""
        self.control.end_round(self.header.run_id, self.header.round)
        self.show(model.to_torch_state_dict())
        self.header = dataclasses.replace(self.header, round=self.header.round + 1)
        self._open_round()

    def announce(self, node=1, model=None, **changes):
        """What the node answers to the round, and to the changes that it is shown."""
        about = ConfigRecord(self._about() | changes)
        return self.deliver("train", {"model": model or self.model, "round": about}, node)

    def _about(self):
        """What the server says of the round."""
        return {
            "run_id": self.header.run_id,
            "round": self.header.round,
            "plan_digest": self.header.plan_digest,
            "public_key": self.public_key,
            "seconds": 60.0,
        }

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
        run_id, number = self.header.run_id, self.header.round
        if self.control.close_round(run_id, number).outcome is Outcome.BELOW_MINIMUM:
            return []
        opener = ReportOpener(self.private_key)
        return [
            self.plan.mechanism.unit(1)
            * decode_report(opener.open(sealed, self.header), self.dimension)
            for sealed in self.control.release(run_id, number)
        ]


def wait_for_rounds():
    """Waits until deployed nodes of this process have sent everything."""
    for thread in threading.enumerate():
        if thread.name.startswith("round "):
            thread.join()


def device_node(round, **named):
    """A deployed node, which does not wait for the moments of the plan."""
    return DeviceNode(round.settings, clock=PromptClock(), **named)


def reply_content(reply):
    """What a node answered, if it is no error."""
    assert not reply.has_error()
    return {name: dict(record) for name, record in reply.content.items()}
