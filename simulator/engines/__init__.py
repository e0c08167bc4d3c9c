"""Engines: the ways to play a run's rounds. CONTRIBUTING.md says what a new one touches."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for what is set


def keep_freed_memory() -> None:
    """Has glibc keep up to 1 GiB of a thread's freed memory, for this process to take again.

    Every block takes the memory that the block before has freed. If it went back to the kernel in
    between, it would come as fresh pages, which took some tenth of a CNN's round. Tensors of 32 MiB
    and more are still given back.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, 2**25)  # the most that all versions take
        mallopt(_TRIM_THRESHOLD, 2**30)
