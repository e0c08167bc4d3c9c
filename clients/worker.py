"""The child process of a deployed node that holds the users' records and computes updates.

Every user's update is the same work: the plan fixes the number of records, which padding without
weight fills up. Groups, their order and the way of computing follow from the plan, the model and
the number of users. So neither how long the work takes nor which users are done when it is ended
depends on a record. The child does nothing else, and the parent, which answers and sends, does no
such work.
"""

from __future__ import annotations

import functools
import mmap
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from torch import nn

from shufl.accounting.digits import rounded_up
from shufl.accounting.lines import one_line
from shufl.accounting.plan import Window
from shufl.clients.settings import LocalTraining, UserRecords
from shufl.clients.work import Records, Work, log, raised
from shufl.trained import dimension

TO_DO, AT_WORK, DONE, FAILED = range(4)
"""How far a user's update is."""

_MARGIN = 2.0  # of the time that the work takes on a machine that is busy with other things
_SPAWN = multiprocessing.get_context("spawn")


class _Shared:
    """An array in memory that processes share, and that no file system holds."""

    def __init__(self, shape: tuple[int, ...], dtype: type, given: Any = None):
        self._about = shape, dtype
        self._bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self._descriptor = os.memfd_create("shufl") if given is None else given.detach()
        os.ftruncate(self._descriptor, self._bytes)

    def __reduce__(self) -> tuple[Any, ...]:  # for a child that is being started
        return _Shared, (*self._about, DupFd(self._descriptor))

    def __del__(self) -> None:
        os.close(self._descriptor)

    def mapped(self) -> np.ndarray:
        """The array; its memory is this process's for as long as it is referred to."""
        shape, dtype = self._about
        return np.frombuffer(mmap.mmap(self._descriptor, self._bytes), dtype).reshape(shape)


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
    process: SpawnProcess
    pipe: Connection
    is_ready: bool = False


