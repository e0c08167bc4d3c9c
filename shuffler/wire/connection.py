"""A client's connection to the shuffler, and the calls and new tries that are made over it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc
from google.protobuf.message_factory import GetMessageClass

from shufl.shuffler.credentials import AnyCredentials, Credentials
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS, check_address, join_address, parse_address
from shufl.shuffler.wire.errors import (
    Refusal,
    ShufflerError,
    ShufflerRefused,
    ShufflerUnavailable,
)
from shufl.shuffler.wire.shuffler_pb2 import DESCRIPTOR

_FIRST_SECONDS = 0.1
_LONGEST_SECONDS = 5.0
_random = random.SystemRandom()


class Connection:
    """One channel, made when it is first used; every wait for the shuffler has a limit.

    Attributes:
        address: the shuffler's `HOST:PORT`.
        timeout: longest wait for one answer, in seconds.
    """

    def __init__(self, address: str, credentials: AnyCredentials, timeout: float = 60.0) -> None:
        """Remembers where the shuffler is; connects with the first call.

        `timeout` is the longest wait in seconds for one answer.

        Raises:
            ValueError: the address is malformed.
        """
        host, port, _ = parse_address(check_address(address))
        self.address = join_address(host, port)
        self.timeout = timeout
        self._credentials = credentials
        self._shown: Credentials | None = None
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; the next call makes a new one."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def connected(self) -> grpc.Channel:
        """The channel; another one once the credentials are others.

        Calls on the one before go on.

        Raises:
            OSError, ValueError: the credentials cannot be read, and none were before.
        """
        with self._lock:
            show = self.credentials
            if self._channel is None or show != self._shown:
                tls = grpc.ssl_channel_credentials(
                    show.authority, show.private_key, show.certificate
                )
                self._channel = grpc.secure_channel(self.address, tls, CHANNEL_OPTIONS)
                self._shown = show
            return self._channel

    @property
    def credentials(self) -> Credentials:
        """This party's, as they are now.

        Raises:
            OSError, ValueError: they cannot be read, and none were before.
        """
        if isinstance(self._credentials, Credentials):
            return self._credentials
        try:
            return self._credentials()
        except (OSError, ValueError):  # as while they are being replaced
            if self._shown is None:
                raise
            return self._shown

    @contextmanager
    def errors(self, seconds: float | None = None) -> Iterator[None]:
        """Turns gRPC's errors and a wait that was too long into ours.

        The longest wait is `timeout` where `seconds` is None.
        """
        within = self.timeout if seconds is None else seconds
        before = self._shown
        try:
            yield
        except grpc.RpcError as error:
            details = str(error.details() or error.code().name)
            reason, _, sentence = details.partition(": ")
            if reason == Refusal.NOT_PERMITTED.name and (before or self._shown) != self.credentials:
                details = "the certificate of this call was withdrawn, there is another now"
            elif reason in Refusal.__members__:
                raise ShufflerRefused(Refusal[reason], sentence) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                details = f"nothing within {within:g} s"
            raise self._unavailable(details) from error
        except TimeoutError:
            raise self._unavailable(f"nothing within {within:g} s") from None

    def _unavailable(self, details: str) -> ShufflerUnavailable:
        return ShufflerUnavailable(f"shuffler at {self.address} does not answer: {details}")


def method_of(channel: grpc.Channel, service: str, name: str) -> Any:
    """A method of one of the shuffler's services over a channel, as generated code has it."""
    about = DESCRIPTOR.services_by_name[service].methods_by_name[name]
    make = channel.unary_stream if about.server_streaming else channel.unary_unary
    return make(
        f"/{about.containing_service.full_name}/{name}",
        request_serializer=GetMessageClass(about.input_type).SerializeToString,
        response_deserializer=GetMessageClass(about.output_type).FromString,
    )


class Retries:
    """Waits before one more try: exponential backoff with full jitter, until a moment.

    Every wait is drawn uniformly from zero to a bound that doubles, so that clients who were
    refused together do not come back together. It is not gRPC's own retry policy, which ends after
    five tries, and does not tell that a call was made again: what was in doubt would be lost.
    """

    def __init__(self, until: float) -> None:
        """Remembers the moment, by `time.monotonic`."""
        self.until = until
        self._bound = _FIRST_SECONDS

    def wait(self, error: ShufflerError) -> None:
        """Waits, or raises the error: where trying again would not help, or there is no time."""
        busy = isinstance(error, ShufflerRefused) and error.reason in (Refusal.BUSY, Refusal.IDLE)
        seconds = _random.uniform(0.0, self._bound)
        if not (busy or isinstance(error, ShufflerUnavailable)):
            raise error
        if time.monotonic() + seconds >= self.until:
            raise error
        self._bound = min(2 * self._bound, _LONGEST_SECONDS)
        time.sleep(seconds)
