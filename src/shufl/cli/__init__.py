"""The `shufl` command, which hears signals before it imports what takes time."""

import os
import signal
import sys
from typing import NoReturn


def hear_signals() -> None:
    """Has SIGINT and SIGTERM end the command at once, where nothing has to be put in order."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as of a shell's background
            signal.signal(number, _end_at_once)


def end_in_order(number: int, frame: object) -> NoReturn:
    """A signal's handler where something is to be stopped; a second signal ends at once."""
    hear_signals()
    os.write(2, _LINE)
    sys.exit(130)


def _end_at_once(number: int, frame: object) -> NoReturn:
    os.write(2, _LINE)
    os._exit(130)


_LINE = b"error: interrupted\n"  # 130 is what a shell expects after Ctrl-C


def main() -> None:
    """Entry point of the `shufl` command."""
    hear_signals()
    from shufl.cli.__main__ import main

    main()
