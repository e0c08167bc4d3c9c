"""One broadcast over Flower: the model to every node, acknowledgements back within a deadline."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from shuffler import RoundHeader

_POLL_SECONDS = 0.05
_REASON_CHARACTERS = 300


@dataclass(frozen=True)
class Acknowledgements:
    """Who answered.

    Attributes:
        received: what each node that acknowledged said, by its id.
        errors: the error of each node that answered with one.
    """

    received: dict[int, dict[str, Any]]
    errors: list[str]


def wait_for_nodes(grid: Grid, nodes: int, timeout: float, stop: Callable[[], bool]) -> list[int]:
    """Ids of the connected nodes, once there are at least `nodes` of them.

    Raises:
        TimeoutError: fewer are connected after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while len(connected := list(grid.get_node_ids())) < nodes and not stop():
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(connected)} of {nodes} Flower nodes connected within {timeout:.0f} s"
            )
        time.sleep(_POLL_SECONDS)
    return sorted(connected)


def greet(
    grid: Grid, nodes: list[int], about: dict[str, str], timeout: float, stop: Callable[[], bool]
) -> Acknowledgements:
    """Asks every node to get ready (load its data) and whether it agrees to the run's plan.

    Nothing has been spent yet; `about` names the run and the plan. Each answer says for how many
    `users` the node speaks, and to which `shuffler` they report.
    """
    content = RecordDict({"round": ConfigRecord({**about})})
    return _exchange(grid, nodes, content, MessageType.QUERY, 0, timeout, stop)


def broadcast(
    grid: Grid,
    nodes: list[int],
    header: RoundHeader,
    public_key: bytes,
    model: ArrayRecord,
    timeout: float,
    stop: Callable[[], bool],
) -> Acknowledgements:
    """Sends the round to every node and waits for all acknowledgements, the deadline, or `stop`.

    Every node gets it every round: the server neither chooses nor is told who checks in.
    """
    about = ConfigRecord(
        {
            "run_id": header.run_id,
            "round": header.round,
            "plan_digest": header.plan_digest,
            "public_key": public_key,
            "seconds": timeout,
        }
    )
    content = RecordDict({"model": model, "round": about})
    return _exchange(grid, nodes, content, MessageType.TRAIN, header.round, timeout, stop)


def _exchange(
    grid: Grid,
    nodes: list[int],
    content: RecordDict,
    message_type: str,
    round: int,
    timeout: float,
    stop: Callable[[], bool],
) -> Acknowledgements:
    """One message to each node, and what came back."""
    waiting = set(
        grid.push_messages(
            # Flower's own deadline lies behind ours, so that ours is the one that speaks.
            Message(content, node, message_type, group_id=str(round), ttl=timeout + 60)
            for node in nodes
        )
    )
    received: dict[int, dict[str, Any]] = {}
    errors = []
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline and not stop():
        time.sleep(_POLL_SECONDS)
        for reply in grid.pull_messages(waiting):
            waiting.discard(reply.metadata.reply_to_message_id)
            if reply.has_error():
                errors.append(_reason(reply.error.reason))
            else:
                received[reply.metadata.src_node_id] = dict(reply.content["acknowledgement"])
    return Acknowledgements(received, errors)


def _reason(text: str | None) -> str:
    """The message of a client's exception without what Flower wraps around it, in one line."""
    inner = str(text).rpartition("Message: ")[2]
    return textwrap.shorten(inner.removesuffix("'>"), _REASON_CHARACTERS, placeholder=" …")
