"""One message over Flower to each of some nodes, and the answers that come back in time."""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from shufl.shuffler import RoundHeader

_LEAST_POLL_SECONDS, _MOST_POLL_SECONDS = 0.005, 0.5
_REASON_CHARACTERS = 300
_DIED = "ActorDied|ActorUnavailable|NodeDied|OutOfMemory|RayActor|WorkerCrashed"


def pause_after(waited: float) -> float:
    """Seconds that the server pauses before it looks again: a twentieth of those it has waited.

    A short round is hardly longer for it, and a long one hardly loads the server.
    """
    return min(max(waited / 20, _LEAST_POLL_SECONDS), _MOST_POLL_SECONDS)


class Exchange:
    """A message to each of some nodes.

    Attributes:
        received: what each node that acknowledged said, by its id.
        errors: why each other one did not, in one line, by its id; those still waited for are in
            neither.
        late: ids of those that had not answered at the deadline.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Iterable[int],
        content: RecordDict,
        message_type: str,
        round: int,
        seconds: float,
    ):
        """Sends it.

        Args:
            message_type: `query` or `train`.
            round: the round's number; 0 before the first.
            seconds: how long answers are waited for.
        """
        self.received: dict[int, dict[str, Any]] = {}
        self.errors: dict[int, str] = {}
        self.late: set[int] = set()
        self._grid = grid
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        # Flower's own deadline lies behind ours, so that ours is the one that speaks.
        messages = [
            Message(content, node, message_type, group_id=str(round), ttl=seconds + 60)
            for node in nodes
        ]
        grid.push_messages(messages)
        self._waiting = {each.metadata.message_id: each.metadata.dst_node_id for each in messages}

    @property
    def waiting(self) -> set[int]:
        """Ids of the nodes that are still waited for."""
        return set(self._waiting.values())

    def hear(self) -> None:
        """Takes what has come, without waiting."""
        if not self._waiting:
            return
        for reply in self._grid.pull_messages(list(self._waiting)):
            node = self._waiting.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                self.errors[node] = _reason(reply.error.reason)
            elif isinstance(said := reply.content.get("acknowledgement"), ConfigRecord):
                self.received[node] = dict(said)
            else:
                self.errors[node] = "its answer is no acknowledgement"
        if time.monotonic() >= self._deadline:
            self.late = set(self._waiting.values())
            why = f"no answer within {self._seconds:g} s"
            self.errors.update(dict.fromkeys(self.late, why))
            self._waiting.clear()

    def wait(self, over: Callable[[], bool]) -> None:
        """Waits until all nodes have answered, the deadline, or `over`."""
        begun = time.monotonic()
        self.hear()
        while self._waiting and not over():
            now = time.monotonic()
            time.sleep(max(0.0, min(pause_after(now - begun), self._deadline - now)))
            self.hear()


def greet(grid: Grid, nodes: list[int], about: dict[str, Any], seconds: float) -> Exchange:
    """Asks nodes to get ready (load their data) and whether they agree to the run, plan and model.

    Nothing has been spent yet. Each answer says which `number` the node has, for how many `users`
    it speaks, and to which `shuffler` they report.
    """
    content = RecordDict({"round": ConfigRecord(about)})
    return Exchange(grid, nodes, content, MessageType.QUERY, 0, seconds)


def broadcast(
    grid: Grid,
    nodes: list[int],
    header: RoundHeader,
    public_key: bytes,
    model: ArrayRecord,
    seconds: float,
) -> Exchange:
    """Sends a round to every node.

    Every node gets it every round: the server neither chooses nor is told who checks in.
    """
    about = ConfigRecord(
        {
            "run_id": header.run_id,
            "round": header.round,
            "plan_digest": header.plan_digest,
            "public_key": public_key,
            "seconds": seconds,
        }
    )
    content = RecordDict({"model": model, "round": about})
    return Exchange(grid, nodes, content, MessageType.TRAIN, header.round, seconds)


def _reason(text: str | None) -> str:
    """The message of a client's exception without what Flower wraps around it, in one line."""
    if re.match(rf"<class 'ray\.exceptions\.({_DIED})Error'", str(text)):
        return (
            "a Ray worker died (killed, or out of memory; a higher simulation.cpus_per_node has "
            "fewer nodes at work at once)"
        )
    inner = str(text).rpartition("Message: ")[2]
    inner = inner[: 10 * _REASON_CHARACTERS]  # a node may send megabytes
    inner = re.sub(r"^<class '[\w.]+'>:<'", "", inner).removesuffix("'>")
    shown = "".join(each if each.isprintable() else " " for each in inner)
    return textwrap.shorten(shown, _REASON_CHARACTERS, placeholder=" …")
