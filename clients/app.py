"""The Flower ClientApp: one message a round in, one constant acknowledgement out."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.node import Announcement, Node
from clients.settings import ClientSettings

_nodes: dict[str, Node] = {}  # this process's node, by run; Flower rebuilds the app per message


def make_client_app(settings: ClientSettings) -> ClientApp:
    """The ClientApp of a run.

    A node answers for the users whose id is its partition id modulo the number of partitions. A
    round it refuses (`RoundRefused`) is Flower's error reply, decided before any coin. Its reply to
    any other is the same constant whether or not any of its users checked in, and comes
    `reply_after` seconds after the message, whether or not the node's work is done by then. A query
    before the first round makes a node load its data and model, and answers whether it agrees to
    the plan, for how many users it speaks, and where they report.
    """
    app = ClientApp()

    @app.query()
    def ready(message: Message, context: Context) -> Message:
        node, partition, users = _node(settings), *_partition(settings, context)
        asked = message.content["round"]
        node.agree(str(asked["run_id"]), str(asked["plan_digest"]))
        node.accept_plan(partition)
        about = {"users": len(users), "shuffler": node.shuffler_of(partition)}
        return Message(_acknowledgement(about), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        reply_at = time.monotonic() + settings.reply_after
        node, partition, users = _node(settings), *_partition(settings, context)
        announced = Announcement.read(message.content["round"])
        round = node.prepare(announced, message.content["model"], partition)
        if settings.reply_after:
            # From here on nothing that depends on a coin may hold the reply up, or hasten it.
            threading.Thread(target=node.take_part, args=(users, round, partition)).start()
            time.sleep(max(0.0, reply_at - time.monotonic()))
        else:
            node.take_part(users, round, partition)
        return Message(_acknowledgement({"received": True}), reply_to=message)

    return app


def _partition(settings: ClientSettings, context: Context) -> tuple[int, np.ndarray]:
    """This node's number, and the ids of its users: that number, and every N-th after it."""
    partition = int(context.node_config["partition-id"])
    partitions = int(context.node_config["num-partitions"])
    return partition, np.arange(partition, settings.plan.users, partitions)


def _acknowledgement(content: dict[str, Any]) -> RecordDict:
    return RecordDict({"acknowledgement": ConfigRecord(content)})


def _node(settings: ClientSettings) -> Node:
    if settings.run_id not in _nodes:
        _nodes.clear()
        _nodes[settings.run_id] = Node(settings)
    return _nodes[settings.run_id]
