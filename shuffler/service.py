"""The two gRPC services and the server that carries them."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from shuffler import shuffler_pb2, shuffler_pb2_grpc
from shuffler.channel import (
    MAX_REPORT_BYTES,
    SERVER_OPTIONS,
    TOKEN_KEY,
    join_address,
    parse_address,
)
from shuffler.errors import Refusal, ShufflerRefused, Verdict
from shuffler.intake import Intake
from shuffler.runs import Draft, Report, RunStore
from shuffler.spool import RoundSpool

__all__ = ["MIN_TOKEN_CHARACTERS", "ShufflerServer"]

MIN_TOKEN_CHARACTERS = 32
"""Shortest control token that a server accepts."""

# Log lines are constant: no senders, no counts, no contents, nothing for each report.
_log = logging.getLogger("shuffler")

_stubs: Any = shuffler_pb2_grpc  # generated without types

_STREAMS = 64
_STREAM_REPORTS = 512  # of one stream, read and not yet answered
_CHUNK_BYTES = 2**19
_WRITE_BYTES = 2**19  # of a report in pieces, at once
_STOP_SECONDS = 2.0
_CONTROL = f"/{shuffler_pb2.DESCRIPTOR.services_by_name['Control'].full_name}/"
_STATUS = {
    Refusal.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Refusal.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.UNKNOWN_RUN: grpc.StatusCode.NOT_FOUND,
    Refusal.UNKNOWN_ROUND: grpc.StatusCode.NOT_FOUND,
    Refusal.RUN_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.BATCH_LOST: grpc.StatusCode.DATA_LOSS,
    Refusal.STORAGE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.STORAGE_FAILED: grpc.StatusCode.INTERNAL,
}


class ShufflerServer:
    """The shuffler's gRPC server on top of a store. Use inside one running event loop."""

    def __init__(self, store: RunStore, control_token: str) -> None:
        """Prepares the server; nothing listens yet.

        Raises:
            ValueError: if the token is shorter than `MIN_TOKEN_CHARACTERS` or not printable ASCII.
        """
        if len(control_token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(f"the control token needs at least {MIN_TOKEN_CHARACTERS} characters")
        if not (control_token.isascii() and control_token.isprintable()):
            raise ValueError("the control token must be printable ASCII")
        self._intake = Intake(store)
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="release")
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="pieces")
        self._server = grpc.aio.server(
            interceptors=[_ControlGate(control_token)], options=SERVER_OPTIONS
        )
        _stubs.add_IntakeServicer_to_server(
            _IntakeService(self._intake, store, self._writers), self._server
        )
        _stubs.add_ControlServicer_to_server(
            _ControlService(self._intake, store, self._readers), self._server
        )

    async def start(self, listen: str, tls: tuple[bytes, bytes] | None = None) -> str:
        """Listens and serves.

        Args:
            listen: `HOST:PORT`; port 0 picks a free one.
            tls: certificate chain and private key, both PEM. Without them only a loopback address
                is allowed.

        Returns:
            The address with the actual port.

        Raises:
            ValueError: if the address is malformed, in use, or not loopback without TLS, or if
                certificate and key can not be used.
        """
        host, port, loopback = parse_address(listen)
        if tls is None and not loopback:
            raise ValueError(
                f"plaintext only on a loopback address: {listen} needs a TLS certificate and key"
            )
        address = join_address(host, port)
        _probe(host, port, listen)
        try:
            if tls is None:
                port = self._server.add_insecure_port(address)
            else:
                certificate, key = tls
                credentials = grpc.ssl_server_credentials([(key, certificate)])
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ValueError(f"can not listen on {listen}")
        await self._server.start()
        return join_address(host, port)

    async def stop(self) -> None:
        """Stops taking calls, gives those in progress two seconds, and stores what is queued."""
        await self._server.stop(_STOP_SECONDS)
        await self._intake.close()
        self._readers.shutdown()
        self._writers.shutdown()


def _probe(host: str, port: int, listen: str) -> None:
    """Finds out why an address can not be had; gRPC only says that it can not."""
    try:
        for family, kind, *_, target in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(target)
    except OSError as error:
        raise ValueError(f"can not listen on {listen}: {error.strerror}") from None


class _ControlGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets calls to the control service through only with the token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(_CONTROL):
            given = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
            given = given if isinstance(given, bytes) else given.encode()
            if not hmac.compare_digest(given, self._expected):
                return grpc.unary_unary_rpc_method_handler(_deny)
        return await continuation(handler_call_details)


async def _deny(request: bytes, context: grpc.aio.ServicerContext) -> None:
    _log.warning("control call without the right token refused")
    await _abort(context, ShufflerRefused(Refusal.UNAUTHENTICATED, "wrong or missing token"))


async def _abort(context: grpc.aio.ServicerContext, refused: ShufflerRefused) -> None:
    status = _STATUS.get(refused.reason, grpc.StatusCode.FAILED_PRECONDITION)
    await context.abort(status, str(refused))


