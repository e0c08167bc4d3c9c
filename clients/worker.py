"""The child process of a deployed node that holds the users' records and computes updates.

Each user's update is computed alone, one after the other, and is the same work: the plan fixes the
number of records, which padding without weight fills up. So neither how long the work takes nor
which users are done when it is ended depends on a record. A record for which the model raises an
error, ends the process or hangs costs its own user's update: `Worker.seconds` has room for that.
The child does nothing else, and the parent, which answers and sends, does no such work.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import nn

from shufl.learning.local_training import LocalTraining, UserRecords
from shufl.learning.node_updates import NodeUpdates, Records, raised
from shufl.learning.parameters import dimension, sent
from shufl.protocol.plan import Window
from shufl.protocol.text import rounded_up

TO_DO, AT_WORK, DONE, FAILED = range(4)
"""How far a user's update is."""

_SHARES = 3
"""The work fits into a third of a window: a user who hangs may take one, a busy machine another."""

_MARGIN = 1.25  # a node hears of a round some time after the shuffler has opened it
_LONG = 1e6  # seconds
_LOOK_SECONDS = 1.0  # the parent looks at least this often whose update takes too long
_TOO_LONG = "it takes too long"
_ENDED = "the process ended with"
_MAY_PASS = _TOO_LONG, f"{_ENDED} -", "MemoryError"  # -9: a signal, as when memory is short
_PROCESSES = multiprocessing.get_context("forkserver")  # which has imported torch
_PROCESSES.set_forkserver_preload([__name__])


