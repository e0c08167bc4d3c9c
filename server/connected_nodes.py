"""The nodes of a run: who is connected, who has agreed to the plan, who has been silent."""

from __future__ import annotations

import json
import logging
import reprlib
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from shufl.protocol import shuffler_of
from shufl.protocol.files import write_whole
from shufl.protocol.outcomes import NODES_FILE, AgreedNode
from shufl.protocol.plan_fields import Mixing
from shufl.server.broadcast import Exchange, greet, pause_after
from shufl.server.settings import NodeFailed, RoundFailed, ServerSettings
from shufl.shuffler.wire.node_seeds import SUM_VERSION

log = logging.getLogger(__name__)

_ASK_AGAIN_SECONDS = 30.0  # a node that refused or failed
_TELL_SECONDS = 5.0  # after which, and how often at most, the operator is told who is waited for
_MOST_CHARACTERS = 500
_AWAY = "not connected; shufl doctor there says why: its clock, network, keys or processes"


@dataclass
class NodeState:
    """What the server knows of one node, as it is in the run folder.

    Attributes:
        number: the node's, from 0, by its word; it decides the node's shuffler.
        users: for how many users it speaks, as it was agreed; in simulation by its word.
        name: as it was agreed; in simulation one with its number.
        flower: Flower's number of it; None: it is not registered.
        heard: when it answered last, by `time.time`; None: never.
        trouble: why it did not answer to the last message; empty: it did.
    """

    number: int
    users: int
    name: str = ""
    flower: int | None = None
    heard: float | None = None
    trouble: str = ""


def read_node(said: dict[str, Any], shufflers: int, mixing: Mixing) -> NodeState:
    """Checks what a node said of itself.

    Raises:
        ValueError: it named no number of users, or not the shuffler of its number; or its messages
            are not those of this server, with sums.
    """
    number, users, shuffler = (said.get(name) for name in ("number", "users", "shuffler"))
    if type(number) is not int or type(users) is not int or type(shuffler) is not int or users < 1:
        raise ValueError(
            f"a node must say for how many users it speaks, it said {reprlib.repr(said)}"
        )
    if shuffler != (right := shuffler_of(number, shufflers)):
        raise ValueError(
            f"node {number} must report to shuffler {right} of {shufflers}, it said {shuffler}"
        )
    version = said.get("sums", 1)
    if mixing == "sum" and version != SUM_VERSION:
        raise ValueError(
            f"its messages with sums are of version {reprlib.repr(version)}, this server's of "
            f"{SUM_VERSION}: node and server must have the same version of shufl"
        )
    return NodeState(number, users, name=f"node {number}", heard=time.time())


def check_agreed(node: int, state: NodeState, agreed: dict[int, AgreedNode]) -> None:
    """Refuses a node that says something else than was agreed with it; `node` is Flower's number.

    Raises:
        ValueError: one line for the operator.
    """
    if state.number not in agreed:
        raise ValueError(f"it says that it is number {state.number}, no such node was agreed")
    state.name, users, flower = agreed[state.number]
    if flower != node:
        known = "is not registered (shufl register)" if flower is None else f"is number {flower}"
        raise ValueError(f"it says that it is {state.name}, which {known} at Flower")
    if state.users != users:
        raise ValueError(f"it says that it speaks for {state.users} users, {users} were agreed")


