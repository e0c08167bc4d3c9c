"""Calls: who may make one, how its message is read, and how it is refused."""

from __future__ import annotations

import asyncio
import hmac
import logging
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from shuffler.keys import Caller, Revoked, Role, caller_of
from shuffler.service.operations import Metrics
from shuffler.wire.channel import TOKEN_KEY
from shuffler.wire.errors import Refusal, ShufflerRefused

__all__ = ["IDLE", "NOT_PERMITTED", "UNREADABLE", "Gate", "abort", "add_service"]

NOT_PERMITTED = ShufflerRefused(Refusal.NOT_PERMITTED, "not with this certificate")
IDLE = ShufflerRefused(Refusal.IDLE, "nothing came for too long")
UNREADABLE = ShufflerRefused(Refusal.MALFORMED, "not a message of this protocol")

_log = logging.getLogger("shuffler")

_ANY_USERS = 2**32  # a plan has no more
_STATUS = {
    Refusal.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Refusal.NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.BUSY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.IDLE: grpc.StatusCode.ABORTED,
    Refusal.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.UNKNOWN_RUN: grpc.StatusCode.NOT_FOUND,
    Refusal.UNKNOWN_ROUND: grpc.StatusCode.NOT_FOUND,
    Refusal.RUN_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.BATCH_LOST: grpc.StatusCode.DATA_LOSS,
    Refusal.STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.STORAGE_FAILED: grpc.StatusCode.INTERNAL,
}


class Gate:
    """Lets a call through only with the credential of its role."""

    def __init__(self, token: str | None, revoked: Revoked, metrics: Metrics) -> None:
        """Remembers who may call: with this token; None: with a certificate."""
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._revoked = revoked
        self._metrics = metrics

    async def admit(self, context: grpc.aio.ServicerContext, role: Role) -> Caller:
        """Who calls; ends the call if it may not make it."""
        if self._expected is None:
            (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
            caller = caller_of(certificate)
            if caller is not None and caller.role is role and self.still_admits(caller):
                return caller
            refused = NOT_PERMITTED
        else:
            given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
            if isinstance(given, str):
                given = given.encode()
            if role is Role.NODE or hmac.compare_digest(given, self._expected):
                return Caller(role, "", _ANY_USERS)
            refused = ShufflerRefused(Refusal.UNAUTHENTICATED, "wrong or missing token")
        _log.warning("call without the right credential refused")
        await abort(context, refused, self._metrics)
        raise refused  # `abort` does not return

    def still_admits(self, caller: Caller) -> bool:
        """Whether a caller's certificate has neither expired nor been withdrawn by now."""
        return not caller.expired and caller not in self._revoked


async def abort(
    context: grpc.aio.ServicerContext, refused: ShufflerRefused | str, metrics: Metrics
) -> None:
    """Ends the call; a refusal is counted.

    Where the caller does not read, this waits until it does, or is gone: gRPC sends the end after
    what was written before. So everything else of the call is given back first.
    """
    if isinstance(refused, str):
        await context.abort(grpc.StatusCode.ABORTED, refused)
        return
    metrics.refusals.labels(refused.reason).inc()
    status = _STATUS.get(refused.reason, grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(status, str(refused))


def add_service(
    server: grpc.aio.Server,
    service: ServiceDescriptor,
    servicer: object,
    idle_seconds: float,
    metrics: Metrics,
) -> None:
    """Adds a service, as the generated code would, but for bytes that are no message, or none.

    gRPC would answer the first with a text of Python's, and the second never. To it all methods are
    streams here, which makes no difference on the wire: the one request of most is read and checked
    here, and `Submit` gets None for what is no message.
    """

    def handler(method: MethodDescriptor) -> Any:
        kind, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
        behaviour = getattr(servicer, method.name)

        def parse(message: bytes) -> Any:
            try:
                return kind.FromString(message)
            except DecodeError:
                return None

        async def call(_: Any, context: grpc.aio.ServicerContext) -> None:
            try:
                async with asyncio.timeout(idle_seconds):
                    request = await context.read()
            except TimeoutError:
                await abort(context, IDLE, metrics)
            if request is None or request is grpc.aio.EOF:
                await abort(context, UNREADABLE, metrics)
            answer = await behaviour(request, context)
            if answer is not None:
                await context.write(answer)

        return grpc.stream_stream_rpc_method_handler(
            behaviour if method.client_streaming else call, parse, reply.SerializeToString
        )

    handlers = {method.name: handler(method) for method in service.methods}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )
