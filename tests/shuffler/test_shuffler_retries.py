"""Clients that try again: what is not lost, what is not sent twice, and what is counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from run_world import LIMIT
from shuffler_world import World
from shufl.shuffler import IntakeClient, Refusal, ShufflerRefused, ShufflerUnavailable, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire.retries import Retries

NODES = 20


def test_nodes_that_come_at_once_wait_for_their_turn_and_lose_nothing(here: Callable[..., World]):
    authority = Authority.create()
    world = here(authority=authority, limits={"streams": 2, "streams_per_sender": 1})
    header = world.begin()
    nodes = [authority.issue(Role.NODE, f"node-{n}", users=1) for n in range(NODES)]
    together = threading.Barrier(NODES)

    def submit(number: int) -> dict[str, int]:
        reports = world.reports(header, 1)
        with IntakeClient(world.process.address, nodes[number]) as intake:
            together.wait(LIMIT)
            assert list(intake.submit(header, reports, deadline=LIMIT)) == [Verdict.ACCEPTED]
            return dict(intake.counts)

    with ThreadPoolExecutor(NODES) as pool:
        assert list(pool.map(submit, range(NODES))) == [{"ACCEPTED": 1}] * NODES
    world.control.close_round("run", 1)
    assert len(list(world.control.release("run", 1))) == NODES


def test_what_is_given_up_and_what_is_refused_is_counted(here: Callable[..., World]):
    world = here()
    header = world.begin()
    reports = world.reports(header, 3)
    with IntakeClient(world.process.address, world.process.submit) as intake:
        list(intake.submit(header, [reports[0], reports[0], (1, b"short")]))
        assert intake.counts == {"ACCEPTED": 1, "DUPLICATE": 1, "WRONG_LENGTH": 1}
        world.process.__exit__()
        with pytest.raises(ShufflerUnavailable):
            list(intake.submit(header, reports[1:], deadline=0.1))
        assert intake.counts["LOST"] >= 1
        with pytest.raises(ValueError, match="deadline must be positive, got 0"):
            list(intake.submit(header, reports, deadline=0))


def test_a_node_that_may_not_submit_is_told_at_once(here: Callable[..., World]):
    world = here()
    header = world.begin()
    with (
        IntakeClient(world.process.address, world.process.monitor) as intake,
        pytest.raises(ShufflerRefused) as refused,
    ):
        list(intake.submit(header, world.reports(header, 1), deadline=3600))
    assert refused.value.reason is Refusal.NOT_PERMITTED


def test_waits_are_drawn_from_bounds_that_double(monkeypatch: pytest.MonkeyPatch):
    bounds: list[float] = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=bounds.append)
    monkeypatch.setattr("shufl.shuffler.wire.retries.time", clock)
    monkeypatch.setattr("shufl.shuffler.wire.retries._random.uniform", lambda low, high: low + high)
    retries = Retries(float("inf"))
    for _ in range(8):
        retries.wait(ShufflerRefused(Refusal.BUSY))
    assert bounds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])
    for error in (ShufflerRefused(Refusal.NOT_PERMITTED), ShufflerRefused(Refusal.STORAGE_FULL)):
        with pytest.raises(ShufflerRefused):
            retries.wait(error)
    with pytest.raises(ShufflerRefused):
        Retries(0.0).wait(ShufflerRefused(Refusal.BUSY))
