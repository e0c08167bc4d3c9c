"""Calls: who may make one, how its message is read, and how it is refused."""

from __future__ import annotations

import asyncio
import logging
from contextlib import nullcontext, suppress
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc.aio import ServicerContext

from shufl.shuffler.callers import Caller, Revoked, Role, caller_of
from shufl.shuffler.config import Limits
from shufl.shuffler.credentials import Credentials
from shufl.shuffler.service.metrics import Metrics
from shufl.shuffler.service.open_calls import CallCount, PermittedCalls
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused

_log = logging.getLogger("shufl.shuffler")

_STATUS = {
    Refusal.NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.NOT_OWNER: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
}
"""Statuses of refusals other than `FAILED_PRECONDITION`; clients read the text alone."""


class Gate:
    """Lets a call through only with the credential of its role, and answers what is refused.

    Attributes:
        permitted: the open calls of those who have been let through.
        credentials: the shuffler's own; only who has one of the same authority is let through.
    """

    def __init__(
        self,
        revoked: Revoked,
        limits: Limits,
        metrics: Metrics,
        credentials: Credentials,
    ) -> None:
        """Remembers whose credentials are withdrawn, how much there may be, and its own."""
        self.permitted = PermittedCalls(self._is_good)
        self._revoked = revoked
        self._idle_seconds = limits.idle_seconds
        self._calls = CallCount(limits.calls, limits.calls_per_sender)
        self._metrics = metrics
        self.renew(credentials)

    def renew(self, credentials: Credentials) -> None:
        """Has credentials take the place of the shuffler's own."""
        self.credentials, self._name = credentials, credentials.name

    def _admit(self, caller: Caller | None, roles: tuple[Role, ...]) -> Caller:
        """The caller, if it may make this call; otherwise the call is refused."""
        here = caller is not None and caller.shuffler in ("", self._name)
        if caller is not None and here and caller.role in roles and self._is_good(caller):
            return caller
        _log.warning("call without the right credential refused")
        raise ShufflerRefused(Refusal.NOT_PERMITTED)

    async def end(self, context: ServicerContext, why: ShufflerRefused | TimeoutError) -> None:
        """Ends the call; a refusal is counted.

        Where the caller does not read, this waits until it does, or is gone: gRPC sends the end
        after what was written before. So everything else of the call is given back first.
        """
        status = grpc.StatusCode.ABORTED
        if isinstance(why, ShufflerRefused):
            self._metrics.refusals.labels(why.reason.name).inc()
            status = _STATUS.get(why.reason, grpc.StatusCode.FAILED_PRECONDITION)
        with suppress(grpc.aio.UsageError):  # it is being ended already
            await context.abort(status, str(why))

    def add_service(
        self,
        server: grpc.aio.Server,
        service: ServiceDescriptor,
        servicer: object,
        *roles: Role,
    ) -> None:
        """Adds a service as generated code would, but refuses malformed and missing requests.

        For malformed bytes gRPC returns a Python traceback; without a request it never
        answers. To gRPC all methods are streams here, which makes no difference on the wire: this
        code reads and checks the one request of each. A method that raises `ShufflerRefused`, or
        `TimeoutError`, ends its call with that. Methods are for the roles, and get the caller
        beside the request; where there is none, for whoever can connect. Methods that the servicer
        does not have are not served.
        """

        def handler(method: MethodDescriptor) -> Any:
            kind, reply = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
            behaviour = getattr(servicer, method.name)

            def parse(message: bytes) -> Any:
                try:
                    return kind.FromString(message)
                except DecodeError:
                    return None

            async def answer(context: ServicerContext, certified: Caller | None) -> Any:
                caller = self._admit(certified, roles) if roles else None
                who = () if caller is None else (caller,)
                async with nullcontext() if caller is None else self.permitted.of(caller):
                    return await behaviour(await self._read(context), *who, context)

            async def call(_: Any, context: ServicerContext) -> None:
                sender, certified = self._sender(context)
                is_server = certified is not None and certified.role is Role.SERVER
                with self._calls.counted(sender, is_server) as allowed:
                    try:
                        if not allowed:
                            raise ShufflerRefused(Refusal.BUSY)
                        message = await answer(context, certified)
                    except (ShufflerRefused, TimeoutError) as error:
                        await self.end(context, error)
                        return
                    if message is not None:
                        await context.write(message)

            return grpc.stream_stream_rpc_method_handler(call, parse, reply.SerializeToString)

        served = [method for method in service.methods if hasattr(servicer, method.name)]
        handlers = {method.name: handler(method) for method in served}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service.full_name, handlers),)
        )

    def _sender(self, context: ServicerContext) -> tuple[str, Caller | None]:
        """Whose call it is, for the limits on calls, and who its certificate says it is."""
        (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
        caller = caller_of(certificate)
        if caller is None:
            return certificate.decode(errors="replace"), None
        return f"{caller.role} {caller.name}", caller

    async def _read(self, context: ServicerContext) -> Any:
        """The call's one request; refused if it is none, or does not come whole for too long.

        The caller must have said that nothing follows before it is answered. Otherwise a caller who
        does not read its answer could fill the connection's window, and that memory, for as long as
        it likes.
        """
        try:
            async with asyncio.timeout(self._idle_seconds):
                request = await context.read()
                is_last = request is not grpc.aio.EOF and await context.read() is grpc.aio.EOF
        except TimeoutError:
            raise ShufflerRefused(Refusal.IDLE) from None
        if request is None or not is_last:
            raise ShufflerRefused(Refusal.MALFORMED)
        return request

    def _is_good(self, caller: Caller) -> bool:
        """Whether a caller's certificate is of this authority, not expired and not withdrawn."""
        known = caller.is_of(self.credentials.authority)
        return known and not caller.expired and caller not in self._revoked
