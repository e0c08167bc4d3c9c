"""Calls and long reports that are begun, and bring nothing."""

import itertools
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Event

import grpc
import pytest

from run_world import LIMIT, wait_until
from shuffler_world import ShufflerHere, Silence, World, raw_channel, stub_of
from shufl.shuffler import IntakeClient, Verdict
from shufl.shuffler.callers import Role
from shufl.shuffler.config import Limits
from shufl.shuffler.keys import Authority
from shufl.shuffler.wire import shuffler_pb2
from shufl.shuffler.wire.channel import PIECE_BYTES

NODES = 6
DEFAULTS = Limits()
LIMITS = {
    "calls": 4 * (NODES + 1),  # what `shufl provision` writes where there are many nodes
    "calls_per_sender": DEFAULTS.calls_per_sender,
    "uploads": DEFAULTS.uploads,
}
LENGTH = 3 * PIECE_BYTES


@contextmanager
def attacked(attack):
    """A shuffler, while all its nodes but one do this until the event is set."""
    authority, stop = Authority.create(), Event()
    with ShufflerHere(authority=authority, limits=LIMITS) as shuffler, ExitStack() as stack:
        world = World(shuffler)
        senders = [authority.issue(Role.NODE, f"junk-{n}", users=100) for n in range(NODES)]
        channels = [stack.enter_context(raw_channel(world, sender)) for sender in senders]
        with ThreadPoolExecutor(1) as threads:
            attacking = threads.submit(attack, world, channels, stop)
            try:
                yield world
            finally:
                stop.set()
            attacking.result(LIMIT)
        world.close()


def test_nodes_with_silent_calls_do_not_hold_all_calls():
    """Each opens as many as it may, and keeps those that the shuffler does not refuse."""
    silence, held = Silence(), Event()

    def hold(world, channels, stop):
        calls = [
            channel.stream_stream("/shufl.v1.Intake/Submit")(iter(silence))
            for channel in channels
            for _ in range(DEFAULTS.calls_per_sender)
        ]
        callers = world.process._server._gate.permitted._callers
        wait_until(
            lambda: len(callers) == sum(call.is_active() for call in calls), LIMIT, "their calls"
        )
        held.set()
        stop.wait(LIMIT)
        silence.let_go.set()
        for call in calls:
            call.cancel()

    with attacked(hold) as world:
        header = world.begin()
        assert held.wait(LIMIT)
        for user, sealed in world.reports(header, 5):
            with IntakeClient(world.process.address, world.process.submit, LIMIT) as honest:
                assert list(honest.submit(header, [(user, sealed)])) == [Verdict.ACCEPTED]


@pytest.mark.parametrize("pieces", [1, 2])
def test_nodes_with_junk_do_not_hold_all_long_reports(pieces):
    """They begin new ones all the time, and have no one of them come to its end."""
    begun = Event()

    def hold(world, channels, stop):
        header = world.begin(report_bytes=LENGTH)
        for upload in itertools.count():
            for channel, start in itertools.product(channels, range(pieces)):
                if stop.is_set():
                    return
                with suppress(grpc.RpcError):  # too many
                    stub_of("Intake", channel).Submit(
                        shuffler_pb2.SubmitRequest(
                            run_id="run", round=1, commitment=header.commitment, users=[0],
                            sealed=bytes(PIECE_BYTES), length=LENGTH, upload=upload,
                            start=start * PIECE_BYTES,
                        )
                    )  # fmt: skip
            if upload == DEFAULTS.uploads:
                begun.set()

    with attacked(hold) as world:
        assert begun.wait(LIMIT)
        digest = world.process.store._runs["run"].rounds[1].header
        for user in range(5):
            with IntakeClient(world.process.address, world.process.submit, LIMIT) as honest:
                verdicts = list(honest.submit(digest, [(user, os.urandom(LENGTH))]))
            assert verdicts == [Verdict.ACCEPTED]
