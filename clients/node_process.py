"""The process on a user's machine that holds its data, coins and keys, beside Flower.

Flower starts a new process for every message, ends it seconds after its answer, and runs in it
whatever code the server has sent. So none of a node's own work is done there. The deployed
ClientApp (`shufl.clients.relay`) only passes messages on, over a Unix socket, to this process,
which runs its owner's installed code and nothing else, and goes on working after an answer. The
updates are computed by a child process (`shufl.clients.worker`), so that no answer waits for it.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from flwr.app import ArrayRecord, RecordDict

from shufl.clients import SERVICE
from shufl.clients.client_app import ANSWERS
from shufl.clients.deployed_node import DeviceNode
from shufl.clients.device_ledger import RoundRefused
from shufl.clients.settings import ClientSettings
from shufl.learning.parameters import sent
from shufl.protocol.text import one_line
from shufl.vendor_internals import RecordsMessage, records_from_message, records_to_message

log = logging.getLogger(__name__)

_THREADS = 4  # a message may be answered while another one's answer waits for its moment
_SOCKET_MODE = 0o660  # for the group of the user that runs Flower's SuperNode
_LOOK_SECONDS = 1.0
_STOP_SECONDS = 5.0
_RECORDS = ("round", "model")
_MOST_SAID_BYTES = 2**14  # of a message beside its model; a fifth of it would do


def serve_device(
    settings: ClientSettings, socket: Path, stop: threading.Event, at_once: threading.Event
) -> None:
    """Answers the messages of one deployed node until `stop` is set.

    A round that is under way then is finished, unless `at_once` is set. The settings are as for
    `DeviceNode`. `socket` is the path of the Unix socket, which is made; it has at most 100
    characters.

    Raises:
        ValueError: as for `DeviceNode`.
        ConnectionError: the socket cannot be made.
    """
    node = DeviceNode(settings)
    try:
        _serve(node, socket, stop)
        node.finish(at_once)
    finally:
        node.close()


def _serve(node: DeviceNode, socket: Path, stop: threading.Event) -> None:
    reader = _Reader(node.settings)  # gRPC refuses a longer message before it is read
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        options=[("grpc.max_receive_message_length", reader.most_bytes)],
        maximum_concurrent_rpcs=_THREADS,
    )
    answering = _Answering(node, reader, stop)
    handlers = {
        kind: grpc.unary_unary_rpc_method_handler(functools.partial(answering.call, kind))
        for kind in ANSWERS
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    mask = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        if server.add_insecure_port(f"unix:{socket}") == 0:
            raise RuntimeError(f"{socket}")
    except RuntimeError:
        raise ConnectionError(f"the socket {socket} cannot be made") from None
    finally:
        os.umask(mask)
    server.start()
    log.info("listening on %s", socket)
    while not stop.wait(_LOOK_SECONDS):  # a signal that another thread got is heard when this wakes
        pass
    server.stop(_STOP_SECONDS).wait()


class _Answering:
    """Answers messages, serialised records in and out, at moments that tell nothing.

    Every answer, a refusal too, is given at a whole multiple of the plan's `answer_every`. A query
    waits until `query_every` has passed since the last answer to one, and the second query of a
    round until the round is over.
    """

    def __init__(self, node: DeviceNode, reader: _Reader, stop: threading.Event):
        self._node, self._reader, self._stop = node, reader, stop
        self._query = threading.Lock()
        self._next_query = -math.inf
        self._asked_in: object = None  # the round in which the last query was answered

    def call(self, kind: str, request: bytes, context: grpc.ServicerContext) -> Any:
        """The answer, or a refusal, which the server is told; other errors stay on this machine."""
        code, said = grpc.StatusCode.OK, b""
        try:
            said = self._answer_query(request) if kind == "query" else self._answer(kind, request)
        except RoundRefused as refused:
            log.warning("refused: %s", refused)
            code, details = grpc.StatusCode.FAILED_PRECONDITION, one_line(str(refused))
        except Exception:
            log.exception("a message was not answered")
            code, details = grpc.StatusCode.INTERNAL, "this node failed; its own log says why"
        self._node.clock.wait(self._next_moment(), self._stop)
        if code is not grpc.StatusCode.OK:
            context.abort(code, details)
        return said

    def _answer(self, kind: str, request: bytes) -> bytes:
        policy, asked = self._node.policy, self._reader.read(request)
        answer = ANSWERS[kind](self._node, asked, policy.number, np.arange(policy.users))
        return records_to_message(answer).SerializeToString()

    def _answer_query(self, request: bytes) -> bytes:
        if not self._query.acquire(blocking=False):
            raise RoundRefused("another query waits for its answer")
        try:
            round, due = self._node.round, self._next_query
            if round is not None and round is self._asked_in:
                due = max(due, round.until)
            self._node.clock.wait(due, self._stop)
            self._asked_in = self._node.round
            return self._answer("query", request)
        finally:
            self._next_query = self._next_moment() + self._node.window.query_every
            self._query.release()

    def _next_moment(self) -> float:
        every = self._node.window.answer_every
        return math.ceil(self._node.clock.now() / every) * every


class _Reader:
    """Reads messages that are no longer than a server can need for this node's model."""

    def __init__(self, settings: ClientSettings):
        model = RecordDict({"model": ArrayRecord(sent(settings.make_model()))})
        own = records_to_message(model)
        self.most_bytes = own.ByteSize() + _MOST_SAID_BYTES
        self._arrays = len(own.items[0].array_record.items)
        self._most_beside = _beside_arrays(own) + _MOST_SAID_BYTES

    def read(self, request: bytes) -> RecordDict:
        """The records of a message.

        Raises:
            RoundRefused: it is no message, it has more than a model and what is said of a round, or
                two of its records or values have one name.
        """
        try:
            message = RecordsMessage.FromString(request)
            # Counted first: an empty record has two bytes here, and hundreds as Python's object.
            many = len(message.items) > len(_RECORDS) or any(
                len(record.array_record.items) > self._arrays for record in message.items
            )
            if many or _beside_arrays(message) > self._most_beside:
                raise ValueError("more than a model and what is said of a round")
            groups = [message.items]
            for record in message.items:
                groups += [record.array_record.items, record.config_record.items]
            for names in ([each.key for each in group] for group in groups):
                if len(set(names)) < len(names):
                    raise ValueError("two of one name")
            return records_from_message(message)
        except Exception:
            raise RoundRefused("the message is malformed") from None


def _beside_arrays(message: RecordsMessage) -> int:
    """How many bytes a message has beside the numbers of its arrays."""
    arrays = (each for record in message.items for each in record.array_record.items)
    return message.ByteSize() - sum(len(each.value.data) for each in arrays)
