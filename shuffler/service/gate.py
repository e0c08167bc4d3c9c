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

from shuffler.callers import Caller, Revoked, Role, caller_of
from shuffler.service.operations import Metrics
from shuffler.wire.channel import TOKEN_KEY
from shuffler.wire.errors import Refusal, ShufflerRefused

_log = logging.getLogger("shuffler")

_ANY_USERS = 2**32  # a plan has no more
_STATUS = {
    Refusal.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Refusal.NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.NOT_OWNER: grpc.StatusCode.PERMISSION_DENIED,
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
    """Lets a call through only with the credential of its role, and answers what is refused."""

    def __init__(
        self, token: str | None, revoked: Revoked, idle_seconds: float, metrics: Metrics
    ) -> None:
        """Remembers who may call: with this token; None: with a certificate."""
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._revoked = revoked
        self._idle_seconds = idle_seconds
        self._metrics = metrics

    def admit(self, context: grpc.aio.ServicerContext, role: Role) -> Caller:
        """Who calls; a call that it may not make is refused."""
        if self._expected is None:
            (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
            caller = caller_of(certificate)
            if caller is not None and caller.role is role and self._is_good(caller):
                return caller
            refused = Refusal.NOT_PERMITTED
        else:
            given = dict(context.invocation_metadata() or ()).get(TOKEN_KEY, "")
            if isinstance(given, str):
                given = given.encode()
            if role is Role.NODE or hmac.compare_digest(given, self._expected):
                return Caller(role, "", _ANY_USERS)
            refused = Refusal.UNAUTHENTICATED
        _log.warning("call without the right credential refused")
        raise ShufflerRefused(refused)

    async def end(
        self, context: grpc.aio.ServicerContext, why: ShufflerRefused | TimeoutError
    ) -> None:
        """Ends the call; a refusal is counted.

        Where the caller does not read, this waits until it does, or is gone: gRPC sends the end
        after what was written before. So everything else of the call is given back first.
        """
        status = grpc.StatusCode.ABORTED
        if isinstance(why, ShufflerRefused):
            self._metrics.refusals.labels(why.reason).inc()
            status = _STATUS.get(why.reason, grpc.StatusCode.FAILED_PRECONDITION)
        await context.abort(status, str(why))

    def add_service(
        self,
        server: grpc.aio.Server,
        service: ServiceDescriptor,
        servicer: object,
        role: Role | None = None,
    ) -> None:
        """Adds a service, as the generated code would, but for bytes that are no message, or none.

        gRPC would answer the first with a text of Python's, and the second never. To it all methods
        are streams here, which makes no difference on the wire: the one request of most is read and
        checked here, and `Submit` gets None for what is no message. A method that raises
        `ShufflerRefused`, or `TimeoutError`, ends its call with that. Methods with one request are
        for the role, and get the caller beside it; where there is no role, for whoever can connect.
        A method with a stream of requests admits its callers itself.
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
                    request = await self.read(context)
                    if request is grpc.aio.EOF:
                        raise ShufflerRefused(Refusal.MALFORMED)
                    who = () if role is None else (self.admit(context, role),)
                    answer = await behaviour(request, *who, context)
                except (ShufflerRefused, TimeoutError) as error:
                    await self.end(context, error)
                    return
                if answer is not None:
                    await context.write(answer)

            return grpc.stream_stream_rpc_method_handler(
                behaviour if method.client_streaming else call, parse, reply.SerializeToString
            )

        handlers = {method.name: handler(method) for method in service.methods}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.full_name, handlers),)
        )

    async def read(self, context: grpc.aio.ServicerContext, caller: Caller | None = None) -> Any:
        """The call's next message, or `grpc.aio.EOF`.

        A message that does not come for too long or is none is refused, and so is one of a caller
        whose certificate has expired or been withdrawn by now.
        """
        try:
            async with asyncio.timeout(self._idle_seconds):
                message = await context.read()
        except TimeoutError:
            raise ShufflerRefused(Refusal.IDLE) from None
        if message is None:
            raise ShufflerRefused(Refusal.MALFORMED)
        if message is not grpc.aio.EOF and caller is not None and not self._is_good(caller):
            raise ShufflerRefused(Refusal.NOT_PERMITTED)
        return message

    def _is_good(self, caller: Caller) -> bool:
        """Whether a caller's certificate has neither expired nor been withdrawn by now."""
        return not caller.expired and caller not in self._revoked
