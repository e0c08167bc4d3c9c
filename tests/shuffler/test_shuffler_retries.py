"""Clients that try again: what is not lost, what is not sent twice, and what is counted."""

import asyncio
import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grpc
import pytest

from run_world import LIMIT, wait_until
from shufl.shuffler import IntakeClient, Outcome, Refusal, ShufflerRefused, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.service.intake_service import IntakeService
from shufl.shuffler.wire.channel import PIECE_BYTES
from shufl.shuffler.wire.connection import Retries

NODES = 20


@pytest.mark.parametrize(
    ("limits", "length"), [({"calls": 2}, 100), ({"uploads": 2}, PIECE_BYTES + 1)]
)
def test_nodes_that_come_at_once_wait_for_their_turn_and_lose_nothing(here, limits, length):
    authority = Authority.create()
    world = here(authority=authority, limits=limits)
    header = world.begin(report_bytes=length)
    nodes = [authority.issue(Role.NODE, f"node-{n}", users=1) for n in range(NODES)]
    together = threading.Barrier(NODES)

    def submit(number):
        sealed = os.urandom(length)
        with IntakeClient(world.process.address, nodes[number]) as intake:
            together.wait(LIMIT)
            verdicts = list(intake.submit(header, [(0, sealed)], deadline=LIMIT))
            assert verdicts == [Verdict.ACCEPTED]

    with ThreadPoolExecutor(NODES) as pool:
        list(pool.map(submit, range(NODES)))
    assert len(world.released(header)) == NODES


@pytest.mark.parametrize("length", [100, 9 * PIECE_BYTES + 5])
def test_an_answer_that_is_lost_leaves_no_doubt(here, monkeypatch, length):
    """The report is in the batch; sent again it is a duplicate, and its sender is told the truth.

    A report that was there before the first try is no duplicate by accident.
    """
    answered, lost = IntakeService.Submit, []

    async def lose(self, request, caller, context):
        reply = await answered(self, request, caller, context)
        if reply.verdicts and len(lost) < 2:
            lost.extend(reply.verdicts)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
        return reply

    monkeypatch.setattr(IntakeService, "Submit", lose)
    world = here()
    header = world.begin(report_bytes=length)
    sent = [(user, os.urandom(length)) for user in range(3)]
    with IntakeClient(world.process.address, world.process.submit) as intake:
        assert list(intake.submit(header, sent)) == [Verdict.ACCEPTED] * 3
        assert Verdict.ACCEPTED in lost
        assert list(intake.submit(header, sent)) == [Verdict.DUPLICATE] * 3
    assert sorted(world.released(header)) == sorted(sealed for _, sealed in sent)


def test_a_piece_that_is_sent_again_too_late_takes_no_report_out_of_the_batch(here, monkeypatch):
    """Its answer was lost, the other piece completed the report, and the round was closed."""
    answered, calls = IntakeService.Submit, itertools.count()

    def close():
        batch = world.process.store._runs["run"].rounds[1].batch
        wait_until(lambda: batch.count, LIMIT, "the other piece")
        assert world.control.close_round("run", 1).outcome is Outcome.RELEASABLE

    async def lose(self, request, caller, context):
        number = next(calls)
        if number == 2:
            await asyncio.to_thread(close)
        reply = await answered(self, request, caller, context)
        if number == 0:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the line is cut")
        return reply

    monkeypatch.setattr(IntakeService, "Submit", lose)
    world, sealed = here(), os.urandom(2 * PIECE_BYTES)
    header = world.begin(report_bytes=len(sealed))
    assert world.submit(header, [(0, sealed)]) == [Verdict.ACCEPTED]
    assert next(calls) == 3
    assert list(world.control.release("run", 1)) == [sealed]


def test_waits_are_drawn_from_bounds_that_double(monkeypatch):
    bounds = []
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=bounds.append)
    monkeypatch.setattr("shufl.shuffler.wire.connection.time", clock)
    monkeypatch.setattr(
        "shufl.shuffler.wire.connection._random.uniform", lambda low, high: low + high
    )
    retries = Retries(float("inf"))
    for _ in range(8):
        retries.wait(ShufflerRefused(Refusal.BUSY))
    retries.wait(ShufflerRefused(Refusal.IDLE))
    assert bounds == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])
    for error in (ShufflerRefused(Refusal.NOT_PERMITTED), ShufflerRefused(Refusal.STORAGE_FULL)):
        with pytest.raises(ShufflerRefused):
            retries.wait(error)
    with pytest.raises(ShufflerRefused):
        Retries(0.0).wait(ShufflerRefused(Refusal.BUSY))