class Worker:
    """The child, as its parent sees it. It is killed and started again as the rounds need it.

    Attributes:
        seconds: how long the updates of all users take here, of made-up records.
        states: as in `_Memory`.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        training: LocalTraining,
        together: bool,
        users: int,
        most_records: int,
        example: Records,
    ):
        """Starts it and has it measure the work; `example` has the form of a user's records.

        Raises:
            ValueError: it cannot compute the updates of made-up users.
        """
        numbers = dimension(make_model())
        features, labels = (
            _Shared((users, most_records, *each.shape[1:]), each.numpy().dtype.type)
            for each in example
        )
        self._memory = _Memory(
            features,
            labels,
            _Shared((users,), np.int64),
            _Shared((users, numbers), np.float32),
            _Shared((users,), np.uint8),
        )
        self._about = make_model, training, together, max(1, len(os.sched_getaffinity(0)) - 1)
        self.states, self._updates = self._memory.states.mapped(), self._memory.updates.mapped()
        self._lock = threading.Lock()  # held for moments
        self._over: threading.Event | None = None  # of the round at work
        self._closed = False
        self._child = self._start(measured=True)
        try:
            said = self._child.pipe.recv()
        except EOFError:
            self._child.process.join()
            said = f"the process ended with {self._child.process.exitcode}"
        if isinstance(said, str):
            self.close()
            raise ValueError(f"the updates of made-up users cannot be computed: {said}")
        self.seconds: float = said
        self._child.is_ready = True

    def close(self) -> None:
        """Kills the child."""
        with self._lock:
            self._closed = True
            self._child.process.kill()
            self._child.process.join()

    def check(self, window: Window) -> None:
        """Refuses a window in which the work cannot be done.

        Raises:
            ValueError: it is too short.
        """
        if (needed := _MARGIN * self.seconds) > window.work_until:
            raise ValueError(
                f"window.work_until must be at least {rounded_up(needed, 3)} on this machine, "
                f"twice the time that the updates of {len(self.states)} users take, "
                f"got {window.work_until:g}"
            )

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
    ) -> None:
        """Has the updates of a round computed; ends the work on an older one, whose `over` is set.

        Returns when all are done, after `seconds`, or when a newer round begins. A user whose
        update crashes the child counts as failed; a new child goes on with the others.

        Raises:
            OSError: the machine starts no child; then none is done.
        """
        if over.is_set():
            return
        try:
            if self._over is not None:
                self._restart(self._child)
        finally:  # nobody reports an older round's update
            self.states[:] = TO_DO
        until = time.monotonic() + seconds
        self._over = over
        given = {name: value.numpy() for name, value in parameters.items()}, seeds
        while not over.is_set() and (self.states == TO_DO).any():
            child = self._child
            try:
                if not child.is_ready:
                    _hear(child, until)
                    child.is_ready = True
                child.pipe.send(given)
                _hear(child, until)
            except TimeoutError:
                if child.is_ready:  # else it is still starting
                    self._restart(child)
                break
            except (EOFError, OSError):
                if not over.is_set():
                    self.states[self.states == AT_WORK] = FAILED
                    self._restart(child)
        if self._over is over:
            self._over = None

    def _restart(self, child: _Child) -> None:
        with self._lock:
            if child is self._child and not self._closed:
                child.process.kill()
                child.process.join()
                self._child = self._start()

    def _start(self, measured: bool = False) -> _Child:
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(
            target=_serve, args=(theirs, *self._about, self._memory, measured), daemon=True
        )
        process.start()
        theirs.close()
        return _Child(process, ours)


def _hear(child: _Child, until: float) -> None:
    """Waits for the child's next message that is not why an update fails.

    Raises:
        EOFError, OSError: the child has ended.
        TimeoutError: there is none in time.
    """
    reasons = Counter[str]()
    try:
        while child.pipe.poll(max(0.0, until - time.monotonic())):
            said = child.pipe.recv()
            if not isinstance(said, str):
                return
            reasons[said] += 1
        raise TimeoutError
    finally:
        if reasons:  # one line, however many users there are
            ((most, _),) = reasons.most_common(1)
            count = reasons.total()
            log.warning("%d of the updates cannot be computed, and count as zero: %s", count, most)


def _serve(
    pipe: Connection,
    make_model: Callable[[], nn.Module],
    training: LocalTraining,
    together: bool,
    threads: int,
    memory: _Memory,
    measured: bool,
) -> None:
    """What the child does."""
    torch.set_flush_denormal(True)  # a processor takes longer for denormal numbers
    torch.set_num_threads(threads)
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the parent
        signal.signal(number, signal.SIG_IGN)
    work = Work(make_model, training, together)
    try:
        try:
            pipe.send(_measure(work, memory) if measured else 0.0)
        except Exception as error:
            pipe.send(one_line(f"{type(error).__name__}: {error}"))
        while True:
            parameters, seeds = pipe.recv()
            work.load({name: torch.from_numpy(each) for name, each in parameters.items()})
            compute(work, memory, seeds, pipe.send)
            pipe.send(None)
    except (EOFError, BrokenPipeError):  # the parent has ended
        return


def compute(work: Work, memory: _Memory, seeds: np.ndarray, tell: Callable[[str], None]) -> None:
    """Computes what is to do, in groups; `tell` is told why an update fails."""
    features, labels = (
        torch.from_numpy(each.mapped()) for each in (memory.features, memory.labels)
    )
    real, updates, states = memory.real.mapped(), memory.updates.mapped(), memory.states.mapped()
    for group in _groups(work, features):
        users = [user for user in group if states[user] == TO_DO]
        records = [(features[user], labels[user]) for user in users]
        begin = functools.partial(_note_at_work, states, np.array(users))
        found = work.updates(records, seeds[users], real[users], begin)
        for user, update in zip(users, found, strict=True):
            if isinstance(update, BaseException):
                states[user] = FAILED
                tell(f"user {user}: {raised(update)}")
            else:
                updates[user], states[user] = update, DONE


def _groups(work: Work, features: torch.Tensor) -> list[range]:
    """Users whose updates are computed one after another, or at once."""
    most, users = work.most_at_once(features[0]), len(features)
    return [range(start, min(start + most, users)) for start in range(0, users, most)]


def _note_at_work(states: np.ndarray, users: np.ndarray, places: list[int]) -> None:
    """Marks the users at `places` as at work; others of the group that were are to do again."""
    unfinished = users[states[users] == AT_WORK]
    states[unfinished] = TO_DO
    states[users[places]] = AT_WORK


def _measure(work: Work, memory: _Memory) -> float:
    """How many seconds the updates of so many users take, of records that are made up."""
    features = torch.from_numpy(memory.features.mapped())
    groups = _groups(work, features)
    labels = torch.from_numpy(memory.labels.mapped())
    ones = torch.ones_like(features[0]), torch.zeros_like(labels[0])

    def play(users: range) -> None:
        seeds = np.arange(len(users), dtype=np.uint64)
        for update in work.updates([ones] * len(users), seeds, np.full(len(users), len(ones[1]))):
            if isinstance(update, BaseException):
                raise update

    work.model.train()
    for users in {len(group): group for group in groups}.values():
        play(users)  # what is imported or allocated once costs no round
    started = time.perf_counter()
    for users in groups:
        play(users)
    return time.perf_counter() - started
