"""A server's run on real shufflers, whose messages reach the nodes in the test's own thread.

The server's loop, its shufflers, and the nodes' ledgers and keys are as on real machines, or as in
a simulation. What Flower does between server and nodes is done here.
"""

import contextlib
import functools

import numpy as np
import torch
from flwr.app import Error, Message
from torch import nn

from rounds import make_plan
from run_world import LIMIT
from shuffler_world import ShufflerHere
from shufl import clients, server
from shufl.accounting import Ledger
from shufl.clients import ClientSettings, DeviceLedger, DeviceLimits, Node
from shufl.clients.client_app import ANSWERS
from shufl.learning import LocalTraining
from shufl.learning.config import Training
from shufl.learning.tasks import CLASSIFICATION
from shufl.protocol import AgreedNode
from shufl.protocol.plan import Window
from shufl.server import Mean, Optimiser, RoundLoop, ServerSettings, load_checkpoint
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.public_record import verify

NODES, USERS, WIDTH = 3, 12, 5
RATE = 1e-5
WINDOW = Window(
    work_until=0.1, send_after=0.2, send_spread=0.0, grace=0.3, answer_every=0.1, query_every=0.1,
    most_records=1,
)  # fmt: skip
PLAN = make_plan(
    users=USERS, check_in_rate=1.0, noise_multiplier=1e-3, target_epsilon=1e12, accountant="local",
    cover=True, window=WINDOW,
)  # fmt: skip