class Fleet:
    """The nodes of one run.

    On real machines every connected node is asked before every round whether it agrees to the plan.
    The server does not wait for a node that did not answer the last time, unless there are too few
    other nodes. Simulated nodes are asked once.

    Attributes:
        known: all that ever agreed, by Flower's id; some may be away, or have failed since.
    """

    def __init__(self, settings: ServerSettings, grid: Grid, over: Callable[[], bool], frozen: str):
        """Begins without nodes.

        Once `over` turns true, no node is waited for. `frozen` is the model's `frozen_digest`.
        """
        self.settings, self._policy = settings, settings.policy
        self.known: dict[int, NodeState] = {}
        self._in: set[int] = set()
        self._prompt: set[int] | None = None  # who answered the last time
        self._grid = grid
        self._over, self._frozen = over, frozen
        self._questions: list[Exchange] = []
        self._asked: set[int] = set()  # who is connected and has not answered yet
        self._refused: dict[int, tuple[float, str]] = {}  # when, and why
        self._agreed = self._policy.agreed()
        self._told = ""  # for whom it waits

    def gather(self, until: float) -> list[int]:
        """Ids of the nodes that are there and agree, once there are enough of them for a shuffler.

        Raises:
            NodeFailed: in a simulation, as soon as one refuses or fails.
            RoundFailed: there are too few at the moment `until`, by `time.monotonic`.
        """
        policy, begun = self._policy, time.monotonic()
        tell_at = begun + _TELL_SECONDS
        if not policy.absence_is_fatal:
            self._prompt, self._in = self._in or None, set()
        self._read_agreed()
        while True:
            connected = set(self._grid.get_node_ids())
            self._ask(connected)
            present = sorted(connected & self._in)
            waiting = {node for each in self._questions for node in each.waiting}
            self._asked = awaited = connected & waiting
            if self._prompt is not None:
                awaited = awaited & self._prompt
            waited = not awaited or time.monotonic() - begun > policy.round_timeout
            enough = len(present) >= policy.nodes and bool(self.with_enough(present))
            if (enough and waited) or self._over():
                self._told = ""
                return present
            if time.monotonic() > tell_at:
                self._tell(present)
                tell_at += _TELL_SECONDS
            reasons = [reason for _, reason in self._refused.values()]
            if reasons and policy.absence_is_fatal:
                raise NodeFailed(f"a node did not get ready: {reasons[0]}")
            if time.monotonic() > until:
                missing = max(policy.nodes - len(present), 0)
                raise RoundFailed(
                    f"{missing} of {policy.nodes} nodes did not get ready: "
                    f"{reasons[0] if reasons else f'too few users within {until - begun:.0f} s'}"
                )
            now = time.monotonic()
            time.sleep(max(0.0, min(pause_after(now - begun), until - now)))

    def _read_agreed(self) -> None:
        """Reads the agreed nodes again; forgets those that are withdrawn or have another key."""
        try:
            self._agreed = self._policy.agreed()
        except (OSError, ValueError) as error:  # as while the files are being replaced
            log.warning("what was agreed with nodes stays: %s", error)
            return
        now = {(each.flower, number) for number, each in self._agreed.items()}
        for node in [each for each, it in self.known.items() if (each, it.number) not in now]:
            if node not in self._in:
                del self.known[node]

    def _tell(self, present: list[int]) -> None:
        """Tells the operator, and the run folder, for which nodes it waits, if that has changed."""
        here = {self.known[node].number for node in present}
        refused = {self.name_of(node): reason for node, (_, reason) in self._refused.items()}
        to_answer = [self.name_of(node) for node in sorted(self._asked - self._refused.keys())]
        missing = [each.name for number, each in self._agreed.items() if number not in here]
        away = [name for name in missing if name not in refused and name not in to_answer]
        reasons = [f"{name}: {reason}" for name, reason in refused.items()]
        line = f"waiting for nodes: {len(present)} are there, {self._lacking(present)}"
        line += f"; refused: {'; '.join(reasons)}" if reasons else ""
        line += f"; still to answer: {', '.join(to_answer)}" if to_answer else ""
        line += f"; away: {', '.join(away)}" if away else ""
        line = textwrap.shorten(line, _MOST_CHARACTERS, placeholder=" …")
        if line != self._told:
            self._told = line
            self._policy.tell(line)
            for node in self.known.keys() - set(present):
                self.known[node].trouble = self._why(node)
            self._write()

    def _lacking(self, present: list[int]) -> str:
        """Whether these nodes have enough users for a round; if not, how many a shuffler needs."""
        if self.with_enough(present):
            return "enough for a round"
        least = self.settings.plan.fewest_present
        users = ", ".join(
            f"{here} of {least} users at {self.settings.shufflers[shuffler][0]}"
            for shuffler, here in self.users_of(present).items()
            if here < least
        )
        return f"too few for a round ({users})"

    def _why(self, node: int | None) -> str:
        """Why a node is not in. A known one that is asked may be at work: its trouble stays.

        Flower refuses a node whose clock is wrong, or whose key is, and tells nobody here.
        """
        if node in self._refused:
            return self._refused[node][1]
        if node in self._asked:
            return self.known[node].trouble if node in self.known else "has not answered yet"
        return "not registered at Flower: shufl register" if node is None else _AWAY

    def name_of(self, node: int) -> str:
        """The name of the node that has this number at Flower."""
        names = {each.flower: each.name for each in self._agreed.values()}
        known = self.known[node].name if node in self.known else f"{node} at Flower"
        return names.get(node, known)

    def _write(self) -> None:
        """Writes what is known of every node, also of those that were agreed and never came."""
        nodes = {
            number: NodeState(number, users, name, flower, trouble=self._why(flower))
            for number, (name, users, flower) in self._agreed.items()
        }
        nodes |= {state.number: state for state in self.known.values()}
        rows = [vars(nodes[number]) for number in sorted(nodes)]
        for node in sorted(self._refused.keys() - {row["flower"] for row in rows}):
            about = NodeState(0, 0, self.name_of(node), node, trouble=self._why(node))
            rows.append(vars(about) | {"number": None, "users": None})  # it has not said them
        write_whole(self.settings.folder / NODES_FILE, json.dumps(rows, indent=1).encode())

    def with_enough(self, present: list[int]) -> list[int]:
        """The shufflers to which enough of these nodes' users report for a release."""
        least, users = self.settings.plan.fewest_present, self.users_of(present).items()
        return [each for each, here in users if here >= least]

    def shuffler_of(self, node: int) -> int:
        """To which shuffler, from 0, the users of a known node report."""
        return shuffler_of(self.known[node].number, len(self.settings.shufflers))

    def users_of(self, nodes: Iterable[int]) -> Counter[int]:
        """For how many users some nodes speak, by shuffler."""
        users = Counter(dict.fromkeys(range(len(self.settings.shufflers)), 0))
        for node in nodes:
            users[self.shuffler_of(node)] += self.known[node].users
        return users

    def agreed_at(self, shuffler: int) -> dict[str, int]:
        """For how many users each node may speak that was agreed for a shuffler, by its name."""
        shufflers = len(self.settings.shufflers)
        return {
            each.name: each.users
            for number, each in self._agreed.items()
            if shuffler_of(number, shufflers) == shuffler
        }

    def note(self, answers: Exchange, absent: set[str]) -> None:
        """Remembers who answered to a round, also in the run folder.

        The nodes named in `absent` have sent nothing for several rounds, by their shuffler's word.
        """
        for node in set(answers.errors) - answers.late:  # not counted on again at once
            self._refused[node] = time.monotonic(), answers.errors[node]
        for node, state in self.known.items():
            if node in answers.received:
                state.heard, state.trouble = time.time(), ""
            elif node not in answers.waiting:
                idle = "its shuffler is away, or has too few users for a round"
                why = idle if node in self._in else self._why(node)
                state.trouble = answers.errors.get(node, why)
            if state.name in absent:
                state.trouble = "it agrees to rounds, and no report of it comes: see its log"
                log.warning("%s: %s", state.name, state.trouble)
        self._write()

    def _ask(self, connected: set[int]) -> None:
        """Asks nodes that have not answered yet, and hears the answers that have come."""
        for question in self._questions:
            question.hear()
            self._take(question, connected)
        self._questions = [each for each in self._questions if each.waiting]
        self._refused = {node: why for node, why in self._refused.items() if node in connected}
        again = time.monotonic() - _ASK_AGAIN_SECONDS
        done = {node for node, (when, _) in self._refused.items() if when > again} | self._in
        for question in self._questions:
            done |= question.waiting
        if new := connected - done:
            about = {
                "run_id": self.settings.run_id,
                "plan_digest": self.settings.plan.digest(),
                "plan": self.settings.plan.to_json(),
                "frozen": self._frozen,
            }
            greeting = greet(self._grid, sorted(new), about, self._seconds_to_answer())
            self._questions.append(greeting)

    def _seconds_to_answer(self) -> float:
        """Seconds after which an answer counts as lost, as when the node's process was killed.

        A real node may keep it until the round under way is over and it may answer again.
        """
        policy, window = self._policy, self.settings.plan.window
        if policy.absence_is_fatal or window is None:
            return policy.patience
        return window.seconds + window.query_every + policy.round_timeout

    def _take(self, greeting: Exchange, connected: set[int]) -> None:
        """Takes those in that have agreed; remembers why others are not."""
        while greeting.received:
            node, said = greeting.received.popitem()
            try:
                state = read_node(said, len(self.settings.shufflers), self.settings.plan.mixing)
                if not self._policy.absence_is_fatal:
                    self._read_agreed()
                    check_agreed(node, state, self._agreed)
                here = connected & self._in - {node}
                if any(self.known[each].number == state.number for each in here):
                    raise ValueError(f"two nodes say that they are number {state.number}")
            except ValueError as error:
                greeting.errors[node] = str(error)
            else:
                for each in [each for each, it in self.known.items() if it.number == state.number]:
                    del self.known[each]  # under another number of Flower's
                state.flower, self.known[node] = node, state
                self._in.add(node)
                self._refused.pop(node, None)
        while greeting.errors:
            node, reason = greeting.errors.popitem()
            log.warning("%s is not in: %s", self.name_of(node), reason)
            self._refused[node] = time.monotonic(), reason
