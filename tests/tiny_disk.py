"""A disk that a test can fill, and a folder that needs no disk."""

import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tiny_disk_at(place):
    """A file system of 1 MiB, in a folder that is made."""
    place.mkdir(mode=0o700)
    yield from _mounted(place, "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs")


@contextmanager
def small_ext4_at(place):
    """An ext4 of 16 MiB, as most real disks have, with blocks of 1 KiB; its image lies beside."""
    place.mkdir(mode=0o700)
    image = place.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(2**24)
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is not installed")
    subprocess.run(["mkfs.ext4", "-q", "-b", "1024", "-m", "0", str(image)], check=True)
    yield from _mounted(place, "-o", "loop", str(image))


def _mounted(place, *what):
    if subprocess.run(["mount", *what, str(place)], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def in_memory():
    """Where files are in memory, if there is such a place with room for those of tests."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 2**30 else None


def fill(disk):
    """Leaves no room; returns the file that takes it."""
    filler = disk / "filler"
    with pytest.raises(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return filler
