"""Thousands of connections that never call, at a shuffler with few descriptors."""

from __future__ import annotations

import resource
import socket
import stat
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from shuffler_world import World, in_release, plan
from shufl.shuffler import IntakeClient, Refusal, ShufflerProcess, ShufflerRefused, Verdict
from shufl.shuffler.wire.channel import parse_address

DESCRIPTORS = 1024
FIRST_BYTES_OF_TLS = b"\x16\x03\x01\x02\x00"


@pytest.fixture
def few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Child processes may have few files open, this one many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("this process may not open 5 000 connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nulimit -n {DESCRIPTORS}\nexec "{sys.executable}" "$@"\n')
    python.chmod(stat.S_IRWXU)
    monkeypatch.setattr(sys, "executable", str(python))


def test_the_descriptor_limit_is_raised_as_far_as_it_goes():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        with ShufflerProcess() as process:
            assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_too_many_open_files_are_no_full_disk():
    with ShufflerProcess() as process:
        world = World(process)
        world.control.create_run("run", plan(), 64)
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1, hard))
        with pytest.raises(
            ShufflerRefused, match="the shuffler has too many files open"
        ) as refused:
            world.control.open_round("run", 1, "m", world.public_key)
        assert refused.value.reason is Refusal.STORAGE_FAILED
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
        world.control.open_round("run", 1, "m", world.public_key)
        world.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", FIRST_BYTES_OF_TLS], ids=["silent", "handshake-begun"])
def test_5000_bare_connections_refuse_no_honest_node_and_break_no_release(
    few_descriptors: None, memory_path: Path, first: bytes
):
    with ExitStack() as stack:
        process = stack.enter_context(ShufflerProcess(memory_path / "directory"))
        world = World(process)
        stack.callback(world.close)
        release = in_release(world)
        host, port, _ = parse_address(process.address)
        for _ in range(5000):
            connection = stack.enter_context(socket.create_connection((host, port), 60))
            connection.sendall(first)
        header = world.begin("another")
        for user, sealed in world.reports(header, 5):
            with IntakeClient(process.address, process.submit) as node:
                assert list(node.submit(header, [(user, sealed)])) == [Verdict.ACCEPTED]
        assert len(list(release)) == 39
        world.control.close_round("another", 1)
        assert len(list(world.control.release("another", 1))) == 5
        files = list(Path(f"/proc/{process.pid}/fd").iterdir())
        assert len(files) < DESCRIPTORS * 3 / 4  # the rest is for the disk
