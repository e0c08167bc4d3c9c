"""The two gRPC services and the server that carries them."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2

from shuffler import shuffler_pb2, shuffler_pb2_grpc
from shuffler.channel import (
    MAX_REPORT_BYTES,
    SERVER_OPTIONS,
    TOKEN_KEY,
    WORKER_KEY,
    join_address,
    parse_address,
)
from shuffler.config import FrontLimits, Limits
from shuffler.errors import Outcome, Refusal, ShufflerRefused, Verdict
from shuffler.intake import Intake
from shuffler.keys import Caller, Credentials, Revoked, Role, caller_of
from shuffler.operations import Metrics, Pace
from shuffler.runs import Draft, Report, RunStore, Workers

__all__ = ["MIN_TOKEN_CHARACTERS", "ControlServer", "Gate", "ShufflerServer"]

MIN_TOKEN_CHARACTERS = 32
"""Shortest control token that a server accepts."""

# Log lines name runs and rounds: no senders, no counts, no contents, nothing for each report.
_log = logging.getLogger("shuffler")

_STREAM_REPORTS = 512  # of one stream, read and not yet answered
_CHUNK_BYTES = 2**19
_WRITE_BYTES = 2**19  # of a report in pieces, at once
_STOP_SECONDS = 2.0
_POLL_SECONDS = 0.05  # how soon the end of the last release is seen
_NOT_PERMITTED = ShufflerRefused(Refusal.NOT_PERMITTED, "not with this certificate")
_IDLE = ShufflerRefused(Refusal.IDLE, "nothing came for too long")
_ENDLESS = ShufflerRefused(Refusal.MALFORMED, "a report that does not end")
_UNREADABLE = ShufflerRefused(Refusal.MALFORMED, "not a message of this protocol")
_EMPTY_PIECE = ShufflerRefused(Refusal.MALFORMED, "a piece of a report is empty")
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
    Refusal.WORKER_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
}


class _Batch(Protocol):
    def next_chunk(self, limit: int) -> tuple[list[bytes], bool]: ...


class _Rounds(Protocol):
    """Runs and rounds: a shuffler's own (`RunStore`), or those of a front's workers (`Front`)."""

    def create_run(self, run_id: str, plan: bytes, length: int, workers: Workers, /) -> str: ...
    def open_round(self, run_id: str, number: int, model_version: str, /) -> None: ...
    def close_round(
        self, run_id: str, number: int, discard: bool, below_minimum: bool, /
    ) -> Outcome: ...
    def count(self, run_id: str, number: int, workers: Workers, /) -> tuple[int, int, str]: ...
    def begin_release(self, run_id: str, number: int, /) -> _Batch: ...
    def finish_release(self, run_id: str, number: int, /) -> None: ...
    def end_run(self, run_id: str, /) -> None: ...


class _Calls(Protocol):
    """Calls functions in a thread, in order: each after all that were given before."""

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any: ...
    async def close(self) -> None: ...


class ControlServer:
    """A gRPC server of the `Control` service and of health. Use inside one running event loop."""

    def __init__(
        self,
        rounds: _Rounds,
        calls: _Calls,
        gate: Gate,
        credentials: Credentials | None,
        limits: Limits | FrontLimits,
        metrics: Metrics,
        intakes: Sequence[_IntakeService] = (),
    ) -> None:
        """Prepares the server; nothing listens yet.

        Args:
            rounds: what the service is about.
            calls: what calls `rounds`.
            gate: who may call the service.
            credentials: the server's side of TLS; None: plaintext.
            limits: how long things may take.
            metrics: what is counted.
            intakes: the service for user devices, if it has one.
        """
        self._credentials = credentials
        self._calls = calls
        self._readers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="release")
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()
        control = _ControlService(gate, calls, rounds, self._readers, limits, metrics)
        self._releases = control.releases
        self._stop_seconds = limits.stop_seconds
        ours, theirs = shuffler_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR
        for service, servicer in (
            *((ours.services_by_name["Intake"], each) for each in intakes),
            (ours.services_by_name["Control"], control),
            (theirs.services_by_name["Health"], self._health),
        ):
            _add_service(self._server, service, servicer, limits.idle_seconds, metrics)

    async def start(self, listen: str) -> str:
        """Listens and serves.

        Args:
            listen: `HOST:PORT`; port 0 picks a free one. In plaintext only a loopback address.

        Returns:
            The address with the actual port.

        Raises:
            ValueError: if the address is malformed, in use, or not loopback without TLS, or if
                certificate and key can not be used.
        """
        host, port, loopback = parse_address(listen)
        credentials = self._credentials
        if credentials is None and not loopback:
            raise ValueError(f"plaintext only on a loopback address, got {listen}")
        address = join_address(host, port)
        _probe(host, port, listen)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                tls = grpc.ssl_server_credentials(
                    [(credentials.private_key, credentials.certificate)],
                    root_certificates=credentials.authority,
                    require_client_auth=True,
                )
                port = self._server.add_secure_port(address, tls)
        except RuntimeError:
            port = 0
        if port == 0:
            raise ValueError(f"can not listen on {listen}")
        await self._server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        return join_address(host, port)

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Stops taking calls, gives those in progress time, and stores what is queued.

        Releases get `limits.stop_seconds`, because a batch is lost with its release; all other
        calls two seconds, or as long as there are releases.

        Args:
            at_once: once it is set nothing is waited for.
        """
        at_once = at_once or asyncio.Event()
        await self._health.enter_graceful_shutdown()
        loop = asyncio.get_running_loop()
        stopping = asyncio.create_task(self._server.stop(self._stop_seconds + _STOP_SECONDS))
        hurry = asyncio.create_task(at_once.wait())
        begun = loop.time()
        try:
            while not (stopping.done() or hurry.done()):
                waited = loop.time() - begun
                patience = self._stop_seconds if self._releases else _STOP_SECONDS
                if waited >= patience:
                    break
                await asyncio.wait(
                    {stopping, hurry},
                    timeout=min(_POLL_SECONDS, patience - waited),
                    return_when=asyncio.FIRST_COMPLETED,
                )
        finally:
            hurry.cancel()
        await self._server.stop(None)
        await stopping
        await self._calls.close()
        self._readers.shutdown()


