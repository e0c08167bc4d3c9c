"""Fixtures: shuffler processes and a tiny disk."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from run_world import LIMIT
from shuffler_world import Ended, ShufflerHere, World, restored_log, tls_section
from shufl.cli.__main__ import main
from shufl.shuffler import ShufflerProcess
from tiny_disk import in_memory, tiny_disk_at


@pytest.fixture(scope="module", autouse=True)
def temporary_directories_in_memory() -> Iterator[None]:
    """Where there is such a place: nothing here needs a disk but what is under `tmp_path`."""
    before = tempfile.tempdir
    if (memory := in_memory()) is not None:
        tempfile.tempdir = str(memory)
    yield
    tempfile.tempdir = before


@pytest.fixture
def start() -> Iterator[Callable[..., World]]:
    """Starts shufflers, which are processes; all of them are gone after the test."""
    yield from _starter(ShufflerProcess)


@pytest.fixture
def here() -> Iterator[Callable[..., World]]:
    """Starts shufflers in this process; all of them are gone after the test."""
    yield from _starter(ShufflerHere)


def _starter(kind: type[ShufflerProcess]) -> Iterator[Callable[..., World]]:
    with ExitStack() as stack:

        def starter(directory: Path | None = None, **options: object) -> World:
            options = {"start_timeout": LIMIT} | options
            process = kind(directory, **options)  # type: ignore[arg-type]
            world = World(stack.enter_context(process))
            stack.callback(world.close)
            return world

        yield starter


@pytest.fixture(scope="module")
def shared() -> Iterator[World]:
    """One shuffler for the tests of a module that do not hurt it; use a run id of your own."""
    with ShufflerHere() as shuffler:
        world = World(shuffler)
        yield world
        world.close()


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Ended]]:
    """Runs `shufl shuffler` in this process, where it ends by itself: with this content of its
    configuration, which lies in `tmp_path`, and with TLS unless it says otherwise."""
    own = tls_section(tmp_path / "tls")[1]
    mask, hang_up = os.umask(0o077), signal.getsignal(signal.SIGHUP)

    def run(config: str, *arguments: str, tls: bool = True) -> Ended:
        file = tmp_path / "shuffler.toml"
        file.write_text(f"{config}\n{own if tls else ''}", encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["shufl", "shuffler", "--config", str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return Ended(ended.value.code, *capsys.readouterr())

    with restored_log():
        yield run
    os.umask(mask)
    signal.signal(signal.SIGHUP, hang_up)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with tiny_disk_at(tmp_path / "tiny") as place:
        yield place