class _IntakeService(shuffler_pb2_grpc.IntakeServicer):
    """What user devices may call."""

    def __init__(self, intake: Intake, store: RunStore, writers: ThreadPoolExecutor) -> None:
        self._intake = intake
        self._store = store
        self._writers = writers
        self._streams = 0

    async def Submit(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        """Hands the reports of one stream to the intake."""
        if self._streams == _STREAMS:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {_STREAMS} streams at once"
            )
        self._streams += 1
        try:
            await self._serve(context)
        finally:
            self._streams -= 1

    async def _serve(self, context: grpc.aio.ServicerContext) -> None:
        """Reads ahead of the answers, so that many reports share one commit."""
        answers: deque[asyncio.Future[Any]] = deque()
        arrived = asyncio.Event()
        reading = True
        window = asyncio.Semaphore(_STREAM_REPORTS)

        async def read() -> None:
            nonlocal reading
            try:
                while (message := await context.read()) is not grpc.aio.EOF:
                    await window.acquire()
                    report = _report(message)
                    if message.more:
                        answers.append(await self._in_pieces(report, context))
                    else:
                        answers.append(await self._intake.submit(report))
                    arrived.set()
            finally:
                reading = False
                arrived.set()

        reader = asyncio.create_task(read())
        try:
            while answers or reading:
                if not answers:
                    arrived.clear()
                    await arrived.wait()
                    continue
                verdicts = [await answers.popleft()]
                while answers and answers[0].done():
                    verdicts.append(answers.popleft().result())
                await context.write(shuffler_pb2.SubmitReply(verdicts=verdicts))
                for _ in verdicts:
                    window.release()
            await reader
        finally:
            reader.cancel()

    async def _in_pieces(
        self, report: Report, context: grpc.aio.ServicerContext
    ) -> asyncio.Future[Any]:
        """Passes the pieces of one report on to the disk, one while the next is received."""
        begun = asyncio.ensure_future(self._intake.call(self._store.begin, report))
        try:
            draft = await asyncio.shield(begun)
        except asyncio.CancelledError:  # the stream is gone; what was begun for it goes too
            begun.add_done_callback(lambda done: self._give_up(done.result()))
            raise
        loop = asyncio.get_running_loop()
        pieces, more = [report.sealed], True
        length = held = len(report.sealed)
        written: asyncio.Future[None] = loop.create_future()
        written.set_result(None)
        try:
            while more:
                message = await context.read()
                if message is grpc.aio.EOF or length > MAX_REPORT_BYTES:
                    await context.abort(
                        grpc.StatusCode.INVALID_ARGUMENT, "a report that does not end"
                    )
                more = message.more
                pieces.append(message.sealed)
                length += len(message.sealed)
                held += len(message.sealed)
                if isinstance(draft, Verdict):
                    pieces.clear()
                elif held >= _WRITE_BYTES or not more:
                    await written
                    written = loop.run_in_executor(self._writers, draft.write, pieces)
                    pieces, held = [], 0
            await written
            if isinstance(draft, Draft):
                return await self._intake.submit(
                    dataclasses.replace(report, sealed=b"", draft=draft)
                )
            answer: asyncio.Future[Any] = loop.create_future()
            answer.set_result(draft)
            return answer
        except BaseException:
            written.add_done_callback(lambda _: self._give_up(draft))  # not while it is written
            raise

    def _give_up(self, draft: Draft | Verdict) -> None:
        if isinstance(draft, Draft):
            self._intake.call_soon(draft.give_up)


class _ControlService(shuffler_pb2_grpc.ControlServicer):
    """What the server may call; `_ControlGate` has checked the token."""

    def __init__(self, intake: Intake, store: RunStore, readers: ThreadPoolExecutor) -> None:
        self._intake = intake
        self._store = store
        self._readers = readers

    async def CreateRun(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        digest = await self._call(
            context, self._store.create_run, request.run_id, request.plan, request.report_bytes
        )
        _log.info("run created")
        return shuffler_pb2.CreateRunReply(plan_digest=digest)

    async def OpenRound(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._call(
            context, self._store.open_round, request.run_id, request.round, request.model_version
        )
        _log.info("round opened")
        return shuffler_pb2.OpenRoundReply()

    async def CloseRound(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        outcome = await self._call(
            context, self._store.close_round, request.run_id, request.round, request.discard
        )
        _log.info("round closed")
        return shuffler_pb2.CloseRoundReply(outcome=shuffler_pb2.Outcome.Name(outcome))

    async def Release(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        begun: list[RoundSpool] = []

        def begin() -> None:
            begun.append(self._store.begin_release(request.run_id, request.round))

        def finish() -> None:
            if begun:
                self._store.finish_release(request.run_id, request.round)

        loop = asyncio.get_running_loop()
        try:
            await self._call(context, begin)
            while True:
                sealed, more = await loop.run_in_executor(
                    self._readers, begun[0].next_chunk, _CHUNK_BYTES
                )
                if not sealed:
                    break
                await context.write(shuffler_pb2.ReleaseChunk(sealed=sealed, more=more))
        except ShufflerRefused as refused:  # the run was ended meanwhile, or the disk fails
            await _abort(context, refused)
        finally:
            # Whatever has become of this call: what it began is over, and the batch gone.
            await asyncio.shield(asyncio.ensure_future(self._intake.call(finish)))
        _log.info("batch released")

    async def EndRun(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._call(context, self._store.end_run, request.run_id)
        _log.info("run ended")
        return shuffler_pb2.EndRunReply()

    async def _call(
        self, context: grpc.aio.ServicerContext, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            return await self._intake.call(function, *arguments)
        except ShufflerRefused as refused:
            await _abort(context, refused)


def _report(request: Any) -> Report:
    return Report(
        request.run_id,
        request.round,
        request.model_version,
        request.plan_digest,
        "",
        request.user,
        None,
        request.sealed,
    )