class ShufflerServer(ControlServer):
    """The shuffler's gRPC server on top of a store. Use inside one running event loop."""

    def __init__(
        self,
        store: RunStore,
        security: Credentials | str,
        revoked: Revoked,
        limits: Limits,
        metrics: Metrics,
        worker: str = "",
    ) -> None:
        """Prepares the server; nothing listens yet.

        Args:
            store: runs and rounds.
            security: the shuffler's side of TLS; or, in plaintext, the server's control token.
            revoked: whose calls and reports are refused, also on connections that are open.
            limits: how much at once.
            metrics: what is counted.
            worker: which worker of a front this is; empty: a shuffler alone.

        Raises:
            ValueError: if a token is shorter than `MIN_TOKEN_CHARACTERS` or not printable ASCII.
        """
        token = security if isinstance(security, str) else None
        if token is not None and len(token) < MIN_TOKEN_CHARACTERS:
            raise ValueError(f"the control token needs at least {MIN_TOKEN_CHARACTERS} characters")
        if token is not None and not (token.isascii() and token.isprintable()):
            raise ValueError("the control token must be printable ASCII")
        gate = Gate(token, revoked, metrics, worker)
        queue = Intake(store)
        credentials = security if isinstance(security, Credentials) else None
        if worker:
            # A front reads this part only as the others' turns allow: how long is its own limit.
            limits = limits.model_copy(update={"release_idle_seconds": math.inf})
        self._writers = ThreadPoolExecutor(max_workers=4, thread_name_prefix="pieces")
        intake = _IntakeService(gate, queue, store, self._writers, limits, metrics)
        super().__init__(store, queue, gate, credentials, limits, metrics, [intake])

    async def stop(self, at_once: asyncio.Event | None = None) -> None:
        """Stops as `ControlServer` does, and writes what is being written."""
        await super().stop(at_once)
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


