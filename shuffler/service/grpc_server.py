"""The shuffler's gRPC server."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from typing import Any

import grpc
from grpc.aio import ServicerContext
from grpc_health.v1 import health_pb2

from shufl.shuffler.callers import Caller, Revoked, Role
from shufl.shuffler.config import Limits
from shufl.shuffler.credentials import Credentials
from shufl.shuffler.service import memory
from shufl.shuffler.service.admission import Gate
from shufl.shuffler.service.control_service import ControlService
from shufl.shuffler.service.intake_service import IntakeService
from shufl.shuffler.service.metrics import Metrics
from shufl.shuffler.store.runs import RunStore
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import SERVER_OPTIONS, join_address, parse_address, probe
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused

_log = logging.getLogger("shufl.shuffler")

_STOP_SECONDS = 2.0
_WATCH_SECONDS = 0.1
_MEMORY_SECONDS = 10.0


class ShufflerServer:
    """The shuffler's gRPC server on top of a store. Use inside one running event loop."""

    def __init__(
        self,
        store: RunStore,
        credentials: Credentials,
        revoked: Revoked,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        """Prepares the server; nothing listens yet.

        `credentials` are the shuffler's own. Calls and reports of those who are `revoked` are
        refused, also on connections that are open.
        """
        memory.keep_little()
        self._gate = gate = Gate(revoked, limits, metrics, credentials)
        self._changed = False
        self._server = grpc.aio.server(
            options=[
                *SERVER_OPTIONS,
                ("grpc.max_concurrent_streams", limits.calls_per_sender),
            ],
            maximum_concurrent_rpcs=limits.calls,
        )
        self._watch: asyncio.Task[None] | None = None
        self._intake = IntakeService(store.batches, metrics)
        self._control = ControlService(store, limits, metrics)
        self._stop_seconds = limits.stop_seconds
        self._end_old_rounds = store.end_old_rounds
        self._release_seconds = 3600 * limits.release_hours
        services, healthy = shuffler_pb2.DESCRIPTOR.services_by_name, health_pb2.DESCRIPTOR
        gate.add_service(self._server, services["Intake"], self._intake, Role.NODE)
        gate.add_service(self._server, services["Control"], self._control, Role.SERVER)
        gate.add_service(self._server, services["Record"], self._control)
        callers = Role.NODE, Role.SERVER, Role.MONITOR
        gate.add_service(self._server, healthy.services_by_name["Health"], _Health(store), *callers)

    async def start(self, listen: str) -> str:
        """Listens and serves.

        Port 0 picks a free one. Returns the address with the actual port.

        Raises:
            ValueError: if the address is malformed or in use, or if certificate and key cannot be
                used.
        """
        host, port, _ = parse_address(listen)
        address = join_address(host, port)
        try:
            probe(host, port)
        except OSError as error:  # gRPC says only that it cannot
            raise ValueError(f"cannot listen on {listen}: {error.strerror}") from None
        try:
            tls = grpc.dynamic_ssl_server_credentials(
                _configuration(self._gate.credentials),
                self._renewed,
                require_client_authentication=True,
            )
            port = self._server.add_secure_port(address, tls)
        except RuntimeError:
            raise ValueError(f"cannot listen on {listen}") from None
        await self._server.start()
        self._watch = asyncio.create_task(self._keep_watch())
        return join_address(host, port)

    def renew(self, credentials: Credentials) -> bool:
        """Uses these credentials from now on; returns whether they have changed.

        Where their authority is another one, calls on connections that are open are refused, too.
        """
        before = self._gate.credentials
        self._gate.renew(credentials)
        self._changed |= credentials != before
        return credentials != before

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """What handshakes show from now on; gRPC asks before each. None: the same as before."""
        if not self._changed:
            return None
        self._changed = False
        return _configuration(self._gate.credentials)

    async def stop(self, at_once: asyncio.Event) -> None:
        """Stops taking calls, gives those in progress time, and destroys all batches.

        Releases get `limits.stop_seconds`; all other calls two seconds, or as long as there are
        releases.

        Once `at_once` is set nothing is waited for.
        """
        stopping = asyncio.create_task(self._server.stop(self._stop_seconds + _STOP_SECONDS))
        enough = [
            asyncio.create_task(at_once.wait()),
            asyncio.create_task(self._be_patient()),
        ]
        await asyncio.wait({stopping, *enough}, return_when=asyncio.FIRST_COMPLETED)
        for task in enough:
            task.cancel()
        await self._server.stop(None)
        await stopping
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        """Waits until nothing is being done."""
        self._intake.stop()
        self._control.stop()

    async def _keep_watch(self) -> None:
        """Ends what should not be open, and gives memory back to the system."""
        given_back = time.monotonic()
        while True:
            if time.monotonic() - given_back > _MEMORY_SECONDS:
                given_back = time.monotonic()
                try:
                    await self._control.call(self._end_old_rounds, self._release_seconds)
                except ShufflerRefused as error:  # the disk is full, so it tries again later
                    _log.error("old batches are not destroyed", extra={"reason": str(error)})
                await asyncio.to_thread(memory.give_back)
            self._gate.permitted.end_bad()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _be_patient(self) -> None:
        """Waits for as long as calls in progress get."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self._stop_seconds, _STOP_SECONDS)):
                await asyncio.sleep(_STOP_SECONDS)
                while self._control.releases:
                    await asyncio.wait(self._control.releases)


class _Health:
    """Says that the shuffler serves; one that is being stopped takes no calls.

    There is no `Watch`: each would be a call that never ends.
    """

    def __init__(self, store: RunStore) -> None:
        self._store = store

    async def Check(self, request: Any, _: Caller, context: ServicerContext) -> Any:
        """Answers about the whole shuffler, which alone has a status."""
        if request.service:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        if self._store.is_full:
            raise ShufflerRefused(Refusal.STORAGE_FULL)
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


def _configuration(credentials: Credentials) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(credentials.private_key, credentials.certificate)], credentials.authority
    )
