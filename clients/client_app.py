"""The Flower ClientApp: one message a round in, one constant acknowledgement out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from shufl.clients.device_ledger import RoundRefused
from shufl.clients.node_round import Announcement, Node, Question
from shufl.clients.settings import ClientSettings
from shufl.shuffler.wire.node_seeds import SUM_VERSION

_nodes: dict[str | None, Node] = {}
"""The node of this process's last simulated run: Flower builds the app anew per message."""


def make_client_app(settings: ClientSettings) -> ClientApp:
    """The ClientApp of a simulated run.

    A node answers for the users whose id is its partition id modulo the number of partitions. A
    round it refuses (`RoundRefused`) is Flower's error reply, decided before any coin.
    """
    app = ClientApp()
    for name, answer in ANSWERS.items():
        getattr(app, name)()(_handler(settings, answer))
    return app


def ready(node: Node, asked: RecordDict, number: int, users: np.ndarray) -> RecordDict:
    """What a node says before the first round, once its data and model are loaded.

    It says that it agrees to the plan, for how many users it speaks, and where they report.

    `number` is the node's; `users` are the ids of its users, int of shape (u,).

    Raises:
        RoundRefused: it does not agree.
    """
    (about,) = _records(asked, "round")
    question = Question.read(about)
    node.agree(question.run_id, question.plan_digest, question.plan)
    node.check_frozen(question.frozen)
    node.accept_run(question.run_id, number)
    said = {"number": number, "users": len(users), "shuffler": node.shuffler_of(number)}
    said |= {"sums": SUM_VERSION}
    return _acknowledgement(said)


def train(node: Node, asked: RecordDict, number: int, users: np.ndarray) -> RecordDict:
    """One round: agrees to it, has the users take part, and acknowledges.

    The acknowledgement is a constant. A simulated node gives it when its work is done, a deployed
    one at once. The arguments are those of `ready`.

    Raises:
        RoundRefused: the node does not agree; decided before any coin.
    """
    about, model = _records(asked, "round", "model")
    round = node.prepare(Announcement.read(about), model, number)
    node.take_part(users, round, number)
    return _acknowledgement({"received": True})


Answer = Callable[[Node, RecordDict, int, np.ndarray], RecordDict]
ANSWERS: dict[str, Answer] = {"query": ready, "train": train}
"""What a node answers to each kind of Flower message, in simulation and deployed."""


def _handler(settings: ClientSettings, answer: Answer) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        users = np.arange(number, settings.plan.users, int(context.node_config["num-partitions"]))
        return Message(answer(_node(settings), message.content, number, users), reply_to=message)

    return handle


def _records(asked: RecordDict, *names: str) -> list[Any]:
    """The records of a message that has these and no others."""
    if set(asked) != set(names):
        raise RoundRefused(f"a message must have the records {' and '.join(names)}, and no others")
    return [asked[name] for name in names]


def _acknowledgement(content: dict[str, Any]) -> RecordDict:
    return RecordDict({"acknowledgement": ConfigRecord(content)})


def _node(settings: ClientSettings) -> Node:
    run_id = settings.policy.run_id
    if run_id not in _nodes:
        while _nodes:
            _nodes.popitem()[1].close()
        _nodes[run_id] = Node(settings)
    return _nodes[run_id]
