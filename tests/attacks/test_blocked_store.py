"""A server that has a huge round opened, or takes all there is."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from shuffler_world import World, plan
from shufl.shuffler import (
    ControlClient,
    Refusal,
    ShufflerProcess,
    ShufflerRefused,
    ShufflerUnavailable,
    Verdict,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority

USERS = 2**23
LENGTH = 200


def open_huge_round(process: ShufflerProcess, key: bytes) -> threading.Thread:
    """Begins to open it, and returns when its files are being made."""

    def call() -> None:
        with (
            suppress(ShufflerUnavailable),  # where it is killed meanwhile
            ControlClient(process.address, process.control, timeout=120) as control,
        ):
            control.open_round("huge", 1, "m", key)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


@pytest.mark.slow
def test_reports_go_on_while_the_files_of_a_huge_round_are_made(memory_path: Path):
    with ShufflerProcess(memory_path / "spool") as process:
        world = World(process)
        header = world.begin()
        reports = iter(world.reports(header, 1000))
        world.control.create_run("huge", plan(USERS), LENGTH)
        opening = open_huge_round(process, world.public_key)
        meanwhile = 0
        while opening.is_alive() and meanwhile < 500:
            assert world.submit(header, [next(reports)]) == [Verdict.ACCEPTED]
            meanwhile += opening.is_alive()
        opening.join()
        assert meanwhile >= 5  # 1 where the store makes them itself
        world.control.close_round("huge", 1, discard=True)
        world.close()


@pytest.mark.slow
def test_killed_while_the_files_are_made_nothing_of_them_is_left(memory_path: Path):
    spool, authority = memory_path / "spool", Authority.create()
    with ShufflerProcess(spool, authority=authority) as process:
        world = World(process)
        world.control.create_run("huge", plan(USERS), LENGTH)
        opening = open_huge_round(process, world.public_key)
        while not list(spool.glob("batch-*.db-journal")):
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGKILL)
        opening.join()
        world.close()
    assert list(spool.glob("batch-*"))
    with ShufflerProcess(spool, authority=authority) as process:
        assert not list(spool.glob("batch-*"))
        world = World(process)
        world.control.open_round("huge", 1, "m", world.public_key)
        world.close()


@pytest.mark.slow
def test_a_run_that_ends_while_its_round_is_opened_leaves_nothing(memory_path: Path):
    spool = memory_path / "spool"
    with ShufflerProcess(spool) as process:
        world = World(process)
        world.control.create_run("huge", plan(USERS), LENGTH)
        refused: list[ShufflerRefused] = []

        def call() -> None:
            with ControlClient(process.address, process.control, timeout=120) as control:
                try:
                    control.open_round("huge", 1, "m", world.public_key)
                except ShufflerRefused as error:
                    refused.append(error)

        opening = threading.Thread(target=call)
        opening.start()
        while not list(spool.glob("batch-*.db-journal")):
            time.sleep(0.001)
        world.control.end_run("huge")
        opening.join()
        assert [error.reason for error in refused] == [Refusal.RUN_ENDED]
        assert not list(spool.glob("batch-*"))
        world.close()


def test_one_server_cannot_take_what_others_need(memory_path: Path):
    authority = Authority.create()
    limits = {
        "runs_per_server": 3,
        "open_rounds_per_server": 2,
        "disk_gigabytes_per_server": 0.009,
    }
    with ShufflerProcess(memory_path / "spool", authority=authority, limits=limits) as process:
        world = World(process)
        for run in "ab":
            world.control.create_run(run, plan(100), 40_000)
        world.control.create_run("c", plan(1), 40_000)
        with pytest.raises(ShufflerRefused) as refused:
            world.control.create_run("d", plan(100), 40_000)
        assert refused.value.reason is Refusal.TOO_MANY_RUNS
        headers = [world.begin(run, users=100, report_bytes=40_000) for run in "ab"]
        with pytest.raises(ShufflerRefused) as refused:
            world.control.open_round("c", 1, "m", world.public_key)
        assert refused.value.reason is Refusal.TOO_MANY_ROUNDS
        reports = [(user, os.urandom(40_000)) for user in range(100)]
        assert set(world.submit(headers[0], reports)) == {Verdict.ACCEPTED}
        assert set(world.submit(headers[1], reports)) == {Verdict.ACCEPTED}
        other = authority.issue(Role.SERVER, "other")
        with ControlClient(process.address, other) as control:
            world.control.close()
            world.control = control
            header = world.begin("other's", users=100)
            accepted = world.submit(header, world.reports(header, 2))
        assert accepted == [Verdict.ACCEPTED] * 2
        world.close()


@pytest.mark.parametrize("sent", [0, 100])
def test_a_server_that_fills_its_room_does_not_learn_how_many_have_reported(
    sent: int, memory_path: Path
):
    """Without cover that number and the released one would tell the number of blankets."""
    authority, fits = Authority.create(), 9_000_000 // (40_960 + 32) - 100
    limits = {"disk_gigabytes_per_server": 0.009}
    with ShufflerProcess(memory_path / "spool", authority=authority, limits=limits) as process:
        world = World(process)
        header = world.begin("honest", users=100, report_bytes=40_000)
        reports = [(user, os.urandom(40_000)) for user in range(sent)]
        assert world.submit(header, reports) == [Verdict.ACCEPTED] * sent
        for probe in range(fits - 3, fits + 4):
            world.control.create_run(str(probe), plan(probe), 40_000)
            if probe <= fits:
                world.control.open_round(str(probe), 1, "m", world.public_key)
                world.control.close_round(str(probe), 1, discard=True)
                continue
            with pytest.raises(ShufflerRefused, match="with reports of all users") as refused:
                world.control.open_round(str(probe), 1, "m", world.public_key)
            assert refused.value.reason is Refusal.STORAGE_FULL
        world.close()
