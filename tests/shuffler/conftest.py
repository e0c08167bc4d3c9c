"""Fixtures: shuffler processes and a tiny disk."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from shuffler_world import World

from shuffler import ShufflerProcess


@pytest.fixture
def start() -> Iterator[Callable[..., World]]:
    """Starts shufflers; all of them are gone after the test."""
    with ExitStack() as stack:

        def starter(spool: Path | None = None, **options: object) -> World:
            process = ShufflerProcess(spool, **options)  # type: ignore[arg-type]
            world = World(stack.enter_context(process))
            stack.callback(world.close)
            return world

        yield starter


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One shuffler for the tests of a module that do not hurt it; use a run id of your own."""
    with ShufflerProcess() as process:
        world = World(process)
        yield world
        world.close()


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "tiny"
    place.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)