def _add_service(
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
                await _abort(context, _IDLE, metrics)
            if request is None or request is grpc.aio.EOF:
                await _abort(context, _UNREADABLE, metrics)
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


class Gate:
    """Lets a call through only with the credential of its role.

    A worker of a front serves its front in the place of the server, which must not see a part
    alone, and nodes that are enrolled there and nowhere else: else a user could report twice.
    """

    def __init__(
        self, token: str | None, revoked: Revoked, metrics: Metrics, worker: str = ""
    ) -> None:
        """Remembers who may call: with this token, or for this worker; empty: with no front."""
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._revoked = revoked
        self._metrics = metrics
        self._worker = worker

    async def admit(self, context: grpc.aio.ServicerContext, role: Role) -> Caller:
        """Who calls; ends the call if it may not make it."""
        if self._expected is None:
            (certificate,) = context.auth_context().get("x509_pem_cert", [b""])
            caller = caller_of(certificate)
            if role is Role.SERVER and self._worker:
                role = Role.FRONT
            refused = _NOT_PERMITTED
            if caller is not None and caller.role is role and self.still_admits(caller):
                meant = caller.worker
                if role is not Role.NODE:
                    meant = _metadata(context, WORKER_KEY).decode(errors="replace")
                if meant == self._worker:
                    return caller
                refused = ShufflerRefused(
                    Refusal.NOT_PERMITTED,
                    f"for worker {meant or 'none'}, this is worker {self._worker or 'none'}",
                )
        else:
            given = _metadata(context, TOKEN_KEY)
            if role is Role.NODE or hmac.compare_digest(given, self._expected):
                return Caller(role, "", _ANY_USERS)
            refused = ShufflerRefused(Refusal.UNAUTHENTICATED, "wrong or missing token")
        _log.warning("call without the right credential refused")
        await _abort(context, refused, self._metrics)
        raise refused  # `_abort` does not return

    def still_admits(self, caller: Caller) -> bool:
        """Whether a caller's certificate has neither expired nor been withdrawn by now."""
        return not caller.expired and caller not in self._revoked


def _metadata(context: grpc.aio.ServicerContext, key: str) -> bytes:
    given = dict(context.invocation_metadata() or ()).get(key, "")
    return given if isinstance(given, bytes) else given.encode()


class _StreamEnded(Exception):
    """Ends a stream of reports: what was refused, or in words what took too long."""

    def __init__(self, refused: ShufflerRefused | str) -> None:
        super().__init__(str(refused))
        self.refused = refused


async def _abort(
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


class _IntakeService(shuffler_pb2_grpc.IntakeServicer):
    """What user devices may call."""

    def __init__(
        self,
        gate: Gate,
        intake: Intake,
        store: RunStore,
        writers: ThreadPoolExecutor,
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._intake = intake
        self._store = store
        self._writers = writers
        self._limits = limits
        self._metrics = metrics
        self._streams = 0
        self._streams_of: Counter[str] = Counter()
        rate = limits.reports_per_second
        self._pace = None if rate is None else Pace(rate, limits.burst)

    async def Submit(self, request_iterator: Any, context: grpc.aio.ServicerContext) -> None:
        """Hands the reports of one stream to the intake.

        A stream that has been ended is nobody's; one whose caller does not even take the end of it
        still counts as that caller's.
        """
        caller = await self._gate.admit(context, Role.NODE)
        if (
            self._streams >= self._limits.streams
            or self._streams_of[caller.name] >= self._limits.streams_per_sender
        ):
            busy = ShufflerRefused(Refusal.BUSY, "too many streams at once")
            await _abort(context, busy, self._metrics)
        self._streams_of[caller.name] += 1
        try:
            # gRPC can not end a call whose first write it is held up with.
            await context.send_initial_metadata(())
            await self._counted(caller, context)
        except _StreamEnded as ended:
            # Here, where no more will be written: an abort beside a write can leave the call open.
            await _abort(context, ended.refused, self._metrics)
        finally:
            self._streams_of[caller.name] -= 1
            if not self._streams_of[caller.name]:
                del self._streams_of[caller.name]

    async def _counted(self, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        self._streams += 1
        self._metrics.streams.inc()
        try:
            await self._serve(caller, context)
        finally:
            self._metrics.streams.dec()
            self._streams -= 1

    async def _serve(self, caller: Caller, context: grpc.aio.ServicerContext) -> None:
        """Reads ahead of the answers, so that many reports share one commit."""
        answers: deque[asyncio.Future[Any]] = deque()
        arrived = asyncio.Event()
        reading = True
        window = asyncio.Semaphore(_STREAM_REPORTS)
        drafts = _Drafts(self._intake, self._store)

        async def read() -> None:
            nonlocal reading
            try:
                while (message := await self._read(context, caller)) is not grpc.aio.EOF:
                    await window.acquire()
                    if self._pace is not None:
                        await asyncio.sleep(self._pace.delay(caller.name, time.monotonic()))
                    if message.more and not message.sealed:
                        raise _StreamEnded(_EMPTY_PIECE)
                    report = _report(message, caller)
                    if message.more:
                        answers.append(await self._in_pieces(report, drafts, caller, context))
                    else:
                        answers.append(await self._intake.submit(report))
                    arrived.set()
            finally:
                drafts.close()
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
                for verdict in verdicts:  # first: with the answer the caller may end this call
                    self._metrics.reports.labels(verdict.name).inc()
                await self._write(context, shuffler_pb2.SubmitReply(verdicts=verdicts))
                for _ in verdicts:
                    window.release()
            await reader
        finally:
            reader.cancel()

    async def _read(self, context: grpc.aio.ServicerContext, caller: Caller) -> Any:
        """The next message; ends a stream that is silent for too long or not admitted any more."""
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                message = await context.read()
        except TimeoutError:
            raise _StreamEnded(_IDLE) from None
        if message is None:
            raise _StreamEnded(_UNREADABLE)
        if message is not grpc.aio.EOF and not self._gate.still_admits(caller):
            raise _StreamEnded(_NOT_PERMITTED)
        return message

    async def _write(self, context: grpc.aio.ServicerContext, reply: Any) -> None:
        """Answers; ends a stream whose caller does not take its answers."""
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                await context.write(reply)
        except TimeoutError:
            raise _StreamEnded("answers are not taken") from None

    async def _in_pieces(
        self, report: Report, drafts: _Drafts, caller: Caller, context: grpc.aio.ServicerContext
    ) -> asyncio.Future[Any]:
        """Passes the pieces of one report on to the disk, one while the next is received."""
        draft = await drafts.take(report)
        loop = asyncio.get_running_loop()
        pieces, more = [report.sealed], True
        length = held = len(report.sealed)
        written: asyncio.Future[None] = loop.create_future()
        written.set_result(None)
        try:
            while more:
                message = await self._read(context, caller)
                if message is grpc.aio.EOF or length > MAX_REPORT_BYTES:
                    raise _StreamEnded(_ENDLESS)
                if not message.sealed:
                    raise _StreamEnded(_EMPTY_PIECE)
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
            written.add_done_callback(lambda _: drafts.give_up(draft))  # not while it is written
            raise


class _Drafts:
    """Where one stream's long reports are written.

    The next one's place is asked for while a report is received, so that no report waits until the
    one before it is on disk. What the place is good for is checked when its report is complete.
    """

    def __init__(self, intake: Intake, store: RunStore) -> None:
        self._intake = intake
        self._store = store
        self._next: asyncio.Future[Draft | Verdict] | None = None
        self._round: tuple[str, ...] = ()  # of the next

    async def take(self, report: Report) -> Draft | Verdict:
        """A place for a report, or why it would not be accepted."""
        round = report.run_id, str(report.round), report.model_version, report.plan_digest
        if round != self._round:
            self.close()
        draft = await self._wait() if self._next is not None else None
        if not isinstance(draft, Draft):
            self._begin(report)
            draft = await self._wait()
        if isinstance(draft, Draft):
            self._round = round
            self._begin(report)
        return draft

    def close(self) -> None:
        """Gives the next place back."""
        begun, self._next = self._next, None
        if begun is not None:
            begun.add_done_callback(lambda done: self.give_up(done.result()))

    def give_up(self, draft: Draft | Verdict) -> None:
        """Gives a place back."""
        if isinstance(draft, Draft):
            self._intake.call_soon(draft.give_up)

    def _begin(self, report: Report) -> None:
        self._next = self._intake.call_soon(self._store.begin, report)

    async def _wait(self) -> Draft | Verdict:
        assert self._next is not None
        draft = await asyncio.shield(self._next)  # if the stream ends here, `close` gives it up
        self._next = None
        return draft


class _ControlService(shuffler_pb2_grpc.ControlServicer):
    """What the server may call; at a worker, the front."""

    def __init__(
        self,
        gate: Gate,
        calls: _Calls,
        rounds: _Rounds,
        readers: ThreadPoolExecutor,
        limits: Limits | FrontLimits,
        metrics: Metrics,
    ) -> None:
        self._gate = gate
        self._calls = calls
        self._rounds = rounds
        self._readers = readers
        self._limits = limits
        self._metrics = metrics
        self.releases: set[object] = set()  # those in progress

    async def CreateRun(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._gate.admit(context, Role.SERVER)
        digest = await self._call(
            context,
            self._rounds.create_run,
            request.run_id,
            request.plan,
            request.report_bytes,
            _workers(request),
        )
        _log.info("run created", extra={"run": request.run_id})
        return shuffler_pb2.CreateRunReply(plan_digest=digest)

    async def OpenRound(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._gate.admit(context, Role.SERVER)
        await self._call(
            context, self._rounds.open_round, request.run_id, request.round, request.model_version
        )
        _log.info("round opened", extra=_about(request))
        return shuffler_pb2.OpenRoundReply()

    async def CloseRound(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._gate.admit(context, Role.SERVER)
        outcome = await self._call(
            context,
            self._rounds.close_round,
            request.run_id,
            request.round,
            request.discard,
            request.below_minimum,
        )
        name = shuffler_pb2.Outcome.Name(outcome)
        self._metrics.rounds.labels(name).inc()
        _log.info("round closed", extra={**_about(request), "outcome": name})
        return shuffler_pb2.CloseRoundReply(outcome=name)

    async def Release(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        await self._gate.admit(context, Role.SERVER)
        release = object()
        self.releases.add(release)
        ended: ShufflerRefused | str | None = None
        try:
            await context.send_initial_metadata(())
            await self._release(request, context)
        except ShufflerRefused as refused:
            ended = refused
        except TimeoutError:
            _log.warning("batch lost: its release is not read", extra=_about(request))
            ended = "the release is not read"
        finally:
            self.releases.discard(release)
        if ended is not None:
            await _abort(context, ended, self._metrics)
        self._metrics.releases.inc()
        _log.info("batch released", extra=_about(request))

    async def _release(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Sends a batch; raises `TimeoutError` when its caller does not read."""
        begun: list[_Batch] = []

        def begin() -> None:
            begun.append(self._rounds.begin_release(request.run_id, request.round))

        def finish() -> None:
            if begun:
                self._rounds.finish_release(request.run_id, request.round)

        loop = asyncio.get_running_loop()
        try:
            await self._calls.call(begin)
            while True:
                sealed, more = await loop.run_in_executor(
                    self._readers, begun[0].next_chunk, _CHUNK_BYTES
                )
                if not sealed:
                    break
                async with asyncio.timeout(self._limits.release_idle_seconds):
                    await context.write(shuffler_pb2.ReleaseChunk(sealed=sealed, more=more))
        finally:
            # Whatever has become of this call: what it began is over, and the batch gone.
            await asyncio.shield(asyncio.ensure_future(self._calls.call(finish)))

    async def EndRun(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._gate.admit(context, Role.SERVER)
        await self._call(context, self._rounds.end_run, request.run_id)
        _log.info("run ended", extra={"run": request.run_id})
        return shuffler_pb2.EndRunReply()

    async def Count(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        await self._gate.admit(context, Role.FRONT)
        reports, minimum_batch, digest = await self._call(
            context, self._rounds.count, request.run_id, request.round, _workers(request)
        )
        return shuffler_pb2.CountReply(
            reports=reports, minimum_batch=minimum_batch, plan_digest=digest
        )

    async def _call(
        self, context: grpc.aio.ServicerContext, function: Callable[..., Any], *arguments: Any
    ) -> Any:
        try:
            return await self._calls.call(function, *arguments)
        except ShufflerRefused as refused:
            await _abort(context, refused, self._metrics)


def _about(request: Any) -> dict[str, Any]:
    return {"run": request.run_id, "round": request.round}


def _workers(request: Any) -> Workers:
    return [(worker.name, worker.users) for worker in request.workers]


def _report(request: Any, caller: Caller) -> Report:
    return Report(
        request.run_id,
        request.round,
        request.model_version,
        request.plan_digest,
        caller.name,
        request.user,
        caller.users,
        request.sealed,
    )
