"""A client's connection to the shuffler, and the answers of one call over it."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import grpc

from shufl.shuffler.keys import AnyCredentials, Credentials
from shufl.shuffler.wire.channel import CHANNEL_OPTIONS, check_address, join_address, parse_address
from shufl.shuffler.wire.errors import Refusal, ShufflerRefused, ShufflerUnavailable


class Connection:
    """One channel for each process, made when it is first used.

    So a client may be made before a fork or sent to another process. Every wait for the shuffler
    has a limit.

    Attributes:
        address: the shuffler's `HOST:PORT`.
        timeout: longest wait for one answer, in seconds.
    """

    def __init__(self, address: str, credentials: AnyCredentials, timeout: float) -> None:
        host, port, _ = parse_address(check_address(address))
        if not timeout > 0:
            raise ValueError(f"timeout must be positive, got {timeout}")
        self.address = join_address(host, port)
        self.timeout = timeout
        self._credentials = credentials
        self._shown: Credentials | None = None
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._owner = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None, "_channel": None, "_owner": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection of this process; the next call makes a new one."""
        if self._channel is not None and self._owner == os.getpid():
            self._channel.close()
        self._channel = None

    def connected(self) -> grpc.Channel:
        """The channel of this process; another one once the credentials are others.

        Calls on the one before go on.

        Raises:
            OSError, ValueError: the credentials cannot be read, and none were before.
        """
        if self._owner != os.getpid():
            # After a fork the lock may be held by a thread that does not exist here.
            self._lock, self._channel, self._owner = threading.Lock(), None, os.getpid()
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
        """Turns gRPC's errors, a wait that was too long and an early end into ours.

        The longest wait is `timeout` where `seconds` is None.
        """
        within = self.timeout if seconds is None else seconds
        try:
            yield
        except grpc.RpcError as error:
            details = str(error.details() or error.code().name)
            reason, _, sentence = details.partition(": ")
            if reason in Refusal.__members__:
                raise ShufflerRefused(Refusal[reason], sentence) from error
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                details = f"nothing within {within:g} s"
            raise self._unavailable(details) from error
        except TimeoutError:
            raise self._unavailable(f"nothing within {within:g} s") from None
        except EOFError as error:
            raise self._unavailable(str(error)) from None

    def _unavailable(self, details: str) -> ShufflerUnavailable:
        return ShufflerUnavailable(f"shuffler at {self.address} does not answer: {details}")


class Answers:
    """The answers of a streaming call, read in a thread, so that waiting for one can have a limit.

    A gRPC deadline would limit the whole stream, which may last as long as the training of all its
    users.
    """

    def __init__(self, call: Any, ahead: int | None = None) -> None:
        """Begins to read; `ahead`: how many answers may lie here until they are taken."""
        self.call = call
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = threading.Semaphore(ahead) if ahead is not None else None
        threading.Thread(target=self._read, daemon=True).start()

    def next(self, until: float) -> Any:
        """The next answer; None at the end of the stream.

        Raises:
            grpc.RpcError: if the call ended with an error.
            TimeoutError: if nothing comes until then, by `time.monotonic`.
        """
        try:
            answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if self._room is not None:
            self._room.release()
        if isinstance(answer, grpc.RpcError):
            raise answer
        return answer

    def close(self) -> None:
        """Ends the call."""
        self.call.cancel()
        if self._room is not None:
            self._room.release()

    def _read(self) -> None:
        try:
            for answer in self.call:
                self._answers.put(answer)
                if self._room is not None:
                    self._room.acquire()
            self._answers.put(None)
        except grpc.RpcError as error:
            self._answers.put(error)