AUTHORITY = Authority.create()
AGREED = {n: AgreedNode(f"node-{n}", USERS // NODES, n + 1) for n in range(NODES)}
KEYS = [AUTHORITY.issue(Role.NODE, each.name, users=each.users) for each in AGREED.values()]
Here = functools.partial(ShufflerHere, authority=AUTHORITY)

SUMS = {"mixing": "sum", "accountant": "sum-central", "central_noise": 0.5}


def optimiser_of(learning_rate=0.1, rounds=1, **keys):
    """A server's optimiser, with these keys of `[training]`."""
    return Optimiser(Training(learning_rate=learning_rate, **keys), rounds)


def make_model(width):
    model = nn.Linear(width, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def records(width):
    """All users are alike, and have updates of length 1: so has the mean, whoever sends."""
    return lambda user: (torch.full((1, width), 10.0), torch.tensor([1]))


def events(shuffler):
    """What the shuffler's public record says, beside how the run was created."""
    return [each["event"] for each in verify(shuffler.store.record(0))[1:]]


class Network:
    """Brings the server's messages to the nodes, as Flower's `Grid` does.

    Attributes:
        here: ids of the nodes that are connected.
        train: brings a node its round by calling `deliver`, and gives what comes back: None if
            nothing does. Tests put faults here.
        replies: that the server has not heard yet, by the message's id.
    """

    def __init__(self, settings, users):
        """Connects nodes, numbers from 0, by their settings and the ids of their users."""
        self.here = {number + 1 for number in settings}
        self.train = lambda node, deliver: deliver()
        self.replies = {}
        self._users = users
        self._node = functools.cache(lambda number: Node(settings[number]))

    def get_node_ids(self):
        return list(self.here)

    def push_messages(self, messages):
        for number, message in enumerate(messages):
            about, node = message.metadata, message.metadata.dst_node_id
            about.__dict__["_message_id"] = f"{about.group_id} {about.message_type} {number} {node}"

            def deliver(message=message, node=node):
                return self._deliver(message, node)

            reply = self.train(node, deliver) if about.message_type == "train" else deliver()
            if reply is not None:
                self.replies[about.message_id] = reply

    def pull_messages(self, ids):
        return [self.replies.pop(each) for each in ids if each in self.replies]

    def _deliver(self, message, node):
        answer, number = ANSWERS[message.metadata.message_type], node - 1
        try:
            said = answer(self._node(number), message.content, number, self._users[number])
            reply = Message(said, reply_to=message)
        except Exception as error:
            reply = Message(Error(0, str(error)), reply_to=message)
        reply.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        return reply


class Run:
    """A run on these shufflers whose ledger and checkpoints are in `folder`; it can be resumed.

    Its nodes are real ones, but for the process that Flower would call.
    """

    def __init__(self, folder, shufflers, plan=PLAN, width=WIDTH):
        self.folder, self.plan, self.shufflers = folder, plan, shufflers
        self.make_model = functools.partial(make_model, width)
        self.test = torch.ones(1, width), torch.zeros(1, dtype=torch.int64)
        self.rows = []
        self.network = Network(
            {
                number: ClientSettings(
                    policy=self.policy_of(number), plan=plan, make_model=self.make_model,
                    load_users=functools.partial(records, width), training=LocalTraining(),
                    shufflers=tuple((one.address, self.key_of(number, one)) for one in shufflers),
                    sealing="x25519",
                )
                for number in AGREED
            },
            {number: self.users_of(number) for number in AGREED},
        )  # fmt: skip

    def policy_of(self, number):
        owner = DeviceLimits(most_epsilon=1e15, delta=1e-5, accountant="local")
        ledger = DeviceLedger(self.folder / f"node-{number}.db", owner)
        return clients.Deployed(number=number, users=AGREED[number].users, device=ledger)

    def key_of(self, number, shuffler):
        return KEYS[number]

    def users_of(self, number):
        return np.arange(AGREED[number].users)

    def policy(self, **changes):
        usual = {
            "patience": 600.0, "round_timeout": 60.0, "shuffler_seconds": 60.0,
            "agreed": lambda: AGREED, "tell": lambda line: None,
        }  # fmt: skip
        return server.Deployed(**usual | changes)

    def play(self, rounds, control=lambda number, client: client, make_aggregator=Mean, **policy):
        """Plays until so many rounds are over; `control` puts faults into a shuffler's client."""
        with self.loop(control, make_aggregator, len(self.rows) + rounds, **policy) as loop:
            return loop.run()

    @contextlib.contextmanager
    def loop(self, control=lambda number, client: client, make_aggregator=Mean, until=1, **policy):
        """The server's loop, before its first round, which it ends when there are so many rows."""
        ledger, checkpoint = self.folder / "ledger.jsonl", self.folder / "checkpoint.pt"
        opened = (
            Ledger.open(ledger, self.plan)
            if ledger.exists()
            else Ledger.create(ledger, self.plan, self.folder.name)
        )
        with opened:
            settings = ServerSettings(
                plan=self.plan, ledger=opened, make_model=self.make_model,
                load_test=lambda: self.test,
                task=CLASSIFICATION,
                optimiser=optimiser_of(RATE), folder=self.folder, evaluate_every=1,
                checkpoint_every=1, origin={}, reproducible=False,
                checkpoint=load_checkpoint(checkpoint) if checkpoint.exists() else None,
                policy=self.policy(**policy),
                shufflers=tuple((each.address, each.control) for each in self.shufflers),
                sealing="x25519", make_aggregator=make_aggregator,
            )  # fmt: skip
            loop = RoundLoop(
                settings,
                self.network,
                lambda row, model: self.rows.append(row),
                lambda: self.is_over(until),
            )
            for each in loop.parts:
                each.client = control(each.number, each.client)
            yield loop

    def is_over(self, rounds):
        return len(self.rows) >= rounds

    @property
    def spent(self):
        path = self.folder / "ledger.jsonl"
        return [entry.round for entry in Ledger.read(path).entries] if path.exists() else []

    def steps_are_whole(self):
        """Whether the model is what as many released rounds with everybody would have made."""
        rounds = sum(row.outcome == "released" for row in self.rows)
        model = torch.load(self.folder / "model.pt", weights_only=True)
        length = torch.cat([value.flatten() for value in model.values()]).norm()
        return abs(float(length) / RATE - rounds) < 0.1


class SimulatedRun(Run):
    """The same as a simulation: its nodes share the plan's users, and no node is away."""

    def policy_of(self, number):
        return clients.Simulated(
            run_id=self.folder.name, seed=1, halting_round=self.plan.rounds,
            ledger=lambda number: None, together=True,
        )  # fmt: skip

    def key_of(self, number, shuffler):
        return shuffler.submit

    def users_of(self, number):
        return np.arange(number, USERS, NODES)

    def policy(self, **changes):
        usual = {
            "nodes": NODES, "patience": LIMIT, "round_timeout": LIMIT, "seed": 1,
            "shufflers_gone": lambda: False,
        }  # fmt: skip
        return server.Simulated(**usual | changes)
