"""SIGINT, SIGTERM and SIGHUP end a run in order."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_WAKEUPS: list[int] = []  # descriptors that are in force, the innermost last


def _forget_wakeups() -> None:
    """A forked child's signals are its own."""
    if _WAKEUPS:
        signal.set_wakeup_fd(-1)
        _WAKEUPS.clear()


os.register_at_fork(after_in_child=_forget_wakeups)


@contextmanager
def interrupts(stop: threading.Event) -> Iterator[None]:
    """Turns the first SIGINT or SIGTERM into `stop`; then the old handlers are back.

    Every SIGHUP sets `stop`, since a closing terminal may send several, unless SIGHUP is ignored
    (`nohup`).

    The system may give a signal to any thread. Python's handler then waits for the main thread,
    which may sleep until the run ends, as do the old handlers; a thread that reads the wakeup
    descriptor sets `stop` at once, and passes all signals on to whoever had one before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: dict[int, Any] = {}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in (signal.SIGINT, signal.SIGTERM):
        previous[number] = signal.signal(number, on_signal)
    hang_up = signal.getsignal(signal.SIGHUP)
    heard = hang_up not in (signal.SIG_IGN, None)
    if heard:
        signal.signal(signal.SIGHUP, lambda number, frame: stop.set())
    ending = {*previous, signal.SIGHUP} if heard else {*previous}
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)

    def hear() -> None:
        while number := os.read(read_end, 1)[0]:
            if number in ending:
                stop.set()
            if woken_before >= 0:
                with suppress(OSError):
                    os.write(woken_before, bytes([number]))
        os.close(read_end)

    woken_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    _WAKEUPS.append(write_end)
    threading.Thread(target=hear, daemon=True).start()
    try:
        yield
    finally:
        restore()
        if heard:
            signal.signal(signal.SIGHUP, hang_up)
        if write_end in _WAKEUPS:
            _WAKEUPS.remove(write_end)
            signal.set_wakeup_fd(woken_before)
            os.write(write_end, b"\0")  # the last
            os.close(write_end)
