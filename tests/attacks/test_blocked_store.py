"""A server that takes all the room there is, and nodes that hold what they do not use."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from run_world import LIMIT
from shuffler_world import ShufflerHere, World, plan, raw_channel, refusal, stub_of
from shufl.shuffler import (
    ControlClient,
    Outcome,
    Refusal,
    ShufflerRefused,
    Verdict,
    report_length,
    sealed_length,
)
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.service.control_service import ControlService
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES

UPLOADS = 8


def test_one_server_cannot_take_what_others_need(here):
    authority = Authority.create()
    limits = {"runs_per_server": 3, "open_rounds_per_server": 2, "disk_gigabytes_per_server": 0.011}
    world = here(authority=authority, limits=limits)
    for run in "ab":
        world.control.create_run(run, plan(100), 40_000)
    world.control.create_run("c", plan(1), 40_000)
    assert refusal(world.control.create_run, "d", plan(100), 40_000) is Refusal.TOO_MANY_RUNS
    headers = [world.begin(run, users=100, report_bytes=40_000) for run in "ab"]
    asked = "c", 1, "m", world.public_key
    assert refusal(world.control.open_round, *asked) is Refusal.TOO_MANY_ROUNDS
    reports = [(user, os.urandom(40_000)) for user in range(100)]
    assert set(world.submit(headers[0], reports)) == {Verdict.ACCEPTED}
    assert set(world.submit(headers[1], reports)) == {Verdict.ACCEPTED}
    other = authority.issue(Role.SERVER, "other")
    with ControlClient(world.process.address, other) as control:
        world.control.close()
        world.control = control
        header = world.begin("other's", users=100)
        accepted = world.submit(header, world.reports(header, 2))
    assert accepted == [Verdict.ACCEPTED] * 2


@pytest.mark.parametrize("sent", [0, 100])
def test_a_server_that_fills_its_room_does_not_learn_how_many_have_reported(here, sent: int):
    """Without cover that number and the released one would tell the number of blankets."""
    fits = 9_000_000 // 40_000 - 100
    world = here(limits={"disk_gigabytes_per_server": 0.009})
    header = world.begin("honest", users=100, report_bytes=40_000)
    reports = [(user, os.urandom(40_000)) for user in range(sent)]
    assert world.submit(header, reports) == [Verdict.ACCEPTED] * sent
    for probe in range(fits - 3, fits + 4):
        world.control.create_run(str(probe), plan(probe), 40_000)
        if probe <= fits:
            world.control.open_round(str(probe), 1, "m", world.public_key)
            world.control.end_round(str(probe), 1)
            continue
        with pytest.raises(ShufflerRefused, match="this server would take") as refused:
            world.control.open_round(str(probe), 1, "m", world.public_key)
        assert refused.value.reason is Refusal.STORAGE_FULL


def test_reports_that_are_begun_and_not_ended_take_nobody_s_room(here):
    """As many as may be on their way, by users who then do not report."""
    authority, length = Authority.create(), PIECE_BYTES + 1
    world = here(authority=authority, limits={"uploads": UPLOADS})
    header = world.begin(users=20, report_bytes=length)
    about = {"run_id": "run", "round": 1, "commitment": header.commitment, "length": length}
    holder = authority.issue(Role.NODE, "holder", users=20)
    with raw_channel(world, holder) as channel:
        for user in range(UPLOADS):
            first = shuffler_pb2.SubmitRequest(
                users=[user], sealed=bytes(PIECE_BYTES), upload=user, **about
            )
            assert not stub_of("Intake", channel).Submit(first, timeout=LIMIT).verdicts
    reports = [(user, os.urandom(length)) for user in range(20)]
    assert world.submit(header, reports) == [Verdict.ACCEPTED] * 20
    assert world.control.close_round("run", 1).outcome.name == "RELEASABLE"
    assert len(list(world.control.release("run", 1))) == 20


def test_the_blankets_of_one_server_s_round_do_not_hold_up_another_s(
    here, monkeypatch: pytest.MonkeyPatch
):
    """The first one's are not made before the test says so."""
    authority, over = Authority.create(), threading.Event()
    world = here(authority=authority)
    batches = world.process.store.batches
    make = batches.make_blankets

    def make_more(run: str, round: int) -> bool:
        return make(run, round) or (run == "many" and not over.is_set())

    monkeypatch.setattr(batches, "make_blankets", make_more)
    length, about = sealed_length(report_length(100)), plan(shuffler_blankets=2.0)
    world.control.create_run("many", about, length)
    world.control.open_round("many", 1, "m", world.public_key)
    other = authority.issue(Role.SERVER, "other")
    with ControlClient(world.process.address, other) as control, ThreadPoolExecutor() as threads:
        closing = threads.submit(world.control.close_round, "many", 1)
        control.create_run("few", about, length)
        control.open_round("few", 1, "m", world.public_key)
        assert control.close_round("few", 1).outcome.name in ("RELEASABLE", "BELOW_MINIMUM")
        assert not closing.done()
        world.control.end_round("many", 1)
        assert closing.result(LIMIT).outcome is Outcome.DISCARDED
        over.set()


def test_a_round_that_is_closed_while_it_is_opened_still_gets_all_its_blankets(
    monkeypatch: pytest.MonkeyPatch,
):
    """Fewer of them would hide the users' reports less than its ε says."""
    opening, asked, go_on, over = (threading.Event() for _ in range(4))

    async def check_nothing(_: object, request: object, caller: object) -> None:
        """As for the owner; the check would wait in the store's thread."""
        if isinstance(request, shuffler_pb2.CloseRoundRequest):
            asked.set()

    monkeypatch.setattr(ControlService, "_check_owner", check_nothing)
    with ShufflerHere() as shuffler, ThreadPoolExecutor() as threads:
        world, store = World(shuffler), shuffler.store
        open_round, make = store.open_round, store.batches.make_blankets

        def open_slowly(*about: object) -> bytes:
            opening.set()
            go_on.wait(LIMIT)
            return open_round(*about)

        monkeypatch.setattr(store, "open_round", open_slowly)
        monkeypatch.setattr(
            store.batches, "make_blankets", lambda *of: not over.is_set() or make(*of)
        )
        about = plan(5, 1, shuffler_blankets=50.0)
        world.control.create_run("run", about, sealed_length(report_length(100)))
        opened = threads.submit(world.control.open_round, "run", 1, "m", world.public_key)
        assert opening.wait(LIMIT)
        closing = threads.submit(world.control.close_round, "run", 1)
        assert asked.wait(LIMIT)
        go_on.set()
        opened.result(LIMIT)
        assert refusal(store.close_round, "run", 1) is Refusal.WINDOW_NOT_OVER
        over.set()
        assert closing.result(LIMIT).outcome is Outcome.RELEASABLE
        entry = store._runs["run"].rounds[1]
        assert entry.batch.count == entry.blankets
        world.close()
