"""Streams that are kept open with messages that bring nothing."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from shuffler_world import World, raw_channel
from shufl.shuffler import IntakeClient, ShufflerProcess, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.stub import Stub

IDLE = 3.0
STREAMS = 24


@pytest.mark.slow
@pytest.mark.parametrize("idle", [IDLE, 3600.0], ids=["ended", "displaced"])
def test_six_users_with_junk_do_not_hold_all_streams(idle: float):
    """Each of their streams says something well before it would be silent for too long."""
    authority = Authority.create()
    limits = {"streams": STREAMS, "streams_per_sender": 4, "idle_seconds": idle}
    stop = threading.Event()

    def hold(world: World, number: int) -> None:
        own = authority.issue(Role.NODE, f"junk-{number}", users=1)

        def junk():
            while not stop.is_set():
                yield shuffler_pb2.SubmitRequest(run_id="nobody", users=[0])
                stop.wait(IDLE / 6)

        with raw_channel(world, own) as channel:
            while not stop.is_set():
                try:
                    for _ in Stub("Intake", channel).Submit(junk(), timeout=60):
                        pass
                except grpc.RpcError:
                    time.sleep(0.01)

    with ShufflerProcess(authority=authority, limits=limits) as process:
        world = World(process)
        header = world.begin()
        # By four streams of each of six users.
        threads = [threading.Thread(target=hold, args=(world, n // 4)) for n in range(STREAMS)]
        for thread in threads:
            thread.start()
        try:
            stop.wait(IDLE)
            for user, sealed in world.reports(header, 5):
                with IntakeClient(process.address, process.submit) as honest:
                    verdicts = list(honest.submit(header, [(user, sealed)], deadline=30))
                    assert verdicts == [Verdict.ACCEPTED]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        world.close()


@pytest.mark.slow
def test_a_report_that_never_ends_keeps_no_stream():
    """One byte of it every now and then is not what an honest node brings."""
    authority = Authority.create()
    slow = authority.issue(Role.NODE, "slow", users=1)
    with ShufflerProcess(authority=authority, limits={"idle_seconds": IDLE}) as process:
        world = World(process)
        header = world.begin(report_bytes=2**20, users=40)
        first = {"run_id": "run", "round": 1, "commitment": header.commitment}
        stop = threading.Event()

        def trickle():
            yield shuffler_pb2.SubmitRequest(**first, users=[0], sealed=b"x", more=True)
            while not stop.wait(IDLE / 6):
                yield shuffler_pb2.SubmitRequest(sealed=b"x", more=True)

        with raw_channel(world, slow) as channel, pytest.raises(grpc.RpcError) as ended:
            list(Stub("Intake", channel).Submit(trickle(), timeout=60))
        stop.set()
        assert ended.value.details() == "IDLE: nothing came for too long"
        world.close()
