"""Turns the signals that end a command into an orderly end of a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_WAKEUPS: list[int] = []  # the descriptors that `interrupts` has set, the innermost last


def _forget_wakeups() -> None:
    """In a forked child: its signals must not end the parent's run."""
    if _WAKEUPS:
        signal.set_wakeup_fd(-1)
        _WAKEUPS.clear()


os.register_at_fork(after_in_child=_forget_wakeups)


@contextmanager
def interrupts(stop: threading.Event) -> Iterator[None]:
    """Sets `stop` at the first SIGINT or SIGTERM, and then puts the old handlers back.

    Every SIGHUP sets `stop`, since a closing terminal may send several, unless SIGHUP is ignored
    (`nohup`).

    The system may give a signal to any thread. Python calls the handler in the main thread, which
    may sleep until the run ends. So another thread reads the wakeup descriptor and sets `stop` at
    once. It passes all signals on to the descriptor that was set before.
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
