"""The Flower ClientApp: one message a round in, one constant acknowledgement out."""

from __future__ import annotations

import logging
import time

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.node import Node
from clients.settings import ClientSettings
from shuffler import RoundHeader

log = logging.getLogger(__name__)

_STATE = "shufl"
_nodes: dict[str, Node] = {}  # this process's node, by run; Flower rebuilds the app per message


def make_client_app(settings: ClientSettings) -> ClientApp:
    """The ClientApp of a run.

    A node answers for the users whose id is its partition id modulo the number of partitions. Its
    reply is the same constant whether or not any of them checked in, `reply_after` seconds after
    the message came; a round it refuses (`RoundRefused`) is Flower's error reply, decided before
    any coin. A query before the first round makes a node load its data and model, and answers
    whether it agrees to the plan, for how many users it speaks, and where they report.
    """
    app = ClientApp()

    @app.query()
    def ready(message: Message, context: Context) -> Message:
        node, partition, users = _node(settings), *_partition(settings, context)
        node.agree(RoundHeader.from_dict(message.content["round"]))
        about = {"users": len(users), "shuffler": node.shuffler_of(partition)}
        return Message(_acknowledgement(about), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply_at = time.monotonic() + settings.reply_after
        _take_part(_node(settings), message, context)
        if (left := reply_at - time.monotonic()) < 0 < settings.reply_after:
            log.warning("local work took %.1f s longer than reply_after", -left)
        time.sleep(max(0.0, left))
        return Message(_acknowledgement({"received": True}), reply_to=message)

    return app


def _take_part(node: Node, message: Message, context: Context) -> None:
    announcement = dict(message.content["round"])
    public_key = announcement.pop("public_key")
    header = RoundHeader.from_dict(announcement)
    model = message.content["model"]
    node.check(header, model, public_key, answered=_last_answered(context))
    context.state[_STATE] = ConfigRecord({"last_round": header.round})
    partition, users = _partition(node.settings, context)
    node.take_part(users, header, model, public_key, node=partition)


def _partition(settings: ClientSettings, context: Context) -> tuple[int, np.ndarray]:
    """This node's number, and the ids of its users: that number, and every N-th after it."""
    partition = int(context.node_config["partition-id"])
    partitions = int(context.node_config["num-partitions"])
    return partition, np.arange(partition, settings.plan.users, partitions)


def _acknowledgement(content: dict[str, int | bool]) -> RecordDict:
    return RecordDict({"acknowledgement": ConfigRecord(content)})


def _last_answered(context: Context) -> int:
    return int(context.state[_STATE]["last_round"]) if _STATE in context.state else 0


def _node(settings: ClientSettings) -> Node:
    if settings.run_id not in _nodes:
        _nodes.clear()
        _nodes[settings.run_id] = Node(settings)
    return _nodes[settings.run_id]
