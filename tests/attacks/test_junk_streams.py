"""Streams that are kept open with messages that bring nothing."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import grpc
import pytest

from run_world import LIMIT
from shuffler_world import ShufflerHere, World, raw_channel, wait_for_streams
from shufl.shuffler import IntakeClient, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.keys import Authority
from shufl.shuffler.service import streams
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.stub import Stub

IDLE = 0.3
STREAMS = 24


@pytest.mark.parametrize("idle", [3.0, 3600.0], ids=["ended", "displaced"])  # 24 begin within it
def test_six_users_with_junk_do_not_hold_all_streams(idle: float, monkeypatch: pytest.MonkeyPatch):
    """Each of their streams says something well before it would be silent for too long."""
    monkeypatch.setattr(streams, "_GRACE_SECONDS", IDLE / 6)
    authority = Authority.create()
    limits = {"streams": STREAMS, "streams_per_sender": 4, "idle_seconds": idle}
    stop = threading.Event()

    def hold(channel: grpc.Channel) -> None:
        def junk():
            while not stop.is_set():
                yield shuffler_pb2.SubmitRequest(run_id="nobody", users=[0])
                stop.wait(min(idle, 3.0) / 6)

        while not stop.wait(0.01):
            with suppress(grpc.RpcError):
                list(Stub("Intake", channel).Submit(junk(), timeout=LIMIT))

    with ShufflerHere(authority=authority, limits=limits) as shuffler, ExitStack() as stack:
        world = World(shuffler)
        header = world.begin()
        senders = [authority.issue(Role.NODE, f"junk-{number}", users=1) for number in range(6)]
        channels = [stack.enter_context(raw_channel(world, sender)) for sender in senders]
        with ThreadPoolExecutor(STREAMS) as threads:  # by four streams of each of six users
            for number in range(STREAMS):
                threads.submit(hold, channels[number // 4])
            try:
                wait_for_streams(shuffler, STREAMS)
                for user, sealed in world.reports(header, 5):
                    with IntakeClient(shuffler.address, shuffler.submit, LIMIT) as honest:
                        assert list(honest.submit(header, [(user, sealed)])) == [Verdict.ACCEPTED]
            finally:
                stop.set()
        world.close()


def test_a_report_that_never_ends_keeps_no_stream():
    """One byte of it every now and then is not what an honest node brings."""
    authority = Authority.create()
    slow = authority.issue(Role.NODE, "slow", users=1)
    with ShufflerHere(authority=authority, limits={"idle_seconds": IDLE}) as shuffler:
        world = World(shuffler)
        header = world.begin(report_bytes=2**20, users=40)
        first = {"run_id": "run", "round": 1, "commitment": header.commitment}
        stop = threading.Event()

        def trickle():
            yield shuffler_pb2.SubmitRequest(**first, users=[0], sealed=b"x", more=True)
            while not stop.wait(IDLE / 6):
                yield shuffler_pb2.SubmitRequest(sealed=b"x", more=True)

        with raw_channel(world, slow) as channel, pytest.raises(grpc.RpcError) as ended:
            list(Stub("Intake", channel).Submit(trickle(), timeout=LIMIT))
        stop.set()
        assert ended.value.details() == "IDLE: nothing came for too long"
        world.close()