class _Shared:
    """An array in memory that processes share, and that no file system holds."""

    def __init__(self, shape: tuple[int, ...], dtype: type, given: Any = None):
        self._shape, self._dtype = shape, dtype
        self._bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._descriptor = os.memfd_create("shufl") if given is None else given.detach()
        os.ftruncate(self._descriptor, self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:  # for a child that is being started
        return _Shared, (self._shape, self._dtype, DupFd(self._descriptor))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def mapped(self) -> np.ndarray:
        """The array; its memory is this process's for as long as it is referred to."""
        memory = mmap.mmap(self._descriptor, self._bytes)
        return np.frombuffer(memory, self._dtype).reshape(self._shape)


@dataclass(frozen=True)
class _Memory:
    """What parent and child share, of u users with m records each.

    Attributes:
        features, labels: shapes (u, m, ...).
        real: how many of them are not padding, shape (u,).
        updates: shape (u, d).
        states: one of `TO_DO` to `FAILED` of each user, shape (u,).
    """

    features: _Shared
    labels: _Shared
    real: _Shared
    updates: _Shared
    states: _Shared


@dataclass
class _Child:
    process: ForkServerProcess
    pipe: Connection
    is_ready: bool = False


class TooBusy(ValueError):
    """The work does not fit into the window or the memory, as this machine is now."""


class Worker:
    """The child, as its parent sees it. It is killed and started again as the rounds need it.

    Attributes:
        seconds: how much of a window a round needs: three times what a new process takes here for
            the updates of all users, of made-up records.
        states: as in `_Memory`.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        training: LocalTraining,
        users: int,
        most_records: int,
        example: Records,
    ):
        """Starts it and measures the work; `example` has the form of a user's records.

        Raises:
            ValueError: it cannot compute the updates of made-up users.
        """
        model = make_model()
        self._initial = {name: value.clone() for name, value in sent(model).items()}
        features, labels = (
            _Shared((users, most_records, *each.shape[1:]), each.numpy().dtype.type)
            for each in example
        )
        self._memory = _Memory(
            features,
            labels,
            _Shared((users,), np.int64),
            _Shared((users, dimension(model)), np.float32),
            _Shared((users,), np.uint8),
        )
        self._make_model, self._training = make_model, training
        self.states, self._updates = self._memory.states.mapped(), self._memory.updates.mapped()
        self._lock = threading.Lock()  # held for moments
        self._over: threading.Event | None = None  # of the round at work
        self._closed = False
        self._child = self._start()
        try:
            made_up = torch.ones_like(example[0][:1]), torch.zeros_like(example[1][:1])
            self.fill(lambda user: made_up)
            self._try(_LONG)  # what is imported or allocated once costs no round
            begun = time.monotonic()
            self._restart(self._child)
            self._try(_LONG)
            self.seconds = _SHARES * (time.monotonic() - begun)
        except (ValueError, OSError) as error:
            self.close()
            raise ValueError(f"the updates of made-up users cannot be computed: {error}") from None

    def close(self) -> None:
        """Kills the child."""
        with self._lock:
            self._closed = True
            self._child.process.kill()
            self._child.process.join()

    @property
    def needed(self) -> float:
        """The least `work_until` of a window, in seconds."""
        return _MARGIN * self.seconds

    def check(self, window: Window) -> None:
        """Refuses a window in which the work cannot be done.

        Raises:
            TooBusy: it is too short.
        """
        if self.needed > window.work_until:
            raise TooBusy(
                f"window.work_until must be at least {rounded_up(self.needed, 3)} on this machine, "
                f"{_MARGIN * _SHARES:g} times as long as the updates of {len(self.states)} users "
                f"take, got {window.work_until:g}"
            )

    def load(self, records: UserRecords, window: Window) -> int:
        """Loads the records of all users, for rounds of a window.

        Returns:
            How many users have more records than are used.

        Raises:
            ValueError: the window is too short, or the model cannot train on some of the records;
                names the first such user.
        """
        self.check(window)
        more = self.fill(records)
        try:
            self._try(window.work_until)
        except (ValueError, OSError) as error:
            raise ValueError(f"data: the updates of this node's users: {error}") from None
        return more

    def _try(self, seconds: float) -> None:
        """Computes everybody's update of the model as it is made."""
        seeds = np.arange(len(self.states), dtype=np.uint64)
        failed = self.compute(self._initial, seeds, seconds, threading.Event())
        for user in np.flatnonzero(self.states != DONE).tolist():
            why = failed.get(user, _TOO_LONG)
            raise (TooBusy if why.startswith(_MAY_PASS) else ValueError)(f"user {user}: {why}")

    def fill(self, records: UserRecords) -> int:
        """Loads the records of all users; returns how many users have more than are used."""
        features, labels = self._memory.features.mapped(), self._memory.labels.mapped()
        real, more = self._memory.real.mapped(), 0
        for user in range(len(real)):
            own = [each.numpy() for each in records(user)]
            more += len(own[1]) > labels.shape[1]
            real[user] = min(len(own[1]), labels.shape[1])
            places = np.arange(labels.shape[1]) % real[user]
            features[user], labels[user] = (each[places] for each in own)
        return more

    def update(self, user: int) -> np.ndarray:
        """A user's update of the last round, float32 of shape (d,); zero if it is not done."""
        return self._updates[user] * np.float32(self.states[user] == DONE)

    def compute(
        self,
        parameters: dict[str, torch.Tensor],
        seeds: np.ndarray,
        seconds: float,
        over: threading.Event,
    ) -> dict[int, str]:
        """Has the updates of a round computed; ends the work on an older one, whose `over` is set.

        Returns why updates failed, by user: when all are done, after `seconds`, or when a newer
        round begins. A user whose update ends the child, or takes longer than a third
        of `seconds`, has failed; a new child goes on with the other users. The parent looks at the
        time, so that no model can switch this off.

        Raises:
            OSError: the machine starts no child, so no update is done.
        """
        failed: dict[int, str] = {}
        if over.is_set():
            return failed
        try:
            if self._over is not None:
                self._restart(self._child)
        finally:  # nobody reports an older round's update
            self.states[:] = TO_DO
        until = time.monotonic() + seconds
        self._over = over
        named = {name: value.numpy() for name, value in parameters.items()}
        given, longest = (named, seeds), seconds / _SHARES
        while not over.is_set() and (self.states == TO_DO).any():
            child = self._child
            try:
                if not child.is_ready:
                    self._hear(until, longest, failed)
                    child.is_ready = True
                child.pipe.send(given)
                self._hear(until, longest, failed)
            except TimeoutError:
                if child.is_ready:  # else it is still starting
                    self._restart(child)
                break
            except (EOFError, OSError) as error:
                if not over.is_set():
                    lost, self.states[lost] = self.states == AT_WORK, FAILED
                    self._restart(child)
                    why = f"{_ENDED} {child.process.exitcode}"
                    why = _TOO_LONG if error.args == (_TOO_LONG,) else why
                    failed |= dict.fromkeys(np.flatnonzero(lost).tolist(), why)
                    if not child.is_ready:
                        raise ChildProcessError(f"{why} when it started") from None
        if self._over is over:
            self._over = None
        return failed

    def _hear(self, until: float, longest: float, failed: dict[int, str]) -> None:
        """Waits until the child asks for work; notes in `failed` why updates fail meanwhile.

        Raises:
            EOFError, OSError: the child has ended, or one user's update takes over `longest` s.
            TimeoutError: it has not asked by `until`.
        """
        child, at_work, since = self._child, -1, 0.0
        while True:
            left = max(0.0, until - time.monotonic())
            if child.pipe.poll(min(left, longest / 8, _LOOK_SECONDS)):
                if (said := child.pipe.recv()) is None:
                    return
                failed[said[0]] = said[1]
            user, now = int(np.argmax(self.states == AT_WORK)), time.monotonic()
            if user != at_work or self.states[user] != AT_WORK:
                at_work, since = user, now
            elif now - since > longest:
                raise EOFError(_TOO_LONG)
            if now >= until:
                raise TimeoutError

    def _restart(self, child: _Child) -> None:
        with self._lock:
            if child is self._child and not self._closed:
                child.process.kill()
                child.process.join()
                self._child = self._start()

    def _start(self) -> _Child:
        ours, theirs = _PROCESSES.Pipe()
        threads = max(1, len(os.sched_getaffinity(0)) - 1)
        given = theirs, self._make_model, self._training, threads, self._memory
        process = _PROCESSES.Process(target=_serve, args=given, daemon=True)
        process.start()
        theirs.close()
        return _Child(process, ours)


def _serve(
    pipe: Connection,
    make_model: Callable[[], nn.Module],
    training: LocalTraining,
    threads: int,
    memory: _Memory,
) -> None:
    """What the child does."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the parent
        signal.signal(number, signal.SIG_IGN)
    work = NodeUpdates(make_model, training, together=False)
    try:
        while True:
            pipe.send(None)
            parameters, seeds = pipe.recv()
            work.load({name: torch.from_numpy(each) for name, each in parameters.items()})
            more = True
            while more:  # a model's torch settings end with the thread in which it ran
                with ThreadPoolExecutor(1, initializer=_set_up, initargs=(threads,)) as thread:
                    more = thread.submit(compute, work, memory, seeds, pipe.send).result()
    except (EOFError, BrokenPipeError):  # the parent has ended
        return


def _set_up(threads: int) -> None:
    torch.set_flush_denormal(True)  # a processor takes longer for denormal numbers
    torch.set_num_threads(threads)


def compute(
    work: NodeUpdates, memory: _Memory, seeds: np.ndarray, tell: Callable[[tuple[int, str]], None]
) -> bool:
    """Computes the updates that are still to do, until one fails; `tell` gets its user and reason.

    Returns:
        Whether there is more to do.
    """
    features, labels = (
        torch.from_numpy(each.mapped()) for each in (memory.features, memory.labels)
    )
    real, updates, states = memory.real.mapped(), memory.updates.mapped(), memory.states.mapped()
    for user in np.flatnonzero(states == TO_DO).tolist():
        states[user] = AT_WORK
        try:
            records = features[user], labels[user]
            updates[user] = work.alone(records, int(seeds[user]), int(real[user]))
        except BaseException as error:  # whatever its records have the model raise
            states[user] = FAILED
            tell((user, raised(error)))
            break
        states[user] = DONE
    return bool((states == TO_DO).any())
