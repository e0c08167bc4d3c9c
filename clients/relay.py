"""The deployed ClientApp: passes Flower's messages on to the node's own process, and back.

It runs in a process that Flower starts for one message, with code that the server has sent, so it
has no data, no keys and no coins: those are in the process behind the socket
(`shufl.clients.node_process`). So that it starts quickly, it imports no torch, and of this
project only how Flower's records become bytes.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Callable

import grpc
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from shufl.clients import SERVICE
from shufl.vendor_internals import RecordsMessage, records_from_message, records_to_message

_KINDS = ("query", "train")
_SECONDS = 3600.0  # the longest wait for the node's answer


class NodeUnavailable(RuntimeError):
    """The node's own process is not there, refuses or fails; one line says which."""


def _relay(kind: str) -> Callable[[Message, Context], Message]:
    def deliver(message: Message, context: Context) -> Message:
        socket = context.node_config["socket"]
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            call = channel.unary_unary(f"/{SERVICE}/{kind}")
            try:
                answer = call(
                    records_to_message(message.content).SerializeToString(), timeout=_SECONDS
                )
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    raise NodeUnavailable("this node's own process is not running") from None
                raise NodeUnavailable(error.details()) from None
        content = records_from_message(RecordsMessage.FromString(answer))
        return Message(content, reply_to=message)

    return deliver


atexit.register(gc.freeze)  # the process ends at once, without a search for cycles

app = ClientApp()
for _kind in _KINDS:
    getattr(app, _kind)()(_relay(_kind))
