"""The process on a user's machine that holds its data, coins and keys, beside Flower.

Flower starts a new process for every message, ends it seconds after its answer, and runs in it
whatever code the server has sent. So none of a node's own work is done there. The deployed
ClientApp (`shufl.clients.relay`) only passes messages on, over a Unix socket, to this process,
which runs its owner's installed code and nothing else, and goes on working after an answer.
"""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from flwr.app import ArrayRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictMessage

from shufl.accounting.lines import one_line
from shufl.clients.app import ANSWERS, Answer
from shufl.clients.device import RoundRefused
from shufl.clients.node import Node
from shufl.clients.relay import SERVICE
from shufl.clients.settings import ClientSettings

log = logging.getLogger(__name__)

_THREADS = 4  # a round may be answered while another one's answer waits for its moment
_SOCKET_MODE = 0o660  # for the group of the user that runs Flower's SuperNode
_STOP_SECONDS = 5.0
_RECORDS = ("round", "model")
_MOST_SAID_BYTES = 2**14  # of a message beside its model; a fifth of it would do


def serve_device(settings: ClientSettings, socket: Path, stop: threading.Event) -> None:
    """Answers the messages of one deployed node until `stop` is set.

    The settings have `users` and a ledger. `socket` is the path of the Unix socket, which is made;
    it has at most 100 characters.

    Raises:
        ValueError: the settings lack what a deployed node has, or the socket cannot be made.
    """
    if settings.users is None or settings.ledger is None or not settings.reply_after > 0:
        raise ValueError("a deployed node needs users, a device's ledger, and reply_after")
    if settings.ledger(settings.number).limits is None:
        raise ValueError("a deployed node's ledger needs the limits of the device's owner")
    node = Node(settings)
    reader = _Reader(settings)  # gRPC refuses a longer message before it is read
    server = grpc.server(
        ThreadPoolExecutor(_THREADS),
        options=[("grpc.max_receive_message_length", reader.most_bytes)],
        maximum_concurrent_rpcs=_THREADS,
    )
    handlers = {
        kind: grpc.unary_unary_rpc_method_handler(_Answering(node, answer, reader))
        for kind, answer in ANSWERS.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    mask = os.umask(0o777 & ~_SOCKET_MODE)
    try:
        if server.add_insecure_port(f"unix:{socket}") == 0:
            raise RuntimeError(f"{socket}")
    except RuntimeError:
        raise ValueError(f"the socket {socket} cannot be made") from None
    finally:
        os.umask(mask)
    server.start()
    log.info("listening on %s", socket)
    stop.wait()
    server.stop(_STOP_SECONDS).wait()
    node.close()


class _Answering:
    """Answers one kind of message: serialised records in, serialised records out."""

    def __init__(self, node: Node, answer: Answer, reader: _Reader):
        self._node = node
        self._answer = answer
        self._reader = reader

    def __call__(self, request: bytes, context: grpc.ServicerContext) -> Any:
        """The answer, or a refusal, which the server is told; other errors stay on this machine."""
        settings = self._node.settings
        assert settings.users is not None
        try:
            asked = self._reader.read(request)
            users = np.arange(settings.users)
            answer = self._answer(self._node, asked, settings.number, users)
        except RoundRefused as refused:
            log.warning("refused: %s", refused)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, one_line(str(refused)))
        except Exception:
            log.exception("a message was not answered")
            context.abort(grpc.StatusCode.INTERNAL, "this node failed; its own log says why")
        return recorddict_to_proto(answer).SerializeToString()


class _Reader:
    """Reads messages that are no longer than a server can need for this node's model."""

    def __init__(self, settings: ClientSettings):
        model = RecordDict({"model": ArrayRecord(settings.make_model().state_dict())})
        own = recorddict_to_proto(model)
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
            message = RecordDictMessage.FromString(request)
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
            return recorddict_from_proto(message)
        except Exception:
            raise RoundRefused("the message is malformed") from None


def _beside_arrays(message: RecordDictMessage) -> int:
    """How many bytes a message has beside the numbers of its arrays."""
    arrays = (each for record in message.items for each in record.array_record.items)
    return message.ByteSize() - sum(len(each.value.data) for each in arrays)
