"""Peers that are slow, silent, or gone without a word."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from shuffler_world import World

from shuffler import IntakeClient, Outcome, ShufflerUnavailable, Verdict
from shuffler.channel import PIECE_BYTES

IDLE = 0.3


def slowly(reports: list[tuple[int, bytes]], pauses: list[float]) -> Iterator[tuple[int, bytes]]:
    for report, pause in zip(reports, pauses, strict=True):
        time.sleep(pause)
        yield report


@pytest.mark.parametrize("length", [100, PIECE_BYTES + 1])
def test_a_node_that_is_slower_than_the_idle_limit_gets_all_its_reports_in(
    start: Callable[..., World], length: int
):
    world = start(limits={"idle_seconds": IDLE})
    header = world.begin(report_bytes=length)
    reports = [(user, os.urandom(length)) for user in range(7)]
    pauses = [3 * IDLE, 0, 3 * IDLE, 3 * IDLE, 0, 0, 3 * IDLE]
    assert world.submit(header, slowly(reports, pauses)) == [Verdict.ACCEPTED] * 7
    assert world.control.close_round("run", 1) is Outcome.RELEASABLE
    released = list(world.control.release("run", 1))
    assert sorted(released) == sorted(sealed for _, sealed in reports)


def test_pauses_near_the_idle_limit_lose_and_repeat_nothing(start: Callable[..., World]):
    """The shuffler ends a stream while a report is on its way: that one is sent again."""
    world = start(limits={"idle_seconds": IDLE, "streams": 16, "streams_per_sender": 16})
    header = world.begin(report_bytes=100)

    def node(number: int) -> list[Verdict]:
        draw = random.Random(number)
        reports = [(100 * number + user, os.urandom(100)) for user in range(100)]
        pauses = [0 if draw.random() < 0.9 else IDLE + draw.uniform(-0.01, 0.01) for _ in reports]
        with IntakeClient(world.process.address, world.process.submit) as intake:
            return list(intake.submit(header, slowly(reports, pauses)))

    with ThreadPoolExecutor(8) as nodes:
        assert list(nodes.map(node, range(8))) == [[Verdict.ACCEPTED] * 100] * 8
    world.control.close_round("run", 1)
    assert len(set(world.control.release("run", 1))) == 800


def test_a_shuffler_that_ends_during_a_pause_is_noticed_with_the_next_report(
    start: Callable[..., World], tmp_path: Path
):
    world = start(tmp_path / "spool")
    header = world.begin()
    begun = []

    def reports():
        for user, sealed in world.reports(header, 200):
            if user == 3:
                os.kill(world.process.pid, signal.SIGKILL)
                while world.process.alive:
                    time.sleep(0.01)
                time.sleep(1)
            begun.append(user)
            yield user, sealed

    with pytest.raises(ShufflerUnavailable):
        world.submit(header, reports())
    assert len(begun) < 200
